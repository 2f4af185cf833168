"""Knobs of the advantage, clip and loss rules; those of the batch: batch_knobs.py.

A slot's section names the rule in force and holds a section for each of its rules, so
that choosing another rule is one word: --config.clip.rule=fixed. The knobs of a rule's
section are the keyword-only parameters of the rule's function.
"""

import math
from typing import Any, Literal, Self

import pydantic

from bapo_jax.knobs import NoKnobs, Section, knob

Aggregate = Literal['token', 'sequence', 'constant']
BeyondCap = Literal['truncate', 'mask']
Contribution = Literal['gradient', 'surrogate']
KlDirection = Literal['behavior_policy', 'policy_behavior']
Order = Literal['upper', 'lower']
Resolution = Literal['step', 'continuous']
Source = Literal['fresh', 'reevaluated', 'reused']
TokenWeight = Literal['one', 'behaviour']
Range = tuple[float, float]


class GroupRelative(Section):
  """GRPO's advantage."""

  eps: float = knob(
    1e-6, "Added to the variance of a group's rewards, under the root.", least=0, most=1
  )


class AdvantageConfig(Section):
  """From rewards to advantages."""

  rule: Literal['group_relative', 'leave_one_out', 'group_centred'] = knob(
    'group_relative', "Advantage rule: from a group's rewards to its advantages."
  )
  group_relative: GroupRelative = knob(GroupRelative, 'GRPO.')
  leave_one_out: NoKnobs = knob(NoKnobs, 'RLOO.')
  group_centred: NoKnobs = knob(NoKnobs, 'Dr. GRPO.')


def _dual(default: float) -> Any:
  sentence = 'Dual clip: ratio from which a token with A < 0 is cut; inf: none.'
  return knob(default, sentence, above=1, infinite=True)


def _lows(default: Range) -> Any:
  sentence = 'First and last value of the lower bound.'
  return knob(default, sentence, above=0, most=1, rising=True)


def _highs(default: Range) -> Any:
  sentence = 'First and last value of the upper bound.'
  return knob(default, sentence, least=1, most=1e9, rising=True)


def _step(default: float, bound: str) -> Any:
  sentence = f'Step of the {bound}; 0 for a range of one point.'
  return knob(default, sentence, least=0)


def _check_step(name: str, ends: Range, step: float) -> None:
  """Raises ValueError unless the range has room for a step, and at most a million."""
  width = ends[1] - ends[0]
  if step == width == 0:  # the bound is held
    return
  if not 0 < step <= width + 1e-6:
    raise ValueError(
      f'{name}_step={step}: must be in (0, {width:.6g}], the width of the range '
      f'{ends}; 0 for a range of one point, which holds that bound'
    )
  if width / step > 1e6:
    raise ValueError(f'{name}_step={step}: more than a million steps in {ends}')


class FixedClip(Section):
  """Constant bounds."""

  low: float = knob(0.8, 'Lower bound of the ratio, 1 - epsilon.', least=0, most=1)
  high: float = knob(
    1.2, 'Upper bound of the ratio, 1 + epsilon; inf: none.', least=1, infinite=True
  )
  dual: float = _dual(math.inf)


class BalancedClip(Section):
  """Algorithm 1 of Balanced PO (arXiv:2510.18927)."""

  target: float = knob(
    0.42,
    "rho_0: share of the policy gradient's mass that tokens with A > 0 shall have.",
    least=0,
    most=1,
  )
  low: Range = _lows((0.6, 0.9))
  high: Range = _highs((1.2, 3.0))
  low_step: float = _step(0.02, 'lower bound, delta_2')
  high_step: float = _step(0.05, 'upper bound, delta_1')
  contribution: Contribution = knob(
    'gradient',
    "A token's part in the share: its gradient if not cut, or its clipped surrogate.",
  )
  weight: TokenWeight = knob(
    'one', 'Weight of a token in the share: 1, or its probability when it was sampled.'
  )
  order: Order = knob('upper', 'The bound that moves first, all the way to its end.')
  resolution: Resolution = knob(
    'step',
    'step: Algorithm 1 to the last bit; continuous: the crossing within `tolerance`.',
  )
  tolerance: float = knob(
    1e-4, 'Largest error of a bound under resolution=continuous.', least=1e-6, most=0.1
  )
  sources: tuple[Source, ...] = knob(
    ('fresh', 'reevaluated', 'reused'),
    'Sources of the rows that the search counts; all rows live under its bounds.',
  )
  reused_high: float = knob(
    math.inf,
    'Upper limit of the upper bound for reused rows; inf: none.',
    above=1,
    infinite=True,
  )
  dual: float = _dual(math.inf)

  @pydantic.model_validator(mode='after')
  def _searchable(self) -> Self:
    if not self.sources:
      raise ValueError('sources=(): name at least one of fresh, reevaluated, reused')
    if self.resolution == 'step':
      _check_step('low', self.low, self.low_step)
      _check_step('high', self.high, self.high_step)
    return self


class RecipeClip(Section):
  """The search of Balanced PO's public code."""

  positive_to_negative: float = knob(
    0.5,
    'Target P / N: surrogate of tokens with A > 0 over that of tokens with A < 0.',
    least=0,
    most=1e9,
  )
  low: Range = _lows((0.8, 0.95))
  high: Range = _highs((1.2, 2.0))
  low_step: float = _step(0.05, 'lower bound')
  high_step: float = _step(0.1, 'upper bound')
  dual: float = _dual(3.0)

  @pydantic.model_validator(mode='after')
  def _searchable(self) -> Self:
    _check_step('low', self.low, self.low_step)
    _check_step('high', self.high, self.high_step)
    return self


