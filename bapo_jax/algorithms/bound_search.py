"""Finds the first clip bounds at which positive tokens reach their target share.

The search follows a path: one bound rises from its first to its last value, then the
other bound. The share is P / (P + N), with one of two contributions of a token:

  gradient    P = sum over A > 0, r < high, of w |W|
              N = sum over A < 0, r > low, of w |W|
  surrogate   P = sum over A > 0 of w A min(r, high)
              N = sum over A < 0 of w |A| max(r, low)

r is the ratio that the loss rule clips. W is the weight of the token in the applied
gradient while neither bound cuts it: r A for the clipped loss (arXiv:2510.18927,
Eq. 5), changed by any other loss rule, the cap of reused rows, dual clip and the
aggregate. w is 1, or the probability of the token under the behaviour policy.

P depends on `high` only and N on `low` only. With `gradient`, raising either bound
raises the share; with `surrogate`, raising `low` LOWERS it. So the share is monotone
while one bound moves, and bisection over the points of the path finds the first that
meets a target, with at most 7 evaluations instead of a loop of up to 51 steps.

1. `contributions` computes the terms that are equal at all points of the path;
2. `sums` returns P and N for two bounds, `reaches` compares them with a target;
3. `search` bisects a path of bounds.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.types import SOURCES, Batch, Bounds, Source, agree

Contribution = Literal['gradient', 'surrogate']
Order = Literal['upper', 'lower']


class Share(NamedTuple):
  """Settings of a bound search: the share of the gradient to reach, and its terms.

  The fields are the knobs of `clip.Balanced`, which explains them.
  """

  target: float = 0.42
  contribution: Contribution = 'gradient'
  weight: Literal['one', 'behaviour'] = 'one'
  order: Order = 'upper'
  sources: tuple[Source, ...] = SOURCES


def search(
  ratio_BT: Array,
  batch: Batch,
  lows: np.ndarray,
  highs: np.ndarray,
  k: Share,
  weight_BT: Array | None = None,
) -> Bounds:
  """Returns the first point of a path of bounds that meets the target, or the last.

  The path moves one bound from its first to its last value, then the other bound.

  Args:
    ratio_BT, batch, weight_BT: see `contributions`.
    lows, highs: the ascending values of each bound, computed on the host, because a
      compiled low + step * i may round once instead of twice.
    k: the definition of the share, and its target.

  Returns:
    The bounds, with `cap` and `dual` inf. If no token counts, they stay at the start.
  """
  plus_BT, minus_BT = contributions(ratio_BT, batch, k, weight_BT)
  positives = (plus_BT > 0).any()
  negatives = (minus_BT > 0).any()
  evidence = positives | negatives
  down = len(lows) - 1  # steps of the lower bound
  up = len(highs) - 1
  low_points = jnp.asarray(lows)
  high_points = jnp.asarray(highs)

  # Point `index` of the path: all steps of the first leg, then those of the second.
  def bounds(index: Array | int) -> tuple[Array, Array]:
    leg = jnp.minimum(index, up if k.order == 'upper' else down)
    i, j = (index - leg, leg) if k.order == 'upper' else (leg, index - leg)
    return low_points[i], high_points[j]

  def meets(index: Array | int) -> Array:
    sides = sums(ratio_BT, plus_BT, minus_BT, *bounds(index), k.contribution)
    return reaches(*sides, k.target)

  # The range of indices in which `meets` changes from False to True at most once.
  if k.contribution == 'gradient':
    begin, end = 0, down + up + 1
  elif k.order == 'upper':
    # Raising the lower bound lowers this share: the second leg cannot meet the target.
    begin, end = 0, up + 1
  else:
    # The first leg lowers the share: only the start or the second leg can meet it.
    begin, end = down + 1, down + up + 1
  index = bisect(meets, begin, end)
  if begin:
    index = jnp.where(meets(0), 0, index)
  # A missed target runs to the last point, as in Algorithm 1; without evidence the
  # search must not move, or a batch without advantages would open the bounds.
  met = (index < end) & evidence
  index = jnp.where(met, index, jnp.where(evidence, down + up, 0))
  # Tokens of one sign: their share is 0 or 1 at every point, whatever the bounds.
  inf = jnp.float32(math.inf)
  one_sided = negatives & ~positives
  return Bounds(*bounds(index), inf, inf, *bounds(0), index, met, ~evidence, one_sided)


def bisect(meets: Callable[[Array], Array], begin: int, end: int) -> Array:
  """Returns the smallest i in [begin, end) with meets(i), i32; `end` if there is none.

  `meets` must be False up to some index and True from there on; it is called
  ceil(log2(end - begin + 1)) times.
  """

  def halve(_: Array, between: tuple[Array, Array]) -> tuple[Array, Array]:
    start, stop = between
    middle = (start + stop) // 2
    enough = meets(middle)
    return jnp.where(enough, start, middle + 1), jnp.where(enough, middle, stop)

  # A fixed number of calls: the program, and its time, do not depend on the data.
  calls = math.ceil(math.log2(end - begin + 1))
  return jax.lax.fori_loop(0, calls, halve, (jnp.int32(begin), jnp.int32(end)))[1]


def share(
  ratio_BT: Array,
  batch: Batch,
  low: Array | float,
  high: Array | float,
  k: Share = Share(),
  weight_BT: Array | None = None,
) -> Array:
  """Returns P / (P + N), the share of tokens with A > 0; 0 if no such token counts.

  See `contributions` for ratio_BT, batch, k and weight_BT.
  """
  sides = contributions(ratio_BT, batch, k, weight_BT)
  positive, negative = sums(ratio_BT, *sides, low, high, k.contribution)
  total = positive + negative
  return jnp.where(positive > 0, positive / jnp.where(total > 0, total, 1), 0)


def contributions(
  ratio_BT: Array, batch: Batch, k: Share, weight_BT: Array | None = None
) -> tuple[Array, Array]:
  """Returns what each token adds to P and to N while no bound cuts the token.

  P is a sum over tokens with A > 0, and N over tokens with A < 0: the search raises
  P / (P + N) to its target. Raises ValueError if the shapes of the arrays differ.

  Args:
    ratio_BT: r, the ratio that the loss rule clips.
    batch: the tokens; behavior_logp_BT is read if k.weight='behaviour'.
    k: its `contribution`, `weight` and `sources` (rows of other sources do not count).
    weight_BT: W, the weight of each token in the gradient, unused with 'surrogate'.
      None stands for r A, as in the clipped loss with loss.aggregate='token'.

  Returns:
    (plus_BT, minus_BT): what a token adds to P and to N, 0 if it does not count. It is
    w |W| with k.contribution='gradient', and with 'surrogate' w |A|, which `sums`
    multiplies by the clipped ratio. w is 1, or with k.weight='behaviour' the token's
    probability under the behaviour policy.
  """
  agree(ratio_BT=ratio_BT, adv_BT=batch.adv_BT, loss_mask_BT=batch.loss_mask_BT)
  adv_BT = jnp.asarray(batch.adv_BT)
  # Masked by `where` at the end, not multiplied: 0 times an infinite ratio is nan.
  counts_BT = batch.loss_mask_BT & ~jnp.isnan(ratio_BT) & (adv_BT != 0)
  if set(k.sources) != set(SOURCES):
    inside = [batch.source_B == SOURCES.index(source) for source in k.sources]
    counts_BT &= jnp.any(jnp.stack(inside), 0)[:, None]
  # Eq. 8 of the paper sums the clipped objective itself, of which A is the factor that
  # no bound changes; `sums` multiplies by the clipped ratio.
  if k.contribution == 'surrogate':
    weight_BT = adv_BT
  elif weight_BT is None:
    weight_BT = ratio_BT * adv_BT
  size_BT = jnp.abs(weight_BT)
  # A probability that underflows to 0 is left out: it would hide an infinite ratio.
  if k.weight == 'behaviour':
    mu_BT = jnp.exp(batch.behavior_logp_BT)
    counts_BT &= mu_BT > 0
    size_BT = size_BT * mu_BT
  size_BT = jnp.where(counts_BT & ~jnp.isnan(size_BT), size_BT, 0)
  plus_BT = jnp.where(adv_BT > 0, size_BT, 0)
  minus_BT = jnp.where(adv_BT < 0, size_BT, 0)
  return plus_BT, minus_BT


def sums(
  ratio_BT: Array,
  plus_BT: Array,
  minus_BT: Array,
  low: Array | float,
  high: Array | float,
  contribution: Contribution,
) -> tuple[Array, Array]:
  """Returns (P, N), the summed contributions under these bounds; both are >= 0."""
  if contribution == 'gradient':
    # A token at its bound is cut, as in the loss (`loss._crossed`).
    plus_BT = jnp.where(ratio_BT < high, plus_BT, 0)
    minus_BT = jnp.where(ratio_BT > low, minus_BT, 0)
  else:
    # The surrogate keeps the value of a cut token: only its gradient is gone.
    plus_BT = jnp.where(plus_BT > 0, plus_BT * jnp.minimum(ratio_BT, high), 0)
    minus_BT = jnp.where(minus_BT > 0, minus_BT * jnp.maximum(ratio_BT, low), 0)
  return plus_BT.sum(), minus_BT.sum()


def reaches(positive: Array, negative: Array, target: float) -> Array:
  """Returns whether P / (P + N) >= target, computed as P (1 - target) >= N target.

  Both products are monotone in floating point. The quotient is not monotone to the
  last bit, so bisection could differ from the published loop.
  """
  if target == 0:
    return jnp.ones_like(positive, bool)
  return (positive > 0) & (positive * (1 - target) >= negative * target)
