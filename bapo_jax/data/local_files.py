"""Reads problems from jsonl, json and parquet files, with or without pictures.

The first row decides the layout of the file (`layouts.detect`). Pictures are bytes in
the file, or paths relative to its folder.

Lines are parsed by `json`. pyarrow would infer a type for every column: it turns the
answers 2024-01-01 and 12345678901234567890123 into a time and a float, and rejects a
file with the answers 5 and "5".
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from bapo_jax.data import layouts, pictures
from bapo_jax.data.row import Row
from bapo_jax.knobs import shown

SUFFIXES = ('.jsonl', '.json', '.parquet')
BATCH = 256  # rows of a parquet file that are converted at once

Place = tuple[str, Any]  # ('line 3', the row)


def read(path: str, check: Callable[[Row], None] | None = None) -> list[Row]:
  """Returns the rows of a file, in file order.

  Raises:
    ValueError: the file or a row cannot be read, or a row fails `check`.
  """
  if not path.endswith(SUFFIXES):
    raise ValueError(f'{path} has an unknown suffix; use {", ".join(SUFFIXES)}')
  try:
    status = os.stat(path)
    # Cached: a start reads a file several times, to check it, derive knobs and train.
    unit, rows = _read(path, status.st_mtime_ns, status.st_size)
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror or error}); set problems.source and '
      'problems.test_source to jsonl or parquet files'
    ) from error
  if check:
    for i, row in enumerate(rows, 1):
      _at(path, (f'{unit} {i}', row), check)
  return list(rows)


@functools.lru_cache(maxsize=2)
def _read(path: str, mtime_ns: int, size: int) -> tuple[str, tuple[Row, ...]]:
  """Returns the name of a row ('line', 'row') and all rows; cached by all arguments."""
  del mtime_ns, size
  items = _parquet if path.endswith('.parquet') else _json
  first = next(items(path, None), None)
  if first is None:
    raise ValueError(f'{path} contains no problem; give another file')
  layout = _at(path, first, layouts.detect)
  columns = [*layout.columns, *filter(layouts.is_picture, first[1])]
  parse = functools.partial(_parse, layout=layout, folder=os.path.dirname(path))
  # Some mirrors repeat 17k problems a hundred times, so equal rows share memory.
  unique: dict[Row, Row] = {}
  rows = (_at(path, item, parse) for item in items(path, columns))
  return first[0].split()[0], tuple(unique.setdefault(row, row) for row in rows)


def _at(path: str, item: Place, function: Callable[[Any], Any]) -> Any:
  place, row = item
  try:
    return function(row)
  except ValueError as error:
    raise ValueError(f'{path}, {place}: {error}') from error


def _parse(row: dict[str, Any], layout: layouts.Layout, folder: str) -> Row:
  field, values = layouts.pictures(row)
  files = []
  for i, value in enumerate(values, 1):
    try:
      files.append(pictures.checked(_picture(value, folder)).data)
    except ValueError as error:
      raise ValueError(f'field {field!r}, picture {i}: {error}') from error
  return layouts.parse(row, layout)._replace(pictures=tuple(files))


def _picture(value: Any, folder: str) -> bytes:
  """Returns the bytes of an image file, given as bytes, a path or a `datasets` dict."""
  if isinstance(value, dict):
    value = value.get('path') if value.get('bytes') is None else value['bytes']
  if isinstance(value, bytes):
    return value
  if not isinstance(value, str) or not value:
    raise ValueError(f'{shown(value)} is not a picture; give bytes or a path')
  path = os.path.join(folder, value)
  try:
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    raise ValueError(f'{path[:200]!r}: {error.strerror}; correct the path') from error


def _json(path: str, columns: list[str] | None) -> Iterator[Place]:
  """Yields (place, row) for each line, or each item of a JSON list, with all fields."""
  del columns
  try:
    with open(path, encoding='utf-8-sig') as file:
      listed = path.endswith('.json') and file.read(1024).lstrip().startswith('[')
      file.seek(0)
      if listed:
        rows = _at(path, ('list', file.read()), _loads)
        items = ((f'row {i}', row) for i, row in enumerate(rows, 1))
      else:
        places = ((f'line {i}', line) for i, line in enumerate(file, 1))
        items = ((place, _at(path, (place, line), _loads)) for place, line in places)
      for place, row in items:
        if not isinstance(row, dict):
          raise ValueError(
            f'{path}, {place}: {shown(row)} is not a JSON object; give named fields'
          )
        yield place, row
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 text ({error}); convert it, for example with iconv -t utf-8'
    ) from error


def _loads(text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON ({error}); correct the text') from error


def _parquet(path: str, columns: list[str] | None) -> Iterator[Place]:
  """Yields (place, row) with `columns`, or with all, where unknown columns are None."""
  import pyarrow.parquet

  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      names = file.schema_arrow.names
      # A column without a meaning may have a type that Python cannot represent.
      readable = [name for name in names if layouts.known(name)]
      if twice := {x for x in readable if readable.count(x) > 1}:
        raise ValueError(f'{path} has two columns named {min(twice)!r}; remove one')
      batches = file.iter_batches(BATCH if columns else 1, columns=columns or readable)
      rows = (row for batch in batches for row in batch.to_pylist())
      for i, row in enumerate(rows, 1):
        yield f'row {i}', row if columns else dict.fromkeys(names) | row
  except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
    if isinstance(error, OSError) and error.errno:
      raise  # the file cannot be opened
    reason = str(error).strip().splitlines()[0].rstrip('.')[:200]
    raise ValueError(
      f'{path} is not a readable parquet file ({reason}); write or download it again'
    ) from error
