"""Reads problems from parquet, jsonl, json and csv files, with or without pictures.

1. `_items` yields the location (file and line) and the fields of each row;
2. `layouts.read_rows` converts them to rows by the layout of the first row.

Pictures are bytes in the file, or paths relative to its folder. Text files may be
compressed with gzip.

Lines are parsed by `json` and `csv`. pyarrow would infer a type for every column: it
turns the answers 2024-01-01, 007 and 12345678901234567890123 into a time, 7 and a
float, and rejects a file with the answers 5 and "5".
"""

import collections
import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from bapo_jax.data import layouts
from bapo_jax.runtime.files import first_line

TEXT = ('.jsonl', '.json', '.csv')
SUFFIXES = ('.parquet', *TEXT, *(f'{suffix}.gz' for suffix in TEXT))
# Start of a .json file with one value, not a row per line: a list, or an object that is
# indented or contains the list as `data`.
WHOLE = re.compile(r'\s*(\[|\{\s*(\n|"data"\s*:\s*\[))')
BATCH = 256  # rows of a parquet file that are converted at once

Item = tuple[str, Any]  # (file with the number of the line or row, from 1; the fields)


def items(path: str, reads: Callable[[str], bool] = layouts.known) -> Iterator[Item]:
  """Yields (location, fields) of each row of a file.

  `reads` tells which columns of a parquet file are read; the others are None.

  Raises:
    ValueError: the file cannot be read, or has no row.
  """
  if not path.endswith(SUFFIXES):
    raise ValueError(f'{path} has an unknown suffix; use {", ".join(SUFFIXES)}')
  item = None
  try:
    for item in _items(path, reads):
      yield item
  except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
    reason = getattr(error, 'strerror', None) or first_line(error)
    raise ValueError(
      f'{path} cannot be read ({reason}); write or download it again, text as UTF-8, '
      'or set problems.source and problems.test_source to other files'
    ) from error
  if item is None:
    raise ValueError(f'{path} contains no problem; give another file')


def _items(path, reads):
  kind = path.removesuffix('.gz').rpartition('.')[2]
  if kind == 'parquet':
    yield from _parquet(path, reads)
    return
  opened = gzip.open if path.endswith('.gz') else open
  # newline='': csv needs the line ends within quotes as they are.
  with opened(path, 'rt', encoding='utf-8-sig', newline='') as file:
    is_list = kind == 'json' and WHOLE.match(file.read(1024))
    file.seek(0)
    if kind == 'csv':
      yield from _csv(path, file)
    elif is_list:
      yield from _json_list(path, file.read())
    else:
      for number, line in enumerate(file, 1):
        if text := line.rstrip():
          yield f'{path}, line {number}', _loads(path, text, number)


def _json_list(path, text):
  """Yields the objects of a JSON list, which may be the field `data` of an object."""
  rows = _loads(path, text, 1)
  if isinstance(rows, dict):
    rows = rows.get('data')
  if not isinstance(rows, list):
    raise ValueError(
      f'{path} has no list of rows; write [row, ...], {{"data": [row, ...]}}, or one '
      'row per line'
    )
  for number, row in enumerate(rows, 1):
    yield f'{path}, row {number}', row


def _loads(path, text, line):
  """Parses JSON text that starts in a line of the file; an error names its line."""
  try:
    return json.loads(text, object_pairs_hook=_object)
  except (ValueError, RecursionError) as error:  # too many digits, too deep
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
      line += error.lineno - 1
      reason = f'not JSON ({error.msg}, column {error.colno})'
    raise ValueError(f'{path}, line {line}: {reason}; correct it') from error


def _object(pairs: list[tuple[str, Any]]):
  _check_names([name for name, _ in pairs])
  return dict(pairs)


def _check_names(names: Sequence[str], place: str = ''):
  """Raises ValueError for a name that occurs twice: one of its values would be lost."""
  if len(set(names)) < len(names):
    ((name, _),) = collections.Counter(names).most_common(1)
    raise ValueError(f'{place}the field {name!r} occurs twice; keep one')


def _csv(path, file: IO[str]):
  """Yields the rows below the header, all values as text; skips blank lines."""
  reader = csv.DictReader(file, strict=True)
  try:
    _check_names([*filter(None, reader.fieldnames or ())], f'{path}: ')
    for row in reader:
      if not any(value and str(value).strip() for value in row.values()):
        continue  # a blank line
      place = f'{path}, line {reader.line_num}'
      if None in row or None in row.values():
        raise ValueError(
          f'{place}: more or fewer values than the {len(reader.fieldnames or ())} '
          'columns of the header; quote values that contain a comma'
        )
      yield place, row
  except csv.Error as error:
    line = reader.line_num + 1
    raise ValueError(
      f'{path}, line {line}: not CSV ({error}); correct it, or write jsonl'
    ) from error


def _parquet(path, reads):
  """Yields rows in which columns that are not read are None."""
  import pyarrow.parquet

  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      names = file.schema_arrow.names
      _check_names(names, f'{path}: ')
      # A column without a meaning may have a type that Python cannot represent.
      batches = file.iter_batches(BATCH, columns=[*filter(reads, names)])
      rows = (row for batch in batches for row in batch.to_pylist())
      for number, row in enumerate(rows, 1):
        yield f'{path}, row {number}', dict.fromkeys(names) | row
  except pyarrow.ArrowException as error:
    raise OSError(str(error)) from error
