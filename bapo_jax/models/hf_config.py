"""config.json of Hugging Face to ModelSpec and back; no option is ignored silently.

1. `spec_of` reads it, in the spellings of transformers 4 and 5; what is not implemented
   is refused by its name and value;
2. `config_of` writes one for a model that was not read from a directory.
"""

from bapo_jax.models import rope, transformer

# model_type -> what the type implies; head_width stands in for a missing head_dim.
ARCHITECTURES = {
  'llama': {'architecture': 'LlamaForCausalLM'},
  'qwen2': {'architecture': 'Qwen2ForCausalLM', 'qkv_bias': True},
  'qwen3': {'architecture': 'Qwen3ForCausalLM', 'qk_norm': True, 'head_width': 128},
}
# Options that would change what the model computes -> the only value we implement.
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


def spec_of(c: dict, compute: str) -> transformer.ModelSpec:
  """The ModelSpec that the contents of config.json describe.

  Raises:
    ValueError: an architecture or an option that is not supported, by its name.
  """
  kind = c.get('model_type')
  _check(c, kind)
  implied = ARCHITECTURES[kind]
  # In these two the option means all four projections; Qwen2 does not know it.
  biased = kind in ('llama', 'qwen3') and bool(c.get('attention_bias'))
  heads = c['num_attention_heads']
  theta, rope_type, knobs = rope_of(c)
  return transformer.ModelSpec(
    vocab=c['vocab_size'],
    width=c['hidden_size'],
    layers=c['num_hidden_layers'],
    heads=heads,
    kv_heads=c.get('num_key_value_heads') or heads,
    head_width=c.get('head_dim')
    or implied.get('head_width')
    or c['hidden_size'] // heads,
    ffn=c['intermediate_size'],
    rope_theta=theta,
    rope_type=rope_type,
    rope_knobs=tuple(sorted(knobs.items())),
    norm_eps=c['rms_norm_eps'],
    positions=c['max_position_embeddings'],
    tied=c.get('tie_word_embeddings', False),
    qkv_bias=implied.get('qkv_bias', False) or biased,
    o_bias=biased,
    qk_norm=implied.get('qk_norm', False),
    compute=compute,
  )


def _check(c: dict, kind) -> None:
  """Raises ValueError for the first thing that is missing or not implemented."""
  if kind not in ARCHITECTURES:
    raise ValueError(
      f'model_type {kind!r} is not supported; choose a model of {sorted(ARCHITECTURES)}'
    )
  wanted = ARCHITECTURES[kind]['architecture']
  if c.get('architectures') and wanted not in c['architectures']:
    raise ValueError(
      f'architectures {c["architectures"]} are not supported; choose a {wanted}'
    )
  for option, value in ONLY.items():
    if c.get(option) not in (None, value):
      raise ValueError(
        f'{option}={c[option]!r} is not supported, only {value!r}; choose another model'
      )
  dtype = c.get('dtype') or c.get('torch_dtype') or DTYPES[0]
  if dtype not in DTYPES:
    raise ValueError(f'dtype {dtype!r} is none of {", ".join(DTYPES)}')
  if lacks := [name for name in NEEDED if c.get(name) is None]:
    raise ValueError(f'config.json lacks {", ".join(lacks)}')
  _check_window(c)


def _check_window(c: dict) -> None:
  """Raises ValueError where a layer's attention does not reach the first position.

  Published Qwen2 configs name a window that `use_sliding_window` says is not used.
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


def rope_of(c: dict) -> tuple[float, str, dict]:
  """(theta, rope_type, its knobs), checked by name."""
  # transformers 5 says rope_parameters, 4 rope_scaling with theta beside it.
  knobs = dict(c.get('rope_scaling') or c.get('rope_parameters') or {})
  for name, value in knobs.items():
    if isinstance(value, dict):
      raise ValueError(f'rope_parameters for {name} alone are not supported')
  kind = knobs.pop('type', 'default')
  kind = knobs.pop('rope_type', kind)
  theta = knobs.pop('rope_theta', None) or c.get('rope_theta') or 10000.0
  if knobs.get('partial_rotary_factor') == 1:
    del knobs['partial_rotary_factor']
  if kind in ('llama3', 'yarn'):
    name = 'original_max_position_embeddings'
    knobs[name] = c.get(name) or knobs.get(name) or c['max_position_embeddings']
  rope.check(kind, knobs)
  return float(theta), kind, knobs


def config_of(spec: transformer.ModelSpec) -> dict:
  """config.json of a model of ours, in the spellings every version reads.

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
  config = {
    'architectures': [ARCHITECTURES[kind]['architecture']],
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
