"""Problems from users' files, jsonl, json or parquet.

`read` opens a file, detects its schema by the first row, and demands it of all.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bapo_jax.data import schemas
from bapo_jax.data.row import Row

SUFFIXES = ('.jsonl', '.json', '.parquet')

Result = TypeVar('Result')
Place = tuple[str, Any]  # ('line 3', its value)


def read(path: str) -> list[Row]:
  """The rows of a file, in its order.

  Raises:
    ValueError: no such file, or a row that cannot be read; names file, row and field.
  """
  if not os.path.isfile(path):
    raise ValueError(
      f'problems: no file {path!r}; put the data set there or set problems.source and '
      'problems.test_source to your own jsonl or parquet files'
    )
  if not path.endswith(SUFFIXES):
    raise ValueError(f'problems: {path!r} ends in none of {", ".join(SUFFIXES)}')
  stat = os.stat(path)
  # Read to be checked and a second time to be used: cached while it does not change.
  return list(_read(path, (stat.st_mtime_ns, stat.st_size)))


@functools.lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, int]) -> tuple[Row, ...]:
  del version  # a part of the cache's key
  first = next(_items(path, None), None)
  if first is None:
    raise ValueError(f'{path} holds no problem')
  schema = _at(path, first, schemas.detect)
  parse = functools.partial(schemas.parse, schema=schema)
  once: dict[Row, Row] = {}  # of 17k problems a hundred times over, 17k are held
  rows = (_at(path, item, parse) for item in _items(path, schema.fields))
  return tuple(once.setdefault(row, row) for row in rows)


def _at(path: str, item: Place, function: Callable[[Any], Result]) -> Result:
  """function(row); its error is raised with the place of the row."""
  place, row = item
  try:
    return function(row)
  except ValueError as error:
    raise ValueError(f'{path}, {place}: {error}') from error


def _items(path: str, fields: list[str] | None) -> Iterator[Place]:
  """(place, row) of each row; of a parquet file these columns, None for all."""
  return _parquet(path, fields) if path.endswith('.parquet') else _json(path)


def _json(path: str) -> Iterator[Place]:
  """Lines of JSON, or one JSON list."""
  try:
    with open(path, encoding='utf-8-sig') as file:
      start = file.read(1)
      file.seek(0)
      if start == '[' and path.endswith('.json'):
        listed = enumerate(_loads(path, 'all of it', file.read()), 1)
        items = ((f'row {i}', row) for i, row in listed)
      else:
        lines = ((f'line {i}', line) for i, line in enumerate(file, 1))
        items = ((place, _loads(path, place, line)) for place, line in lines)
      for place, row in items:
        if not isinstance(row, dict):
          shown = json.dumps(row)[:40]
          raise ValueError(f'{path}, {place}: {shown} is no JSON object')
        yield place, row
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8 text ({error})') from error


def _loads(path: str, place: str, text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}, {place}: not JSON ({error})') from error


def _parquet(path: str, fields: list[str] | None) -> Iterator[Place]:
  import pyarrow.parquet

  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      i = 0
      for batch in file.iter_batches(batch_size=1024, columns=fields):
        for row in batch.to_pylist():
          i += 1
          yield f'row {i}', row
  except pyarrow.ArrowException as error:
    reason = str(error).strip().splitlines()[0].rstrip('.')
    raise ValueError(f'{path} is no whole parquet file ({reason})') from error
