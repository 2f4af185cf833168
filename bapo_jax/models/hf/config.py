"""Converts config.json to a ModelSpec and back, and ignores no option silently.

1. `read_spec` reads the files of a model directory, `spec_of` converts their contents;
   both accept the spellings of transformers 4 and 5, and refuse every option that is
   not implemented, by name and value;
2. `config_of` and `preprocessor_of` write config.json and preprocessor_config.json for
   a model that has no source directory.

A vision-language model (Qwen2.5-VL) is a Qwen2 with three-part positions, plus a tower.
Published files keep the language model's options beside the tower's; transformers 5
writes them as `text_config`. The options of pictures are in a file of their own, or an
object within the file of the whole processor.
"""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from bapo_jax.models import rope
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime import files


class Architecture(NamedTuple):
  """Options that a model_type implies."""

  name: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_width: int | None = None  # if config.json has no head_dim; None: D / H


ARCHITECTURES = {
  'llama': Architecture('LlamaForCausalLM'),
  'qwen2': Architecture('Qwen2ForCausalLM', qkv_bias=True),
  'qwen3': Architecture('Qwen3ForCausalLM', qk_norm=True, head_width=128),
}
VISION = 'qwen2_5_vl'  # the model_type with a vision tower
VISION_CLASS = 'Qwen2_5_VLForConditionalGeneration'
# Options that would change the computation -> the only value that is implemented.
ONLY = {
  'hidden_act': 'silu',
  'mlp_bias': False,
  'attention_dropout': 0.0,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
}
ONLY_VISION = {
  'hidden_act': 'silu',
  'in_channels': vision_spec.CHANNELS,
  'in_chans': vision_spec.CHANNELS,
}
ONLY_PIXELS = {  # of a preprocessor
  'do_resize': True,
  'resample': 3,  # cubic interpolation
  'do_rescale': True,
  'rescale_factor': 1 / 255,
  'do_normalize': True,
}
DTYPES = ('float32', 'bfloat16', 'float16')
PIXELS, PROCESSOR = 'preprocessor_config.json', 'processor_config.json'
VISION_THETA = 1_000_000.0  # rope_theta of a vision-language model that names none
# Field of VisionSpec -> its names in vision_config, of which the first present one
# counts, and the default of transformers' class.
SIZES: dict[str, tuple[tuple[str, ...], int]] = {
  'width': (('hidden_size',), 3584),
  'layers': (('depth',), 32),
  'heads': (('num_heads',), 16),
  'ffn': (('intermediate_size',), 3420),
  'out': (('out_hidden_size',), 3584),
  'window': (('window_size',), 112),
  'patch': (('patch_size', 'spatial_patch_size'), 14),
  'frames': (('temporal_patch_size',), 2),
  'merge': (('spatial_merge_size',), 2),
}
FULL_LAYERS = (7, 15, 23, 31)  # the default, cut to the layers that the tower has
IMAGE_TOKEN = 151655  # the default
# Options that a preprocessor repeats -> the field of VisionSpec.
REPEATED = {
  'patch_size': 'patch',
  'temporal_patch_size': 'frames',
  'merge_size': 'merge',
}
LIMITS = {  # field of VisionSpec -> the option, and its name within `size`
  'least_pixels': ('min_pixels', 'shortest_edge'),
  'most_pixels': ('max_pixels', 'longest_edge'),
}


def read_spec(path: str, compute: str) -> ModelSpec:
  """Reads the ModelSpec of a model directory, with a tower for Qwen2.5-VL.

  Args:
    path: a directory; see `directory.find` for hub names.
    compute: dtype of the matrix products.

  Raises:
    ValueError: a file is missing or damaged, or an architecture or option is not
      supported; the message names the directory and the option.
  """
  config = files.read_object(os.path.join(path, 'config.json'))
  pixels = read_pixels(path) if config.get('model_type') == VISION else {}
  try:
    return spec_of(config, compute, pixels)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise ValueError(
      f'{path}: an option of config.json or {PIXELS} has a value of the wrong type '
      f'({type(error).__name__}: {error}); download the files again'
    ) from None


