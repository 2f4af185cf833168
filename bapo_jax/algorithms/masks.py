"""Leaves tokens out of the objective: one class per mask rule.

A rule maps (logp_BT, batch) to keep_BT: False for a token that leaves the objective.
The clip rule, whose bounds apply to the other tokens, does not count it either. A mask
compares p = pi(token) with q = mu(token), the probability under the policy that sampled
the token; r = p / q. Masks have no gradient and fit every loss and clip rule.

1. The rules: by token (`DppoTv`, `DppoKl`, `IcePop`, `KPop`), by response (`Opsm`),
   over the minibatch (`M2po`);
2. `binary_kl` is the KL divergence between two Bernoulli distributions: the next token
   is this token, or it is another token.
"""

from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms.loss import log_r
from bapo_jax.knobs import knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.types import Batch

# Keeps p and q away from 0 and 1, where the divergence of two coins is infinite or nan.
EDGE = 1e-6


class MaskRule(Part):
  """Leaves tokens out of the objective."""

  arguments = ('logp_BT', 'batch')
  returns = ('keep_BT',)
  # A mask measures from the policy that sampled the token, as the sampler saw it.
  weighs_sampler: ClassVar[bool] = True

  def __call__(self, logp_BT: Array, batch: Batch) -> Array | None:
    """Returns keep_BT, False for masked tokens; or None, which keeps all tokens."""
    raise NotImplementedError


class NoMask(MaskRule):
  """Masks no token."""

  weighs_sampler = False

  rule: Literal['none'] = 'none'

  @property
  def identity(self) -> bool:
    """Whether the rule changes nothing."""
    return True

  def __call__(self, logp_BT: Array, batch: Batch) -> None:
    return None


class DppoTv(MaskRule):
  """A trust region in binary total variation: Divergence PPO.

  arXiv:2602.04879, Eq. 13: a token is masked if A > 0 and p - q > high, or if A < 0 and
  q - p > low: its probability has moved far enough in the direction of A. The paper's
  objective is loss.rule='tis' with loss.cap=20.
  """

  rule: Literal['dppo_tv'] = 'dppo_tv'
  low: float = knob(
    0.2, 'Largest fall of the probability of a token with A < 0.', above=0, most=1
  )
  high: float = knob(
    0.2, 'Largest rise of the probability of a token with A > 0.', above=0, most=1
  )

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    p_BT, q_BT = _probabilities(logp_BT, batch)
    # For two outcomes, this token or another, total variation is |p - q|.
    moved_BT = p_BT - q_BT
    outside_BT = jnp.where(batch.adv_BT > 0, moved_BT > self.high, moved_BT < -self.low)
    return ~outside_BT | (batch.adv_BT == 0)


class DppoKl(MaskRule):
  """A trust region in KL(Bernoulli(q) || Bernoulli(p)): Divergence PPO.

  arXiv:2602.04879, Eq. 14: only tokens whose probability moved in the direction of A
  are masked, with a limit for each direction.
  """

  rule: Literal['dppo_kl'] = 'dppo_kl'
  low: float = knob(
    0.05, 'Largest divergence of a falling token with A < 0, nats.', above=0, most=20
  )
  high: float = knob(
    0.05, 'Largest divergence of a rising token with A > 0, nats.', above=0, most=20
  )

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    p_BT, q_BT = _probabilities(logp_BT, batch)
    far_BT = binary_kl(q_BT, p_BT)
    # A token that moves against its advantage is kept: its gradient brings it back.
    up_BT = (batch.adv_BT > 0) & (p_BT > q_BT) & (far_BT > self.high)
    return ~(up_BT | ((batch.adv_BT < 0) & (p_BT < q_BT) & (far_BT > self.low)))


class IcePop(MaskRule):
  """A band of the ratio, r in [low, high]: IcePop (arXiv:2510.18855).

  The paper compares trainer and sampler under the same weights; with stale data the
  same mask also limits how far the policy has moved.
  """

  rule: Literal['icepop'] = 'icepop'
  low: float = knob(0.5, 'Smallest ratio of a token that is kept.', least=0, most=1)
  high: float = knob(
    5.0, 'Largest ratio of a token that is kept; inf: none.', least=1, infinite=True
  )

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    log_r_BT = log_r(logp_BT, batch)
    r_BT = jnp.exp(jax.lax.stop_gradient(log_r_BT))
    return (r_BT >= self.low) & (r_BT <= self.high)


