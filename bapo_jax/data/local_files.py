"""Reads problems from parquet, jsonl, json and csv files, with or without pictures.

The first row decides the layout of the file (`layouts.detect`). Pictures are bytes in
the file, or paths relative to its folder. Text files may be compressed with gzip.

Lines are parsed by `json` and `csv`. pyarrow would infer a type for every column: it
turns the answers 2024-01-01, 007 and 12345678901234567890123 into a time, 7 and a
float, and rejects a file with the answers 5 and "5".
"""

import array
import contextlib
import csv
import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from bapo_jax.data import layouts, pictures
from bapo_jax.data.row import Row
from bapo_jax.knobs import shown

TEXT = ('.jsonl', '.json', '.csv')
SUFFIXES = ('.parquet', *TEXT, *(f'{suffix}.gz' for suffix in TEXT))
# Start of a .json file with one value, not a row per line: a list, or an object that is
# indented or contains the list as `data`.
WHOLE = re.compile(r'\s*(\[|\{\s*(\n|"data"\s*:\s*\[))')
BATCH = 256  # rows of a parquet file that are converted at once

Item = tuple[int, Any]  # (number of the line or row, from 1; the fields)


def read(
  path: str, check: Callable[[Row], None] | None = None, *, whole: bool = False
) -> list[Row]:
  """Returns the rows of a file, in file order; see `layouts.parse` for `whole`.

  Raises:
    ValueError: the file or a row cannot be read, or a row fails `check`.
  """
  if not path.endswith(SUFFIXES):
    raise ValueError(f'{path} has an unknown suffix; use {", ".join(SUFFIXES)}')
  try:
    status = os.stat(path)
    # Cached: a start reads a file several times, to check it, derive knobs and train.
    unit, numbers, rows = _read(path, status.st_mtime_ns, status.st_size, whole)
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror or error}); set problems.source and '
      f'problems.test_source to files that end in {", ".join(SUFFIXES)}'
    ) from error
  if check:
    for item in zip(numbers, rows, strict=True):
      _at(path, unit, item, check)
  return list(rows)


@functools.lru_cache(maxsize=2)
def _read(
  path: str, mtime_ns: int, size: int, whole: bool
) -> tuple[str, Sequence[int], tuple[Row, ...]]:
  """Returns the name of a row ('line', 'row'), the number of every row, and the rows.

  The result is cached by all arguments.
  """
  del mtime_ns, size
  unit, items = _format(path)
  first = next(items(None), None)
  if first is None:
    raise ValueError(f'{path} contains no problem; give another file')
  layout = _at(path, unit, first, functools.partial(layouts.detect, whole=whole))
  columns = [*layout.columns, *filter(layouts.is_picture, first[1])]
  if whole:
    columns = list(first[1])
  folder = os.path.dirname(path)
  parse = functools.partial(_parse, layout=layout, folder=folder, whole=whole)
  # Some mirrors repeat 17k problems a hundred times, so equal rows share memory.
  unique: dict[Row, Row] = {}
  numbers, rows = array.array('Q'), list[Row]()
  for item in items(columns):
    row = _at(path, unit, item, parse)
    numbers.append(item[0])
    rows.append(unique.setdefault(row, row))
  return unit, numbers, tuple(rows)


def _format(path: str) -> tuple[str, Callable[[list[str] | None], Iterator[Item]]]:
  """Returns ('line' or 'row', a function that yields the items of the file).

  The function takes the columns to read, None for the known columns; a text file is
  read in all columns.
  """
  kind = path.removesuffix('.gz').rpartition('.')[2]
  if kind == 'parquet':
    return 'row', functools.partial(_parquet, path)
  unit, parse = 'line', _csv if kind == 'csv' else _json_lines
  if kind == 'json':
    with _opened(path) as file:
      if WHOLE.match(file.read(1024)):
        unit, parse = 'row', _json_list

  def items(columns: list[str] | None) -> Iterator[Item]:
    del columns
    with _opened(path) as file:
      yield from parse(path, file)

  return unit, items


def _at(path: str, unit: str, item: Item, function: Callable[[Any], Any]) -> Any:
  number, row = item
  try:
    return function(row)
  except ValueError as error:
    raise ValueError(f'{path}, {unit} {number}: {error}') from error


