"""Digests of the files of a directory: a byte that changed since is found.

1. `write` records the length and the digest of every file, in one file beside them;
2. `damage` compares, and says in words what differs first;
3. `sampled` looks at parts of a file, for what is too large to be read whole.
"""

import hashlib
import json
import os
from collections.abc import Iterator

NAME = 'digests.json'
WRITTEN_LATER = ('commit_success.txt',)  # by the rename that makes a checkpoint visible


def write(directory: str, label: str) -> None:
  """Records the files below the directory as they are now.

  Args:
    label: what the directory holds, such as a step: under another one it is damaged.

  Raises:
    OSError: the system refused.
  """
  digests = {path: of_file(directory, path) for path in _files(directory)}
  with open(os.path.join(directory, NAME), 'w', encoding='utf-8') as file:
    json.dump({'label': label, 'files': digests}, file, indent=1)


def damage(directory: str, label: str, skip: str = '') -> str:
  """What differs from the record, in words; '' for nothing.

  Files that the record does not list are not looked at.

  Args:
    skip: files below this folder are not read; '' for none.
  """
  try:
    with open(os.path.join(directory, NAME), encoding='utf-8') as file:
      record = json.load(file)
    expected, files = record['label'], dict(record['files'])
  except FileNotFoundError:
    return f'{NAME} is missing'
  except OSError as error:
    return f'{NAME} cannot be read: {error.strerror}'
  except (ValueError, TypeError, KeyError):
    return f'{NAME} is no record of digests'
  if expected != label:
    return f'it is a copy of {expected}'
  for path, value in files.items():
    if skip and path.startswith(f'{skip}/'):
      continue
    try:
      found = of_file(directory, path)
    except FileNotFoundError:
      return f'{path} is missing'
    except OSError as error:
      return f'{path} cannot be read: {error.strerror}'
    if found != value:
      return f'{path} differs from its digest'
  return ''


def of_text(text: str) -> str:
  """The digest of a text."""
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sampled(path: str, blocks: int = 64, block: int = 4096) -> list[int | str]:
  """[bytes, digest of blocks spread over them] of a file; up to 256 KiB, of all."""
  size, digest = os.path.getsize(path), hashlib.blake2b(digest_size=16)
  with open(path, 'rb') as file:
    for i in range(blocks):
      file.seek(max(size - block, 0) * i // (blocks - 1))
      digest.update(file.read(block))
  return [size, digest.hexdigest()]


def _files(directory: str) -> Iterator[str]:
  """Paths of all files below the directory, relative to it, sorted."""
  for folder, folders, names in os.walk(directory):
    folders.sort()
    for name in sorted(names):
      path = os.path.relpath(os.path.join(folder, name), directory)
      if path not in (NAME, *WRITTEN_LATER):
        yield path


def of_file(directory: str, path: str) -> list[int | str]:
  """[bytes, blake2b of them] of a file."""
  with open(os.path.join(directory, path), 'rb') as file:
    digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return [file.tell(), digest.hexdigest()]
