"""Weights in and out: Hugging Face directories of safetensors and the parameter tree.

1. `check` compares the names and shapes of a directory with those of the model;
2. `load` fills each device's shard in place, block by block: no host and no device ever
   holds a second copy of a parameter; a number that is not finite is refused;
3. `save` writes parameter by parameter, in files of bounded size.
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bapo_jax import sharding
from bapo_jax.models import (
  hf_config,
  hf_tensors,
  hf_vision,
  safetensors_io,
  transformer,
)
from bapo_jax.models.hf_tensors import Shape
from bapo_jax.runtime import json_files
from bapo_jax.types import Tree

# Bytes read at once. Peak memory beyond the parameters grows by nine times this (157
# MiB at 8 MiB, 56 at 2), the time does not fall (7.5 s and 7.9 s for 2 GB).
BLOCK = 1 << 21


def spec(path: str, compute: str) -> transformer.ModelSpec:
  """The ModelSpec of a directory, with a tower where it is one of Qwen2.5-VL.

  Args:
    compute: dtype of the matrix products.

  Raises:
    ValueError: an architecture or an option is not supported, by its name.
  """
  config = json_files.read(os.path.join(path, 'config.json'))
  try:
    if config.get('model_type') == hf_vision.KIND:
      return hf_vision.spec_of(config, compute, hf_vision.read_pixels(path))
    return hf_config.spec_of(config, compute)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None


def load(
  path: str, spec: transformer.ModelSpec, mesh: Mesh, block: int = BLOCK
) -> Tree:
  """The parameters on the devices of the mesh, in spec.dtype, read block by block.

  Host memory beyond the parameters is a few blocks, whatever the sizes of the tensors.

  Args:
    block: bytes read at once.

  Raises:
    ValueError: a tensor is missing, left over, of another shape, or not finite.
  """
  found = check(path, spec)
  flat = {}
  for parameter, like in transformer.flatten(transformer.abstract(spec)).items():
    layout = NamedSharding(mesh, sharding.spec_of(parameter, like.shape, mesh))
    flat[parameter] = _placed(parameter, like.shape, layout, found, like.dtype, block)
  return transformer.unflatten(flat)


def reader(path: str, spec: transformer.ModelSpec) -> Callable[[str], np.ndarray]:
  """From a parameter to its array on the host, in spec.dtype; it reads no other.

  Raises:
    ValueError: as `load`.
  """
  found, like = check(path, spec), transformer.flatten(transformer.abstract(spec))
  alone = sharding.make(devices=jax.local_devices(backend='cpu')[:1])

  def read(parameter: str) -> np.ndarray:
    shape, dtype = like[parameter].shape, like[parameter].dtype
    layout = sharding.replicated(alone)
    return np.asarray(_placed(parameter, shape, layout, found, dtype, BLOCK))

  return read


def check(path: str, spec: transformer.ModelSpec) -> dict[str, safetensors_io.Tensor]:
  """The tensors of the directory, by name; only headers are read.

  Raises:
    ValueError: they are not those of `spec`, or a file is damaged.
  """
  found = safetensors_io.index(path)
  if spec.tied:
    found.pop(hf_tensors.NAMES['head'], None)  # some files repeat the embedding
  # Old Llama files hold the frequencies, which are computed here.
  found = {n: t for n, t in found.items() if not n.endswith('rotary_emb.inv_freq')}
  if spec.vision:
    found = {hf_tensors.published(name): t for name, t in found.items()}
  wanted = hf_tensors.stored(spec)
  if set(wanted) != set(found):
    lost, left = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    raise ValueError(f'{path}: tensors missing {lost[:3]}, left over {left[:3]}')
  for name, shape in wanted.items():
    if found[name].shape != shape:
      raise ValueError(f'{path}: {name} has shape {found[name].shape}, not {shape}')
  return found


def _placed(
  parameter: str,
  shape: Shape,
  layout: NamedSharding,
  found: dict[str, safetensors_io.Tensor],
  dtype: np.dtype,
  block: int,
) -> jax.Array:
  """One parameter, each device's shard of it filled in place."""
  layers, tail = hf_tensors.split(parameter, shape)
  order = hf_tensors.file_axes(parameter, len(tail))
  size = tuple(tail[axis] for axis in order)  # as in the file, before axes are merged
  spans = {  # device -> (first, last) of each of these axes
    device: [cuts[axis - len(tail)].indices(tail[axis])[:2] for axis in order]
    for device, cuts in layout.addressable_devices_indices_map(shape).items()
    if cuts is not None
  }
  lead = hf_tensors.leading_axes(parameter)
  shards: dict[jax.Device, jax.Array] = {}
  # Devices that hold the same rows share the blocks read.
  for first, last in sorted({span[0] for span in spans.values()}):
    mine = {d: span for d, span in spans.items() if span[0] == (first, last)}
    hull = _hull(list(mine.values()))
    held = [y - x for x, y in hull]
    # Of each row of the file only what these devices hold: one axis is split, at most.
    inner, split = math.prod(size[lead + 1 :]), hull[lead - 1 : lead]
    columns = (split[0][0] * inner, split[0][1] * inner) if split else None
    row_bytes = math.prod(held) * dtype.itemsize
    for group, a, b in _blocks(layers, first, last, row_bytes, block):
      rows = np.empty((len(group), b - a, *held), dtype)
      for i, layer in enumerate(group):
        tensor = found[hf_tensors.NAMES[parameter].format(layer)]
        fine = tensor.shape[0] // size[0]  # C rows of the file are one head
        read = safetensors_io.read(tensor, a * fine, b * fine, columns)
        # Of axes merged with the first one all is read, whatever part is held.
        read = read.reshape(b - a, *size[1:lead], *held[lead - 1 :])
        rows[i] = read[(slice(None), *(slice(x, y) for x, y in hull[: lead - 1]))]
        # After the cast: a large float32 is infinite in bfloat16.
        if not safetensors_io.finite(rows[i]):
          raise ValueError(
            f'{tensor.file}: {hf_tensors.NAMES[parameter].format(layer)} holds NaN or '
            'infinity; fetch the file again, or choose another model'
          )
      for device, span in mine.items():
        cuts = zip(span[1:], hull, strict=True)
        window = [slice(x - low, y - low) for (x, y), (low, _) in cuts]
        window = [slice(None)] * 2 + window
        piece = rows[tuple(window)].transpose(0, *(np.argsort(order) + 1))
        start = np.zeros(piece.ndim, np.int32)
        start[0], start[1 + order[0]] = group[0], a - first
        if len(tail) == len(shape):
          piece, start = piece[0], start[1:]
        whole = layout.shard_shape(shape)
        shards[device] = _into(shards.get(device), piece, start, whole, device)
      jax.block_until_ready(list(shards.values()))
  return jax.make_array_from_single_device_arrays(
    shape, layout, [shards[device] for device in spans]
  )


