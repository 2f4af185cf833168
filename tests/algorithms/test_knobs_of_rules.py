"""Knobs of the algorithms that do not fit each other are refused by name."""

import math

import pytest
from refusals import nested, refusal

from bapo_jax.algorithms import clip, loss
from bapo_jax.training.config import parse

INF = math.inf


def test_bounds_that_are_held_or_unlimited_are_accepted():
  held = {'low': (0.7, 0.7), 'low_step': 0.0}
  parse({'clip': held})
  # The continuous search needs no steps.
  continuous = {'resolution': 'continuous', 'low_step': 0.0, 'high_step': 99.0}
  parse({'clip': continuous})
  parse({'clip': continuous | {'low': (0.5, 0.5), 'high': (1.0, 101.0)}})
  parse({'clip': {'rule': 'fixed', 'low': 0.0, 'high': INF, 'dual': INF}})
  assert parse({'loss': {'kl': 1}}).loss.kl == 1  # an integer is a number


SURROGATE = {'clip.contribution': 'surrogate'}
NO_CLIP = ('tis', 'reinforce', 'sapo', 'vespo')


@pytest.mark.parametrize('loss_rule', loss.LossRule.rules.names)
@pytest.mark.parametrize('clip_rule', clip.ClipRule.rules.names)
def test_every_pair_of_rules_fits_or_is_refused(clip_rule, loss_rule):
  values = {'clip.rule': clip_rule, 'loss.rule': loss_rule}
  way_out = None
  if loss_rule in NO_CLIP and clip_rule != 'unclipped':
    way_out = "choose clip.rule='unclipped'"
  elif loss_rule in ('cispo', 'gmpo') and clip_rule in ('balanced', 'recipe'):
    way_out = "choose clip.rule='fixed' or 'unclipped'"
  elif clip_rule == 'recipe' and loss_rule != 'clipped':
    way_out = "choose loss.rule='clipped' and loss.aggregate='token'"
  if way_out:
    sentence = refusal(**values)
    assert sentence.startswith(f"clip.rule='{clip_rule}'") and way_out in sentence
  else:
    parse(nested(values))


@pytest.mark.parametrize(
  ('values', 'name'),
  [
    ({'clip.rule': 'recipe', 'loss.aggregate': 'sequence'}, 'clip.rule'),
    (SURROGATE | {'loss.aggregate': 'constant'}, 'clip.contribution'),
    (SURROGATE | {'loss.rule': 'decoupled'}, 'clip.contribution'),
    (SURROGATE | {'clip.reused_high': 2.0}, 'clip.contribution'),
    (
      {'clip.weight': 'behaviour', 'loss.rule': 'sequence'},
      'clip.weight',
    ),
  ],
)
def test_a_search_of_another_quantity_than_the_gradient_needs_its_own_loss(
  values, name
):
  assert refusal(**values).startswith(f'{name}=')
