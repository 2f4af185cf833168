"""Positive tokens' share of the policy gradient, and the first bounds that give it.

A share is P / (P + N), in one of two readings of what a token contributes:

  gradient    P = sum over A > 0, r < high, of |W|
              N = sum over A < 0, r > low, of |W|
  surrogate   P = sum over A > 0 of w A min(r, high)
              N = sum over A < 0 of w |A| max(r, low)

W is the token's weight in the gradient that is applied while neither bound cuts it:
r A of Eq. 5 (arXiv:2510.18927) for the clipped loss, with whatever the loss rule, the
cap of reused rows, dual clip and the aggregate make of it. r is the ratio that the loss
rule clips. w is 1, or the behaviour's probability of the token; it multiplies W too.

P depends on `high` alone and N on `low` alone. Under `gradient` raising either bound
raises the share;
under `surrogate` raising `low` LOWERS it. Either way each leg of a path of bounds is
monotone, so bisection over the integer index of the path finds the first point that
meets a target: at most 7 evaluations where a loop makes up to 51 steps, and the same
point.

1. `contributions` computes what does not change from point to point;
2. `sums` gives P and N between two bounds, `reaches` compares them with a target;
3. `search` bisects a path of bounds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from bapo_jax.algorithms.knobs import (
  BalancedClip,
  Contribution,
  Order,
  Source,
  TokenWeight,
)
from bapo_jax.types import SOURCES, Batch, Bounds, agree

_D = BalancedClip()


class Contributions(NamedTuple):
  """A token's part in P and in N while it is not cut; for `surrogate` |A| is W."""

  ratio_BT: Float32[Array, 'B T']  # r, what the loss rule clips
  plus_BT: Float32[Array, 'B T']  # w |W| where A > 0 and the token counts, else 0
  minus_BT: Float32[Array, 'B T']  # w |W| where A < 0 and the token counts, else 0


def search(
  ratio_BT: Array,
  batch: Batch,
  lows: np.ndarray,
  highs: np.ndarray,
  *,
  target: float,
  weight_BT: Array | None = None,
  contribution: Contribution = _D.contribution,
  weight: TokenWeight = _D.weight,
  order: Order = _D.order,
  sources: tuple[Source, ...] = _D.sources,
) -> Bounds:
  """The first point of a path of bounds that meets the target, or the last point.

  The path takes one bound from end to end, then the other.

  Args:
    lows, highs: the points of each bound, rising. They are made on the host: compiled,
      low + step * i may round once where it rounds twice eagerly.
    target: the share, in [0, 1].
    weight_BT: as for `contributions`.
    contribution, weight, order, sources: as in `clip.balanced`.

  Returns:
    Bounds without a cap and a dual clip; the start bounds where no token counts.
  """
  parts = contributions(ratio_BT, batch, contribution, weight, sources, weight_BT)
  positives, negatives = (parts.plus_BT > 0).any(), (parts.minus_BT > 0).any()
  evidence = positives | negatives
  down, up = len(lows) - 1, len(highs) - 1
  low_points, high_points = jnp.asarray(lows), jnp.asarray(highs)

  def bounds(index: Array | int) -> tuple[Array, Array]:
    first = jnp.minimum(index, up if order == 'upper' else down)
    i, j = (index - first, first) if order == 'upper' else (first, index - first)
    return low_points[i], high_points[j]

  def meets(index: Array | int) -> Array:
    return reaches(*sums(parts, *bounds(index), contribution), target)

  if contribution == 'gradient':
    begin, end = 0, down + up + 1
  elif order == 'upper':
    # Raising the lower bound lowers this share: missed at the upper end, it is missed.
    begin, end = 0, up + 1
  else:
    # ... and so a target missed at the start can be met on the second leg alone.
    begin, end = down + 1, down + up + 1
  index = bisect(meets, begin, end)
  if begin:
    index = jnp.where(meets(0), 0, index)
  met = (index < end) & evidence
  index = jnp.where(met, index, jnp.where(evidence, down + up, 0))
  none, one_sided = jnp.float32(math.inf), negatives & ~positives
  ends = *bounds(index), none, none, *bounds(0)
  return Bounds(*ends, index, met, ~evidence, one_sided)


