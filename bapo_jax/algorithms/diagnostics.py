"""Computes the metrics of one optimiser minibatch from the arrays of its loss.

Nothing is computed twice: log-probabilities and entropies come from the forward pass of
the gradient, and the gradient of the loss shows which tokens were cut (`loss.weights`).
"""

import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import loss
from bapo_jax.types import (
  CUTS,
  SOURCES,
  Batch,
  Bounds,
  LossFunction,
  TokenStats,
  UpdatedTokens,
  masked_mean,
)


def diagnose(
  rule: LossFunction, stats: TokenStats, batch: Batch, bounds: Bounds, scale_B: Array
) -> dict[str, Array]:
  """Computes the scalar metrics of one optimiser minibatch; see runtime/glossary.py.

  Args:
    stats: statistics of the policy before the update, nats.
    batch: its mask marks the computed tokens (`Objective.computed`).
    bounds: scalars, or [B, 1] if every micro-batch had its own bounds.
    scale_B: see `loss.row_scale`.
  """
  logp_BT = stats.logp_BT
  loss_mask_BT = batch.loss_mask_BT
  # Read from the loss itself, so that a metric cannot disagree with the update: a
  # custom rule is measured like a published one.
  weight_BT = loss.weights(rule, logp_BT, batch, bounds)
  ratio_BT = loss.ratio(logp_BT, batch)
  cut_BT = _cut(weight_BT, batch)
  computed_B1 = loss_mask_BT.any(1, keepdims=True)
  slope = entropy_slope(stats, weight_BT * scale_B[:, None], batch)

  def mean(x: Array) -> Array:
    if not x.ndim:
      return x.astype(jnp.float32)
    # Bounds by row, or by token: those of the computed ones.
    mine = loss_mask_BT if x.shape == loss_mask_BT.shape else computed_B1
    return jnp.mean(x, where=mine | ~mine.any())

  metrics = {
    'clip/low': mean(bounds.low),
    'clip/high': mean(bounds.high),
    'clip/masked': jnp.zeros(()),
    'clip/search_steps': mean(bounds.search_steps),
    'clip/moved': mean(bounds.search_steps > 0),
    'clip/target_met': mean(bounds.target_met),
    'clip/no_evidence': mean(bounds.no_evidence),
    'clip/negatives_only': mean(bounds.negatives_only),
    'loss/entropy': mean_or_nan(stats.entropy_BT, loss_mask_BT),
    'loss/entropy_slope': jnp.where(loss_mask_BT.any(), slope, jnp.nan),
  }
  metrics |= _shares(rule, logp_BT, batch, bounds, scale_B)
  metrics |= _cuts(cut_BT, batch) | _ratios(ratio_BT, logp_BT, batch)
  # Estimates the total variation between pi and mu: arXiv:2602.20722, Theorem 3.2.
  variation_BT = jnp.abs(ratio_BT - 1) / 2
  for i, source in enumerate(SOURCES):
    mine_BT = loss_mask_BT & (batch.source_B == i)[:, None]
    metrics |= {
      f'clip/fraction_{source}': mean_or_nan(cut_BT, mine_BT),
      f'loss/ratio_mean_{source}': mean_or_nan(ratio_BT, mine_BT),
      f'loss/tv_{source}': mean_or_nan(variation_BT, mine_BT),
    }
  if bounds.keep_BT is not None:
    metrics['clip/masked'] = masked_mean(~bounds.keep_BT, loss_mask_BT)
  if batch.reference_BT is not None:
    far_BT = loss.from_reference(logp_BT, batch, 'k3')
    metrics['loss/reference'] = masked_mean(far_BT, loss_mask_BT)
  return metrics


def updated_tokens(
  rule: LossFunction, logp_BT: Array, batch: Batch, bounds: Bounds
) -> UpdatedTokens:
  """Returns each token's log-probability, its ratio, and why it was cut.

  See `diagnose` for batch and bounds; logp_BT is log pi before the update, nats.
  """
  ratio_BT = loss.clipped_ratio(rule, logp_BT, batch, bounds)
  weight_BT = loss.weights(rule, logp_BT, batch, bounds)
  ratio_BT = jnp.where(batch.loss_mask_BT, ratio_BT, 0)
  return UpdatedTokens(logp_BT, ratio_BT, why_cut(weight_BT, batch, bounds))


def entropy_slope(stats: TokenStats, weight_BT: Array, batch: Batch) -> Array:
  """Predicts the change of entropy per unit of step size, nats: the Entropy-Clip Rule.

  A step on w log pi(y) moves the logits of a softmax policy by dz = eta w (e_y - pi),
  and dH = -sum over words of pi (log pi + H) dz, so the slope of a sampled token is

    slope = -w [pi_y (log pi_y + H) - S],   S = Cov_pi[pi, log pi],

  the centred form of arXiv:2510.18927, Eq. 7. S is the effect of the other words:
  without S, advantages shared by all words of a state would seem to move a policy that
  does not change. The estimate from one sampled token per state is unbiased, because w
  contains the importance ratio.

  Args:
    stats: log pi, entropy H and S of each token, nats.
    batch: its mask marks the computed tokens.
    weight_BT: w, the weight of each token in the applied gradient: 0 if it is cut;
      with loss.aggregate='token' it contains 1 / tokens, so the result is a mean.
  """
  logp_BT, entropy_BT, covariance_BT, *_ = stats
  sampled_BT = jnp.exp(logp_BT) * (logp_BT + entropy_BT)
  slope_BT = -weight_BT * (sampled_BT - covariance_BT)
  return jnp.where(batch.loss_mask_BT, slope_BT, 0).sum()


