"""The command line: python -m bapo_jax.main --config=configs/aime.py [--workdir=...]

1. absl parses the flags, `load` runs the config file, `overrides` the --config.<knob>;
2. `parse_config` validates every knob, before JAX is imported;
3. `run` does what --mode says.

An error of the user is one sentence on stderr and exit status 2, before anything is
written or compiled.
"""

import ast
import difflib
import importlib.util
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from bapo_jax import knobs
from bapo_jax.runtime import signals
from bapo_jax.training.config import Config
from bapo_jax.training.config import parse as parse_config

CONFIG = flags.DEFINE_string(
  'config', None, 'A file of configs/, with `:variant` where it has some.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/default', 'Everything a run writes; give it again to resume.'
)
MODE = flags.DEFINE_enum(
  'mode',
  'train',
  ['train', 'eval', 'export', 'plan', 'show', 'table'],
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
OVERRIDE = re.compile(r'--?(no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
TRUTH = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
LONGEST = 10_000  # characters of a tuple


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


def read_config(file: str, given: list[str], *, trained_here: bool = True) -> Config:
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
  return parse_config(values, trained_here=trained_here)


def load(file: str) -> dict[str, Any]:
  """The values that a config file sets, as nested dicts.

  Args:
    file: its path; after a colon the variant, the argument of its get_config.

  Raises:
    ValueError: the file cannot be read, or raises.
  """
  path, *variant = file.split(':', 1)
  try:
    spec = importlib.util.spec_from_file_location('config', path)
    if spec is None or spec.loader is None:
      raise OSError(f'not a file that ends in .py: {path!r}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*variant)
    if not isinstance(config, ConfigDict):
      raise TypeError(f'get_config() returns {config!r:.60}, not a ConfigDict')
    return config.to_dict()
  except (ValueError, OSError) as error:
    raise ValueError(f'--config={file}: {error}') from None
  except (Exception, SystemExit) as error:  # somebody's file may raise anything
    raise ValueError(f'--config={file}: {type(error).__name__}: {error}') from None


def overrides(given: list[str]) -> dict[str, Any]:
  """Knob -> value of arguments such as --config.steps=10; the last of a name counts.

  Raises:
    ValueError: no such knob, or a text that is no value of its type.
  """
  known = {name: field for name, field, _ in knobs.fields(Config())}
  found = {}
  for arg in given:
    match = OVERRIDE.fullmatch(arg)
    assert match
    no, name, text = match.groups()
    if name not in known:
      near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
      raise ValueError(f'no knob --config.{name}; the nearest are {", ".join(near)}')
    kind = known[name].annotation
    if text is None and kind is bool:
      text = 'false' if no else 'true'
    try:
      found[name] = from_text(kind, text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
      wanted, text = knobs.expected(known[name]), text or ''
      text = knobs.shorten(text if text.isprintable() else repr(text))
      raise ValueError(f'{name}={text}: give {wanted}') from None
  return found


def from_text(kind: Any, text: str | None) -> Any:
  """The value of a knob of this type, its range not checked.

  Raises:
    ValueError, SyntaxError, RecursionError, MemoryError: the text is no such value.
  """
  if text is None:
    raise ValueError('no value')
  if kind is bool:
    if text.lower() not in TRUTH:
      raise ValueError(text)
    return TRUTH[text.lower()]
  if kind in (int, float):
    return kind(text)
  if typing.get_origin(kind) is not tuple:
    return text
  if text.isidentifier():  # a string without its quotes
    return (text,)
  if len(text) > LONGEST:
    raise ValueError(f'{len(text)} characters')
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # Python warns of '1if'; the next line refuses it
    value = ast.literal_eval(text)
  inner, *rest = typing.get_args(kind)
  if isinstance(value, list):
    return tuple(value)
  single = rest == [...] and typing.get_origin(inner) is not tuple
  return (value,) if single and not isinstance(value, tuple) else value


def fail(error: object) -> NoReturn:
  """Prints one sentence on stderr and exits with status 2."""
  print(f'bapo_jax: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)


def plan(config: Config) -> int:
  """Compiles for --topology; the exit status is 0 where all of it fits, else 1."""
  if importlib.util.find_spec('libtpu') is None:
    fail(
      '--mode=plan compiles with libtpu, which is not installed; '
      'pip install -r requirements-tpu.txt (no TPU is needed)'
    )
  from bapo_jax.tools.plan.environment import PLANNING

  os.environ.update(PLANNING)
  from bapo_jax.tools.plan import plan

  if SEARCH.value:
    return 0 if plan.run_search(config, TOPOLOGY.value) else 1
  return 0 if plan.run(config, TOPOLOGY.value, MEAN_SHARE.value) else 1


def show(config: Config) -> int:
  """Shows recorded groups."""
  from bapo_jax.tools import viewer

  return viewer.show(
    config, WORKDIR.value, SHOW_GROUP.value, SHOW_WITH.value, which=CHECKPOINT.value
  )


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
  from bapo_jax.training import experiment

  return experiment.train(config, WORKDIR.value)


# Each imports what it needs: a bad flag does not wait for JAX to load.
MODES: dict[str, Callable[[Config], int]] = {
  'train': train,
  'eval': evaluate,
  'export': export,
  'plan': plan,
  'show': show,
  'table': table,
}


def run(config: Config) -> int:
  """Does what --mode says; returns the exit status."""
  mode = MODE.value
  if mode in ('train', 'table') and CHECKPOINT.value != 'newest':
    fail(
      f'--checkpoint={CHECKPOINT.value} is for --mode=eval, export and show; a run '
      'always goes on from the newest'
    )
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
      status = run(read_config(file, argv[1:], trained_here=MODE.value != 'plan'))
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
