"""A model directory that cannot be used is refused in one sentence; no code is run."""

import json

import numpy as np
import pytest
import runs
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.data import tokenizer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
NORM = 'model.norm.weight'


def entered(path):
  """Reads a model as a run does: the directory, config, weights, tokenizer."""
  hf_directory.find(path, 'model.path')
  spec = hf_config.read_spec(path, 'float32')
  hf_weights.load(path, spec, sharding.make())
  return tokenizer.load(path, '{problem}\n')


def edited(file, **options):
  def damage(path):
    before = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(before | options))

  return damage


def written(file, content):
  return lambda path: (path / file).write_bytes(content)


def truncated(file, size):
  return lambda path: (path / file).write_bytes((path / file).read_bytes()[:size])


def tensors(change):
  """Changes the dict of tensors of the weights in place."""

  def damage(path):
    held = load_file(path / WEIGHTS)
    change(held)
    save_file(held, path / WEIGHTS)

  return damage


def pickled(path):
  (path / WEIGHTS).rename(path / 'pytorch_model.bin')


def indexed(file):
  """An index that names another file for one tensor."""
  listed = {'weight_map': {'a': WEIGHTS, NORM: file}}
  return written(INDEX, json.dumps(listed).encode())


DAMAGES = {  # name -> (the damage, what the sentence names)
  'config.json is cut': (truncated('config.json', 40), 'config.json'),
  'config.json is missing': (lambda p: (p / 'config.json').unlink(), 'config.json'),
  'another size': (edited('config.json', intermediate_size=99), 'mlp.gate_proj'),
  'more layers': (edited('config.json', num_hidden_layers=3), 'layers.2'),
  'rope is a list': (edited('config.json', rope_parameters=[1]), 'config.json'),
  'weights are missing': (lambda path: (path / WEIGHTS).unlink(), 'safetensors'),
  'weights are a pickle': (pickled, 'safetensors'),
  'weights are cut': (truncated(WEIGHTS, 9000), WEIGHTS),
  'the header is cut': (truncated(WEIGHTS, 100), WEIGHTS),
  'a header of 8 GB': (written(WEIGHTS, (8 * 10**9).to_bytes(8, 'little')), WEIGHTS),
  'a tensor is missing': (tensors(lambda held: held.pop(NORM)), NORM),
  'NaN': (tensors(lambda held: held[NORM].fill(np.nan)), NORM),
  'quantized': (
    tensors(lambda held: held.update({NORM: held[NORM].astype(np.int8)})),
    NORM,
  ),
  'the index is damaged': (written(INDEX, b'{"weight_map": {}}'), INDEX),
  'a file of the index is missing': (indexed('c.safetensors'), 'c.safetensors'),
  'tokenizer.json is missing': (
    lambda path: (path / 'tokenizer.json').unlink(),
    'tokenizer.json',
  ),
  'tokenizer.json is cut': (truncated('tokenizer.json', 100), ''),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_a_broken_directory_is_refused_in_one_sentence(name, tmp_path):
  damage, named = DAMAGES[name]
  path = runs.source(tmp_path / 'model')
  damage(tmp_path / 'model')
  with pytest.raises(ValueError) as error:
    entered(path)
  message = str(error.value)
  assert path in message and named in message
  assert '\n' not in message and len(message) < 600


def test_code_in_a_model_directory_is_not_run(tmp_path):
  path = tmp_path / 'model'
  runs.source(path)
  code = f'open({str(tmp_path / "ran")!r}, "w")\n'
  (path / 'custom.py').write_text(code)
  edited('config.json', auto_map={'AutoConfig': 'custom.C', 'AutoModel': 'custom.M'})(
    path
  )
  edited('tokenizer_config.json', auto_map={'AutoTokenizer': ['custom.T', 'custom.T']})(
    path
  )
  assert entered(str(path)).backend.encode('2')
  assert not (tmp_path / 'ran').exists()
