"""Reads and writes whole files; every error names the file.

1. `local` turns a path of the user into a path of this machine, or refuses it;
2. `check_ours` protects the files of others: nothing without our mark is replaced;
3. `write` replaces a file as a whole.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

# Suffix of an image file -> the first bytes of the format.
PICTURES = dict(
  png=b'\x89PNG', jpg=b'\xff\xd8\xff', webp=b'RIFF', bmp=b'BM', gif=b'GIF8'
)
OUTSIDE = re.compile(r'\w[\w+.-]*://|~')  # a URL, or a home directory that is unknown
HEAD = 1 << 20  # characters of a file in which `check_ours` looks for the mark
Path = str | os.PathLike[str]
Object = dict[str, Any]  # of JSON


def local(path: str, *, flag: str = '') -> str:
  """Returns a path, or paths separated by commas, with ~ as the home directory.

  `flag` precedes the path in the error. Names such as hub:owner/name are unchanged.

  Raises:
    ValueError: a path is a URL, or the home directory is unknown.
  """
  if not os.environ.get('HOME'):  # an empty value would make ~ the root directory
    os.environ.pop('HOME', None)
  parts = [os.path.expanduser(part) for part in path.split(',')]
  for part in parts:
    if OUTSIDE.match(part):
      raise ValueError(
        f'{flag}{part} is not a path on this machine; mount a bucket (for example with '
        'gcsfuse) or copy its files, write models and data of the Hugging Face hub as '
        'hub:owner/name, and write a home directory in full'
      )
  return ','.join(parts)


def check_ours(path: Path, mark: str) -> None:
  """Raises a ValueError if the path has a file without our mark.

  `mark` is a text near the beginning of every file that this program writes there.
  Raises OSError if the path cannot be read, for instance because it is a directory.
  """
  try:
    with open(path, encoding='utf-8', errors='replace') as file:
      head = file.read(HEAD)
  except FileNotFoundError:
    return
  if mark not in head:
    raise ValueError(
      f'{path} exists, and this program did not write it; give another path, or remove '
      'it'
    )


def write(path: Path, content: str | bytes) -> None:
  """Writes a file atomically, creating its directory if needed.

  After a failure the file has its old content or the new, never a part of either, and
  no other file is left.

  Raises:
    OSError: the write failed; the exception's `filename` is set.
  """
  data = content.encode() if isinstance(content, str) else content
  new = f'{path}.bapo_jax.tmp'
  with naming(path):
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    try:
      with open(new, 'wb') as file:
        file.write(data)
      os.replace(new, path)
    finally:
      with contextlib.suppress(OSError):  # it has its final name
        os.remove(new)


def write_json(path: Path, value: Any) -> None:
  """Writes the value as JSON, atomically (see `write`)."""
  write(path, json.dumps(value, indent=2))


def write_pictures(workdir: Path, pictures: Sequence[bytes]) -> list[str]:
  """Writes encoded images that the workdir lacks; returns all paths, relative to it.

  A file is named by the digest of its bytes.
  """
  names = []
  for data in pictures:
    suffix = next((s for s, start in PICTURES.items() if data.startswith(start)), 'bin')
    names.append(f'pictures/{hashlib.sha256(data).hexdigest()[:16]}.{suffix}')
    if not os.path.exists(path := os.path.join(workdir, names[-1])):
      write(path, data)
  return names


def read_json(path: Path, way_out: str) -> Any:
  """Reads a JSON file.

  Raises:
    ValueError: the file is missing, cannot be read, or is not JSON. The message ends
      with `way_out`, the advice to the user.
  """
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except OSError as error:
    raise ValueError(f'{path} cannot be read ({error.strerror}); {way_out}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); {way_out}') from error


def read_object(path: str, way_out: str = 'download it again') -> Object:
  """Reads a JSON file whose top level must be an object; see `read_json` for errors."""
  value = read_json(path, way_out)
  if not isinstance(value, dict):
    raise ValueError(f'{path} has no JSON object at the top level; {way_out}')
  return value


def first_line(error: BaseException) -> str:
  """Returns the first line of a library's error message, or the name of its type."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0].rstrip('.: ')[:200]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the path to an OSError that has no filename, such as one of file.write()."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or str(path)
    raise
