"""The command line: bapo train --config=configs/aime.py [--workdir=...]

`bapo`, `python -m bapo_jax` and `python -m bapo_jax.main` are the same program, and
`bapo check` is short for `bapo --mode=check`.

1. A mode is a function, listed in COMMANDS: its parameters are the flags, and its
   docstring says what they mean;
2. `parse` reads the mode and its flags; `bapo MODE --help` lists them;
3. `start` reads the config, applies the --config.<knob> and calls the function.

A user error prints one sentence on stderr and exits with status 2 before anything is
written or compiled. Nothing here imports JAX before the environment is set for it.
"""

import argparse
import collections
import inspect
import os
import pkgutil
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags, logging

from bapo_jax.knobs import fields
from bapo_jax.runtime import files, hosts, machine, progress, signals

if TYPE_CHECKING:
  from bapo_jax.training.config import Config

MODES = {
  'train': 'trains in --workdir, or resumes its run; the default',
  'check': 'samples, takes one update and lists likely mistakes; writes nothing',
  'eval': 'evaluates a checkpoint, or model.path, on the held-out problems',
  'export': 'writes a checkpoint as a directory that transformers and vLLM load',
  'show': 'prints the recorded groups of a run',
  'report': 'writes the page report.html of a run, finished or in progress',
  'compare': 'compares the runs in several workdirs on one page',
  'sweep': 'trains a grid of knobs and seeds, a process per core, and compares them',
  'sft': 'makes the embedded policy and writes its directory to --to',
  'plan': 'says whether a run fits the memory of GPUs or TPUs that are not attached',
}
# Mode -> its function.
COMMANDS = {
  'train': 'run.library:join',
  'check': 'autosetup.check:check',
  'eval': 'tools.eval_checkpoint:eval_checkpoint',
  'export': 'tools.export:export',
  'show': 'tools.viewer:show',
  'report': 'run.page:write_report',
  'compare': 'tools.compare:write',
  'sweep': 'tools.sweep:run',
  'sft': 'tools.sft:sft',
  'plan': 'tools.plan.plan:run',
}
# Read the config of the run, if --config is missing.
STORED = ('eval', 'export', 'show', 'report')
PATHS = ('config', 'workdir', 'to')  # flags
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


def command(mode: str) -> Callable[..., int | None]:
  """Sets the environment for JAX; imports the function of a mode, and with it JAX."""
  # JAX would leave out its own frames, which tell a bug from a refusal.
  os.environ.setdefault('JAX_TRACEBACK_FILTERING', 'off')
  machine.prepare_gpu()
  if mode == 'plan':
    os.environ.update(PLANNING)
  return pkgutil.resolve_name(f'bapo_jax.{COMMANDS[mode]}')


