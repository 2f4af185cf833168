"""A directory of safetensors becomes the tree, or an error names the reason."""

import dataclasses
import json
import math
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.models import hf_tensors, hf_weights, safetensors_io, transformer

SPEC = transformer.ModelSpec(
  vocab=20, width=16, layers=2, heads=4, kv_heads=2, head_width=4, ffn=24, positions=64
)
CONFIG = {
  **making.SIZES,
  'model_type': 'qwen2',
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e4,
  'tie_word_embeddings': True,
}
REAL = pathlib.Path(__file__).parents[3] / 'shared/data/r1_distill_qwen_32b'
SPECS = {
  'qwen2 tied': SPEC,
  'qwen2': dataclasses.replace(SPEC, tied=False),
  'qwen3': dataclasses.replace(SPEC, qkv_bias=False, qk_norm=True, head_width=8),
  'llama with biases': dataclasses.replace(SPEC, o_bias=True, tied=False),
}


def directory(path, params, **changes):
  """Writes a checkpoint as Hugging Face lays it out: projections [out, in]."""
  (path / 'config.json').write_text(json.dumps(CONFIG | changes))
  tensors = {}
  for parameter, tensor in hf_tensors.NAMES.items():
    head, _, tail = parameter.rpartition('/')
    array = transformer.flatten(params).get(parameter)
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
def test_a_checkpoint_is_read(tmp_path, tied):
  spec = dataclasses.replace(SPEC, tied=tied)
  params = oracles.noisy(spec, 0)
  path = directory(tmp_path, params, tie_word_embeddings=tied)
  assert hf_weights.spec(path, 'float32') == spec
  devices = sharding.make(2, 2, 2)
  found = hf_weights.load(path, spec, devices)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert jax.tree.map(lambda x: x.sharding, found) == sharding.shardings(
    params, devices
  )


def test_an_unsupported_option_is_named_with_its_directory(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0), hidden_act='gelu')
  with pytest.raises(ValueError) as error:
    hf_weights.spec(path, 'float32')
  assert str(error.value).startswith(f"{path}: hidden_act='gelu' is not supported")


@pytest.mark.parametrize('block', [1, 300, 1 << 20])
@pytest.mark.parametrize('shape', [(1, 1, 1), (2, 2, 2), (1, 2, 4)])
def test_blocks_and_devices_change_nothing(tmp_path, block, shape):
  devices = sharding.make(*shape, devices=jax.devices()[: math.prod(shape)])
  spec = dataclasses.replace(SPEC, tied=False, heads=8)
  params = oracles.noisy(spec, 0)
  path = directory(
    tmp_path, params, tie_word_embeddings=False, num_attention_heads=8, head_dim=4
  )
  found = hf_weights.load(path, hf_weights.spec(path, 'float32'), devices, block=block)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert jax.tree.map(lambda x: x.sharding, found) == sharding.shardings(
    params, devices
  )


def random_checkpoint(path, spec, kind, files):
  """A directory with random bits in every tensor; name -> array."""
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.standard_normal(shape).astype(kind)
    for name, shape in hf_tensors.stored(spec).items()
  }
  names = sorted(arrays)
  for i in range(files):
    save_file({n: arrays[n] for n in names[i::files]}, path / f'part-{i}.safetensors')
  return arrays


@pytest.mark.parametrize('limit', [10**9, 1500], ids=['one file', 'many files'])
@pytest.mark.parametrize('kind', ['float32', 'bfloat16'])
@pytest.mark.parametrize('spec', SPECS)
def test_in_and_out_to_the_bit(tmp_path, spec, kind, limit):
  spec = SPECS[spec]
  before = random_checkpoint(tmp_path, spec, jnp.dtype(kind), files=2)
  spec = dataclasses.replace(spec, dtype=kind)
  params = hf_weights.load(str(tmp_path), spec, sharding.make(2, 2, 2))
  flat = traverse_util.flatten_dict(params, sep='/')
  for name, x in flat.items():
    assert x.dtype == ('float32' if name.endswith('norm') else kind), name
  out = tmp_path / 'out'
  out.mkdir()
  hf_weights.save(str(out), flat.__getitem__, spec, dtype=kind, shard_bytes=limit)
  files = sorted(file.name for file in out.glob('*.safetensors'))
  assert (files == ['model.safetensors']) == (limit == 10**9)
  after = {}
  for file in files:
    held = load_file(out / file)
    assert sum(x.nbytes for x in held.values()) <= limit or len(held) == 1
    after |= held
  assert {n: x.shape for n, x in after.items()} == hf_tensors.stored(spec)
  for name, array in before.items():
    assert after[name].dtype == array.dtype
    assert after[name].tobytes() == array.tobytes(), name
  if len(files) > 1:
    index = json.loads((out / 'model.safetensors.index.json').read_text())
    assert index['metadata']['total_size'] == sum(x.nbytes for x in before.values())
    assert sorted(set(index['weight_map'].values())) == files
    for name, file in index['weight_map'].items():
      assert name in load_file(out / file)


