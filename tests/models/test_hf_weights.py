"""A directory of safetensors becomes the tree; a process reads its own shards only."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import making
import numpy as np
import processes
import pytest
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights

SPEC = dataclasses.replace(making.QWEN2, ffn=24, positions=64)
SPECS = {
  'qwen2 tied': SPEC,
  'qwen3': dataclasses.replace(SPEC, qkv_bias=False, qk_norm='head', head_width=8),
  'llama with biases': dataclasses.replace(SPEC, o_bias=True, tied=False),
  'qwen2.5-vl': making.SEEING,
  'qwen3-moe': making.MIXTURE,
}


def random_checkpoint(path, spec, kind, files):
  """A directory with random bits in every tensor; name -> array."""
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.standard_normal(shape).astype(kind)
    for name, shape in hf_weights.stored(spec).items()
  }
  names = sorted(arrays)
  for i in range(files):
    save_file({n: arrays[n] for n in names[i::files]}, path / f'part-{i}.safetensors')
  return arrays


@pytest.mark.parametrize(
  ('kind', 'dtype', 'limit'),
  [
    ('float32', 'float32', 10**9),
    ('bfloat16', 'bfloat16', 1500),
    ('bfloat16', 'float32', 10**9),
    ('float16', 'float32', 1500),
  ],
)
@pytest.mark.parametrize('spec', SPECS)
def test_in_and_out_to_the_bit(tmp_path, spec, kind, dtype, limit):
  spec = dataclasses.replace(SPECS[spec], dtype=dtype)
  before = random_checkpoint(tmp_path, spec, jnp.dtype(kind), files=2)
  params = hf_weights.load(str(tmp_path), spec, sharding.make(2, 2, 2))
  flat = transformer.flatten(params)
  for name, x in flat.items():
    assert x.dtype == ('float32' if name.endswith('norm') else dtype), name
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
  assert {n: x.shape for n, x in after.items()} == hf_weights.stored(spec)
  for name, array in before.items():
    assert after[name].dtype == array.dtype
    assert after[name].tobytes() == array.tobytes(), name
  if len(files) > 1:
    index = json.loads((out / 'model.safetensors.index.json').read_text())
    assert index['metadata']['total_size'] == sum(x.nbytes for x in before.values())
    assert sorted(set(index['weight_map'].values())) == files


@pytest.mark.parametrize(
  ('kind', 'value', 'dtype'),
  [
    ('float32', np.inf, 'float32'),
    ('bfloat16', -np.nan, 'bfloat16'),
    ('float32', 3.4e38, 'bfloat16'),  # whose largest number is 3.39e38
  ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(
  tmp_path, kind, value, dtype
):
  spec = dataclasses.replace(SPEC, dtype=dtype)
  arrays = random_checkpoint(tmp_path, SPEC, jnp.dtype(kind), files=1)
  name = 'model.layers.1.self_attn.k_proj.bias'
  arrays[name].ravel()[-1] = value
  save_file(arrays, tmp_path / 'part-0.safetensors')
  with pytest.raises(ValueError, match=name):
    hf_weights.load(str(tmp_path), spec, sharding.make(2, 2, 2))


READ = """
import jax, numpy as np
from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config, safetensors_io, weights
read, sizes = safetensors_io.read, []
def counting(*where):
  rows = read(*where)
  sizes.append(rows.nbytes)
  return rows
safetensors_io.read = counting
for path, axis in MODELS.items():
  sizes.clear()
  mesh, whole = sharding.make(**{'data': 1, axis: 4}), np.load(path + '/whole.npz')
  params, held = weights.load(path, config.read_spec(path, 'float32'), mesh), 0
  for name, array in transformer.flatten(params).items():
    shards = {str(shard.index): shard for shard in array.addressable_shards}
    for shard in shards.values():
      assert np.array_equal(shard.data, whole[name][shard.index]), name
    held += sum(shard.data.nbytes for shard in shards.values())
  print(f'{sum(sizes)} read, {held} held')
# Only one process reads the number that differs.
try:
  weights.load(HEAD, config.read_spec(HEAD, 'float32'), sharding.make(data=1, fsdp=4))
except ValueError as error:
  print(error)
hosts.finish(0)
"""


def test_two_processes_read_each_its_part_of_a_checkpoint(tmp_path):
  # Columns of a text model. Heads of a tower, of which queries, keys and values are one
  # tensor: its rows are of all heads three times.
  models = {str(tmp_path / 'text'): 'fsdp', str(tmp_path / 'tower'): 'tensor'}
  for path, spec in zip(models, (SPEC, making.SEEING), strict=True):
    os.mkdir(path)
    flat = transformer.flatten(making.params(spec))
    hf_weights.save(path, flat.__getitem__, spec)
    files = {'config.json': hf_config.config_of(spec)}
    if spec.vision:
      files['preprocessor_config.json'] = hf_config.preprocessor_of(spec.vision)
    for name, content in files.items():
      pathlib.Path(path, name).write_text(json.dumps(content))
    np.savez(f'{path}/whole.npz', **flat)
    if not spec.vision:
      total = sum(x.nbytes for x in flat.values())
      # Norms and biases, which every device holds, are read by both.
      ends = 'norm', 'bias'
      both = sum(x.nbytes for name, x in flat.items() if name.endswith(ends))
  other = tmp_path / 'another head'
  shutil.copytree(tmp_path / 'text', other)
  tensors = load_file(other / 'model.safetensors')
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  tensors['lm_head.weight'][-1, -1] += 1
  save_file(tensors, other / 'model.safetensors')
  source = READ.replace('MODELS', repr(models)).replace('HEAD', repr(str(other)))
  half = (total - both) // 2 + both
  for text in processes.outputs(processes.scripts(source, 2, tmp_path), tmp_path):
    assert f'{half} read, {half} held' in text
    assert 'lm_head.weight differs' in text
