"""The command line: bapo train --config=configs/aime.py [--workdir=...]

`bapo`, `python -m bapo_jax` and `python -m bapo_jax.main` are the same program, and
`bapo check` is short for `bapo --mode=check`.

1. `parse` reads the mode and its flags; `bapo MODE --help` lists them;
2. `read_config` runs the config file, applies the --config.<knob> and validates every
   knob;
3. `start` runs the mode.

A user error prints one sentence on stderr and exits with status 2 before anything is
written or compiled. Nothing here imports JAX before the environment is set for it.
"""

import argparse
import os
import pathlib
import re
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags, logging

from bapo_jax import custom_code, knobs
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
READERS = ('show', 'report', 'compare')  # read the files of workdirs; need no config
# Read the config of the run, if --config is missing.
STORED = ('eval', 'export', 'show', 'report')
PATHS = ('config', 'workdir', 'run', 'to')  # flags
# All that an export reads of a stored config: files of rewards may be gone.
EXPORTED = ('model', 'lora', 'tokenizer', 'sampler', 'sft')
WORKDIR = 'runs/default'
KNOB = re.compile(r'--?(no)?config\.')
# (flag, modes that have it, default, meaning). The default has the type of the flag.
# None is an integer that is not given, a tuple has the possible values, and a flag with
# [] may be given several times.
FLAGS: list[tuple[str, str, Any, str]] = [
  ('config', ' '.join(MODES), '', 'a config file, or file:variant'),
  ('workdir', 'train eval export show report', WORKDIR, 'directory of all results'),
  # Not by default that of a training, which may have a run of another model.
  ('workdir', 'check plan', '', 'directory of a run to continue'),
  ('workdir', 'sweep', 'runs/sweep', 'directory of all runs'),
  ('set', 'sweep', [], 'KNOB=VALUE,VALUE: trains every value; several make a grid'),
  ('seeds', 'sweep', '0:3', 'values of --config.seed: a range, or a list 0,7,9'),
  ('workers', 'sweep', None, 'processes at once (default: all GPUs, or all cores)'),
  ('per_device', 'sweep', 1, 'processes per GPU, which divide its memory'),
  ('coordinator', 'train', '', 'host:port of process 0 of several; empty: detected'),
  ('process', 'train', None, 'number of this process, from 0'),
  ('processes', 'train', None, 'number of processes'),
  ('start_s', 'train', hosts.START_S, 'seconds to wait for the other processes'),
  ('checkpoint', 'eval export show', 'newest', 'newest, best or a step'),
  ('to', 'sft', 'policy', 'the directory to write'),
  ('to', 'eval export', '', 'what to write; empty: in <workdir>/eval or /export'),
  ('to', 'compare', 'runs/compare.html', 'the page to write'),
  ('dtype', 'export', ('float32', 'bfloat16'), 'type of the exported numbers'),
  ('shard_gb', 'export', 5.0, 'limit of an exported file, 10^9 bytes'),
  ('adapter', 'export', False, 'exports LoRA adapters alone, as peft reads them'),
  ('group', 'show', None, 'prints this group, from 1; not given: lists the groups'),
  ('views', 'show', '', 'p: token probabilities, c: clip status, a: texts in full'),
  ('topology', 'plan', 'v5p:2x2x4', 'devices to plan for'),
]


class Parser(argparse.ArgumentParser):
  """Parses flags; raises ValueError instead of printing the usage."""

  def error(self, message: str) -> NoReturn:
    """Raises a ValueError with this message, where argparse would exit."""
    raise ValueError(message)


