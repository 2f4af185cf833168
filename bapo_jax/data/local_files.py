"""Problems from users' files, jsonl, json or parquet.

`read` opens a file, detects its schema by the first row, and demands it of all.
Whatever a file holds, it costs bounded memory and ends in rows or in one sentence.
"""

import contextlib
import functools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from bapo_jax.data import schemas
from bapo_jax.data.row import Row
from bapo_jax.runtime import json_files

SUFFIXES = ('.jsonl', '.json', '.parquet')
LONGEST_ROW = 10_000_000  # characters of a line, bytes of a row of a table
LARGEST_LIST = (
  100_000_000  # bytes of a JSON list: parsed whole, it takes several times that
)
BATCH = 1 << 27  # bytes of a table in memory at once

Result = TypeVar('Result')
Place = tuple[str, Any]  # ('line 3', its value)


def read(path: str, check: Callable[[Row], None] | None = None) -> list[Row]:
  """The rows of a file, in its order.

  Args:
    check: raises ValueError where an answer cannot be verified.

  Raises:
    ValueError: no such file, or a row that cannot be read; names file, row and field.
  """
  size, changed = check_file(path)
  with in_one_sentence(path):
    # Read to be checked and a second time to be used: cached while it does not change.
    unit, rows = _read(path, (changed, size))
  if check:
    for i, row in enumerate(rows, 1):
      _at(path, (f'{unit} {i}', row), check)
  return list(rows)


@contextlib.contextmanager
def in_one_sentence(path: str) -> Iterator[None]:
  """Raises ValueError where the system refuses to read the file."""
  try:
    yield
  except OSError as error:
    raise ValueError(f'{path} cannot be read ({_reason(error)})') from error


def check_file(path: str) -> tuple[int, int]:
  """(bytes, time of the last change) of a file that can be opened.

  Raises:
    ValueError: what is there instead.
  """
  way_out = 'set problems.source and problems.test_source to jsonl or parquet files'
  if os.path.islink(path) and not os.path.exists(path):
    raise ValueError(
      f'problems: {path!r} is a link to {os.readlink(path)!r}, which is not there; '
      + way_out
    )
  if not os.path.exists(path):
    raise ValueError(f'problems: no file {path!r}; put the data set there or {way_out}')
  found = os.stat(path)
  if not stat.S_ISREG(found.st_mode):
    kind = 'is a directory' if os.path.isdir(path) else 'is no regular file'
    raise ValueError(f'problems: {path!r} {kind}; {way_out}')
  if not path.endswith(SUFFIXES):
    raise ValueError(f'problems: {path!r} ends in none of {", ".join(SUFFIXES)}')
  return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, int]) -> tuple[str, tuple[Row, ...]]:
  """('line' or 'row', the rows)."""
  del version  # a part of the cache's key
  (place, first), schema = first_row(path)
  once: dict[Row, Row] = {}  # of 17k problems a hundred times over, 17k are held
  parse = functools.partial(_parse_blind, schema=schema)
  rows = parsed(path, columns(first, schema), parse)
  return place.split()[0], tuple(once.setdefault(row, row) for row in rows)


def _parse_blind(row: dict[str, Any], schema: schemas.Schema) -> Row:
  """A row for a policy of texts; raises ValueError where it has pictures."""
  if field := schemas.pictured_field(row):
    raise ValueError(
      f'field {field!r} holds pictures, which the policy does not see; take the field '
      'out, and the problems that need it, or choose a policy that sees: for the '
      'embedded one --config.model.tower.layers=2'
    )
  return schemas.parse(row, schema)


def columns(first: dict[str, Any], schema: schemas.Schema) -> list[str]:
  """The columns of a table that are read, by its first row: pictures are among them."""
  return list(dict.fromkeys([*schema.fields, *schemas.picture_fields(first)]))


def first_row(path: str) -> tuple[Place, schemas.Schema]:
  """The first row of a file, with its place, and the schema that it has.

  Raises:
    ValueError: there is none, or it is of no schema.
  """
  first = next(_items(path, None), None)
  if first is None:
    raise ValueError(f'{path} holds no problem')
  return first, _at(path, first, schemas.detect)


def parsed(
  path: str, fields: list[str], parse: Callable[[Any], Result]
) -> Iterator[Result]:
  """parse(row) of each row; its error is raised with the place of the row.

  Args:
    fields: of a parquet file the columns that are read.
  """
  return (_at(path, item, parse) for item in _items(path, fields))


def _at(path: str, item: Place, function: Callable[[Any], Result]) -> Result:
  """function(row); its error is raised with the place of the row."""
  place, row = item
  try:
    return function(row)
  except ValueError as error:
    raise ValueError(f'{path}, {place}: {error}') from error
  except RecursionError as error:
    raise ValueError(f'{path}, {place}: nested too deeply; take it out') from error


