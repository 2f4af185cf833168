"""Advantage rules: goldens, and the premise that a unanimous group teaches nothing."""

import jax.numpy as jnp
import making
import numpy as np
import pytest
from refusals import refusal
from runs import MY

from bapo_jax.algorithms import advantage
from bapo_jax.learner import learner

ADVANTAGES = advantage.AdvantageRule.rules.at_defaults()

SOURCE = np.zeros(8, np.int32)
EVERY_RULE = pytest.mark.parametrize('rule', sorted(ADVANTAGES))


def padded(rewards):
  """The group, in eight rows that eight devices can share."""
  return np.tile(np.asarray(rewards, np.float32), (8, 1))


def test_group_relative_golden(variant):
  # rewards 1,0,0,1: mean 1/2, std 1/2, so +1,-1,-1,+1; eps under the root: 2e-6 off
  adv_PG = variant(advantage.GroupRelative(), padded([1, 0, 0, 1]))
  rtol = making.RTOL + 2e-6
  np.testing.assert_allclose(adv_PG, padded([1, -1, -1, 1]), rtol=rtol)
  # 2 of 8 right: mean 1/4, std sqrt(3/16), so +sqrt(3) twice and -1/sqrt(3) six times;
  # eps is 1e-6 of a variance of 3/16: 2.7e-6 off
  adv_PG = variant(advantage.GroupRelative(), padded([1, 0, 0, 1, 0, 0, 0, 0]))
  right, wrong = 3**0.5, -(3**-0.5)
  expected = padded([right, wrong, wrong, right] + [wrong] * 4)
  np.testing.assert_allclose(adv_PG, expected, rtol=making.RTOL + 3e-6)


