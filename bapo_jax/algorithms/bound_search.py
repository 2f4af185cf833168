"""Positive tokens' share of the policy gradient, and the first bounds that give it.

A share is P / (P + N), of two readings of what a token contributes:

  gradient    P = sum over A > 0, r < high, of w r A
              N = sum over A < 0, r > low, of w r |A|
  surrogate   P = sum over A > 0 of w A min(r, high)
              N = sum over A < 0 of w |A| max(r, low)

P depends on `high` alone and N on `low` alone. Under `gradient` (arXiv:2510.18927,
Eq. 5: the tokens whose gradient is not cut) raising either bound raises the share;
under `surrogate` raising `low` LOWERS it. Either way each leg of a path of bounds is
monotone, so the first point that meets a target is found by bisection over the integer
index of the path: at most 7 evaluations where a loop makes up to 51 moves, and the
same point.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.types import SOURCES, Batch, Bounds, agree


def along(
  ratio_BT,
  batch: Batch,
  lows: np.ndarray,
  highs: np.ndarray,
  *,
  target: float,
  contribution: str = 'gradient',
  weight: str = 'one',
  order: str = 'upper',
  sources: tuple[str, ...] = SOURCES,
) -> Bounds:
  """The first point of a path of bounds that meets the target, or the last point.

  The path takes one bound from end to end, then the other.

  Args:
    lows, highs: the points of each bound, rising. They are made on the host: compiled,
      low + step * i may round once where it rounds twice eagerly.
  """
  said = evidence(ratio_BT, batch, contribution, weight, sources)
  down, up = len(lows) - 1, len(highs) - 1
  low_points, high_points = jnp.asarray(lows), jnp.asarray(highs)

  def bounds(index):
    first = jnp.minimum(index, up if order == 'upper' else down)
    i, j = (index - first, first) if order == 'upper' else (first, index - first)
    return low_points[i], high_points[j]

  def meets(index):
    return reaches(*sums(said, *bounds(index), contribution), target)

  if contribution == 'gradient':
    begin, end = 0, down + up + 1
  elif order == 'upper':
    # Raising the lower bound lowers this share: missed at the upper end, it is missed.
    begin, end = 0, up + 1
  else:
    # ... and so a target missed at the start can be met on the second leg alone.
    begin, end = down + 1, down + up + 1
  index = first_of_path(meets, begin, end)
  if begin:
    index = jnp.where(meets(0), 0, index)
  met = index < end
  index = jnp.where(met, index, down + up)
  start_low, start_high = bounds(0)
  low, high = bounds(index)
  none = jnp.float32(math.inf)
  return Bounds(low, high, none, none, start_low, start_high, index, met)


def first_of_path(meets, begin: int, end: int):
  """Smallest i in [begin, end) with meets(i), i32; `end` where there is none.

  `meets` must be False, then True; it is called ceil(log2(end - begin + 1)) times.
  """

  def halve(_, between):
    start, stop = between
    middle = (start + stop) // 2
    found = meets(middle)
    return jnp.where(found, start, middle + 1), jnp.where(found, middle, stop)

  calls = math.ceil(math.log2(end - begin + 1))
  return jax.lax.fori_loop(0, calls, halve, (jnp.int32(begin), jnp.int32(end)))[1]


def share(
  ratio_BT,
  batch: Batch,
  low,
  high,
  *,
  contribution: str = 'gradient',
  weight: str = 'one',
  sources: tuple[str, ...] = SOURCES,
):
  """Positive tokens' share P / (P + N), in [0, 1]; 0 of nothing."""
  said = evidence(ratio_BT, batch, contribution, weight, sources)
  positive, negative = sums(said, low, high, contribution)
  total = positive + negative
  return jnp.where(positive > 0, positive / jnp.where(total > 0, total, 1), 0)


def evidence(ratio_BT, batch: Batch, contribution: str, weight: str, sources):
  """(ratio_BT, plus_BT, minus_BT): what does not change from point to point.

  plus_BT holds w r A of the tokens with A > 0 that are searched on, minus_BT w r |A| of
  those with A < 0; without the r for `surrogate`. Both are 0 elsewhere.
  """
  agree(ratio_BT=ratio_BT, adv_B=batch.adv_B, loss_mask_BT=batch.loss_mask_BT)
  counts_BT = batch.loss_mask_BT & ~jnp.isnan(ratio_BT)
  if set(sources) != set(SOURCES):
    inside = [batch.source_B == SOURCES.index(source) for source in sources]
    counts_BT &= jnp.any(jnp.stack(inside), 0)[:, None]
  size_BT = jnp.broadcast_to(jnp.abs(batch.adv_B)[:, None], ratio_BT.shape)
  if weight == 'behaviour':
    size_BT = size_BT * jnp.exp(batch.behavior_logp_BT)
  # Before the product: 0 times an infinite ratio is no number.
  counts_BT &= size_BT > 0
  part_BT = size_BT * ratio_BT if contribution == 'gradient' else size_BT
  up_B1 = (batch.adv_B > 0)[:, None]
  plus_BT = jnp.where(counts_BT & up_B1, part_BT, 0)
  return ratio_BT, plus_BT, jnp.where(counts_BT & ~up_B1, part_BT, 0)


def sums(said, low, high, contribution: str):
  """(P, N), each at least 0."""
  ratio_BT, plus_BT, minus_BT = said
  if contribution == 'gradient':
    plus_BT = jnp.where(ratio_BT < high, plus_BT, 0)
    minus_BT = jnp.where(ratio_BT > low, minus_BT, 0)
  else:
    plus_BT = jnp.where(plus_BT > 0, plus_BT * jnp.minimum(ratio_BT, high), 0)
    minus_BT = jnp.where(minus_BT > 0, minus_BT * jnp.maximum(ratio_BT, low), 0)
  return plus_BT.sum(), minus_BT.sum()


def reaches(positive, negative, target: float):
  """P / (P + N) >= target, as P (1 - target) >= N target.

  Both products are monotone in floating point; the quotient is not, to the last bit,
  and bisection would then differ from the loop.
  """
  if target == 0:
    return jnp.ones_like(positive, bool)
  return (positive > 0) & (positive * (1 - target) >= negative * target)