def flags_of(mode: str) -> argparse.ArgumentParser:
  """Returns the parser of the flags of a mode.

  A flag is a parameter of the mode's function that has a default and a line in the
  docstring.
  """
  parser = argparse.ArgumentParser(
    prog=f'bapo {mode}',
    description=f'bapo {mode} {MODES[mode]}.',
    epilog='--config.KNOB=VALUE overrides a knob: docs/reference/config.md.',
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument('--config', default='', help='a config file, or file:variant')
  function = command(mode)
  meanings = dict(re.findall(r'\n  (\w+): (.*)', str(inspect.getdoc(function))))
  for name, parameter in inspect.signature(function).parameters.items():
    default = parameter.default
    if name not in meanings or default is parameter.empty:
      continue
    options: dict[str, Any] = {'default': default, 'type': type(default)}
    options['choices'] = typing.get_args(parameter.annotation) or None
    if default is None:
      options = {'type': int}
    elif default is False:
      options = {'action': 'store_true'}
    elif default == ():
      options = {'action': 'append', 'default': []}
    note = f' (default: {default})' if default else ''
    parser.add_argument(f'--{name}', help=meanings[name] + note, **options)
  if mode in STORED:
    # Without a default, which would replace the value of --workdir.
    parser.add_argument(
      'workdir',
      nargs='?',
      default=argparse.SUPPRESS,
      metavar='run',
      help='the same as --workdir',
    )
  elif mode == 'compare':
    parser.add_argument('workdirs', nargs='*', help='directories of runs')
  return parser


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the flags of a command line, with `mode` and the overrides `knobs`.

  A mode as the first argument stands for --mode. Without arguments the program prints
  its usage and ends with status 2; with --help it ends with 0.
  """
  words = argv[1:]
  if words and words[0] in MODES:
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
  first.add_argument('--mode', choices=[*MODES], default='train')
  try:
    selected, words = first.parse_known_args(words)
    mode = selected.mode
    args, words = flags_of(mode).parse_known_intermixed_args(words)
    for name in PATHS:
      if path := getattr(args, name, None):
        setattr(args, name, files.local(path, flag=f'--{name}='))
    # The flags of absl, such as --verbosity.
    flags.FLAGS.set_gnu_getopt()
    _, *words = flags.FLAGS([argv[0], *words], known_only=True)
  except (ValueError, argparse.ArgumentError, flags.Error, OSError) as error:
    fail(error)
  if words and re.search('^-|=', words[0]):  # verl writes its overrides without --
    fail(bare_knob(words[0].lstrip('-').partition('=')[0], mode))
  if words:
    fail(
      f'unknown argument {words[0]!r}; a mode comes first ({", ".join(MODES)}), and '
      'an override is written --config.steps=10'
    )
  args.mode = mode
  args.knobs = given
  return args


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


def read_config(file: str, knobs: Sequence[str]) -> 'Config':
  """Returns the validated config of a file with the overrides applied.

  Raises:
    ValueError: the file or a knob is invalid, or a knob has no effect; the message is
      one sentence.
  """
  from bapo_jax.training import config

  return config.compose(file, knobs)


def config_of(args: argparse.Namespace) -> 'Config':
  """Returns the config of --config, else of the run in --workdir.

  Raises:
    ValueError: there is none, or it is invalid.
  """
  if args.config or args.mode not in STORED:
    return read_config(args.config, args.knobs)
  from bapo_jax.runtime import workdir
  from bapo_jax.training import config

  stored = workdir.read_config(args.workdir)
  if args.mode == 'export':
    stored = {name: values for name, values in stored.items() if name in EXPORTED}
  try:
    values = config.from_json(stored).model_dump()
  except ValueError as error:
    workdir.check_version(args.workdir)
    raise ValueError(
      f'{args.workdir}/config.json: {error}; give the config as --config'
    ) from None
  composed = config.compose(values, args.knobs)
  ran = workdir.read_resolved(args.workdir).get('code', {})
  for knob, now in composed.code.items():
    if ran.get(knob, now) != now:  # a relative path, read in another folder
      print(
        f'bapo_jax: {knob} is now {now}, and was {ran[knob]} in the run (file and '
        'digest); the result is that of another function',
        file=sys.stderr,
      )
  return composed


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
  function = command(args.mode)
  parameters = inspect.signature(function).parameters
  values = dict(vars(args))
  try:
    # A function with `knobs` reads the config itself. A misspelt knob is refused in
    # every mode.
    needed = 'config' in parameters or args.config or args.knobs
    if needed and 'knobs' not in parameters:
      values['config'] = config_of(args)
    taken = {name: x for name, x in values.items() if name in parameters}
    return function(**taken) or 0
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
  # On a busy machine Python also warns about a failed write that is already raised.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  try:
    with signals.none_lost():
      status = start(args)
  except Exception as error:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = str(frame.f_globals.get('__package__'))
    # Raised by a library, a ValueError is a bug.
    ours = package.startswith('bapo_jax') and not hosts.is_collective(error)
    if isinstance(error, ValueError) and ours:
      # A check prints every refusal, a start the first.
      refused = getattr(error, 'refusals', [error])
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
  try:
    app.run(main, flags_parser=parse)
  except KeyboardInterrupt:
    print(
      'Stopped immediately. The same command resumes from the newest checkpoint of '
      '--workdir; an unfinished warm start begins again.',
      file=sys.stderr,
    )
    hosts.leave(130)
    hosts.exit_now(130)


if __name__ == '__main__':
  cli()
