"""The command line: bapo train --config=configs/aime.py [--workdir=...]

`bapo`, `python -m bapo_jax` and `python -m bapo_jax.main` are the same program, and
`bapo check` is short for `bapo --mode=check`.

1. A command is a function, whose parameters are the flags of its mode;
2. `parse` reads the mode and its flags; `bapo MODE --help` lists them;
3. `start` calls the command. Most commands read the config, a file with the overrides
   --config.<knob>.

A user error prints one sentence on stderr and exits with status 2 before anything is
written or compiled. Nothing here imports JAX before the environment is set for it.
"""

import argparse
import collections
import inspect
import os
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from absl import app, flags, logging

from bapo_jax.knobs import fields
from bapo_jax.runtime import files, hosts, machine, progress, signals

if TYPE_CHECKING:
  from bapo_jax.training.config import Config

WORKDIR = 'runs/default'
PATHS = ('config', 'workdir', 'run', 'to')  # flags
KNOB = re.compile(r'--?(no)?config\.')
# All that an export reads of a stored config: files of rewards may be gone.
EXPORTED = ('model', 'lora', 'tokenizer', 'sampler', 'sft')
# Settings for the compilers for TPUs and GPUs on a host that has none. On TPUs the two
# efforts halve the compile time; the memory of a dense 7B stays, that of a 30B with
# experts grows by 3 %.
PLANNING = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': '-1',
  'JAX_MEMORY_FITTING_EFFORT': '-1',
}


class Given(NamedTuple):
  """The config of a command line."""

  file: str  # path or path:variant; '' if --config is missing
  knobs: list[str]  # overrides such as --config.steps=10

  def read(self, workdir: str = '', sections: Sequence[str] = ()) -> 'Config':
    """Returns the config of the file, else that of the run in the workdir.

    Of the config of a run only `sections` are read, if there are any.

    Raises:
      ValueError: there is none, or it is invalid.
    """
    if self.file or not workdir:
      return read_config(self.file, self.knobs)
    from bapo_jax.runtime import workdir as workdirs
    from bapo_jax.training import config

    stored = workdirs.read_config(workdir)
    if sections:
      stored = {name: values for name, values in stored.items() if name in sections}
    try:
      values = config.from_json(stored).model_dump()
    except ValueError as error:
      workdirs.check_version(workdir)
      raise ValueError(
        f'{workdir}/config.json: {error}; give the config as --config'
      ) from None
    return config.compose(values, self.knobs)

  def check(self, workdir: str = '') -> None:
    """Refuses a misspelt knob in a mode that needs no config."""
    if self.file or self.knobs:
      self.read(workdir)


def read_config(file: str, knobs: Sequence[str]) -> 'Config':
  """Returns the validated config of a file with the overrides applied.

  Raises:
    ValueError: the file or a knob is invalid, or a knob has no effect; the message is
      one sentence.
  """
  from bapo_jax.training import config

  return config.compose(file, knobs)


def train(
  config: Given,
  workdir: str = WORKDIR,
  coordinator: str = '',
  process: int | None = None,
  processes: int | None = None,
  start_s: float = hosts.START_S,
) -> int:
  """Trains in --workdir, or resumes its run; the default.

  Args:
    workdir: directory of all results
    coordinator: host:port of process 0 of several; empty: detected
    process: number of this process, from 0
    processes: number of processes
    start_s: seconds to wait for the other processes
  """
  # Before a config or a custom file uses JAX.
  hosts.initialise(coordinator, process, processes, start_s)
  from bapo_jax.run import library

  return library.train(config.file, workdir, knobs=config.knobs)


def check(config: Given, workdir: str = '') -> int:
  """Samples, takes one update and lists likely mistakes; writes nothing.

  The workdir is not by default that of a training, which may have another model.

  Args:
    workdir: directory of a run to continue
  """
  from bapo_jax.autosetup import check

  return check.check(config.read(), workdir)


