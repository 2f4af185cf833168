"""Weights in and out: Hugging Face directories of safetensors and the parameter tree.

1. `find` maps a hub name to a directory: from the local cache, else downloaded;
2. `load` compares names and shapes, then fills each device's shard in place, block by
   block: no host and no device ever holds a second copy of a parameter;
3. `save` writes parameter by parameter, in files of bounded size.
"""

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bapo_jax import sharding
from bapo_jax.models import hf_config, hf_tensors, safetensors_io, transformer
from bapo_jax.models.hf_tensors import Shape
from bapo_jax.types import Tree

# Bytes read at once. Peak memory beyond the parameters grows by nine times this (157
# MiB at 8 MiB, 56 at 2), the time does not fall (7.5 s and 7.9 s for 2 GB).
BLOCK = 1 << 21
HUB_NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*')
MODEL_FILES = ('config.json', 'tokenizer.json', '*.safetensors')


def find(name: str, knob: str, needs: Sequence[str] = MODEL_FILES) -> str:
  """The directory of a model; downloads it if files are missing.

  Args:
    name: a directory or a hub name.
    knob: the knob that holds the name, for errors.
    needs: the files that must be there.

  Raises:
    ValueError: files are missing, with the command that fetches them.
  """
  path, why, target = here(name), '', name
  if missing(path, needs) and on_hub(name):
    target = '<directory>'
    try:
      path = _snapshot(name, local=False)
    except (OSError, ValueError) as error:
      # Its first line gives the failure, the second one a hint for importing code.
      why = f' ({str(error).strip().splitlines()[0].rstrip(".: ")})'
  if lacks := missing(path, needs):
    raise ValueError(
      f'--config.{knob}={name}: no {", ".join(lacks)} there, nor in the local cache of '
      f'the hub{why}; fetch it where there is a network, `hf download '
      f'{name if on_hub(name) else "<name>"} --local-dir {target}`, and give that '
      'directory'
    )
  return path


def tokenizer(name: str) -> str:
  """The directory of a tokenizer on the hub; any other name is returned unchanged.

  Raises:
    ValueError: as for `find`.
  """
  needs = ('tokenizer.json',)
  return find(name, 'tokenizer.path', needs) if on_hub(name) else name


def missing(name: str, needs: Sequence[str] = MODEL_FILES) -> list[str]:
  """The files of a model that this machine lacks; `name` as for `find`."""
  path = here(name)
  names = os.listdir(path) if os.path.isdir(path) else []
  lacks = [n for n in needs if '*' not in n and n not in names]
  if '*.safetensors' in needs:
    wanted = safetensors_io.files(path) if names else []
    lacks += [n for n in wanted or ['*.safetensors'] if n not in names]
  return lacks


def here(name: str) -> str:
  """A model's directory on this machine; of a hub name the one in the hub's cache."""
  if not on_hub(name):
    return name
  try:
    return _snapshot(name, local=True)
  except (OSError, ValueError):
    return name


def on_hub(name: str) -> bool:
  """True for a hub name: owner/name, and no directory of that name exists."""
  return not os.path.isdir(name) and bool(HUB_NAME.fullmatch(name))


def _snapshot(name: str, local: bool) -> str:
  import huggingface_hub

  return huggingface_hub.snapshot_download(
    name,
    allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model', '*.jinja'],
    ignore_patterns=['original/*', 'consolidated*'],  # Llama's own format
    local_files_only=local,
  )


def spec(path: str, compute: str) -> transformer.ModelSpec:
  """The ModelSpec of the config.json in the directory `path`.

  Raises:
    ValueError: an architecture or an option is not supported, by its name.
  """
  with open(os.path.join(path, 'config.json')) as file:
    config = json.load(file)
  try:
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
    ValueError: a tensor is missing, left over, or of another shape.
  """
  found = _checked(path, spec)
  flat = {}
  for parameter, like in transformer.flatten(transformer.abstract(spec)).items():
    layout = NamedSharding(mesh, sharding.spec_of(parameter, like.shape, mesh))
    flat[parameter] = _placed(parameter, like.shape, layout, found, like.dtype, block)
  return transformer.unflatten(flat)


def _checked(
  path: str, spec: transformer.ModelSpec
) -> dict[str, safetensors_io.Tensor]:
  """The tensors of the directory; raises ValueError unless they are those of `spec`."""
  found = safetensors_io.index(path)
  if spec.tied:
    found.pop(hf_tensors.NAMES['head'], None)  # some files repeat the embedding
  # Old Llama files hold the frequencies, which are computed here.
  found = {n: t for n, t in found.items() if not n.endswith('rotary_emb.inv_freq')}
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
  shards: dict[jax.Device, jax.Array] = {}
  # Devices that hold the same rows share the blocks read.
  for first, last in sorted({span[0] for span in spans.values()}):
    row_bytes = math.prod(size[1:]) * dtype.itemsize
    for group, a, b in _blocks(layers, first, last, row_bytes, block):
      rows = np.empty((len(group), b - a, *size[1:]), dtype)
      for i, layer in enumerate(group):
        tensor = found[hf_tensors.NAMES[parameter].format(layer)]
        fine = tensor.shape[0] // size[0]  # C rows of the file are one head
        rows[i] = safetensors_io.read(tensor, a * fine, b * fine).reshape(
          rows.shape[1:]
        )
      for device in (d for d, span in spans.items() if span[0] == (first, last)):
        window = [slice(None)] * 2 + [slice(*cut) for cut in spans[device][1:]]
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
  get: Callable[[str], jax.Array],
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
  get: Callable[[str], jax.Array], spec: transformer.ModelSpec, dtype: np.dtype
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