def _items(path: str, fields: list[str] | None) -> Iterator[Place]:
  """(place, row) of each row; of a parquet file these columns, None for all."""
  if not path.endswith('.parquet'):
    return _json(path)
  return _parquet(path, fields) if fields else _first_of_table(path)


def _json(path: str) -> Iterator[Place]:
  """Lines of JSON, or one JSON list."""
  try:
    with open(path, encoding='utf-8-sig') as file:
      start = file.read(1024).lstrip()[:1]
      file.seek(0)
      if start == '[' and path.endswith('.json'):
        items = _list(path, file)
      else:
        items = _lines(path, file)
      for place, row in items:
        if not isinstance(row, dict):
          _at(path, (place, row), _refuse)
        yield place, row
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 text ({error}); convert it, as with iconv -t utf-8'
    ) from error


def _refuse(row: Any) -> None:
  raise ValueError(f'{json.dumps(row)[:40]} is no JSON object')


def _list(path: str, file: Any) -> Iterator[Place]:
  if os.path.getsize(path) > LARGEST_LIST:
    raise ValueError(
      f'{path} is a JSON list of more than {LARGEST_LIST:,} bytes, which is parsed '
      'whole; write it as jsonl, which is read line by line'
    )
  listed = _loads(path, 'all of it', file.read())
  yield from ((f'row {i}', row) for i, row in enumerate(listed, 1))


def _lines(path: str, file: Any) -> Iterator[Place]:
  i = 0
  while line := file.readline(LONGEST_ROW + 1):
    i += 1
    if len(line) > LONGEST_ROW:
      raise ValueError(
        f'{path}, line {i}: more than {LONGEST_ROW:,} characters; take it out'
      )
    yield f'line {i}', _loads(path, f'line {i}', line)


def _loads(path: str, place: str, text: str) -> Any:
  try:
    return json.loads(text, object_pairs_hook=json_files.once)
  except json_files.Repeated as error:
    raise ValueError(
      f'{path}, {place}: field {error.name[:40]!r} stands there twice; take one out'
    ) from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}, {place}: not JSON ({error})') from error


def _repeated(names: Iterable[str]) -> str:
  """The first name that comes a second time; '' for none."""
  seen: set[str] = set()
  # `add` returns None: a name is passed over, and is seen from then on.
  return next((name for name in names if name in seen or seen.add(name)), '')


@contextlib.contextmanager
def _table(path: str) -> Iterator[Any]:
  """An open parquet file; errors of its bytes are one sentence."""
  import pyarrow.parquet

  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      yield file
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} holds a text that is not UTF-8 text ({error})') from error
  except (pyarrow.ArrowException, OSError) as error:
    if isinstance(error, OSError) and error.errno:  # not of the bytes
      raise
    raise ValueError(f'{path} is no whole parquet file ({_reason(error)})') from error


def _reason(error: Exception) -> str:
  if isinstance(error, OSError) and error.errno:
    return os.strerror(error.errno)
  return str(error).strip().splitlines()[0].rstrip('.')[:200]


def _first_of_table(path: str) -> Iterator[Place]:
  """The first row, None where a column that may be of no use cannot be read."""
  with _table(path) as file:
    names = file.schema_arrow.names
    if twice := _repeated(names):
      raise ValueError(f'{path}: column {twice!r} stands there twice; take one out')
    for batch in file.iter_batches(batch_size=1):
      row = {}
      for name, column in zip(names, batch.columns, strict=True):
        row[name] = None
        with contextlib.suppress(ValueError, OverflowError, ImportError):
          row[name] = column[0].as_py()
      yield 'row 1', row
      return


def _parquet(path: str, fields: list[str]) -> Iterator[Place]:
  with _table(path) as file:
    i = 0
    size = _batch_size(path, file.metadata, fields)
    for batch in file.iter_batches(batch_size=size, columns=fields):
      for row in batch.to_pylist():
        i += 1
        yield f'row {i}', row


def _batch_size(path: str, metadata: Any, fields: list[str]) -> int:
  """Rows that fit into memory, even where all are the largest of a dictionary."""
  largest = 1
  for group in map(metadata.row_group, range(metadata.num_row_groups)):
    for column in map(group.column, range(group.num_columns)):
      if column.path_in_schema.split('.')[0] not in fields:
        continue
      size = column.total_uncompressed_size
      if size > LONGEST_ROW * max(1, column.num_values):
        raise ValueError(f'{path}: rows of more than {LONGEST_ROW:,} bytes')
      largest = max(largest, size)
  return min(1024, max(16, BATCH // largest))