def evaluate(
  config: Given, workdir: str = WORKDIR, checkpoint: str = 'newest', to: str = ''
) -> int:
  """Evaluates a checkpoint, or model.path, on the held-out problems.

  Args:
    workdir: directory of all results
    checkpoint: newest, best or a step
    to: what to write; empty: in <workdir>/eval
  """
  from bapo_jax.tools import eval_checkpoint

  return eval_checkpoint.eval_checkpoint(config.read(workdir), workdir, to, checkpoint)


def export(
  config: Given,
  workdir: str = WORKDIR,
  checkpoint: str = 'newest',
  to: str = '',
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  shard_gb: float = 5.0,
  adapter: bool = False,
) -> int:
  """Writes a checkpoint as a directory that transformers and vLLM load.

  Args:
    workdir: directory of all results
    checkpoint: newest, best or a step
    to: what to write; empty: in <workdir>/export
    dtype: type of the exported numbers
    shard_gb: limit of an exported file, 10^9 bytes
    adapter: exports LoRA adapters alone, as peft reads them
  """
  from bapo_jax.tools import export

  values = config.read(workdir, EXPORTED)
  size = int(shard_gb * 1e9)
  if size < 1:
    raise ValueError(f'--shard_gb={shard_gb:g}: give a number above 0')
  return export.export(values, workdir, to, dtype, size, checkpoint, adapter)


def show(
  config: Given,
  workdir: str = WORKDIR,
  checkpoint: str = 'newest',
  group: int | None = None,
  views: str = '',
) -> None:
  """Prints the recorded groups of a run.

  Args:
    workdir: directory of all results
    checkpoint: newest, best or a step
    group: prints this group, from 1; not given: lists the groups
    views: p: token probabilities, c: clip status, a: texts in full
  """
  from bapo_jax.tools import viewer

  config.check(workdir)
  viewer.show(workdir, group, views, checkpoint)


def report(config: Given, workdir: str = WORKDIR) -> None:
  """Writes the page report.html of a run, finished or in progress.

  Args:
    workdir: directory of all results
  """
  from bapo_jax.run import page

  config.check(workdir)
  print(f'Report: {page.write(workdir)}')


def compare(
  config: Given, workdirs: Sequence[str], to: str = 'runs/compare.html'
) -> None:
  """Compares the runs in several workdirs on one page.

  Args:
    workdirs: directories of runs
    to: the page to write
  """
  from bapo_jax.tools import compare

  config.check()
  compare.write([*map(files.local, workdirs)], to)


def sweep(
  config: Given,
  workdir: str = 'runs/sweep',
  set: Sequence[str] = (),
  seeds: str = '0:3',
  workers: int | None = None,
  per_device: int = 1,
) -> int:
  """Trains a grid of knobs and seeds, a process per core, and compares them.

  Args:
    workdir: directory of all runs
    set: KNOB=VALUE,VALUE: trains every value; several make a grid
    seeds: values of --config.seed: a range, or a list 0,7,9
    workers: processes at once (default: all GPUs, or all cores)
    per_device: processes per GPU, which divide its memory
  """
  from bapo_jax.tools import sweep

  shared = {override.partition('=')[0]: override for override in config.knobs}
  commands = {}
  for name, overrides in sweep.grid(set, sweep.seeds_of(seeds)).items():
    for override in overrides:
      fixed = shared.get(override.partition('=')[0])
      if fixed:
        raise ValueError(f'{fixed}: the sweep sets this knob; leave it out')
    knobs = [*config.knobs, *overrides]
    read_config(config.file, knobs)  # or it is refused
    commands[name] = [f'--config={config.file}', *knobs]
  return sweep.sweep(commands, workdir, sweep.environments(workers, per_device))


def sft(config: Given, to: str = 'policy') -> int:
  """Makes the embedded policy and writes its directory to --to.

  Args:
    to: the directory to write
  """
  from bapo_jax.tools import sft

  return sft.sft(config.read(), to)


def plan(config: Given, workdir: str = '', topology: str = 'v5p:2x2x4') -> int:
  """Says whether a run fits the memory of GPUs or TPUs that are not attached.

  Args:
    workdir: directory of a run to continue
    topology: devices to plan for
  """
  os.environ.update(PLANNING)  # before a config or a custom file imports JAX
  from bapo_jax.tools.plan import plan

  return int(not plan.run(config.read(), topology, workdir))


