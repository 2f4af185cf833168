"""Knobs that do not fit together are refused; the values that a config offers fit."""

import functools

import jax
import pytest
from refusals import sentence_of
from runs import CHAINS, plain, tiny
from three_problems import TOKENIZER

from bapo_jax.algorithms import clip
from bapo_jax.training import config as config_lib
from bapo_jax.training import refusals, resolve
from bapo_jax.training.config import parse

BAND = {'batch.rule': 'adapted'}
QUANTISED = {
  'sampler.actor_dtype': 'int8',
  'learner.recompute_logprobs': 'on',
  'rollout.weight_sync_interval': 2,
}
REFUSED = [  # knobs, what the sentence must name; ranges of one knob: test_knobs.py
  ({'rewards.shaping.overlong_cache': 41}, ['overlong_cache=41', 'max_new_tokens=40']),
  ({'evaluate.k': (1, 4)}, ['evaluate.k=(1, 4)', 'pass@4']),
  (
    {'evaluate.sampling.temperature': 1e-40},
    ['evaluate.sampling.temperature=1e-40', 'float32', '0 for greedy', '0.001 to 1000'],
  ),
  ({'clip.low_step': 0.0}, ['clip.low_step=0.0']),
  ({'clip.high_step': 2.0}, ['clip.high_step=2.0']),
  ({'clip.low_step': 1e-9}, ['clip.low_step=1e-09']),
  (
    {'clip.resolution': 'continuous', 'clip.high': (1.0, 1e9)},
    ['clip.high=(1.0, 1000000000.0)', 'width 100 or less'],
  ),
  ({'clip.sources': ()}, ['clip.sources=()']),
  (
    {'buffer.reevaluate': 3, 'buffer.capacity': 2},
    ['buffer.reevaluate=3', 'buffer.capacity=2'],
  ),
  (
    {'buffer.thresholds.rule': 'moving', 'buffer.thresholds.low': (0.1, 0.9)},
    ['buffer.thresholds.low'],
  ),
  ({'sft.heads': 3}, ['sft.heads=3', 'kv_heads=2']),
  ({'tokenizer.template': 'Answer!'}, ["tokenizer.template='Answer!'"]),
  ({'rollout.max_tokens_per_step': 6.0}, ['max_off_policy_steps=0']),
  ({'sft.tower.width': 30}, ['sft.tower.width=30']),
  (
    {'sft.tower.layers': 2, 'sft.experts': 4},
    ['sft.tower.layers=2', ' experts=4', 'text-only'],
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
    {'batch.rule': 'replay', 'batch.replay_ratio': 2, 'buffer.capacity': 127},
    ['capacity=127', 'replay_ratio=2', '128'],
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    ['count=64', 'learner.minibatches=48'],
  ),
  # A rule that has nothing to use.
  (
    {'clip.sources': ('reused', 'reevaluated')},
    ["clip.sources=('reused', 'reevaluated')", "batch.rule='fresh_only'"],
  ),
  (
    {f'batch.weights.{x}': 0.0 for x in ('fresh', 'reused')} | {'batch.rule': 'replay'},
    ['batch.weights.fresh=0, batch.weights.reused=0 leaves no row'],
  ),
  (
    {'batch.rule': 'adapted', 'buffer.thresholds.rule': 'everything'},
    ["batch.rule='adapted'", 'no problem hard', "batch.rule='replay'"],
  ),
  # Of 8 responses 3/8 is the first count above .3; of 7, 2/7 lies below and 3/7 above.
  (BAND | {'buffer.thresholds.reusable': (0.3, 0.3)}, ['reusable=(0.3, 0.3)']),
  # All right: no group with mixed verdicts.
  (BAND | {'buffer.thresholds.reusable': (0.95, 1.0)}, ['(0.95, 1.0)']),
  (
    BAND
    | {
      'buffer.thresholds.rule': 'moving',
      'buffer.thresholds.low': (0.3, 0.3),
      'buffer.thresholds.high': (0.3, 0.3),
    },
    ['buffer.thresholds.low=(0.3, 0.3) with high=(0.3, 0.3)'],
  ),
  (
    QUANTISED,
    ["recompute_logprobs='on'", "actor_dtype='int8'", 'weight_sync_interval=2'],
  ),
  (
    {'batch.rule': 'learnable_only', 'rollout.depth': 1},
    ["batch.rule='learnable_only'", 'batch.max_extra_rounds', 'rollout.depth=0'],
  ),
  ({'mesh.rollout': 2}, ['mesh.rollout=2', 'rollout.depth=1']),
  (
    {'sampler.stop': ('a', 'b'), 'sampler.done_check_lag': 1},
    ["sampler.stop=('a', 'b')", 'sampler.done_check_lag=0'],
  ),
  ({'learner.share_prompts': 3}, ['share_prompts=3', 'sampler.group_size=8']),
  ({'sampler.stop': ('a', '')}, ['sampler.stop', 'a tuple of strings']),
  ({'rollout.given': 8}, ['rollout.given=8', 'sampler.group_size=8', 'at most 7']),
  (
    {'rollout.given': 1, 'batch.rule': 'adapted'},
    ['rollout.given=1', "batch.rule='adapted'", "'learnable_only'"],
  ),
  ({'rollout.given': 1, 'rollout.records': 'x'}, ['rollout.given=1', 'records=x']),
]


