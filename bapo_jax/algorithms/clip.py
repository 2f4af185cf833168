"""Limits how far the policy may move a token: one class per clip rule.

A rule maps (ratio_BT, batch, weigh) to Bounds. `Unclipped` and `Fixed` return constants
(PPO, GRPO; DAPO's clip-higher; dual clip). `Balanced` searches both bounds at every
update (Balanced PO, arXiv:2510.18927, Algorithm 1): it raises the upper bound, and then
if necessary the lower bound, until the tokens with A > 0 reach their target share of
the policy gradient. `Recipe` is the variant of the paper's public code.

The contribution of a token to the share is its weight in the gradient of the active
loss rule; `weigh` computes the weights for given bounds. bound_search.py sums them and
explains why bisection finds the same bounds as the published loop.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
import pydantic
from annotated_types import Interval
from jax import Array

from bapo_jax.algorithms import bound_search
from bapo_jax.algorithms.bound_search import Contribution, Order
from bapo_jax.knobs import Range, Rising, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.types import Batch, Bounds, Source, Weigh

TOLERANCE = 1e-4  # largest error of a bound with resolution='continuous'
WIDEST = 1e6  # points of a searched range
LOWEST = 0.5  # published lower bounds are 0 or above this


class ClipRule(Part):
  """Limits how far updates may move the probability of a token."""

  arguments = ('ratio_BT', 'batch', 'weigh')
  returns = ('bounds',)
  # A rule gives no bounds, `bounds`, or a `mask` of tokens, which fits any loss rule.
  gives: ClassVar[Literal['nothing', 'bounds', 'mask']] = 'bounds'
  # A rule that searches bounds balances the contributions of tokens to this sum.
  searches: ClassVar[Literal['nothing', 'gradient', 'surrogate']] = 'nothing'
  whole_minibatch: ClassVar[bool] = True  # bounds depend on all tokens of a minibatch

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    """Returns the bounds at which a loss rule clips these ratios.

    Args:
      ratio_BT: the ratios that the loss rule clips. A token whose ratio is nan does not
        count.
      batch: the tokens; its mask, advantages and sources decide which tokens count.
      weigh: bounds -> weights of the tokens in the gradient of the loss.
    """
    raise NotImplementedError

  def warning(self) -> str:
    """Says which knob has an unlikely value; '' for none."""
    return ''

  def refuses(self, config) -> Iterator[str]:
    """Refuses a loss rule that uses bounds in another way.

    A bound search balances the gradient only if raising a bound adds or removes tokens
    and changes the weight of no other token.
    """
    loss = config.loss
    name = f'clip.rule={self.rule!r}'
    if loss.bounds == 'ignored' and self.gives == 'bounds':
      yield (
        f'{name} has no effect, because loss.rule={loss.rule!r} ignores clip bounds; '
        "choose clip.rule='unclipped'"
      )
    # Such a bound scales all tokens of a response, so P would depend on `low` too, and
    # bisection on a share that is not monotone finds any point.
    if loss.bounds == 'limit' and self.searches != 'nothing':
      yield (
        f'{name} needs bounds that only cut tokens, but the bounds of loss.rule='
        f"{loss.rule!r} also change the weights of tokens; choose clip.rule='fixed' or "
        "'unclipped', or another loss.rule"
      )
    if self.searches == 'surrogate':
      yield from _without_surrogate(loss, name)

  def fault(self, result, example) -> str:
    """Says whether bounds are reversed, or are not what the rule declares."""
    # A bound has no axes, or an axis B, or the axes of the ratios.
    _, low, *upper = np.broadcast_arrays(example['ratio_BT'], *result[:4])
    if (low > upper[0]).any():
      return f'returns low={low.max():.4g} above high={upper[0].min():.4g}; swap them'
    gives = 'nothing' if result.keep_BT is None else 'mask'
    if (low > 0).any() or not np.isinf(upper).all():
      gives = 'bounds'
    if self.gives in ('bounds', gives):
      return ''
    return f'declares gives={self.gives!r}, but returns {gives}; change one of the two'


def _without_surrogate(loss, name: str) -> Iterator[str]:
  """Yields a sentence if a loss is not the clipped surrogate, summed over tokens."""
  if not loss.clips_surrogate or loss.aggregate != 'token':
    yield (
      f'{name} balances the clipped surrogate, summed over tokens, but '
      f'loss.rule={loss.rule!r} with loss.aggregate={loss.aggregate!r} maximises '
      "another objective; choose loss.rule='clipped' and loss.aggregate='token', or "
      "clip.rule='balanced' with contribution='gradient'"
    )


def _dual(default: float, needs: str | tuple[str, ...] = ()) -> Any:
  sentence = 'Dual clip: a token with A < 0 is cut from this ratio on; inf: none.'
  return knob(default, sentence, above=1, infinite=True, needs=needs)


def _epsilon(low: float, knob: Any) -> str:
  """Warns of a lower bound that may be an epsilon; 0 is a published bound, CISPO's."""
  if not 0 < low < LOWEST:
    return ''
  return (
    f'clip.low={knob} bounds the ratio and is not epsilon: a token is cut only '
    f'when its probability has fallen to {low:.4g} of its value; give 1 - epsilon, '
    f'which is {1 - low:.4g} for an epsilon of {low:.4g}'
  )


