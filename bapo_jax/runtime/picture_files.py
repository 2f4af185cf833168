"""Writes the pictures of recorded problems into the workdir, each of them once."""

import hashlib
import os
from collections.abc import Sequence

from bapo_jax.runtime import files

FOLDER = 'pictures'
SUFFIXES = {  # by the first bytes of a file
  b'\x89PNG': 'png',
  b'\xff\xd8\xff': 'jpg',
  b'RIFF': 'webp',
  b'BM': 'bmp',
  b'GIF8': 'gif',
}


def write(workdir: str | os.PathLike[str], pictures: Sequence[bytes]) -> list[str]:
  """Writes pictures that are not there yet; returns their paths within the workdir.

  Args:
    workdir: the directory of the run.
    pictures: encoded images. The name of a file is the digest of its bytes.

  Raises:
    OSError: the system refused; its filename is set.
  """
  names = []
  for data in pictures:
    suffix = next((s for start, s in SUFFIXES.items() if data.startswith(start)), 'bin')
    name = os.path.join(FOLDER, f'{hashlib.sha256(data).hexdigest()[:16]}.{suffix}')
    names.append(name)
    path = os.path.join(workdir, name)
    if os.path.exists(path):
      continue
    with files.naming(path):
      os.makedirs(os.path.dirname(path), exist_ok=True)
      part = f'{path}.{os.getpid()}.tmp'  # --mode=show may write during a run
      with open(part, 'wb') as file:
        file.write(data)
      os.replace(part, path)
  return names
