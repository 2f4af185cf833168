"""The pictures of recorded problems, as files of the workdir.

A picture is written once, under the digest of its bytes.
"""

import hashlib
import os
from collections.abc import Sequence

from bapo_jax.runtime import files

FOLDER = 'pictures'
SUFFIXES = {  # by how a file begins
  b'\x89PNG': 'png',
  b'\xff\xd8\xff': 'jpg',
  b'RIFF': 'webp',
  b'BM': 'bmp',
  b'GIF8': 'gif',
}


def write(workdir: str | os.PathLike[str], pictures: Sequence[bytes]) -> list[str]:
  """Writes pictures that are not there yet; returns their paths in the workdir.

  Raises:
    OSError: with its filename, where the system refuses.
  """
  return [_written(workdir, data) for data in pictures]


def _written(workdir: str | os.PathLike[str], data: bytes) -> str:
  suffix = next((s for start, s in SUFFIXES.items() if data.startswith(start)), 'bin')
  name = os.path.join(FOLDER, f'{hashlib.sha256(data).hexdigest()[:16]}.{suffix}')
  path = os.path.join(workdir, name)
  if not os.path.exists(path):
    with files.naming(path):
      os.makedirs(os.path.dirname(path), exist_ok=True)
      part = f'{path}.{os.getpid()}.tmp'  # --mode=show may write beside a run
      with open(part, 'wb') as file:
        file.write(data)
      os.replace(part, path)
  return name
