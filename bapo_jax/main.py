"""The command line: bapo train --config=configs/aime.py [--workdir=...]

`bapo`, `python -m bapo_jax` and `python -m bapo_jax.main` are the same program, and
`bapo check` is short for `bapo --mode=check`.

1. absl parses the flags, `load` runs the config file, `overrides` the --config.<knob>;
2. `parse_config` validates every knob, before JAX is imported;
3. `run` does what --mode selects.

A user error prints one sentence on stderr and exits with status 2 before anything is
written or compiled.
"""

import os
import pathlib
import runpy
import sys
import warnings
from typing import Any, NoReturn

from absl import app, flags, logging

from bapo_jax import knobs
from bapo_jax.runtime import hosts, machine, signals
from bapo_jax.training import foreign_names, needs
from bapo_jax.training.config import OVERRIDE, Config, decided, load, merged, overrides
from bapo_jax.training.config import parse as parse_config

MODES = {
  'train': 'trains in --workdir, or resumes its run; the default',
  'check': 'samples, takes one update and lists likely mistakes; writes nothing',
  'eval': 'evaluates a checkpoint, or model.path, on the held-out problems',
  'export': 'writes a checkpoint as a directory that transformers and vLLM load',
  'show': 'shows the recorded groups of a run',
  'plan': 'computes memory and time on GPUs or TPUs that are not attached',
  'report': 'writes the page report.html of a run, finished or in progress',
  'compare': 'compares the runs in several workdirs on one page',
}
READERS = ('compare', 'report', 'show')  # read the files of workdirs; need no config
CONFIG = flags.DEFINE_string('config', None, 'A config file, or file:variant.')
WORKDIR = flags.DEFINE_string('workdir', 'runs/default', 'Directory of all results.')
MODE = flags.DEFINE_enum('mode', 'train', list(MODES), 'What to do.')
CHECKPOINT = flags.DEFINE_string(
  'checkpoint', 'newest', 'Checkpoint to eval, export or show: newest, best or a step.'
)
EVAL_TO = flags.DEFINE_string(
  'eval_to', '', 'Writes <eval_to>.jsonl and .md; empty: in <workdir>/eval.'
)
COMPARE_TO = flags.DEFINE_string(
  'compare_to', 'runs/compare.html', 'Page that --mode=compare writes.'
)
SHOW_GROUP = flags.DEFINE_integer(
  'show_group', None, 'Prints this recorded group, from 1; not given: browse with keys.'
)
SHOW_WITH = flags.DEFINE_string(
  'show_with', '', 'p: token probabilities, c: clip status, a: long responses in full.'
)
EXPORT_TO = flags.DEFINE_string(
  'export_to', '', 'New directory to export to; empty: <workdir>/export/<step>.'
)
EXPORT_AS = flags.DEFINE_enum(
  'export_as', 'merged', ['merged', 'adapter'], 'adapter: LoRA alone, as peft reads it.'
)
EXPORT_DTYPE = flags.DEFINE_enum(
  'export_dtype', 'float32', ['float32', 'bfloat16'], 'Type of the exported numbers.'
)
EXPORT_SHARD_GB = flags.DEFINE_float(
  'export_shard_gb', 5.0, 'Limit of an exported file, 10^9 bytes.', lower_bound=1e-9
)
TOPOLOGY = flags.DEFINE_string('topology', 'v5p:2x2x4', 'Devices to plan for.')
MEAN_SHARE = flags.DEFINE_float(
  'mean_share', 1.0, 'Mean row length over the longest, for --mode=plan.', 1e-6, 1.0
)
SEARCH = flags.DEFINE_boolean(
  'search', False, '--mode=plan compares all meshes by counting, without compiling.'
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', '', 'host:port of process 0 of several; empty: detected.'
)
PROCESS = flags.DEFINE_integer('process', None, 'Number of this process, from 0.')
PROCESSES = flags.DEFINE_integer('processes', None, 'Number of processes.')
START_S = flags.DEFINE_float(
  'start_s', hosts.START_S, 'Seconds to wait for the other processes.', lower_bound=1
)


