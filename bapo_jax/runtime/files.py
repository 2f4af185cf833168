"""Files that are there whole or not at all, and errors that say which file it was."""

import contextlib
import json
import os


def write(path: str, text: str) -> None:
  """Whole or not at all."""
  with naming(path):
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
      file.write(text)
    os.replace(path + '.tmp', path)


def write_json(path: str, value) -> None:
  """Whole or not at all."""
  write(path, json.dumps(value, indent=2))


@contextlib.contextmanager
def naming(path: str):
  """An OSError from within says which file it is about; that of a write() does not."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or str(path)
    raise
