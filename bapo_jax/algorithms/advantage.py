"""Computes advantages: each rule compares a response with its group.

A rule maps reward_PG to adv_PG, and returns zeros for a group of equal rewards.
`by_token` gives every token the advantage of its response, and with step rewards those
of the steps that the token led to.
"""

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.parts import OneOf, Part
from bapo_jax.types import AdvantageFunction, Groups

EPS = 1e-6  # added to the variance of a group's rewards, inside the root


class AdvantageRule(Part):
  """Turns the rewards of a group into advantages."""

  arguments = ('reward_PG',)
  # 'groups': is called with Groups in place of reward_PG, and returns adv_PGT.
  reads: ClassVar[Literal['rewards', 'groups']] = 'rewards'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    """Returns adv_PG, the advantages within each group; 0 for equal rewards.

    Rewards outside valid_PG are not compared, and the result there is 0; None: all are.
    """
    raise NotImplementedError


class GroupRelative(AdvantageRule):
  """(r - mean) / sqrt(var + eps): GRPO (arXiv:2402.03300, section 4.1.2)."""

  rule: Literal['group_relative'] = 'group_relative'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    centred_PG = centred(reward_PG, valid_PG)
    variance_P1 = jnp.mean(centred_PG**2, 1, keepdims=True, where=valid_PG)
    return centred_PG / jnp.sqrt(variance_P1 + EPS)


class LeaveOneOut(AdvantageRule):
  """r minus the mean of the other rewards: RLOO (arXiv:2402.14740, Eq. 8)."""

  rule: Literal['leave_one_out'] = 'leave_one_out'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    n = reward_PG.shape[1]
    if valid_PG is not None:
      n = jnp.maximum(valid_PG.sum(1, keepdims=True), 2)
    return centred(reward_PG, valid_PG) * (n / (n - 1))


class GroupCentred(AdvantageRule):
  """r - mean: Dr. GRPO (arXiv:2503.20783, section 3.2)."""

  rule: Literal['group_centred'] = 'group_centred'

  def __call__(self, reward_PG: Array, valid_PG: Array | None = None) -> Array:
    return centred(reward_PG, valid_PG)


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


def by_token(rule: AdvantageFunction, groups: Groups) -> Array:
  """Returns the advantages [P, G, T] of the tokens of groups.

  With step rewards it is process supervision (arXiv:2402.03300, section 4.1.3): the
  rule also compares the rewards of all steps of a group with each other, and a token
  gets the sum over the steps that end at the token or later.
  """
  if rule.reads == 'groups':
    return rule(groups)
  P, G, T = groups.tokens_PGT.shape
  adv_PGT = jnp.broadcast_to(rule(groups.reward_PG)[..., None], (P, G, T))
  reward_PGT, end_PGT = groups.step_reward_PGT, groups.step_end_PGT
  if reward_PGT is None or end_PGT is None:
    return adv_PGT
  # A group without a step has no reward to compare: all of its zeros are equal.
  end_PGT |= ~end_PGT.any((1, 2), keepdims=True)
  steps = (x.reshape(P, G * T) for x in (reward_PGT, end_PGT))
  step_PGT = rule(*steps).reshape(P, G, T)
  return adv_PGT + jax.lax.cumsum(step_PGT, axis=2, reverse=True)


Advantage = Annotated[
  AdvantageRule,
  OneOf('Advantage rule.', GroupRelative, LeaveOneOut, GroupCentred),
]
