"""How far the policy may move a token: clip rules (ratio_BT, batch, weigh) -> Bounds.

`unclipped` and `fixed` are constants (PPO, GRPO; DAPO's clip-higher; dual clip).
`balanced` searches the two bounds at every update (Balanced PO, arXiv:2510.18927,
Algorithm 1): it raises the upper bound until tokens with A > 0 have their share of the
policy gradient, and then, if the upper bound is at its end, the lower one.
`recipe` is the same search as the paper's public code does it.

What a token contributes to that share is its weight in the gradient of the loss rule in
force, which `weigh` computes from bounds. bound_search.py has the sums, and why
bisection finds the bounds of the published loop.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import bound_search, knobs
from bapo_jax.types import Batch, Bounds, Weigh

_FIXED = knobs.FixedClip()
_BALANCED = knobs.BalancedClip()
_RECIPE = knobs.RecipeClip()


def unclipped(ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
  """No bounds at all: plain importance weights."""
  del ratio_BT, batch, weigh
  return _constant(0.0, math.inf, math.inf)


def fixed(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  low: float = _FIXED.low,
  high: float = _FIXED.high,
  dual: float = _FIXED.dual,
) -> Bounds:
  """The same bounds at every update: the identity of this slot.

  Args:
    low, high: 1 - eps and 1 + eps of PPO (arXiv:1707.06347, Eq. 7); DAPO's clip-higher
      is a larger high (arXiv:2503.14476, Eq. 10).
    dual: c of dual-clip PPO (arXiv:1912.09729), the ratio above which a token with
      A < 0 gives no gradient; infinity is none.
  """
  del ratio_BT, batch, weigh
  return _constant(low, high, dual)


def balanced(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  target: float = _BALANCED.target,
  low: knobs.Range = _BALANCED.low,
  high: knobs.Range = _BALANCED.high,
  low_step: float = _BALANCED.low_step,
  high_step: float = _BALANCED.high_step,
  contribution: knobs.Contribution = _BALANCED.contribution,
  weight: knobs.TokenWeight = _BALANCED.weight,
  order: knobs.Order = _BALANCED.order,
  resolution: knobs.Resolution = _BALANCED.resolution,
  tolerance: float = _BALANCED.tolerance,
  sources: tuple[knobs.Source, ...] = _BALANCED.sources,
  reused_high: float = _BALANCED.reused_high,
  dual: float = _BALANCED.dual,
) -> Bounds:
  """The first bounds on Algorithm 1's path that give positive tokens their share.

  Args:
    ratio_BT: what the loss rule clips. A token whose ratio is nan counts for nothing.
    batch: its mask, advantages, sources, and log mu for weight='behaviour'.
    weigh: bounds -> the weights that the bounds cut; called once, with no bounds but
      `reused_high` and `dual`, so that what these cut counts for nothing.
    target: rho_0, a share in [0, 1]; 0.4 in the paper.
    low, high: first and last value of each bound.
    low_step, high_step: delta_2 and delta_1 of Algorithm 1; 0 holds a bound whose range
      is a single point.
    contribution, weight: what a token contributes, see bound_search.py. Only `gradient`
      and 'one' are a share of the gradient; 'behaviour' is Eq. 8 as printed.
    order: the bound that moves first, all the way to its end.
    resolution: 'step' is Algorithm 1 to the last bit; 'continuous' finds the crossing
      itself to within `tolerance`, and needs no steps.
    sources: rows that the search counts; the others live under the bounds it finds.
    reused_high: upper limit of the upper bound for reused rows.
    dual: as in `fixed`.

  Returns:
    Bounds: the last point of the path, and not `target_met`, where no point meets the
    target; the first one, `no_evidence` and not `target_met`, where no token counts.
  """
  limits = {'cap': jnp.float32(reused_high), 'dual': jnp.float32(dual)}
  if resolution == 'continuous':
    paths = clamped(low, tolerance), clamped(high, tolerance)
  else:
    paths = points(low, low_step), points(high, high_step)
  found = bound_search.search(
    ratio_BT,
    batch,
    *paths,
    target=target,
    weight_BT=weigh(_constant(0.0, math.inf, math.inf)._replace(**limits)),
    contribution=contribution,
    weight=weight,
    order=order,
    sources=sources,
  )
  return found._replace(**limits)


def recipe(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  positive_to_negative: float = _RECIPE.positive_to_negative,
  low: knobs.Range = _RECIPE.low,
  high: knobs.Range = _RECIPE.high,
  low_step: float = _RECIPE.low_step,
  high_step: float = _RECIPE.high_step,
  dual: float = _RECIPE.dual,
) -> Bounds:
  """The search of the paper's public code: `surrogate`, lower bound first.

  A last step is cut short so that each bound can reach its end. For parity with
  published runs; loss.clipped.limit=20 and learner.bounds_scope='micro_batch' belong to
  it (configs/aime.py:recipe). What it balances is no share of the gradient, and `weigh`
  is not asked. Where no token has an advantage both stay at the start; that code calls
  the target of such a minibatch met.

  Args:
    positive_to_negative: target of P / N, t; as a share t / (1 + t).
    low, high, low_step, high_step: as in `balanced`.
    dual: dual clip of the loss, which the search does not see.
  """
  del weigh
  found = bound_search.search(
    ratio_BT,
    batch,
    clamped(low, low_step),
    clamped(high, high_step),
    target=positive_to_negative / (1 + positive_to_negative),
    contribution='surrogate',
    order='lower',
  )
  return found._replace(dual=jnp.float32(dual))


def _constant(low: float, high: float, dual: float) -> Bounds:
  low_, high_, dual_, cap = (jnp.float32(x) for x in (low, high, dual, math.inf))
  met, no = jnp.asarray(True), jnp.asarray(False)
  return Bounds(low_, high_, cap, dual_, low_, high_, jnp.int32(0), met, no, no)


def points(ends: knobs.Range, step: float) -> np.ndarray:
  """start + i step, as far as whole steps go; 15 steps for 0.6..0.9 by 0.02."""
  # Not by adding up: sixteen additions of 0.02 in floating point stop at 0.88.
  steps = int((ends[1] - ends[0]) / step + 1e-6) if step else 0
  return np.asarray([ends[0] + step * i for i in range(steps + 1)], np.float32)


def clamped(ends: knobs.Range, step: float) -> np.ndarray:
  """Like `points`, and a last, shorter step to the end itself."""
  steps = math.ceil((ends[1] - ends[0]) / step - 1e-6) if step else 0
  values = [min(ends[0] + step * i, ends[1]) for i in range(steps + 1)]
  return np.asarray(values, np.float32)


RULES = {
  'unclipped': unclipped,
  'fixed': fixed,
  'balanced': balanced,
  'recipe': recipe,
}
