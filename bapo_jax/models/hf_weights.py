"""Weights in and out: Hugging Face directories of safetensors and the parameter tree.

1. `find` turns a hub name into a directory: from the local cache, else downloaded;
2. `NAMES` says which tensor is which parameter, `AXES` how its axes lie in the file;
3. `load` compares names and shapes, then fills each device's shard in place, block by
   block: a second copy of a parameter never exists, on no host and no device;
4. `save` writes parameter by parameter, in files of bounded size.
"""

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from bapo_jax import sharding as sharding_lib
from bapo_jax.models import hf_config, safetensors_io, transformer

# parameter -> tensor; {} is the layer. Projections are stored [out, in].
NAMES = {
  'embed': 'model.embed_tokens.weight',
  'head': 'lm_head.weight',
  'final_norm': 'model.norm.weight',
  'layers/attn_norm': 'model.layers.{}.input_layernorm.weight',
  'layers/mlp_norm': 'model.layers.{}.post_attention_layernorm.weight',
  'layers/q': 'model.layers.{}.self_attn.q_proj.weight',
  'layers/k': 'model.layers.{}.self_attn.k_proj.weight',
  'layers/v': 'model.layers.{}.self_attn.v_proj.weight',
  'layers/o': 'model.layers.{}.self_attn.o_proj.weight',
  'layers/q_bias': 'model.layers.{}.self_attn.q_proj.bias',
  'layers/k_bias': 'model.layers.{}.self_attn.k_proj.bias',
  'layers/v_bias': 'model.layers.{}.self_attn.v_proj.bias',
  'layers/o_bias': 'model.layers.{}.self_attn.o_proj.bias',
  'layers/q_norm': 'model.layers.{}.self_attn.q_norm.weight',
  'layers/k_norm': 'model.layers.{}.self_attn.k_norm.weight',
  'layers/gate': 'model.layers.{}.mlp.gate_proj.weight',
  'layers/up': 'model.layers.{}.mlp.up_proj.weight',
  'layers/down': 'model.layers.{}.mlp.down_proj.weight',
}
# parameter -> its axes here, and in the file: letters without a space are one axis.
AXES = {
  'layers/q': ('DHC', 'HC D'),
  'layers/k': ('DKC', 'KC D'),
  'layers/v': ('DKC', 'KC D'),
  'layers/o': ('HCD', 'D HC'),
  'layers/q_bias': ('HC', 'HC'),
  'layers/k_bias': ('KC', 'KC'),
  'layers/v_bias': ('KC', 'KC'),
  'layers/gate': ('DF', 'F D'),
  'layers/up': ('DF', 'F D'),
  'layers/down': ('FD', 'D F'),
}
# Bytes read at once. The peak over the parameters grows by nine times this (157 MiB at
# 8 MiB, 56 at 2), the time does not fall (7.5 s and 7.9 s for 2 GB).
BLOCK = 1 << 21
HUB_NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*')
MODEL_FILES = ('config.json', 'tokenizer.json', '*.safetensors')


def find(name: str, knob: str, needs=MODEL_FILES) -> str:
  """The directory of a model, given by its directory or hub name; may download it.

  Raises:
    ValueError: which files are missing, and how to fetch them.
  """
  path, why, target = here(name), '', name
  if missing(path, needs) and on_hub(name):
    target = '<directory>'
    try:
      path = _snapshot(name, local=False)
    except (OSError, ValueError) as error:
      # Its own words say what failed, and then in a second line what to import.
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
  """The directory of a tokenizer on the hub; every other name is returned as it is."""
  needs = ('tokenizer.json',)
  return find(name, 'text.tokenizer', needs) if on_hub(name) else name


def missing(name: str, needs=MODEL_FILES) -> list[str]:
  """What this machine lacks of a model, by directory or hub name; [] for nothing."""
  path = here(name)
  names = os.listdir(path) if os.path.isdir(path) else []
  lacks = [n for n in needs if '*' not in n and n not in names]
  if '*.safetensors' in needs:
    wanted = safetensors_io.files(path) if names else []
    lacks += [n for n in wanted or ['*.safetensors'] if n not in names]
  return lacks


def here(name: str) -> str:
  """A model's directory on this machine; for a hub name the one in the hub's cache."""
  if not on_hub(name):
    return name
  try:
    return _snapshot(name, local=True)
  except (OSError, ValueError):
    return name


def on_hub(name: str) -> bool:
  """Whether it is a hub name: owner/name, and no directory is called so."""
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
  """The ModelSpec that config.json in the directory `path` describes.

  Raises:
    ValueError: an architecture or an option that is not supported, by its name.
  """
  with open(os.path.join(path, 'config.json')) as file:
    config = json.load(file)
  try:
    return hf_config.spec_of(config, compute)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None


def stored(spec: transformer.ModelSpec) -> dict[str, tuple[int, ...]]:
  """Every tensor of a checkpoint of this model: name -> shape as in the file."""
  shapes = {}
  for parameter, (shape, _) in transformer.describe(spec).items():
    layers, tail = _apart(parameter, shape)
    for i in range(layers):
      shapes[NAMES[parameter].format(i)] = _merged(parameter, tail)
  return shapes


def _apart(parameter: str, shape: tuple) -> tuple[int, tuple]:
  """(number of tensors, shape of each) of a parameter, which may be stacked."""
  return (shape[0], shape[1:]) if '{}' in NAMES[parameter] else (1, shape)


