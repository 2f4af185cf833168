"""Knobs of the algorithms: a bad value is refused in one sentence."""

import math

import pytest
from refusals import nested, refusal

from bapo_jax.algorithms import clip, loss, replay_buffer
from bapo_jax.training.config import parse

INF, NAN = math.inf, math.nan
SHARE, LOWS = 'a number from 0 to 1', 'each above 0 and at most 1'
HIGHS, COUNT = 'each from 1 to 1e+09', 'an integer from 1 to 2147483647'
RISING, SHARES = 'a tuple of 2 numbers that do not fall', 'each from 0 to 1'
BALANCED, RECIPE, FIXED = 'clip.balanced', 'clip.recipe', 'clip.fixed'
BUFFER, THRESHOLDS, WEIGHTS = 'buffer', 'buffer.thresholds', 'batch.weights'
CLIPS = "one of 'unclipped', 'fixed', 'balanced', 'recipe'"
LOSSES = "one of 'clipped', 'decoupled', 'sequence', 'cispo', 'tis'"
BATCHES = "one of 'fresh_only', 'learnable_only', 'replay', 'adapted'"
SOURCES = "a tuple of values, each one of 'fresh', 'reevaluated', 'reused'"
GIVE = [  # section, knob, value, what to give
  ('clip', 'rule', 'balnced', CLIPS),
  (BALANCED, 'target', 1.5, SHARE),
  (BALANCED, 'target', -0.1, SHARE),
  (BALANCED, 'target', NAN, SHARE),
  (BALANCED, 'low', (0.9, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.0, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (-0.1, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, 1.1), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, NAN), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6,), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, 0.7, 0.8), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, '0.9'), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, True), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', [0.6, 0.9], f'{RISING}, {LOWS}'),
  (BALANCED, 'low', 0.6, f'{RISING}, {LOWS}'),
  (BALANCED, 'high', (3.0, 1.2), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high', (0.9, 1.2), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high', (1.2, INF), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high_step', -0.05, 'a number of at least 0'),
  (BALANCED, 'contribution', 'loss', "one of 'gradient', 'surrogate'"),
  (BALANCED, 'weight', 'mu', "one of 'one', 'behaviour'"),
  (BALANCED, 'order', 'up', "one of 'upper', 'lower'"),
  (BALANCED, 'resolution', 'fine', "one of 'step', 'continuous'"),
  (BALANCED, 'tolerance', 0.0, 'a number from 1e-06 to 0.1'),
  (BALANCED, 'sources', ('old',), SOURCES),
  (BALANCED, 'sources', 'fresh', SOURCES),
  (BALANCED, 'reused_high', 1.0, 'a number above 1 or inf'),
  (BALANCED, 'dual', 0.5, 'a number above 1 or inf'),
  (RECIPE, 'positive_to_negative', -1.0, 'a number from 0 to 1e+09'),
  (RECIPE, 'high', (2.0, 1.2), f'{RISING}, {HIGHS}'),
  (FIXED, 'low', -0.1, SHARE),
  (FIXED, 'high', 0.9, 'a number of at least 1 or inf'),
  (FIXED, 'high', -INF, 'a number of at least 1 or inf'),
  (FIXED, 'dual', 1.0, 'a number above 1 or inf'),
  ('loss', 'rule', 'ppo', LOSSES),
  ('loss', 'aggregate', 'mean', "one of 'token', 'sequence', 'constant'"),
  ('loss', 'kl', -0.1, 'a number from 0 to 1000'),
  ('loss', 'kl', INF, 'a number from 0 to 1000'),
  ('loss', 'kl', 1e300, 'a number from 0 to 1000'),
  ('loss', 'kl', True, 'a number from 0 to 1000'),
  ('loss', 'kl_direction', 'mu', "one of 'behavior_policy', 'policy_behavior'"),
  ('loss.decoupled', 'beyond_cap', 'drop', "one of 'truncate', 'mask'"),
  ('loss.clipped', 'limit', 0.0, 'a number above 0 or inf'),
  ('loss.clipped', 'limit', -1.0, 'a number above 0 or inf'),
  ('loss.decoupled', 'cap', -1.0, 'a number above 0 or inf'),
  ('loss.tis', 'cap', 0.0, 'a number above 0 or inf'),
  ('advantage.group_relative', 'eps', -1e-6, SHARE),
  (BUFFER, 'capacity', 0, 'an integer from 1 to 1048576'),
  (BUFFER, 'max_off_policy_steps', 0, COUNT),
  (BUFFER, 'max_reuse', 0, COUNT),
  (BUFFER, 'max_reuse', 2**31, COUNT),
  (BUFFER, 'max_reuse', 3.0, COUNT),
  (BUFFER, 'max_reuse', True, COUNT),
  (BUFFER, 'max_reuse', None, COUNT),
  (BUFFER, 'reevaluate', -1, 'an integer from 0 to 2147483647'),
  (BUFFER, 'reeval_interval', 0, COUNT),
  (THRESHOLDS, 'rule', 'free', "one of 'fixed', 'moving', 'threshold_free',"),
  (f'{THRESHOLDS}.fixed', 'hard', 1.2, 'a number of at least 0 and below 1'),
  (f'{THRESHOLDS}.fixed', 'hard', 1.0, 'a number of at least 0 and below 1'),
  (f'{THRESHOLDS}.fixed', 'reusable', (0.7, 0.2), f'{RISING}, {SHARES}'),
  (f'{THRESHOLDS}.moving', 'high', (0.5, -0.1), f'a tuple of 2 numbers, {SHARES}'),
  ('batch', 'rule', 'old', BATCHES),
  ('batch', 'max_extra_rounds', -1, 'an integer from 0 to 1024'),
  (WEIGHTS, 'reused', -0.5, 'a number of at least 0'),
  (WEIGHTS, 'fresh', INF, 'a number of at least 0'),
  (WEIGHTS, 'fresh', NAN, 'a number of at least 0'),
  ('batch.replay', 'replay_ratio', 0, 'an integer from 1 to 1024'),
]
STEP = 'must be in (0, {}], the width of the range {}; 0 for a range of one point'
TOGETHER = [  # knobs that do not fit each other, the sentence
  (
    {'clip.balanced.low_step': 0.0},
    'clip.balanced.low_step=0.0: ' + STEP.format(0.3, (0.6, 0.9)),
  ),
  (
    {'clip.balanced.low_step': 0.4},
    'clip.balanced.low_step=0.4: ' + STEP.format(0.3, (0.6, 0.9)),
  ),
  (
    {'clip.balanced.low': (0.6, 0.6)},
    'clip.balanced.low_step=0.02: ' + STEP.format(0, (0.6, 0.6)),
  ),
  (
    {'clip.balanced.high_step': 2.0},
    'clip.balanced.high_step=2.0: ' + STEP.format(1.8, (1.2, 3.0)),
  ),
  (
    {'clip.balanced.low_step': 1e-9},
    'clip.balanced.low_step=1e-09: more than a million steps in (0.6, 0.9)',
  ),
  (
    {'clip.recipe.low_step': 0.5},
    'clip.recipe.low_step=0.5: ' + STEP.format(0.15, (0.8, 0.95)),
  ),
  (
    {'clip.balanced.sources': ()},
    'clip.balanced.sources=(): name at least one of fresh, reevaluated, reused',
  ),
  (
    {'buffer.reevaluate': 3, 'buffer.capacity': 2},
    'buffer.reevaluate=3 is more than buffer.capacity=2',
  ),
  (
    {'buffer.thresholds.moving.low': (0.1, 0.9)},
    'buffer.thresholds.moving.low=(0.1, 0.9) and high=(0.875, 0.625): c2=0.9 is above',
  ),
  (
    {'buffer.thresholds.rule': 'threshold_free', 'sampler.group_size': 7},
    "buffer.thresholds.rule='threshold_free' keeps groups that are half right, and ",
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 2, 'buffer.capacity': 127},
    'buffer.capacity=127 holds fewer groups than a batch replays, prompts.count=64 x '
    'batch.replay.replay_ratio=2 = 128; give that much',
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    'prompts.count=64 and 64 replayed groups do not divide into learner.minibatches=48',
  ),
]


