"""What a run saved is what an exported directory holds, with all that loads it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pictured
import pytest
import transformers
from flax import traverse_util
from runs import SOURCE, saved, source, tiny, trained
from safetensors.numpy import load_file

from bapo_jax import sharding
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.run import experiment
from bapo_jax.tools import export
from bapo_jax.training import checkpoint
from bapo_jax.training.resolve import Model


@pytest.fixture(scope='module', params=['embedded', 'from a directory'])
def run(request, tmp_path_factory):
  """(config, workdir, its parameters) of a run that has a checkpoint of step 1."""
  path = tmp_path_factory.mktemp('run')
  workdir = str(path / 'work')
  if request.param == 'embedded':
    config, params = trained(workdir)
  else:
    name = source(path / 'source')
    config = tiny(**{'model.path': name, 'tokenizer.path': name})
    experiment.claim(workdir, config)
    params = oracles.noisy(hf_config.read_spec(name, 'float32'), 1)
    params = jax.device_put(params, sharding.shardings(params, sharding.make(2, 2, 2)))
    saved(workdir, params)
  return config, workdir, traverse_util.flatten_dict(params, sep='/').__getitem__


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_was_trained_is_what_is_exported(run, dtype, tmp_path):
  config, workdir, get = run
  to = tmp_path / 'out'
  assert export.export(config, workdir, str(to), dtype, 3000) == 0
  assert not list(tmp_path.glob('*.part'))
  files = sorted(to.glob('*.safetensors'))
  assert len(files) > 1
  for file in files:
    held = load_file(file)
    assert {x.dtype for x in held.values()} == {jnp.dtype(dtype)}
    assert sum(x.nbytes for x in held.values()) <= 3000
  spec = hf_config.read_spec(str(to), config.model.compute)
  found = traverse_util.flatten_dict(
    hf_weights.load(str(to), spec, sharding.make()), sep='/'
  )
  assert set(found) == set(transformer.describe(spec))
  for name, array in found.items():
    expected = np.asarray(jnp.asarray(get(name)).astype(dtype).astype('float32'))
    np.testing.assert_array_equal(np.asarray(array), expected)


@pytest.mark.slow
def test_everything_that_loads_it_is_there(run):
  config, workdir, _ = run
  assert export.export(config, workdir, '', 'bfloat16', 10**9) == 0
  to = f'{workdir}/export/1'
  described = transformers.AutoConfig.from_pretrained(to)
  written = json.loads(pathlib.Path(to, 'config.json').read_text())
  assert written['torch_dtype'] == 'bfloat16' and 'dtype' not in written
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(to)
  problem = '3 * 5 = '
  assert (
    tokenizer(problem)['input_ids'] == tokenizer_lib.characters()(problem)['input_ids']
  )
  prompt = tokenizer.apply_chat_template(
    [{'role': 'user', 'content': problem}], tokenize=False
  )
  generation = transformers.GenerationConfig.from_pretrained(to)
  if config.model.path:
    assert described.architectures == ['LlamaForCausalLM']
    assert written == {k: v for k, v in SOURCE.items() if k != 'dtype'} | {
      'torch_dtype': 'bfloat16'
    }
    assert (generation.eos_token_id, generation.top_p) == ([1, 4], 0.95)
    assert prompt == f'Q: {problem}\n'
  else:
    assert described.architectures == ['Qwen2ForCausalLM']
    assert described.eos_token_id == generation.eos_token_id == [1]
    assert described.pad_token_id == generation.pad_token_id == 0
    assert generation.temperature == config.sampler.temperature
    assert prompt == f'{problem}\n'
  # We read it as anybody's model: the same policy, the same ends.
  assert tokenizer_lib.load(to, config.tokenizer.template).eos == (
    (1, 4) if config.model.path else (1,)
  )
  with pytest.raises(ValueError, match=r'export/1 is not empty; give a new directory'):
    export.export(config, workdir, '', 'bfloat16', 10**9)


@pytest.mark.slow
def test_another_model_is_refused(run, tmp_path):
  config, workdir, _ = run
  other = config.with_values(model={'ffn': 5})
  with pytest.raises(ValueError) as error:
    export.export(other, workdir, str(tmp_path / 'out'), 'float32', 10**9)
  assert 'was trained with model.ffn=16, not 5' in str(error.value)
  assert not list(tmp_path.iterdir())


def test_a_workdir_without_a_checkpoint_is_left_alone(tmp_path):
  for workdir in (tmp_path, tmp_path / 'none'):
    with pytest.raises(ValueError, match='holds no checkpoint; train there first'):
      export.export(tiny(), str(workdir), '', 'float32', 10**9)
  assert not list(tmp_path.iterdir())


SIZE = {'shortest_edge': 784, 'longest_edge': 1568}


@pytest.mark.parametrize(
  ('pictures', 'alone'),
  [
    ({'preprocessor_config.json': {'min_pixels': 784, 'do_rescale': True}}, {}),
    # As transformers 5 writes it: within the processor. That of version 4 is added.
    (
      {'processor_config.json': {'image_processor': {'size': SIZE}, 'other': 3}},
      {'preprocessor_config.json': {'size': SIZE}},
    ),
  ],
  ids=['transformers 4', 'transformers 5'],
)
def test_what_a_source_says_of_its_pictures_is_preserved(tmp_path, pictures, alone):
  source, to = tmp_path / 'source', tmp_path / 'out'
  source.mkdir(), to.mkdir()
  config = hf_config.config_of(making.SEEING) | {'video_token_id': 7}
  files = {'config.json': config} | pictures
  for name, content in files.items():
    (source / name).write_text(json.dumps(content))
  config = tiny(**{'model.path': str(source)})
  model = Model(str(source), pictured.reader(), making.SEEING)
  export.write_configs(str(to), config, model, 'bfloat16')
  for name, content in (files | alone).items():
    written = json.loads((to / name).read_text())
    written.pop('torch_dtype', None)
    assert written == content
  now, before = (hf_config.read_spec(str(path), 'float32') for path in (to, source))
  assert now == before


def test_the_newest_checkpoint_is_by_number(tmp_path):
  for name in ('9', '10', '11.orbax-checkpoint-tmp', 'x'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert checkpoint.choose(str(tmp_path)) == 10
  assert checkpoint.choose(str(tmp_path / 'none')) is None


def test_one_parameter_is_read_without_the_others(tmp_path):
  params = oracles.noisy(
    transformer.ModelSpec(
      vocab=8, width=4, layers=2, heads=2, kv_heads=1, head_width=2, ffn=4
    ),
    0,
  )
  devices = sharding.make(2, 2, 2)
  placed = jax.device_put(params, sharding.shardings(params, devices))
  saved(tmp_path, placed)
  get = checkpoint.read_params(str(tmp_path), 1)
  for path, array in traverse_util.flatten_dict(params, sep='/').items():
    found = get(path)
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, array)
