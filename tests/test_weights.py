"""A directory of safetensors becomes the tree, or the reason why not is named."""

import dataclasses
import json

import jax
import numpy as np
import oracles
import pytest
from safetensors.numpy import load_file, save_file

from bapo_jax import mesh, model, weights

SPEC = model.ModelSpec(
  vocab=20, width=16, layers=2, heads=4, kv_heads=2, head_width=4, ffn=24, positions=64
)
CONFIG = {
  'model_type': 'qwen2',
  'vocab_size': 20,
  'hidden_size': 16,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 24,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e4,
  'tie_word_embeddings': True,
}


def directory(path, params, **changes):
  """Writes a checkpoint as Hugging Face lays it out: projections [out, in]."""
  (path / 'config.json').write_text(json.dumps(CONFIG | changes))
  tensors = {}
  for parameter, tensor in weights.NAMES.items():
    head, _, tail = parameter.rpartition('/')
    array = (params[head] if head else params).get(tail)
    if array is None:
      continue
    if not head:
      tensors[tensor] = np.asarray(array)
      continue
    for i, x in enumerate(np.asarray(array)):
      if tail in 'qkv':
        x = x.reshape(x.shape[0], -1)
      if tail == 'o':
        x = x.reshape(-1, x.shape[-1])
      if tail in ('q', 'k', 'v', 'o', 'gate', 'up', 'down'):
        x = x.T
      tensors[tensor.format(i)] = np.ascontiguousarray(
        x.ravel() if 'bias' in tail else x
      )
  save_file(tensors, path / 'model.safetensors')
  return str(path)


@pytest.mark.parametrize('tied', [True, False])
def test_what_was_written_is_read(tmp_path, tied):
  spec = dataclasses.replace(SPEC, tied=tied)
  params = oracles.noisy(spec, 0)
  path = directory(tmp_path, params, tie_word_embeddings=tied)
  assert weights.spec(path, 'float32') == spec
  devices = mesh.make(2, 2, 2)
  found = weights.load(path, spec, devices)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert jax.tree.map(lambda x: x.sharding, found) == mesh.shardings(params, devices)


def test_both_spellings_of_rope_are_one(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0), rope_theta=5e5, rope_scaling=None)
  old = weights.spec(path, 'float32')
  new = CONFIG | {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}}
  del new['rope_theta']
  (tmp_path / 'config.json').write_text(json.dumps(new))
  assert weights.spec(path, 'float32') == old
  assert old.rope_theta == 5e5


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'model_type': 'gemma'},
      "model_type 'gemma' is none of ['llama', 'qwen2', 'qwen3']",
    ),
    (
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
      "rope scaling 'llama3' is not supported",
    ),
    # transformers 4 before 4.43 said type.
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      "rope scaling 'linear' is not supported",
    ),
    (
      {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e4}},
      "rope scaling 'yarn' is not supported",
    ),
    ({'use_sliding_window': True}, 'use_sliding_window is not supported'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu' is not supported"),
  ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, message):
  path = directory(tmp_path, oracles.noisy(SPEC, 0), **changes)
  with pytest.raises(ValueError) as error:
    weights.spec(path, 'float32')
  assert str(error.value) == f'{path}: {message}'


def test_a_missing_and_a_left_over_tensor_are_named(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0))
  file = tmp_path / 'model.safetensors'
  tensors = load_file(file)
  tensors['model.layers.1.self_attn.w_q'] = tensors.pop(
    'model.layers.1.self_attn.q_proj.weight'
  )
  save_file(tensors, file)
  with pytest.raises(ValueError) as error:
    weights.load(path, SPEC, mesh.make())
  assert str(error.value) == (
    f"{path}: tensors missing ['model.layers.1.self_attn.q_proj.weight'], left over "
    "['model.layers.1.self_attn.w_q']"
  )


def test_a_tensor_of_another_size_is_named(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0))
  with pytest.raises(
    ValueError, match=r'layers/gate: shape \(16, 24\) does not fit \(16, 32\)'
  ):
    weights.load(path, dataclasses.replace(SPEC, ffn=32), mesh.make())


def test_what_a_directory_lacks_is_listed(tmp_path):
  everything = ['config.json', 'tokenizer.json', '*.safetensors']
  assert weights.missing(str(tmp_path / 'nowhere')) == everything
  (tmp_path / 'config.json').write_text('{}')
  assert weights.missing(str(tmp_path)) == everything[1:]
  (tmp_path / 'tokenizer.json').write_text('{}')
  (tmp_path / 'model-00001-of-00002.safetensors').touch()
  assert weights.missing(str(tmp_path)) == []