COMMANDS = {
  'train': train,
  'check': check,
  'eval': evaluate,
  'export': export,
  'show': show,
  'report': report,
  'compare': compare,
  'sweep': sweep,
  'sft': sft,
  'plan': plan,
}
MODES = {mode: str(x.__doc__).partition('\n')[0] for mode, x in COMMANDS.items()}
STORED = ('eval', 'export', 'show', 'report')  # read the run in --workdir


def flags_of(mode: str) -> argparse.ArgumentParser:
  """Returns the parser of the flags of a mode: the parameters of its command."""
  parser = argparse.ArgumentParser(
    prog=f'bapo {mode}',
    description=MODES[mode],
    epilog='--config.KNOB=VALUE overrides a knob: docs/reference/config.md.',
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument('--config', default='', help='a config file, or file:variant')
  command = COMMANDS[mode]
  meanings = dict(re.findall(r'\n    (\w+): (.*)', str(command.__doc__)))
  _, *parameters = inspect.signature(command).parameters.values()
  for parameter in parameters:
    name = parameter.name
    default = parameter.default
    if default is parameter.empty:
      parser.add_argument(name, nargs='*', help=meanings[name])
      continue
    choices = typing.get_args(parameter.annotation) or None
    options: dict[str, Any] = {'default': default, 'type': type(default)}
    options['choices'] = choices
    if default is None:
      options = {'type': int}
    elif default is False:
      options = {'action': 'store_true'}
    elif default == ():
      options = {'action': 'append', 'default': []}
    note = f' (default: {default})' if default else ''
    parser.add_argument(f'--{name}', help=meanings[name] + note, **options)
  if mode in STORED:
    parser.add_argument('run', nargs='?', help='the same as --workdir')
  return parser


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the flags of a command line, with `mode` and the overrides `knobs`.

  A mode as the first argument stands for --mode. Without arguments the program prints
  its usage and ends with status 2; with --help it ends with 0.
  """
  words = argv[1:]
  if words and words[0] in COMMANDS:
    words[0] = f'--mode={words[0]}'
  elif not words or words[0] == 'help' or {'-h', '-help', '--help'} & {*words}:
    print(usage(), file=None if words else sys.stderr)
    sys.exit(0 if words else 2)
  names = [word.lstrip('-').partition('=')[0] for word in words if word[:1] == '-']
  for name, count in collections.Counter(names).items():
    if count > 1 and name != 'set':
      print(
        f'bapo_jax: --{name} is given twice; the last value counts', file=sys.stderr
      )
  given = [word for word in words if KNOB.match(word)]
  words = [word for word in words if word not in given]
  first = argparse.ArgumentParser(
    add_help=False, allow_abbrev=False, exit_on_error=False
  )
  first.add_argument('--mode', choices=[*COMMANDS], default='train')
  mode = ''
  try:
    selected, words = first.parse_known_args(words)
    mode = selected.mode
    args, words = flags_of(mode).parse_known_intermixed_args(words)
    for name in PATHS:
      if path := getattr(args, name, None):
        setattr(args, name, files.local(path, flag=f'--{name}='))
    flags.FLAGS.set_gnu_getopt()
    _, *words = flags.FLAGS([argv[0], *words])  # the flags of absl, such as --verbosity
  except flags.UnrecognizedFlagError as error:
    fail(bare_knob(error.flagname, mode))
  except (ValueError, argparse.ArgumentError, flags.Error, OSError) as error:
    fail(error)
  if words and '=' in words[0]:  # as verl writes its overrides
    fail(bare_knob(words[0].partition('=')[0], mode))
  if words:
    fail(
      f'unknown argument {words[0]!r}; a mode comes first ({", ".join(COMMANDS)}), and '
      'an override is written --config.steps=10'
    )
  run = vars(args).pop('run', None)
  if run:
    args.workdir = run
  return argparse.Namespace(**vars(args), mode=mode, knobs=given)


def bare_knob(name: str, mode: str) -> str:
  """Returns the refusal of an unknown flag, which may name a knob."""
  from bapo_jax.training import foreign_names
  from bapo_jax.training.config import Config

  refusal = f'bapo {mode} has no flag --{name}'
  known = [knob for knob, _, _ in fields(Config())]
  if name in known:
    return f'{refusal}; a knob is written --config.{name}=...'
  advice = foreign_names.translated(name, known)
  if not advice:
    return f'{refusal}; bapo {mode} --help lists its flags'
  if name not in foreign_names.ABSENT:
    advice += '; knobs are written --config.KNOB=...'
  return f'{refusal}; {advice}'


def usage() -> str:
  """Returns the usage of the program: its modes, and the config files that exist."""
  from bapo_jax.training import config

  modes = '\n'.join(f'  {mode:8}{does}' for mode, does in MODES.items())
  files = '\n'.join(f'  {file}' for file in config.config_files())
  return (
    'Usage: bapo MODE --config=FILE[:VARIANT] [--workdir=DIR] [--config.KNOB=VALUE]...'
    f'\n\nModes:\n{modes}\n\nConfigs:\n{files or config.NO_CONFIGS}\n\n'
    'bapo MODE --help lists the flags of a mode, docs/reference/config.md all knobs.'
  )


def fail(*errors: object) -> NoReturn:
  """Prints a sentence per error; ends all processes of the run with status 2."""
  for error in errors:
    sentence = ' '.join(str(error).split())
    print(f'bapo_jax: {sentence}', file=sys.stderr)
  hosts.leave(2)
  sys.exit(2)


def start(args: argparse.Namespace) -> int:
  """Runs the mode of the command line; returns the exit status.

  Raises:
    ValueError: a flag or the config is invalid.
  """
  values = dict(vars(args))
  command = COMMANDS[values.pop('mode')]
  config = Given(values.pop('config'), values.pop('knobs'))
  try:
    return command(config, **values) or 0
  except OSError as error:
    path = error.filename2 or error.filename  # os.replace names both
    if not path or args.mode not in (*STORED, 'compare'):
      raise
    reason = f'{path} cannot be used ({error.strerror})'
    raise ValueError(f'{reason}; free disk space or give another path') from error


def ignore_duplicates(unraisable: Any) -> None:
  """Suppresses errors of tensorstore that repeat a failed write, raised elsewhere."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def main(args: argparse.Namespace) -> None:
  """Runs the mode of the command line; exits with the status of the run."""
  if not flags.FLAGS['verbosity'].present:
    # orbax logs every file it opens, and errors with a traceback before it raises.
    logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = ignore_duplicates
  # JAX would leave out its own frames, which tell a bug from a refusal.
  os.environ.setdefault('JAX_TRACEBACK_FILTERING', 'off')
  machine.prepare_gpu()
  # On a busy machine Python also warns about a failed write that is already raised.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  try:
    with signals.none_lost():
      status = start(args)
  except KeyboardInterrupt:
    print(
      'Stopped immediately. The same command resumes from the newest checkpoint of '
      '--workdir; an unfinished warm start begins again.',
      file=sys.stderr,
    )
    hosts.leave(130)
    hosts.exit_now(130)
  except Exception as error:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = str(frame.f_globals.get('__package__'))
    # Raised by a library, a ValueError is a bug.
    if isinstance(error, ValueError) and package.startswith('bapo_jax'):
      # A check prints every refusal, a start the first.
      refused = [x.text for x in getattr(error, 'refusals', [])] or [error]
      fail(*refused[: None if args.mode == 'check' else 1])
    if len(hosts.run()) == 1:
      raise
    hosts.failed(error)
  hosts.finish(status)
  sys.exit(status)


def cli() -> None:
  """Runs the program; the entry point of `bapo`, and of `python -m bapo_jax`."""
  progress.open_console()
  if os.getcwd() not in map(os.path.abspath, sys.path):
    sys.path.insert(0, os.getcwd())  # a user's file may import modules beside it
  app.run(main, flags_parser=parse)


if __name__ == '__main__':
  cli()
