"""A process reads the bytes of its own shards, and no others."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import making
import numpy as np
import processes
import pytest
import runs

from bapo_jax import sharding
from bapo_jax.models import hf_vision, hf_weights, safetensors_io, transformer

READ = """
import jax, numpy as np
from bapo_jax import sharding
from bapo_jax.models import hf_weights, safetensors_io, transformer
path, whole, shape = PATH, np.load(WHOLE), SHAPE
read, bytes_read = safetensors_io.read, 0
def counting(*where):
  global bytes_read
  found = read(*where)
  bytes_read += found.nbytes
  return found
safetensors_io.read = counting
spec = hf_weights.spec(path, 'float32')
params = hf_weights.load(path, spec, sharding.make(**shape))
held = total = 0
for name, array in transformer.flatten(params).items():
  shards = {str(shard.index): shard for shard in array.addressable_shards}
  for shard in shards.values():
    assert np.array_equal(shard.data, whole[name][shard.index]), name
  held += sum(shard.data.nbytes for shard in shards.values())
  total += array.nbytes
print(f'{bytes_read} read, {held} held, of {total}')
hosts.finish(0)
"""


@pytest.mark.parametrize(
  'shape', [{'data': 1, 'fsdp': 4}, {'data': 1, 'tensor': 2, 'fsdp': 2}]
)
def test_two_processes_read_each_its_half_of_a_checkpoint(tmp_path, shape):
  path = runs.source(tmp_path / 'model')
  spec = hf_weights.spec(path, 'float32')
  one = sharding.make(devices=jax.devices()[:1])
  params = hf_weights.load(path, spec, one)
  flat = {k: np.asarray(x) for k, x in transformer.flatten(params).items()}
  np.savez(tmp_path / 'whole.npz', **flat)
  values = {'PATH': path, 'WHOLE': str(tmp_path / 'whole.npz'), 'SHAPE': shape}
  source = READ
  for name, value in values.items():
    source = source.replace(name, repr(value))
  started = processes.scripts(source, 2, tmp_path)
  statuses, outputs = processes.ended(started, tmp_path)
  assert statuses == [0, 0], outputs
  # Norms, which every device holds, are read by both.
  norms = sum(x.nbytes for name, x in flat.items() if name.endswith('norm'))
  for text in outputs:
    found = re.search(r'(\d+) read, (\d+) held, of (\d+)', text)
    assert found, text
    read, held, total = map(int, found.groups())
    half = (total - norms) // 2 + norms
    assert held == half
    # The file is bfloat16, of two bytes a number.
    assert read == held * 2 // jnp.dtype(spec.dtype).itemsize


# Qwen2.5's kind, 1.05 GB in bfloat16.
LARGE = runs.SOURCE | {
  'vocab_size': 151936,
  'hidden_size': 1024,
  'num_hidden_layers': 18,
  'num_attention_heads': 16,
  'num_key_value_heads': 4,
  'intermediate_size': 3072,
  'head_dim': 64,
}
COUNT = """
import jax
from bapo_jax import sharding
from bapo_jax.models import hf_weights, transformer
def system_count():
  with open('/proc/self/io') as file:
    return int(file.readline().split()[1])
spec, mesh = hf_weights.spec(PATH, 'float32'), sharding.make(**SHAPE)
jax.block_until_ready(jax.numpy.zeros(3) + 1)
before = system_count()
params = jax.block_until_ready(hf_weights.load(PATH, spec, mesh))
held = sum(
  sum({str(s.index): s.data.size for s in x.addressable_shards}.values())
  for x in jax.tree.leaves(params)
)
print(f'{system_count() - before} read, {2 * held} held')  # bfloat16 in the file
hosts.finish(0)
"""


@pytest.mark.nightly
def test_of_a_gigabyte_each_process_reads_its_half_by_the_systems_count(tmp_path):
  path = tmp_path / 'model'
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(LARGE))
  spec = hf_weights.spec(str(path), 'float32')
  shapes = transformer.flatten(transformer.abstract(spec))
  noise = np.random.default_rng(0).normal(size=10**6).astype(jnp.bfloat16)
  hf_weights.save(
    str(path), lambda name: np.resize(noise, shapes[name].shape), spec, 'bfloat16'
  )
  size = (path / safetensors_io.ONE_FILE).stat().st_size
  assert size > 10**9
  source = COUNT.replace('PATH', repr(str(path)))
  source = source.replace('SHAPE', repr({'data': 1, 'fsdp': 4}))
  started = processes.scripts(source, 2, tmp_path)
  statuses, outputs = processes.ended(started, tmp_path)
  assert statuses == [0, 0], outputs
  for text in outputs:
    found = re.search(r'(\d+) read, (\d+) held', text)
    assert found, text
    read, held = map(int, found.groups())
    print(f'of {size} bytes {read} were read for the {held} that are held')
    assert held < 0.501 * size
    # The header is read as well, and modules that are imported on the way.
    assert held <= read < held + 2**22


def test_two_processes_read_each_its_heads_of_a_tower(tmp_path):
  # Queries, keys and values are one tensor: its rows are of all heads three times.
  path, spec = tmp_path / 'model', making.SEEING
  path.mkdir()
  flat = transformer.flatten(making.params(spec))
  hf_weights.save(str(path), flat.__getitem__, spec)
  files = {'config.json': hf_vision.config_of(spec)}
  files['preprocessor_config.json'] = hf_vision.preprocessor_of(spec.vision)
  for name, content in files.items():
    (path / name).write_text(json.dumps(content))
  np.savez(tmp_path / 'whole.npz', **flat)
  values = {'PATH': str(path), 'WHOLE': str(tmp_path / 'whole.npz')}
  source = READ.replace('SHAPE', repr({'data': 1, 'tensor': 4}))
  for name, value in values.items():
    source = source.replace(name, repr(value))
  statuses, outputs = processes.ended(processes.scripts(source, 2, tmp_path), tmp_path)
  assert statuses == [0, 0], outputs


def test_columns_of_rows_are_read_alone(tmp_path: pathlib.Path, monkeypatch):
  x = np.arange(60, dtype=np.float32).reshape(6, 10)
  path = tmp_path / 'model.safetensors'
  safetensors_io.write(str(path), 'float32', {'x': x.shape}, [x])
  tensor = safetensors_io.header(str(path))['x']
  asked = []
  preadv = safetensors_io.os.preadv
  monkeypatch.setattr(
    safetensors_io.os,
    'preadv',
    lambda file, parts, at: asked.append(len(parts[0])) or preadv(file, parts, at),
  )
  found = safetensors_io.read(tensor, 1, 4, (3, 7))
  np.testing.assert_array_equal(found.reshape(3, 4), x[1:4, 3:7])
  assert asked == [16] * 3  # bytes: four numbers of each of three rows