@pytest.mark.parametrize(('section', 'name', 'value', 'give'), GIVE)
def test_a_refusal_names_the_knob_its_value_and_its_range(section, name, value, give):
  found = refusal(**{f'{section}.{name}': value})
  assert found.startswith(f'{section}.{name}={value!r}: give {give}')


@pytest.mark.parametrize(('values', 'sentence'), TOGETHER)
def test_a_refusal_names_the_knobs_that_do_not_fit(values, sentence):
  assert refusal(**values).startswith(sentence)


def test_bounds_that_are_held_or_unlimited_are_accepted():
  held = {'low': (0.7, 0.7), 'low_step': 0.0}
  parse({'clip': {'balanced': held, 'recipe': held}})
  # The continuous search needs no steps.
  continuous = {'resolution': 'continuous', 'low_step': 0.0, 'high_step': 99.0}
  parse({'clip': {'balanced': continuous}})
  parse({'clip': {'fixed': {'low': 0.0, 'high': INF, 'dual': INF}}})
  assert parse({'loss': {'kl': 1}}).loss.kl == 1  # an integer is a number


def test_every_threshold_rule_fits_the_embedded_default():
  for rule in replay_buffer.THRESHOLD_RULES:
    parse({'buffer': {'thresholds': {'rule': rule}}, 'batch': {'rule': 'adapted'}})


