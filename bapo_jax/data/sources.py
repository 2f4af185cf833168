"""Reads the rows of problems.source and problems.test_source, once per run.

1. `absent` lists missing files, before anything is downloaded;
2. `read` reads, downloads or generates all rows;
3. `check` judges them, `unique` drops repeats;
4. `sft_problems` are the problems of a warm start.

Imports `hub`, which takes a second, only if needed.
"""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from bapo_jax import custom_code
from bapo_jax.data import dedup, layouts, local_files
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


class Data(NamedTuple):
  """The rows of both sources as they were read, with repeats and overlap."""

  training: list[Row]
  held_out: list[Row]
  generated: dict[str, tuple[Problem, ...]]  # source -> its problems, if it makes them

  def of(self, knob: Knob) -> list[Row]:
    """Returns the rows of one source."""
    return self.training if knob == 'source' else self.held_out


def absent(problems: ProblemsConfig, knob: Knob) -> list[str]:
  """Lists the files of a source that do not exist; none for hub and tfds names.

  Raises:
    ValueError: a name is malformed.
  """
  source = getattr(problems, knob)
  if _parse_name(knob, source) or source in MADE or custom_code.is_path(source):
    return []
  lines = []
  for path in _paths(source):
    on_hub = hf_directory.NAME.fullmatch(f'hub:{path}')
    is_file = path.endswith(local_files.SUFFIXES)
    hint = f' (or hub:{path}?)' if on_hub and not is_file else ''
    if not os.path.exists(path):
      lines.append(f'--config.problems.{knob}={path}{hint}')
  return lines


def read(problems: ProblemsConfig, *, whole: bool = False) -> Data:
  """Reads or generates the rows of both sources; downloads named data sets.

  `whole` keeps all fields of a row, and accepts rows without an answer.

  Raises:
    ValueError: problems cannot be generated or read; the message names file and line.
  """
  names = {knob: getattr(problems, knob) for knob in SPLITS}
  generated = {x: MAKERS[x](problems) for x in {*names.values()} & {*MADE}}
  rows: dict[str, list[Row]] = {}
  for knob, source in names.items():
    if source in MADE:
      ids = [*range(problems.count)]
      ids = ids[: problems.train] if knob == 'source' else ids[problems.train :]
      if source != 'drawn':
        # Recorded runs number problems in the order of tensorflow-datasets, which sorts
        # by the MD5 sum of split and id. A different order would change the run.
        ids.sort(key=lambda i: hashlib.md5(f'{SPLITS[knob]}{i}'.encode()).digest())
      rows[knob] = [generated[source][i].row for i in ids]
    elif knob == 'test_source' and source == names['source']:
      rows[knob] = rows['source']
    else:
      rows[knob] = [
        row
        for folder, items in _files(problems, knob, whole)
        for row in layouts.read_rows(items, whole=whole, folder=folder)
      ]
  return Data(rows['source'], rows['test_source'], generated)


def check(problems: ProblemsConfig, data: Data, check_row: Check) -> None:
  """Calls `check_row` on all rows that are not generated, whose answers are right.

  Raises:
    ValueError: a row fails the check; the message names the file and the line.
  """
  for knob in SPLITS:
    if getattr(problems, knob) in MADE:
      continue
    for i, row in enumerate(data.of(knob)):
      try:
        check_row(row)
      except ValueError as error:
        # The rows do not carry their locations: the source is read up to this row.
        items = (item for _, items in _files(problems, knob) for item in items)
        place, _ = next(itertools.islice(items, i, None))
        raise ValueError(f'{place}: {error}') from error


def unique(
  problems: ProblemsConfig, data: Data, knob: Knob, *, quiet: bool = False
) -> list[Row]:
  """Returns the rows of a source, each once unless duplicates='keep'; logs repeats."""
  source = getattr(problems, knob)
  rows = data.of(knob)
  if source in MADE:  # distinct by construction, even with blank pictures
    return rows
  once, message = dedup.deduplicate(rows, f'problems.{knob}={source}')
  drop = problems.duplicates == 'drop'
  if message and not quiet:
    log(
      f'{message}; '
      f'{"the first of each is kept" if drop else "all kept: problems.duplicates=keep"}'
    )
  return once if drop else rows


def sft_problems(
  problems: ProblemsConfig, data: Data
) -> tuple[Sequence[Problem], Solver]:
  """Returns the warm start's problems and the function that writes their solutions.

  The problems are synthetic unless problems.source is countdown or drawn, or a function
  whose rows have `solutions`: texts, or lists of turns and messages in turn.

  Raises:
    ValueError: too few problems exist, or the embedded policy cannot read them.
  """
  source = problems.source
  if custom_code.is_path(source):
    solutions = {x: json.loads(x.fields).get('solutions') for x in data.training}
    if all(solutions.values()):
      return [
        Problem(row, 0, ()) for row in solutions
      ], lambda problem, rng, *_: solutions[problem.row][
        rng.integers(len(solutions[problem.row]))
      ]
  if source not in ('countdown', 'drawn'):
    generated = data.generated.get('synthetic') or synthetic.generate(problems)
    return synthetic.to_imitate(problems, generated)
  if (wording := getattr(problems, source).wording) != 'short':
    raise ValueError(
      f'problems.{source}.wording={wording!r} needs letters that the embedded policy '
      "(model.path='') has no tokens for; set wording='short' or model.path"
    )
  solve: Solver = drawn.solve
  if source == 'countdown':
    solve = functools.partial(countdown.solve, largest=problems.countdown.target)
  return data.generated[source][: problems.train], solve


def _files(problems, knob: Knob, whole=False):
  """Yields (folder of pictures, (location, fields) pairs) of each file of a source."""
  source = getattr(problems, knob)
  if custom_code.is_path(source):
    try:
      rows = list(custom_code.load(source).bound(problems.custom)())
    except (Exception, SystemExit) as error:  # a user's function may raise anything
      reason = custom_code.described(error, source)
      raise ValueError(f'{source} raises {reason}') from error
    if not rows:
      raise ValueError(f'{source} returns no rows; return a list of dicts')
    yield '', ((f'{source}, row {i}', _plain(row)) for i, row in enumerate(rows, 1))
    return
  paths = _paths(source)
  if named := _parse_name(knob, source):
    from bapo_jax.data import hub

    where, name, split = named
    if where == 'tfds':
      yield '', hub.tfds_items(name, split, f'problems.{knob}')
      return
    paths = hub.find_files(name, split, f'problems.{knob}')
  for path in paths:
    yield os.path.dirname(path), local_files.items(path, whole=whole)


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
