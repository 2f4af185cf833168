"""Reads and writes whole files; every error about a file names it."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any


def write(path: str | os.PathLike[str], text: str) -> None:
  """Writes the text as UTF-8: the file has the old content or the new, never a part.

  Raises:
    OSError: the system refused; its filename is set.
  """
  with naming(path):
    with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
      file.write(text)
    os.replace(f'{path}.tmp', path)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes the value as JSON, atomically (see `write`)."""
  write(path, json.dumps(value, indent=2))


def read_json(path: str | os.PathLike[str], way_out: str) -> Any:
  """Reads a JSON file.

  Args:
    path: the file.
    way_out: what to do about an error; ends the sentence.

  Raises:
    ValueError: the file is missing, cannot be read, or is not JSON.
  """
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except OSError as error:
    raise ValueError(f'{path} cannot be read ({error.strerror}); {way_out}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); {way_out}') from error


def read_object(path: str) -> dict[str, Any]:
  """Reads a JSON file of a model, which has an object at its top.

  Raises:
    ValueError: the file is missing, cannot be read, or has no JSON object.
  """
  value = read_json(path, 'download it again')
  if not isinstance(value, dict):
    raise ValueError(f'{path} has no JSON object; download it again')
  return value


def copy_folder(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
  """Copies a folder to a new path; a kill leaves a complete copy or none."""
  part = f'{os.fspath(target)}.tmp'
  shutil.rmtree(part, ignore_errors=True)
  shutil.copytree(source, part)
  os.replace(part, target)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds the path to an OSError without a filename, such as that of a write()."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or str(path)
    raise