def _order(parameter: str, rank: int) -> tuple[int, ...]:
  """Our axis of each axis in the file, merged axes still apart."""
  if parameter not in AXES:
    return tuple(range(rank))
  ours, theirs = AXES[parameter]
  return tuple(ours.index(axis) for axis in theirs.replace(' ', ''))


def _merged(parameter: str, tail: tuple) -> tuple[int, ...]:
  if parameter not in AXES:
    return tail
  ours, theirs = AXES[parameter]
  size = dict(zip(ours, tail, strict=True))
  return tuple(math.prod(size[axis] for axis in axes) for axes in theirs.split())


def load(path: str, spec: transformer.ModelSpec, devices, block=BLOCK):
  """The parameters on the devices of the mesh, in spec.dtype, read block by block.

  Beside the parameters a few blocks of `block` bytes are held, whatever their sizes.

  Raises:
    ValueError: a tensor is missing, left over, or of another shape.
  """
  found = safetensors_io.index(path)
  if spec.tied:
    found.pop(NAMES['head'], None)  # some files repeat the embedding
  # Old Llama files hold the frequencies, which are computed here.
  found = {n: t for n, t in found.items() if not n.endswith('rotary_emb.inv_freq')}
  wanted = stored(spec)
  if set(wanted) != set(found):
    lost, left = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    raise ValueError(f'{path}: tensors missing {lost[:3]}, left over {left[:3]}')
  for name, shape in wanted.items():
    if found[name].shape != shape:
      raise ValueError(f'{path}: {name} has shape {found[name].shape}, not {shape}')
  flat = {}
  for parameter, like in transformer.flatten(transformer.abstract(spec)).items():
    layout = NamedSharding(
      devices, sharding_lib.spec_of(parameter, like.shape, devices)
    )
    flat[parameter] = _placed(parameter, like.shape, layout, found, like.dtype, block)
  return transformer.unflatten(flat)


def _placed(parameter, shape, sharding, found, dtype, block) -> jax.Array:
  """One parameter, each device's shard of it filled in place."""
  layers, tail = _apart(parameter, shape)
  order = _order(parameter, len(tail))
  size = tuple(tail[axis] for axis in order)  # as in the file, merged axes still apart
  spans = {  # device -> (first, last) of each of these axes
    device: [cuts[axis - len(tail)].indices(tail[axis])[:2] for axis in order]
    for device, cuts in sharding.addressable_devices_indices_map(shape).items()
  }
  shards = dict.fromkeys(spans)
  # Devices that hold the same rows share what is read.
  for first, last in sorted({span[0] for span in spans.values()}):
    row_bytes = math.prod(size[1:]) * dtype.itemsize
    for group, a, b in _blocks(layers, first, last, row_bytes, block):
      rows = np.empty((len(group), b - a, *size[1:]), dtype)
      for i, layer in enumerate(group):
        tensor = found[NAMES[parameter].format(layer)]
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
        whole = sharding.shard_shape(shape)
        shards[device] = _into(shards[device], piece, start, whole, device)
      jax.block_until_ready([x for x in shards.values() if x is not None])
  return jax.make_array_from_single_device_arrays(
    shape, sharding, list(shards.values())
  )


def _blocks(layers: int, first: int, last: int, row_bytes: int, block: int) -> Iterator:
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


def _into(shard, piece, start, whole, device) -> jax.Array:
  """The shard, with the piece in it; made when its first piece comes."""
  if piece.shape == whole:
    return jax.device_put(piece, device)
  if shard is None:
    shard = jnp.zeros(whole, piece.dtype, device=device)
  return _filled(shard, piece, tuple(start))


@functools.partial(jax.jit, donate_argnums=0)  # in place
def _filled(shard, piece, start):
  if piece.dtype.itemsize == 4:
    return jax.lax.dynamic_update_slice(shard, piece, start)
  # As bits: XLA's CPU backend takes a whole bfloat16 shard to float32 and back (22 ms
  # instead of 3 for 123 MB, and that for every block).
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
    get: the array of a parameter; asked for one after the other, so that no more than
      one need be on the host.
  """
  dtype = jnp.dtype(dtype)
  shapes = stored(spec)
  sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
  parts = list(safetensors_io.shards(sizes, shard_bytes))
  arrays, file_of = _as_stored(get, spec, dtype), {}
  for i, names in enumerate(parts, 1):
    file = f'model-{i:05}-of-{len(parts):05}.safetensors'
    file = file if len(parts) > 1 else safetensors_io.ONE_FILE
    safetensors_io.write(
      os.path.join(path, file),
      dtype.name,
      {name: shapes[name] for name in names},
      itertools.islice(arrays, len(names)),
    )
    file_of |= dict.fromkeys(names, file)
  if len(parts) > 1:
    with open(os.path.join(path, safetensors_io.INDEX), 'w') as file:
      total = {'total_size': sum(sizes.values())}
      json.dump({'metadata': total, 'weight_map': file_of}, file, indent=2)


def _as_stored(get, spec, dtype) -> Iterator[np.ndarray]:
  """The tensors, in the order and with the axes of `stored`."""
  for parameter, (shape, _) in transformer.describe(spec).items():
    array = get(parameter)
    layers, tail = _apart(parameter, shape)
    for i in range(layers):
      one = np.asarray(array if len(tail) == len(shape) else array[i])
      one = one.transpose(_order(parameter, len(tail))).astype(dtype)
      yield one.reshape(_merged(parameter, tail))
    del array, one  # before the next one comes
