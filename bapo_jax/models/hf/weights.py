"""Loads a safetensors directory into the parameter tree, and saves the tree to one.

Loading fills each device's shard in place, block by block, so that no host and no
device holds a second copy of a parameter. NaN and infinity raise an error. Saving
writes parameter by parameter, in files of bounded size.
"""

import functools
import itertools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from bapo_jax import sharding
from bapo_jax.models import lora, transformer
from bapo_jax.models.hf import directory, safetensors_io
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import files
from bapo_jax.types import Tree

# Bytes read at once. Blocks of 8 MiB would take 157 MiB beyond the parameters, not 56,
# and hardly less time (7.5 s instead of 7.9 s for 2 GB).
BLOCK = 1 << 21

Shape = tuple[int, ...]
Span = tuple[int, int]  # (start, stop) along an axis
Index = dict[str, safetensors_io.Tensor]
# parameter -> module; the first {} is the layer's index, the second the expert's.
MODULES = {
  'embed': 'model.embed_tokens',
  'head': 'lm_head',
  'final_norm': 'model.norm',
  'layers/attn_norm': 'model.layers.{}.input_layernorm',
  'layers/mlp_norm': 'model.layers.{}.post_attention_layernorm',
  'layers/attn_post_norm': 'model.layers.{}.post_attention_layernorm',
  'layers/mlp_post_norm': 'model.layers.{}.post_feedforward_layernorm',
  'layers/q': 'model.layers.{}.self_attn.q_proj',
  'layers/k': 'model.layers.{}.self_attn.k_proj',
  'layers/v': 'model.layers.{}.self_attn.v_proj',
  'layers/o': 'model.layers.{}.self_attn.o_proj',
  'layers/q_norm': 'model.layers.{}.self_attn.q_norm',
  'layers/k_norm': 'model.layers.{}.self_attn.k_norm',
  'layers/gate': 'model.layers.{}.mlp.gate_proj',
  'layers/up': 'model.layers.{}.mlp.up_proj',
  'layers/down': 'model.layers.{}.mlp.down_proj',
  'layers/router': 'model.layers.{}.mlp.gate',
  'layers/expert_gate': 'model.layers.{}.mlp.experts.{}.gate_proj',
  'layers/expert_up': 'model.layers.{}.mlp.experts.{}.up_proj',
  'layers/expert_down': 'model.layers.{}.mlp.experts.{}.down_proj',
  'vision/patch': 'visual.patch_embed.proj',
  'vision/layers/attn_norm': 'visual.blocks.{}.norm1',
  'vision/layers/qkv': 'visual.blocks.{}.attn.qkv',
  'vision/layers/o': 'visual.blocks.{}.attn.proj',
  'vision/layers/mlp_norm': 'visual.blocks.{}.norm2',
  'vision/layers/gate': 'visual.blocks.{}.mlp.gate_proj',
  'vision/layers/up': 'visual.blocks.{}.mlp.up_proj',
  'vision/layers/down': 'visual.blocks.{}.mlp.down_proj',
  'vision/merger_norm': 'visual.merger.ln_q',
  'vision/merger_in': 'visual.merger.mlp.0',
  'vision/merger_out': 'visual.merger.mlp.2',
}
NAMES = {parameter: f'{module}.weight' for parameter, module in MODULES.items()}
NAMES |= {f'{parameter}_bias': f'{x}.bias' for parameter, x in MODULES.items()}
# In Gemma the name that Llama has for the norm before the MLP is that after attention.
NAMES_BY_NORMS = {
  'sandwich': {'layers/mlp_norm': 'model.layers.{}.pre_feedforward_layernorm.weight'}
}
# A tensor of all experts of a layer -> the modules that it joins for each expert.
FUSED = {
  'model.layers.{}.mlp.experts.gate_up_proj': ('expert_gate', 'expert_up'),
  'model.layers.{}.mlp.experts.down_proj': ('expert_down',),
}
# First part of a tensor's name -> what the tensor belongs to, and the way out.
FOREIGN = {
  'v_head': (
    "TRL's critic; save the model without it, in an environment with PyTorch: "
    f'`{directory.CONVERT}`'
  ),
  'base_model': (
    'a model with adapters of peft; merge them with merge_and_unload() and save again'
  ),
  'embed_tokens': (
    'a model without its language-model head, such as those of sentence-transformers; '
    'choose a causal language model'
  ),
}