def _hull(spans: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
  """(first, last) of every axis but the first: what some of the devices hold."""
  lows, highs = np.min(spans, 0)[1:, 0], np.max(spans, 0)[1:, 1]
  return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _blocks(
  layers: int, first: int, last: int, row_bytes: int, block: int
) -> Iterator[tuple[range, int, int]]:
  """(layers, first row, last row): several small tensors, or a part of a large one."""
  together = block // max((last - first) * row_bytes, 1)
  if together:
    for i in range(0, layers, together):
      yield range(i, min(i + together, layers)), first, last
  else:
    rows = max(block // row_bytes, 1)
    for i in range(layers):
      for a in range(first, last, rows):
        yield range(i, i + 1), a, min(a + rows, last)


def _into(
  shard: jax.Array | None,
  piece: np.ndarray,
  start: np.ndarray,
  whole: Shape,
  device: jax.Device,
) -> jax.Array:
  """The shard with the piece in it; None is a shard without any piece yet."""
  if piece.shape == whole:
    return jax.device_put(piece, device)
  if shard is None:
    shard = jnp.zeros(whole, piece.dtype, device=device)
  return _filled(shard, piece, tuple(start))


@functools.partial(jax.jit, donate_argnums=0)  # in place
def _filled(
  shard: jax.Array, piece: jax.Array, start: tuple[jax.Array, ...]
) -> jax.Array:
  if piece.dtype.itemsize == 4:
    return jax.lax.dynamic_update_slice(shard, piece, start)
  # As bits: XLA's CPU backend converts a whole bfloat16 shard to float32 and back (22
  # ms instead of 3 for 123 MB, in every block).
  bits, piece_bits = (jax.lax.bitcast_convert_type(x, 'uint16') for x in (shard, piece))
  bits = jax.lax.dynamic_update_slice(bits, piece_bits, start)
  return jax.lax.bitcast_convert_type(bits, piece.dtype)


def save(
  path: str,
  get: Callable[[str], jax.Array | np.ndarray],
  spec: transformer.ModelSpec,
  dtype: str = 'float32',
  shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes the tensors to the directory, in files of at most `shard_bytes`.

  Args:
    get: returns the array of a parameter; called once per parameter, in order, so that
      the host needs to hold only one.
    dtype: of all tensors: 'float32', 'float16' or 'bfloat16'.
  """
  kind, shapes = jnp.dtype(dtype), hf_tensors.stored(spec)
  sizes = {name: math.prod(shape) * kind.itemsize for name, shape in shapes.items()}
  parts = list(safetensors_io.shards(sizes, shard_bytes))
  arrays, file_of = _as_stored(get, spec, kind), {}
  for i, names in enumerate(parts, 1):
    file = f'model-{i:05}-of-{len(parts):05}.safetensors'
    file = file if len(parts) > 1 else safetensors_io.ONE_FILE
    safetensors_io.write(
      os.path.join(path, file),
      kind.name,
      {name: shapes[name] for name in names},
      itertools.islice(arrays, len(names)),
    )
    file_of |= dict.fromkeys(names, file)
  if len(parts) > 1:
    with open(os.path.join(path, safetensors_io.INDEX), 'w') as file:
      total = {'total_size': sum(sizes.values())}
      json.dump({'metadata': total, 'weight_map': file_of}, file, indent=2)


def _as_stored(
  get: Callable[[str], jax.Array | np.ndarray],
  spec: transformer.ModelSpec,
  dtype: np.dtype,
) -> Iterator[np.ndarray]:
  """The tensors, in the order and with the axes of `stored`."""
  for parameter, (shape, _) in transformer.describe(spec).items():
    array = get(parameter)
    layers, tail = hf_tensors.split(parameter, shape)
    for i in range(layers):
      one = np.asarray(array if len(tail) == len(shape) else array[i])
      one = one.transpose(hf_tensors.file_axes(parameter, len(tail))).astype(dtype)
      yield one.reshape(hf_tensors.file_shape(parameter, tail))
    del array, one  # before the next one comes
