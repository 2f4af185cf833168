"""How far the policy may move a token: rules (ratio_BT, adv_BT, mask_BT) -> Bounds.

`fixed` is two numbers (PPO, GRPO; DAPO's clip-higher).
`balanced` searches the two at every update (Balanced PO, arXiv:2510.18927, Algorithm
1): until the tokens with A > 0 carry their share of the policy gradient, raise the
upper bound, and when that is at its cap, the lower one.

The share is P / (P + N), where P sums w r A over A > 0, r < high, and N sums w r |A|
over A < 0, r > low (Eq. 5: the tokens whose gradient is not cut, w = 1). P depends on
`high` alone and N on `low` alone, and both moves raise the share: so the first point of
the path that meets the target is found by bisection over the integer index of the path,
in 6 evaluations where the loop needs up to 51, with identical bounds.
"""

import math

import jax
import jax.numpy as jnp

from bapo_jax.types import Bounds, agree


def fixed(ratio_BT, adv_BT, mask_BT, *, low: float = 0.8, high: float = 1.2) -> Bounds:
  """The same bounds at every update: the identity of this slot."""
  del ratio_BT, adv_BT, mask_BT
  check('clip.fixed', (low, 1.0), (1.0, high))
  return Bounds(jnp.float32(low), jnp.float32(high), jnp.int32(0), jnp.asarray(True))


def balanced(
  ratio_BT,
  adv_BT,
  mask_BT,
  *,
  target: float = 0.4,
  low: tuple[float, float] = (0.6, 0.9),
  high: tuple[float, float] = (1.2, 3.0),
  low_step: float = 0.02,
  high_step: float = 0.05,
) -> Bounds:
  """The first bounds on Algorithm 1's path that give positive tokens their share.

  Args:
    ratio_BT: pi / mu of each token. adv_BT: its advantage. mask_BT: does it count?
    target: rho_0 in [0, 1]. low, high: where each bound starts and where it must stop.
    low_step, high_step: delta_2 and delta_1 of Algorithm 1.

  Returns:
    Bounds; where no point meets the target, the last point of the path, `met` False.
  """
  agree(ratio_BT=ratio_BT, adv_BT=adv_BT, mask_BT=mask_BT)
  check('clip.balanced', low, high, target, low_step=low_step, high_step=high_step)
  high_moves = moves_between(*high, high_step)
  low_moves = moves_between(*low, low_step)
  # The loop's guard asks for room below b- even while it is `high` that moves.
  last = high_moves + low_moves if low_moves else 0

  # Made here: compiled, low + step * i may round once where it rounds twice eagerly.
  lows = jnp.float32([low[0] + low_step * i for i in range(low_moves + 1)])
  highs = jnp.float32([high[0] + high_step * i for i in range(high_moves + 1)])

  def bounds(index):
    up = jnp.minimum(index, high_moves)
    return lows[index - up], highs[up]

  def meets(index):
    return share(ratio_BT, adv_BT, mask_BT, *bounds(index)) >= target

  def halve(_, between):
    below, reached = between  # `below` misses the target; `reached` meets it or is last
    middle = (below + reached + 1) // 2  # rounded up: -1 is no point of the path
    found = meets(middle)
    return jnp.where(found, below, middle), jnp.where(found, middle, reached)

  _, index = jax.lax.fori_loop(
    0, math.ceil(math.log2(last + 1)), halve, (jnp.int32(-1), jnp.int32(last))
  )
  c_low, c_high = bounds(index)
  return Bounds(c_low, c_high, index, meets(index))


def share(ratio_BT, adv_BT, mask_BT, low, high):
  """Part of the policy gradient that raises probabilities, in [0, 1]; 0 of nothing.

  Eq. 5: a token's coefficient is r A, and 0 where A > 0, r >= high or A < 0, r <= low.
  """
  weight_BT = jnp.where(mask_BT, ratio_BT * jnp.abs(adv_BT), 0)
  positive = jnp.where((adv_BT > 0) & (ratio_BT < high), weight_BT, 0).sum()
  negative = jnp.where((adv_BT < 0) & (ratio_BT > low), weight_BT, 0).sum()
  return positive / jnp.maximum(positive + negative, jnp.finfo(jnp.float32).tiny)


def moves_between(start: float, stop: float, step: float) -> int:
  """Whole steps from start to stop; 15 for 0.6..0.9 by 0.02, where floats add to 14."""
  return int((stop - start) / step + 1e-6)


def check(section: str, low, high, target: float = 0.0, **steps: float) -> None:
  """Raises ValueError, naming knob, value and range, unless the ranges make sense."""
  for name, ends in (('low', low), ('high', high)):
    if len(ends) != 2:
      raise ValueError(f'{section}.{name}={ends}: a range, give (start, end)')
  if not 0 < low[0] <= low[1] <= 1:
    raise ValueError(f'{section}.low={low}: must rise, within (0, 1]')
  if not 1 <= high[0] <= high[1]:
    raise ValueError(f'{section}.high={high}: must rise, from 1 up')
  if not 0 <= target <= 1:
    raise ValueError(f'{section}.target={target}: a share, must be within [0, 1]')
  for name, step in steps.items():
    if step <= 0:
      raise ValueError(f'{section}.{name}={step}: must be above 0')


RULES = {'fixed': fixed, 'balanced': balanced}