def load(path: str, spec: ModelSpec, mesh: Mesh) -> Tree:
  """Loads the parameters onto the devices of a mesh, in spec.dtype.

  Each process reads only the bytes of its shards. Host memory beyond the parameters
  is a few blocks, whatever the sizes of the tensors.

  Raises:
    ValueError: a file is damaged, or a tensor is missing, unknown, of the wrong shape,
      or not finite, or the weights are tied and the files have another head.
  """
  index = check(path, spec)
  # transformers 4 and vLLM drop a head that differs, transformers 5 uses it.
  repeated = index.get(NAMES['head']) if spec.tied else None
  names = names_of(spec)
  params = {}
  for parameter, like in transformer.flatten(transformer.abstract(spec)).items():
    layout = sharding.named(mesh, *sharding.spec_of(parameter, like.shape, mesh))
    read = functools.partial(_load_parameter, parameter, names[parameter], like, layout)
    params[parameter] = read(index)
    if (
      repeated
      and parameter == 'embed'
      # No array stays: the rest of the model may need the memory.
      and (params[parameter] != read({names[parameter]: repeated})).any()
    ):
      raise ValueError(
        f'{repeated.file}: {NAMES["head"]} differs from the embedding, but '
        'config.json has tie_word_embeddings=true; set it to false to use this head, '
        'or remove the tensor'
      )
  return transformer.unflatten(params)


def reader(path: str, spec: ModelSpec) -> Callable[[str], np.ndarray]:
  """Returns a function that loads one parameter to host memory; see `load`."""
  index = check(path, spec)
  like = transformer.flatten(transformer.abstract(spec))
  host = sharding.make(devices=jax.local_devices(backend='cpu')[:1])
  layout = sharding.replicated(host)
  names = names_of(spec)
  return lambda parameter: np.asarray(
    _load_parameter(parameter, names[parameter], like[parameter], layout, index)
  )


def check(path: str, spec: ModelSpec) -> Index:
  """Returns the tensors of a directory by name; reads headers only.

  Raises:
    ValueError: the tensors do not match `spec`, or a file is damaged.
  """
  index = safetensors_io.index(path)
  # Old Llama files contain the rotary frequencies, which are computed here.
  index = {n: t for n, t in index.items() if not n.endswith('rotary_emb.inv_freq')}
  if spec.vision:  # some programs write the module names of transformers' class
    for old, new in (('model.language_model.', 'model.'), ('model.visual.', 'visual.')):
      index = {name.replace(old, new): t for name, t in index.items()}
  shapes = stored(spec)
  if spec.experts:
    index = _by_expert(path, index, spec)
  if spec.tied and NAMES['head'] in index:  # some files repeat the embedding
    shapes[NAMES['head']] = shapes[NAMES['embed']]
  if set(shapes) != set(index):
    missing = sorted(shapes.keys() - index)
    extra = sorted(index.keys() - shapes)
    for name in extra:
      if owner := FOREIGN.get(name.partition('.')[0]):
        raise ValueError(f'{path}: tensor {name} belongs to {owner.format(path)}')
    raise ValueError(
      f'{path}: tensors do not match config.json: {len(missing)} missing '
      f'{missing[:3]}, {len(extra)} unknown {extra[:3]}; download the model again'
    )
  for name, shape in shapes.items():
    if index[name].shape != shape:
      raise ValueError(
        f'{path}: {name} has the shape {index[name].shape}, but config.json implies '
        f'{shape}; download the model again'
      )
  return index


def _by_expert(path, index: Index, spec: ModelSpec) -> Index:
  """Divides tensors that contain all experts of a layer, [E, 2F, D] and [E, D, F].

  transformers 5 saves these with save_original_format=False. Each part is contiguous.
  """
  shapes = stored(spec)
  index = dict(index)
  for fused, parts in FUSED.items():
    for layer in range(spec.layers):
      tensor = index.get(fused.format(layer))
      if tensor is None:
        continue
      del index[fused.format(layer)]
      names = [
        NAMES[f'layers/{part}'].format(layer, expert)
        for expert in range(spec.experts)
        for part in parts
      ]
      rows, columns = shapes[names[0]]
      shape = spec.experts, len(parts) * rows, columns
      if tensor.shape != shape or not index.keys().isdisjoint(names):
        raise ValueError(
          f'{path}: {fused.format(layer)} has the shape {tensor.shape}; config.json '
          f'implies {shape}, and no tensors per expert; download the model again'
        )
      size = rows * columns * tensor.dtype.itemsize
      for i, name in enumerate(names):
        part = tensor._replace(shape=(rows, columns), start=tensor.start + i * size)
        index[name] = part
  return index