def _parse(
  row: dict[str, Any], layout: layouts.Layout, folder: str, whole: bool
) -> Row:
  field, values = layouts.pictures(row)
  files = []
  for i, value in enumerate(values, 1):
    try:
      files.append(pictures.checked(_picture(value, folder)).data)
    except ValueError as error:
      raise ValueError(f'field {field!r}, picture {i}: {error}') from error
  return layouts.parse(row, layout, whole=whole)._replace(pictures=tuple(files))


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


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
  """Opens a text file, compressed or not; a damaged file raises a ValueError."""
  opened = gzip.open if path.endswith('.gz') else open
  try:
    # newline='': csv needs the line ends within quotes as they are.
    with opened(path, 'rt', encoding='utf-8-sig', newline='') as file:
      yield file
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 text ({error}); convert it, for example with iconv -t utf-8'
    ) from error
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(
      f'{path} is not a complete gzip file ({error}); write or download it again'
    ) from error


def _json_lines(path: str, file: IO[str]) -> Iterator[Item]:
  """Yields the JSON object of every line that is not blank."""
  for number, line in enumerate(file, 1):
    if text := line.rstrip():
      yield number, _at(path, 'line', (number, _loads(path, text, number)), _object)


def _json_list(path: str, file: IO[str]) -> Iterator[Item]:
  """Yields the objects of a JSON list, which may be the field `data` of an object."""
  rows = _loads(path, file.read(), 1)
  if isinstance(rows, dict):
    rows = rows.get('data')
  if not isinstance(rows, list):
    raise ValueError(
      f'{path} has no list of rows; write [row, ...], {{"data": [row, ...]}}, or each '
      'row on a line of its own'
    )
  for item in enumerate(rows, 1):
    yield item[0], _at(path, 'row', item, _object)


def _loads(path: str, text: str, line: int) -> Any:
  """Parses JSON text that starts in a line of the file; an error names its line."""
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    line += error.lineno - 1
    reason, cause = f'{error.msg}, column {error.colno}', error
  except (ValueError, RecursionError) as error:  # too many digits, too deep
    reason, cause = str(error), error
  raise ValueError(f'{path}, line {line}: not JSON ({reason}); correct it') from cause


def _object(row: Any) -> dict[str, Any]:
  if not isinstance(row, dict):
    raise ValueError(f'{shown(row)} is not a JSON object; give named fields')
  return row


def _csv(path: str, file: IO[str]) -> Iterator[Item]:
  """Yields the rows below the header, all values as text; skips blank lines.

  A row is numbered by its first line, because quoted values may contain line ends.
  """
  reader, names, line = csv.reader(file, strict=True), list[str](), 0
  try:
    for cells in reader:
      line, number = reader.line_num, line + 1
      if not any(cell.strip() for cell in cells):
        continue
      if not names:
        names = cells
        _check_distinct(path, names)
      elif len(cells) != len(names):
        raise ValueError(
          f'{path}, line {number}: {len(cells)} values for {len(names)} columns; quote '
          'values that contain a comma'
        )
      else:
        yield number, dict(zip(names, cells, strict=True))
  except csv.Error as error:
    raise ValueError(
      f'{path}, line {line + 1}: not CSV ({error}); correct it, or write jsonl'
    ) from error


def _check_distinct(path: str, names: Sequence[str]) -> None:
  """Raises ValueError if two columns with a meaning have the same name."""
  readable = [name for name in names if layouts.known(name)]
  if twice := {name for name in readable if readable.count(name) > 1}:
    raise ValueError(f'{path} has two columns named {min(twice)!r}; remove one')


def _parquet(path: str, columns: list[str] | None) -> Iterator[Item]:
  """Yields rows with `columns`, or with all, where unknown columns are None."""
  import pyarrow.parquet

  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      names = file.schema_arrow.names
      # A column without a meaning may have a type that Python cannot represent.
      readable = [name for name in names if layouts.known(name)]
      _check_distinct(path, names)
      batches = file.iter_batches(BATCH if columns else 1, columns=columns or readable)
      rows = (row for batch in batches for row in batch.to_pylist())
      for i, row in enumerate(rows, 1):
        yield i, row if columns else dict.fromkeys(names) | row
  except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
    if isinstance(error, OSError) and error.errno:
      raise  # the file cannot be opened
    reason = str(error).strip().splitlines()[0].rstrip('.')[:200]
    raise ValueError(
      f'{path} is not a readable parquet file ({reason}); write or download it again'
    ) from error