class KPop(MaskRule):
  """A limit on the binary KL divergence in both directions: KPop.

  Guo et al. (2026), "KPop": a token is kept if KL(Bernoulli(p) || Bernoulli(q)) and the
  reverse divergence are within the limits, nats. The accepted range of r is wide for
  unlikely tokens and narrow for likely tokens.
  """

  rule: Literal['kpop'] = 'kpop'
  limit: float = knob(0.1, 'Largest divergence, phi, nats.', above=0, most=20)

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    p_BT, q_BT = _probabilities(logp_BT, batch)
    far_BT = jnp.maximum(binary_kl(p_BT, q_BT), binary_kl(q_BT, p_BT))
    return far_BT <= self.limit


class Opsm(MaskRule):
  """Off-policy sequence masking, for responses with A < 0 that became unlikely.

  DeepSeek-V3.2 (arXiv:2512.02556): the tokens with A < 0 of responses whose mean of
  log q - log p over their tokens is above `limit`, nats.
  """

  rule: Literal['opsm'] = 'opsm'
  limit: float = knob(
    0.1, 'Largest mean fall of log pi over the tokens of a response, nats.', above=0
  )

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    log_r_BT = log_r(logp_BT, batch)
    tokens_B = jnp.maximum(batch.loss_mask_BT.sum(1), 1)
    # A mean, not a sum: a long response would be masked for its length alone.
    fallen_B = -jax.lax.stop_gradient(log_r_BT).sum(1) / tokens_B
    # Unlikely responses that were good stay, since pushing them up shrinks the gap.
    return (batch.adv_BT >= 0) | (fallen_B <= self.limit)[:, None]


class M2po(MaskRule):
  """Masks the tokens with the largest (log r)^2 until the mean of the others is small.

  M2PO (arXiv:2510.01161): the mean over the kept tokens of the minibatch is below
  `limit`. Tokens with equal (log r)^2 are kept or masked together. Tokens without an
  advantage do not count: without a penalty their log-probabilities are not computed.

  The mean of all squares up to a limit rises with the limit. So the largest limit is
  found by bisection over the bits of a float, without a sort over all devices.
  """

  rule: Literal['m2po'] = 'm2po'
  limit: float = knob(
    0.04, 'Limit of the mean of (log r)^2 over the kept tokens, nats^2.', above=0
  )

  def __call__(self, logp_BT: Array, batch: Batch) -> Array:
    log_r_BT = log_r(logp_BT, batch)
    square_BT = jnp.square(jax.lax.stop_gradient(log_r_BT)).astype(jnp.float32)
    # Floats that are not negative have the order of their bits, read as integers.
    bits_BT = jax.lax.bitcast_convert_type(square_BT, jnp.int32)
    counts_BT = batch.loss_mask_BT & (batch.adv_BT != 0)

    def small(limit: Array) -> Array:
      within_BT = counts_BT & (bits_BT <= limit)
      # Below, not at, the limit; as products, so that no kept token divides by 0.
      total = jnp.where(within_BT, square_BT, 0).sum()
      count = within_BT.sum()
      return (total < self.limit * count) | (count == 0)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
      below, above = ends  # `small` holds at `below`, unless nothing can be kept
      middle = below + (above - below) // 2
      fits = small(middle)
      return jnp.where(fits, middle, below), jnp.where(fits, above, middle)

    # 32 halvings separate all float32 numbers; -1 is below all, so nothing may be kept.
    largest = jnp.where(counts_BT, bits_BT, 0).max()
    limit, _ = jax.lax.fori_loop(0, 32, halve, (jnp.int32(-1), largest + 1))
    return ~counts_BT | (bits_BT <= limit)


Mask = Annotated[
  MaskRule,
  OneOf(
    'Mask rule: which tokens leave the objective.',
    NoMask,
    DppoTv,
    DppoKl,
    IcePop,
    KPop,
    M2po,
    Opsm,
  ),
]


def binary_kl(p: Array, q: Array) -> Array:
  """Returns KL(Bernoulli(p) || Bernoulli(q)), nats; p and q are clipped by EDGE."""
  p, q = (jnp.clip(x, EDGE, 1 - EDGE) for x in (p, q))
  return p * (jnp.log(p) - jnp.log(q)) + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q))


def _probabilities(logp_BT: Array, batch: Batch) -> tuple[Array, Array]:
  """Returns (p, q) of each token; 1 outside the loss mask."""
  # 1 where there is no token: binary_kl of two ones is 0, and its logarithms are
  # finite.
  log_p_BT, log_q_BT = (
    jnp.where(batch.loss_mask_BT, jax.lax.stop_gradient(x_BT), 0)
    for x_BT in (logp_BT, batch.behavior_logp_BT)
  )
  return jnp.exp(log_p_BT), jnp.exp(log_q_BT)