def parse(argv: list[str]) -> list[str]:
  """Parses the flags of absl; returns the name of the program and its arguments.

  They are the overrides, and with --mode=compare the workdirs.
  A mode as the first argument stands for --mode. Without arguments the program prints
  its usage and ends with status 2; with --help it adds all flags and ends with 0.
  """
  if not argv[1:]:
    print(usage(), file=sys.stderr)
    sys.exit(2)
  if argv[1] == 'help' or {'-h', '-help', '--help'} & {*argv}:
    module = flags.FLAGS.find_module_defining_flag('mode')
    print(f'{usage()}\n\nFlags:\n{flags.FLAGS.module_help(module)}')
    sys.exit(0)
  if argv[1] in MODES:
    argv = [argv[0], f'--mode={argv[1]}', *argv[2:]]
  flags.FLAGS.set_gnu_getopt()  # flags may follow the workdirs to compare
  try:
    argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    given = [arg for arg in argv[1:] if OVERRIDE.fullmatch(arg)]
    left = flags.FLAGS([arg for arg in argv if arg not in given])
  except flags.UnrecognizedFlagError as error:
    fail(bare_knob(error.flagname) or error)
  except (flags.Error, OSError) as error:
    fail(error)
  if len(left) > 1 and MODE.value != 'compare':
    fail(
      f'unknown argument {left[1]!r}; a mode comes first ({", ".join(MODES)}), and an '
      'override is written --config.steps=10'
    )
  return [*left, *given]


def bare_knob(name: str) -> str:
  """Returns the refusal of an unknown flag that names a knob; '' if it names none."""
  known = [knob for knob, _, _ in knobs.fields(Config())]
  if name in known:
    return f'no flag --{name}; a knob is written --config.{name}=...'
  advice = foreign_names.translated(name, known)
  written = (
    '' if name in foreign_names.ABSENT else '; knobs are written --config.KNOB=...'
  )
  return advice and f'no flag --{name}; {advice}{written}'


def usage() -> str:
  """Returns the usage of the program: its modes, and the config files that exist."""
  modes = '\n'.join(f'  {mode:8}{does}' for mode, does in MODES.items())
  files = '\n'.join(f'  {file}' for file in config_files())
  return (
    'Usage: bapo MODE --config=FILE[:VARIANT] [--workdir=DIR] [--config.KNOB=VALUE]...'
    f'\n\nModes:\n{modes}\n\nConfigs:\n{files or f"  {NO_CONFIGS}"}\n\n'
    'bapo --help lists all flags, docs/reference/config.md all knobs.'
  )


def config_files() -> list[str]:
  """Returns the files of configs/ with their variants: 'configs/a.py[:x|:y]'.

  Skips files that define no get_config or raise an error.
  """
  found = []
  for path in sorted(pathlib.Path('configs').glob('*.py')):
    try:
      names = runpy.run_path(str(path))
      variants = '|'.join(f':{name}' for name in names.get('VARIANTS', ()))
    except (Exception, SystemExit):  # a user's file may raise anything
      continue
    if 'get_config' in names:
      found.append(f'{path}[{variants}]' if variants else str(path))
  return found


def no_config(problem: str) -> ValueError:
  """Returns an error with the problem and the config files that exist."""
  files = ', '.join(config_files())
  return ValueError(f'{problem}; ' + (f'give one of {files}' if files else NO_CONFIGS))


def read_config(file: str | None, given: list[str]) -> Config:
  """Returns the validated config of a file with the overrides applied.

  Raises:
    ValueError: the file or a knob is invalid, or a given knob has no effect; the
      message is one sentence.
  """
  if not file:
    raise no_config('--config is missing')
  if not os.path.exists(file.split(':', 1)[0]):
    raise no_config(f'--config={file}: no such file')
  values = load(file)
  found = overrides(given, values)
  config = parse_config(decided(merged(values, found)))
  needs.refuse(found, [config])
  return config


def fail(error: object) -> NoReturn:
  """Prints one sentence on stderr; ends all processes of the run with status 2."""
  sentence = ' '.join(str(error).split())
  print(f'bapo_jax: {sentence}', file=sys.stderr)
  hosts.leave(2)
  sys.exit(2)


NO_CONFIGS = (
  'no folder configs/ is here; run in the folder of the repository, or give a config '
  'file of your own, such as a copy of configs/aime.py'
)

# Settings for the compilers for TPUs and GPUs on a host that has none. On TPUs the two
# efforts halve the compile time and do not change the memory.
PLANNING = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': '-1',
  'JAX_MEMORY_FITTING_EFFORT': '-1',
}


def join(config: Config) -> None:
  """Joins the other processes of a training run; checks that all run the same program.

  Raises:
    ValueError: the processes differ.
  """
  if MODE.value != 'train':
    return
  hosts.initialise(COORDINATOR.value, PROCESS.value, PROCESSES.value, START_S.value)
  if hosts.processes() > 1:
    hosts.same_everywhere({'config': config.model_dump()} | machine.versions())


def read(workdirs: list[str]) -> int:
  """Does what a mode of READERS does; returns the exit status."""
  mode, workdir = MODE.value, WORKDIR.value
  if mode == 'compare':
    from bapo_jax.tools import compare

    return compare.write(workdirs, COMPARE_TO.value)
  if mode == 'report':
    from bapo_jax.run import report_page

    print(f'Report: {report_page.write(workdir)}')
    return 0
  from bapo_jax.tools import viewer

  return viewer.show(workdir, SHOW_GROUP.value, SHOW_WITH.value, which=CHECKPOINT.value)


