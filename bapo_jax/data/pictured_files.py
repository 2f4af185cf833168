"""Problems with pictures from users' files, jsonl, json or parquet.

A row is as local_files reads it, and may have a field of pictures beside it: `images`,
a list, or `image`. In a parquet file a picture is its bytes, or `bytes` and `path` as
the library `datasets` writes them (Geometry3K); elsewhere it is a path, relative to the
folder of the file. Its place in the problem is `<image>`.
"""

import functools
import os
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from bapo_jax.data import field_values, local_files, pictures, schemas
from bapo_jax.data.row import Row

MOST = 64  # pictures of one problem


class PicturedRow(NamedTuple):
  """A problem and its pictures."""

  row: Row
  pictures: tuple[bytes, ...]  # as files: PNG, JPEG and the like


def read(path: str, check: Callable[[Row], None] | None = None) -> list[PicturedRow]:
  """The rows of a file, in its order; each picture is decoded once to be checked.

  Pictures are held as they lie in their files, and decoded again when they are needed.

  Args:
    check: raises ValueError where an answer cannot be verified.

  Raises:
    ValueError: no such file, or a row or a picture that cannot be read; names file,
      row, picture and reason.
  """
  local_files.check_file(path)
  with local_files.in_one_sentence(path):
    (_, first), schema = local_files.first_row(path)
    parse = functools.partial(
      _parse, schema=schema, folder=os.path.dirname(path), check=check
    )
    columns = local_files.columns(first, schema)
    return list(local_files.parsed(path, columns, parse))


def _parse(
  row: dict[str, Any],
  schema: schemas.Schema,
  folder: str,
  check: Callable[[Row], None] | None,
) -> PicturedRow:
  parsed = schemas.parse(row, schema)
  if check:
    check(parsed)
  field = schemas.pictured_field(row)
  found = row[field] if field else []
  listed = found if isinstance(found, list) else [found]
  if len(listed) > MOST:
    raise ValueError(
      f'field {field!r} holds {len(listed)} pictures, more than {MOST}; take the row '
      'out'
    )
  pictures.check_placeholders(parsed.problem, listed)
  files = []
  for i, value in enumerate(listed, 1):
    try:
      files.append(pictures.checked(_bytes(value, folder)).data)
    except ValueError as error:
      raise ValueError(f'field {field!r}, picture {i}: {error}') from error
  return PicturedRow(parsed, tuple(files))


def _bytes(value: Any, folder: str) -> bytes:
  """The file of a picture.

  Raises:
    ValueError: something else stands there, or no such file is there.
  """
  if isinstance(value, dict) and value.keys() & {'bytes', 'path'}:
    held = value.get('bytes')
    value = value.get('path') if held is None else held
  if isinstance(value, bytes):
    return value
  if not isinstance(value, str) or not value or '\0' in value:
    raise ValueError(
      f'{field_values.shown(value)} is no picture: its bytes or its path are wanted'
    )
  path = os.path.join(folder, value)
  try:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # a pipe would never end
      raise ValueError(f'{path[:200]!r} is no regular file')
    with open(path, 'rb') as file:
      return file.read(pictures.MOST_BYTES + 1)
  except OSError as error:
    raise ValueError(
      f'{path[:200]!r} cannot be read ({error.strerror}); put the picture there'
    ) from error