class ClipConfig(Section):
  """How far the policy may move a token."""

  rule: Literal['unclipped', 'fixed', 'balanced', 'recipe'] = knob(
    'balanced', 'Clip rule: how far the policy may move a token.'
  )
  unclipped: NoKnobs = knob(NoKnobs, 'No bounds.')
  fixed: FixedClip = knob(FixedClip, 'PPO, GRPO; a higher `high` is DAPO.')
  balanced: BalancedClip = knob(BalancedClip, 'Balanced PO.')
  recipe: RecipeClip = knob(RecipeClip, "Balanced PO's public code.")


_BOUNDS = "choose clip.rule='fixed' or 'unclipped'"


def check_clip(clip: ClipConfig, loss: 'LossConfig') -> None:
  """Raises ValueError where a clip rule does not fit the loss.

  A search balances the gradient only where raising a bound takes tokens in or out and
  changes no other token's weight.
  """
  name = f'clip.rule={clip.rule!r}'
  if not loss.has_clip and clip.rule != 'unclipped':
    raise ValueError(
      f'{name}: loss.rule={loss.rule!r} has no clip to set; '
      "choose clip.rule='unclipped'"
    )
  if clip.rule not in ('balanced', 'recipe'):
    return
  if loss.rule == 'cispo':
    raise ValueError(
      f"{name} searches bounds that cut tokens, and loss.rule='cispo' cuts none: its "
      f'upper bound weighs both signs; {_BOUNDS}, or another loss.rule'
    )
  balanced = clip.balanced
  surrogate = clip.rule == 'recipe' or balanced.contribution == 'surrogate'
  if clip.rule == 'balanced' and surrogate:
    name = "clip.balanced.contribution='surrogate'"
    if balanced.reused_high < math.inf:
      raise ValueError(
        f'{name} does not see clip.balanced.reused_high={balanced.reused_high}; give '
        "inf, or contribution='gradient'"
      )
  if surrogate and (loss.rule, loss.aggregate) != ('clipped', 'token'):
    raise ValueError(
      f"{name} is the clipped surrogate's share, summed over tokens, which "
      f'loss.rule={loss.rule!r} with loss.aggregate={loss.aggregate!r} does not '
      "maximise; choose loss.rule='clipped' and loss.aggregate='token', or "
      "clip.rule='balanced' with contribution='gradient'"
    )
  if clip.rule == 'balanced' and balanced.weight != 'one' and loss.rule != 'clipped':
    raise ValueError(
      f'clip.balanced.weight={balanced.weight!r} is of Eq. 8 of the clipped loss, '
      f"which loss.rule={loss.rule!r} is not; give weight='one', or loss.rule='clipped'"
    )


class ClippedLoss(Section):
  """The PPO surrogate."""

  limit: float = knob(
    math.inf,
    'The log-ratio of a token is clamped to +- this, nats; inf: not clamped.',
    above=0,
    infinite=True,
  )


class DecoupledLoss(Section):
  """Decoupled PPO."""

  cap: float = knob(
    2.0,
    'Upper limit of prox / mu, the weight of a token; inf: none.',
    above=0,
    infinite=True,
  )
  beyond_cap: BeyondCap = knob(
    'truncate',
    'A token above `cap`: its weight is the cap (TIS), or it has no gradient (AReaL).',
  )


class TisLoss(Section):
  """Truncated importance sampling."""

  cap: float = knob(
    2.0,
    'Upper limit of pi / mu, the weight of a token; inf: none.',
    above=0,
    infinite=True,
  )


class LossConfig(Section):
  """The objective, token by token, and its sum."""

  rule: Literal['clipped', 'decoupled', 'sequence', 'cispo', 'tis'] = knob(
    'clipped', 'Loss rule: the objective of a token.'
  )
  aggregate: Aggregate = knob(
    'token',
    'Mean over tokens, over token means of responses, or over sums / max_new_tokens.',
  )
  kl: float = knob(
    0.0,
    'Cost per nat of divergence from mu, the policy that sampled the batch.',
    least=0,
    most=1000,
  )
  kl_direction: KlDirection = knob(
    'behavior_policy',
    'The divergence: behavior_policy, KL(mu || pi); policy_behavior, KL(pi || mu).',
  )
  clipped: ClippedLoss = knob(ClippedLoss, 'PPO, GRPO, DAPO.')
  decoupled: DecoupledLoss = knob(DecoupledLoss, 'AReaL.')
  sequence: NoKnobs = knob(NoKnobs, 'GSPO.')
  cispo: NoKnobs = knob(NoKnobs, 'CISPO.')
  tis: TisLoss = knob(TisLoss, 'TIS.')

  @property
  def needs_proximal(self) -> bool:
    """Whether the rule reads the proximal policy's log-probabilities."""
    return self.rule == 'decoupled'

  @property
  def weighs_sampler(self) -> bool:
    """Whether a truncated weight of its own corrects for the sampler's numbers."""
    return self.rule in ('decoupled', 'tis')

  @property
  def has_clip(self) -> bool:
    """Whether the rule clips by the bounds of a clip rule."""
    return self.rule != 'tis'
