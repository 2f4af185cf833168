"""Converts config.json to a ModelSpec and back, and ignores no option silently.

ARCHITECTURES lists what each model_type implies; the other tables name the options.
Reading accepts the spellings of transformers 4 and 5, and raises an error with name and
value if an option is not supported. Writing picks the model_type that reads back equal.

A vision-language model (Qwen2.5-VL) is a Qwen2 with three-part positions, plus a tower.
Published files have the language model's options at the top level; transformers 5 has
them in `text_config`. Image options are in preprocessor_config.json, or in
`image_processor` of processor_config.json.
"""

import dataclasses
import math
import os
from typing import Any

from bapo_jax.models import rope
from bapo_jax.models.transformer import LayerKind, ModelSpec
from bapo_jax.models.vision.spec import CHANNELS, VisionSpec
from bapo_jax.runtime import files

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Lists what a model_type implies, as transformers reads its options."""

  name: str
  # Of ModelSpec, whatever the options are.
  fields: Options = dataclasses.field(default_factory=dict)
  # For absent options; null is a value. An option that only some model_types have
  # counts if it is listed here.
  defaults: Options = dataclasses.field(default_factory=dict)
  # Options that have no effect -> the value that counts.
  unread: Options = dataclasses.field(default_factory=dict)
  # Of layers with full attention, and of layers with a window.
  rotations: tuple[str, str] = ('scaled', 'scaled')
  scaled_embedding: bool = False  # by the square root of the width


VISION = 'qwen2_5_vl'  # the model_type with a vision tower
EXPERTS = 'qwen3_moe'  # the model_type with experts in every layer
ALL_WINDOWS = {'use_sliding_window': True, 'max_window_layers': 0}
ARCHITECTURES = {
  'llama': Architecture('LlamaForCausalLM'),
  'mistral': Architecture(
    'MistralForCausalLM',
    defaults={'sliding_window': 4096, 'num_key_value_heads': 8},
    unread={**ALL_WINDOWS, 'layer_types': None},
  ),
  'qwen2': Architecture(
    'Qwen2ForCausalLM',
    {'qkv_bias': True},
    defaults={'sliding_window': 4096},
  ),
  'qwen3': Architecture(
    'Qwen3ForCausalLM',
    {'qk_norm': 'head'},
    defaults={'head_dim': 128, 'sliding_window': 4096},
  ),
  VISION: Architecture('Qwen2_5_VLForConditionalGeneration', {'qkv_bias': True}),
  EXPERTS: Architecture(
    'Qwen3MoeForCausalLM',
    {'qk_norm': 'head'},
    defaults={'sliding_window': 4096, 'num_key_value_heads': 4},
    unread={'max_window_layers': 0, 'layer_types': None},
  ),
  'smollm3': Architecture(
    'SmolLM3ForCausalLM',
    defaults={
      'rope_theta': 2e6,
      'num_key_value_heads': 4,
      'no_rope_layer_interval': 4,
      'tie_word_embeddings': True,
    },
    unread={'max_window_layers': 0},
  ),
  'olmo2': Architecture('Olmo2ForCausalLM', {'norms': 'post', 'qk_norm': 'projection'}),
  'olmo3': Architecture(
    'Olmo3ForCausalLM',
    {'norms': 'post', 'qk_norm': 'projection'},
    defaults={'rope_theta': 5e5, 'sliding_window': 4096},
    unread={**ALL_WINDOWS, 'sliding_window_pattern': 4},
    rotations=('scaled', 'plain'),
  ),
  'gemma': Architecture(
    'GemmaForCausalLM',
    {'norm_offset': True},
    defaults={'head_dim': 256, 'num_key_value_heads': 16, 'tie_word_embeddings': True},
    unread={'hidden_act': 'gelu_pytorch_tanh'},  # transformers 4 ignores it
    scaled_embedding=True,
  ),
  'gemma3_text': Architecture(
    'Gemma3ForCausalLM',
    {'norms': 'sandwich', 'norm_offset': True, 'qk_norm': 'head'},
    defaults={
      'head_dim': 256,
      'hidden_activation': 'gelu_pytorch_tanh',
      'num_key_value_heads': 4,
      'query_pre_attn_scalar': 256,
      'rope_theta': 1e6,
      'rope_local_base_freq': 10_000.0,
      'sliding_window': 4096,
      'sliding_window_pattern': 6,
      'tie_word_embeddings': True,
    },
    unread=ALL_WINDOWS,
    rotations=('scaled', 'plain'),
    scaled_embedding=True,
  ),
}
# A model_type that is not supported -> what it would need.
LACKING = {
  'gemma2': 'it has soft caps of scores and logits',
  'gemma3': 'it has a vision tower; gemma-3-270m and gemma-3-1b have none',
  'gemma4': 'it has inputs per layer, and heads of two widths',
  'gpt_oss': 'it has attention sinks',
  'qwen3_5': 'it has linear attention',
  'qwen3_next': 'it has linear attention',
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

ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}  # ours by theirs
LAYER_TYPES = ('full_attention', 'sliding_attention')

# Options that would change the computation -> the only supported value.
ONLY = {
  'mlp_bias': False,
  'attention_dropout': 0.0,
  'partial_rotary_factor': 1.0,
  'attn_logit_softcapping': None,
  'final_logit_softcapping': None,
  'use_bidirectional_attention': False,
}
ONLY_EXPERTS = {
  'hidden_act': 'silu',
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
# Fields of ModelSpec that config.json does not determine.
NOT_IN_CONFIG = {'dtype', 'attention', 'actor_dtype', 'experts_kernel'}
NOT_IN_CONFIG |= {'replay_routes', 'vision'}
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
  kind = c.get('model_type') or ''
  implied = ARCHITECTURES.get(kind)
  if implied is None:
    reason = LACKING.get(kind.removesuffix('_text'), 'it is unknown')
    raise ValueError(
      f'model_type={c.get("model_type")!r} is not supported: {reason}; choose a model '
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
  c = implied.defaults | c | implied.unread
  fields = FIELDS
  experts: Options = {}
  if c['model_type'] == EXPERTS:
    c, experts = _experts(c)
    fields = FIELDS | OF_EXPERTS
  # attention_bias covers all four projections; Qwen2 lacks the option.
  qwen2 = 'qkv_bias' in implied.fields
  biased = not qwen2 and bool(c.get('attention_bias'))
  width = _positive(c, 'hidden_size')
  heads = _positive(c, 'num_attention_heads')
  head_width = implied.defaults.get('head_dim', width // heads)
  default = {'kv_heads': heads, 'head_width': head_width}
  sizes: Options = {
    field: _positive(c, name, default.get(field)) for field, name in fields.items()
  }
  rotation = _rotations(c, implied)
  for theta, rule, knobs in rotation.values():
    rope.table(sizes['head_width'], theta, rule, knobs)  # checks rule and knobs
  theta, rope_type, knobs = rotation['scaled']
  options: Options = {'qkv_bias': biased, 'o_bias': biased} | implied.fields
  if 'plain' in rotation:
    options['plain_theta'] = rotation['plain'][0]
  if implied.scaled_embedding:
    options['embed_scale'] = width**0.5
  if 'query_pre_attn_scalar' in implied.defaults:
    scalar = _positive(c, 'query_pre_attn_scalar')
    if scalar != sizes['head_width']:
      options['score_scale'] = scalar**-0.5
  return ModelSpec(
    **sizes,
    **options,
    **experts,
    kinds=_kinds(c, implied),
    activation=_activation(c),
    rope_theta=theta,
    rope_type=rope_type,
    rope_knobs=knobs,
    norm_eps=_positive(c, 'rms_norm_eps', kind=float),
    tied=bool(c.get('tie_word_embeddings')),
    compute=compute,
  )


def _activation(c):
  name = 'hidden_activation' if c.get('hidden_activation') else 'hidden_act'
  value = c.get(name) or 'silu'
  if value not in list(ACTIVATIONS):
    raise ValueError(
      f'{name}={value!r:.60} is not supported, only {" and ".join(ACTIVATIONS)} are; '
      'choose another model'
    )
  return ACTIVATIONS[value]


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


def _kinds(c, implied: Architecture) -> tuple[LayerKind, ...]:
  """Returns the kind of every layer; () if all are LayerKind().

  Raises ValueError if a window is shorter than the context and the model_type has none.
  """
  layers = _positive(c, 'num_hidden_layers')
  positions = _positive(c, 'max_position_embeddings')
  types = c.get('layer_types')
  if types:
    slides = [kind == 'sliding_attention' for kind in types]
  else:
    period = _positive(c, 'sliding_window_pattern', layers + 1)
    first = c.get('max_window_layers', 28)
    slides = [i >= first and (i + 1) % period > 0 for i in range(layers)]
  # Published Qwen2 configs have a window that `use_sliding_window` switches off.
  window = c.get('use_sliding_window', bool(types)) and c.get('sliding_window')
  window = _positive(c, 'sliding_window') if window else positions
  if 'sliding_window' not in implied.defaults:
    if any(slides) and window < positions:
      raise ValueError(
        f'sliding_window={window} is shorter than max_position_embeddings={positions}, '
        f'which is not supported for model_type={c["model_type"]!r}; for rows of at '
        f'most {window} tokens set max_position_embeddings to {window} in config.json, '
        'or choose a model without a sliding window'
      )
    slides = [False] * layers
  elif types and (len(types) != layers or not {*types} <= {*LAYER_TYPES}):
    raise ValueError(
      f'layer_types={types!r:.60} must be a list of {layers} values, each one of '
      f'{LAYER_TYPES}; correct config.json, or choose another model'
    )
  rotated = [True] * layers
  if 'no_rope_layer_interval' in implied.defaults:
    period = _positive(c, 'no_rope_layer_interval')
    rotated = c.get('no_rope_layers') or [(i + 1) % period for i in range(layers)]
    if len(rotated) < layers:
      raise ValueError(
        f'no_rope_layers={rotated!r:.60} must have {layers} values; correct config.json'
      )
  kinds = tuple(
    LayerKind(
      window if slides[i] and window < positions else 0,
      implied.rotations[slides[i]] if rotated[i] else 'none',
    )
    for i in range(layers)
  )
  return kinds if {*kinds} != {LayerKind()} else ()


def _check_only(c, only, where=''):
  for option, wanted in only.items():
    value = c.get(option)
    if value is None or value == wanted:
      continue
    # Files round 1 / 255.
    if isinstance(wanted, float) and math.isclose(value, wanted, rel_tol=1e-8):
      continue
    allowed = 'null' if wanted is None else repr(wanted)
    raise ValueError(
      f'{option}={value!r:.60}{where} is not supported, only {allowed} is; correct it '
      "in the model's JSON files, or choose another model"
    )


def _rotations(c, implied: Architecture):
  """Returns rotation -> (theta, rope_type, knobs), of the rotations that scale angles.

  transformers 5 writes rope_parameters for every type of layer. In 4, rope_scaling is
  of layers with full attention, and rope_local_base_freq of the others.
  """
  if 'plain' not in implied.rotations:
    return {'scaled': _rope(c)}
  by_type = c.get('rope_parameters') or {}
  if {*by_type} & {*LAYER_TYPES}:
    c = c | {'rope_parameters': by_type.get('full_attention')}
  scaled = _rope(c)
  local = by_type.get('sliding_attention') or {}
  theta = _positive(c, 'rope_local_base_freq', scaled[0], float)
  plain = _rope({'rope_theta': theta, 'rope_parameters': local})
  _check_only({'rope_type': plain[1]}, {'rope_type': 'default'}, ' of windows')
  return {'scaled': scaled, 'plain': plain}


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
  """Returns the contents of a config.json that every version of transformers reads.

  Raises ValueError if no model_type has these options.
  """
  for kind in ARCHITECTURES:
    if (kind == VISION) != bool(spec.vision) or (kind == EXPERTS) != bool(spec.experts):
      continue
    config = _written(spec, kind)
    if _reads_back(config, spec):
      return config
  raise ValueError(
    f'no model_type has the options of this model ({spec!r:.500}); use those of one of '
    f'{sorted(ARCHITECTURES)}'
  )


def _reads_back(config: Options, spec: ModelSpec) -> bool:
  try:
    read = spec_of(config, spec.compute)
  except ValueError:  # such as a window of a model_type without windows
    return False
  unused = () if spec.experts else ('active', 'norm_topk')
  own = {name: getattr(spec, name) for name in (*NOT_IN_CONFIG, *unused)}
  return dataclasses.replace(read, **own) == spec


def _written(spec: ModelSpec, kind: str) -> Options:
  """Returns the options that this model_type has, with the values of `spec`."""
  implied = ARCHITECTURES[kind]
  activation = 'hidden_activation'
  if activation not in implied.defaults:
    activation = 'hidden_act'
  config: Options = {
    'architectures': [implied.name],
    'model_type': kind,
    **{name: getattr(spec, field) for field, name in FIELDS.items()},
    'rms_norm_eps': spec.norm_eps,
    'rope_theta': spec.rope_theta,
    'tie_word_embeddings': spec.tied,
    activation: {ours: name for name, ours in ACTIVATIONS.items()}[spec.activation],
  }
  if spec.experts:
    del config['intermediate_size']  # unused
    config |= {name: getattr(spec, field) for field, name in OF_EXPERTS.items()}
    config['norm_topk_prob'] = spec.norm_topk
  if 'qkv_bias' not in implied.fields:
    config['attention_bias'] = spec.o_bias
  if spec.rope_type != 'default':
    config['rope_scaling'] = {'rope_type': spec.rope_type} | dict(spec.rope_knobs)
  if 'query_pre_attn_scalar' in implied.defaults:
    scale = spec.score_scale or spec.head_width**-0.5
    config['query_pre_attn_scalar'] = round(scale**-2)
  if spec.kinds or 'plain' in implied.rotations:
    config |= _written_layers(spec, implied)
  if v := spec.vision:
    scaling = config.get('rope_scaling') or {'type': 'mrope'}
    config |= {
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


def _written_layers(spec: ModelSpec, implied: Architecture) -> Options:
  """Returns the options of layers that differ, without those that have no effect."""
  kinds = spec.kinds or (LayerKind(),) * spec.layers
  slides = [kind.window > 0 or kind.rotation == 'plain' for kind in kinds]
  config: Options = {}
  if 'no_rope_layer_interval' in implied.defaults:
    config['no_rope_layers'] = [int(kind.rotation != 'none') for kind in kinds]
  if any(slides) or 'plain' in implied.rotations:
    config |= {
      'layer_types': [LAYER_TYPES[i] for i in slides],
      'sliding_window': max(kind.window for kind in kinds) or spec.positions,
      'use_sliding_window': True,
      # For versions of transformers without layer_types.
      'max_window_layers': (*slides, True).index(True),
      'sliding_window_pattern': (*slides, False).index(False) + 1,
    }
  if 'plain' in implied.rotations:
    full = {'rope_type': spec.rope_type, 'rope_theta': spec.rope_theta}
    full |= dict(spec.rope_knobs)
    local = {'rope_type': 'default', 'rope_theta': spec.plain_theta}
    config |= {
      'rope_local_base_freq': spec.plain_theta,
      'rope_parameters': dict(zip(LAYER_TYPES, (full, local), strict=True)),
    }
  return {name: x for name, x in config.items() if name not in implied.unread}


def preprocessor_of(v: VisionSpec) -> Options:
  """Returns the contents of preprocessor_config.json."""
  return {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'image_mean': list(v.mean),
    'image_std': list(v.std),
    **{option: getattr(v, field) for field, (option, _) in LIMITS.items()},
    **{option: getattr(v, field) for field, option in REPEATED.items()},
  }