def _shares(
  rule: LossFunction, logp_BT: Array, batch: Batch, bounds: Bounds, scale_B: Array
) -> dict[str, Array]:
  """Computes the share of tokens with A > 0 at start and final bounds; nan if none."""
  # `cap` and `dual` stay: they are not searched, so they hold at the start too.
  start = bounds._replace(low=bounds.start_low, high=bounds.start_high)
  weigh = loss.weigher(rule, logp_BT, batch, scale_B)
  up_BT, down_BT = _signs(batch)
  shares = {'advantage/positive': mean_or_nan(up_BT, up_BT | down_BT)}
  for name, b in (('clip/share_start', start), ('clip/share', bounds)):
    weight_BT = weigh(b)
    shares[name] = jnp.maximum(weight_BT, 0).sum() / jnp.abs(weight_BT).sum()
  return shares


def _signs(batch: Batch) -> tuple[Array, Array]:
  """Returns masks (up_BT, down_BT) of the computed tokens with A > 0 and with A < 0."""
  mask_BT = batch.loss_mask_BT
  return mask_BT & (batch.adv_BT > 0), mask_BT & (batch.adv_BT < 0)


def _cut(weight_BT: Array, batch: Batch) -> Array:
  """Returns a mask [B, T] of the tokens with an advantage but no gradient."""
  up_BT, down_BT = _signs(batch)
  return (up_BT | down_BT) & (weight_BT == 0)


def why_cut(weight_BT: Array, batch: Batch, bounds: Bounds) -> Array:
  """Returns why each token with an advantage has no gradient: an index into CUTS, u8.

  A token that the mask leaves out counts as masked, also if its ratio is out of bounds.

  Args:
    weight_BT: weight of each token in the gradient, from `loss.weights`.
  """
  code_BT = jnp.full(weight_BT.shape, CUTS.index('clipped'), jnp.uint8)
  if bounds.keep_BT is not None:
    code_BT = jnp.where(bounds.keep_BT, code_BT, jnp.uint8(CUTS.index('masked')))
  return jnp.where(_cut(weight_BT, batch), code_BT, jnp.uint8(0))


def _cuts(cut_BT: Array, batch: Batch) -> dict[str, Array]:
  """Returns the share and the mean sampling probability of cut tokens, by sign of A."""
  up_BT, down_BT = _signs(batch)
  cuts = {'clip/fraction': mean_or_nan(cut_BT, batch.loss_mask_BT)}
  # Low probabilities among cut positive tokens are the paper's finding: bounds of fixed
  # width cut rare words first (arXiv:2510.18927).
  mu_BT = jnp.exp(jnp.where(batch.loss_mask_BT, batch.behavior_logp_BT, 0))
  for name, kind_BT in (('positive', up_BT), ('negative', down_BT)):
    cuts[f'clip/fraction_{name}'] = mean_or_nan(cut_BT, kind_BT)
    cuts[f'clip/probability_{name}'] = mean_or_nan(mu_BT, kind_BT & cut_BT)
  return cuts


def mean_or_nan(x: Array, mask: Array) -> Array:
  """Returns the mean of x over the mask; nan if the mask is empty."""
  return jnp.where(mask, x, 0).sum() / mask.sum()


def _ratios(ratio_BT: Array, logp_BT: Array, batch: Batch) -> dict[str, Array]:
  """Measures how far the policy is from the policy that sampled the batch.

  A nan ratio is an error of the run and is not masked, so that the metrics show it.
  """
  loss_mask_BT = batch.loss_mask_BT
  log_r_BT = loss.log_r(logp_BT, batch)
  live_BT = jnp.where(loss_mask_BT, ratio_BT, 0)
  # Scaled by the largest ratio: the squares of large ratios would overflow.
  scale = jnp.maximum(live_BT.max(), jnp.finfo(jnp.float32).tiny)
  square = ((live_BT / scale) ** 2).sum()
  ess = (live_BT / scale).sum() ** 2 / jnp.where(square == 0, 1, square)
  return {
    'loss/ratio_mean': mean_or_nan(ratio_BT, loss_mask_BT),
    'loss/ratio_max': jnp.where(loss_mask_BT.any(), live_BT.max(), jnp.nan),
    'loss/ess': ess / loss_mask_BT.sum(),
    'loss/kl': mean_or_nan(ratio_BT - 1 - log_r_BT, loss_mask_BT),
  }
