"""A directory of safetensors becomes the tree; a process reads its own shards only."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import processes
import pytest
import runs
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import tensors as hf_tensors
from bapo_jax.models.hf import weights as hf_weights

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


@pytest.mark.parametrize('block', [1, 300, 1 << 20])
@pytest.mark.parametrize(
  ('shape', 'tied'), [((1, 1, 1), True), ((2, 2, 2), False), ((1, 2, 4), True)]
)
def test_a_checkpoint_is_read_by_any_devices_in_any_blocks(
  tmp_path, shape, tied, block
):
  mesh = sharding.make(*shape, devices=jax.devices()[: math.prod(shape)])
  spec = dataclasses.replace(SPEC, tied=tied, heads=8)
  params = oracles.noisy(spec, 0)
  changes = {'tie_word_embeddings': tied, 'num_attention_heads': 8, 'head_dim': 4}
  path = directory(tmp_path, params, **changes)
  assert hf_config.read_spec(path, 'float32') == spec
  found = hf_weights.load(path, spec, mesh, block=block)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  layout = sharding.shardings(params, mesh)
  assert jax.tree.map(lambda x: x.sharding, found) == layout


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
    np.testing.assert_array_equal(hf_weights.reader(str(tmp_path), spec)(name), x)
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
  spec = hf_config.read_spec(str(REAL), 'bfloat16')
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


def test_tensors_that_do_not_match_are_named(tmp_path):
  path = directory(tmp_path, oracles.noisy(SPEC, 0))
  # As many numbers, but of other axes: q is [H*C, D].
  for change, shapes in (
    ({'ffn': 32}, r'gate_proj.* \(24, 16\).* \(32, 16\)'),
    ({'width': 8, 'heads': 8}, r' \(20, 16\).* \(20, 8\)'),
  ):
    with pytest.raises(ValueError, match=shapes):
      hf_weights.load(path, dataclasses.replace(SPEC, **change), sharding.make())
  file, name = tmp_path / 'model.safetensors', 'model.layers.1.self_attn.q_proj.weight'
  tensors = load_file(file)
  tensors['model.layers.1.self_attn.w_q'] = tensors.pop(name)
  save_file(tensors, file)
  with pytest.raises(ValueError, match=r'self_attn\.w_q') as error:
    hf_weights.load(path, SPEC, sharding.make())
  assert path in str(error.value) and name in str(error.value)


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


@pytest.mark.parametrize(
  ('kind', 'value'), [('float32', np.inf), ('bfloat16', np.nan), ('float16', -np.inf)]
)
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
      with pytest.raises(ValueError, match=name):
        hf_weights.load(str(tmp_path), SPEC, sharding.make(2, 2, 2), block=block)


def test_a_number_too_large_for_the_dtype_of_the_run_is_refused(tmp_path):
  arrays = random_checkpoint(tmp_path, SPEC, np.dtype('float32'), files=1)
  arrays['model.layers.0.mlp.up_proj.weight'][0, 0] = 3.4e38  # bfloat16: 3.39e38
  save_file(arrays, tmp_path / 'part-0.safetensors')
  hf_weights.load(str(tmp_path), SPEC, sharding.make())
  narrow = dataclasses.replace(SPEC, dtype='bfloat16')
  with pytest.raises(ValueError, match=r'layers\.0\.mlp\.up_proj\.weight'):
    hf_weights.load(str(tmp_path), narrow, sharding.make())


@pytest.mark.parametrize('kind', ['float32', 'float16', 'bfloat16'])
def test_finite_is_numpys_isfinite(kind):
  # Every number of sixteen bits; the same numbers as float32.
  bits = np.arange(1 << 16, dtype=np.uint16)
  array = bits.view('float16' if kind == 'float16' else 'bfloat16').astype(kind)
  expected = np.isfinite(array.astype(np.float32))
  assert 0 < expected.sum() < len(expected)
  found = [hf_weights.finite(array[i : i + 1]) for i in range(0, 1 << 16, 37)]
  assert found == expected[::37].tolist()
  assert hf_weights.finite(array[expected]) and not hf_weights.finite(array)


READ = """
import jax, numpy as np
from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config, safetensors_io, weights
path, whole, shape = PATH, np.load(WHOLE), SHAPE
read, bytes_read = safetensors_io.read, 0
def counting(*where):
  global bytes_read
  rows = read(*where)
  bytes_read += rows.nbytes
  return rows
safetensors_io.read = counting
params = weights.load(path, config.read_spec(path, 'float32'), sharding.make(**shape))
held = 0
for name, array in transformer.flatten(params).items():
  shards = {str(shard.index): shard for shard in array.addressable_shards}
  for shard in shards.values():
    assert np.array_equal(shard.data, whole[name][shard.index]), name
  held += sum(shard.data.nbytes for shard in shards.values())
print(f'{bytes_read} read, {held} held')
hosts.finish(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize('shape', [{'fsdp': 4}, 'tower'], ids=['columns', 'heads'])
def test_two_processes_read_each_its_part_of_a_checkpoint(tmp_path, shape):
  model, file = tmp_path / 'model', tmp_path / 'whole.npz'
  if shape == 'tower':
    # Queries, keys and values are one tensor: its rows are of all heads three times.
    model.mkdir()
    shape, spec = {'tensor': 4}, making.SEEING
    params = making.params(spec)
    hf_weights.save(str(model), transformer.flatten(params).__getitem__, spec)
    files = {'config.json': hf_config.config_of(spec)}
    files['preprocessor_config.json'] = hf_config.preprocessor_of(spec.vision)
    for name, content in files.items():
      (model / name).write_text(json.dumps(content))
  else:
    spec = hf_config.read_spec(runs.source(model), 'float32')
    one = sharding.make(devices=jax.devices()[:1])
    params = hf_weights.load(str(model), spec, one)
  flat = {name: np.asarray(x) for name, x in transformer.flatten(params).items()}
  np.savez(file, **flat)
  source = READ
  for name, value in {'PATH': str(model), 'WHOLE': str(file)}.items():
    source = source.replace(name, repr(value))
  source = source.replace('SHAPE', repr({'data': 1} | shape))
  statuses, outputs = processes.ended(processes.scripts(source, 2, tmp_path), tmp_path)
  assert statuses == [0, 0], outputs
  if spec.vision:
    return
  total = sum(x.nbytes for x in flat.values())
  # Norms, which every device holds, are read by both.
  norms = sum(x.nbytes for name, x in flat.items() if name.endswith('norm'))
  for text in outputs:
    found = re.search(r'(\d+) read, (\d+) held', text)
    assert found, text
    read, held = map(int, found.groups())
    assert held == (total - norms) // 2 + norms
    assert read == held // 2  # the file is bfloat16, the parameters float32