def read_pixels(path: str) -> dict[str, Any]:
  """Reads the options of the preprocessor of pictures; {} if there is no file.

  The file of the whole processor takes precedence, as in transformers 5.

  Raises:
    ValueError: a file is damaged.
  """
  options: dict[str, dict[str, Any]] = {}
  for name in (PROCESSOR, PIXELS):
    file = os.path.join(path, name)
    options[name] = files.read_object(file) if os.path.exists(file) else {}
  of_processor = options[PROCESSOR].get('image_processor')
  return options[PIXELS] if of_processor is None else of_processor


def spec_of(
  c: dict[str, Any], compute: str, pixels: dict[str, Any] | None = None
) -> ModelSpec:
  """Converts the contents of config.json to a ModelSpec.

  Args:
    c: the contents of config.json.
    compute: dtype of the matrix products.
    pixels: the result of `read_pixels`; read for a model with a tower only.

  Raises:
    ValueError: an architecture or an option is not supported.
  """
  if c.get('model_type') != VISION:
    return _language_model(c, compute)
  if c.get('architectures') not in (None, [VISION_CLASS]):
    raise ValueError(
      f'architectures={c["architectures"]!r:.60} is not supported; choose a '
      f'{VISION_CLASS}'
    )
  text, sections = _text_options(c)
  model = _language_model(text, compute)
  if len(sections) != 3 or 2 * sum(sections) != model.head_width:
    raise ValueError(
      f'mrope_section={list(sections)} must be three integers that add up to '
      f'{model.head_width // 2}, half of the head width'
    )
  tower = _tower(c, pixels or {})
  if tower.out != model.width:
    raise ValueError(
      f'out_hidden_size={tower.out} in vision_config must equal '
      f'hidden_size={model.width} of the language model'
    )
  return dataclasses.replace(model, mrope=sections, vision=tower)


