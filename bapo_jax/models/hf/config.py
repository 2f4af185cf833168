"""Converts config.json to a ModelSpec and back, and ignores no option silently.

Reading accepts the spellings of transformers 4 and 5, and raises an error with name and
value if an option is not supported.

A vision-language model (Qwen2.5-VL) is a Qwen2 with three-part positions, plus a tower.
Published files have the language model's options at the top level; transformers 5 has
them in `text_config`. Image options are in preprocessor_config.json, or in
`image_processor` of processor_config.json.
"""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from bapo_jax.models import rope
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision.spec import CHANNELS, VisionSpec
from bapo_jax.runtime import files

Options = dict[str, Any]


class Architecture(NamedTuple):
  """Options that a model_type implies."""

  name: str
  qkv_bias: bool = False
  qk_norm: str = ''
  head_width: int | None = None  # if config.json has no head_dim; None: D / H
  windowed: bool = False  # all layers use sliding_window, unless it is null
  defaults: Options | None = None  # for absent options; null is a value


VISION = 'qwen2_5_vl'  # the model_type with a vision tower
EXPERTS = 'qwen3_moe'  # the model_type with experts in every layer
ARCHITECTURES = {
  'llama': Architecture('LlamaForCausalLM'),
  'mistral': Architecture(
    'MistralForCausalLM',
    windowed=True,
    defaults={'sliding_window': 4096, 'num_key_value_heads': 8},
  ),
  'qwen2': Architecture('Qwen2ForCausalLM', qkv_bias=True),
  'qwen3': Architecture('Qwen3ForCausalLM', qk_norm='head', head_width=128),
  VISION: Architecture('Qwen2_5_VLForConditionalGeneration', qkv_bias=True),
  EXPERTS: Architecture(
    'Qwen3MoeForCausalLM',
    qk_norm='head',
    defaults={'sliding_window': 4096, 'num_key_value_heads': 4},
  ),
}
FIELDS = {  # field of ModelSpec -> its option, a positive integer
  'vocab': 'vocab_size',
  'width': 'hidden_size',
  'layers': 'num_hidden_layers',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'head_width': 'head_dim',
  'ffn': 'intermediate_size',
  'positions': 'max_position_embeddings',
}
OF_EXPERTS = {  # as FIELDS, of EXPERTS
  'ffn': 'moe_intermediate_size',
  'experts': 'num_experts',
  'active': 'num_experts_per_tok',
}

# Options that would change the computation -> the only supported value.
ONLY = {
  'hidden_act': 'silu',
  'mlp_bias': False,
  'attention_dropout': 0.0,
  'partial_rotary_factor': 1.0,
}
ONLY_EXPERTS = {
  'decoder_sparse_step': 1,
  'mlp_only_layers': [],
  'scoring_func': 'softmax',
  'routed_scaling_factor': 1.0,
}
ONLY_VISION = {'hidden_act': 'silu', 'in_channels': CHANNELS, 'in_chans': CHANNELS}
ONLY_PIXELS = {  # of a preprocessor
  'do_resize': True,
  'resample': 3,  # cubic interpolation
  'do_rescale': True,
  'rescale_factor': 1 / 255,
  'do_normalize': True,
}
PIXELS = 'preprocessor_config.json'
PROCESSOR = 'processor_config.json'
VISION_THETA = 1_000_000.0  # default rope_theta of a vision-language model
# Field of VisionSpec -> its name in vision_config, and the default of transformers.
SIZES = {
  'width': ('hidden_size', 3584),
  'layers': ('depth', 32),
  'heads': ('num_heads', 16),
  'ffn': ('intermediate_size', 3420),
  'out': ('out_hidden_size', 3584),
  'window': ('window_size', 112),
  'patch': ('patch_size', 14),
  'frames': ('temporal_patch_size', 2),
  'merge': ('spatial_merge_size', 2),
}
FULL_LAYERS = (7, 15, 23, 31)  # the default, cut to the layers that the tower has
IMAGE_TOKEN = 151655  # the default
# Field of VisionSpec -> the preprocessor option of equal value.
REPEATED = {
  'patch': 'patch_size',
  'frames': 'temporal_patch_size',
  'merge': 'merge_size',
}
LIMITS = {  # field of VisionSpec -> the option, and its name within `size`
  'least_pixels': ('min_pixels', 'shortest_edge'),
  'most_pixels': ('max_pixels', 'longest_edge'),
}


