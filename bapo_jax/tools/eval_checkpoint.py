"""Evaluates a checkpoint, or a published model, on any problem set: `bapo eval`.

Responses to problems.test_source are sampled as in training. Writes a table (.md) and
one JSON line per response (.jsonl) with the prompt as the policy reads it, where a
picture is replaced by its number of patches.
"""

import contextlib
import json
import os

import jax

from bapo_jax import sharding
from bapo_jax.autosetup import derive
from bapo_jax.data import prompts, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import transformer
from bapo_jax.run import experiment
from bapo_jax.runtime import cache, digests, files
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.runtime.workdir import check_writable
from bapo_jax.tools import export
from bapo_jax.training import build, evaluate, policy
from bapo_jax.training.checkpoint import choose
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved

# Sections that determine the responses and their verdicts.
SETTINGS = 'seed tokenizer problems prompts sampler rewards evaluate'


def eval_checkpoint(
  config: Config,
  workdir: str = 'runs/default',
  to: str = '',
  checkpoint: str = 'newest',
) -> int:
  """Evaluates weights, prints a table, writes `to`.jsonl and `to`.md; returns 0.

  Without checkpoints, evaluates the model. An empty `to` means <workdir>/eval/<step or
  'model'>-<fingerprint of the settings>.

  Args:
    config: the config of the run, with the problems of the evaluation.
    workdir: directory of all results
    checkpoint: newest, best or a step
    to: what to write; empty: in <workdir>/eval

  Raises:
    ValueError: there are no weights, the workdir has a run of another model, or `to` is
      a file of another program.
  """
  step = choose(workdir, checkpoint)
  if step is not None:
    export.check_config(derive.as_begun(config, workdir), workdir)
  elif not config.model.path:
    raise ValueError(
      f'--workdir={workdir} has no checkpoint and --config.model.path names no '
      'model; train there first, or set model.path'
    )
  r = derive.prepare(config, workdir, trains=False)
  log(derive.screen(r.config, r.derived))
  cache.share_programs(r.config.cache)
  values = r.config.model_dump()
  settings = {name: values[name] for name in SETTINGS.split()}
  knob = f'--to={to}' if to else f'--workdir={workdir}'
  name = f'{"model" if step is None else step}-{digests.fingerprint(settings)}'
  to = to or os.path.join(workdir, 'eval', name)
  # Checked before the evaluation, which may take hours.
  for path in (workdir, os.path.dirname(to) or '.'):
    check_writable(path, knob)
  files.check_ours(f'{to}.md', '| measure ')
  files.check_ours(f'{to}.jsonl', '"settings": {"seed": ')
  source, result, samples = _run(r, workdir, step)
  settings |= {'model': source}
  table = evaluate.table(result, f'{source} on {config.problems.test_source}')
  files.write(f'{to}.md', table)
  lines = (json.dumps(sample | {'settings': settings}) for sample in samples)
  files.write(f'{to}.jsonl', ''.join(f'{line}\n' for line in lines))
  log(f'{table}\nEvery response: {to}.jsonl')
  return 0


def _run(r: Resolved, workdir, step: int | None):
  """Returns (path of the weights, result, samples); step None means the model."""
  timer = PhaseTimer()
  config = r.config
  rows = sources.unique(config.problems, r.data, 'test_source')
  limit = config.prompts
  held_out = prompts.tabulate(
    r.tokenizer, rows, limit.max_prompt_tokens, r.spec.vision, drop=False
  )
  if step is None:
    source = config.model.path
    params = policy.load(r, timer)
  else:
    source = os.path.join(workdir, 'checkpoints', str(step))
    read = policy.reader(config, r.model, workdir, step)
    # Places one parameter at a time on the mesh.
    layout = sharding.shardings(transformer.abstract(r.spec), r.mesh)
    places = transformer.flatten(layout).items()
    params = transformer.unflatten({p: jax.device_put(read(p), at) for p, at in places})
  with contextlib.closing(build.make_verifier(config)) as verifier:
    t = build.make_trainer(r, build.Material(held_out, held_out), verifier, timer)
    result, samples = experiment.evaluation(t, params, step or 0)
  texts = tokenizer_lib.decode_prompts(
    r.tokenizer, held_out.tokens_NT, held_out.length_N, r.spec.image_token
  )
  return source, result, [s | {'prompt': texts[s['id']]} for s in samples]
