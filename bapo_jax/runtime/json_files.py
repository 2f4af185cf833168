"""JSON objects that others wrote: read within a bound, or refused in one sentence.

Damage of any kind, a wrong type at the top, a name that stands twice (parsers disagree
about which counts) and a file beyond its bound are all a ValueError.
"""

import json
import os
import stat
from typing import Any

MOST = 10**6  # bytes of a file of options; the longest published one has 70 kB


class Repeated(ValueError):
  """A name that stands twice in an object; `name` says which."""

  def __init__(self, name: str):
    super().__init__(f'{name[:60]!r} stands twice')
    self.name = name


def read(path: str, most: int = MOST) -> dict[str, Any]:
  """The object in a file.

  Args:
    most: bytes of the file, at most.

  Raises:
    ValueError: the file is no regular one, too large, or holds no JSON object.
  """
  return parse(read_bytes(path, most), path)


def read_bytes(path: str, most: int) -> bytes:
  """The content of a regular file of at most `most` bytes.

  Raises:
    ValueError: it is something else, larger, or cannot be read.
  """
  try:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
      raise ValueError(f'{path} is not a file; put the file there')
    if status.st_size > most:
      raise ValueError(
        f'{path} has {status.st_size} bytes, and at most {most} are read; fetch it '
        'again, or choose another model'
      )
    with open(path, 'rb') as file:
      return file.read(most + 1)[:most]
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); fetch it again'
    ) from None


def parse(content: bytes, name: str) -> dict[str, Any]:
  """The object in JSON text; `name` is the file, for errors.

  Raises:
    ValueError: it is no JSON, no object, or a name stands twice in an object.
  """
  try:
    found = json.loads(content.decode('utf-8'), object_pairs_hook=once)
  except RecursionError:
    raise ValueError(f'{name} is nested too deeply; fetch it again') from None
  except ValueError as error:
    reason = ' '.join(str(error).split())[:100]
    raise ValueError(f'{name} is damaged ({reason}); fetch it again') from None
  if not isinstance(found, dict):
    raise ValueError(f'{name} holds no JSON object; fetch it again')
  return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """The pairs as a dict: an `object_pairs_hook` of json.

  Raises:
    Repeated: a name stands twice.
  """
  found = dict(pairs)
  if len(found) < len(pairs):
    names = [name for name, _ in pairs]
    raise Repeated(next(name for name in found if names.count(name) > 1))
  return found
