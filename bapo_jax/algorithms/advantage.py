"""Computes advantages: each rule compares a response with its group.

A rule maps reward_PG to adv_PG, and returns zeros for a group of equal rewards.
"""

import jax.numpy as jnp
from jax import Array

EPS = 1e-6  # added to the variance of a group's rewards, inside the root


def group_relative(reward_PG: Array) -> Array:
  """Returns (r - mean) / sqrt(var + eps): GRPO (arXiv:2402.03300, section 4.1.2)."""
  centred_PG = group_centred(reward_PG)
  return centred_PG / jnp.sqrt((centred_PG**2).mean(1, keepdims=True) + EPS)


def leave_one_out(reward_PG: Array) -> Array:
  """Returns r minus the mean of the other rewards: RLOO (arXiv:2402.14740, Eq. 8)."""
  G = reward_PG.shape[1]
  return group_centred(reward_PG) * (G / (G - 1))


def group_centred(reward_PG: Array) -> Array:
  """Returns r - mean: Dr. GRPO (arXiv:2503.20783, section 3.2)."""
  centred_PG = reward_PG - reward_PG.mean(1, keepdims=True)
  # The mean of equal numbers is rounded: the float mean of eight 0.1 is not 0.1.
  equal_P1 = (reward_PG == reward_PG[:, :1]).all(1, keepdims=True)
  return jnp.where(equal_P1, 0, centred_PG)


RULES = {
  'group_relative': group_relative,
  'leave_one_out': leave_one_out,
  'group_centred': group_centred,
}