SEARCHED = ('balanced', 'recipe')
SURROGATE = {'clip.balanced.contribution': 'surrogate'}


@pytest.mark.parametrize('loss_rule', loss.RULES)
@pytest.mark.parametrize('clip_rule', clip.RULES)
def test_every_pair_of_rules_fits_or_is_refused(clip_rule, loss_rule):
  values = {'clip.rule': clip_rule, 'loss.rule': loss_rule}
  way_out = {
    'tis': '' if clip_rule == 'unclipped' else "choose clip.rule='unclipped'",
    'cispo': "clip.rule='fixed' or 'unclipped'" if clip_rule in SEARCHED else '',
  }.get(loss_rule, '')
  if clip_rule == 'recipe' and loss_rule in ('decoupled', 'sequence'):
    way_out = "choose loss.rule='clipped' and loss.aggregate='token'"
  if way_out:
    found = refusal(**values)
    assert found.startswith(f"clip.rule='{clip_rule}'") and way_out in found
  else:
    parse(nested(values))


@pytest.mark.parametrize(
  ('values', 'begins'),
  [
    ({'clip.rule': 'recipe', 'loss.aggregate': 'sequence'}, "clip.rule='recipe' is"),
    (
      SURROGATE | {'loss.aggregate': 'constant'},
      "clip.balanced.contribution='surrogate' is the clipped surrogate's share",
    ),
    (
      SURROGATE | {'loss.rule': 'decoupled'},
      "clip.balanced.contribution='surrogate' is the clipped surrogate's share",
    ),
    (
      SURROGATE | {'clip.balanced.reused_high': 2.0},
      "clip.balanced.contribution='surrogate' does not see clip.balanced.reused_high=2",
    ),
    (
      {'clip.balanced.weight': 'behaviour', 'loss.rule': 'sequence'},
      "clip.balanced.weight='behaviour' is of Eq. 8 of the clipped loss",
    ),
  ],
)
def test_a_search_of_another_quantity_than_the_gradient_is_for_its_own_loss(
  values, begins
):
  assert refusal(**values).startswith(begins)
  # The knobs of a rule that is not in force refuse nothing.
  if values.get('clip.rule') != 'recipe':
    parse(nested(values | {'clip.rule': 'fixed'}))
