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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bapo_jax.runtime import json_files

DTYPES = {
  'F32': np.dtype('float32'),
  'F16': np.dtype('float16'),
  'BF16': jnp.dtype('bfloat16'),
}
NAMES = {dtype.name: code for code, dtype in DTYPES.items()}
ONE_FILE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
# Bytes of a header, of an index: 100 times those of the largest published models, and
# what no content of a file can make larger than some hundred MB in memory.
LONGEST = 10**7


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

  Raises:
    ValueError: the index is damaged.
  """
  names = sorted(os.listdir(path))
  if INDEX in names:
    index = os.path.join(path, INDEX)
    listed = json_files.read(index, LONGEST).get('weight_map')
    if not isinstance(listed, dict) or not listed:
      raise ValueError(f'{index} has no weight_map of tensors; fetch it again')
    for file in listed.values():
      # A name with a folder in it would reach out of the directory.
      if not isinstance(file, str) or not file or '/' in file or '\0' in file:
        raise ValueError(f'{index} lists {file!r:.60} as a file; fetch it again')
    return sorted(set(listed.values()))
  if ONE_FILE in names:
    return [ONE_FILE]
  return [name for name in names if name.endswith('.safetensors')]


def index(path: str) -> dict[str, Tensor]:
  """Every tensor of the model directory `path`, by name; only headers are read.

  Raises:
    ValueError: a file is cut short or damaged, its dtype is not supported, or a tensor
      stands in two files.
  """
  found: dict[str, Tensor] = {}
  for file in files(path):
    for name, tensor in header(os.path.join(path, file)).items():
      if name in found:
        raise ValueError(
          f'{path}: {name:.80} stands in {os.path.basename(found[name].file)} and in '
          f'{file}; remove the file that is not of this model'
        )
      found[name] = tensor
  return found


def header(path: str) -> dict[str, Tensor]:
  """The tensors of one file, from its header; their data are all of the file's rest.

  Raises:
    ValueError: as for `index`.
  """
  if not os.path.isfile(path):  # a pipe would be waited for
    raise ValueError(f'{path} is not a file; put the file there')
  size = os.path.getsize(path)
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 + length:
      raise ValueError(f'{path} is cut short: {size} bytes; fetch it again')
    if length > LONGEST:
      raise ValueError(
        f'{path} has a header of {length} bytes, and at most {LONGEST} are read; fetch '
        'it again'
      )
    listed = json_files.parse(file.read(length), path)
  listed.pop('__metadata__', None)
  found = {name: _tensor(path, name, entry) for name, entry in listed.items()}
  # As the format has it: no tensor overlaps another, and no byte is nobody's.
  end = 0
  for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
    if tensor.start != end:
      raise ValueError(
        f'{path}: {name:.80} begins at byte {tensor.start} of the data, not at {end}, '
        'where the tensor before it ends; fetch the file again'
      )
    end += math.prod(tensor.shape) * tensor.dtype.itemsize
  if 8 + length + end > size:
    raise ValueError(f'{path} is cut short: {size} bytes; fetch it again')
  if 8 + length + end < size:
    raise ValueError(
      f'{path} has {size} bytes, and its tensors end at {8 + length + end}; fetch it '
      'again'
    )
  return {
    name: tensor._replace(start=8 + length + tensor.start)
    for name, tensor in found.items()
  }


def _tensor(path: str, name: str, entry: Any) -> Tensor:
  """A header's entry, its start from the beginning of the data; raises ValueError."""

  def sizes(field: str) -> tuple[int, ...] | None:
    """A short list of integers from 0 on, else None."""
    value = entry.get(field)
    if not isinstance(value, list) or len(value) > 8:
      return None
    return tuple(value) if all(type(n) is int and n >= 0 for n in value) else None

  entry = entry if isinstance(entry, dict) else {}
  shape, offsets, code = sizes('shape'), sizes('data_offsets'), entry.get('dtype')
  if shape is None or offsets is None or not isinstance(code, str):
    raise ValueError(
      f'{path}: {name:.80} is damaged, its header has no dtype, shape and offsets; '
      'fetch the file again'
    )
  if code not in DTYPES:
    raise ValueError(
      f'{path}: {name:.80} is {code:.20}, and only {", ".join(DTYPES)} are read; '
      'take the model that is not quantised'
    )
  bytes_ = math.prod(shape) * DTYPES[code].itemsize
  if len(offsets) != 2 or offsets[1] - offsets[0] != bytes_:
    raise ValueError(
      f'{path}: {name:.80} is damaged, its shape {shape!r:.60} does not fill the bytes '
      f'{offsets!r:.60}; fetch the file again'
    )
  return Tensor(path, DTYPES[code], shape, offsets[0])


def finite(array: np.ndarray) -> bool:
  """Whether no number is NaN or infinite; without a copy in another dtype."""
  if array.dtype.itemsize != 2:
    return bool(np.isfinite(array).all())
  # By the bits: NumPy converts bfloat16 and float16 number by number.
  infinity = np.asarray(np.inf, array.dtype).view(np.uint16)
  largest = (array.view(np.uint16) & 0x7FFF).max(initial=0)
  return bool(largest < infinity)


def read(
  tensor: Tensor, first: int, last: int, columns: tuple[int, int] | None = None
) -> np.ndarray:
  """Rows first..last-1, flat; a row is one index of the leading axis.

  Args:
    columns: (first, last) numbers of a row that are read, no byte of the others; None:
      all of them.
  """
  row = math.prod(tensor.shape[1:])
  a, b = columns or (0, row)
  size = tensor.dtype.itemsize
  start = tensor.start + first * row * size
  if b - a == row:
    return np.fromfile(tensor.file, tensor.dtype, (last - first) * row, offset=start)
  found = np.empty((last - first, (b - a) * size), np.uint8)
  with open(tensor.file, 'rb', buffering=0) as file:
    for i, part in enumerate(found):
      if os.preadv(file.fileno(), [part.data], start + (i * row + a) * size) < len(
        part
      ):
        raise ValueError(f'{tensor.file} is cut short; fetch it again')
  return found.view(tensor.dtype).ravel()


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