class Unclipped(ClipRule):
  """No bounds: plain importance weights."""

  gives = 'nothing'
  whole_minibatch = False

  rule: Literal['unclipped'] = 'unclipped'

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    return constant(0.0, math.inf, math.inf)


class Fixed(ClipRule):
  """The same bounds at every update, the baseline: PPO, GRPO, DAPO.

  `low` and `high` are 1 - eps and 1 + eps of PPO (arXiv:1707.06347, Eq. 7); a larger
  `high` is DAPO's clip-higher (arXiv:2503.14476, Eq. 10). `dual` is c of dual-clip PPO
  (arXiv:1912.09729): a token with A < 0 and a ratio of at least c has no gradient.
  """

  whole_minibatch = False

  rule: Literal['fixed'] = 'fixed'
  low: float = knob(
    0.8,
    'Lower bound of the ratio, 1 - epsilon: 0.8 for an epsilon of 0.2.',
    least=0,
    most=1,
  )
  high: float = knob(
    1.2,
    'Upper bound of the ratio, 1 + epsilon: 1.28 for an epsilon of 0.28; inf: none.',
    least=1,
    infinite=True,
  )
  dual: float = _dual(math.inf, needs='cuts_tokens')

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    return constant(self.low, self.high, self.dual)

  def warning(self) -> str:
    return _epsilon(self.low, self.low)


def _step(default: float, bound: str) -> Any:
  sentence = f'Step of the {bound}; 0 for a range of one point.'
  return knob(default, sentence, least=0, needs='searched_in_steps')