def _language_model(c: dict[str, Any], compute: str) -> ModelSpec:
  implied = _check(c)
  # In Llama and Qwen3 the option means all four projections; Qwen2 does not have it.
  biased = not implied.qkv_bias and bool(c.get('attention_bias'))
  width, heads = _integer(c, 'hidden_size'), _integer(c, 'num_attention_heads')
  kv_heads = _integer(c, 'num_key_value_heads', default=heads)
  head_width = _integer(c, 'head_dim', default=implied.head_width or width // heads)
  if heads % kv_heads or head_width % 2:
    raise ValueError(
      f'num_attention_heads={heads} must be a multiple of '
      f'num_key_value_heads={kv_heads}, and head_dim={head_width} even'
    )
  theta, rope_type, knobs = _rope(c)
  rope.table(head_width, theta, rope_type, knobs)  # checks the rule and its knobs
  return ModelSpec(
    vocab=_integer(c, 'vocab_size'),
    width=width,
    layers=_integer(c, 'num_hidden_layers'),
    heads=heads,
    kv_heads=kv_heads,
    head_width=head_width,
    ffn=_integer(c, 'intermediate_size'),
    rope_theta=theta,
    rope_type=rope_type,
    rope_knobs=knobs,
    norm_eps=_number(c, 'rms_norm_eps'),
    positions=_integer(c, 'max_position_embeddings'),
    tied=bool(c.get('tie_word_embeddings')),
    qkv_bias=implied.qkv_bias or biased,
    o_bias=biased,
    qk_norm=implied.qk_norm,
    compute=compute,
  )


def _check(c: dict[str, Any]) -> Architecture:
  """Returns the architecture; raises ValueError if an option is not implemented."""
  implied = ARCHITECTURES.get(c.get('model_type', ''))
  if implied is None:
    raise ValueError(
      f'model_type={c.get("model_type")!r} is not supported; choose a model of '
      f'{sorted([*ARCHITECTURES, VISION])}'
    )
  if c.get('architectures') and implied.name not in c['architectures']:
    raise ValueError(
      f'architectures={c["architectures"]} is not supported; choose a {implied.name}'
    )
  _check_only(c, ONLY)
  dtype = c.get('dtype') or c.get('torch_dtype') or DTYPES[0]
  if dtype not in DTYPES:
    raise ValueError(f'dtype={dtype!r} is not supported, only {", ".join(DTYPES)}')
  # Every layer must attend to the first position. Published Qwen2 configs have a
  # window that `use_sliding_window` switches off.
  window, positions = c.get('sliding_window'), _integer(c, 'max_position_embeddings')
  sliding = 'sliding_attention' in (c.get('layer_types') or ())
  if not c.get('layer_types'):
    sliding = bool(c.get('use_sliding_window'))
    sliding &= c.get('max_window_layers', 28) < _integer(c, 'num_hidden_layers')
  if sliding and c.get('use_sliding_window', True) and window and window < positions:
    raise ValueError(
      f'sliding_window={window} is shorter than max_position_embeddings={positions}, '
      f'which is not supported; for rows of at most {window} tokens set '
      f'max_position_embeddings to {window} in config.json, or choose a model without '
      'a window'
    )
  return implied


def _check_only(c: dict[str, Any], only: dict[str, Any], where: str = '') -> None:
  """Raises ValueError if an option has a value that is not implemented."""
  for option, wanted in only.items():
    value = c.get(option)
    if value is None or value == wanted:
      continue
    # Files round 1 / 255.
    if isinstance(wanted, float) and math.isclose(value, wanted, rel_tol=1e-8):
      continue
    raise ValueError(
      f'{option}={value!r:.60}{where} is not supported, only {wanted!r}; correct the '
      'file, or choose another model'
    )


def _rope(c: dict[str, Any]) -> tuple[float, str, tuple[tuple[str, Any], ...]]:
  """Returns (theta, rope_type, knobs of the rule); see rope.RULES."""
  # transformers 5 writes rope_parameters, 4 rope_scaling and rope_theta.
  knobs = dict(c.get('rope_scaling') or c.get('rope_parameters') or {})
  for name, value in knobs.items():
    if isinstance(value, dict):
      raise ValueError(f'rope_parameters for {name} alone are not supported')
  kind = knobs.pop('type', None)
  kind = knobs.pop('rope_type', None) or kind or 'default'
  theta = knobs.pop('rope_theta', None) or c.get('rope_theta') or 10000.0
  if knobs.get('partial_rotary_factor') == 1:
    del knobs['partial_rotary_factor']
  if kind in ('llama3', 'yarn'):
    name = 'original_max_position_embeddings'
    knobs[name] = c.get(name) or knobs.get(name) or c['max_position_embeddings']
  return float(theta), kind, tuple(sorted(knobs.items()))


def _text_options(c: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
  """Returns the language model's options as a Qwen2's, and its mrope_section."""
  text = dict(c.get('text_config') or c)
  text['model_type'], text['architectures'] = 'qwen2', None
  tied = c.get('tie_word_embeddings') or text.get('tie_word_embeddings')
  text['tie_word_embeddings'] = tied
  name = 'rope_scaling' if text.get('rope_scaling') else 'rope_parameters'
  scaling = dict(text.get(name) or {})
  sections = tuple(scaling.pop('mrope_section', None) or ())
  for key in ('type', 'rope_type'):
    if scaling.get(key) == 'mrope':
      scaling[key] = 'default'
  text[name] = scaling
  if not (text.get('rope_theta') or scaling.get('rope_theta')):
    text['rope_theta'] = VISION_THETA
  return text, sections


def _tower(c: dict[str, Any], pixels: dict[str, Any]) -> VisionSpec:
  tower = c.get('vision_config') or {}
  _check_only(tower, ONLY_VISION, ' in vision_config')
  sizes: dict[str, Any] = {
    field: _integer(tower, *names, default=default)
    for field, (names, default) in SIZES.items()
  }
  full_layers = tower.get('fullatt_block_indexes')
  if full_layers is None:
    full_layers = [i for i in FULL_LAYERS if i < sizes['layers']]
  repeated = {name: sizes[field] for name, field in REPEATED.items()}
  _check_only(pixels, ONLY_PIXELS | repeated, f' in {PIXELS}')
  rope_options = tower.get('rope_parameters') or {}
  _check_only(rope_options, {'rope_type': 'axial'}, ' in vision_config')
  v = VisionSpec(
    **sizes,
    full_layers=tuple(full_layers),
    image_token=_integer(c, 'image_token_id', default=IMAGE_TOKEN),
    rope_theta=_number(rope_options, 'rope_theta', 10_000.0),
    **_pixel_fields(pixels),
  )
  vision_spec.check(v)
  return v


def _pixel_fields(pixels: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of VisionSpec that a preprocessor sets."""
  fields: dict[str, Any] = {}
  for field, name in (('mean', 'image_mean'), ('std', 'image_std')):
    if (values := pixels.get(name)) is not None:
      if len(values) != vision_spec.CHANNELS or (field == 'std' and 0 in values):
        raise ValueError(f'{name}={values} must be three numbers, image_std without 0')
      fields[field] = tuple(float(value) for value in values)
  limits = pixels.get('size') or {}
  for field, (option, edge) in LIMITS.items():
    # If both spellings are present, transformers reads min_pixels and max_pixels.
    if pixels.get(option) is not None:
      fields[field] = _integer(pixels, option)
    elif limits:
      fields[field] = _integer(limits, edge)
  return fields


def _integer(c: dict[str, Any], *names: str, default: int | None = None) -> int:
  """Returns the positive integer under the first of these names that is present."""
  name = next((name for name in names if c.get(name) is not None), names[0])
  value = default if c.get(name) is None else c[name]
  if type(value) is not int or value < 1:
    raise ValueError(f'{name}={value!r:.60} must be a positive integer')
  return value


def _number(c: dict[str, Any], name: str, default: float | None = None) -> float:
  """Returns the number under this name."""
  value = default if c.get(name) is None else c[name]
  if not isinstance(value, int | float) or not 0 <= value < math.inf:
    raise ValueError(f'{name}={value!r:.60} must be a number of at least 0')
  return float(value)


def config_of(spec: ModelSpec) -> dict[str, Any]:
  """Returns the contents of config.json, in spellings that every version reads.

  Raises:
    ValueError: no architecture has these biases and norms.
  """
  if spec.qkv_bias == spec.o_bias:
    kind = 'qwen3' if spec.qk_norm else 'llama'
  elif spec.qkv_bias and not spec.qk_norm:
    kind = 'qwen2'
  else:
    raise ValueError(
      f'no architecture has qkv_bias={spec.qkv_bias}, o_bias={spec.o_bias} and '
      f'qk_norm={spec.qk_norm}; choose those of one of {sorted(ARCHITECTURES)}'
    )
  config: dict[str, Any] = {
    'architectures': [ARCHITECTURES[kind].name],
    'model_type': kind,
    'vocab_size': spec.vocab,
    'hidden_size': spec.width,
    'num_hidden_layers': spec.layers,
    'num_attention_heads': spec.heads,
    'num_key_value_heads': spec.kv_heads,
    'head_dim': spec.head_width,
    'intermediate_size': spec.ffn,
    'max_position_embeddings': spec.positions,
    'rms_norm_eps': spec.norm_eps,
    'rope_theta': spec.rope_theta,
    'tie_word_embeddings': spec.tied,
    'hidden_act': 'silu',
  }
  if kind != 'qwen2':
    config['attention_bias'] = spec.o_bias
  if spec.rope_type != 'default':
    config['rope_scaling'] = {'rope_type': spec.rope_type} | dict(spec.rope_knobs)
  return config | _vision_options(config, spec) if spec.vision else config


def _vision_options(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
  """Returns the options of config.json that a vision tower adds or changes."""
  v = spec.vision
  assert v is not None
  scaling = config.get('rope_scaling') or {'type': 'mrope'}
  sizes = {names[0]: getattr(v, field) for field, (names, _) in SIZES.items()}
  return {
    'architectures': [VISION_CLASS],
    'model_type': VISION,
    'image_token_id': v.image_token,
    'rope_scaling': scaling | {'mrope_section': list(spec.mrope)},
    'vision_config': sizes
    | {
      'model_type': VISION,
      'hidden_act': 'silu',
      'in_chans': vision_spec.CHANNELS,
      'fullatt_block_indexes': list(v.full_layers),
      'rope_parameters': {'rope_type': 'axial', 'rope_theta': v.rope_theta},
    },
  }


def preprocessor_of(v: VisionSpec) -> dict[str, Any]:
  """Returns the contents of preprocessor_config.json."""
  return {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'image_mean': list(v.mean),
    'image_std': list(v.std),
    'min_pixels': v.least_pixels,
    'max_pixels': v.most_pixels,
    'patch_size': v.patch,
    'temporal_patch_size': v.frames,
    'merge_size': v.merge,
  }
