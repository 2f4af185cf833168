"""Computes advantages: each rule compares a response with its group.

A rule maps reward_PG to adv_PG, and returns zeros for a group of equal rewards.
"""

from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array

from bapo_jax.parts import OneOf, Part

EPS = 1e-6  # added to the variance of a group's rewards, inside the root


class AdvantageRule(Part):
  """Turns the rewards of a group into advantages."""

  arguments = ('reward_PG',)

  def __call__(self, reward_PG: Array) -> Array:
    """Returns adv_PG, the advantages within each group; 0 for equal rewards."""
    raise NotImplementedError


class GroupRelative(AdvantageRule):
  """(r - mean) / sqrt(var + eps): GRPO (arXiv:2402.03300, section 4.1.2)."""

  rule: Literal['group_relative'] = 'group_relative'

  def __call__(self, reward_PG: Array) -> Array:
    centred_PG = centred(reward_PG)
    return centred_PG / jnp.sqrt((centred_PG**2).mean(1, keepdims=True) + EPS)


class LeaveOneOut(AdvantageRule):
  """r minus the mean of the other rewards: RLOO (arXiv:2402.14740, Eq. 8)."""

  rule: Literal['leave_one_out'] = 'leave_one_out'

  def __call__(self, reward_PG: Array) -> Array:
    G = reward_PG.shape[1]
    return centred(reward_PG) * (G / (G - 1))


class GroupCentred(AdvantageRule):
  """r - mean: Dr. GRPO (arXiv:2503.20783, section 3.2)."""

  rule: Literal['group_centred'] = 'group_centred'

  def __call__(self, reward_PG: Array) -> Array:
    return centred(reward_PG)


def centred(reward_PG: Array) -> Array:
  """Returns r - mean within each group, exactly 0 for a group of equal rewards."""
  centred_PG = reward_PG - reward_PG.mean(1, keepdims=True)
  # The mean of equal numbers is rounded: the float mean of eight 0.1 is not 0.1.
  equal_P1 = (reward_PG == reward_PG[:, :1]).all(1, keepdims=True)
  return jnp.where(equal_P1, 0, centred_PG)


Advantage = Annotated[
  AdvantageRule,
  OneOf('Advantage rule.', GroupRelative, LeaveOneOut, GroupCentred),
]
