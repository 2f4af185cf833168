"""Weights in: a Hugging Face directory of safetensors to the parameter tree.

1. `spec` reads config.json (transformers 4 and 5 spellings);
2. `NAMES` says which tensor becomes which parameter, and how its axes are laid out;
3. `load` reads tensor by tensor; what is missing or left over is named.
"""

import json
import os
import re

import jax
import numpy as np

from bapo_jax import mesh, model

ARCHITECTURES = {'qwen2': {'qkv_bias': True}, 'qwen3': {'qk_norm': True}, 'llama': {}}

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
  'layers/q_norm': 'model.layers.{}.self_attn.q_norm.weight',
  'layers/k_norm': 'model.layers.{}.self_attn.k_norm.weight',
  'layers/gate': 'model.layers.{}.mlp.gate_proj.weight',
  'layers/up': 'model.layers.{}.mlp.up_proj.weight',
  'layers/down': 'model.layers.{}.mlp.down_proj.weight',
}


def missing(path: str) -> list[str]:
  """What a model directory lacks; [] where it can be loaded."""
  names = os.listdir(path) if os.path.isdir(path) else []
  lacks = [name for name in ('config.json', 'tokenizer.json') if name not in names]
  if not any(name.endswith('.safetensors') for name in names):
    lacks.append('*.safetensors')
  return lacks


def spec(path: str, compute: str) -> model.ModelSpec:
  """The ModelSpec that config.json in the directory `path` describes.

  Raises:
    ValueError: an architecture or an option that is not supported, by its name.
  """
  with open(os.path.join(path, 'config.json')) as file:
    c = json.load(file)
  kind = c.get('model_type')
  if kind not in ARCHITECTURES:
    raise ValueError(f'{path}: model_type {kind!r} is none of {sorted(ARCHITECTURES)}')
  ropes = c.get('rope_parameters') or c.get('rope_scaling') or {}
  rope_type = ropes.get('rope_type', ropes.get('type', 'default'))
  if rope_type != 'default':
    raise ValueError(f'{path}: rope scaling {rope_type!r} is not supported')
  if c.get('use_sliding_window'):
    raise ValueError(f'{path}: use_sliding_window is not supported')
  if c.get('hidden_act', 'silu') != 'silu':
    raise ValueError(f'{path}: hidden_act {c["hidden_act"]!r} is not supported')
  return model.ModelSpec(
    vocab=c['vocab_size'],
    width=c['hidden_size'],
    layers=c['num_hidden_layers'],
    heads=c['num_attention_heads'],
    kv_heads=c.get('num_key_value_heads', c['num_attention_heads']),
    head_width=c.get('head_dim') or c['hidden_size'] // c['num_attention_heads'],
    ffn=c['intermediate_size'],
    rope_theta=c.get('rope_theta') or ropes['rope_theta'],
    norm_eps=c['rms_norm_eps'],
    positions=c['max_position_embeddings'],
    tied=c.get('tie_word_embeddings', False),
    compute=compute,
    **{'qkv_bias': False} | ARCHITECTURES[kind],
  )


def load(path: str, spec: model.ModelSpec, devices) -> dict:
  """The parameters, float32, on the devices of the mesh.

  Raises:
    ValueError: a tensor is missing, left over, or of another shape.
  """
  from safetensors import safe_open

  files = {}
  for name in sorted(n for n in os.listdir(path) if n.endswith('.safetensors')):
    opened = safe_open(os.path.join(path, name), 'flax')
    files |= {tensor: opened for tensor in opened.keys()}  # noqa: SIM118
  wanted = model.describe(spec)
  expected = {
    NAMES[p].format(i)
    for p, (shape, _) in wanted.items()
    for i in range(shape[0] if '{}' in NAMES[p] else 1)
  }
  if spec.tied:
    files.pop('lm_head.weight', None)
  if expected != set(files):
    missing, left = sorted(expected - set(files)), sorted(set(files) - expected)
    raise ValueError(f'{path}: tensors missing {missing[:3]}, left over {left[:3]}')

  def one(parameter, shape):
    name = NAMES[parameter]
    if '{}' not in name:
      return _oriented(files[name].get_tensor(name), shape, parameter)
    return np.stack(
      [
        _oriented(files[n].get_tensor(n), shape[1:], parameter)
        for n in (name.format(i) for i in range(shape[0]))
      ]
    )

  flat = {p: one(p, shape) for p, (shape, _) in wanted.items()}
  tree = model.unflatten(flat)
  return jax.device_put(tree, mesh.shardings(tree, devices))


def _oriented(tensor, shape, parameter) -> np.ndarray:
  """float32, input axis first, heads apart."""
  array = np.asarray(tensor, np.float32)
  if re.search(r'layers/(q|k|v|o|gate|up|down)$', parameter):
    array = array.T
  if array.size != np.prod(shape):
    raise ValueError(f'{parameter}: shape {array.shape} does not fit {shape}')
  return array.reshape(shape)
