"""Computes advantages: each rule compares a response with its group.

A rule maps reward_PG to adv_PG, and returns zeros for a group of equal rewards. With
step rewards it is also called with those of all steps of a group.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from bapo_jax.parts import OneOf, Part

EPS = 1e-6  # added to the variance of a group's rewards, inside the root


class AdvantageRule(Part):
  """Turns the rewards of a group into advantages."""

  arguments = ('reward_PG',)
  returns = ('adv_PG',)
  # 'groups': is called with Groups in place of reward_PG, and returns adv_PGT.
  reads: ClassVar[Literal['rewards', 'groups']] = 'rewards'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    """Returns adv_PG, the advantages within each group; 0 for equal rewards.

    Rewards outside valid_PG are not compared, and the result there is 0; None: all are.
    """
    raise NotImplementedError

  def refuses(self, config) -> Iterator[str]:
    """Refuses step rewards with a custom rule that reads one reward per response."""
    if config.rewards.custom.steps and self.custom and self.reads == 'rewards':
      yield (
        f'advantage.rule={self.rule} reads one reward per response, but rewards.rule='
        f"{config.rewards.rule} returns steps; declare reads='groups' and return "
        'adv_PGT'
      )


class GroupRelative(AdvantageRule):
  """(r - mean) / sqrt(var + eps): GRPO (arXiv:2402.03300, section 4.1.2)."""

  rule: Literal['group_relative'] = 'group_relative'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    # The root of var + eps, not std + eps: its slope is finite for a group of equal
    # rewards, and two rewards that differ by rounding do not become -1 and 1.
    centred_PG = centred(reward_PG, valid_PG)
    variance_P1 = jnp.mean(centred_PG**2, 1, keepdims=True, where=valid_PG)
    return centred_PG / jnp.sqrt(variance_P1 + EPS)


class LeaveOneOut(AdvantageRule):
  """r minus the mean of the other rewards: RLOO (arXiv:2402.14740, Eq. 8)."""

  rule: Literal['leave_one_out'] = 'leave_one_out'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1), so it is Dr. GRPO's times a
    # factor.
    n = reward_PG.shape[1]
    if valid_PG is not None:
      n = jnp.maximum(valid_PG.sum(1, keepdims=True), 2)
    return centred(reward_PG, valid_PG) * (n / (n - 1))


class GroupCentred(AdvantageRule):
  """r - mean: Dr. GRPO (arXiv:2503.20783, section 3.2)."""

  rule: Literal['group_centred'] = 'group_centred'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    return centred(reward_PG, valid_PG)


class MaxRl(AdvantageRule):
  """(r - mean) / mean, and 0 for a group without a right response: MaxRL.

  arXiv:2602.02710, for rewards of 0 and 1. Where `group_centred` has the gradient of
  the pass rate p in expectation, this rule has that of log p, expanded in 1 - p to the
  order G - 1. Like the paper's public code it has no factor 1 / G. A custom reward
  function may return other numbers: a mean of 0 or less gives 0.
  """

  rule: Literal['max_rl'] = 'max_rl'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    centred_PG = centred(reward_PG, valid_PG)
    mean_P1 = jnp.mean(reward_PG, 1, keepdims=True, where=valid_PG)
    # The inner `where` keeps 0 / 0 out of the branch that is not taken.
    return jnp.where(mean_P1 > 0, centred_PG / jnp.where(mean_P1 > 0, mean_P1, 1), 0)

  def refuses(self, config) -> Iterator[str]:
    """Refuses rewards that are known to be other numbers than 0 and 1."""
    k = config.rewards
    plain = k.shaping.binary and not k.custom.steps
    if k.weights or ',' in (k.rule or '') or not plain:
      yield (
        'advantage.rule=max_rl divides by the mean of rewards of 0 and 1, but rewards.'
        f'weights={k.weights}, rewards.rule={k.rule} or rewards.shaping makes other '
        'rewards; give one rule without steps, weights, bonus and penalty, or choose '
        "advantage.rule='group_relative'"
      )


def centred(reward_PG: Array, valid_PG: Array | None = None) -> Array:
  """Returns r - mean within each group, exactly 0 for a group of equal rewards."""
  among: Any = {'axis': 1, 'keepdims': True, 'where': valid_PG}
  centred_PG = reward_PG - jnp.mean(reward_PG, **among)
  # The mean of equal numbers is rounded: the float mean of eight 0.1 is not 0.1.
  most_P1 = jnp.max(reward_PG, initial=-jnp.inf, **among)
  equal_PG = most_P1 == jnp.min(reward_PG, initial=jnp.inf, **among)
  if valid_PG is not None:
    equal_PG |= ~valid_PG
  return jnp.where(equal_PG, 0, centred_PG)


Advantage = Annotated[
  AdvantageRule,
  OneOf('Advantage rule.', GroupRelative, LeaveOneOut, GroupCentred, MaxRl),
]
