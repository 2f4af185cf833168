"""Records digests of the files in a directory, and finds files that changed later.

orbax and zarr restore flipped bytes without an error, so checkpoints have digests.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from bapo_jax.runtime import files

NAME = 'digests.json'
# orbax writes these files when it renames a checkpoint, after `write` has run.
WRITTEN_LATER = ('commit_success.txt', '_CHECKPOINT_METADATA')


def write(directory: str, label: str) -> None:
  """Records the length and the digest of every file below the directory.

  `label` is the directory's name; `damage` thus detects a copy of another directory.
  """
  paths = [
    str(path.relative_to(directory))
    for path in pathlib.Path(directory).rglob('*')
    if path.is_file() and path.name not in (NAME, *WRITTEN_LATER)
  ]
  record = {path: of_file(directory, path) for path in sorted(paths)}
  files.write_json(os.path.join(directory, NAME), {'label': label, 'files': record})


def damage(directory: str, label: str, skip: str = '') -> str:
  """Describes the first difference between the files and their record; '' for none.

  Files in the folder `skip` are not read.
  """
  path = NAME
  try:
    with open(os.path.join(directory, NAME), encoding='utf-8') as file:
      record = json.load(file)
    if record['label'] != label:
      return f'it is a copy of {record["label"]}'
    for path, value in dict(record['files']).items():
      wanted = not skip or not path.startswith(f'{skip}/')
      if wanted and of_file(directory, path) != value:
        return f'{path} differs from its digest'
  except OSError as error:
    return f'{path} cannot be read: {error.strerror}'
  except (ValueError, TypeError, KeyError):
    return f'{NAME} is not a JSON record of a label and digests'
  return ''


def sampled(path: str, blocks: int = 64, block: int = 4096) -> list[int | str]:
  """Returns [bytes in the file, digest of evenly spaced blocks of `block` bytes]."""
  size = os.path.getsize(path)
  digest = hashlib.blake2b(digest_size=16)
  with open(path, 'rb') as file:
    for i in range(blocks):
      file.seek(max(size - block, 0) * i // (blocks - 1))
      digest.update(file.read(block))
  return [size, digest.hexdigest()]


def of_file(directory: str, path: str) -> list[int | str]:
  """Returns [bytes in the file, digest of the whole file]."""
  with open(os.path.join(directory, path), 'rb') as file:
    digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return [file.tell(), digest.hexdigest()]


def fingerprint(values: dict[str, Any]) -> str:
  """Returns twelve hexadecimal digits that change with any value.

  The value of `cache` is not included, because it affects no result.
  """
  values = {name: value for name, value in values.items() if name != 'cache'}
  text = json.dumps(values, sort_keys=True, default=list).encode()
  return hashlib.sha256(text).hexdigest()[:12]
