"""Defines the knobs of the advantage, clip, loss and batch rules and of the buffer.

The section of a kind of rule, such as `clip`, names the active rule and contains one
section per rule: --config.clip.rule=fixed is enough to switch rules. A rule receives
its own section as its last argument, `k`; a rule without knobs has no such argument.
"""

import math
from typing import Any, ClassVar, Literal, Self

import pydantic
from pydantic import SerializeAsAny

from bapo_jax.knobs import NoKnobs, Place, Section, knob
from bapo_jax.own_code import OwnKnobs, Slot, is_place, own

Aggregate = Literal['token', 'sequence', 'constant']
Contribution = Literal['gradient', 'surrogate']
HardOrder = Literal['fifo', 'least_recent']
KlDirection = Literal['behavior_policy', 'policy_behavior', 'squared']
Order = Literal['upper', 'lower']
Source = Literal['fresh', 'reevaluated', 'reused']
Range = tuple[float, float]

# Absorbs rounding: a pass rate of 1/8 is exactly 1 of 8.
SLACK = 1e-4
TOLERANCE = 1e-4  # largest error of a bound with resolution='continuous'


class OwnAdvantage(OwnKnobs):
  """Knobs of an own advantage rule."""

  arguments = ('reward_PG',)


def active(slot: Slot) -> Any:
  """Returns the section of a slot's rule: by its name, or `own` for a place."""
  rule = getattr(slot, 'rule')  # noqa: B009 (every subclass has one)
  return getattr(slot, 'own' if is_place(rule) else rule)


class AdvantageConfig(Slot):
  """Selects the rule that turns rewards into advantages."""

  rule: Literal['group_relative', 'leave_one_out', 'group_centred'] | Place = knob(
    'group_relative', "Advantage rule: from a group's rewards to its advantages."
  )
  own: SerializeAsAny[OwnAdvantage] = own(OwnAdvantage)
  group_relative: NoKnobs = knob(NoKnobs, 'GRPO.')
  leave_one_out: NoKnobs = knob(NoKnobs, 'RLOO.')
  group_centred: NoKnobs = knob(NoKnobs, 'Dr. GRPO.')


def _dual(default: float) -> Any:
  sentence = 'Dual clip: a token with A < 0 is cut from this ratio on; inf: none.'
  return knob(default, sentence, above=1, infinite=True)


def _step(default: float, bound: str) -> Any:
  sentence = f'Step of the {bound}; 0 for a range of one point.'
  return knob(default, sentence, least=0)


def _check_step(name: str, ends: Range, step: float) -> None:
  """Raises a ValueError unless the range contains 1 to 1,000,000 steps."""
  width = ends[1] - ends[0]
  if step == width == 0:  # a constant bound
    return
  if not 0 < step <= width + 1e-6:
    raise ValueError(
      f'{name}_step={step} must be above 0 and at most {width:.6g}, the width of the '
      f'range {ends}; for a constant bound set both ends equal and the step to 0'
    )
  if width / step > 1e6:
    raise ValueError(
      f'{name}_step={step} gives more than 1,000,000 steps in {ends}; raise the step'
    )


def _check_continuous(name: str, ends: Range) -> None:
  """Raises a ValueError unless the range contains at most 1,000,000 points."""
  if ends[1] - ends[0] > 1e6 * TOLERANCE:
    raise ValueError(
      f"{name}={ends} is too wide for resolution='continuous', which searches it in "
      f'steps of {TOLERANCE:g}: give a range of width {1e6 * TOLERANCE:g} or less, or '
      "resolution='step'"
    )


class ClipKnobs(OwnKnobs):
  """Base of the sections of the clip rules: declares what a rule does."""

  arguments = ('ratio_BT', 'batch', 'weigh')
  # A rule gives no bounds, `bounds`, or a `mask` of tokens, which fits any loss rule.
  gives: ClassVar[Literal['nothing', 'bounds', 'mask']] = 'bounds'
  # A rule that searches bounds balances the contributions of tokens to this sum.
  searches: ClassVar[Literal['nothing', 'gradient', 'surrogate']] = 'nothing'


class Unclipped(ClipKnobs):
  """No bounds."""

  gives = 'nothing'


