"""Reads parts of safetensors files and writes them array by array.

A file consists of the header's length n (eight bytes), n bytes of JSON {name: {dtype,
shape, data_offsets}}, and the data. The safetensors library checks headers, but does
not read or write data here: it would map whole files or read whole tensors (256 MiB for
a slice of 8 MiB with version 0.8.0), and needs all arrays at once to write a file.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from bapo_jax.runtime.files import read_object

DTYPES = {
  'F32': np.dtype('float32'),
  'F16': np.dtype('float16'),
  'BF16': jnp.dtype('bfloat16'),
}
NAMES = {dtype.name: code for code, dtype in DTYPES.items()}
ONE_FILE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
ADAPTERS = 'adapter_model.safetensors'


class Tensor(NamedTuple):
  file: str
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int  # bytes from the beginning of the file


def files(path: str) -> list[str]:
  """Returns the names of the safetensors files of a model, present or missing.

  The index lists the files. Without an index, the model is model.safetensors or, if
  that is missing, all safetensors files except adapters. Other formats are ignored.

  Raises:
    ValueError: the index is damaged, names a file outside the directory, or does not
      match the model.safetensors in the same directory.
  """
  names = sorted(os.listdir(path))
  if INDEX in names:
    index_file = os.path.join(path, INDEX)
    weight_map = read_object(index_file).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise ValueError(f'{index_file} has no weight_map; download the file again')
    for file in weight_map.values():
      # A damaged or hostile index must not lead out of the directory.
      if os.path.basename(str(file)) != file or not file.endswith('.safetensors'):
        raise ValueError(
          f'{index_file}: {file!r:.80} in weight_map must be the name of a safetensors '
          'file in the same directory; download the file again'
        )
    listed = sorted(set(weight_map.values()))
    if ONE_FILE in names and ONE_FILE not in listed:
      # transformers would ignore the index.
      raise ValueError(
        f'{path} has two models: {ONE_FILE}, and {INDEX} with {listed[0]}; remove the '
        'file that is out of date'
      )
    return listed
  if ONE_FILE in names:
    return [ONE_FILE]
  return [x for x in names if x.endswith('.safetensors') and x != ADAPTERS]


def index(path: str) -> dict[str, Tensor]:
  """Returns every tensor of a model directory by name; reads headers only.

  Raises:
    ValueError: a file is missing, truncated or damaged, a dtype is not supported, or
      two files contain the same tensor.
  """
  tensors: dict[str, Tensor] = {}
  for file in files(path):
    for name, tensor in _header(os.path.join(path, file)).items():
      if name in tensors:
        raise ValueError(
          f'{path}: both {os.path.basename(tensors[name].file)} and {file} contain '
          f'{name}; remove the file that does not belong to this model'
        )
      tensors[name] = tensor
  return tensors


def _header(path):
  """Returns the tensors of one file by name; see `index`."""
  try:
    with safetensors.safe_open(path, framework='numpy'):
      pass  # The library compares the header with the size of the file.
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
      f'{path} is missing, truncated or damaged ({error}); download the file again'
    ) from error
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    entries = json.loads(file.read(length))
  entries.pop('__metadata__', None)
  tensors = {}
  for name, entry in entries.items():
    if entry['dtype'] not in DTYPES:
      raise ValueError(
        f'{path}: {name} has the dtype {entry["dtype"]}, but only {", ".join(DTYPES)} '
        'are supported; choose a checkpoint that is not quantized'
      )
    start = 8 + length + entry['data_offsets'][0]
    tensors[name] = Tensor(path, DTYPES[entry['dtype']], tuple(entry['shape']), start)
  return tensors


def read(tensor: Tensor, shape: tuple[int, ...], cuts: tuple[slice, ...]) -> np.ndarray:
  """Reads a part of a tensor; `shape` may divide axes of the file's tensor."""
  # Mapped, only the pages of this part are read.
  array = np.memmap(tensor.file, tensor.dtype, 'r', tensor.start, shape)
  return np.array(array[cuts])


def write(
  path: str,
  dtype: str,
  shapes: dict[str, tuple[int, ...]],
  arrays: Iterable[np.ndarray],
) -> None:
  """Writes arrays of one dtype to a file, one at a time, in the order of `shapes`.

  The file appears when it is complete.
  """
  entries: dict[str, dict] = {'__metadata__': {'format': 'pt'}}
  code = NAMES[dtype]
  end = 0
  for name, shape in shapes.items():
    start = end
    end += math.prod(shape) * DTYPES[code].itemsize
    entries[name] = {'dtype': code, 'shape': shape, 'data_offsets': [start, end]}
  text = json.dumps(entries).encode()
  text += b' ' * (-len(text) % 8)  # the format's alignment
  with open(f'{path}.part', 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for array in arrays:
      # As bytes: the buffer protocol has no bfloat16.
      file.write(np.ascontiguousarray(array).ravel().view(np.uint8).data)
  os.replace(f'{path}.part', path)


def shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
  """Yields a list of tensor names per file: at most `limit` bytes, or one tensor."""
  names = []
  total = 0
  for name, size in sizes.items():
    if names and total + size > limit:
      yield names
      names = []
      total = 0
    names.append(name)
    total += size
  yield names
