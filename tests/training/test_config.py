"""Knobs that do not fit together are refused; the values that a config offers fit."""

import json

import jax
import pytest
from runs import plain, tiny

from bapo_jax.training import config as config_lib
from bapo_jax.training import resolve, rules
from bapo_jax.training.config import parse
from configs import aime

REFUSED = [  # knobs, what the sentence must name; ranges of one knob: test_knobs.py
  ({'rewards.shaping.overlong_cache': 41}, ['overlong_cache=41', 'max_new_tokens=40']),
  ({'evaluate.k': (1, 4)}, ['evaluate.k=(1, 4)', 'pass@4']),
  ({'sampler.temperature': 1e-40}, ['sampler.temperature=1e-40', 'from 0.001 to']),
  (
    {'evaluate.sampling.temperature': 1e-40},
    ['evaluate.sampling.temperature=1e-40', 'float32', '0 for greedy', '0.001 to 1000'],
  ),
  ({'mesh.data': 0}, ['mesh.data=0']),
  ({'model.heads': 3}, ['model.heads=3', 'kv_heads=2']),
  ({'lora.targets': 'layers/(q'}, ["lora.targets='layers/(q'"]),
  ({'rollout.max_tokens_per_step': 6.0}, ['max_off_policy_steps=0']),
  ({'sampler.max_new_tokens': 40_000}, ['32768 positions']),
  ({'model.tower.width': 30}, ['model.tower.width=30']),
  (
    {'tokenizer.path': 'characters', 'model.path': 'models/m'},
    ["tokenizer.path='characters'", 'models/m'],
  ),
  (
    {'rollout.max_tokens_per_step': 0.5, 'rollout.max_off_policy_steps': 1},
    ['max_tokens_per_step=0.5'],
  ),
  (
    {'buffer.thresholds.rule': 'threshold_free', 'sampler.group_size': 7},
    ["rule='threshold_free'", 'sampler.group_size=7'],
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 2, 'buffer.capacity': 127},
    ['capacity=127', 'replay_ratio=2', '128'],
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    ['count=64', 'learner.minibatches=48'],
  ),
  (
    {'prompts.count': 10, 'learner.minibatches': 4},
    ['prompts.count=10', 'learner.minibatches=4'],
  ),
]


@pytest.mark.parametrize(('knobs', 'named'), REFUSED)
def test_a_refusal_names_the_knobs_that_do_not_fit(knobs, named):
  with pytest.raises(ValueError) as error:
    parse(plain(**knobs))
  for words in named:
    assert words in str(error.value)


def test_rows_and_kernels_fit_the_mesh():
  # 12 prompts x 4 responses / 4 minibatches = 12 rows over 8 shards.
  knobs = {'prompts.count': 12, 'learner.minibatches': 4, 'sampler.group_size': 4}
  config = parse(plain(**knobs, **{'mesh.data': 4, 'mesh.fsdp': 2}))
  with pytest.raises(ValueError, match='12 responses'):
    resolve.make_mesh(config)
  for name in ('max_num_seqs', 'prefill_batch_size'):
    with pytest.raises(ValueError, match=rf'sampler\.{name}=12'):
      resolve.make_mesh(parse(plain(**{f'sampler.{name}': 12})))
  sound = parse(plain(**{'learner.grad_accum_steps': 2}))
  assert resolve.make_mesh(sound).size == len(jax.devices()) == 8
  with pytest.raises(ValueError, match='splash'):  # a kernel that a CPU lacks
    resolve.make_mesh(parse(plain(**{'model.attention': 'splash'})))


@pytest.mark.parametrize('variant', ['tiny', 'recipe'])
def test_variants_that_need_no_download_are_sound(variant):
  config = parse(aime.get_config(variant).to_dict())
  bound = rules.bind(config)
  assert callable(bound.batch) and callable(bound.clip)
  resolve.check_available(config)


def test_a_config_comes_back_from_its_plain_values_and_from_json():
  for config in (parse({}), tiny()):
    values = config.model_dump()
    assert parse(values) == config
    assert config_lib.from_json(json.loads(json.dumps(values))) == config