def bisect(meets: Callable[[Array], Array], begin: int, end: int) -> Array:
  """Smallest i in [begin, end) with meets(i), i32; `end` if no i meets.

  `meets` must be False, then True; it is called ceil(log2(end - begin + 1)) times.
  """

  def halve(_: Array, between: tuple[Array, Array]) -> tuple[Array, Array]:
    start, stop = between
    middle = (start + stop) // 2
    found = meets(middle)
    return jnp.where(found, start, middle + 1), jnp.where(found, middle, stop)

  calls = math.ceil(math.log2(end - begin + 1))
  return jax.lax.fori_loop(0, calls, halve, (jnp.int32(begin), jnp.int32(end)))[1]


def share(
  ratio_BT: Array,
  batch: Batch,
  low: Array | float,
  high: Array | float,
  *,
  contribution: Contribution = _D.contribution,
  weight: TokenWeight = _D.weight,
  sources: tuple[Source, ...] = _D.sources,
  weight_BT: Array | None = None,
) -> Array:
  """Positive tokens' share P / (P + N), in [0, 1]; 0 where no token counts."""
  parts = contributions(ratio_BT, batch, contribution, weight, sources, weight_BT)
  positive, negative = sums(parts, low, high, contribution)
  total = positive + negative
  return jnp.where(positive > 0, positive / jnp.where(total > 0, total, 1), 0)


def contributions(
  ratio_BT: Array,
  batch: Batch,
  contribution: Contribution,
  weight: TokenWeight,
  sources: tuple[Source, ...],
  weight_BT: Array | None = None,
) -> Contributions:
  """The contributions of the rows of `sources`.

  Args:
    weight_BT: W for `gradient`; None: r A, the clipped loss under
      loss.aggregate='token'. `surrogate` reads none.

  Raises:
    ValueError: arrays of different shapes.
  """
  agree(ratio_BT=ratio_BT, adv_B=batch.adv_B, loss_mask_BT=batch.loss_mask_BT)
  adv_BT = jnp.broadcast_to(jnp.asarray(batch.adv_B)[:, None], ratio_BT.shape)
  # Before the products: 0 times an infinite ratio is no number.
  counts_BT = batch.loss_mask_BT & ~jnp.isnan(ratio_BT) & (adv_BT != 0)
  if set(sources) != set(SOURCES):
    inside = [batch.source_B == SOURCES.index(source) for source in sources]
    counts_BT &= jnp.any(jnp.stack(inside), 0)[:, None]
  if contribution == 'surrogate':
    weight_BT = adv_BT
  elif weight_BT is None:
    weight_BT = ratio_BT * adv_BT
  size_BT = jnp.abs(weight_BT)
  if weight == 'behaviour':
    mu_BT = jnp.exp(batch.behavior_logp_BT)
    counts_BT &= mu_BT > 0
    size_BT = size_BT * mu_BT
  size_BT = jnp.where(counts_BT & ~jnp.isnan(size_BT), size_BT, 0)
  plus_BT, minus_BT = (
    jnp.where(adv_BT > 0, size_BT, 0),
    jnp.where(adv_BT < 0, size_BT, 0),
  )
  return Contributions(ratio_BT, plus_BT, minus_BT)


def sums(
  parts: Contributions,
  low: Array | float,
  high: Array | float,
  contribution: Contribution,
) -> tuple[Array, Array]:
  """(P, N) between these bounds, each at least 0."""
  ratio_BT, plus_BT, minus_BT = parts
  if contribution == 'gradient':
    plus_BT = jnp.where(ratio_BT < high, plus_BT, 0)
    minus_BT = jnp.where(ratio_BT > low, minus_BT, 0)
  else:
    plus_BT = jnp.where(plus_BT > 0, plus_BT * jnp.minimum(ratio_BT, high), 0)
    minus_BT = jnp.where(minus_BT > 0, minus_BT * jnp.maximum(ratio_BT, low), 0)
  return plus_BT.sum(), minus_BT.sum()


def reaches(positive: Array, negative: Array, target: float) -> Array:
  """P / (P + N) >= target, as P (1 - target) >= N target.

  Both products are monotone in floating point; the quotient is not, to the last bit,
  and bisection would then differ from the loop.
  """
  if target == 0:
    return jnp.ones_like(positive, bool)
  return (positive > 0) & (positive * (1 - target) >= negative * target)
