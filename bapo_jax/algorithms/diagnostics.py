"""Computes the metrics of one optimiser minibatch from the arrays of its loss.

Nothing is computed twice: log-probabilities and entropies come from the forward pass of
the gradient, and the gradient of the loss shows which tokens were cut (`loss.weights`).
"""

import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import bound_search, loss
from bapo_jax.types import (
  CUTS,
  SOURCES,
  Batch,
  Bounds,
  Groups,
  LossFunction,
  TokenStats,
  UpdatedTokens,
  masked_mean,
)

# Also reported per source of the rows.
OF_SOURCE = (
  'clip/fraction',
  'loss/ratio_mean',
  'loss/ratio_max',
  'loss/tv',
  'loss/gain',
)

# nan if a minibatch has no computed token; otherwise nan is an error of the run.
OF_TOKENS = (
  'clip/fraction',
  'loss/entropy',
  'loss/entropy_slope',
  'loss/ratio_mean',
  'loss/ratio_max',
  'loss/ratio_nan',
  'loss/ess',
  'loss/kl',
  'loss/kl_plain',
)

_SURROGATE = bound_search.Share(contribution='surrogate')
# nan if a minibatch has no token of the kind; a mean over updates skips nan.
OF_SOME = frozenset(
  {*OF_TOKENS, 'advantage/positive', 'clip/fraction_positive', 'clip/fraction_negative'}
  | {'clip/probability_positive', 'clip/probability_negative', 'clip/share'}
  | {'clip/share_start', 'clip/surrogate_share', 'clip/surrogate_share_start'}
  | {f'{name}_{source}' for name in OF_SOURCE for source in SOURCES}
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
  weight_BT = loss.weights(rule, logp_BT, batch, bounds)
  ratio_BT = loss.ratio(logp_BT, batch)
  computed_B1 = loss_mask_BT.any(1, keepdims=True)

  def mean(x: Array) -> Array:
    if not x.ndim:
      return x.astype(jnp.float32)
    # Bounds by row, or by token: those of the computed ones.
    mine = loss_mask_BT if x.shape == loss_mask_BT.shape else computed_B1
    return jnp.mean(x, where=mine | ~mine.any())

  metrics = {
    'clip/low': mean(bounds.low),
    'clip/high': mean(bounds.high),
    'clip/masked': _masked(batch, bounds),
    'clip/search_steps': mean(bounds.search_steps),
    'clip/moved': mean(bounds.search_steps > 0),
    'clip/target_met': mean(bounds.target_met),
    'clip/no_evidence': mean(bounds.no_evidence),
    'clip/negatives_only': mean(bounds.negatives_only),
    'loss/entropy': masked_mean(stats.entropy_BT, loss_mask_BT),
    'loss/entropy_slope': entropy_slope(stats, weight_BT * scale_B[:, None], batch),
  }
  metrics |= _shares(rule, logp_BT, batch, bounds, scale_B)
  metrics |= _cuts(weight_BT, batch) | _ratios(ratio_BT, logp_BT, batch)
  metrics |= _by_source(ratio_BT, weight_BT, batch)
  if batch.reference_BT is not None:
    far_BT = loss.from_reference(logp_BT, batch, 'k3')
    metrics['loss/reference'] = masked_mean(far_BT, loss_mask_BT)
  return metrics | {
    name: jnp.where(loss_mask_BT.any(), metrics[name], jnp.nan) for name in OF_TOKENS
  }


def _masked(batch: Batch, bounds: Bounds) -> Array:
  """Returns the share of the computed tokens that a mask leaves out."""
  if bounds.keep_BT is None:
    return jnp.zeros(())
  return masked_mean(~bounds.keep_BT, batch.loss_mask_BT)


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
  start = bounds._replace(low=bounds.start_low, high=bounds.start_high)
  weigh = loss.weigher(rule, logp_BT, batch, scale_B)
  ratio_BT = loss.clipped_ratio(rule, logp_BT, batch, bounds)
  up_BT, down_BT = _signs(batch)
  teaches_BT = up_BT | down_BT
  others = loss.without_masked(batch, bounds.keep_BT)
  shares = {'advantage/positive': mean_or_nan(up_BT, teaches_BT)}
  for name, b in (('_start', start), ('', bounds)):
    weight_BT = weigh(b)
    positive = jnp.maximum(weight_BT, 0).sum()
    shares[f'clip/share{name}'] = positive / jnp.abs(weight_BT).sum()
    surrogate = bound_search.share(ratio_BT, others, b.low, b.high, _SURROGATE)
    # `share` returns 0 without tokens, which would bias a mean over updates.
    shares[f'clip/surrogate_share{name}'] = jnp.where(
      teaches_BT.any(), surrogate, jnp.nan
    )
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


def _cuts(weight_BT: Array, batch: Batch) -> dict[str, Array]:
  """Returns the share and the mean sampling probability of cut tokens, by sign of A."""
  up_BT, down_BT = _signs(batch)
  cut_BT = _cut(weight_BT, batch)
  cuts = {'clip/fraction': masked_mean(cut_BT, batch.loss_mask_BT)}
  mu_BT = jnp.exp(jnp.where(batch.loss_mask_BT, batch.behavior_logp_BT, 0))
  for name, kind_BT in (('positive', up_BT), ('negative', down_BT)):
    cuts[f'clip/fraction_{name}'] = mean_or_nan(cut_BT, kind_BT)
    cuts[f'clip/probability_{name}'] = mean_or_nan(mu_BT, kind_BT & cut_BT)
  return cuts


def _by_source(ratio_BT: Array, weight_BT: Array, batch: Batch) -> dict[str, Array]:
  """Computes the metrics named in OF_SOURCE, for the rows of each source.

  The total variation between the policy and the policy that sampled the rows is
  estimated as half the mean of |r - 1| over tokens (arXiv:2602.20722, Theorem 3.2).
  """
  cut_BT = _cut(weight_BT, batch)
  metrics = {}
  for i, source in enumerate(SOURCES):
    mine_BT = batch.loss_mask_BT & (batch.source_B == i)[:, None]
    largest = jnp.where(mine_BT, ratio_BT, -jnp.inf).max()
    of_mine = {
      'clip/fraction': mean_or_nan(cut_BT, mine_BT),
      'loss/ratio_mean': mean_or_nan(ratio_BT, mine_BT),
      'loss/ratio_max': jnp.where(mine_BT.any(), largest, jnp.nan),
      'loss/tv': mean_or_nan(jnp.abs(ratio_BT - 1) / 2, mine_BT),
      'loss/gain': mean_or_nan(ratio_BT * batch.adv_BT, mine_BT),
    }
    metrics |= {f'{name}_{source}': of_mine[name] for name in OF_SOURCE}
  return metrics


def spread(groups: Groups, source_P: Array) -> dict[str, Array]:
  """Returns K of each source: the mean of (1 - sigma) / sigma over its groups, or nan.

  sigma is the standard deviation of a group's verdicts (arXiv:2602.20722, Theorem 3.2).
  Groups with one verdict, whose advantages are all 0, are skipped.
  """
  rate_P = groups.correct_PG.mean(1, where=groups.decided_PG)
  sigma_P = jnp.sqrt(rate_P * (1 - rate_P))
  k_P = (1 - sigma_P) / jnp.where(sigma_P > 0, sigma_P, 1)
  return {
    source: mean_or_nan(k_P, (source_P == i) & (sigma_P > 0))
    for i, source in enumerate(SOURCES)
  }


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
    'loss/ratio_mean': masked_mean(ratio_BT, loss_mask_BT),
    'loss/ratio_max': live_BT.max(),
    'loss/ratio_nan': masked_mean(jnp.isnan(ratio_BT), loss_mask_BT),
    'loss/ess': ess / jnp.maximum(loss_mask_BT.sum(), 1),
    'loss/kl': masked_mean(ratio_BT - 1 - log_r_BT, loss_mask_BT),
    'loss/kl_plain': -masked_mean(log_r_BT, loss_mask_BT),
  }