def flags_of(mode: str) -> Parser:
  """Returns the parser of the flags of a mode."""
  parser = Parser(
    prog=f'bapo {mode}',
    description=f'bapo {mode} {MODES[mode]}.',
    epilog='--config.KNOB=VALUE overrides a knob: docs/reference/config.md.',
    allow_abbrev=False,
  )
  for name, modes, default, meaning in FLAGS:
    if mode not in modes.split():
      continue
    options: dict[str, Any] = {'default': default, 'type': type(default)}
    if default is None:
      options['type'] = int
    elif default is False:
      options = {'action': 'store_true'}
    elif isinstance(default, tuple):
      options = {'default': default[0], 'choices': default}
    elif isinstance(default, list):
      options = {'default': default, 'action': 'append'}
    if default:
      meaning += f' (default: {options["default"]})'
    parser.add_argument(f'--{name}', help=meaning, **options)
  if mode in STORED:
    parser.add_argument('run', nargs='?', help='the same as --workdir')
  elif mode == 'compare':
    parser.add_argument('workdirs', nargs='*', help='directories of runs')
  return parser


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the flags of a command line, with `mode` and the overrides `knobs`.

  A mode as the first argument stands for --mode. Without arguments the program prints
  its usage and ends with status 2; with --help it ends with 0.
  """
  words = argv[1:]
  if not words:
    print(usage(), file=sys.stderr)
    sys.exit(2)
  if words[0] in MODES:
    words[0] = f'--mode={words[0]}'
  elif words[0] == 'help' or {'-h', '-help', '--help'} & {*words}:
    print(usage())
    sys.exit(0)
  names = [word.lstrip('-').partition('=')[0] for word in words if word[:1] == '-']
  for name in {*names} - {'set'}:
    if names.count(name) > 1:
      print(
        f'bapo_jax: --{name} is given twice; the last value counts', file=sys.stderr
      )
  given = [word for word in words if KNOB.match(word)]
  words = [word for word in words if word not in given]
  first = Parser(add_help=False, allow_abbrev=False)
  first.add_argument('--mode', choices=[*MODES], default='train')
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
  except (ValueError, flags.Error, OSError) as error:
    fail(error)
  if words and '=' in words[0]:  # as verl writes its overrides
    fail(bare_knob(words[0].partition('=')[0], mode))
  if words:
    fail(
      f'unknown argument {words[0]!r}; a mode comes first ({", ".join(MODES)}), and an '
      'override is written --config.steps=10'
    )
  if getattr(args, 'run', None):
    args.workdir = args.run
  return argparse.Namespace(**vars(args), mode=mode, knobs=given)


def bare_knob(name: str, mode: str) -> str:
  """Returns the refusal of an unknown flag, which may name a knob."""
  from bapo_jax.training import foreign_names
  from bapo_jax.training.config import Config

  refusal = f'bapo {mode} has no flag --{name}'
  known = [knob for knob, _, _ in knobs.fields(Config())]
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
  modes = '\n'.join(f'  {mode:8}{does}' for mode, does in MODES.items())
  files = '\n'.join(f'  {file}' for file in config_files())
  return (
    'Usage: bapo MODE --config=FILE[:VARIANT] [--workdir=DIR] [--config.KNOB=VALUE]...'
    f'\n\nModes:\n{modes}\n\nConfigs:\n{files or f"  {NO_CONFIGS}"}\n\n'
    'bapo MODE --help lists the flags of a mode, docs/reference/config.md all knobs.'
  )


def config_files() -> list[str]:
  """Returns the files of configs/ with their variants: 'configs/a.py[:x|:y]'.

  Skips files that define no get_config or raise an error.
  """
  listed = []
  for path in sorted(pathlib.Path('configs').glob('*.py')):
    try:
      names = vars(custom_code.run(str(path)))
      variants = '|'.join(f':{name}' for name in names.get('VARIANTS', ()))
    except (Exception, SystemExit):  # a user's file may raise anything
      continue
    if 'get_config' in names:
      listed.append(f'{path}[{variants}]' if variants else str(path))
  return listed


def no_config(problem: str) -> ValueError:
  """Returns an error with the problem and the config files that exist."""
  files = ', '.join(config_files())
  return ValueError(f'{problem}; ' + (f'give one of {files}' if files else NO_CONFIGS))


def read_config(file: str, given: list[str]) -> 'Config':
  """Returns the validated config of a file with the overrides applied.

  Raises:
    ValueError: the file or a knob is invalid, or a knob has no effect; the message is
      one sentence.
  """
  from bapo_jax.training import config

  if not os.path.exists(config.file_and_variant(file)[0]):
    raise no_config(f'--config={file}: no such file')
  return overridden(config.load(file), given)


def overridden(values: dict[str, Any], given: list[str]) -> 'Config':
  """Returns the validated config of nested values with the overrides applied."""
  from bapo_jax.training import config, needs

  changes = config.overrides(given, values)
  parsed = config.parse(config.merged(values, changes))
  needs.refuse(changes, [parsed])
  return parsed


def config_of(args: argparse.Namespace) -> 'Config':
  """Returns the config of --config, else of the run in --workdir.

  Raises:
    ValueError: there is none, or it is invalid.
  """
  if args.config:
    return read_config(args.config, args.knobs)
  if args.mode not in STORED:
    raise no_config('--config is missing')
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
  return overridden(values, args.knobs)


def fail(*errors: object) -> NoReturn:
  """Prints a sentence per error; ends all processes of the run with status 2."""
  for error in errors:
    sentence = ' '.join(str(error).split())
    print(f'bapo_jax: {sentence}', file=sys.stderr)
  hosts.leave(2)
  sys.exit(2)


NO_CONFIGS = (
  'no folder configs/ is here; run in the folder of the repository, or give a config '
  'file of your own, such as a copy of configs/aime.py'
)

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


def start(args: argparse.Namespace) -> int:
  """Runs the mode of the command line; returns the exit status.

  Raises:
    ValueError: a flag or the config is invalid.
  """
  if args.mode == 'plan':  # before a config or a custom file imports JAX
    os.environ.update(PLANNING)
  if args.mode == 'sweep':
    return sweep(args)
  if args.mode == 'train':  # before a config or a custom file uses JAX
    hosts.initialise(args.coordinator, args.process, args.processes, args.start_s)
  try:
    if args.mode not in READERS:
      with hosts.together():
        config = config_of(args)
      return run(args, config)
    if args.config or args.knobs:
      config_of(args)  # a misspelt knob is refused in every mode
    read(args)
  except OSError as error:
    path = error.filename2 or error.filename  # os.replace names both
    if not path or args.mode not in (*STORED, 'compare'):
      raise
    reason = f'{path} cannot be used ({error.strerror})'
    raise ValueError(f'{reason}; free disk space or give another path') from error
  return 0


def read(args: argparse.Namespace) -> None:
  """Runs a mode of READERS."""
  if args.mode == 'compare':
    from bapo_jax.tools import compare

    compare.write([*map(files.local, args.workdirs)], args.to)
  elif args.mode == 'report':
    from bapo_jax.run import page

    print(f'Report: {page.write(args.workdir)}')
  else:
    from bapo_jax.tools import viewer

    viewer.show(args.workdir, args.group, args.views, args.checkpoint)


def sweep(args: argparse.Namespace) -> int:
  """Trains the grid of --set and --seeds; returns the exit status."""
  from bapo_jax.tools import sweep as tool

  commands = {}
  for name, overrides in tool.grid(args.set, tool.seeds_of(args.seeds)).items():
    for override in overrides:
      knob = override.partition('=')[0]
      if fixed := [x for x in args.knobs if x.partition('=')[0] == knob]:
        raise ValueError(f'{fixed[0]}: the sweep sets this knob; leave it out')
    knobs = [*args.knobs, *overrides]
    commands[name] = [f'--config={args.config}', *knobs]
    config_of(argparse.Namespace(**vars(args) | {'knobs': knobs}))  # or it is refused
  places = tool.environments(args.workers, args.per_device)
  return tool.sweep(commands, args.workdir, places)


def run(args: argparse.Namespace, config: 'Config') -> int:
  """Runs a mode that needs a config; returns the exit status."""
  mode = args.mode
  workdir = getattr(args, 'workdir', '')
  if mode == 'check':
    from bapo_jax.autosetup import check

    return check.check(config, workdir)
  if mode == 'eval':
    from bapo_jax.tools import eval_checkpoint

    return eval_checkpoint.eval_checkpoint(config, workdir, args.to, args.checkpoint)
  if mode == 'sft':
    from bapo_jax.tools import sft

    return sft.sft(config, args.to)
  if mode == 'export':
    from bapo_jax.tools import export

    size = int(args.shard_gb * 1e9)
    if size < 1:
      raise ValueError(f'--shard_gb={args.shard_gb:g}: give a number above 0')
    return export.export(
      config,
      workdir,
      args.to,
      args.dtype,
      shard_bytes=size,
      which=args.checkpoint,
      adapter=args.adapter,
    )
  if mode == 'plan':
    from bapo_jax.tools.plan import plan

    return int(not plan.run(config, args.topology, workdir))
  if len(hosts.side()) > 1:
    asked = {'config': config.model_dump(), 'functions': config.code}
    hosts.same_everywhere(asked | machine.versions())
  from bapo_jax.run import experiment

  return experiment.train(config, workdir)


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