def read_spec(path: str, compute: str) -> ModelSpec:
  """Reads the ModelSpec of a model directory, with a tower for Qwen2.5-VL.

  Raises ValueError if a file is missing or damaged, or an architecture or option is
  not supported; the message names the directory and the option.
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
    ) from error


def read_pixels(path: str) -> Options:
  """Reads the image options of the preprocessor; {} if there is no file.

  processor_config.json takes precedence, as in transformers 5. A damaged file
  raises a ValueError.
  """
  paths = (os.path.join(path, name) for name in (PROCESSOR, PIXELS))
  processor, pixels = (files.read_object(p) if os.path.exists(p) else {} for p in paths)
  return processor.get('image_processor') or pixels


def spec_of(c: Options, compute: str, pixels: Options | None = None) -> ModelSpec:
  """Converts config.json and the result of `read_pixels` to a ModelSpec.

  Raises ValueError if an architecture or an option is not supported.
  """
  implied = ARCHITECTURES.get(c.get('model_type', ''))
  if implied is None:
    raise ValueError(
      f'model_type={c.get("model_type")!r} is not supported; choose a model '
      f'with one of {sorted(ARCHITECTURES)}'
    )
  if (quantized := c.get('quantization_config')) is not None:
    raise ValueError(
      f'quantization_config={quantized!r:.60}: quantized weights are not supported; '
      'choose the checkpoint that they were made from'
    )
  if c.get('architectures') and implied.name not in c['architectures']:
    raise ValueError(
      f'architectures={c["architectures"]!r:.60} is not supported; choose a model '
      f'whose architecture is {implied.name}'
    )
  if c['model_type'] != VISION:
    return _language_model(c, implied, compute)
  text, sections = _text_options(c)
  model = _language_model(text, implied, compute)
  if len(sections) != 3 or 2 * sum(sections) != model.head_width:
    raise ValueError(
      f'mrope_section={list(sections)} must be three integers that add up to '
      f'{model.head_width // 2}, half of the head width; correct config.json'
    )
  tower = _tower(c, pixels or {})
  return dataclasses.replace(model, mrope=sections, vision=tower)


def _language_model(c, implied: Architecture, compute):
  _check_only(c, ONLY)
  c = (implied.defaults or {}) | c
  fields = FIELDS
  experts: Options = {}
  windowed = implied.windowed
  if c['model_type'] == EXPERTS:
    c, experts = _experts(c)
    fields = FIELDS | OF_EXPERTS
    windowed = bool(c.get('use_sliding_window'))  # whatever max_window_layers is
  _check_window(c, always=windowed)
  # In Llama and Qwen3 attention_bias covers all four projections; Qwen2 lacks it.
  biased = not implied.qkv_bias and bool(c.get('attention_bias'))
  width = _positive(c, 'hidden_size')
  heads = _positive(c, 'num_attention_heads')
  default = {'kv_heads': heads, 'head_width': implied.head_width or width // heads}
  sizes: Options = {
    field: _positive(c, name, default.get(field)) for field, name in fields.items()
  }
  theta, rope_type, knobs = _rope(c)
  rope.table(sizes['head_width'], theta, rope_type, knobs)  # checks rule and knobs
  return ModelSpec(
    **sizes,
    rope_theta=theta,
    rope_type=rope_type,
    rope_knobs=knobs,
    norm_eps=_positive(c, 'rms_norm_eps', kind=float),
    tied=bool(c.get('tie_word_embeddings')),
    qkv_bias=implied.qkv_bias or biased,
    o_bias=biased,
    qk_norm=implied.qk_norm,
    compute=compute,
    **experts,
  )


def _experts(c) -> tuple[Options, Options]:
  """Returns (options with num_experts, fields of the spec that are no sizes).

  transformers 5 writes num_local_experts. The loss of router_aux_loss_coef is left out
  on purpose: it is no part of the policy's gradient.
  """
  _check_only(c, ONLY_EXPERTS)
  other = c.get('num_local_experts')
  c = {'num_experts': other} | c
  if other is not None:
    _check_only(c, {'num_experts': other}, f' with num_local_experts={other!r:.60}')
  active, experts = (_positive(c, OF_EXPERTS[field]) for field in ('active', 'experts'))
  if active > experts:
    raise ValueError(
      f'num_experts_per_tok={active} exceeds num_experts={experts}; correct config.json'
    )
  # The default of transformers is false; the published models set true.
  norm_topk = c.get('norm_topk_prob', False)
  if not isinstance(norm_topk, bool):
    raise ValueError(
      f'norm_topk_prob={norm_topk!r:.60} must be true or false; correct config.json'
    )
  return c, {'norm_topk': norm_topk}


def _check_window(c, always):
  """Raises ValueError if a layer's sliding window is shorter than the context.

  `always`: a window is used in all layers, whatever the other options.
  """
  window = c.get('sliding_window')
  positions = _positive(c, 'max_position_embeddings')
  if always:
    sliding = True
  elif c.get('layer_types'):
    sliding = 'sliding_attention' in c['layer_types']
    sliding &= c.get('use_sliding_window', True)
  else:  # published Qwen2 configs have a window that `use_sliding_window` switches off
    sliding = bool(c.get('use_sliding_window'))
    sliding &= c.get('max_window_layers', 28) < _positive(c, 'num_hidden_layers')
  if sliding and window and window < positions:
    raise ValueError(
      f'sliding_window={window} is shorter than max_position_embeddings={positions}, '
      f'which is not supported; for rows of at most {window} tokens set '
      f'max_position_embeddings to {window} in config.json, or choose a model without '
      'a sliding window'
    )


def _check_only(c, only, where=''):
  for option, wanted in only.items():
    value = c.get(option)
    if value is None or value == wanted:
      continue
    # Files round 1 / 255.
    if isinstance(wanted, float) and math.isclose(value, wanted, rel_tol=1e-8):
      continue
    raise ValueError(
      f'{option}={value!r:.60}{where} is not supported, only {wanted!r} is; correct it '
      "in the model's JSON files, or choose another model"
    )


def _rope(c):
  """Returns (theta, rope_type, knobs of the rule); see rope.RULES."""
  # transformers 5 writes rope_parameters, 4 rope_scaling and rope_theta.
  knobs = c.get('rope_scaling') or c.get('rope_parameters') or {}
  knobs = {name: value for name, value in knobs.items() if value is not None}
  kind = knobs.pop('type', 'default')
  kind = knobs.pop('rope_type', kind)
  theta = _positive(c | knobs, 'rope_theta', 10000.0, float)
  knobs.pop('rope_theta', None)
  if knobs.get('partial_rotary_factor') == 1:
    del knobs['partial_rotary_factor']
  if kind in ('llama3', 'yarn'):
    name = 'original_max_position_embeddings'
    knobs[name] = c.get(name) or knobs.get(name) or c['max_position_embeddings']
  return theta, kind, tuple(sorted(knobs.items()))


def _text_options(c):
  """Returns (options of the language model in Qwen2's spelling, mrope_section)."""
  text = dict(c.get('text_config') or c)
  name = 'tie_word_embeddings'
  text[name] = c.get(name) or text.get(name)
  name = 'rope_scaling' if text.get('rope_scaling') else 'rope_parameters'
  scaling = dict(text.get(name) or {})
  sections = tuple(scaling.pop('mrope_section', None) or ())
  text[name] = {k: 'default' if x == 'mrope' else x for k, x in scaling.items()}
  if text.get('rope_theta') is None:
    text['rope_theta'] = VISION_THETA
  return text, sections


def _tower(c, pixels):
  tower = c.get('vision_config') or {}
  _check_only(tower, ONLY_VISION, ' in vision_config')
  fields: Options = {
    field: _positive(tower, name, default) for field, (name, default) in SIZES.items()
  }
  full_layers = tower.get('fullatt_block_indexes')
  if full_layers is None:
    full_layers = [i for i in FULL_LAYERS if i < fields['layers']]
  rope_options = tower.get('rope_parameters') or {}
  _check_only(rope_options, {'rope_type': 'axial'}, ' in vision_config')
  # A preprocessor repeats three sizes, and names the values and limits of pixels.
  repeated = {option: fields[field] for field, option in REPEATED.items()}
  _check_only(pixels, ONLY_PIXELS | repeated, f' in {PIXELS}')
  for field, name in (('mean', 'image_mean'), ('std', 'image_std')):
    if (values := pixels.get(name)) is not None:
      fields[field] = tuple(map(float, values))
  limits = pixels.get('size') or {}
  for field, (option, edge) in LIMITS.items():
    # If both spellings are present, transformers reads min_pixels and max_pixels.
    if pixels.get(option) is not None:
      fields[field] = _positive(pixels, option)
    elif limits:
      fields[field] = _positive(limits, edge)
  return VisionSpec(
    **fields,
    full_layers=tuple(full_layers),
    image_token=_positive(c, 'image_token_id', IMAGE_TOKEN),
    rope_theta=_positive(rope_options, 'rope_theta', 10_000.0, float),
  )


def _positive(c, name, default: float | None = None, kind: type = int):
  value: Any = default if c.get(name) is None else c[name]
  if type(value) not in (int, kind) or not value > 0:
    noun = 'integer' if kind is int else 'number'
    raise ValueError(
      f'{name}={value!r:.60} must be a positive {noun}; '
      f'correct it in config.json, or in {PIXELS} if it describes pictures'
    )
  return kind(value)


def config_of(spec: ModelSpec) -> Options:
  """Returns the contents of a config.json that every version of transformers reads."""
  kind = 'qwen2' if spec.qkv_bias and not spec.o_bias else 'llama'
  kind = 'qwen3' if spec.qk_norm else kind
  kind = EXPERTS if spec.experts else kind
  config: Options = {
    'architectures': [ARCHITECTURES[kind].name],
    'model_type': kind,
    **{name: getattr(spec, field) for field, name in FIELDS.items()},
    'rms_norm_eps': spec.norm_eps,
    'rope_theta': spec.rope_theta,
    'tie_word_embeddings': spec.tied,
    'hidden_act': 'silu',
  }
  if spec.experts:
    del config['intermediate_size']  # unused
    config |= {name: getattr(spec, field) for field, name in OF_EXPERTS.items()}
    config['norm_topk_prob'] = spec.norm_topk
  if kind != 'qwen2':
    config['attention_bias'] = spec.o_bias
  if spec.rope_type != 'default':
    config['rope_scaling'] = {'rope_type': spec.rope_type} | dict(spec.rope_knobs)
  if v := spec.vision:
    scaling = config.get('rope_scaling') or {'type': 'mrope'}
    config |= {
      'architectures': [ARCHITECTURES[VISION].name],
      'model_type': VISION,
      'image_token_id': v.image_token,
      'rope_scaling': scaling | {'mrope_section': list(spec.mrope)},
      'vision_config': {
        **{name: getattr(v, field) for field, (name, _) in SIZES.items()},
        'model_type': VISION,
        'hidden_act': 'silu',
        'in_chans': CHANNELS,
        'fullatt_block_indexes': list(v.full_layers),
        'rope_parameters': {'rope_type': 'axial', 'rope_theta': v.rope_theta},
      },
    }
  return config


def preprocessor_of(v: VisionSpec) -> Options:
  """Returns the contents of preprocessor_config.json."""
  return {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'image_mean': list(v.mean),
    'image_std': list(v.std),
    **{option: getattr(v, field) for field, (option, _) in LIMITS.items()},
    **{option: getattr(v, field) for field, option in REPEATED.items()},
  }
