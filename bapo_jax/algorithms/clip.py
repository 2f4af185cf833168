"""How far the policy may move a token: rules (ratio_BT, batch) -> Bounds.

`unclipped` and `fixed` are constants (PPO, GRPO; DAPO's clip-higher; dual clip).
`balanced` searches the two bounds at every update (Balanced PO, arXiv:2510.18927,
Algorithm 1): until the tokens with A > 0 carry their share of the policy gradient,
raise the upper bound, and when that is at its cap, the lower one.
`recipe` is the same search as the paper's public code does it.

What a token contributes to that share, and why bisection finds the bounds of the
published loop, is said in search.py.
"""

import math

import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import bound_search
from bapo_jax.types import SOURCES, Batch, Bounds

CHOICES = {
  'contribution': ('gradient', 'surrogate'),
  'weight': ('one', 'behaviour'),
  'order': ('upper', 'lower'),
  'resolution': ('step', 'continuous'),
}


def unclipped(ratio_BT, batch: Batch) -> Bounds:
  """No bounds at all: plain importance weights."""
  del ratio_BT, batch
  return _constant(0.0, math.inf, math.inf)


def fixed(
  ratio_BT, batch: Batch, *, low: float = 0.8, high: float = 1.2, dual: float = math.inf
) -> Bounds:
  """The same bounds at every update: the identity of this slot.

  Args:
    low, high: 1 - eps and 1 + eps of PPO (arXiv:1707.06347, Eq. 7); DAPO's clip-higher
      is a larger high (arXiv:2503.14476, Eq. 10).
    dual: c of dual-clip PPO (arXiv:1912.09729), the ratio above which a token with
      A < 0 gives no gradient; infinity is none.
  """
  del ratio_BT, batch
  if not 0 <= low <= 1 <= high:
    raise ValueError(
      f'clip.fixed.low={low}, clip.fixed.high={high}: must be in [0, 1] and from 1 up'
    )
  check_above_one('clip.fixed.dual', dual)
  return _constant(low, high, dual)


def balanced(
  ratio_BT,
  batch: Batch,
  *,
  target: float = 0.4,
  low: tuple[float, float] = (0.6, 0.9),
  high: tuple[float, float] = (1.2, 3.0),
  low_step: float = 0.02,
  high_step: float = 0.05,
  contribution: str = 'gradient',
  weight: str = 'one',
  order: str = 'upper',
  resolution: str = 'step',
  tolerance: float = 1e-4,
  sources: tuple[str, ...] = SOURCES,
  reused_high: float = math.inf,
  dual: float = math.inf,
) -> Bounds:
  """The first bounds on Algorithm 1's path that give positive tokens their share.

  Args:
    ratio_BT: pi / mu of each token. A token whose ratio is nan counts for nothing.
    batch: its mask, advantages, sources, and log mu for weight='behaviour'.
    target: rho_0, a share in [0, 1].
    low, high: where each bound starts and where it must stop.
    low_step, high_step: delta_2 and delta_1 of Algorithm 1; 0 holds a bound whose range
      is a single point.
    contribution: what a token contributes, see search.py.
    weight: w, 'one' or the probability 'behaviour' gave the token (Eq. 8 as printed).
    order: which bound moves first, all the way to its end.
    resolution: 'step' is Algorithm 1 to the last bit; 'continuous' finds the crossing
      itself to within `tolerance`, and needs no steps.
    sources: rows that are searched on; the others live under what is found.
    reused_high: the most that the upper bound may be for reused rows.
    dual: as in `fixed`; the search does not see it.

  Returns:
    Bounds; where no point meets the target, the last point of the path, `met` False.
    Without a token that counts the share is 0.

  Raises:
    ValueError: naming knob, value and range.
  """
  knobs = dict(contribution=contribution, weight=weight, order=order)
  check_share('clip.balanced.target', target)
  check_choices('clip.balanced', **knobs, resolution=resolution)
  check_sources('clip.balanced.sources', sources)
  check_above_one('clip.balanced.dual', dual)
  check_above_one('clip.balanced.reused_high', reused_high)
  check_ranges('clip.balanced', low, high)
  if resolution == 'continuous':
    if not 0 < tolerance <= 0.1:
      raise ValueError(f'clip.balanced.tolerance={tolerance}: must be in (0, 0.1]')
    legs = clamped(low, tolerance), clamped(high, tolerance)
  else:
    check_steps('clip.balanced', low, high, low_step, high_step)
    legs = points(low, low_step), points(high, high_step)
  found = bound_search.along(
    ratio_BT, batch, *legs, target=target, sources=sources, **knobs
  )
  return found._replace(cap=jnp.float32(reused_high), dual=jnp.float32(dual))


