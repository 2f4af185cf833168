"""Reads the rows of problems.source and problems.test_source.

Imports `hub`, which takes a second, only if needed: `missing` runs before any output.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Literal

from bapo_jax import own_code
from bapo_jax.data import dedup, layouts, local_files, pictures
from bapo_jax.data.knobs import MADE, ProblemsConfig
from bapo_jax.data.made import countdown, drawn, synthetic
from bapo_jax.data.made.problem import Problem, Solver
from bapo_jax.data.row import Row
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.runtime.progress import log

Check = Callable[[Row], None]  # raises a ValueError if an answer cannot be verified
Knob = Literal['source', 'test_source']
SPLITS: dict[Knob, str] = {'source': 'train', 'test_source': 'test'}  # default splits
MAKERS: dict[str, Callable[[ProblemsConfig], tuple[Problem, ...]]] = {
  'synthetic': synthetic.generate,
  'countdown': countdown.generate,
  'drawn': drawn.generate,
}


def missing(
  problems: ProblemsConfig,
  knob: Knob,
  check: Check | None = None,
  has_vision: bool = False,
) -> list[str]:
  """Lists the files of a source that do not exist; none for hub and tfds names.

  If all exist, reads or generates all problems, so that errors surface early. `check`
  raises a ValueError if an answer cannot be verified; `has_vision`: the model has a
  vision tower.

  Raises:
    ValueError: problems cannot be generated or read, or a name is malformed.
  """
  source = getattr(problems, knob)
  if _parse_name(knob, source):
    return []
  if source not in MADE and not own_code.is_place(source):
    absent = [path for path in source.split(',') if not os.path.exists(path)]
    if absent:
      return [f'--config.problems.{knob}={path}{_hint(path)}' for path in absent]
  check_rows(problems, knob, check, has_vision)
  return []


def _hint(path: str) -> str:
  on_hub = hf_directory.NAME.fullmatch(f'hub:{path}')
  is_file = path.endswith(local_files.SUFFIXES)
  return f' (or hub:{path}?)' if on_hub and not is_file else ''


def download(
  problems: ProblemsConfig,
  knob: Knob,
  check: Check | None = None,
  has_vision: bool = False,
) -> None:
  """Downloads a named data set if necessary, and checks its rows like `missing`."""
  if _parse_name(knob, getattr(problems, knob)):
    check_rows(problems, knob, check, has_vision)


def check_rows(
  problems: ProblemsConfig, knob: Knob, check: Check | None, has_vision: bool
) -> None:
  """Reads the rows of a source, and checks those that are not generated.

  Raises:
    ValueError: a row fails a check; the message names the file and the line.
  """

  def check_row(row: Row) -> None:
    if check:
      check(row)
    pictures.check_row(row, has_vision=has_vision)

  rows = _read(problems, knob, check_row)
  if getattr(problems, knob) in MADE:  # generated answers are right
    pictures.check_row(rows[0], has_vision=has_vision)


def load(problems: ProblemsConfig, knob: Knob, *, quiet: bool = False) -> list[Row]:
  """Returns the rows of a source, each once unless duplicates='keep'; logs repeats.

  Raises:
    ValueError: problems cannot be generated or read.
  """
  source = getattr(problems, knob)
  rows = _read(problems, knob)
  if source in MADE:  # distinct by construction, even with blank pictures
    return rows
  unique, message = dedup.deduplicate(rows, f'problems.{knob}={source}')
  drop = problems.duplicates == 'drop'
  if message and not quiet:
    log(
      f'{message}; '
      f'{"the first of each is kept" if drop else "all kept: problems.duplicates=keep"}'
    )
  return unique if drop else rows


def sft_problems(problems: ProblemsConfig) -> tuple[Sequence[Problem], Solver]:
  """Returns the warm start's problems and the function that writes their solutions.

  The problems are synthetic unless problems.source is countdown or drawn.

  Raises:
    ValueError: too few problems exist, or the embedded policy cannot read them.
  """
  source = problems.source
  if source not in ('countdown', 'drawn'):
    return synthetic.to_imitate(problems)
  if (wording := getattr(problems, source).wording) != 'short':
    raise ValueError(
      f'problems.{source}.wording={wording!r} needs letters that the embedded policy '
      "(model.path='') has no tokens for; set wording='short' or model.path"
    )
  solve: Solver = drawn.solve
  if source == 'countdown':
    solve = functools.partial(countdown.solve, largest=problems.countdown.target)
  return MAKERS[source](problems)[: problems.train], solve


def _read(
  problems: ProblemsConfig, knob: Knob, check: Check | None = None
) -> list[Row]:
  """Returns all rows of a source, with repeats; calls `check` on rows not generated."""
  source = getattr(problems, knob)
  if source in MADE:
    train = problems.train
    count = problems.count
    ids = list(range(train) if knob == 'source' else range(train, count))
    if source != 'drawn':
      # Recorded runs number problems in the order of tensorflow-datasets, which sorts
      # by the MD5 sum of split and id. A different order would change the run.
      ids.sort(key=lambda i: hashlib.md5(f'{SPLITS[knob]}{i}'.encode()).digest())
    generated = MAKERS[source](problems)
    return [generated[i].row for i in ids]
  whole = problems.whole
  if own_code.is_place(source):
    return _own_rows(problems, source, check)
  paths = source.split(',')
  if named := _parse_name(knob, source):
    from bapo_jax.data import hub

    where, name, split = named
    if where == 'tfds':
      return hub.read_tfds(name, split, f'problems.{knob}', check, whole=whole)
    paths = hub.find_files(name, split, f'problems.{knob}')
  return [row for path in paths for row in local_files.read(path, check, whole=whole)]


def _own_rows(
  problems: ProblemsConfig, path: str, check: Check | None = None
) -> list[Row]:
  """Returns the rows that a user's function returns, each a dict as in a file."""
  function = own_code.bind(path, problems.custom)
  try:
    dicts = list(function())
  except Exception as error:  # a user's function may raise anything
    reason = own_code.described(error, own_code.file_of(path))
    raise ValueError(f'{path} raises {reason}') from error
  if not dicts:
    raise ValueError(f'{path} returns no rows; return a list of dicts')
  items = ((f'{path}, row {i}', row) for i, row in enumerate(dicts, 1))
  return layouts.read_rows(items, check, whole=problems.whole)


def _parse_name(knob: Knob, source: str) -> tuple[str, str, str] | None:
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
