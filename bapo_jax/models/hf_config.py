"""Hugging Face's config.json to ModelSpec and back; no option is ignored silently.

1. `check_types` refuses options of a wrong type or out of all proportion, since nothing
   that follows is meant for them;
2. `spec_of` reads the spellings of transformers 4 and 5, and refuses options that are
   not implemented by name and value;
3. `config_of` writes a config.json for a model that was not read from a directory.
"""

import json
import math
from typing import Any, NamedTuple

from bapo_jax.models import rope, transformer


class Architecture(NamedTuple):
  """Options that a model_type implies."""

  name: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_width: int | None = None  # where config.json has no head_dim; None: D / H


ARCHITECTURES = {
  'llama': Architecture('LlamaForCausalLM'),
  'qwen2': Architecture('Qwen2ForCausalLM', qkv_bias=True),
  'qwen3': Architecture('Qwen3ForCausalLM', qk_norm=True, head_width=128),
}
SEES = 'qwen2_5_vl'  # the model_type with a vision tower, which hf_vision reads
# Options that would change the computation -> the only value that is implemented.
ONLY = {
  'hidden_act': 'silu',
  'mlp_bias': False,
  'attention_dropout': 0.0,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
}
NEEDED = (
  'vocab_size',
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'intermediate_size',
  'max_position_embeddings',
  'rms_norm_eps',
)
DTYPES = ('float32', 'bfloat16', 'float16')
# Sizes -> the largest that is read; some twenty times those of the largest models.
LARGEST = {
  'vocab_size': 10**7,
  'hidden_size': 10**6,
  'num_hidden_layers': 10**4,
  'num_attention_heads': 10**5,
  'num_key_value_heads': 10**5,
  'head_dim': 10**5,
  'intermediate_size': 10**7,
  'max_position_embeddings': 2**31 - 1,
  'sliding_window': 2**31 - 1,
  'original_max_position_embeddings': 2**31 - 1,
}
FLAGS = ('tie_word_embeddings', 'attention_bias', 'mlp_bias', 'use_sliding_window')
STRINGS = ('model_type', 'dtype', 'torch_dtype', 'hidden_act')
LISTS = ('architectures', 'layer_types')  # of strings
MAY_BE_ZERO = ('mscale', 'mscale_all_dim', 'beta_fast', 'beta_slow')  # 0: the default
TABLES = ('rope_scaling', 'rope_parameters')


def spec_of(c: dict[str, Any], compute: str) -> transformer.ModelSpec:
  """The ModelSpec of a config.json.

  Args:
    c: the contents of config.json.
    compute: dtype of the matrix products.

  Raises:
    ValueError: an architecture or an option is not supported, by its name.
  """
  check_types(c)
  implied = _check(c)
  # In Llama and Qwen3 the option means all four projections; Qwen2 does not have it.
  biased = not implied.qkv_bias and bool(c.get('attention_bias'))
  heads = c['num_attention_heads']
  kv_heads = c.get('num_key_value_heads') or heads
  head_width = c.get('head_dim') or implied.head_width or c['hidden_size'] // heads
  if heads % kv_heads or head_width % 2 or not head_width:
    raise ValueError(
      f'{heads} heads of width {head_width} do not share {kv_heads} key/value heads: '
      'num_attention_heads is a multiple of num_key_value_heads, and head_dim is even'
    )
  theta, rope_type, knobs = rope_of(c)
  _check_rope(head_width, theta, rope_type, knobs)
  return transformer.ModelSpec(
    vocab=c['vocab_size'],
    width=c['hidden_size'],
    layers=c['num_hidden_layers'],
    heads=heads,
    kv_heads=kv_heads,
    head_width=head_width,
    ffn=c['intermediate_size'],
    rope_theta=theta,
    rope_type=rope_type,
    rope_knobs=tuple(sorted(knobs.items())),
    norm_eps=c['rms_norm_eps'],
    positions=c['max_position_embeddings'],
    tied=bool(c.get('tie_word_embeddings')),
    qkv_bias=implied.qkv_bias or biased,
    o_bias=biased,
    qk_norm=implied.qk_norm,
    compute=compute,
  )


def check_types(c: dict[str, Any]) -> None:
  """Checks the type and the size of every option that is read; null is no value.

  Raises:
    ValueError: the first that is wrong, with what it should be.
  """
  for name, most in LARGEST.items():
    fits = type(c.get(name)) is int and 1 <= c[name] <= most
    _expect(c, name, fits, f'an integer from 1 to {most}')
  _expect(c, 'max_window_layers', type(c.get('max_window_layers')) is int, 'an integer')
  _expect(c, 'rms_norm_eps', _number(c.get('rms_norm_eps')) >= 0, 'a number from 0 on')
  _expect(c, 'rope_theta', _number(c.get('rope_theta')) > 1, 'a number above 1')
  for name in FLAGS:
    _expect(c, name, isinstance(c.get(name), bool), 'true or false')
  for name in STRINGS:
    _expect(c, name, isinstance(c.get(name), str), 'a string')
  for name in LISTS:
    value = c.get(name)
    whole = isinstance(value, list) and all(isinstance(x, str) for x in value)
    _expect(c, name, whole, 'a list of strings')
  for name in TABLES:
    _expect(c, name, isinstance(c.get(name), dict), 'an object')


def _expect(c: dict[str, Any], name: str, fits: bool, wanted: str) -> None:
  """Raises ValueError where an option has a value that does not fit."""
  if c.get(name) is not None and not fits:
    raise ValueError(
      f'{name}={_shown(c[name])} in its config.json: {wanted} is wanted; fetch the '
      'file again'
    )


