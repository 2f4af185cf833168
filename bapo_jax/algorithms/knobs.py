"""Knobs of the replay buffer and of the four rule slots.

A slot's section has the name of the rule in force, and a section for each rule, so that
choosing another rule is one word: --config.clip.rule=fixed.
"""

import math
from typing import Literal

import pydantic

from bapo_jax.knobs import Section, knob

Source = Literal['fresh', 'reevaluated', 'reused']
Range = tuple[float, float]


class NoKnobs(Section):
  """A rule without knobs."""


class FixedThresholds(Section):
  """The same thresholds at every step."""

  hard: float = knob(
    1 / 8, 'c1: largest pass rate of a hard problem.', least=0, below=1
  )
  reusable: Range = knob(
    (1 / 8, 5 / 8), '(c2, c3): pass rates of reusable groups.', least=0, most=1
  )

  @pydantic.model_validator(mode='after')
  def _rises(self) -> 'FixedThresholds':
    return _rising(self, 'reusable')


class MovingThresholds(Section):
  """Thresholds that follow the mean verdict, each (start, end): Eq. 8."""

  hard: Range = knob(
    (1 / 8, 3 / 8), 'c1, largest pass rate of a hard problem.', least=0, below=1
  )
  low: Range = knob(
    (1 / 8, 3 / 8), 'c2, smallest pass rate of a reusable group.', least=0, most=1
  )
  high: Range = knob(
    (5 / 8, 7 / 8), 'c3, largest pass rate of a reusable group.', least=0, most=1
  )

  @pydantic.model_validator(mode='after')
  def _ordered(self) -> 'MovingThresholds':
    for c2, c3 in zip(self.low, self.high, strict=True):
      if c2 > c3:
        raise ValueError(
          f'low={self.low} and high={self.high}: c2={c2} is above c3={c3}'
        )
    return self


class ThresholdsConfig(Section):
  """Which problems are hard and which groups are reusable."""

  rule: Literal['fixed', 'moving', 'threshold_free', 'everything'] = knob(
    'fixed', 'Threshold rule.'
  )
  fixed: FixedThresholds = knob(FixedThresholds, 'Fixed thresholds.')
  moving: MovingThresholds = knob(MovingThresholds, 'Moving thresholds.')
  threshold_free: NoKnobs = knob(NoKnobs, 'Never solved; half solved.')
  everything: NoKnobs = knob(NoKnobs, 'Every group is reusable.')


class BufferConfig(Section):
  """The replay buffer."""

  capacity: int = knob(256, 'Rows of each part of the buffer.', least=1, most=1 << 20)
  max_off_policy_steps: int = knob(
    3, 'Learner steps after which a reusable group is dropped.', least=1
  )
  max_reuse: int = knob(3, 'Times that a reusable group is trained on again.', least=1)
  reevaluate: int = knob(16, 'Hard problems re-evaluated when it is due.', least=0)
  reeval_interval: int = knob(2, 'Learner steps between re-evaluations.', least=1)
  thresholds: ThresholdsConfig = knob(ThresholdsConfig, 'Hard and reusable.')

  @pydantic.model_validator(mode='after')
  def _has_room(self) -> 'BufferConfig':
    if self.reevaluate > self.capacity:
      raise ValueError(
        f'reevaluate={self.reevaluate} is more than buffer.capacity={self.capacity}'
      )
    return self


class SourceWeights(Section):
  """Weight of a row in the objective, by its source."""

  fresh: float = knob(1.0, 'Weight of fresh rows.', least=0)
  reevaluated: float = knob(1.0, 'Weight of re-evaluated rows.', least=0)
  reused: float = knob(1.0, 'Weight of reused rows.', least=0)


class ReplayRule(Section):
  """Plain experience replay."""

  replay_ratio: int = knob(1, 'Replayed groups per fresh group.', least=1, most=1024)


