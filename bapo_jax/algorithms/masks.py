"""Leaves tokens out of the objective: one function per mask rule.

A rule maps (logp_BT, batch, k) to keep_BT: False for a token that leaves the objective.
The clip rule, whose bounds apply to the other tokens, does not count it either. A mask
compares p = pi(token) with q = mu(token), the probability under the policy that sampled
the token; r = p / q. Masks have no gradient and fit every loss and clip rule.

1. The rules: by token (`dppo_tv`, `dppo_kl`, `icepop`, `kpop`), by response (`opsm`),
   over the minibatch (`m2po`);
2. `binary_kl` is the divergence between two coins: this token, or another one.
"""

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import knobs
from bapo_jax.algorithms.loss import log_ratio
from bapo_jax.types import Batch

# Keeps p and q away from 0 and 1, where the divergence of two coins is infinite or nan.
EDGE = 1e-6


def nothing(logp_BT: Array, batch: Batch) -> None:
  """Masks no token."""


def dppo_tv(
  logp_BT: Array, batch: Batch, k: knobs.DppoTvMask = knobs.DppoTvMask()
) -> Array:
  """Masks tokens that left the trust region in the direction of A: DPPO, binary TV.

  arXiv:2602.04879, Eq. 13: a token with A > 0 and p - q > k.high, or with A < 0 and
  q - p > k.low. The paper's objective is loss.rule='tis' with loss.tis.cap=20.
  """
  p_BT, q_BT = _probabilities(logp_BT, batch)
  moved_BT, adv_B1 = p_BT - q_BT, batch.adv_B[:, None]
  outside_BT = jnp.where(adv_B1 > 0, moved_BT > k.high, moved_BT < -k.low)
  return ~outside_BT | (adv_B1 == 0)


def dppo_kl(
  logp_BT: Array, batch: Batch, k: knobs.DppoKlMask = knobs.DppoKlMask()
) -> Array:
  """Masks as `dppo_tv`, by the divergence KL(Bernoulli(q) || Bernoulli(p)), nats.

  arXiv:2602.04879, Eq. 14: only tokens whose probability moved in the direction of A
  are masked, with a limit for each direction.
  """
  p_BT, q_BT = _probabilities(logp_BT, batch)
  far_BT, adv_B1 = binary_kl(q_BT, p_BT), batch.adv_B[:, None]
  up_BT = (adv_B1 > 0) & (p_BT > q_BT) & (far_BT > k.high)
  return ~(up_BT | ((adv_B1 < 0) & (p_BT < q_BT) & (far_BT > k.low)))


def icepop(
  logp_BT: Array, batch: Batch, k: knobs.IcePopMask = knobs.IcePopMask()
) -> Array:
  """Masks tokens with r outside [k.low, k.high]: IcePop (arXiv:2510.18855).

  The paper compares trainer and sampler under the same weights; with stale data the
  same mask also limits how far the policy has moved.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  r_BT = jnp.exp(jax.lax.stop_gradient(log_r_BT))
  return (r_BT >= k.low) & (r_BT <= k.high)


def kpop(logp_BT: Array, batch: Batch, k: knobs.KPopMask = knobs.KPopMask()) -> Array:
  """Masks tokens with a divergence above k.limit in either direction: KPop.

  Guo et al. (2026), "KPop": the divergences are KL(Bernoulli(p) || Bernoulli(q)) and
  its reverse, nats. The band of r is wide for rare tokens and narrow for likely ones.
  """
  p_BT, q_BT = _probabilities(logp_BT, batch)
  far_BT = jnp.maximum(binary_kl(p_BT, q_BT), binary_kl(q_BT, p_BT))
  return far_BT <= k.limit


def opsm(logp_BT: Array, batch: Batch, k: knobs.OpsmMask = knobs.OpsmMask()) -> Array:
  """Masks responses with A < 0 that became unlikely: off-policy sequence masking.

  DeepSeek-V3.2 (arXiv:2512.02556): responses with A < 0 whose mean of log q - log p
  over their tokens is above k.limit, nats.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  tokens_B = jnp.maximum(batch.loss_mask_BT.sum(1), 1)
  fallen_B = -jax.lax.stop_gradient(log_r_BT).sum(1) / tokens_B
  keep_B = (batch.adv_B >= 0) | (fallen_B <= k.limit)
  return jnp.broadcast_to(keep_B[:, None], log_r_BT.shape)


def m2po(logp_BT: Array, batch: Batch, k: knobs.M2poMask = knobs.M2poMask()) -> Array:
  """Masks the tokens with the largest (log r)^2 until the mean of the rest is small.

  M2PO (arXiv:2510.01161): the mean over the kept tokens of the minibatch is below
  k.limit. Tokens with equal (log r)^2 are kept or masked together. Tokens without an
  advantage do not count: without a penalty their log-probabilities are not computed.

  The mean of all squares up to a limit rises with the limit. So the largest limit is
  found by bisection over the bits of a float, without a sort over all devices.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  square_BT = jnp.square(jax.lax.stop_gradient(log_r_BT)).astype(jnp.float32)
  # Floats that are not negative have the order of their bits, read as integers.
  bits_BT = jax.lax.bitcast_convert_type(square_BT, jnp.int32)

  counts_BT = batch.loss_mask_BT & (batch.adv_B != 0)[:, None]

  def small(limit: Array) -> Array:
    within_BT = counts_BT & (bits_BT <= limit)
    total, count = jnp.where(within_BT, square_BT, 0).sum(), within_BT.sum()
    return (total < k.limit * count) | (count == 0)

  def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
    below, above = ends  # `small` holds at `below`, unless nothing can be kept
    middle = below + (above - below) // 2
    fits = small(middle)
    return jnp.where(fits, middle, below), jnp.where(fits, above, middle)

  largest = jnp.where(counts_BT, bits_BT, 0).max()
  ends = jnp.int32(-1), largest + 1
  limit, _ = jax.lax.fori_loop(0, 32, halve, ends)
  return ~counts_BT | (bits_BT <= limit)


def binary_kl(p: Array, q: Array) -> Array:
  """Returns KL(Bernoulli(p) || Bernoulli(q)), nats, of probabilities cut at EDGE."""
  p, q = (jnp.clip(x, EDGE, 1 - EDGE) for x in (p, q))
  return p * (jnp.log(p) - jnp.log(q)) + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q))


def _probabilities(logp_BT: Array, batch: Batch) -> tuple[Array, Array]:
  """Returns (p, q) of each token; 1 outside the loss mask."""
  log_p_BT, log_q_BT = (
    jnp.where(batch.loss_mask_BT, jax.lax.stop_gradient(x_BT), 0)
    for x_BT in (logp_BT, batch.behavior_logp_BT)
  )
  return jnp.exp(log_p_BT), jnp.exp(log_q_BT)


RULES = {
  'none': nothing,
  'dppo_tv': dppo_tv,
  'dppo_kl': dppo_kl,
  'icepop': icepop,
  'kpop': kpop,
  'm2po': m2po,
  'opsm': opsm,
}