def test_half_precision_is_exact_on_the_way_through_float32(tmp_path):
  for kind in ('bfloat16', 'float16'):
    path = tmp_path / kind
    path.mkdir()
    before = random_checkpoint(path, SPEC, jnp.dtype(kind), files=1)
    params = hf_weights.load(str(path), SPEC, sharding.make(8))
    assert params['embed'].dtype == jnp.float32
    flat = traverse_util.flatten_dict(params, sep='/')
    hf_weights.save(str(path), flat.__getitem__, SPEC, dtype=kind)
    after = load_file(path / 'model.safetensors')
    assert all(after[n].tobytes() == x.tobytes() for n, x in before.items())


def test_the_published_32b_checkpoint_is_covered_exactly():
  """Names from its index, shapes from its config.json."""
  if not REAL.is_dir():
    pytest.skip(f'no {REAL}')
  spec = hf_weights.spec(str(REAL), 'bfloat16')
  index = json.loads((REAL / 'model.safetensors.index.json').read_text())
  stored = hf_tensors.stored(spec)
  assert set(stored) == set(index['weight_map'])
  # 40 heads and 8 key/value heads of 5120 / 40 = 128; projections are [out, in].
  layer = 'model.layers.63.'
  assert stored[layer + 'self_attn.q_proj.weight'] == (5120, 5120)
  assert stored[layer + 'self_attn.k_proj.weight'] == (1024, 5120)
  assert stored[layer + 'self_attn.v_proj.bias'] == (1024,)
  assert stored[layer + 'mlp.down_proj.weight'] == (5120, 27648)
  assert (
    stored['lm_head.weight'] == stored['model.embed_tokens.weight'] == (152064, 5120)
  )
  # The index holds the bytes of all of them together, two per number.
  total = sum(math.prod(shape) for shape in stored.values())
  assert 2 * total == index['metadata']['total_size'] == 65527752704
  assert total == transformer.count(spec)


def test_a_missing_and_a_left_over_tensor_are_named(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0))
  file = tmp_path / 'model.safetensors'
  tensors = load_file(file)
  tensors['model.layers.1.self_attn.w_q'] = tensors.pop(
    'model.layers.1.self_attn.q_proj.weight'
  )
  save_file(tensors, file)
  with pytest.raises(ValueError) as error:
    hf_weights.load(path, SPEC, sharding.make())
  assert str(error.value) == (
    f"{path}: tensors missing ['model.layers.1.self_attn.q_proj.weight'], left over "
    "['model.layers.1.self_attn.w_q']"
  )


def test_a_tensor_of_another_shape_is_named(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0))
  with pytest.raises(ValueError) as error:
    hf_weights.load(path, dataclasses.replace(SPEC, ffn=32), sharding.make())
  assert str(error.value) == (
    f'{path}: model.layers.0.mlp.gate_proj.weight has shape (24, 16), not (32, 16)'
  )
  # As many numbers, but of other axes: q is [H*C, D].
  swapped = dataclasses.replace(SPEC, width=8, heads=8)
  with pytest.raises(ValueError, match=r'has shape \(20, 16\), not \(20, 8\)'):
    hf_weights.load(path, swapped, sharding.make())


def test_extra_tensors_of_old_and_tied_checkpoints_are_ignored(tmp_path):
  params = oracles.noisy(SPEC, 0)
  path = directory(tmp_path, params)
  file = tmp_path / 'model.safetensors'
  extra = {
    'lm_head.weight': np.zeros((20, 16), np.float32),
    'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(2, np.float32),
  }
  save_file(load_file(file) | extra, file)
  found = hf_weights.load(path, SPEC, sharding.make())
  jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(tmp_path, kind, value):
  arrays = random_checkpoint(tmp_path, SPEC, jnp.dtype(kind), files=1)
  hf_weights.load(str(tmp_path), SPEC, sharding.make(2, 2, 2))
  for name in (
    'model.embed_tokens.weight',
    'model.norm.weight',
    'model.layers.1.self_attn.k_proj.bias',
    'model.layers.0.mlp.down_proj.weight',
  ):
    broken = {n: x.copy() for n, x in arrays.items()}
    broken[name].ravel()[-1] = value
    save_file(broken, tmp_path / 'part-0.safetensors')
    for block in (1, 300, 1 << 20):
      with pytest.raises(ValueError) as error:
        hf_weights.load(str(tmp_path), SPEC, sharding.make(2, 2, 2), block=block)
      assert f'{name} holds NaN or infinity; fetch the file again' in str(error.value)


def test_a_number_too_large_for_the_dtype_of_the_run_is_refused(tmp_path):
  arrays = random_checkpoint(tmp_path, SPEC, np.dtype('float32'), files=1)
  arrays['model.layers.0.mlp.up_proj.weight'][0, 0] = 3.4e38  # bfloat16: 3.39e38
  save_file(arrays, tmp_path / 'part-0.safetensors')
  hf_weights.load(str(tmp_path), SPEC, sharding.make())
  narrow = dataclasses.replace(SPEC, dtype='bfloat16')
  with pytest.raises(ValueError, match=r'layers\.0\.mlp\.up_proj\.weight holds NaN or'):
    hf_weights.load(str(tmp_path), narrow, sharding.make())


def test_the_check_makes_no_copy_in_another_dtype():
  array = np.zeros(1 << 22, jnp.bfloat16)
  tracemalloc.start()
  assert safetensors_io.finite(array)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 1.1 * array.nbytes