def run(config: Config) -> int:
  """Does what --mode selects; returns the exit status.

  Each mode imports its own modules, so that a bad flag fails before JAX loads.
  """
  mode, workdir, which = MODE.value, WORKDIR.value, CHECKPOINT.value
  if mode in ('check', 'plan') and not flags.FLAGS['workdir'].present:
    workdir = ''  # runs/default may have a run of another model
  # The other modes derive their knobs themselves.
  if mode in ('export', 'plan') and config.derived:
    from bapo_jax.autosetup import derive

    config = derive.decide(config, workdir)
  if mode == 'check':
    from bapo_jax.autosetup import check

    return check.check(config, workdir)
  if mode == 'eval':
    from bapo_jax.tools import eval_checkpoint

    return eval_checkpoint.eval_checkpoint(config, workdir, EVAL_TO.value, which)
  if mode == 'export':
    from bapo_jax.tools import export

    size, adapter = int(EXPORT_SHARD_GB.value * 1e9), EXPORT_AS.value == 'adapter'
    knobs = EXPORT_TO.value, EXPORT_DTYPE.value, size, which
    return export.export(config, workdir, *knobs, adapter=adapter)
  if mode == 'plan':
    return plan(config)
  if which != 'newest':
    fail(
      f'--checkpoint={which} is for --mode=eval, export and show; omit it, since '
      'training resumes from the newest'
    )
  from bapo_jax.run import experiment

  return experiment.train(config, workdir)


def start(arguments: list[str]) -> int:
  """Reads the config and does what the flags select; returns the exit status.

  `arguments` are the overrides of the config and the workdirs to compare.

  Raises:
    ValueError: a flag or the config is invalid.
  """
  file, mode = CONFIG.value, MODE.value
  given = [arg for arg in arguments if OVERRIDE.fullmatch(arg)]
  if file is None and (given or mode not in READERS):
    raise no_config('--config is missing')
  if mode != 'train' and PROCESSES.value is not None:
    raise ValueError(
      f'--processes={PROCESSES.value}: --mode={mode} runs in one process; '
      'omit --processes, or use --mode=train'
    )
  if mode == 'plan':  # before a config or an own file imports JAX
    os.environ.update(PLANNING)
  if file is not None:
    config = read_config(file, given)  # a misspelt knob is refused in every mode
    if mode not in READERS:
      join(config)
      return run(config)
  try:
    return read([arg for arg in arguments if arg not in given])
  except OSError as error:
    if error.filename is None:  # the terminal
      raise
    path = error.filename2 or error.filename  # os.replace names both
    reason = f'{path} cannot be written ({error.strerror})'
    raise ValueError(f'{reason}; free disk space or give another path') from error


def plan(config: Config) -> int:
  """Plans the run for --topology; returns 0 if the run fits, else 1."""
  from bapo_jax.tools.plan import plan

  if SEARCH.value:
    return int(not plan.run_search(config, TOPOLOGY.value))
  return int(not plan.run(config, TOPOLOGY.value, MEAN_SHARE.value))


def ignore_duplicates(unraisable: Any) -> None:
  """Suppresses errors of tensorstore that repeat a failed write, raised elsewhere."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def main(argv: list[str]) -> None:
  """Does what the flags select; exits with the run's status."""
  if not flags.FLAGS['verbosity'].present:
    # orbax logs every file it opens, and errors with a traceback before it raises.
    logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = ignore_duplicates
  machine.prepare_gpu()
  # On a busy machine Python also warns about a failed write that is already raised.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  try:
    with signals.none_lost():
      status = start(argv[1:])
  except ValueError as error:
    fail(error)
  except KeyboardInterrupt:
    print(
      f'Stopped immediately. The same command with --workdir={WORKDIR.value} resumes '
      'from the newest checkpoint; an unfinished warm start begins again.',
      file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    hosts.leave(130)
    os._exit(130)  # sys.exit waits for a checkpoint that is being written
  except Exception as error:
    if hosts.alone():
      raise
    hosts.failed(error)
  hosts.finish(status)
  sys.exit(status)


def cli() -> None:
  """Runs the program; the entry point of `bapo`, and of `python -m bapo_jax`."""
  if os.getcwd() not in map(os.path.abspath, sys.path):
    sys.path.insert(0, os.getcwd())  # a user's file may import modules beside it
  app.run(main, flags_parser=parse)


if __name__ == '__main__':
  cli()
