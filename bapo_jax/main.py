"""The command line: python -m bapo_jax.main --config=configs/aime.py [--workdir=...]

Errors of the user are one sentence and exit status 2, before anything compiles.
"""

import difflib
import importlib.util
import os
import re
import sys
import warnings

from absl import app, flags, logging
from ml_collections import config_flags

from bapo_jax.training.config import parse as parse_config

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'A file of configs/, with `:variant` where it has some.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/default', 'Everything a run writes; give it again to resume.'
)
MODE = flags.DEFINE_enum(
  'mode',
  'train',
  ['train', 'eval', 'export', 'plan', 'show', 'table'],
  'What to do; table: of the seeds of a sweep, in the folders of --workdir.',
)
CHECKPOINT = flags.DEFINE_string(
  'checkpoint', 'newest', 'Which to eval, export or show: newest, best or a step.'
)
EVAL_TO = flags.DEFINE_string(
  'eval_to', '', 'Files <eval_to>.jsonl and .md; empty: in <workdir>/eval.'
)
SHOW_GROUP = flags.DEFINE_integer(
  'show_group', None, 'Prints this recorded group, from 1; none: turn pages by keys.'
)
SHOW_WITH = flags.DEFINE_string(
  'show_with', '', 'p: token probabilities, c: clip status, a: all of long responses.'
)
EXPORT_TO = flags.DEFINE_string(
  'export_to', '', 'A new directory; empty: <workdir>/export/<step>.'
)
EXPORT_DTYPE = flags.DEFINE_enum(
  'export_dtype', 'float32', ['float32', 'bfloat16'], 'Of the exported numbers.'
)
EXPORT_SHARD_GB = flags.DEFINE_float(
  'export_shard_gb', 5.0, 'Largest exported file, 10^9 bytes.', lower_bound=1e-9
)
TOPOLOGY = flags.DEFINE_string(
  'topology', 'v5p:2x2x4', 'What --mode=plan compiles for; it need not be attached.'
)
OVERRIDE = re.compile(r'--?config\.([^=]+)')


def parse(argv):
  """absl's parser, its errors cut down to the sentence that helps."""
  overrides = [arg for arg in argv[1:] if OVERRIDE.match(arg)]
  try:
    # The file first, by itself: an override can then be compared with what it knows.
    # (ml_collections looks for overrides in sys.argv, whatever it is given to parse.)
    sys.argv = [arg for arg in argv if arg not in overrides]
    flags.FLAGS(sys.argv)
    sys.argv = argv
    if CONFIG.value is None:
      fail('give a --config, for instance --config=configs/aime.py')
    known = [name for name, _ in leaves(CONFIG.value.to_dict())]
    for override in overrides:
      name = OVERRIDE.match(override)[1]
      if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
        fail(f'no knob --config.{name}; the nearest are {", ".join(near)}')
    left = flags.FLAGS(argv)
  except (flags.Error, ValueError, TypeError, OSError) as error:
    # A config file that raises comes with its traceback; its last line says why.
    fail(str(error).strip().splitlines()[-1].removeprefix('ValueError: '))
  if len(left) > 1:
    fail(f'what is {left[1]!r}? Overrides look like --config.steps=10')
  return left


def leaves(tree: dict, prefix: str = ''):
  """(dotted name, value) of everything that is not a section."""
  for name, value in tree.items():
    if isinstance(value, dict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def fail(error) -> None:
  """One sentence on stderr, exit status 2."""
  print(f'bapo_jax: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)


# What libtpu wants on a host without a TPU; the two efforts halve the time to compile
# and leave the memory as it is.
PLANNING = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': '-1',
  'JAX_MEMORY_FITTING_EFFORT': '-1',
}


def plan(config) -> int:
  """Compiles for --topology; the exit status is 0 where all of it fits, else 1."""
  if importlib.util.find_spec('libtpu') is None:
    fail(
      '--mode=plan compiles with libtpu, which is not installed; '
      'pip install -r requirements-tpu.txt (no TPU is needed)'
    )
  os.environ.update(PLANNING)
  from bapo_jax.tools.plan import plan

  return 0 if plan.run(config, TOPOLOGY.value) else 1


def quiet(unraisable) -> None:
  """Suppresses duplicate tensorstore errors: a refused write is raised as well."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def run(config) -> int:
  """Runs what --mode says; returns the exit status."""
  # Imported late: a misspelt flag should not wait for JAX to load.
  mode, workdir = MODE.value, WORKDIR.value
  if mode == 'plan':
    return plan(config)
  if mode == 'show':
    from bapo_jax.tools import viewer

    return viewer.show(
      config, workdir, SHOW_GROUP.value, SHOW_WITH.value, which=CHECKPOINT.value
    )
  if mode == 'export':
    from bapo_jax.tools import export

    shard_bytes = int(EXPORT_SHARD_GB.value * 1e9)
    return export.export(
      config,
      workdir,
      EXPORT_TO.value,
      EXPORT_DTYPE.value,
      shard_bytes,
      CHECKPOINT.value,
    )
  if mode == 'eval':
    from bapo_jax.tools import eval_checkpoint

    return eval_checkpoint.eval_checkpoint(
      config, workdir, EVAL_TO.value, CHECKPOINT.value
    )
  if CHECKPOINT.value != 'newest':
    fail(
      f'--checkpoint={CHECKPOINT.value} is for --mode=eval, export and show; a run '
      'always goes on from the newest'
    )
  from bapo_jax.tools import sweep

  if mode == 'table':
    return sweep.table(workdir)
  if config.cells:
    return sweep.run(config, workdir)
  from bapo_jax.training import experiment

  return experiment.train(config, workdir)


def main(argv) -> None:
  """Runs what the flags say; exits with the run's status."""
  del argv
  if not flags.FLAGS['verbosity'].present:
    # orbax reports every file it opens, and an error with its traceback before raising.
    logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = quiet
  # Another duplicate of a refused write, after the sentence on a busy machine.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  try:
    status = run(parse_config(CONFIG.value.to_dict()))
  except ValueError as error:
    fail(error)
  except KeyboardInterrupt:
    print(
      f'Stopped at once. The same command with --workdir={WORKDIR.value} goes on from '
      'what is saved; a warm start is saved when it is done.',
      file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)  # sys.exit waits for a checkpoint that is being written
  sys.exit(status)


if __name__ == '__main__':
  app.run(main, flags_parser=parse)
