"""The objective: loss rules (logp_BT, batch, find, **knobs) -> (gain_BT, bounds).

`gain_BT` is each token's part of the objective, 0 outside the mask; its derivative by
logp is the token's weight in the policy gradient. `find` gives the clip bounds for the
ratios that a rule clips: it searches them, or returns bounds found before.

1. `ratio` compares the policy with the one that sampled each token;
2. the rules: `clipped` (PPO, GRPO, DAPO), and its published alternatives;
3. `divergence` is the penalty beside them;
4. `row_scale` defines how rows add up to one number, `weights` and `weigher` say what
   each token weighs in the gradient.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import knobs
from bapo_jax.types import SOURCES, Batch, Bounds, FindBounds, LossRule, Weigh

_DECOUPLED = knobs.DecoupledLoss()
_LOSS = knobs.LossConfig()


def log_ratio(logp_BT: Array, old_BT: Array, loss_mask_BT: Array) -> Array:
  """log pi - log old of each token, nats; 0 outside the mask."""
  return jnp.where(loss_mask_BT, logp_BT - old_BT, 0)


def ratio(logp_BT: Array, batch: Batch) -> Array:
  """pi / mu of each token; 1 outside the mask."""
  return jnp.exp(log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT))


def clipped(
  logp_BT: Array,
  batch: Batch,
  find: FindBounds,
  *,
  limit: float = knobs.ClippedLoss().limit,
) -> tuple[Array, Bounds]:
  """min(r A, clip(r, low, high) A), r = pi / mu: PPO (arXiv:1707.06347, Eq. 7).

  With Bounds.dual, and not below dual A where A < 0 (arXiv:1912.09729, dual-clip PPO).

  Args:
    limit: |log r| is clamped to this, nats, as the paper's public code does at 20.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  if limit < math.inf:
    log_r_BT = jnp.clip(log_r_BT, -limit, limit)
  bounds = find(jnp.exp(log_r_BT))
  return _cut_off(log_r_BT, batch, bounds), bounds


