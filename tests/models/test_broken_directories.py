"""A model directory that cannot be used is refused in one sentence; no code is run."""

import json

import numpy as np
import pytest
import runs
from refusals import sentence_of
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.data import tokenizer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
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


def index(weight_map):
  """An index with these names of tensors and files."""
  listed = json.dumps({'weight_map': weight_map})
  return lambda path: (path / INDEX).write_text(listed)


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
  return index({'a': WEIGHTS, NORM: file})


def stale(path):
  """An index and its shard, of another model than model.safetensors."""
  shard = 'model-00001-of-00001.safetensors'
  (path / shard).write_bytes(b'')
  index({NORM: shard})(path)


def instead(*files):
  """Only files of another program, without contents."""

  def damage(path):
    for file in path.iterdir():
      file.unlink()
    for file in files:
      (path / file).parent.mkdir(parents=True, exist_ok=True)
      (path / file).touch()

  return damage


def adapted(path):
  """Adapters beside the config.json of their model."""
  (path / WEIGHTS).rename(path / 'adapter_model.safetensors')
  (path / 'adapter_config.json').write_text('{}')


def repeats(change):
  """Files with an lm_head.weight: the embedding, changed."""

  def add(held):
    held['lm_head.weight'] = change(held['model.embed_tokens.weight'].copy())

  def damage(path):
    tensors(add)(path)
    edited('config.json', tie_word_embeddings=True)(path)

  return damage


def differing(array):
  array[-1, -1] = 7.0
  return array


CRITIC = {'v_head.summary.weight': np.ones((1, 16), np.float32)}
STEP = '_CHECKPOINT_METADATA'


DAMAGES = {  # name -> (the damage, what the sentence names)
  'config.json is cut': (truncated('config.json', 40), 'config.json'),
  'another size': (edited('config.json', intermediate_size=99), 'mlp.gate_proj'),
  'another head': (repeats(differing), 'lm_head.weight'),
  'a critic': (tensors(lambda held: held.update(CRITIC)), 'critic'),
  'adapters beside a config.json': (adapted, 'adapters'),
  'a checkpoint of a run': (instead(STEP, 'arrays/manifest.ocdbt'), 'bapo_jax export'),
  'weights of llama.cpp': (instead('model-Q4_K_M.gguf'), 'model-Q4_K_M.gguf'),
  'the directory above': (
    instead('checkpoint-500/config.json', 'checkpoint-500/model.safetensors'),
    'checkpoint-500/config.json',
  ),
  'the cache of the hub': (instead('snapshots/0f/config.json'), 'snapshots/0f'),
  'weights are a pickle': (pickled, 'safetensors'),
  'weights are cut': (truncated(WEIGHTS, 9000), WEIGHTS),
  'a tensor is missing': (tensors(lambda held: held.pop(NORM)), NORM),
  'quantized': (
    tensors(lambda held: held.update({NORM: held[NORM].astype(np.int8)})),
    NORM,
  ),
  'the index is damaged': (index({}), INDEX),
  'a file of the index is missing': (indexed('c.safetensors'), 'c.safetensors'),
  'an index leads out': (indexed(f'../other/{WEIGHTS}'), f'../other/{WEIGHTS}'),
  'an index of another model': (stale, INDEX),
  'tokenizer.json is missing': (
    lambda path: (path / 'tokenizer.json').unlink(),
    'tokenizer.json',
  ),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_a_broken_directory_is_refused_in_one_sentence(name, tmp_path):
  damage, named = DAMAGES[name]
  path = runs.source(tmp_path / 'model')
  damage(tmp_path / 'model')
  message = sentence_of(entered, path)
  assert path in message and named in message and len(message) < 600


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


def extra(*files):
  return lambda path: [(path / file).touch() for file in files]


FREQUENCIES = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(2, np.float32)}
ACCEPTED = {
  'a checkpoint of the Trainer': extra(
    'trainer_state.json', 'optimizer.pt', 'scheduler.pt', 'rng_state.pth'
  ),
  'a model into which adapters were merged': extra('adapter_config.json', STEP),
  'a model above other models': lambda path: runs.source(path / 'checkpoint-500'),
  'an index of one file': index({NORM: WEIGHTS}),
  'rotary frequencies': tensors(lambda held: held.update(FREQUENCIES)),
  'a head that repeats it in float32': repeats(lambda array: array.astype(np.float32)),
}


@pytest.mark.parametrize('name', ACCEPTED)
def test_a_directory_with_more_than_a_model_is_read(name, tmp_path):
  path = runs.source(tmp_path / 'model')
  ACCEPTED[name](tmp_path / 'model')
  assert entered(path).backend.encode('2')


def test_a_head_that_differs_is_read_if_the_weights_are_not_tied(tmp_path):
  path = runs.source(tmp_path / 'model')
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  repeats(differing)(tmp_path / 'model')
  assert 'differs from the embedding' in sentence_of(
    hf_weights.load, path, hf_config.read_spec(path, 'float32'), mesh
  )
  edited('config.json', tie_word_embeddings=False)(tmp_path / 'model')
  params = hf_weights.load(path, hf_config.read_spec(path, 'float32'), mesh)
  # The last number of the last row is 7; the others are those of the embedding.
  expected = np.array(params['embed'])
  expected[-1, -1] = 7
  assert expected[-1, -1] != params['embed'][-1, -1]
  np.testing.assert_array_equal(params['head'], expected)


def test_a_model_that_was_partly_downloaded_is_not_a_directory_of_models(tmp_path):
  for file in ('config.json', '1_Pooling/config.json'):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
  lacking = ['tokenizer.json', '*.safetensors']
  assert hf_directory.missing(str(tmp_path)) == lacking
