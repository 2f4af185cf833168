"""Loads safetensors directories into the parameter tree, and saves the tree as one.

1. `check` compares the names and shapes of a directory with those of the model;
2. `load` fills each device's shard in place, block by block, so that no host and no
   device holds a second copy of a parameter; `reader` does so for single parameters on
   the host; both refuse NaN and infinity;
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
from bapo_jax.models import transformer
from bapo_jax.models.hf import safetensors_io, tensors
from bapo_jax.models.hf.tensors import Shape
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Tree

# Bytes read at once. Peak memory beyond the parameters grows by nine times this (157
# MiB at 8 MiB, 56 at 2); the time stays the same (7.5 s and 7.9 s for 2 GB).
BLOCK = 1 << 21

Span = tuple[int, int]  # (start, stop) along an axis
Index = dict[str, safetensors_io.Tensor]


def load(path: str, spec: ModelSpec, mesh: Mesh, block: int = BLOCK) -> Tree:
  """Loads the parameters onto the devices of a mesh, in spec.dtype.

  Each process reads the bytes of its own shards only. Host memory beyond the parameters
  is a few blocks, whatever the sizes of the tensors.

  Args:
    path: a directory of safetensors files.
    block: bytes read at once.

  Raises:
    ValueError: a file is damaged, or a tensor is missing, left over, of another shape,
      or not finite.
  """
  index = check(path, spec)
  params = {}
  for parameter, like in transformer.flatten(transformer.abstract(spec)).items():
    layout = NamedSharding(mesh, sharding.spec_of(parameter, like.shape, mesh))
    params[parameter] = _load_parameter(parameter, like, layout, index, block)
  return transformer.unflatten(params)


def reader(path: str, spec: ModelSpec) -> Callable[[str], np.ndarray]:
  """Returns a function that loads one parameter to host memory, in spec.dtype.

  Raises:
    ValueError: see `load`.
  """
  index, like = check(path, spec), transformer.flatten(transformer.abstract(spec))
  host = sharding.make(devices=jax.local_devices(backend='cpu')[:1])

  def read(parameter: str) -> np.ndarray:
    layout = sharding.replicated(host)
    return np.asarray(_load_parameter(parameter, like[parameter], layout, index, BLOCK))

  return read


def check(path: str, spec: ModelSpec) -> Index:
  """Returns the tensors of a directory by name; reads headers only.

  Raises:
    ValueError: the tensors are not those of `spec`, or a file is damaged.
  """
  index = safetensors_io.index(path)
  if spec.tied:
    index.pop(tensors.NAMES['head'], None)  # some files repeat the embedding
  # Old Llama files contain the rotary frequencies, which are computed here.
  index = {n: t for n, t in index.items() if not n.endswith('rotary_emb.inv_freq')}
  if spec.vision:
    index = {tensors.published(name): t for name, t in index.items()}
  shapes = tensors.stored(spec)
  if set(shapes) != set(index):
    missing, extra = sorted(set(shapes) - set(index)), sorted(set(index) - set(shapes))
    raise ValueError(
      f'{path}: tensors do not match config.json: {len(missing)} missing '
      f'{missing[:3]}, {len(extra)} unknown {extra[:3]}; download the model again'
    )
  for name, shape in shapes.items():
    if index[name].shape != shape:
      raise ValueError(
        f'{path}: {name} has the shape {index[name].shape}, and config.json implies '
        f'{shape}; download the model again'
      )
  return index


def _load_parameter(
  parameter: str,
  like: jax.ShapeDtypeStruct,
  layout: NamedSharding,
  index: Index,
  block: int,
) -> jax.Array:
  """Loads one parameter into the shards of its devices, each filled in place."""
  shape, dtype = like.shape, like.dtype
  layers, tail = tensors.split(parameter, shape)
  order = tensors.file_axes(parameter, len(tail))
  sizes = tuple(tail[axis] for axis in order)  # as in the file, before it merges axes
  # The part of every axis of the file that each device of this process holds.
  spans: dict[jax.Device, list[Span]] = {
    device: [cuts[axis - len(tail)].indices(tail[axis])[:2] for axis in order]
    for device, cuts in layout.addressable_devices_indices_map(shape).items()
    if cuts is not None
  }
  shards: dict[jax.Device, jax.Array] = {}
  # Devices that hold the same rows of the file share every block that is read.
  for start, stop in sorted({span[0] for span in spans.values()}):
    group = {d: span for d, span in spans.items() if span[0] == (start, stop)}
    hull = _hull(list(group.values()))
    widths = [right - left for left, right in hull]
    row_bytes = math.prod(widths) * dtype.itemsize
    for stack, top, bottom in _blocks(layers, start, stop, row_bytes, block):
      rows = np.empty((len(stack), bottom - top, *widths), dtype)
      for i, layer in enumerate(stack):
        name = tensors.NAMES[parameter].format(layer)
        lead = tensors.leading_axes(parameter)
        rows[i] = _read_rows(index[name], top, bottom, sizes, hull, lead)
        # After the cast: a large float32 is infinite in bfloat16.
        if not finite(rows[i]):
          raise ValueError(
            f'{index[name].file}: {name} contains NaN or infinity in {dtype}; '
            'download the file again, or choose another model'
          )
      for device, span in group.items():
        # The device's part of the block, with the axes in our order.
        cuts = zip(span[1:], hull, strict=True)
        window = [slice(x - low, y - low) for (x, y), (low, _) in cuts]
        piece = rows[(slice(None), slice(None), *window)]
        piece = piece.transpose(0, *(np.argsort(order) + 1))
        corner = np.zeros(piece.ndim, np.int32)
        corner[0], corner[1 + order[0]] = stack[0], top - start
        if len(tail) == len(shape):  # not stacked
          piece, corner = piece[0], corner[1:]
        shard_shape = layout.shard_shape(shape)
        shards[device] = _filled(shards.get(device), piece, corner, shard_shape, device)
      # Without waiting, blocks would pile up in host memory.
      jax.block_until_ready(list(shards.values()))
  return jax.make_array_from_single_device_arrays(
    shape, layout, [shards[device] for device in spans]
  )


def _hull(spans: list[list[Span]]) -> list[Span]:
  """Returns the span of every axis but the first that covers all devices."""
  lows, highs = np.min(spans, 0)[1:, 0], np.max(spans, 0)[1:, 1]
  return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _blocks(
  layers: int, start: int, stop: int, row_bytes: int, block: int
) -> Iterator[tuple[range, int, int]]:
  """Yields (layers, start, stop): several small tensors, or a part of a large one."""
  together = block // max((stop - start) * row_bytes, 1)
  if together:
    for i in range(0, layers, together):
      yield range(i, min(i + together, layers)), start, stop
  else:
    rows = max(block // row_bytes, 1)
    for i in range(layers):
      for top in range(start, stop, rows):
        yield range(i, i + 1), top, min(top + rows, stop)


def _read_rows(
  tensor: safetensors_io.Tensor,
  start: int,
  stop: int,
  sizes: Shape,
  hull: list[Span],
  lead: int,
) -> np.ndarray:
  """Reads the part `hull` of the rows start..stop-1 of a tensor.

  Args:
    sizes: of the axes of the file, before it merges them.
    hull: the span that is read of every axis but the first.
    lead: number of axes that the file merges into its first axis.
  """
  # Of the axes of a row, one is split at most: the first. Only its span is read.
  split = hull[lead - 1 : lead]
  inner = math.prod(sizes[lead + 1 :])
  columns = (split[0][0] * inner, split[0][1] * inner) if split else None
  fine = tensor.shape[0] // sizes[0]  # rows of the file per index of our first axis
  rows = safetensors_io.read(tensor, start * fine, stop * fine, columns)
  # Axes merged with the first one are read whole, then cut.
  widths = [right - left for left, right in hull[lead - 1 :]]
  rows = rows.reshape(stop - start, *sizes[1:lead], *widths)
  return rows[(slice(None), *(slice(*span) for span in hull[: lead - 1]))]


def finite(array: np.ndarray) -> bool:
  """Returns whether an array has no NaN and no infinity, without a wider copy."""
  if array.dtype.itemsize != 2:
    return bool(np.isfinite(array).all())
  # By the bits: NumPy converts bfloat16 and float16 number by number.
  infinity = np.asarray(np.inf, array.dtype).view(np.uint16)
  largest = (array.view(np.uint16) & 0x7FFF).max(initial=0)
  return bool(largest < infinity)


def _filled(
  shard: jax.Array | None,
  piece: np.ndarray,
  corner: np.ndarray,
  shape: Shape,
  device: jax.Device,
) -> jax.Array:
  """Returns the shard with the piece at `corner`; None is a shard that is yet empty."""
  if piece.shape == shape:
    return jax.device_put(piece, device)
  if shard is None:
    shard = jnp.zeros(shape, piece.dtype, device=device)
  return _update(shard, piece, tuple(corner))


@functools.partial(jax.jit, donate_argnums=0)  # in place
def _update(
  shard: jax.Array, piece: jax.Array, corner: tuple[jax.Array, ...]
) -> jax.Array:
  if piece.dtype.itemsize == 4:
    return jax.lax.dynamic_update_slice(shard, piece, corner)
  # As bits: XLA's CPU backend converts a whole bfloat16 shard to float32 and back (22
  # ms instead of 3 for 123 MB, in every block).
  bits, piece_bits = (jax.lax.bitcast_convert_type(x, 'uint16') for x in (shard, piece))
  bits = jax.lax.dynamic_update_slice(bits, piece_bits, corner)
  return jax.lax.bitcast_convert_type(bits, piece.dtype)


def save(
  path: str,
  get: Callable[[str], jax.Array | np.ndarray],
  spec: ModelSpec,
  dtype: str = 'float32',
  shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes the parameters to a directory, in files of at most `shard_bytes`.

  Args:
    get: returns the array of a parameter; called once per parameter, in order, so that
      the host holds one at a time.
    dtype: the dtype of all tensors: 'float32', 'float16' or 'bfloat16'.
  """
  kind, shapes = jnp.dtype(dtype), tensors.stored(spec)
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
  get: Callable[[str], jax.Array | np.ndarray], spec: ModelSpec, dtype: np.dtype
) -> Iterator[np.ndarray]:
  """Yields the tensors in the order and with the axes of `tensors.stored`."""
  for parameter, (shape, _) in transformer.describe(spec).items():
    array = get(parameter)
    layers, tail = tensors.split(parameter, shape)
    for i in range(layers):
      layer = np.asarray(array if len(tail) == len(shape) else array[i])
      layer = layer.transpose(tensors.file_axes(parameter, len(tail))).astype(dtype)
      yield layer.reshape(tensors.file_shape(parameter, tail))
    del array, layer  # before the next parameter is read
