"""--mode=eval: evaluates a checkpoint, or a published model, on any problem set.

1. the weights come from a checkpoint of the workdir; without one, from model.path;
2. responses to problems.test_source are sampled and verified as in training;
3. results go to a table (.md) and one JSON line per response (.jsonl), which has the
   prompt as the policy reads it, with the number of a picture's patches.
"""

import contextlib
import json
import os
from typing import Any

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data import pictured_problems, prompts
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.run import experiment
from bapo_jax.runtime import files
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.runtime.workdir import check_writable, writable
from bapo_jax.tools import export
from bapo_jax.training import checkpoint, evaluate, policy, setup, weights
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.types import Tree

# Sections that determine the responses and their verdicts.
SETTINGS = (
  'seed',
  'tokenizer',
  'problems',
  'prompts',
  'sampler',
  'rewards',
  'evaluate',
)


def eval_checkpoint(
  config: Config, workdir: str, to: str, which: str = 'newest'
) -> int:
  """Evaluates weights, prints the table and writes `to`.jsonl and `to`.md.

  Args:
    to: path without suffix; '': <workdir>/eval/<step or 'model'>-<fingerprint of the
      settings>.
    which: newest, best or a step; see checkpoint.choose.

  Returns:
    The exit status, 0.

  Raises:
    ValueError: there are no weights, or the workdir is of another model.
  """
  # The training problems are not read, and may be absent.
  config = config.with_values(problems={'source': config.problems.test_source})
  step = checkpoint.choose(workdir, which)
  if step is not None:
    export.check_config(config, workdir)
  elif not config.model.path:
    raise ValueError(
      f'--workdir={workdir} holds no checkpoint and --config.model.path names no '
      'model; train there first (the same command without --mode=eval), or give one'
    )
  setup.check_available(config)
  values = config_lib.plain(config)
  settings = {name: values[name] for name in SETTINGS}
  name = f'{"model" if step is None else step}-{config_lib.fingerprint(settings)}'
  knob = f'--eval_to={to}' if to else f'--workdir={workdir}'
  to = to or os.path.join(workdir, 'eval', name)
  # Before the evaluation, which may take hours.
  for path in (workdir, os.path.dirname(to) or '.'):
    check_writable(path, knob)
  with writable(workdir):
    source, result, samples = _run(config, workdir, step)
  settings |= {'model': source}
  table = evaluate.table(result, f'{source} on {config.problems.test_source}')
  files.write(f'{to}.md', table)
  lines = (json.dumps(sample | {'settings': settings}) for sample in samples)
  files.write(f'{to}.jsonl', ''.join(f'{line}\n' for line in lines))
  log(f'{table}\nEvery response: {to}.jsonl')
  return 0


def _run(
  config: Config, workdir: str, step: int | None
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
  """Returns (source of the weights, result, samples); step None: model.path."""
  mesh, timer = setup.make_mesh(config), PhaseTimer()
  material = read(config, workdir)
  if step is None:
    source = config.model.path
    spec, params = policy.load(config, workdir, material.tokenizer, mesh, timer)
  else:
    source = os.path.join(workdir, 'checkpoints', str(step))
    spec = policy.spec_of(config, material.tokenizer)
    params = restored(policy.reader(config, workdir, step), spec, mesh)
  with contextlib.closing(setup.make_verifier(config)) as verifier:
    t = setup.make_trainer(config, material, spec, mesh, verifier, timer)
    result, samples = experiment.evaluation(t, params, step or 0)
  held_out = material.held_out
  texts = tokenizer_lib.decode_prompts(
    material.tokenizer, held_out.tokens_NT, held_out.length_N, spec.image_token
  )
  return source, result, [s | {'prompt': texts[s['id']]} for s in samples]


def read(config: Config, workdir: str) -> setup.Material:
  """Reads tokenizer and held-out problems, and uses them as training problems too.

  Only one set is read, so no overlap is reported.

  Raises:
    ValueError: as `setup.read`.
  """
  tokenizer = policy.load_tokenizer(config)
  policy.check_vocabulary(config, tokenizer)
  vision = policy.spec_of(config, tokenizer).vision
  knobs = config.prompts, config.problems
  if vision is None:
    held_out = prompts.load_held_out(tokenizer, workdir, *knobs)
  else:
    held_out = pictured_problems.load_held_out(tokenizer, *knobs, vision)
  return setup.Material(tokenizer, held_out, held_out)


def restored(read: weights.Read, spec: ModelSpec, mesh: Mesh) -> Tree:
  """Reads the weights of a checkpoint onto the mesh, one parameter at a time."""
  layout = sharding.shardings(transformer.abstract(spec), mesh)
  return transformer.unflatten(
    {
      path: jax.device_put(read(path), place)
      for path, place in transformer.flatten(layout).items()
    }
  )
