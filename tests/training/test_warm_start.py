"""The warm start: what it depends on, and how runs share it."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import same, source, tiny
from test_checkpoint import files, flip

from bapo_jax import sharding
from bapo_jax.data import prompts, sources, tokenizer
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.models import transformer
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import checkpoint, config, inputs, policy, sft
from bapo_jax.training.resolve import resolve

FEW = {'sft.clean': 2, 'sft.noisy': 1}


def load(made, workdir):
  return policy.load(resolve(made), str(workdir), PhaseTimer())


def fitted(made, seed):
  """The weights after a warm start with this seed."""
  r = resolve(made)
  imitated = sources.imitated(made.problems, r.data)
  fit = sharding.under(r.mesh, sft.fit)
  fixed = r.tokenizer, r.spec, r.mesh, made.row_length
  return fit(*fixed, imitated, made.sft, seed, r.schedule)


# Norms of what 12 steps change, by policy.WARM_START: raise it if they change, since
# runs share warm starts of the same version.
GOLDEN = {
  1: {
    'embed': 0.199469,
    'final_norm': 0.041577,
    'layers/attn_norm': 0.033842,
    'layers/down': 0.148910,
    'layers/k_bias': 0.029279,
    'layers/o': 0.134718,
    'layers/q': 0.130862,
    'layers/v': 0.134411,
  },
}


def test_a_warm_start_gives_the_weights_of_its_version(one_device):
  made = tiny(**{'sft.clean': 8, 'sft.noisy': 4})
  first = transformer.init(resolve(made).spec, jax.random.key(0))
  first, last = (transformer.flatten(x) for x in (first, fitted(made, 0)))
  changes = {name: float(jnp.linalg.norm(last[name] - first[name])) for name in first}
  expected = GOLDEN[policy.WARM_START]
  assert {name: changes[name] for name in expected} == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def shared(tmp_path, monkeypatch, one_device):
  """Returns (config with a cache, its folder, list of the warm starts computed)."""
  done, fit = [], sft.fit

  def counted(*args):
    done.append(args)
    return fit(*args)

  monkeypatch.setattr(sft, 'fit', counted)
  made = tiny(**FEW, cache=str(tmp_path / 'cache'))
  return made, tmp_path / 'cache' / 'warmstart', done


def test_runs_share_a_warm_start(shared, tmp_path):
  made, folder, done = shared
  first = load(made, tmp_path / 'one')
  other = tiny(**FEW, cache=made.cache, seed=1, **{'clip.rule': 'fixed'})
  assert policy.has_warm_start(resolve(other), str(tmp_path / 'two'))
  assert same(load(other, tmp_path / 'two'), first) and len(done) == 1
  # The workdir is complete: nothing of it is in the cache alone.
  shutil.rmtree(folder)
  assert same(load(other, tmp_path / 'two'), first) and len(done) == 1
  saved = checkpoint.read_saved(policy.warm_start_path(other, str(tmp_path / 'two')))
  assert same(saved('embed'), first['embed'])
  off = tiny(**FEW)
  assert not policy.has_warm_start(resolve(off), str(tmp_path / 'three'))
  assert same(load(off, tmp_path / 'three'), first) and len(done) == 2
  assert not folder.exists()


def test_a_damaged_entry_of_the_cache_is_repeated(shared, tmp_path, capsys):
  made, folder, done = shared
  first = load(made, tmp_path / 'one')
  (entry,) = folder.glob('*/*')
  flip(max(files(entry), key=lambda path: path.stat().st_size))
  assert same(load(made, tmp_path / 'two'), first) and len(done) == 2
  assert 'is damaged' in capsys.readouterr().out
  assert same(load(made, tmp_path / 'three'), first) and len(done) == 2
  assert [*folder.glob('*/*')] == [entry]


def test_a_cache_that_fails_costs_only_time(shared, tmp_path, capsys):
  made, folder, done = shared
  folder.parent.mkdir()
  folder.write_text('a file in its place')
  load(made, tmp_path / 'one')
  assert len(done) == 1 and 'cannot be copied' in capsys.readouterr().out
  load(made, tmp_path / 'one')
  assert len(done) == 1


def test_a_warm_start_is_shared_only_where_it_would_be_equal(shared, monkeypatch):
  made, _, _ = shared
  here = policy._shared_path(resolve(made))
  rules = {'clip.rule': 'fixed', 'loss.rule': 'cispo', 'batch.rule': 'adapted'}
  assert policy._shared_path(resolve(tiny(**FEW, cache=made.cache, **rules))) == here
  for knobs in (
    {'sft.lr': 1e-3},
    {'model.remat': 'full'},
    {'problems.custom.level': 2},
  ):
    r = resolve(tiny(**FEW | knobs, cache=made.cache))
    assert policy._shared_path(r) != here, knobs
  two = tiny(**FEW, cache=made.cache, **{'mesh.data': 2})
  assert policy._shared_path(resolve(two, devices=jax.local_devices()[:2])) != here
  with jax.threefry_partitionable(False):  # other random numbers, and shuffles
    assert policy._shared_path(resolve(made)) != here
  monkeypatch.setenv('XLA_FLAGS', '')
  flags = policy._shared_path(resolve(made))
  monkeypatch.setattr(machine, 'versions', lambda *parts: {'code': 'other'})
  assert len({here, flags, policy._shared_path(resolve(made))}) == 3


# --------------------------------------- the supervised stage: which tokens weigh what


LENGTH = 66
SPEC = transformer.ModelSpec(
  vocab=len(tokenizer.CHARACTERS),
  width=16,
  layers=1,
  heads=2,
  kv_heads=1,
  head_width=8,
  ffn=32,
)


@pytest.fixture(scope='module')
def reader():
  return tokenizer.load('characters', '{problem}\n')


def rows(reader, length=LENGTH, count=40, slip=0.0, repeat=0.0):
  problems = ProblemsConfig(custom={'level': 2, 'train': count, 'test': 1})
  imitated = sources.imitated(problems, sources.read(problems))
  tokens = [prompt.tokens for prompt in prompts.encode(reader, imitated)]
  return imitated, *sft.rows(reader, tokens, imitated, length, 0, slip, repeat)


def test_prompt_weighs_nothing_work_one_and_answer_four(reader):
  box, eos = tokenizer.CHARACTERS.index(r'\boxed{'), tokenizer.CHARACTERS.index('<eos>')
  for (problem, answer, *_), tokens_T, weight_T in zip(*rows(reader), strict=True):
    row = [tokenizer.CHARACTERS[i] for i in tokens_T]
    prompt = len(problem) + 1
    assert ''.join(row[:prompt]) == problem + '\n'
    at, end = row.index(r'\boxed{'), row.index('<eos>')
    assert tokens_T[at] == box and tokens_T[end] == eos
    # The answer is the box, its number, the brace and the end: one digit modulo 7.
    padding = ['<pad>'] * (LENGTH - end - 1)
    assert row[at:] == [r'\boxed{', answer, '}', '<eos>', *padding]
    expected = [0] * prompt + [1] * (at - prompt) + [4] * (end + 1 - at)
    np.testing.assert_array_equal(weight_T, expected + [0] * (LENGTH - end - 1))


def test_rows_are_cut_at_their_length(reader):
  _, *whole = rows(reader)
  _, *cut = rows(reader, 20)
  assert same(cut, [x_NT[:, :20] for x_NT in whole])


# --------- the tokenizer is the model's, and no token is beyond the model's vocabulary


def test_the_tokenizer_is_the_models_unless_another_is_named():
  assert tiny().tokenizer_path == 'characters'
  assert tiny(**{'model.path': 'm'}).tokenizer_path == 'm'
  assert tiny(**{'model.path': 'm', 'tokenizer.path': 't'}).tokenizer_path == 't'
  assert tiny(**{'tokenizer.path': 't'}).tokenizer_path == 't'


def test_a_model_without_a_tokenizer_takes_that_of_another_directory(tmp_path):
  path = source(tmp_path / 'checkpoint-500')
  other = tmp_path / 'base'
  other.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / 'checkpoint-500' / name).rename(other / name)
  knobs = {'model.path': path}
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    inputs.read(tiny(**knobs))
  model = inputs.read(tiny(**knobs, **{'tokenizer.path': str(other)})).model
  assert model.directory == path
  assert model.tokenizer.backend.name_or_path == str(other)


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
  vocab['9'] = 40
  (path / 'tokenizer.json').write_text(json.dumps(held))


@pytest.mark.parametrize(
  ('where', 'named'),
  [
    ('an end token', 'an end token has the id 40'),
    ('a token of prompts', "token '9' has the id 40"),
  ],
)
def test_a_token_beyond_the_vocabulary_is_refused(where, named, tmp_path, one_device):
  path = tmp_path / 'model'
  config = tiny(**{'model.path': source(path)})
  beyond(path, where)
  with pytest.raises(ValueError, match=f'tokenizer.path={path}: {named}'):
    resolve(config)


def test_the_last_row_of_the_vocabulary_is_within_it(tmp_path, one_device):
  config = tiny(**{'model.path': source(tmp_path / 'model')})
  ends = tmp_path / 'model' / 'generation_config.json'
  ends.write_text(json.dumps({'eos_token_id': 39}))
  assert resolve(config).tokenizer.eos == (1, 39)


def seeing(**knobs):
  """The spec of the embedded policy with a tower."""
  config = tiny(**{'model.tower.layers': 2} | knobs)
  return inputs.open_model(config).spec


def test_the_embedded_policy_has_the_tower_of_its_knobs():
  spec = seeing(**{'model.head_width': 16, 'model.tower.ffn': 40})
  v = spec.vision
  assert (v.layers, v.width, v.heads, v.ffn, v.out) == (2, 32, 2, 40, spec.width)
  assert tokenizer_lib.CHARACTERS[v.image_token] == '<image>'
  assert spec.vocab == inputs.open_model(tiny()).spec.vocab > v.image_token
  assert spec.mrope == (2, 3, 3)  # of 8 pairs, as Qwen2.5-VL has 16, 24, 24 of 64


def test_a_warm_start_is_found_by_what_it_depends_on():
  tower = {'model.tower.layers': 1}
  without = {'model.tower.ffn': 8}
  kinds = [{}, without, {'sft.seed': 1}, {'problems.custom.seed': 1}]
  kinds += [tower, tower | without, dict.fromkeys(config.SOURCES, 'synthetic')]
  paths = [policy.warm_start_path(tiny(**knobs), 'w') for knobs in kinds]
  assert paths[0] == paths[1] and len(set(paths)) == 6
