"""From problems.source and problems.test_source to rows.

  synthetic, countdown       made from the seed; splits `train` and `test`
  drawn                      likewise, with pictures
  a.jsonl, a.jsonl,b.parquet files, read in this order
  hub:owner/name:split       files of a data set on the hub; owner/name@revision pins it
  tfds:name:split            a data set of tensorflow-datasets

1. `missing` makes or reads all that is on this machine, and lists absent files;
2. `download` fetches a data set given by name;
3. `load` returns the rows, each problem once, and stores them in the data directory;
   `rows` only returns them, `pictured_rows` with their pictures;
4. `sft_problems` returns those that the warm start imitates.

builder and hub are imported late: tensorflow-datasets takes a second, and `missing`
runs before the first screen.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from numpy.random import Generator

from bapo_jax.data import (
  countdown,
  dedup,
  drawn,
  local_files,
  pictured_files,
  synthetic,
)
from bapo_jax.data.drawn import Drawn
from bapo_jax.data.knobs import MADE, ProblemsConfig
from bapo_jax.data.pictured_files import PicturedRow
from bapo_jax.data.row import Row
from bapo_jax.data.synthetic import Problem
from bapo_jax.runtime import hub_names
from bapo_jax.runtime.progress import log

Check = Callable[[Row], None]  # raises ValueError where an answer cannot be verified

Knob = Literal['source', 'test_source']
# The split of a knob's problems, where a name gives no other.
SPLITS: dict[Knob, str] = {'source': 'train', 'test_source': 'test'}


def missing(
  problems: ProblemsConfig,
  knob: Knob,
  check: Check | None = None,
  pictured: bool = False,
) -> list[str]:
  """The files of a source that are not on this machine; names are not looked up.

  Makes problems and reads files, all of them, so that every error comes now.

  Args:
    check: raises ValueError where a row's answer cannot be verified.
    pictured: pictures are read, too.

  Raises:
    ValueError: they cannot be made or read, or a name is malformed.
  """
  source = getattr(problems, knob)
  if source == 'drawn' and pictured:
    _drawn(problems)
  elif source in MADE:
    _generate(problems, source)
  elif _by_name(source):
    _parse_name(knob, source)
  else:
    paths = source.split(',')
    if absent := [path for path in paths if not os.path.lexists(path)]:
      return [f'--config.problems.{knob}={path}{_hint(path)}' for path in absent]
    read = pictured_files.read if pictured else local_files.read
    for path in paths:
      read(path, check)
  return []


def _hint(path: str) -> str:
  """What a path that is not there may have been meant as: it is never looked up."""
  if not _on_hub(hub_names.PREFIX + path):
    return ''
  return '' if path.endswith(local_files.SUFFIXES) else f' (or hub:{path}?)'


def sft_problems(
  problems: ProblemsConfig,
) -> tuple[Sequence[Problem | Drawn], Callable[[Any, Generator, float, float], str]]:
  """The problems that the warm start imitates, those of training, and their solver.

  For a source that is not made, the problems of problems.family stand in.

  Raises:
    ValueError: they cannot be made, or the embedded policy cannot read them.
  """
  source = problems.source
  if source not in ('countdown', 'drawn'):
    return synthetic.to_imitate(problems)
  if (wording := getattr(problems, source).wording) != 'short':
    raise ValueError(
      f'problems.{source}.wording={wording!r} is not for the embedded policy '
      "(model.path=''), whose tokenizer has no such letters; give wording='short', or "
      'a model.path'
    )
  if source == 'drawn':
    return _drawn(problems)[: problems.train], drawn.solve
  solver = functools.partial(countdown.solve, largest=problems.countdown.target)
  return countdown.generate(problems)[: problems.train], solver


def download(
  problems: ProblemsConfig,
  knob: Knob,
  check: Check | None = None,
  pictured: bool = False,
) -> None:
  """Downloads a data set given by name, unless it is on this machine, and reads it.

  Args:
    check: raises ValueError where a row's answer cannot be verified.
    pictured: pictures are read, too.

  Raises:
    ValueError: it cannot be downloaded, or a row cannot be read.
  """
  source = getattr(problems, knob)
  if _by_name(source) and pictured:
    pictured_rows(problems, knob, check)
  elif _by_name(source):
    _fetch(knob, source)(check)


def load(problems: ProblemsConfig, knob: Knob, data_dir: str) -> list[Row]:
  """The rows of a source, each problem once unless problems.duplicates='keep'.

  Stores them in `data_dir`; logs repeats.

  Raises:
    ValueError: they cannot be made or read.
  """
  from bapo_jax.data import builder

  source = getattr(problems, knob)
  if source in MADE:
    rows = _generate(problems, source)
    splits = {'train': rows[: problems.train], 'test': rows[problems.train :]}
    stored = builder.stored(data_dir, source, splits, SPLITS[knob])
    # In the order of the file, by which all recorded runs number their problems.
    return _deduplicate(problems, knob, list(stored.values()))
  rows = _deduplicate(problems, knob, _read(knob, source))
  name = os.path.splitext(os.path.basename(source))[0]
  stored = builder.stored(data_dir, name, {'rows': rows}, 'rows')
  return [stored[i] for i in range(len(rows))]


def rows(problems: ProblemsConfig, knob: Knob) -> list[Row]:
  """The rows that `load` returns, in some order; nothing is stored or logged.

  Raises:
    ValueError: they cannot be made or read.
  """
  source = getattr(problems, knob)
  if source in MADE:
    made = _generate(problems, source)
    found = made[_split(problems, knob)]
  else:
    found = _read(knob, source)
  drop = problems.duplicates == 'drop'
  return dedup.deduplicate(found, source)[0] if drop else found


def pictured_rows(
  problems: ProblemsConfig, knob: Knob, check: Check | None = None
) -> list[PicturedRow]:
  """The rows of a source with their pictures, repeats among them.

  Args:
    check: raises ValueError where an answer cannot be verified.

  Raises:
    ValueError: they cannot be made or read.
  """
  source = getattr(problems, knob)
  if source == 'drawn':
    return [problem.pictured() for problem in _drawn(problems)[_split(problems, knob)]]
  if source in MADE or source.startswith('tfds:'):
    return [PicturedRow(row, ()) for row in rows(problems, knob)]
  paths = source.split(',')
  if _by_name(source):
    paths = _found_on_hub(knob, source)
  return [row for path in paths for row in pictured_files.read(path, check)]


def _split(problems: ProblemsConfig, knob: Knob) -> slice:
  """Of made problems those of a knob."""
  train = problems.train
  return slice(train) if knob == 'source' else slice(train, None)


def _drawn(problems: ProblemsConfig) -> Sequence[Drawn]:
  return drawn.generate(problems.drawn, problems.seed, problems.count)


def _deduplicate(problems: ProblemsConfig, knob: Knob, rows: list[Row]) -> list[Row]:
  name = f'problems.{knob}={getattr(problems, knob)}'
  unique, message = dedup.deduplicate(rows, name)
  drop = problems.duplicates == 'drop'
  if message:
    counts = 'the first of each counts' if drop else 'problems.duplicates=keep'
    log(f'{message}; {counts}')
  return unique if drop else rows


def _generate(problems: ProblemsConfig, source: str) -> list[Row]:
  """Made problems as rows, the training problems first; raises ValueError."""
  if source == 'synthetic':
    return [Row(p.text, str(p.answer)) for p in synthetic.generate(problems)]
  if source == 'drawn':
    raise ValueError(
      "problems.source='drawn' has pictures, which the policy does not see; choose "
      'other problems, or a policy that sees: a model with a vision tower, or for the '
      'embedded one --config.model.tower.layers=2'
    )
  wording = problems.countdown.wording
  found = countdown.generate(problems)
  return [countdown.row(p.numbers, p.answer, wording) for p in found]


def _read(knob: Knob, source: str) -> list[Row]:
  """The rows of files, or of a data set given by name."""
  if _by_name(source):
    return _fetch(knob, source)(None)
  return _read_files(source.split(','), None)


def _read_files(paths: Sequence[str], check: Check | None) -> list[Row]:
  return [row for path in paths for row in local_files.read(path, check)]


def _by_name(source: str) -> bool:
  return source.startswith(('hub:', 'tfds:'))


def _parse_name(knob: Knob, source: str) -> tuple[str, str, str]:
  """(hub or tfds, name, split); a name of the hub with its revision, if any."""
  where, _, rest = source.partition(':')
  name, _, split = rest.partition(':')
  whole = hub_names.PREFIX + name
  if not name or ('/' in name if where == 'tfds' else not _on_hub(whole)):
    raise ValueError(
      f'problems.{knob}={source[:80]}: write hub:owner/name:split, '
      'hub:owner/name@revision:split or tfds:name:split'
    )
  return where, name, split or SPLITS[knob]


def _on_hub(name: str) -> bool:
  return hub_names.NAME.fullmatch(name) is not None


def _found_on_hub(knob: Knob, source: str) -> Sequence[str]:
  """The files of a data set on the hub, downloaded."""
  from bapo_jax.data import hub

  _, name, split = _parse_name(knob, source)
  return hub.find_files(name, split, f'problems.{knob}')


def _fetch(knob: Knob, source: str) -> Callable[[Check | None], list[Row]]:
  """Downloads a data set given by name; returns its reader, which takes a check."""
  from bapo_jax.data import hub

  where, name, split = _parse_name(knob, source)
  if where == 'hub':
    return functools.partial(_read_files, _found_on_hub(knob, source))
  prepared = hub.prepare_tfds(name, split, f'problems.{knob}')
  return functools.partial(hub.read_tfds, prepared, split)
