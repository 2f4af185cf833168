"""Knobs of the advantage, clip and loss rules; those of the batch: batch_knobs.py.

The section of a slot names the active rule and contains one section per rule, so that
--config.clip.rule=fixed is enough to switch rules. A rule receives its own section as
its last argument, `k`; a rule without knobs has no such argument.
"""

import math
from typing import Any, ClassVar, Literal, Self

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


class AdvantageConfig(Section):
  """From rewards to advantages."""

  rule: Literal['group_relative', 'leave_one_out', 'group_centred'] = knob(
    'group_relative', "Advantage rule: from a group's rewards to its advantages."
  )
  group_relative: NoKnobs = knob(NoKnobs, 'GRPO.')
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
  """Raises a ValueError unless the range fits 1 to 1,000,000 steps."""
  width = ends[1] - ends[0]
  if step == width == 0:  # a constant bound
    return
  if not 0 < step <= width + 1e-6:
    raise ValueError(
      f'{name}_step={step}: must be in (0, {width:.6g}], the width of the range '
      f'{ends}; 0 for a range of one point, which keeps the bound constant'
    )
  if width / step > 1e6:
    raise ValueError(
      f'{name}_step={step}: more than 1,000,000 steps in {ends}; give a larger step'
    )


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
    'Target share of tokens with A > 0 in the policy gradient, rho_0.',
    least=0,
    most=1,
  )
  low: Range = _lows((0.6, 0.9))
  high: Range = _highs((1.2, 3.0))
  low_step: float = _step(0.02, 'lower bound, delta_2')
  high_step: float = _step(0.05, 'upper bound, delta_1')
  contribution: Contribution = knob(
    'gradient',
    'Contribution of a token: its gradient weight, or its clipped surrogate.',
  )
  weight: TokenWeight = knob(
    'one', 'Weight of a token in the share: 1, or its probability when it was sampled.'
  )
  order: Order = knob('upper', 'The bound that moves first, all the way to its end.')
  resolution: Resolution = knob(
    'step',
    'step: Algorithm 1 to the last bit; continuous: the crossing within 1e-4.',
  )
  sources: tuple[Source, ...] = knob(
    ('fresh', 'reevaluated', 'reused'),
    'Sources of the rows that the search counts; its bounds apply to all rows.',
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


class ClipConfig(Section):
  """How far the policy may move a token."""

  rule: Literal['unclipped', 'fixed', 'balanced', 'recipe'] = knob(
    'balanced', 'Clip rule: how far the policy may move a token.'
  )
  unclipped: NoKnobs = knob(NoKnobs, 'No bounds.')
  fixed: FixedClip = knob(FixedClip, 'PPO, GRPO; a higher `high` is DAPO.')
  balanced: BalancedClip = knob(BalancedClip, 'Balanced PO.')
  recipe: NoKnobs = knob(NoKnobs, "Balanced PO's public code.")


_BOUNDS = "choose clip.rule='fixed' or 'unclipped'"


def check_clip(clip: ClipConfig, loss: 'LossConfig') -> None:
  """Raises a ValueError if the clip rule does not fit the loss rule.

  A bound search balances the gradient only if raising a bound adds or removes tokens
  and changes the weight of no other token.
  """
  name = f'clip.rule={clip.rule!r}'
  if loss.bounds == 'ignored' and clip.rule != 'unclipped':
    raise ValueError(
      f'{name}: loss.rule={loss.rule!r} has no clip to set; '
      "choose clip.rule='unclipped'"
    )
  if clip.rule not in ('balanced', 'recipe'):
    return
  if loss.bounds == 'limit':
    raise ValueError(
      f'{name} searches for bounds that cut tokens, but loss.rule={loss.rule!r} limits '
      f'their weight and cuts none; {_BOUNDS}, or another loss.rule'
    )
  balanced = clip.balanced
  surrogate = clip.rule == 'recipe' or balanced.contribution == 'surrogate'
  if clip.rule == 'balanced' and surrogate:
    name = "clip.balanced.contribution='surrogate'"
    if balanced.reused_high < math.inf:
      raise ValueError(
        f'{name} ignores clip.balanced.reused_high={balanced.reused_high}; set it to '
        "inf, or choose contribution='gradient'"
      )
  if surrogate and (loss.rule, loss.aggregate) != ('clipped', 'token'):
    raise ValueError(
      f'{name} balances the clipped surrogate, summed over tokens, but '
      f'loss.rule={loss.rule!r} with loss.aggregate={loss.aggregate!r} maximises '
      "another objective; choose loss.rule='clipped' and loss.aggregate='token', or "
      "clip.rule='balanced' with contribution='gradient'"
    )
  if clip.rule == 'balanced' and balanced.weight != 'one' and loss.rule != 'clipped':
    raise ValueError(
      f'clip.balanced.weight={balanced.weight!r} is defined for the clipped loss only '
      f"(Eq. 8), but loss.rule={loss.rule!r}; choose weight='one' or "
      "loss.rule='clipped'"
    )


class LossKnobs(Section):
  """Base of the sections of the loss rules: declares what a rule needs."""

  # What the bounds of a clip rule do to a token: they 'cut' its gradient, 'limit' its
  # weight, or the loss rule has no use for them: 'ignored'.
  bounds: ClassVar[Literal['cut', 'limit', 'ignored']] = 'cut'
  needs_proximal: ClassVar[bool] = False  # reads Batch.prox_BT
  weighs_sampler: ClassVar[bool] = False  # corrects the sampler's log-probabilities


class ClippedLoss(LossKnobs):
  """Clipped surrogate of PPO."""

  limit: float = knob(
    math.inf,
    'The log-ratio of a token is clamped to +- this, nats; inf: not clamped.',
    above=0,
    infinite=True,
  )


class DecoupledLoss(LossKnobs):
  """Decoupled PPO."""

  needs_proximal = True
  weighs_sampler = True

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


class CispoLoss(LossKnobs):
  """CISPO."""

  bounds = 'limit'


class TisLoss(LossKnobs):
  """Truncated importance sampling."""

  bounds = 'ignored'
  weighs_sampler = True

  cap: float = knob(
    2.0,
    'Upper limit of pi / mu, the weight of a token; inf: none.',
    above=0,
    infinite=True,
  )


class DppoTvLoss(LossKnobs):
  """Divergence PPO, binary total variation."""

  bounds = 'ignored'
  weighs_sampler = True

  low: float = knob(
    0.2, 'Largest fall of the probability of a token with A <= 0.', above=0, most=1
  )
  high: float = knob(
    0.2, 'Largest rise of the probability of a token with A > 0.', above=0, most=1
  )
  cap: float = knob(
    20.0,
    'Upper limit of pi / mu, the weight of a token; inf: none.',
    above=0,
    infinite=True,
  )


class SapoLoss(LossKnobs):
  """Soft adaptive PO."""

  bounds = 'ignored'

  positive: float = knob(
    1.0, 'Temperature of the gate of tokens with A > 0.', least=1e-3, most=1e3
  )
  negative: float = knob(
    1.05, 'Temperature of the gate of tokens with A <= 0.', least=1e-3, most=1e3
  )


class LossConfig(Section):
  """The objective, token by token, and its sum."""

  rule: Literal[
    'clipped', 'decoupled', 'sequence', 'cispo', 'tis', 'dppo_tv', 'sapo'
  ] = knob('clipped', 'Loss rule: the objective of a token.')
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
  sequence: LossKnobs = knob(LossKnobs, 'GSPO.')
  cispo: CispoLoss = knob(CispoLoss, 'CISPO.')
  tis: TisLoss = knob(TisLoss, 'TIS.')
  dppo_tv: DppoTvLoss = knob(DppoTvLoss, 'DPPO.')
  sapo: SapoLoss = knob(SapoLoss, 'SAPO.')

  @property
  def active(self) -> LossKnobs:
    """Section of the active rule."""
    return getattr(self, self.rule)

  @property
  def needs_proximal(self) -> bool:
    """Whether the rule reads the log-probabilities of the proximal policy."""
    return self.active.needs_proximal

  @property
  def weighs_sampler(self) -> bool:
    """Whether the rule itself corrects the sampler's log-probabilities."""
    return self.active.weighs_sampler

  @property
  def bounds(self) -> str:
    """Effect of the clip bounds on a token: 'cut', 'limit' or 'ignored'."""
    return self.active.bounds
