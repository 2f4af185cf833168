"""Safetensors files, read by rows and written array by array.

1. `index` reads the headers of a directory: name -> `Tensor`;
2. `read` reads some rows of one tensor;
3. `write` writes one file from an iterator of arrays, `shards` splits names into files.

A file is eight bytes n, n bytes of JSON {name: {dtype, shape, data_offsets}}, and the
data. We do not use the safetensors library here: it maps a file or reads a whole tensor
(256 MiB for a slice of 8, measured with 0.8.0), and it writes from whole dictionaries.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {
  'F32': np.dtype('float32'),
  'F16': np.dtype('float16'),
  'BF16': jnp.dtype('bfloat16'),
}
NAMES = {dtype.name: code for code, dtype in DTYPES.items()}
ONE_FILE, INDEX = 'model.safetensors', 'model.safetensors.index.json'


class Tensor(NamedTuple):
  """Place of the data of one tensor."""

  file: str
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int  # bytes from the beginning of the file


def files(path: str) -> list[str]:
  """Names of the safetensors files of a model directory, present or missing.

  Those that the index lists; without an index model.safetensors, else all that are
  present. Others may lie there too: some models come in their original format as well.
  """
  names = sorted(os.listdir(path))
  if INDEX in names:
    with open(os.path.join(path, INDEX)) as file:
      return sorted(set(json.load(file)['weight_map'].values()))
  if ONE_FILE in names:
    return [ONE_FILE]
  return [name for name in names if name.endswith('.safetensors')]


def index(path: str) -> dict[str, Tensor]:
  """Every tensor of the model directory `path`, by name; only headers are read.

  Raises:
    ValueError: a file is cut short or damaged, or its dtype is not supported.
  """
  return {
    name: tensor
    for file in files(path)
    for name, tensor in header(os.path.join(path, file)).items()
  }


def header(path: str) -> dict[str, Tensor]:
  """The tensors of one file, from its header.

  Raises:
    ValueError: as for `index`.
  """
  size = os.path.getsize(path)
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 + length:
      raise ValueError(f'{path} is cut short: {size} bytes; fetch it again')
    listed = json.loads(file.read(length))
  listed.pop('__metadata__', None)
  found = {}
  for name, entry in listed.items():
    if entry['dtype'] not in DTYPES:
      raise ValueError(
        f'{path}: {name} is {entry["dtype"]}, and only {", ".join(DTYPES)} are read; '
        'take the model that is not quantised'
      )
    dtype, (start, end) = DTYPES[entry['dtype']], entry['data_offsets']
    if end - start != math.prod(entry['shape']) * dtype.itemsize:
      raise ValueError(f'{path}: {name} is damaged; fetch the file again')
    if 8 + length + end > size:
      raise ValueError(f'{path} is cut short: {size} bytes; fetch it again')
    found[name] = Tensor(path, dtype, tuple(entry['shape']), 8 + length + start)
  return found


def read(tensor: Tensor, first: int, last: int) -> np.ndarray:
  """Rows first..last-1, flat; a row is one index of the leading axis."""
  row = math.prod(tensor.shape[1:])
  return np.fromfile(
    tensor.file,
    tensor.dtype,
    (last - first) * row,
    offset=tensor.start + first * row * tensor.dtype.itemsize,
  )


def write(
  path: str,
  dtype: str,
  shapes: dict[str, tuple[int, ...]],
  arrays: Iterable[np.ndarray],
) -> None:
  """Writes one file.

  Args:
    dtype: of all tensors, a value of NAMES: 'float32', 'float16' or 'bfloat16'.
    shapes: name -> shape, in the order of `arrays`.
  """
  entries: dict[str, dict] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, shape in shapes.items():
    start, end = end, end + math.prod(shape) * DTYPES[NAMES[dtype]].itemsize
    entries[name] = {
      'dtype': NAMES[dtype],
      'shape': shape,
      'data_offsets': [start, end],
    }
  text = json.dumps(entries).encode()
  text += b' ' * (-len(text) % 8)  # the format's alignment
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for array in arrays:
      # As bytes: the buffer protocol has no bfloat16.
      file.write(np.ascontiguousarray(array).ravel().view(np.uint8).data)


def shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
  """The names of each file, in order: at most `limit` bytes, or a single name."""
  names, total = [], 0
  for name, size in sizes.items():
    if names and total + size > limit:
      yield names
      names, total = [], 0
    names, total = [*names, name], total + size
  yield names