def _load_parameter(
  parameter, name, like: jax.ShapeDtypeStruct, layout: NamedSharding, index: Index
):
  """Loads one parameter; `name` is the pattern of its tensors, see MODULES."""
  shape = like.shape
  dtype = like.dtype
  _, tail = _tensors(name, shape)
  stacked = len(shape) - len(tail)
  order = list(itertools.chain(*_file_axes(parameter, tail)))
  sizes = tuple(tail[axis] for axis in order)  # as in the file, before it merges axes
  # The part of each axis that devices of this process hold: devices with the same part
  # share every block that is read.
  holders: dict[tuple[Span, ...], list[jax.Device]] = {}
  for device, part in layout.addressable_devices_indices_map(shape).items():
    assert part is not None
    spans = (cut.indices(n)[:2] for cut, n in zip(part, shape, strict=True))
    holders.setdefault(tuple(spans), []).append(device)
  shard_shape = layout.shard_shape(shape)
  shards: dict[jax.Device, jax.Array] = {}
  for spans, devices in holders.items():
    (start, stop), *others = (spans[stacked + axis] for axis in order)
    columns = tuple(slice(*span) for span in others)
    row_bytes = math.prod(right - left for left, right in others) * dtype.itemsize
    tops = range(start, stop, max(BLOCK // row_bytes, 1))
    stack = (range(*span) for span in spans[:stacked])
    for *at, top in itertools.product(*stack, tops):
      tensor = index[name.format(*at)]
      cuts = slice(top, min(top + tops.step, stop)), *columns
      rows = safetensors_io.read(tensor, sizes, cuts).astype(dtype)
      if not finite(rows):  # after the cast: a large float32 is infinite in bfloat16
        raise ValueError(
          f'{tensor.file}: {name.format(*at)} contains NaN or infinity in {dtype}; '
          'download the file again, or choose another model'
        )
      piece = rows.transpose(np.argsort(order))[(None,) * stacked]
      corner = np.zeros(len(shape), np.int32)
      corner[:stacked] = [i - first for i, (first, _) in zip(at, spans, strict=False)]
      corner[stacked + order[0]] = top - start
      for device in devices:
        if piece.shape == shard_shape:
          shards[device] = jax.device_put(piece, device)
          continue
        if device not in shards:
          shards[device] = jnp.zeros(shard_shape, dtype, device=device)
        shards[device] = _update(shards[device], piece, tuple(corner))
      # Without waiting, blocks would pile up in host memory.
      jax.block_until_ready(list(shards.values()))
  return jax.make_array_from_single_device_arrays(shape, layout, list(shards.values()))


def finite(array: np.ndarray) -> bool:
  """Returns whether an array has no NaN and no infinity; makes no float32 copy."""
  if array.dtype.itemsize != 2:
    return bool(np.isfinite(array).all())
  # On the bits, because NumPy converts bfloat16 and float16 number by number.
  infinity = np.asarray(np.inf, array.dtype).view(np.uint16)
  largest = (array.view(np.uint16) & 0x7FFF).max(initial=0)
  return bool(largest < infinity)


@jax.jit(donate_argnums=0)  # in place
def _update(shard: jax.Array, piece: jax.Array, corner):
  # As bits: XLA's CPU backend converts a whole bfloat16 shard to float32 and back (22
  # ms instead of 3 for 123 MB, in every block).
  bits = f'uint{8 * piece.dtype.itemsize}'
  whole, part = (lax.bitcast_convert_type(x, bits) for x in (shard, piece))
  whole = lax.dynamic_update_slice(whole, part, corner)
  return lax.bitcast_convert_type(whole, shard.dtype)


def save(
  path: str,
  get: Callable[[str], Any],
  spec: ModelSpec,
  dtype: str = 'float32',
  shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes the parameters to a directory, in files of at most `shard_bytes`.

  `get` returns the array of a parameter. Parameters are requested once, in order, so
  that the host holds one at a time. `dtype` is 'float32', 'float16' or 'bfloat16'.
  """
  kind = jnp.dtype(dtype)
  shapes = stored(spec)
  names_by_parameter = names_of(spec)

  def tensors():
    for parameter, (shape, _) in transformer.describe(spec).items():
      array = get(parameter)
      names, tail = _tensors(names_by_parameter[parameter], shape)
      order = list(itertools.chain(*_file_axes(parameter, tail)))
      rows = array.reshape(-1, *tail)
      for i, name in enumerate(names):
        tensor = np.asarray(rows[i]).transpose(order).astype(kind)
        yield tensor.reshape(shapes[name])
      del array, rows, tensor  # before the next parameter is read

  sizes = {name: math.prod(shape) * kind.itemsize for name, shape in shapes.items()}
  parts = list(safetensors_io.shards(sizes, shard_bytes))
  arrays = tensors()
  file_of = {}
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
    content = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': file_of}
    files.write_json(os.path.join(path, safetensors_io.INDEX), content)


def stored(spec: ModelSpec) -> dict[str, Shape]:
  """Lists every tensor of a checkpoint of this model: name -> shape in the file."""
  shapes = {}
  names_by_parameter = names_of(spec)
  for parameter, (shape, _) in transformer.describe(spec).items():
    names, tail = _tensors(names_by_parameter[parameter], shape)
    merged = [math.prod(tail[i] for i in axes) for axes in _file_axes(parameter, tail)]
    shapes |= dict.fromkeys(names, tuple(merged))
  return shapes


def names_of(spec: ModelSpec) -> dict[str, str]:
  """Returns parameter -> pattern of its tensors' names, see MODULES."""
  return NAMES | NAMES_BY_NORMS.get(spec.norms, {})


def _tensors(pattern: str, shape: Shape) -> tuple[list[str], Shape]:
  """Returns the names of a parameter's tensors, and the axes of each, in our order.

  The axes before these are those of the layers, and of the experts of a layer.
  """
  stacked = pattern.count('{}')
  stack = np.ndindex(*shape[:stacked])
  return [pattern.format(*at) for at in stack], shape[stacked:]


def _file_axes(parameter, tail):
  """Returns, for each axis of a file's tensor, the axes of `tail` that it merges.

  Files store projections as [out, in], and biases and norms as [out], where `in` and
  `out` are one axis each. Embedding and head have the same axes in our tree. The kernel
  of patches is [D, channel, frame, row, column] in a file, and has D last in our tree.
  """
  axes = list(range(len(tail)))
  if parameter.endswith(('_bias', '_norm')):
    return [axes]
  if parameter in ('embed', 'head'):
    return [[axis] for axis in axes]
  if parameter == 'vision/patch':
    return [[axis] for axis in axes[-1:] + axes[:-1]]
  inputs = 2 if parameter.endswith('/o') else 1
  return [axes[inputs:], axes[:inputs]]


def save_adapters(
  path: str,
  get: Callable[[str], Any],
  spec: ModelSpec,
  knobs: LoraConfig,
  model: str,
  dtype: str,
) -> None:
  """Writes adapter_model.safetensors and adapter_config.json to a directory.

  `get` returns the array at a path such as 'layers/q/a', and `model` is model.path. The
  `dtype` of all tensors is 'float32', 'float16' or 'bfloat16'.
  """
  kind = jnp.dtype(dtype)
  hub = directory.parse_hub_name(model)
  modules = []
  arrays = {}
  for parameter in lora.shapes(spec, knobs.rank, knobs.targets):
    module = MODULES[parameter]
    if spec.vision:  # the module name in transformers' class
      module = module.replace('model.', 'model.language_model.', 1)
    modules.append(module)
    # A is [rank, in] and B is [out, rank]; heads and head width are one axis.
    a, b = (np.asarray(get(f'{parameter}/{side}')) for side in 'ab')
    for i in range(spec.layers):
      name = f'base_model.model.{module.format(i)}'
      arrays[f'{name}.lora_A.weight'] = a[i].reshape(-1, knobs.rank).T.astype(kind)
      arrays[f'{name}.lora_B.weight'] = b[i].reshape(knobs.rank, -1).T.astype(kind)
  targets: list[str] | str = sorted(name.rpartition('.')[2] for name in modules)
  if spec.vision:  # the tower's projections have the same last names
    patterns = [re.escape(name).replace(r'\{\}', r'\d+') for name in sorted(modules)]
    targets = '|'.join(patterns)
  config = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': hub.repository if hub else model,
    'revision': hub.revision if hub else None,
    'r': knobs.rank,
    'lora_alpha': knobs.alpha,
    'lora_dropout': 0.0,
    'target_modules': targets,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  files.write_json(os.path.join(path, 'adapter_config.json'), config)
  file_name = os.path.join(path, safetensors_io.ADAPTERS)
  shapes = {name: array.shape for name, array in arrays.items()}
  safetensors_io.write(file_name, kind.name, shapes, arrays.values())