@pytest.mark.parametrize(('knobs', 'named'), REFUSED)
def test_a_refusal_names_the_knobs_that_do_not_fit(knobs, named):
  sentence = sentence_of(parse, plain(**knobs))
  for words in named:
    assert words in sentence


def test_a_stop_string_that_the_policy_cannot_write_is_refused():
  check = functools.partial(refusals._check_stop, TOKENIZER)
  check(('7=', '\\boxed{'))
  assert "no tokens for 'é'" in sentence_of(check, ('7', 'é'))


def test_a_refusal_waits_for_its_knobs():
  given = {'learner.minibatches': 48, 'mesh.rollout': 2}
  with pytest.raises(refusals.Refused) as error:
    parse(plain(**given, **{'prompts.count': None}))
  (refusal,) = error.value.refusals
  assert refusal.startswith('mesh.rollout=2 ')
  with pytest.raises(refusals.Refused) as error:
    parse(plain(**given))
  _, other = error.value.refusals
  assert 'learner.minibatches=48 ' in other


def test_a_rule_refuses_for_itself():
  class Never(clip.Fixed):
    def refuses(self, config):
      yield 'never'

  config = tiny().model_copy(update={'clip': Never()})
  assert [*refusals.of_config(config)] == ['never']


def test_a_rule_that_has_something_to_use_is_accepted():
  reusable = 'buffer.thresholds.reusable'
  for knobs in (
    {reusable: (0.3, 0.3)},  # no rule reads the buffer
    BAND | {reusable: (0.375, 0.4)},  # 3 of 8
    BAND | {reusable: (0.3, 0.3), 'sampler.group_size': 10},
    BAND | {reusable: (0.0625, 0.0625)},  # below 1/8: says that no group is reused
    BAND | {'buffer.thresholds.rule': 'everything', 'buffer.reevaluate': 0},
    QUANTISED | {'rollout.weight_sync_interval': 1},
    QUANTISED | {'lora.rank': 1},  # the adapters of the actor are kept
    # Falls from .8 to .3: 6 of 8 on the way, though neither end is a pass rate.
    BAND
    | {
      'buffer.thresholds.rule': 'moving',
      'buffer.thresholds.low': (0.8, 0.3),
      'buffer.thresholds.high': (0.8, 0.3),
    },
  ):
    parse(plain(**knobs))


def test_rows_and_kernels_fit_the_mesh():
  # 12 prompts x 4 responses / 4 minibatches = 12 rows over 8 shards.
  knobs = {'prompts.count': 12, 'learner.minibatches': 4, 'sampler.group_size': 4}
  config = parse(plain(**knobs, **{'mesh.data': 4, 'mesh.fsdp': 2}))
  assert '12 responses' in sentence_of(resolve.make_mesh, config)
  for name in ('max_num_seqs', 'prefill_batch_size'):
    with pytest.raises(ValueError, match=rf'sampler\.{name}=12'):
      resolve.make_mesh(parse(plain(**{f'sampler.{name}': 12})))
  sound = parse(plain(**{'learner.grad_accum_steps': 2}))
  assert resolve.make_mesh(sound).size == len(jax.devices()) == 8
  with pytest.raises(ValueError, match='splash'):  # a kernel that a CPU lacks
    resolve.resolve(parse(plain(**{'model.attention': 'splash'})))
  experts = {'sft.experts': 6, 'mesh.data': 2, 'mesh.tensor': 4}
  with pytest.raises(ValueError, match=r'experts=6 .*mesh\.tensor=4'):
    resolve.resolve(parse(plain(**experts)))


def test_changed_knobs_are_those_that_a_user_changed():
  assert config_lib.changed(parse(plain(title='mine'))) == {}
  given = {
    'model.path': 'models/m',
    'problems.source': 'a',
    'problems.test_source': 'b',
  }
  found = config_lib.changed(parse(plain(**given, **{'lora.alpha': 8.0})))
  assert found.keys() == {*given, 'lora.alpha'}
  assert found['lora.alpha'] == (8.0, 32.0)
  derived = parse(plain(**given, steps=None))
  assert config_lib.changed(derived).keys() == given.keys()


def test_arguments_may_complete_the_values_of_a_file():
  given = {'problems.source': 'a.jsonl', 'problems.test_source': 'b.jsonl'}
  flags = [f'--config.{name}={x}' for name, x in given.items()]
  assert config_lib.overrides(flags, plain(**dict.fromkeys(given))) == given
  assert config_lib.overrides(flags[1:], plain(**{'problems.source': 'a.jsonl'}))


def test_both_sources_may_be_another_function():
  given = [f'--config.{name}={CHAINS}' for name in config_lib.SOURCES]
  found = config_lib.overrides([*given, '--config.problems.custom.seed=2'], plain())
  assert found['problems.custom.seed'] == 2
