"""--mode=eval: a checkpoint, or a model as it was published, on any problem set.

1. whose weights: a checkpoint of the workdir; where it holds none, those of model.path;
2. its answers to problems.test_source, through the rollout door of training;
3. a table (.md) and one JSON line a response (.jsonl) that says all an audit needs.
"""

import contextlib
import copy
import json
import os

import jax
from flax import traverse_util

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.runtime import files
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.tools import export
from bapo_jax.training import checkpoint, evaluate, setup, validate

# What decides which responses come and how they are judged.
ASKED = ('seed', 'text', 'problems', 'prompts', 'sampler', 'rewards', 'evaluate')


def eval_checkpoint(config, workdir: str, to: str, which: str = 'newest') -> int:
  """Evaluates, prints the table, writes `to`.jsonl and `to`.md.

  Args:
    to: '' stands for <workdir>/eval/<step or 'model'>-<fingerprint of the settings>.
    which: of the checkpoints; see checkpoint.choose.

  Returns:
    The exit status, 0.

  Raises:
    ValueError: there are no weights, or those of the workdir are another model's.
  """
  config = copy.deepcopy(config)
  # The training problems are of no use here, and need not be at hand.
  config.problems.source = config.problems.test_source
  step = checkpoint.choose(workdir, which)
  if step is not None:
    export.check_config(config, workdir)
  elif not config.model.path:
    raise ValueError(
      f'--workdir={workdir} holds no checkpoint and --config.model.path names no '
      'model; train there first (the same command without --mode=eval), or give one'
    )
  validate.check(config)
  settings = {name: config.to_dict()[name] for name in ASKED}
  name = f'{"model" if step is None else step}-{setup.fingerprint(settings)}'
  to = to or os.path.join(workdir, 'eval', name)
  with contextlib.closing(setup.judging(config)) as judge:
    source, result, samples = run(config, workdir, step, judge)
  settings |= {'model': source}
  os.makedirs(os.path.dirname(to) or '.', exist_ok=True)
  table = evaluate.table(result, f'{source} on {config.problems.test_source}')
  files.write(f'{to}.md', table)
  lines = (json.dumps(sample | {'settings': settings}) for sample in samples)
  files.write(f'{to}.jsonl', ''.join(f'{line}\n' for line in lines))
  log(f'{table}\nEvery response: {to}.jsonl')
  return 0


def run(config, workdir: str, step: int | None, judge):
  """(whose weights, result, samples) of the checkpoint `step` or of model.path."""
  devices = sharding.make(**config.mesh)
  asked = copy.deepcopy(config)
  asked.prompts.count = 1  # nothing is trained on: a set of any size will do
  reader, (_, held_out) = setup.read(asked, workdir)
  if step is None:
    source = config.model.path
    spec, params = setup.policy(config, workdir, reader, devices, PhaseTimer())
  else:
    source = os.path.join(workdir, 'checkpoints', str(step))
    spec = setup.spec_of(config, reader)
    params = restored(workdir, step, spec, devices)
  test = setup.evaluating(config, reader, held_out, spec, devices, judge)
  return source, *test(params, step or 0)


def restored(workdir: str, step: int, spec: transformer.ModelSpec, devices):
  """A checkpoint's weights laid out over the mesh, one parameter at a time."""
  like = transformer.abstract(spec)
  layout = traverse_util.flatten_dict(sharding.shardings(like, devices), sep='/')
  read = checkpoint.read_params(workdir, step)
  flat = {path: jax.device_put(read(path), layout[path]) for path in layout}
  return traverse_util.unflatten_dict(flat, sep='/')