def decoupled(
  logp_BT: Array,
  batch: Batch,
  find: FindBounds,
  *,
  cap: float = _DECOUPLED.cap,
  beyond_cap: knobs.BeyondCap = _DECOUPLED.beyond_cap,
) -> tuple[Array, Bounds]:
  """min(prox / mu, cap) times the clipped surrogate of r = pi / prox.

  The decoupled objective of arXiv:2110.00641, section 3, as AReaL uses it
  (arXiv:2505.24298, section 5.2). prox is the policy at the start of the learner step.
  The truncation is TIS in its PPO form (Yao et al., 2025, "Your Efficient RL Framework
  Secretly Brings You Off-Policy RL Training"): the two are one when the batch was
  sampled at the start of the step. r is 1 in a step's first update, however stale the
  data: `balanced` then finds nothing to balance.

  Args:
    cap: upper limit of prox / mu.
    beyond_cap: 'truncate' to the cap (TIS), or 'mask': a token above it has no gain
      (AReaL's code, `behav_imp_weight_cap`).
  """
  log_r_BT = log_ratio(logp_BT, batch.prox_BT, batch.loss_mask_BT)
  stale_BT = jnp.exp(
    log_ratio(batch.prox_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  )
  bounds = find(jnp.exp(log_r_BT))
  above = cap if beyond_cap == 'truncate' else 0.0
  factor_BT = jnp.where(stale_BT > cap, above, stale_BT)
  return factor_BT * _cut_off(log_r_BT, batch, bounds), bounds


def sequence(logp_BT: Array, batch: Batch, find: FindBounds) -> tuple[Array, Bounds]:
  """One ratio per response, s = (pi(y) / mu(y))^(1/|y|): GSPO.

  arXiv:2507.18071, Eq. 5 and 7, written token by token with the same value and gradient
  (Eq. 13 and 14, GSPO-token). Its mean over responses is loss.aggregate='sequence', and
  its bounds are narrow: clip.fixed.low=0.9997, high=1.0004 in the paper.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  length_B = jnp.maximum(batch.loss_mask_BT.sum(1), 1)
  mean_B = jax.lax.stop_gradient(log_r_BT.sum(1) / length_B)
  ahead_BT = log_r_BT - jax.lax.stop_gradient(log_r_BT)  # 0, with log pi's gradient
  log_s_BT = jnp.where(batch.loss_mask_BT, mean_B[:, None] + ahead_BT, 0)
  bounds = find(jnp.exp(log_s_BT))
  return _cut_off(log_s_BT, batch, bounds), bounds


def cispo(logp_BT: Array, batch: Batch, find: FindBounds) -> tuple[Array, Bounds]:
  """clip(r, low, high) A log pi, no gradient through the clip: CISPO.

  arXiv:2506.13585, Eq. 4-5: the weight is clipped, no token is cut. The paper has no
  lower bound (clip.fixed.low=0).
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  bounds = find(jnp.exp(log_r_BT))
  weight_BT = jnp.clip(jnp.exp(log_r_BT), bounds.low, _high(batch, bounds))
  return _reinforce(weight_BT, logp_BT, batch), bounds


def tis(
  logp_BT: Array, batch: Batch, find: FindBounds, *, cap: float = knobs.TisLoss().cap
) -> tuple[Array, Bounds]:
  """min(r, cap) A log pi, no gradient through r: truncated importance sampling.

  Ionides (2008), Eq. 2, for the policy gradient as in Yao et al. (2025), "Your
  Efficient RL Framework Secretly Brings You Off-Policy RL Training", its REINFORCE
  form. It clips nothing else: clip.rule must be 'unclipped'.

  Args:
    cap: upper limit of r = pi / mu.
  """
  ratio_BT = ratio(logp_BT, batch)
  return _reinforce(jnp.minimum(ratio_BT, cap), logp_BT, batch), find(ratio_BT)


def divergence(
  logp_BT: Array,
  batch: Batch,
  direction: knobs.KlDirection = _LOSS.kl_direction,
) -> Array:
  """The divergence of each token, nats, 0 outside the mask.

  Unbiased in value and gradient for tokens sampled from mu, and never negative: both
  are a convex function of r with its minimum 0 at r = 1.

  Args:
    direction: 'behavior_policy', KL(mu || pi) as r - 1 - log r (k3 of Schulman, 2020,
      "Approximating KL Divergence"); 'policy_behavior', KL(pi || mu) of
      arXiv:2602.20722 as r log r - (r - 1), the importance-weighted log-ratio.
  """
  log_r_BT = log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  if direction == 'behavior_policy':
    return jnp.expm1(log_r_BT) - log_r_BT
  return jnp.exp(log_r_BT) * log_r_BT - jnp.expm1(log_r_BT)


def _cut_off(log_r_BT: Array, batch: Batch, bounds: Bounds) -> Array:
  """r A, and a constant where A > 0, r >= high or A < 0 and r <= low or r >= dual."""
  adv_BT = jnp.broadcast_to(batch.adv_B[:, None], log_r_BT.shape)
  ratio_BT = jnp.exp(jax.lax.stop_gradient(log_r_BT))
  high_BT = _high(batch, bounds)
  floor_BT = jnp.where(ratio_BT >= bounds.dual, bounds.dual, bounds.low)
  below_BT = (ratio_BT <= bounds.low) | (ratio_BT >= bounds.dual)
  edge_BT = jnp.where(adv_BT > 0, high_BT, floor_BT)
  cut_BT = jnp.where(adv_BT > 0, ratio_BT >= high_BT, below_BT & (adv_BT < 0))
  # Before exp: a ratio that overflows and is cut must not give 0 * inf, which is nan.
  live_BT = jnp.exp(jnp.where(cut_BT, 0, log_r_BT))
  gain_BT = jnp.where(cut_BT, edge_BT, live_BT) * adv_BT
  return jnp.where(batch.loss_mask_BT, gain_BT, 0)


def _reinforce(weight_BT: Array, logp_BT: Array, batch: Batch) -> Array:
  gain_BT = jax.lax.stop_gradient(weight_BT) * batch.adv_B[:, None] * logp_BT
  return jnp.where(batch.loss_mask_BT, gain_BT, 0)


def _high(batch: Batch, bounds: Bounds) -> Array:
  """The upper bound of each row [B, 1]: reused rows may have a cap of their own."""
  reused_B1 = (batch.source_B == SOURCES.index('reused'))[:, None]
  return jnp.where(reused_B1, jnp.minimum(bounds.high, bounds.cap), bounds.high)


def weights(rule: LossRule, logp_BT: Array, batch: Batch, bounds: Bounds) -> Array:
  """d gain / d logp of each token: its weight in the policy gradient, 0 where cut."""

  def total(logp_BT: Array) -> Array:
    return rule(logp_BT, batch, lambda _: bounds)[0].sum()

  return jax.grad(total)(logp_BT)


def weigher(rule: LossRule, logp_BT: Array, batch: Batch, scale_B: Array) -> Weigh:
  """Bounds -> weight of each token in the gradient, the penalty's part left out.

  Args:
    scale_B: of `row_scale`. The weights are relative to its largest, so that they are
      those of `weights` to the last bit where all rows have one scale.
  """
  relative_B1 = (scale_B / scale_B.max())[:, None]

  def weigh(bounds: Bounds) -> Array:
    return weights(rule, logp_BT, batch, bounds) * relative_B1

  return weigh


def clipped_ratio(
  rule: LossRule, logp_BT: Array, batch: Batch, bounds: Bounds
) -> Array:
  """The ratio of each token that the rule clips."""
  ratios = []

  def find(ratio_BT: Array) -> Bounds:
    ratios.append(ratio_BT)
    return bounds

  rule(logp_BT, batch, find)
  return ratios[0]


def row_scale(loss_mask_BT: Array, aggregate: knobs.Aggregate, length: int) -> Array:
  """Factors [B] on each row's sum of gains: the objective is the sum of the rows.

  They come from the whole minibatch, so that micro-batches and devices add up exactly.

  Args:
    aggregate: 'token', the mean over all tokens (DAPO, arXiv:2503.14476, Eq. 8);
      'sequence', the mean over rows of their token means (GRPO, arXiv:2402.03300,
      Eq. 3); 'constant', the mean over rows of sums / length (Dr. GRPO,
      arXiv:2503.20783, section 3.2).
    length: the constant of 'constant': the longest a response may be, tokens.
  """
  length_B = loss_mask_BT.sum(1)
  rows = jnp.maximum((length_B > 0).sum(), 1)
  if aggregate == 'token':
    return jnp.broadcast_to(1 / jnp.maximum(length_B.sum(), 1), length_B.shape)
  if aggregate == 'sequence':
    return 1 / (rows * jnp.maximum(length_B, 1))
  if aggregate == 'constant':
    return jnp.broadcast_to(1 / (rows * length), length_B.shape)
  typing.assert_never(aggregate)


RULES = {
  'clipped': clipped,
  'decoupled': decoupled,
  'sequence': sequence,
  'cispo': cispo,
  'tis': tis,
}
