"""Advantage rules: goldens, and the premise that a unanimous group teaches nothing."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bapo_jax.algorithms import advantage

EVERY_RULE = pytest.mark.parametrize('rule', sorted(advantage.RULES))


def padded(rewards, rows=8):
  """The group, repeated to a number of rows that eight devices can share."""
  return np.tile(np.asarray(rewards, np.float32), (rows, 1))


def test_group_relative_golden(variant):
  # rewards 1,0,0,1: mean 1/2, std 1/2, so +1,-1,-1,+1 (1e-6 under the root: 2e-6 off)
  adv_PG = variant(advantage.group_relative, padded([1, 0, 0, 1]))
  np.testing.assert_allclose(adv_PG, padded([1, -1, -1, 1]), rtol=3e-6)
  # 2 of 8 right: mean 1/4, std sqrt(3/16), so +sqrt(3) twice and -1/sqrt(3) six times
  adv_PG = variant(advantage.group_relative, padded([1, 0, 0, 1, 0, 0, 0, 0]))
  right, wrong = 3**0.5, -(3**-0.5)
  expected = padded([right, wrong, wrong, right] + [wrong] * 4)
  np.testing.assert_allclose(adv_PG, expected, rtol=5e-6)


def test_leave_one_out_golden(variant):
  # 1 right of 4: it beats the others' mean of 0 by 1; the others trail theirs by 1/3.
  adv_PG = variant(advantage.leave_one_out, padded([1, 0, 0, 0]))
  np.testing.assert_allclose(adv_PG, padded([1, -1 / 3, -1 / 3, -1 / 3]), rtol=1e-6)


def test_group_centred_golden(variant):
  adv_PG = variant(advantage.group_centred, padded([1, 0, 0, 0]))
  np.testing.assert_array_equal(adv_PG, padded([0.75, -0.25, -0.25, -0.25]))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  rewards=st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=6).map(
    lambda xs: np.asarray([xs], np.float32)
  )
)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
  (row,) = rewards
  expected = [r - np.delete(row, i).mean() for i, r in enumerate(row)]
  found = advantage.leave_one_out(rewards)[0]
  np.testing.assert_allclose(found, expected, atol=1e-5)


@EVERY_RULE
@pytest.mark.parametrize('G', [2, 3, 4, 7, 8, 16])
def test_unanimous_groups_get_exact_zeros(rule, G, variant):
  adv_PG = variant(advantage.RULES[rule], np.concatenate([padded([0] * G, 4)] * 2))
  np.testing.assert_array_equal(adv_PG, 0)
  adv_PG = variant(advantage.RULES[rule], padded([1] * G))
  np.testing.assert_array_equal(adv_PG, 0)


@EVERY_RULE
@pytest.mark.parametrize('G', [3, 5, 6, 7, 8, 16])
@pytest.mark.parametrize('reward', [0.1, 1 / 3, 1e6 + 0.3, -0.7, 1 + 0.1, 1 + 0.05])
def test_equal_shaped_rewards_get_exact_zeros(rule, G, reward, variant):
  # A format bonus of 0.1 or 0.05 on a right answer; a mean of these is rounded.
  adv_PG = variant(advantage.RULES[rule], padded([reward] * G))
  np.testing.assert_array_equal(adv_PG, 0)


@EVERY_RULE
def test_rewards_that_differ_by_little_still_teach(rule):
  adv_PG = np.asarray(advantage.RULES[rule](padded([0.5, 0.5, 0.500001, 0.5])))
  assert (adv_PG[:, 2] > 0).all() and (adv_PG[:, [0, 1, 3]] < 0).all()


@EVERY_RULE
def test_every_rule_is_centred_and_keeps_the_order(rule, variant):
  reward_PG = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  adv_PG = np.asarray(variant(advantage.RULES[rule], reward_PG))
  np.testing.assert_allclose(adv_PG.mean(1), 0, atol=1e-6)
  np.testing.assert_array_equal(adv_PG.argsort(1), reward_PG.argsort(1))


@EVERY_RULE
def test_groups_do_not_see_each_other(rule):
  reward_PG = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
  alone = advantage.RULES[rule](reward_PG[:1])
  np.testing.assert_allclose(advantage.RULES[rule](reward_PG)[:1], alone, rtol=1e-6)