class BatchConfig(Section):
  """Which groups the learner sees."""

  rule: Literal['fresh_only', 'learnable_only', 'replay', 'adapted'] = knob(
    'fresh_only', 'Batch rule.'
  )
  max_extra_rounds: int = knob(
    2, 'Extra rounds of prompts per step, for learnable_only.', least=0, most=1024
  )
  weights: SourceWeights = knob(SourceWeights, 'Weights by source.')
  fresh_only: NoKnobs = knob(NoKnobs, 'GRPO.')
  learnable_only: NoKnobs = knob(NoKnobs, "DAPO's dynamic sampling.")
  replay: ReplayRule = knob(ReplayRule, 'Experience replay.')
  adapted: NoKnobs = knob(NoKnobs, 'Batch Adaptation PO.')

  @property
  def uses_buffer(self) -> bool:
    """Whether the rule looks at the replay buffer."""
    return self.rule in ('replay', 'adapted')

  @property
  def reevaluates(self) -> bool:
    """Whether hard problems are re-evaluated."""
    return self.rule == 'adapted'

  @property
  def extra_rounds(self) -> int:
    """Rounds of prompts that a step may sample beside its first."""
    return self.max_extra_rounds if self.rule == 'learnable_only' else 0

  def seats(self, prompts: int) -> int:
    """Groups in a batch, of so many prompts per step."""
    replayed = self.replay.replay_ratio if self.rule == 'replay' else 0
    return prompts * (1 + replayed)


class GroupRelative(Section):
  """GRPO's advantage."""

  eps: float = knob(1e-6, 'Added to the variance.', least=0, most=1)


class AdvantageConfig(Section):
  """How rewards become advantages."""

  rule: Literal['group_relative', 'leave_one_out', 'group_centred'] = knob(
    'group_relative', 'Advantage rule.'
  )
  group_relative: GroupRelative = knob(GroupRelative, 'GRPO.')
  leave_one_out: NoKnobs = knob(NoKnobs, 'RLOO.')
  group_centred: NoKnobs = knob(NoKnobs, 'Dr. GRPO.')


class FixedClip(Section):
  """Constant bounds."""

  low: float = knob(0.8, '1 - epsilon of PPO.', least=0, most=1)
  high: float = knob(1.2, '1 + epsilon of PPO.', least=1)
  dual: float = knob(math.inf, 'Dual clip; inf: none.', above=1, infinite=True)


class BalancedClip(Section):
  """Algorithm 1 of Balanced PO."""

  target: float = knob(
    0.42, 'Target share of the positive tokens in the gradient.', least=0, most=1
  )
  low: Range = knob((0.6, 0.9), 'Start and end of the lower bound.', above=0, most=1)
  high: Range = knob((1.2, 3.0), 'Start and end of the upper bound.', least=1, most=1e9)
  low_step: float = knob(0.02, 'Step of the lower bound (delta_2).', least=0)
  high_step: float = knob(0.05, 'Step of the upper bound (delta_1).', least=0)
  contribution: Literal['gradient', 'surrogate'] = knob(
    'gradient', 'What a token contributes to the share.'
  )
  weight: Literal['one', 'behaviour'] = knob(
    'one', 'Weight of a token: 1, or its probability under the behaviour policy.'
  )
  order: Literal['upper', 'lower'] = knob('upper', 'Which bound moves first.')
  resolution: Literal['step', 'continuous'] = knob(
    'step', 'Algorithm 1 to the last bit, or the crossing to within `tolerance`.'
  )
  tolerance: float = knob(1e-4, 'Of the continuous search.', least=1e-6, most=0.1)
  sources: tuple[Source, ...] = knob(
    ('fresh', 'reevaluated', 'reused'), 'Rows that the search looks at.'
  )
  reused_high: float = knob(
    math.inf,
    'Upper limit of the upper bound for reused rows; inf: none.',
    above=1,
    infinite=True,
  )
  dual: float = knob(math.inf, 'Dual clip; inf: none.', above=1, infinite=True)

  @pydantic.model_validator(mode='after')
  def _path(self) -> 'BalancedClip':
    if not self.sources:
      raise ValueError('sources=(): name one of fresh, reevaluated, reused at least')
    return _searchable(self, self.resolution == 'step')