class Balanced(ClipRule):
  """Bounds that are searched at every update: Balanced PO (arXiv:2510.18927).

  The search (Algorithm 1 of the paper) raises the bounds step by step until tokens with
  A > 0 have the target share of the policy gradient. `target` is rho_0 of the paper,
  `low` [a-, b-], `high` [a+, b+], `low_step` delta_2 and `high_step` delta_1.

  resolution='step' equals Algorithm 1 to the last bit; 'continuous' finds the crossing
  point to within TOLERANCE and ignores the steps. Only contribution='gradient' with
  weight='one' is a share of the gradient; 'surrogate' with weight='behaviour' is Eq. 8
  of the camera-ready.

  Example: the first bounds [.6, 1.2] keep the ratios .7 and 1.1, so that the share is
  1.1 / 1.8 = .61. For .7 the upper bound rises until it also keeps the ratio 2.

    >>> import jax.numpy as jnp
    >>> from bapo_jax.algorithms import loss, masks
    >>> from bapo_jax.types import Batch
    >>> ratio_BT = jnp.asarray([[0.5, 0.7, 1.1, 2.0]])
    >>> adv_BT = jnp.asarray([[-1.0, -1.0, 1.0, 1.0]])
    >>> zero_BT = jnp.zeros((1, 4))
    >>> all_BT = zero_BT == 0
    >>> row_B = jnp.zeros(1, jnp.int32)
    >>> tokens_BT = jnp.zeros((1, 4), jnp.int32)
    >>> batch = Batch(tokens_BT, all_BT, zero_BT, zero_BT, adv_BT, row_B, all_BT)
    >>> rules = loss.Clipped(), Balanced(target=0.7), masks.NoMask()
    >>> find = loss.finder(rules, jnp.log(ratio_BT), batch, jnp.ones(1))
    >>> bounds = find(ratio_BT)
    >>> round(float(bounds.low), 2), round(float(bounds.high), 2)
    (0.6, 2.05)
  """

  searches = 'gradient'

  rule: Literal['balanced'] = 'balanced'
  target: float = knob(
    0.42,
    'Target share of tokens with A > 0 in the policy gradient, rho_0.',
    least=0,
    below=1,
  )
  low: Rising[Annotated[float, Interval(gt=0, le=1)]] = knob(
    (0.6, 0.9),
    'First and last value of the lower bound of the ratio, 1 - epsilon; '
    'clip.rule=fixed has a constant bound.',
  )
  high: Rising[Annotated[float, Interval(ge=1, le=1e9)]] = knob(
    (1.2, 3.0),
    'First and last value of the upper bound of the ratio, 1 + epsilon; '
    'clip.rule=fixed has a constant bound.',
  )
  low_step: float = _step(0.02, 'lower bound, delta_2')
  high_step: float = _step(0.05, 'upper bound, delta_1')
  contribution: Contribution = knob(
    'gradient',
    'Contribution of a token: its gradient weight, or its clipped surrogate.',
  )
  weight: Literal['one', 'behaviour'] = knob(
    'one', 'Weight of a token in the share: 1, or its probability under the sampler.'
  )
  order: Order = knob('upper', 'The bound that moves first, to its end if necessary.')
  resolution: Literal['step', 'continuous'] = knob(
    'step', 'step: Algorithm 1 to the last bit; continuous: the crossing within 1e-4.'
  )
  sources: tuple[Source, ...] = knob(
    ('fresh', 'reevaluated', 'reused'),
    'Sources of the rows that the search counts; the bounds apply to all rows.',
    needs='batch.uses_buffer',
  )
  reused_high: float = knob(
    math.inf,
    'Upper limit of the upper bound, 1 + epsilon, for reused rows; inf: none.',
    above=1,
    infinite=True,
    needs='batch.uses_buffer',
  )
  dual: float = _dual(math.inf)

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    """Returns the first bounds on the path of Algorithm 1 that meet the target share.

    `weigh` is called once, with no bounds except `reused_high` and `dual`, so that
    tokens cut by these two do not count.

    Returns:
      The bounds. If no point meets the target: the last point, with target_met=False.
      If no token counts: the first point, with no_evidence=True and target_met=False.
    """
    # Known before the search: these limits cut tokens that no searched bound can bring
    # back, so `weigh` sees them, and the share counts what the loss applies.
    limits = {'cap': jnp.float32(self.reused_high), 'dual': jnp.float32(self.dual)}
    # The same bisection on a fine table: no second search with its own rounding.
    if self.resolution == 'continuous':
      lows = clamped(self.low, TOLERANCE)
      highs = clamped(self.high, TOLERANCE)
    else:
      lows = points(self.low, self.low_step)
      highs = points(self.high, self.high_step)
    # Weights without searched bounds, once: each point then cuts by comparing ratios,
    # and no point differentiates the loss again.
    weight_BT = weigh(constant(0.0, math.inf, math.inf)._replace(**limits))
    bounds = bound_search.search(ratio_BT, batch, lows, highs, self.share, weight_BT)
    return bounds._replace(**limits)

  def warning(self) -> str:
    return _epsilon(self.low[0], self.low)

  def refuses(self, config) -> Iterator[str]:
    """Also refuses knobs that the loss or the batch leaves without a meaning."""
    yield from super().refuses(config)
    loss = config.loss
    sources = config.sources
    if self.contribution == 'surrogate':
      name = "clip.contribution='surrogate'"
      if self.reused_high < math.inf:
        yield (
          f'{name} ignores clip.reused_high={self.reused_high}; set reused_high=inf or '
          "contribution='gradient'"
        )
      yield from _without_surrogate(loss, name)
    if self.weight != 'one' and not loss.clips_surrogate:
      yield (
        f'clip.weight={self.weight!r} is defined for the clipped loss only (Eq. 8), '
        f"but loss.rule={loss.rule!r}; choose weight='one' or loss.rule='clipped'"
      )
    if set(self.sources).isdisjoint(sources):
      yield (
        f'clip.sources={self.sources} leaves the search without rows, because with '
        f'batch.rule={config.batch.rule!r} rows are {", ".join(sources)}; add one of '
        'these sources, or choose another batch.rule'
      )

  @property
  def share(self) -> bound_search.Share:
    """The share that the search balances."""
    return bound_search.Share(
      self.target, self.contribution, self.weight, self.order, self.sources
    )

  @pydantic.model_validator(mode='after')
  def _searchable(self) -> Self:
    if not self.sources:
      raise ValueError('sources=() is empty; add fresh, reevaluated or reused')
    if self.resolution == 'step':
      _check_step('low', self.low, self.low_step)
      _check_step('high', self.high, self.high_step)
    elif self.high[1] - self.high[0] > WIDEST * TOLERANCE:
      raise ValueError(
        f"high={self.high} is too wide for resolution='continuous', which searches it "
        f'in steps of {TOLERANCE:g}: give a range of width {WIDEST * TOLERANCE:g} or '
        "less, or resolution='step'"
      )
    return self


def _check_step(name: str, ends: Range, step: float) -> None:
  """Raises a ValueError unless the range contains 1 to WIDEST steps."""
  width = ends[1] - ends[0]
  if step == width == 0:  # a constant bound
    return
  if not 0 < step <= width + 1e-6:
    raise ValueError(
      f'{name}_step={step} must be above 0 and at most {width:.6g}, the width of the '
      f'range {ends}; for a constant bound set both ends equal and the step to 0'
    )
  if width / step > WIDEST:
    raise ValueError(
      f'{name}_step={step} makes over {WIDEST:,.0f} steps in {ends}; give a larger one'
    )


