"""The command line: python -m bapo_jax.main --config=configs/aime.py [--workdir=...]

1. absl parses the flags, `load` runs the config file, `overrides` the --config.<knob>;
2. `parse_config` validates every knob, before JAX is imported;
3. `run` does what --mode says.

An error of the user is one sentence on stderr and exit status 2, before anything is
written or compiled.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags, logging

from bapo_jax.runtime import hosts, signals
from bapo_jax.training.config import Config
from bapo_jax.training.config import parse as parse_config
from bapo_jax.training.overrides import OVERRIDE, decided, load, overrides

CONFIG = flags.DEFINE_string(
  'config', None, 'A file of configs/, with `:variant` where it has some.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/default', 'Everything a run writes; give it again to resume.'
)
MODE = flags.DEFINE_enum(
  'mode',
  'train',
  ['train', 'check', 'eval', 'export', 'plan', 'show', 'table'],
  'What to do; table: compares the seeds of a sweep, in the folders of --workdir.',
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
EXPORT_AS = flags.DEFINE_enum(
  'export_as',
  'merged',
  ['merged', 'adapter'],
  'adapter: lora.* adapters alone, as a directory that peft loads.',
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
MEAN_SHARE = flags.DEFINE_float(
  'mean_share', 1.0, 'Mean row over the longest, for --mode=plan.', 1e-6, 1.0
)
SEARCH = flags.DEFINE_boolean(
  'search', False, '--mode=plan compares all meshes by hand counts, compiling nothing.'
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', '', 'host:port of process 0, where several run; empty: detected.'
)
PROCESS = flags.DEFINE_integer('process', None, 'Which of them this is, from 0.')
PROCESSES = flags.DEFINE_integer('processes', None, 'How many there are.')
START_S = flags.DEFINE_float(
  'start_s', hosts.START_S, 'Seconds to wait for the other processes.', lower_bound=1
)


def parse(argv: list[str]) -> list[str]:
  """absl's parser.

  Returns:
    The name of the program and the overrides.
  """
  try:
    argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    given = [arg for arg in argv[1:] if OVERRIDE.fullmatch(arg)]
    left = flags.FLAGS([arg for arg in argv if arg not in given])
  except (flags.Error, OSError) as error:
    fail(error)
  if len(left) > 1:
    fail(f'what is {left[1]!r}? Overrides look like --config.steps=10')
  return [left[0], *given]


def read_config(file: str, given: list[str]) -> Config:
  """The config of a file and the overrides, validated.

  Raises:
    ValueError: one sentence.
  """
  values = load(file)
  for name, value in overrides(given).items():
    *sections, key = name.split('.')
    section = values
    for each in sections:
      section = section.setdefault(each, {})
      if not isinstance(section, dict):
        raise ValueError(f'{each}={section!r}: it is a section; set its knobs instead')
    section[key] = value
  return parse_config(decided(values))


def fail(error: object) -> NoReturn:
  """Prints one sentence on stderr and exits with status 2, with all processes."""
  sentence = ' '.join(str(error).split())
  print(f'bapo_jax: {sentence}', file=sys.stderr)
  hosts.leave(2, sentence)
  sys.exit(2)


# What libtpu wants on a host without a TPU. The two efforts halve the time to compile
# and do not change the memory.
PLANNING = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': '-1',
  'JAX_MEMORY_FITTING_EFFORT': '-1',
}


def plan(config: Config) -> int:
  """Compiles for --topology; the exit status is 0 where all of it fits, else 1."""
  if importlib.util.find_spec('libtpu') is None:
    fail(
      '--mode=plan compiles with libtpu, which is not installed; '
      'pip install -r requirements-tpu.txt (no TPU is needed)'
    )
  os.environ.update(PLANNING)
  from bapo_jax.tools.plan import plan

  if SEARCH.value:
    return 0 if plan.run_search(config, TOPOLOGY.value) else 1
  return 0 if plan.run(config, TOPOLOGY.value, MEAN_SHARE.value) else 1


def show(config: Config) -> int:
  """Shows recorded groups."""
  del config
  from bapo_jax.tools import viewer

  return viewer.show(
    WORKDIR.value, SHOW_GROUP.value, SHOW_WITH.value, which=CHECKPOINT.value
  )


def check(config: Config) -> int:
  """Checks a run before it begins; the exit status is 1 where a mistake is certain."""
  from bapo_jax.autosetup import check

  return check.check(config, WORKDIR.value)


def export(config: Config) -> int:
  """Exports a checkpoint."""
  from bapo_jax.tools import export

  return export.export(
    config,
    WORKDIR.value,
    EXPORT_TO.value,
    EXPORT_DTYPE.value,
    int(EXPORT_SHARD_GB.value * 1e9),
    CHECKPOINT.value,
    adapter=EXPORT_AS.value == 'adapter',
  )


def evaluate(config: Config) -> int:
  """Evaluates a checkpoint or a published model."""
  from bapo_jax.tools import eval_checkpoint

  return eval_checkpoint.eval_checkpoint(
    config, WORKDIR.value, EVAL_TO.value, CHECKPOINT.value
  )


def table(config: Config) -> int:
  """Compares the seeds of a sweep."""
  del config
  from bapo_jax.tools import sweep

  return sweep.table(WORKDIR.value)


def train(config: Config) -> int:
  """Trains one run, or every cell of a sweep."""
  if config.cells:
    from bapo_jax.tools import sweep

    return sweep.run(config, WORKDIR.value)
  from bapo_jax.run import experiment

  return experiment.train(config, WORKDIR.value)


# Each imports what it needs: a bad flag does not wait for JAX to load.
MODES: dict[str, Callable[[Config], int]] = {
  'train': train,
  'check': check,
  'eval': evaluate,
  'export': export,
  'plan': plan,
  'show': show,
  'table': table,
}


def join(config: Config) -> None:
  """Joins the other processes, if any, and checks that all run the same.

  Raises:
    ValueError: there are several, and this is no training run; or they differ.
  """
  if MODE.value != 'train' or config.cells:
    if PROCESSES.value is not None:
      what = f'--mode={MODE.value}' if MODE.value != 'train' else 'a sweep'
      raise ValueError(
        f'--processes={PROCESSES.value}: {what} runs in one process; only a training '
        'run has several'
      )
    return
  hosts.initialise(COORDINATOR.value, PROCESS.value, PROCESSES.value, START_S.value)
  if hosts.processes() > 1:
    from bapo_jax.runtime import versions

    hosts.same_everywhere({'config': config.model_dump()} | versions.all_of_them())


def run(config: Config) -> int:
  """Does what --mode says; returns the exit status."""
  mode = MODE.value
  if mode in ('train', 'table') and CHECKPOINT.value != 'newest':
    fail(
      f'--checkpoint={CHECKPOINT.value} is for --mode=eval, export and show; a run '
      'always goes on from the newest'
    )
  if config.derived and mode != 'table':
    from bapo_jax.autosetup import derive

    config = derive.resolve(config, WORKDIR.value)
  return MODES[mode](config)


def ignore_duplicates(unraisable: Any) -> None:
  """Suppresses duplicate tensorstore errors: a refused write is raised as well."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def main(argv: list[str]) -> None:
  """Does what the flags say; exits with the run's status."""
  if not flags.FLAGS['verbosity'].present:
    # orbax reports every file it opens, and an error with its traceback before raising.
    logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = ignore_duplicates
  # Another duplicate of a refused write, after the sentence on a busy machine.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  file = CONFIG.value
  if file is None:
    fail('give a --config, for instance --config=configs/aime.py')
  try:
    with signals.none_lost():
      config = read_config(file, argv[1:])
      join(config)
      status = run(config)
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
    hosts.leave(130, 'stopped at once')
    os._exit(130)  # sys.exit waits for a checkpoint that is being written
  except Exception as error:
    if hosts.processes() == 1:
      raise
    hosts.failed(error)
  hosts.finish(status)
  sys.exit(status)


if __name__ == '__main__':
  app.run(main, flags_parser=parse)
