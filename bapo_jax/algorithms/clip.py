"""Limits how far the policy may move a token: one function per clip rule.

A rule maps (ratio_BT, batch, weigh, k) to Bounds. `unclipped` and `fixed` return
constants (PPO, GRPO; DAPO's clip-higher; dual clip). `balanced` searches both bounds at
every update (Balanced PO, arXiv:2510.18927, Algorithm 1): it raises the upper bound,
and then if necessary the lower bound, until the tokens with A > 0 reach their target
share of the policy gradient. `recipe` is the variant of the paper's public code.

The contribution of a token to the share is its weight in the gradient of the active
loss rule; `weigh` computes the weights for given bounds. bound_search.py sums them and
explains why bisection finds the same bounds as the published loop.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import bound_search, knobs
from bapo_jax.types import Batch, Bounds, Weigh


class Recipe(NamedTuple):
  """The settings of the bound search in Balanced PO's public code."""

  positive_to_negative: float = 0.5  # target P / N: surrogate of A > 0 over A < 0
  low: knobs.Range = (0.8, 0.95)
  high: knobs.Range = (1.2, 2.0)
  low_step: float = 0.05
  high_step: float = 0.1
  dual: float = 3.0


def unclipped(ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
  """Returns no bounds at all: plain importance weights."""
  return _constant(0.0, math.inf, math.inf)


def fixed(
  ratio_BT: Array, batch: Batch, weigh: Weigh, k: knobs.FixedClip = knobs.FixedClip()
) -> Bounds:
  """Returns the same bounds at every update; this is the baseline clip rule.

  k.low and k.high are 1 - eps and 1 + eps of PPO (arXiv:1707.06347, Eq. 7); a larger
  k.high is DAPO's clip-higher (arXiv:2503.14476, Eq. 10). k.dual is c of dual-clip PPO
  (arXiv:1912.09729): a token with A < 0 and a ratio of at least c has no gradient.
  """
  return _constant(k.low, k.high, k.dual)


def balanced(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  k: knobs.BalancedClip = knobs.BalancedClip(),
) -> Bounds:
  """Returns the first bounds on the path of Algorithm 1 that meet the target share.

  Args:
    ratio_BT: the ratios that the loss rule clips. A token whose ratio is nan does not
      count.
    batch: the tokens; its mask, advantages and sources decide which tokens count.
    weigh: bounds -> weights in the gradient. It is called once, with no bounds except
      `reused_high` and `dual`, so that tokens cut by these two do not count.
    k: `target` is rho_0 of the paper, `low` [a-, b-], `high` [a+, b+], `low_step`
      delta_2 and `high_step` delta_1. resolution='step' equals Algorithm 1 to the last
      bit; 'continuous' finds the crossing point to within TOLERANCE and ignores the
      steps. Only contribution='gradient' with weight='one' is a share of the gradient;
      'surrogate' with weight='behaviour' is Eq. 8 of the camera-ready.

  Returns:
    The bounds. If no point meets the target: the last point, with target_met=False. If
    no token counts: the first point, with no_evidence=True and target_met=False.
  """
  limits = {'cap': jnp.float32(k.reused_high), 'dual': jnp.float32(k.dual)}
  if k.resolution == 'continuous':
    paths = clamped(k.low, knobs.TOLERANCE), clamped(k.high, knobs.TOLERANCE)
  else:
    paths = points(k.low, k.low_step), points(k.high, k.high_step)
  weight_BT = weigh(_constant(0.0, math.inf, math.inf)._replace(**limits))
  bounds = bound_search.search(ratio_BT, batch, *paths, k, weight_BT)
  return bounds._replace(**limits)


def recipe(ratio_BT: Array, batch: Batch, weigh: Weigh, k: Recipe = Recipe()) -> Bounds:
  """Returns the bounds that the search of Balanced PO's public code finds.

  The search balances the clipped surrogate and not the gradient, so it does not call
  `weigh`. It moves the lower bound first and shortens the last step so that both bounds
  can reach their ends. To reproduce published runs, combine this rule with
  loss.clipped.limit=20 and learner.bounds_scope='micro_batch' (configs/aime.py:recipe).
  If no token has an advantage, both bounds stay at their start; the public code reports
  the target as met in this case.

  Args:
    k: the target t is for P / N; as a share P / (P + N) it is t / (1 + t). Only the
      loss applies k.dual, not the search.
  """
  search = knobs.BalancedClip(
    target=k.positive_to_negative / (1 + k.positive_to_negative),
    contribution='surrogate',
    order='lower',
  )
  paths = clamped(k.low, k.low_step), clamped(k.high, k.high_step)
  bounds = bound_search.search(ratio_BT, batch, *paths, search)
  return bounds._replace(dual=jnp.float32(k.dual))


def dcpo(
  ratio_BT: Array, batch: Batch, weigh: Weigh, k: knobs.DcpoClip = knobs.DcpoClip()
) -> Bounds:
  """Returns bounds by token [B, T], wider for unlikely tokens: DCPO.

  arXiv:2509.02333: with p = pi(token) and q = mu(token), a token is inside its bounds
  while |p - q| r <= eps, for r above 1/2. The upper bound is at most k.cap, as in the
  public code.
  """
  q_BT = jnp.exp(batch.behavior_logp_BT)
  low_BT = (1 + jnp.sqrt(jnp.maximum(1 - 4 * k.low / q_BT, 0))) / 2
  high_BT = (1 + jnp.sqrt(1 + 4 * k.high / q_BT)) / 2
  high_BT = jnp.minimum(high_BT, k.cap)
  return _constant(0.0, math.inf, k.dual)._replace(
    low=low_BT, high=high_BT, start_low=low_BT, start_high=high_BT
  )


def _constant(low: float, high: float, dual: float) -> Bounds:
  low_, high_, dual_, cap = (jnp.float32(x) for x in (low, high, dual, math.inf))
  met, no = jnp.asarray(True), jnp.asarray(False)
  return Bounds(low_, high_, cap, dual_, low_, high_, jnp.int32(0), met, no, no)


def points(ends: knobs.Range, step: float) -> np.ndarray:
  """Returns start + i * step for all whole steps: 15 steps for 0.6..0.9 by 0.02."""
  # Multiplied, not accumulated: sixteen float additions of 0.02 stop at 0.88.
  steps = int((ends[1] - ends[0]) / step + 1e-6) if step else 0
  return np.asarray([ends[0] + step * i for i in range(steps + 1)], np.float32)


def clamped(ends: knobs.Range, step: float) -> np.ndarray:
  """Returns start + i * step, or `end` if that would overshoot it."""
  steps = math.ceil((ends[1] - ends[0]) / step - 1e-6) if step else 0
  values = [min(ends[0] + step * i, ends[1]) for i in range(steps + 1)]
  return np.asarray(values, np.float32)


RULES = {
  'unclipped': unclipped,
  'fixed': fixed,
  'balanced': balanced,
  'recipe': recipe,
  'dcpo': dcpo,
}
