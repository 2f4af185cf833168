"""Reads and writes whole files, and names the file in every error about one."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any


def write(path: str | os.PathLike[str], text: str) -> None:
  """Writes the text as UTF-8: the file holds the old content or the new, never a part.

  Raises:
    OSError: with its filename, where the system refuses.
  """
  with naming(path):
    with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
      file.write(text)
    os.replace(f'{path}.tmp', path)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes the value as JSON, as `write` does."""
  write(path, json.dumps(value, indent=2))


def read_json(path: str | os.PathLike[str], way_out: str) -> Any:
  """The value that a file holds as JSON.

  Args:
    way_out: ends the sentence of an error: what to do.

  Raises:
    ValueError: the file is not there, cannot be read, or is no JSON.
  """
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except OSError as error:
    raise ValueError(f'{path} cannot be read ({error.strerror}); {way_out}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no JSON ({error}); {way_out}') from error


def copy_folder(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
  """Copies a folder to where none is; a kill leaves a whole copy or none."""
  part = f'{os.fspath(target)}.tmp'
  shutil.rmtree(part, ignore_errors=True)
  shutil.copytree(source, part)
  os.replace(part, target)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds the path to an OSError that has no filename: that of a write() has none."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or str(path)
    raise
