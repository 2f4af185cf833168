"""Problems from users' files, jsonl or parquet, as a tensorflow-datasets builder.

1. `read` opens a file, recognises its layout by the first row, and demands it of all;
2. `keep` writes what is used of it to the data directory, under a hash of its rows: the
   problems a run was trained on stay in its workdir, whatever becomes of the files.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from bapo_jax.data import builder, schemas

SUFFIXES = ('.jsonl', '.json', '.parquet')


def read(path: str) -> list[dict[str, str]]:
  """Rows with `problem`, `answer` and `verifier`, in the order of the file.

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
  there = os.stat(path)
  # Read to be checked and again to be used: once is enough while it does not change.
  return list(_read(path, (there.st_mtime_ns, there.st_size)))


@functools.lru_cache(maxsize=2)
def _read(path: str, unchanged) -> tuple[dict[str, str], ...]:
  del unchanged  # it is there to be compared
  first = next(_rows(path, None), None)
  if first is None:
    raise ValueError(f'{path} holds no problem')
  layout = _at(path, first, schemas.recognise)
  take = functools.partial(schemas.take, layout=layout)
  once: dict[tuple, dict] = {}  # of 17k problems a hundred times over, 17k are held
  return tuple(
    once.setdefault(tuple(row.values()), row)
    for found in _rows(path, layout.fields)
    for row in (_at(path, found, take),)
  )


def _at(path: str, found: tuple[str, Any], function):
  """function(row); what is wrong with it is said with the place."""
  place, row = found
  try:
    return function(row)
  except ValueError as error:
    raise ValueError(f'{path}, {place}: {error}') from error


def _rows(path: str, fields) -> Iterator[tuple[str, dict]]:
  """(where it stands, row); of a parquet file only these columns, None for all."""
  return _parquet(path, fields) if path.endswith('.parquet') else _json(path)


def _json(path: str) -> Iterator[tuple[str, dict]]:
  """Lines of JSON, or one JSON list."""
  try:
    with open(path, encoding='utf-8-sig') as file:
      start = file.read(1)
      file.seek(0)
      if start == '[' and path.endswith('.json'):
        found = enumerate(_parse(path, 'all of it', file.read()), 1)
        rows = [(f'row {i}', row) for i, row in found]
      else:
        lines = ((f'line {i}', line) for i, line in enumerate(file, 1))
        rows = ((place, _parse(path, place, line)) for place, line in lines)
      for place, row in rows:
        if not isinstance(row, dict):
          shown = json.dumps(row)[:40]
          raise ValueError(f'{path}, {place}: {shown} is no JSON object')
        yield place, row
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8 text ({error})') from error


def _parse(path: str, place: str, text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}, {place}: not JSON ({error})') from error


def _parquet(path: str, fields) -> Iterator[tuple[str, dict]]:
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


@dataclasses.dataclass
class MathFileConfig(tfds.core.BuilderConfig):
  """The rows, which the name holds a hash of."""

  rows: tuple[dict, ...] = dataclasses.field(default=(), repr=False)


class MathFile(builder.Builder):
  """Problems of a user's files; ids count the rows from 0."""

  def splits(self):
    return {
      'rows': [{'id': i, **row} for i, row in enumerate(self.builder_config.rows)]
    }


def prepare(
  data_dir: str, name: str, rows: list[dict[str, str]]
) -> tfds.core.DatasetBuilder:
  """The builder of these rows, written to `data_dir` unless it is there already.

  Args:
    name: what the directory is called, beside the hash of the rows.
  """
  digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
  name = re.sub(r'\W+', '_', os.path.splitext(os.path.basename(name))[0])
  config = MathFileConfig(name=f'{name[:40]}-{digest[:12]}', rows=tuple(rows))
  return builder.write(
    MathFile(data_dir=data_dir, config=config, file_format='array_record')
  )


def keep(data_dir: str, name: str, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
  """The rows as they are kept in `data_dir`, in their order, with their ids."""
  kept = builder.rows(prepare(data_dir, name, rows), 'rows')
  return sorted(kept, key=lambda row: row['id'])