class RecipeClip(Section):
  """The search of Balanced PO's public code."""

  positive_to_negative: float = knob(0.5, 'Target of P / N.', least=0, most=1e9)
  low: Range = knob((0.8, 0.95), 'Start and end of the lower bound.', above=0, most=1)
  high: Range = knob((1.2, 2.0), 'Start and end of the upper bound.', least=1, most=1e9)
  low_step: float = knob(0.05, 'Step of the lower bound.', least=0)
  high_step: float = knob(0.1, 'Step of the upper bound.', least=0)
  dual: float = knob(3.0, 'Dual clip; inf: none.', above=1, infinite=True)

  @pydantic.model_validator(mode='after')
  def _path(self) -> 'RecipeClip':
    return _searchable(self, True)


class ClipConfig(Section):
  """How far the policy may move a token."""

  rule: Literal['unclipped', 'fixed', 'balanced', 'recipe'] = knob(
    'balanced', 'Clip rule.'
  )
  unclipped: NoKnobs = knob(NoKnobs, 'No bounds.')
  fixed: FixedClip = knob(FixedClip, 'PPO, GRPO; a higher `high` is DAPO.')
  balanced: BalancedClip = knob(BalancedClip, 'Balanced PO.')
  recipe: RecipeClip = knob(RecipeClip, "Balanced PO's public code.")


class ClippedLoss(Section):
  """The PPO surrogate."""

  limit: float = knob(
    math.inf, 'Largest absolute log-ratio, nats; inf: none.', above=0, infinite=True
  )


class DecoupledLoss(Section):
  """Decoupled PPO."""

  cap: float = knob(2.0, 'Upper limit of prox / mu.', above=0, infinite=True)


class TisLoss(Section):
  """Truncated importance sampling."""

  cap: float = knob(2.0, 'Upper limit of the ratio.', above=0, infinite=True)


class LossConfig(Section):
  """What is minimised."""

  rule: Literal['clipped', 'decoupled', 'sequence', 'cispo', 'tis'] = knob(
    'clipped', 'Loss rule.'
  )
  aggregate: Literal['token', 'sequence', 'constant'] = knob(
    'token', 'How the rows of a minibatch add up.'
  )
  kl: float = knob(
    0.0, 'Cost per nat of divergence from the behaviour policy.', least=0
  )
  clipped: ClippedLoss = knob(ClippedLoss, 'PPO, GRPO, DAPO.')
  decoupled: DecoupledLoss = knob(DecoupledLoss, 'AReaL.')
  sequence: NoKnobs = knob(NoKnobs, 'GSPO.')
  cispo: NoKnobs = knob(NoKnobs, 'CISPO.')
  tis: TisLoss = knob(TisLoss, 'TIS.')

  @property
  def needs_proximal(self) -> bool:
    """Whether the weights at the start of a step score its batch."""
    return self.rule == 'decoupled'

  @property
  def has_clip(self) -> bool:
    """Whether the rule has a clip that a clip rule could set."""
    return self.rule != 'tis'


def _rising(section, name: str):
  start, end = getattr(section, name)
  if start > end:
    raise ValueError(f'{name}=({start}, {end}): the first must not exceed the second')
  return section


def _searchable(section, stepwise: bool):
  """The section, once both ranges rise and have room for a step."""
  for name in ('low', 'high'):
    _rising(section, name)
    start, end = getattr(section, name)
    step, width = getattr(section, f'{name}_step'), end - start
    held = step == width == 0
    if stepwise and not held and not 0 < step <= width + 1e-6:
      raise ValueError(
        f'{name}_step={step}: must be in (0, {width:.6g}], the width of the range '
        f'({start}, {end}); 0 for a range of one point, which holds that bound'
      )
    if stepwise and not held and width / step > 1e6:
      raise ValueError(
        f'{name}_step={step}: more than a million steps in ({start}, {end})'
      )
  return section
