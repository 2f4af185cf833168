"""Maps parameters to the tensors of a Hugging Face checkpoint: names, axes, shapes.

1. `NAMES` maps a parameter to its tensor; a stacked parameter has one per layer;
2. `AXES` gives the order of axes here and in the file, and which axes a file merges;
3. `stored` lists every tensor of a model with its shape.
"""

import math

from bapo_jax.models import transformer

Shape = tuple[int, ...]

# parameter -> tensor; {} is the layer. Files store projections as [out, in].
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
  'vision/patch': 'visual.patch_embed.proj.weight',
  'vision/layers/attn_norm': 'visual.blocks.{}.norm1.weight',
  'vision/layers/qkv': 'visual.blocks.{}.attn.qkv.weight',
  'vision/layers/qkv_bias': 'visual.blocks.{}.attn.qkv.bias',
  'vision/layers/o': 'visual.blocks.{}.attn.proj.weight',
  'vision/layers/o_bias': 'visual.blocks.{}.attn.proj.bias',
  'vision/layers/mlp_norm': 'visual.blocks.{}.norm2.weight',
  'vision/layers/gate': 'visual.blocks.{}.mlp.gate_proj.weight',
  'vision/layers/gate_bias': 'visual.blocks.{}.mlp.gate_proj.bias',
  'vision/layers/up': 'visual.blocks.{}.mlp.up_proj.weight',
  'vision/layers/up_bias': 'visual.blocks.{}.mlp.up_proj.bias',
  'vision/layers/down': 'visual.blocks.{}.mlp.down_proj.weight',
  'vision/layers/down_bias': 'visual.blocks.{}.mlp.down_proj.bias',
  'vision/merger_norm': 'visual.merger.ln_q.weight',
  'vision/merger_in': 'visual.merger.mlp.0.weight',
  'vision/merger_in_bias': 'visual.merger.mlp.0.bias',
  'vision/merger_out': 'visual.merger.mlp.2.weight',
  'vision/merger_out_bias': 'visual.merger.mlp.2.bias',
}
# parameter -> its axes here and in the file; a file merges letters without a space.
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
  # Channel, frame, row and column of a pixel; queries, keys and values share axis N.
  'vision/patch': ('cthwD', 'D c t h w'),
  'vision/layers/qkv': ('DNHC', 'NHC D'),
  'vision/layers/qkv_bias': ('NHC', 'NHC'),
  'vision/layers/o': ('HCD', 'D HC'),
  'vision/layers/gate': ('DF', 'F D'),
  'vision/layers/up': ('DF', 'F D'),
  'vision/layers/down': ('FD', 'D F'),
  'vision/merger_in': ('XY', 'Y X'),
  'vision/merger_out': ('XD', 'D X'),
}

# Prefixes of Qwen2.5-VL's tensor names in transformers' class and in published files.
CLASS_AND_FILE = (('model.language_model.', 'model.'), ('model.visual.', 'visual.'))


def published(name: str) -> str:
  """Returns a tensor's name as published checkpoints of Qwen2.5-VL spell it.

  Some programs write the module names of transformers' class instead.
  """
  for class_prefix, file_prefix in CLASS_AND_FILE:
    if name.startswith(class_prefix):
      return file_prefix + name.removeprefix(class_prefix)
  return name


def module(parameter: str, spec: transformer.ModelSpec) -> str:
  """Returns the module of a weight in transformers' class; {} is the layer."""
  name = NAMES[parameter].removesuffix('.weight')
  if spec.vision is None:
    return name
  class_prefix, file_prefix = next(
    pair for pair in CLASS_AND_FILE if name.startswith(pair[1])
  )
  return class_prefix + name.removeprefix(file_prefix)


def stored(spec: transformer.ModelSpec) -> dict[str, Shape]:
  """Lists every tensor of a checkpoint of this model: name -> shape in the file."""
  shapes = {}
  for parameter, (shape, _) in transformer.describe(spec).items():
    layers, tail = split(parameter, shape)
    for i in range(layers):
      shapes[NAMES[parameter].format(i)] = file_shape(parameter, tail)
  return shapes


def split(parameter: str, shape: Shape) -> tuple[int, Shape]:
  """Returns the number of tensors of a parameter, and the shape of each tensor here."""
  return (shape[0], shape[1:]) if '{}' in NAMES[parameter] else (1, shape)


def file_axes(parameter: str, rank: int) -> tuple[int, ...]:
  """Returns our axis for each axis of the file, before the file merges axes."""
  if parameter not in AXES:
    return tuple(range(rank))
  ours, theirs = AXES[parameter]
  return tuple(ours.index(axis) for axis in theirs.replace(' ', ''))


def leading_axes(parameter: str) -> int:
  """Returns how many of `file_axes` the file merges into its first axis."""
  return len(AXES[parameter][1].split()[0]) if parameter in AXES else 1


def file_shape(parameter: str, tail: Shape) -> Shape:
  """Returns the shape in the file of a tensor that has the shape `tail` here."""
  if parameter not in AXES:
    return tail
  ours, theirs = AXES[parameter]
  size = dict(zip(ours, tail, strict=True))
  return tuple(math.prod(size[axis] for axis in axes) for axes in theirs.split())