class PublicCode(NamedTuple):
  """The settings of the bound search in Balanced PO's public code."""

  positive_to_negative: float = 0.5  # target P / N: surrogate of A > 0 over A < 0
  low: Range[float] = (0.8, 0.95)
  high: Range[float] = (1.2, 2.0)
  low_step: float = 0.05
  high_step: float = 0.1
  dual: float = 3.0


class Recipe(ClipRule):
  """The search of Balanced PO's public code, with its settings.

  The search balances the clipped surrogate and not the gradient, so it does not call
  `weigh`. It moves the lower bound first and shortens the last step so that both bounds
  can reach their ends. To reproduce published runs, combine this rule with
  loss.limit=20 and learner.bounds_scope='micro_batch' (configs/aime.py:recipe). If no
  token has an advantage, both bounds stay at their start; the public code reports the
  target as met in this case.
  """

  searches = 'surrogate'
  settings: ClassVar[PublicCode] = PublicCode()

  rule: Literal['recipe'] = 'recipe'

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    k = self.settings
    # The target t of the code is for P / N; as a share P / (P + N) it is t / (1 + t).
    target = k.positive_to_negative / (1 + k.positive_to_negative)
    # The code's loop raises the lower bound first; the paper's Algorithm 1 the upper
    # one.
    share = bound_search.Share(target, contribution='surrogate', order='lower')
    lows = clamped(k.low, k.low_step)
    highs = clamped(k.high, k.high_step)
    bounds = bound_search.search(ratio_BT, batch, lows, highs, share)
    return bounds._replace(dual=jnp.float32(k.dual))  # applied by the loss alone


class Dcpo(ClipRule):
  """Bounds by token, wider for unlikely tokens: DCPO (arXiv:2509.02333).

  With p = pi(token) and q = mu(token), a token is inside its bounds while
  |p - q| r <= eps, for r above 1/2. The upper bound is at most `cap`, as in the public
  code.
  """

  whole_minibatch = False

  rule: Literal['dcpo'] = 'dcpo'
  low: float = knob(0.16, 'Epsilon of the lower bound.', above=0, most=1)
  high: float = knob(0.2, 'Epsilon of the upper bound.', above=0, most=10)
  cap: float = knob(
    10.0,
    'Largest upper bound of the ratio of a token; inf: none.',
    above=1,
    infinite=True,
  )
  dual: float = _dual(3.0)

  def __call__(self, ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    """Returns bounds by token [B, T]."""
    # Solves q |r - 1| r = eps for r on both sides of 1; without a real solution below 1
    # the bound is 1/2, where |p - q| r is largest.
    q_BT = jnp.exp(batch.behavior_logp_BT)
    low_BT = (1 + jnp.sqrt(jnp.maximum(1 - 4 * self.low / q_BT, 0))) / 2
    high_BT = (1 + jnp.sqrt(1 + 4 * self.high / q_BT)) / 2
    high_BT = jnp.minimum(high_BT, self.cap)
    return constant(0.0, math.inf, self.dual)._replace(
      low=low_BT, high=high_BT, start_low=low_BT, start_high=high_BT
    )


Clip = Annotated[
  ClipRule,
  OneOf(
    'Clip rule: how far updates may move the probability of a token.',
    Balanced,
    Fixed,
    Unclipped,
    Recipe,
    Dcpo,
  ),
]


def constant(low: float, high: float, dual: float) -> Bounds:
  """Returns bounds that are not searched."""
  met = jnp.asarray(True)
  no = jnp.asarray(False)
  # Arrays, not Python floats: compiled programs do not depend on the values.
  low_, high_, dual_, cap = (jnp.float32(x) for x in (low, high, dual, math.inf))
  return Bounds(low_, high_, cap, dual_, low_, high_, jnp.int32(0), met, no, no)


def points(ends: Range, step: float) -> np.ndarray:
  """Returns start + i * step for all whole steps: 15 steps for 0.6..0.9 by 0.02."""
  # Multiplied, not accumulated: sixteen float additions of 0.02 stop at 0.88.
  steps = int((ends[1] - ends[0]) / step + 1e-6) if step else 0
  return np.asarray([ends[0] + step * i for i in range(steps + 1)], np.float32)


def clamped(ends: Range, step: float) -> np.ndarray:
  """Returns start + i * step, or `end` if that would overshoot it."""
  steps = math.ceil((ends[1] - ends[0]) / step - 1e-6) if step else 0
  values = [min(ends[0] + step * i, ends[1]) for i in range(steps + 1)]
  return np.asarray(values, np.float32)