def recipe(
  ratio_BT,
  batch: Batch,
  *,
  positive_to_negative: float = 0.5,
  low: tuple[float, float] = (0.8, 0.95),
  high: tuple[float, float] = (1.2, 2.0),
  low_step: float = 0.05,
  high_step: float = 0.1,
  dual: float = 3.0,
) -> Bounds:
  """The search of the paper's public code: `surrogate`, lower bound first.

  A last step is cut short so that each bound can reach its end. For parity with
  published runs; with it belong loss.clipped.limit=20 and learner.bounds_scope='slice'
  (configs/aime.py:recipe). It differs where there is nothing to bound: of a minibatch
  without any advantage that code calls the target met.

  Args:
    positive_to_negative: target of P / N, t; as a share t / (1 + t).
    dual: dual clip of the loss, which the search does not see.
  """
  if not positive_to_negative >= 0:
    raise ValueError(
      f'clip.recipe.positive_to_negative={positive_to_negative}: must be at least 0'
    )
  check_above_one('clip.recipe.dual', dual)
  check_ranges('clip.recipe', low, high)
  check_steps('clip.recipe', low, high, low_step, high_step)
  found = bound_search.along(
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
  low, high, dual, cap = (jnp.float32(x) for x in (low, high, dual, math.inf))
  return Bounds(low, high, cap, dual, low, high, jnp.int32(0), jnp.asarray(True))


def points(ends: tuple[float, float], step: float) -> np.ndarray:
  """start + i step, as far as whole steps go; 15 steps for 0.6..0.9 by 0.02."""
  # Not by adding up: sixteen additions of 0.02 in floating point stop at 0.88.
  moves = int((ends[1] - ends[0]) / step + 1e-6) if step else 0
  return np.float32([ends[0] + step * i for i in range(moves + 1)])


def clamped(ends: tuple[float, float], step: float) -> np.ndarray:
  """Like `points`, and a last, shorter step to the end itself."""
  moves = math.ceil((ends[1] - ends[0]) / step - 1e-6) if step else 0
  return np.float32([min(ends[0] + step * i, ends[1]) for i in range(moves + 1)])


def check_share(name: str, value: float) -> None:
  """Raises ValueError unless the value is a share."""
  if not 0 <= value <= 1:
    raise ValueError(f'{name}={value}: a share, must be within [0, 1]')


def check_ranges(section: str, low, high) -> None:
  """Raises ValueError unless `low` rises within (0, 1] and `high` from 1 up."""
  for name, ends in (('low', low), ('high', high)):
    if len(ends) != 2:
      raise ValueError(f'{section}.{name}={ends}: a range, give (start, end)')
    least, most, allowed = (0, 1, '(0, 1]') if name == 'low' else (1, 1e9, 'from 1 up')
    if not (least <= ends[0] <= ends[1] <= most and ends[0] > 0):
      raise ValueError(f'{section}.{name}={ends}: must rise and stay within {allowed}')


def check_steps(section: str, low, high, low_step: float, high_step: float) -> None:
  """Raises ValueError unless each range has room for a step."""
  for name, ends, step in (('low', low, low_step), ('high', high, high_step)):
    width = ends[1] - ends[0]
    if not 0 < step <= width + 1e-6 and not step == width == 0:  # held
      raise ValueError(
        f'{section}.{name}_step={step}: must be in (0, {width:.6g}], the width of the '
        f'range {ends} (0 for a range of one point, which holds that bound)'
      )


def check_above_one(name: str, value: float) -> None:
  """Raises ValueError unless value > 1."""
  if not value > 1:
    raise ValueError(f'{name}={value}: must be above 1 (inf: none)')


def check_choices(section: str, **knobs: str) -> None:
  """Raises ValueError where a knob is none of its choices."""
  for name, value in knobs.items():
    if value not in CHOICES[name]:
      raise ValueError(f'{section}.{name}={value!r}: choose one of {CHOICES[name]}')


def check_sources(name: str, sources) -> None:
  """Raises ValueError unless `sources` are some of types.SOURCES."""
  if not sources or set(sources) - set(SOURCES):
    raise ValueError(f'{name}={sources}: choose some of {SOURCES}')


RULES = {
  'unclipped': unclipped,
  'fixed': fixed,
  'balanced': balanced,
  'recipe': recipe,
}
