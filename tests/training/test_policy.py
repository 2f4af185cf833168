"""The tokenizer is the model's, and no token is beyond the model's vocabulary."""

import json

import making
import pytest
from runs import source, tiny

from bapo_jax import main
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.training import inputs, policy, resolve


def test_the_tokenizer_is_the_models_unless_another_is_named():
  assert tiny().tokenizer.path == 'characters'
  assert tiny(**{'model.path': 'm'}).tokenizer.path == 'm'
  assert tiny(**{'model.path': 'hub:a/m@v1'}).tokenizer.path == 'hub:a/m@v1'
  assert tiny(**{'model.path': 'm', 'tokenizer.path': 't'}).tokenizer.path == 't'
  assert tiny(**{'tokenizer.path': 't'}).tokenizer.path == 't'


def test_a_model_without_a_tokenizer_takes_that_of_another_directory(tmp_path):
  path = source(tmp_path / 'checkpoint-500')
  other = tmp_path / 'base'
  other.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / 'checkpoint-500' / name).rename(other / name)
  knobs = {'model.path': path, 'problems.source': 'synthetic'}
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    inputs.read(tiny(**knobs))
  model = inputs.read(tiny(**knobs, **{'tokenizer.path': str(other)})).model
  assert model.directory == path
  assert model.tokenizer.backend.name_or_path == str(other)


@pytest.mark.parametrize('variant', ['7b', '32b'])
def test_a_variant_takes_the_tokenizer_of_the_model_given(variant):
  file = f'configs/aime.py:{variant}'
  given = ['--config.model.path=models/mine', '--config.mesh.tensor=1']
  config = main.read_config(file, given)
  assert config.model.path == config.tokenizer.path == 'models/mine'
  config = main.read_config(file, given[1:])
  assert config.model.path == config.tokenizer.path != 'models/mine'


def test_a_model_with_a_tower_sees_and_its_tower_is_frozen(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(hf_config.config_of(making.SEEING)))
  config = tiny(**{'model.path': str(tmp_path)})
  found = inputs.read_spec(config, str(tmp_path), None)
  assert found.vision == making.SEEING.vision and found.mrope == making.SEEING.mrope
  for knobs, sees in (({}, False), ({'model.tower.layers': 1}, True)):
    assert (inputs.open_model(tiny(**knobs)).spec.vision is not None) == sees


@pytest.mark.parametrize('knobs', [{}, {'lora.rank': 2, 'model.tower.layers': 1}])
def test_a_tower_that_cannot_be_trained_is_refused(knobs):
  with pytest.raises(ValueError, match=r'model\.train_tower=True'):
    inputs.open_model(tiny(**{'model.train_tower': True} | knobs))


def beyond(path, where):
  """Gives a token of the model the id 40, one beyond its vocabulary of 40."""
  if where == 'an end token':
    ends = {'eos_token_id': [1, 40]}
    (path / 'generation_config.json').write_text(json.dumps(ends))
    return
  held = json.loads((path / 'tokenizer.json').read_text())
  vocab = held['model']['vocab']
  if where == 'an added token':  # ids go on after the vocabulary
    vocab |= {f'w{i}': i for i in range(29, 40)}
    held['added_tokens'].append(held['added_tokens'][0] | {'id': 40, 'content': '<x>'})
  else:
    vocab['9'] = 40
  (path / 'tokenizer.json').write_text(json.dumps(held))


@pytest.mark.parametrize(
  ('where', 'named'),
  [
    ('an end token', 'an end token has the id 40'),
    ('an added token', "token '<x>' has the id 40"),
    ('a token of prompts', "token '9' has the id 40"),
  ],
)
def test_a_token_beyond_the_vocabulary_is_refused(where, named, tmp_path, one_device):
  path = tmp_path / 'model'
  config = tiny(**{'model.path': source(path)})
  beyond(path, where)
  with pytest.raises(ValueError, match=f'tokenizer.path={path}: {named}'):
    resolve.resolve(config)


def test_the_last_row_of_the_vocabulary_is_within_it(tmp_path, one_device):
  config = tiny(**{'model.path': source(tmp_path / 'model')})
  ends = tmp_path / 'model' / 'generation_config.json'
  ends.write_text(json.dumps({'eos_token_id': 39}))
  assert resolve.resolve(config).tokenizer.eos == (1, 39)


def seeing(**knobs):
  """The spec of the embedded policy with a tower."""
  config = tiny(**{'model.tower.layers': 2} | knobs)
  return inputs.open_model(config).spec


def test_the_embedded_policy_has_the_tower_of_its_knobs():
  spec = seeing(**{'model.head_width': 16, 'model.tower.ffn': 40})
  v = spec.vision
  assert (v.layers, v.width, v.heads, v.ffn, v.out) == (2, 32, 2, 40, spec.width)
  assert (v.full_layers, v.patch, v.window, v.merge) == ((1,), 7, 28, 2)
  assert v.least_pixels == 28 * 28
  assert tokenizer_lib.CHARACTERS[v.image_token] == '<image>'
  assert spec.vocab == inputs.open_model(tiny()).spec.vocab > v.image_token
  assert spec.mrope == (2, 3, 3)  # of 8 pairs, as Qwen2.5-VL has 16, 24, 24 of 64
  for width in (2, 6, 8, 64):
    assert 2 * sum(seeing(**{'model.head_width': width}).mrope) == width


def test_a_warm_start_is_found_by_what_it_depends_on():
  without = {'model.tower.ffn': 8, 'problems.drawn.kind': 'dials'}
  other = {'problems.source': 'drawn', 'problems.test_source': 'drawn'}
  tower = {'model.tower.layers': 1}
  kinds = {}, without, other, other | tower, other | tower | without, other | without
  paths = [policy.warm_start_path(tiny(**knobs), 'w') for knobs in kinds]
  assert paths[0] == paths[1] and len(set(paths)) == 5