class RecipeClip(ClipKnobs):
  """The search of Balanced PO's public code, without knobs."""

  searches = 'surrogate'


class FixedClip(ClipKnobs):
  """Clip bounds that are the same at every update."""

  low: float = knob(0.8, 'Lower bound of the ratio, 1 - epsilon.', least=0, most=1)
  high: float = knob(
    1.2, 'Upper bound of the ratio, 1 + epsilon; inf: none.', least=1, infinite=True
  )
  dual: float = _dual(math.inf)


class BalancedClip(ClipKnobs):
  """Clip bounds that are searched at every update: Balanced PO (arXiv:2510.18927).

  The search (Algorithm 1 of the paper) raises the bounds step by step until tokens with
  A > 0 have the target share of the policy gradient.
  """

  searches = 'gradient'

  target: float = knob(
    0.42,
    'Target share of tokens with A > 0 in the policy gradient, rho_0.',
    least=0,
    below=1,
  )
  low: Range = knob(
    (0.6, 0.9), 'First and last value of the lower bound.', above=0, most=1, rising=True
  )
  high: Range = knob(
    (1.2, 3.0),
    'First and last value of the upper bound.',
    least=1,
    most=1e9,
    rising=True,
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
      raise ValueError('sources=() is empty; add fresh, reevaluated or reused')
    if self.resolution == 'step':
      _check_step('low', self.low, self.low_step)
      _check_step('high', self.high, self.high_step)
    else:  # the lower bound lies in (0, 1]
      _check_continuous('high', self.high)
    return self


class DcpoClip(ClipKnobs):
  """Clip bounds by token, wider for unlikely tokens: DCPO (arXiv:2509.02333)."""

  low: float = knob(0.16, 'Epsilon of the lower bound.', above=0, most=1)
  high: float = knob(0.2, 'Epsilon of the upper bound.', above=0, most=10)
  cap: float = knob(
    10.0, 'Largest upper bound of a token; inf: none.', above=1, infinite=True
  )
  dual: float = _dual(3.0)


class ClipConfig(Slot):
  """Selects the rule that limits how far updates move the probability of a token."""

  rule: Literal['unclipped', 'fixed', 'balanced', 'recipe', 'dcpo'] | Place = knob(
    'balanced', 'Clip rule: how far updates may move the probability of a token.'
  )
  own: SerializeAsAny[ClipKnobs] = own(ClipKnobs)
  unclipped: Unclipped = knob(Unclipped, 'No bounds.')
  fixed: FixedClip = knob(FixedClip, 'PPO, GRPO; a higher `high` is DAPO.')
  balanced: BalancedClip = knob(BalancedClip, 'Balanced PO.')
  recipe: RecipeClip = knob(RecipeClip, "Balanced PO's public code.")
  dcpo: DcpoClip = knob(DcpoClip, 'DCPO.')

  @property
  def active(self) -> ClipKnobs:
    """Returns the section of the active rule."""
    return active(self)


def check_clip(clip: ClipConfig, loss: 'LossConfig') -> None:
  """Raises a ValueError if the clip rule does not fit the loss rule.

  Both sections declare what their rules do. A bound search balances the gradient only
  if raising a bound adds or removes tokens and changes the weight of no other token.
  """
  name, rule, objective = f'clip.rule={clip.rule!r}', clip.active, loss.active
  if objective.bounds == 'ignored' and rule.gives == 'bounds':
    raise ValueError(
      f'{name} has no effect, because loss.rule={loss.rule!r} ignores clip bounds; '
      "choose clip.rule='unclipped'"
    )
  if rule.searches == 'nothing':
    return
  if objective.bounds == 'limit':
    raise ValueError(
      f'{name} searches for bounds that cut tokens, but loss.rule={loss.rule!r} limits '
      "weights and cuts no token; choose clip.rule='fixed' or 'unclipped', or another "
      'loss.rule'
    )
  balanced, surrogate = clip.balanced, rule.searches == 'surrogate'
  if rule is balanced and balanced.contribution == 'surrogate':
    name, surrogate = "clip.balanced.contribution='surrogate'", True
    if balanced.reused_high < math.inf:
      raise ValueError(
        f'{name} ignores clip.balanced.reused_high={balanced.reused_high}; set it to '
        "inf, or choose contribution='gradient'"
      )
  if surrogate and not (objective.clips_surrogate and loss.aggregate == 'token'):
    raise ValueError(
      f'{name} balances the clipped surrogate, summed over tokens, but '
      f'loss.rule={loss.rule!r} with loss.aggregate={loss.aggregate!r} maximises '
      "another objective; choose loss.rule='clipped' and loss.aggregate='token', or "
      "clip.rule='balanced' with contribution='gradient'"
    )
  behaviour = rule is balanced and balanced.weight != 'one'
  if behaviour and not objective.clips_surrogate:
    raise ValueError(
      f'clip.balanced.weight={balanced.weight!r} is defined for the clipped loss only '
      f"(Eq. 8), but loss.rule={loss.rule!r}; choose weight='one' or "
      "loss.rule='clipped'"
    )


class MaskKnobs(OwnKnobs):
  """Base of the sections of the mask rules."""

  arguments = ('logp_BT', 'batch')
  # A mask measures from the policy that sampled the token, as the sampler saw it.
  weighs_sampler: ClassVar[bool] = True


class NoMask(MaskKnobs):
  """No mask."""

  weighs_sampler = False


class DppoTvMask(MaskKnobs):
  """Divergence PPO: a trust region in binary total variation."""

  low: float = knob(
    0.2, 'Largest fall of the probability of a token with A < 0.', above=0, most=1
  )
  high: float = knob(
    0.2, 'Largest rise of the probability of a token with A > 0.', above=0, most=1
  )


class DppoKlMask(MaskKnobs):
  """Divergence PPO: a trust region in binary divergence."""

  low: float = knob(
    0.05, 'Largest divergence of a falling token with A < 0, nats.', above=0, most=20
  )
  high: float = knob(
    0.05, 'Largest divergence of a rising token with A > 0, nats.', above=0, most=20
  )


class IcePopMask(MaskKnobs):
  """IcePop: a band of the ratio."""

  low: float = knob(0.5, 'Smallest ratio of a token that is kept.', least=0, most=1)
  high: float = knob(
    5.0, 'Largest ratio of a token that is kept; inf: none.', least=1, infinite=True
  )


class KPopMask(MaskKnobs):
  """KPop: a limit of the binary divergence in both directions."""

  limit: float = knob(0.1, 'Largest divergence, phi, nats.', above=0, most=20)


class M2poMask(MaskKnobs):
  """M2PO: a limit of the second moment of the log-ratios of a minibatch."""

  limit: float = knob(
    0.04, 'Limit of the mean of (log r)^2 over the kept tokens, nats^2.', above=0
  )


class OpsmMask(MaskKnobs):
  """Off-policy sequence masking, for responses with A < 0."""

  limit: float = knob(
    0.1, 'Largest mean fall of log pi over the tokens of a response, nats.', above=0
  )


class MaskConfig(Slot):
  """Selects the rule that leaves tokens out of the objective."""

  rule: (
    Literal['none', 'dppo_tv', 'dppo_kl', 'icepop', 'kpop', 'm2po', 'opsm'] | Place
  ) = knob('none', 'Mask rule: which tokens leave the objective.')
  own: SerializeAsAny[MaskKnobs] = own(MaskKnobs)
  none: NoMask = knob(NoMask, 'No mask.')
  dppo_tv: DppoTvMask = knob(DppoTvMask, 'DPPO.')
  dppo_kl: DppoKlMask = knob(DppoKlMask, 'DPPO.')
  icepop: IcePopMask = knob(IcePopMask, 'IcePop.')
  kpop: KPopMask = knob(KPopMask, 'KPop.')
  m2po: M2poMask = knob(M2poMask, 'M2PO.')
  opsm: OpsmMask = knob(OpsmMask, 'DeepSeek-V3.2.')

  @property
  def active(self) -> MaskKnobs:
    """Returns the section of the active rule."""
    return active(self)


def _cap(default: float, ratio: str) -> Any:
  sentence = f'Upper limit of {ratio}, the weight of a token; inf: none.'
  return knob(default, sentence, above=0, infinite=True)


class LossKnobs(OwnKnobs):
  """Base class of the loss rules' knobs; its attributes declare what a rule needs."""

  arguments = ('logp_BT', 'batch', 'find')
  # Clip bounds 'cut' the gradient of a token, 'limit' its weight, or are 'ignored'.
  bounds: ClassVar[Literal['cut', 'limit', 'ignored']] = 'cut'
  needs_proximal: ClassVar[bool] = False  # reads Batch.prox_BT
  weighs_sampler: ClassVar[bool] = False  # corrects the sampler's log-probabilities
  clips_surrogate: ClassVar[bool] = False  # the gain is min(r A, clip(r, low, high) A)


class ClippedLoss(LossKnobs):
  """PPO: the minimum of ratio times A and clipped ratio times A."""

  clips_surrogate = True

  limit: float = knob(
    math.inf,
    'Clamps the log-ratio of a token to [-limit, limit], nats; inf: not clamped.',
    above=0,
    infinite=True,
  )


class DecoupledLoss(LossKnobs):
  """Decoupled PPO: the clipped ratio is pi / prox, and prox / mu is a factor."""

  needs_proximal = True
  weighs_sampler = True

  cap: float = _cap(2.0, 'prox / mu')
  beyond_cap: Literal['truncate', 'mask'] = knob(
    'truncate',
    'Above `cap`: truncate the weight to the cap (TIS), or mask the token (AReaL).',
  )


class CispoLoss(LossKnobs):
  """CISPO: the clip bounds limit the weight of a token and cut no token."""

  bounds = 'limit'


class TisLoss(LossKnobs):
  """Truncated importance sampling: a cap on pi / mu replaces the clip bounds."""

  bounds = 'ignored'
  weighs_sampler = True

  cap: float = _cap(2.0, 'pi / mu')


class ReinforceLoss(LossKnobs):
  """The policy gradient of the tokens as if the policy had sampled them."""

  bounds = 'ignored'


class SapoLoss(LossKnobs):
  """Soft adaptive PO: a smooth gate instead of clip bounds."""

  bounds = 'ignored'

  positive: float = knob(
    1.0, 'Temperature of the gate of tokens with A > 0.', least=1e-3, most=1e3
  )
  negative: float = knob(
    1.05, 'Temperature of the gate of tokens with A <= 0.', least=1e-3, most=1e3
  )


class VespoLoss(LossKnobs):
  """Variational sequence-level soft PO: a smooth weight of the response's ratio."""

  bounds = 'ignored'

  positive: Range = knob(
    (2.0, 3.0),
    'Power of W and rate of its decay for responses with A >= 0.',
    above=0,
    most=100,
  )
  negative: Range = knob(
    (3.0, 2.0),
    'Power of W and rate of its decay for responses with A < 0.',
    above=0,
    most=100,
  )


class AspoLoss(LossKnobs):
  """Asymmetric importance sampling PO: inverted ratios for tokens with A > 0."""

  cap: float = _cap(3.0, 'the ratio (A < 0) or its inverse (A > 0)')


class FipoLoss(LossKnobs):
  """Future-KL-influenced PO: a token is weighted by what became of those after it."""

  half_life: float = knob(
    32.0, 'Tokens after which a later token counts half.', above=0, most=1e6
  )
  limits: Range = knob(
    (0.8, 1.2), 'Smallest and largest influence.', above=0, most=100, rising=True
  )
  safety: float = knob(
    4.0,
    'Ratio above which the influence of a token with A < 0 is at most 1; inf: none.',
    above=0,
    infinite=True,
  )


class LossConfig(Slot):
  """Selects the objective of a token, and how it is averaged over tokens."""

  rule: (
    Literal[
      'clipped',
      'decoupled',
      'sequence',
      'cispo',
      'tis',
      'reinforce',
      'sapo',
      'vespo',
      'aspo',
      'fipo',
    ]
    | Place
  ) = knob('clipped', 'Loss rule: the objective of a token.')
  own: SerializeAsAny[LossKnobs] = own(LossKnobs)
  aggregate: Aggregate = knob(
    'token',
    'token: mean over all tokens; sequence: mean over responses of their token mean; '
    'constant: mean over responses of their sum / max_new_tokens.',
  )
  kl: float = knob(
    0.0,
    'Cost per nat of divergence from mu, the policy that sampled the batch.',
    least=0,
    most=1000,
  )
  kl_direction: KlDirection = knob(
    'behavior_policy',
    'The divergence: behavior_policy, KL(mu || pi); policy_behavior, KL(pi || mu); '
    'squared, (log r)^2 / 2.',
  )
  clipped: ClippedLoss = knob(ClippedLoss, 'PPO, GRPO, DAPO.')
  decoupled: DecoupledLoss = knob(DecoupledLoss, 'AReaL.')
  sequence: LossKnobs = knob(LossKnobs, 'GSPO.')
  cispo: CispoLoss = knob(CispoLoss, 'CISPO.')
  tis: TisLoss = knob(TisLoss, 'TIS.')
  reinforce: ReinforceLoss = knob(ReinforceLoss, 'REINFORCE.')
  sapo: SapoLoss = knob(SapoLoss, 'SAPO.')
  vespo: VespoLoss = knob(VespoLoss, 'VESPO.')
  aspo: AspoLoss = knob(AspoLoss, 'ASPO.')
  fipo: FipoLoss = knob(FipoLoss, 'FIPO.')

  @property
  def active(self) -> LossKnobs:
    """Returns the section of the active rule."""
    return active(self)


class FixedThresholds(Section):
  """Pass rates c1, c2 and c3 that are the same at every step."""

  hard: float = knob(
    1 / 8, 'c1: a problem is hard up to this pass rate.', least=0, below=1
  )
  reusable: Range = knob(
    (1 / 8, 5 / 8),
    '(c2, c3): a group is reusable from the first to the second pass rate.',
    least=0,
    most=1,
    rising=True,
  )


class MovingThresholds(Section):
  """Pass rates c2 and c3 that follow the mean verdict (arXiv:2602.20722, Eq. 8).

  By default both fall as the policy improves, like in the paper's text and code. To let
  them rise, as in its printed Eq. 8, swap the ends of `low` and of `high`.
  """

  hard: float = knob(
    1 / 8, 'c1: a problem is hard up to this pass rate.', least=0, below=1
  )
  low: Range = knob(
    (3 / 8, 1 / 8),
    'c2 at a mean verdict of 0 and of 1: smallest pass rate of a reusable group; '
    "falls by default (the paper's code); swap the ends to let it rise (Eq. 8).",
    least=0,
    most=1,
  )
  high: Range = knob(
    (7 / 8, 5 / 8),
    'c3 at a mean verdict of 0 and of 1: largest pass rate of a reusable group; '
    "falls by default (the paper's code); swap the ends to let it rise (Eq. 8).",
    least=0,
    most=1,
  )

  @pydantic.model_validator(mode='after')
  def _ordered(self) -> Self:
    for c2, c3 in zip(self.low, self.high, strict=True):
      if c2 > c3:
        raise ValueError(
          f'low={self.low} and high={self.high} give c2={c2} above c3={c3}; choose a '
          'smaller value in low or a larger value in high'
        )
    return self


class OwnThresholds(OwnKnobs):
  """Knobs of an own threshold rule."""

  arguments = ('rate', 'G')


class ThresholdsConfig(Slot):
  """Pass rates that make a problem hard or a group reusable."""

  rule: Literal['fixed', 'moving', 'threshold_free', 'everything'] | Place = knob(
    'fixed', 'Threshold rule: pass rates of hard problems and of reusable groups.'
  )
  own: SerializeAsAny[OwnThresholds] = own(OwnThresholds)
  fixed: FixedThresholds = knob(FixedThresholds, 'Constant thresholds.')
  moving: MovingThresholds = knob(
    MovingThresholds, 'Thresholds that follow the policy.'
  )
  threshold_free: NoKnobs = knob(NoKnobs, 'Hard: never solved; reusable: half solved.')
  everything: NoKnobs = knob(NoKnobs, 'Every group is reusable, no problem is hard.')


class BufferConfig(Section):
  """Sets what the replay buffer keeps, and when it is used again."""

  capacity: int = knob(
    256,
    'Problems in the hard part of the buffer, and groups in the reusable part.',
    least=1,
    most=1 << 20,
  )
  max_off_policy_steps: int = knob(
    3, 'Maximum age of a reusable group in training, learner steps.', least=1
  )
  max_reuse: int = knob(
    3, 'Times that a reusable group is trained on again before it is dropped.', least=1
  )
  reevaluate: int = knob(
    16, 'Hard problems per re-evaluation, oldest last attempt first.', least=0
  )
  reeval_interval: int = knob(
    2, 'Learner steps between re-evaluations of hard problems.', least=1
  )
  hard_order: HardOrder = knob(
    'fifo',
    'Hard problem that leaves a full buffer: the first to enter (the paper), or the '
    'problem tried least recently.',
  )
  thresholds: ThresholdsConfig = knob(ThresholdsConfig, 'Thresholds.')

  @pydantic.model_validator(mode='after')
  def _has_room(self) -> Self:
    if self.reevaluate > self.capacity:
      raise ValueError(
        f'reevaluate={self.reevaluate} exceeds buffer.capacity={self.capacity}; choose '
        'a smaller reevaluate or a larger capacity'
      )
    return self


class SourceWeights(Section):
  """Factors that multiply the advantage of a row, one per source."""

  fresh: float = knob(1.0, 'Factor on the advantage of fresh rows.', least=0)
  reevaluated: float = knob(
    1.0, 'Factor on the advantage of re-evaluated rows.', least=0
  )
  reused: float = knob(1.0, 'Factor on the advantage of reused rows.', least=0)


class BatchKnobs(OwnKnobs):
  """Base of the sections of the batch rules: declares what a rule needs."""

  arguments = ('fresh', 'reevaluated', 'buffer', 'now', 'key', 'seats')
  uses_buffer: ClassVar[bool] = False  # reads the replay buffer
  reevaluates: ClassVar[bool] = False  # reads re-evaluated groups of hard problems
  asks_again: ClassVar[bool] = False  # more prompts are sampled while seats are empty

  def seats(self, prompts: int) -> int:
    """Returns the number of groups in a batch, for `prompts` prompts per step."""
    return prompts


class LearnableRule(BatchKnobs):
  """DAPO's dynamic sampling."""

  asks_again = True


class ReplayRule(BatchKnobs):
  """Experience replay: adds random older groups to the fresh groups of a batch."""

  uses_buffer = True

  replay_ratio: int = knob(
    1, 'Replayed groups per fresh group in a batch.', least=1, most=1024
  )

  def seats(self, prompts: int) -> int:
    """Returns the number of groups in a batch, fresh and replayed."""
    return prompts * (1 + self.replay_ratio)


class AdaptedRule(BatchKnobs):
  """Batch Adaptation PO."""

  uses_buffer = True
  reevaluates = True


class BatchConfig(Slot):
  """Batch rule: selects the groups of a batch."""

  rule: Literal['fresh_only', 'learnable_only', 'replay', 'adapted'] | Place = knob(
    'fresh_only', 'Batch rule: selects the groups of a batch.'
  )
  own: SerializeAsAny[BatchKnobs] = own(BatchKnobs)
  max_extra_rounds: int = knob(
    2,
    'Maximum extra rounds of prompts per step while learnable_only has empty seats.',
    least=0,
    most=1024,
  )
  weights: SourceWeights = knob(SourceWeights, 'Weights by source.')
  fresh_only: BatchKnobs = knob(BatchKnobs, 'GRPO.')
  learnable_only: LearnableRule = knob(LearnableRule, "DAPO's dynamic sampling.")
  replay: ReplayRule = knob(ReplayRule, 'Experience replay.')
  adapted: AdaptedRule = knob(AdaptedRule, 'Batch Adaptation PO.')

  @property
  def active(self) -> BatchKnobs:
    """Returns the section of the active rule."""
    return active(self)

  @property
  def extra_rounds(self) -> int:
    """Returns how many rounds of prompts a step may add to its first round."""
    return self.max_extra_rounds if self.active.asks_again else 0
