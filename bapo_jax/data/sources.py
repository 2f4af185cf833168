"""Reads the rows of problems.source and problems.test_source, once per run.

1. `absent` lists missing files, before anything is downloaded;
2. `read` reads or downloads all rows, or calls the function that returns them;
3. `check` judges them, `unique` drops repeats;
4. `imitated` returns the rows of a warm start, with solutions.

Imports `hub`, which takes a second, only if needed.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from bapo_jax import custom_code
from bapo_jax.data import dedup, layouts, local_files, sets
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.row import Row
from bapo_jax.knobs import shown
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.runtime.progress import log

Check = Callable[[Row], None]  # raises a ValueError if an answer cannot be verified
Knob = Literal['source', 'test_source']
SPLITS: dict[Knob, str] = {'source': 'train', 'test_source': 'test'}  # default splits


class Data(NamedTuple):
  """The rows of both sources as they were read, with repeats and overlap."""

  training: list[Row]
  held_out: list[Row]

  def of(self, knob: Knob) -> list[Row]:
    """Returns the rows of one source."""
    return self.training if knob == 'source' else self.held_out


def absent(problems: ProblemsConfig, knob: Knob) -> list[str]:
  """Lists the files of a source that do not exist; none for hub and tfds names.

  Raises:
    ValueError: a name is malformed.
  """
  lines = []
  for source in _sets(problems, knob).values():
    if _parse_name(knob, source) or custom_code.is_path(source):
      continue
    for path in _paths(source):
      on_hub = hf_directory.NAME.fullmatch(f'hub:{path}')
      is_file = path.endswith(local_files.SUFFIXES)
      hint = f' (or hub:{path}?)' if on_hub and not is_file else ''
      if '=' in path:
        hint = (
          ' (only sets of problems.test_source have names, of letters, digits, _, -)'
        )
      if not os.path.exists(path):
        lines.append(f'--config.problems.{knob}={path}{hint}')
  return lines


def read(problems: ProblemsConfig, *, whole: bool = False) -> Data:
  """Reads the rows of both sources; downloads named data sets, and calls functions.

  `whole` keeps all fields of a row, and accepts rows without an answer.

  Raises:
    ValueError: the rows cannot be read; the message names file and line.
  """
  training = _rows(problems, 'source', whole)
  source = problems.source
  if source == problems.test_source and not custom_code.is_path(source):
    return Data(training, training)
  return Data(training, _rows(problems, 'test_source', whole))


def _rows(problems, knob: Knob, whole):
  return [
    row._replace(set=name)
    for name, folder, items in _files(problems, knob, whole)
    for row in layouts.read_rows(items, problems.columns, whole=whole, folder=folder)
  ]


def _sets(problems, knob: Knob):
  """Returns name -> source; only held-out sets have names, also in an evaluation."""
  source = getattr(problems, knob)
  return sets.parse(source) if source == problems.test_source else {'': source}


def check(problems: ProblemsConfig, data: Data, check_row: Check) -> None:
  """Calls `check_row` on all rows.

  Raises:
    ValueError: a row fails the check; the message names the file and the line.
  """
  for knob in SPLITS:
    for i, row in enumerate(data.of(knob)):
      try:
        check_row(row)
      except ValueError as error:
        # The rows do not carry their locations: the source is read up to this row.
        items = (item for *_, items in _files(problems, knob) for item in items)
        place, _ = next(itertools.islice(items, i, None))
        raise ValueError(f'{place}: {error}') from error


def unique(
  problems: ProblemsConfig, data: Data, knob: Knob, *, quiet: bool = False
) -> list[Row]:
  """Returns the rows of a source, each once unless duplicates='keep'; logs repeats.

  A problem may be in several named sets, once in each.
  """
  drop = problems.duplicates == 'drop'
  done = 'the first of each is kept' if drop else 'all kept: problems.duplicates=keep'
  kept = []
  for name, source in _sets(problems, knob).items():
    rows = [row for row in data.of(knob) if row.set == name]
    once, message = dedup.deduplicate(rows, f'problems.{knob}={source}')
    if message and not quiet:
      log(f'{message}; {done}')
    kept += once if drop else rows
  return kept


def imitated(problems: ProblemsConfig, data: Data) -> list[Row]:
  """Returns the rows that the warm start imitates, by rank: those with `solutions`.

  These are the rows of the default problems if no training problem has solutions.

  Raises:
    ValueError: solutions are no texts.
  """
  check_solutions(problems, data)
  rows = [row for row in data.training if row.solutions]
  rows = rows or read(ProblemsConfig()).training
  return sorted(rows, key=lambda row: row.rank)


def check_solutions(problems: ProblemsConfig, data: Data) -> None:
  """Raises a ValueError for solutions of training problems that are no texts."""
  for row in data.training:
    if not callable(row.solutions) and not _are_solutions(row.solutions):
      raise ValueError(
        f'problems.source={problems.source}: {row.problem[:60]!r} has the solutions '
        f'{shown(row.solutions)}; give a list of texts, or of lists of texts: turns '
        'and messages in turn'
      )


def file_digests(problems: ProblemsConfig) -> list[str]:
  """Returns a digest of each file of problems.source, which change with their text."""
  if custom_code.is_path(problems.source):
    return [custom_code.digest(problems.source)]
  paths = _paths(','.join(_sets(problems, 'source').values()))
  return [custom_code.digest(path) for path in paths if os.path.exists(path)]


def _are_solutions(value):
  return isinstance(value, tuple) and all(
    isinstance(text, str)
    for solution in value
    for text in (solution if isinstance(solution, tuple) and solution else [solution])
  )


def _files(problems, knob: Knob, whole=False):
  """Yields (set, folder of pictures, (location, fields) pairs) of each file."""

  def reads(column: str) -> bool:
    return whole or layouts.known(column, problems.columns)

  for held_out, source in _sets(problems, knob).items():
    if custom_code.is_path(source):
      try:
        rows = list(custom_code.load(source).bound(problems.custom)(SPLITS[knob]))
      except (Exception, SystemExit) as error:  # a user's function may raise anything
        reason = custom_code.described(error, source)
        raise ValueError(f'{source} raises {reason}') from error
      if not rows:
        raise ValueError(f'{source} returns no rows; return a list of dicts')
      items = ((f'{source}, row {i}', _plain(row)) for i, row in enumerate(rows, 1))
      yield held_out, '', items
      continue
    paths = _paths(source)
    if named := _parse_name(knob, source):
      from bapo_jax.data import hub

      where, name, split = named
      if where == 'tfds':
        yield held_out, '', hub.tfds_items(name, split, f'problems.{knob}')
        continue
      paths = hub.find_files(name, split, f'problems.{knob}')
    for path in paths:
      yield held_out, os.path.dirname(path), local_files.items(path, reads)


def _plain(value):
  """Returns a value of a row with Python's types, as a file would have them."""
  if hasattr(value, 'tolist'):  # a number or an array of NumPy, JAX or torch
    value = value.tolist()
  if isinstance(value, Mapping):
    return {name: _plain(x) for name, x in value.items()}
  return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def _paths(source):
  """Returns the files of a source; a comma may also be in the name of one file."""
  return [source] if os.path.exists(source) else source.split(',')


def _parse_name(knob: Knob, source):
  """Returns ('hub' or 'tfds', name@revision, split); None for other sources."""
  where, _, rest = source.partition(':')
  if where not in ('hub', 'tfds') or where == source:
    return None
  name, _, split = rest.partition(':')
  on_hub = hf_directory.NAME.fullmatch(f'hub:{name}')
  if not name or ('/' in name if where == 'tfds' else not on_hub):
    raise ValueError(
      f'problems.{knob}={source[:80]} is malformed; write hub:owner/name:split, '
      'hub:owner/name@revision:split or tfds:name:split'
    )
  return where, name, split or SPLITS[knob]