def _number(value: Any) -> float:
  """A finite number as float; NaN, which fits nowhere, for all else."""
  if type(value) not in (int, float) or not abs(value) < 1e30:
    return math.nan
  return float(value)


def _shown(value: Any) -> str:
  """A value as an error shows it, however large."""
  text = (
    json.dumps(value) if type(value) is not int or abs(value) < 10**30 else '10^30+'
  )
  return text if len(text) <= 60 else f'{text[:57]}...'


def _check(c: dict[str, Any]) -> Architecture:
  """The architecture; raises ValueError if anything is missing or not implemented."""
  implied = ARCHITECTURES.get(c.get('model_type', ''))
  if implied is None:
    raise ValueError(
      f'model_type {c.get("model_type")!r} is not supported; choose a model of '
      f'{sorted([*ARCHITECTURES, SEES])}'
    )
  if c.get('architectures') and implied.name not in c['architectures']:
    raise ValueError(
      f'architectures {c["architectures"]} are not supported; choose a {implied.name}'
    )
  for option, value in ONLY.items():
    if c.get(option) not in (None, value):
      raise ValueError(
        f'{option}={c[option]!r:.60} is not supported, only {value!r}; choose another '
        'model'
      )
  dtype = c.get('dtype') or c.get('torch_dtype') or DTYPES[0]
  if dtype not in DTYPES:
    raise ValueError(f'dtype {dtype!r} is none of {", ".join(DTYPES)}')
  if lacks := [name for name in NEEDED if c.get(name) is None]:
    raise ValueError(f'config.json lacks {", ".join(lacks)}')
  _check_window(c)
  return implied


def _check_window(c: dict[str, Any]) -> None:
  """Raises ValueError if a layer's attention does not reach the first position.

  Published Qwen2 configs have a window that `use_sliding_window` switches off.
  """
  window, positions = c.get('sliding_window'), c['max_position_embeddings']
  layers = c['num_hidden_layers']
  sliding = 'sliding_attention' in (c.get('layer_types') or ())
  if not c.get('layer_types'):
    sliding = bool(c.get('use_sliding_window'))
    sliding &= c.get('max_window_layers', 28) < layers
  if sliding and c.get('use_sliding_window', True) and window and window < positions:
    raise ValueError(
      f'sliding_window={window} is used and shorter than '
      f'max_position_embeddings={positions}, which is not supported; for rows of at '
      f'most {window} tokens set max_position_embeddings to {window} in its '
      'config.json, or choose a model without a window'
    )


def rope_of(c: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
  """(theta, rope_type, knobs of the type).

  Raises:
    ValueError: the type or a knob is not supported, by its name.
  """
  # transformers 5 writes rope_parameters, 4 rope_scaling and rope_theta.
  knobs = dict(c.get('rope_scaling') or c.get('rope_parameters') or {})
  for name, value in knobs.items():
    if isinstance(value, dict):
      raise ValueError(f'rope_parameters for {name} alone are not supported')
    if name in ('type', 'rope_type'):
      _expect(knobs, name, isinstance(value, str), 'a string')
    elif name == 'truncate':
      _expect(knobs, name, isinstance(value, bool), 'true or false')
    else:
      least = 1 if name == 'rope_theta' else 0
      fits = _number(value) > least or (_number(value) == 0 and name in MAY_BE_ZERO)
      _expect(knobs, name, fits, f'a number above {least}')
  kind = knobs.pop('type', None)
  kind = knobs.pop('rope_type', None) or kind or 'default'
  theta = knobs.pop('rope_theta', None) or c.get('rope_theta') or 10000.0
  if knobs.get('partial_rotary_factor') == 1:
    del knobs['partial_rotary_factor']
  if kind in ('llama3', 'yarn'):
    name = 'original_max_position_embeddings'
    knobs[name] = c.get(name) or knobs.get(name) or c['max_position_embeddings']
  rope.check(kind, knobs)
  return float(theta), kind, knobs


def _check_rope(
  head_width: int, theta: float, rope_type: str, knobs: dict[str, Any]
) -> None:
  """Raises ValueError where a frequency or the factor comes out as no number."""
  try:
    table = rope.table(head_width, theta, rope_type, tuple(sorted(knobs.items())))
    finite = math.isfinite(float(table[0].sum()) + table[1])
  except ArithmeticError:
    finite = False
  if not finite:
    raise ValueError(
      f'rope_type {rope_type!r} with theta {theta:g} and {_shown(knobs)} gives '
      'frequencies that are no numbers; fetch its config.json again'
    )


def config_of(spec: transformer.ModelSpec) -> dict[str, Any]:
  """The contents of config.json, in spellings that every version reads.

  Raises:
    ValueError: no architecture has these biases and norms.
  """
  choice = {
    (True, False, False): 'qwen2',
    (False, False, False): 'llama',
    (True, True, False): 'llama',
    (False, False, True): 'qwen3',
    (True, True, True): 'qwen3',
  }
  traits = (spec.qkv_bias, spec.o_bias, spec.qk_norm)
  if traits not in choice:
    raise ValueError(
      f'no architecture has qkv_bias={traits[0]}, o_bias={traits[1]}, '
      f'qk_norm={traits[2]}; choose those of one of {sorted(ARCHITECTURES)}'
    )
  kind = choice[traits]
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
  return config
