"""Turns rewards of a verifier into rewards for the learner: one class per rule.

A rule maps (earned_PG, length_PG, truncated_PG, formatted_PG) to (reward_PG,
teaches_PG): the rewards, f32, and a mask of the responses that enter the loss, bool.
The results for undecided responses, which earned 0, are dropped.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array

from bapo_jax.knobs import knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.rewards.knobs import Verification


class ShapingRule(Part):
  """Changes rewards, and chooses the responses that enter the loss."""

  arguments = ('earned_PG', 'length_PG', 'truncated_PG', 'formatted_PG')
  returns = ('reward_PG', 'teaches_PG')
  traced = False

  @property
  def binary(self) -> bool:
    """Whether rewards of 0 and 1 are known to stay 0 and 1."""
    return False


class Standard(ShapingRule):
  """By default 1 for a right answer, 0 for a wrong one; with published changes.

  The overlong penalty is DAPO's (arXiv:2503.14476, equation 13): 0 for lengths up to
  longest - overlong_cache, then linear, and full at `longest`. DAPO adds the penalty to
  rewards of -1 and 1 (equation 7). Here rewards are 0 and 1, and half of the penalty is
  subtracted: (R + R_length + 1) / 2 gives the same standardised advantages.

  truncated='masked' is DAPO's overlong filtering: a truncated response is not in the
  loss, but its reward stays in the mean of its group.
  """

  rule: Literal['standard'] = 'standard'
  format_bonus: float = knob(
    0.0,
    'Added if the response has an answer where the verifier looks for it, right or '
    'wrong.',
    least=0,
  )
  overlong_penalty: float = knob(
    0.0,
    "Factor of DAPO's soft overlong penalty; 1.0: as published, at most half of the "
    'reward of a right answer.',
    least=0,
  )
  overlong_cache: int = knob(
    1,
    'Tokens before sampler.max_new_tokens over which the penalty grows.',
    least=1,
    needs='rewards.shaping.overlong_penalty',
  )
  truncated: Literal['verified', 'wrong', 'masked'] = knob(
    'verified',
    'Truncated responses: verified as usual, counted as wrong, or not trained on.',
  )

  @property
  def identity(self) -> bool:
    """Whether the rule changes nothing."""
    return self.binary and self.truncated == 'verified'

  @property
  def binary(self) -> bool:
    """Whether rewards of 0 and 1 are known to stay 0 and 1."""
    return not self.format_bonus and not self.overlong_penalty

  def refuses(self, config) -> Iterator[str]:
    """Refuses a penalty that grows over more tokens than a response can have."""
    longest = config.sampler.max_new_tokens
    if longest is not None and self.overlong_cache > longest:  # None: not decided yet
      yield (
        f'rewards.shaping.overlong_cache={self.overlong_cache} is too large: give at '
        f'most sampler.max_new_tokens={longest} tokens'
      )

  def __call__(
    self,
    earned_PG: Array,
    length_PG: Array,
    truncated_PG: Array,
    formatted_PG: Array,
    longest: int,
  ) -> tuple[Array, Array]:
    """Returns (reward_PG, teaches_PG).

    Args:
      earned_PG: rewards of the verifier, f32: 1 or 0, or any number of a function.
      length_PG: tokens of the responses, end token and messages of an environment
        included.
      truncated_PG: bool, True for a response without end token.
      formatted_PG: bool, True if the response has an answer where the rule looks.
      longest: L_max, the maximum number of tokens of a response.
    """
    if self.truncated == 'wrong':
      earned_PG = jnp.where(truncated_PG, 0, earned_PG)
    over_PG = (length_PG - (longest - self.overlong_cache)) / self.overlong_cache
    reward_PG = (
      earned_PG.astype(jnp.float32)
      + self.format_bonus * formatted_PG
      - self.overlong_penalty / 2 * jnp.clip(over_PG, 0, 1)
    )
    masked = self.truncated == 'masked'
    teaches_PG = ~truncated_PG if masked else jnp.ones_like(truncated_PG)
    return reward_PG.astype(jnp.float32), teaches_PG


Shaping = Annotated[ShapingRule, OneOf('Shaping rule of the rewards.', Standard)]


class RewardsConfig(Verification):
  """Verification of responses, and the rewards for the learner."""

  shaping: Shaping = knob(Standard, 'Shaped rewards.', needs='sampled')

  @property
  def verification(self) -> Verification:
    """The part of the section that verifiers read."""
    values = {name: getattr(self, name) for name in Verification.model_fields}
    return Verification.model_construct(**values)