def test_centred_goldens(variant):
  # 1 right of 4: it beats the others' mean of 0 by 1; the others trail theirs by 1/3.
  adv_PG = variant(advantage.LeaveOneOut(), padded([1, 0, 0, 0]))
  expected = padded([1, -1 / 3, -1 / 3, -1 / 3])
  np.testing.assert_allclose(adv_PG, expected, rtol=making.RTOL)
  adv_PG = variant(advantage.GroupCentred(), padded([1, 0, 0, 0]))
  np.testing.assert_array_equal(adv_PG, padded([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize(('G', 'p'), [(2, 0.5), (4, 0.1), (8, 0.3)])
def test_max_rl_has_the_gradient_of_the_log_likelihood_to_order_g_less_one(G, p):
  # All 2^G outcomes of a coin that is right with probability p: the score of a right
  # response is d log p / dp = 1 / p, that of a wrong one -1 / (1 - p). The series of
  # d log p / dp = 1 / p is the sum over k >= 1 of (1 - p)^(k - 1).
  right_NG = (np.arange(2**G)[:, None] >> np.arange(G)) & 1
  chance_N = np.where(right_NG, p, 1 - p).prod(1)
  adv_NG = np.float64(advantage.MaxRl()(jnp.asarray(right_NG, jnp.float32)))
  score_NG = np.where(right_NG, 1 / p, -1 / (1 - p))
  gradient = (chance_N * (adv_NG * score_NG).mean(1)).sum()
  series = sum((1 - p) ** (k - 1) for k in range(1, G))
  np.testing.assert_allclose(gradient, series, rtol=1e-6)


def test_max_rl_golden(variant):
  # 1 right of 4, mean 1/4: 3/4 over 1/4, and -1/4 over 1/4. None right: no mean.
  adv_PG = variant(advantage.MaxRl(), padded([1, 0, 0, 0]))
  np.testing.assert_array_equal(adv_PG, padded([3, -1, -1, -1]))
  for rewards in ([0, 0, 0, 0], [-1, 0, 0, 1], [-1, -1, 0, 0]):
    np.testing.assert_array_equal(variant(advantage.MaxRl(), padded(rewards)), 0)


@pytest.mark.parametrize(
  'knobs',
  [
    {'rewards.shaping.format_bonus': 0.1},
    {'rewards.shaping.overlong_penalty': 1.0},
    {'rewards.rule': 'exact,math'},
    {'rewards.rule': f'{MY}:halves'},  # of steps
    {'rewards.weights': (2.0,)},
  ],
)
def test_max_rl_refuses_other_rewards_than_0_and_1(knobs):
  assert 'advantage.rule=max_rl' in refusal(**knobs, **{'advantage.rule': 'max_rl'})


@EVERY_RULE
@pytest.mark.parametrize('G', [2, 3, 7, 8])
def test_equal_rewards_get_exact_zeros(rule, G, variant):
  # A format bonus of 0.1 on a right answer; the mean of such numbers is rounded.
  rewards = np.float32([0, 1, 0.1, 1 / 3, 1e6 + 0.3, -0.7, 1.1, 0.7])
  adv_PG = variant(ADVANTAGES[rule], np.tile(rewards[:, None], G))
  np.testing.assert_array_equal(adv_PG, 0)


@EVERY_RULE
def test_every_rule_is_centred_and_keeps_the_order_of_each_group(rule, variant):
  reward_PG = np.random.default_rng(0).random((16, 8), np.float32)
  reward_PG[0] = [0.5, 0.5, 0.500001, 0.5, 0.5, 0.5, 0.5, 0.5]  # by little, they differ
  adv_PG = np.asarray(variant(ADVANTAGES[rule], reward_PG))
  assert adv_PG[0].argmax() == 2 and (np.delete(adv_PG[0], 2) < 0).all()
  making.close(adv_PG[1:].mean(1), 0, count=8, terms=np.abs(adv_PG).max())
  np.testing.assert_array_equal(adv_PG[1:].argsort(1), reward_PG[1:].argsort(1))
  for p in (3, 5):  # groups do not depend on each other
    alone_1G = ADVANTAGES[rule](reward_PG[p : p + 1])
    making.close(adv_PG[p : p + 1], alone_1G, count=8)


def stepped(rng, rewards=None):
  """Returns groups with random steps; group 0 has no step, and group 1 has one."""
  groups = making.groups(range(8), [3, 0, 8, 4] * 2, [0] * 8, T=6)
  end_PGT = rng.random(groups.tokens_PGT.shape) < 0.4
  end_PGT[:2] = False
  end_PGT[1, 2, 3] = True
  reward_PGT = rng.random(end_PGT.shape) if rewards is None else rewards
  reward_PGT = jnp.asarray(np.where(end_PGT, reward_PGT, 0), jnp.float32)
  return groups._replace(step_reward_PGT=reward_PGT, step_end_PGT=jnp.asarray(end_PGT))


# Of the rewards of a group: how its numbers are normalised.
NORMALISED = {
  'group_relative': lambda r: (r - r.mean()) / np.sqrt(r.var() + 1e-6),
  'leave_one_out': lambda r: (r - r.mean()) * len(r) / max(len(r) - 1, 1),
  'group_centred': lambda r: r - r.mean(),
  'max_rl': lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r,
}


@EVERY_RULE
def test_process_supervision_is_the_loop_of_the_paper(rule, variant):
  # arXiv:2402.03300, section 4.1.3: the rewards of all steps of all responses are
  # normalised together; A_it is the sum of those of the steps with index(j) >= t.
  groups = stepped(np.random.default_rng(0))
  adv_PGT = variant(
    lambda *xs: learner.advantages(*xs, ADVANTAGES[rule]), groups, SOURCE
  )
  wanted_PGT = np.zeros(adv_PGT.shape)
  for p, (end_GT, reward_GT) in enumerate(
    zip(groups.step_end_PGT, np.float64(groups.step_reward_PGT), strict=True)
  ):
    wanted_PGT[p] = NORMALISED[rule](np.float64(groups.reward_PG[p]))[:, None]
    if end_GT.any():
      normalised = iter(NORMALISED[rule](reward_GT[end_GT]))
      for g, index in np.argwhere(end_GT):  # in the order of reward_GT[end_GT]
        credit = next(normalised)
        for t in range(index + 1):
          wanted_PGT[p, g, t] += credit
  sampled_PGT = np.asarray(groups.response_mask_PGT)
  np.testing.assert_allclose(adv_PGT, wanted_PGT * sampled_PGT, atol=2e-5)
  of_responses = np.ma.masked_array(adv_PGT, ~sampled_PGT)
  spread_PG = np.ma.ptp(of_responses, axis=2).filled(0)
  assert spread_PG.any(1).tolist() == [False, False, *6 * [True]]


@EVERY_RULE
@pytest.mark.parametrize('reward', [0.1, 1 / 3, -0.7])
def test_equal_step_rewards_get_exact_zeros(rule, reward, variant):
  groups = stepped(np.random.default_rng(0), reward)
  groups = groups._replace(reward_PG=jnp.zeros_like(groups.reward_PG))
  found = variant(lambda *xs: learner.advantages(*xs, ADVANTAGES[rule]), groups, SOURCE)
  np.testing.assert_array_equal(found, 0)
