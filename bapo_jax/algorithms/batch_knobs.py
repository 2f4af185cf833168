"""Knobs of the batch rules and the replay buffer; see knobs.py for the other slots."""

from typing import Literal, Self

import pydantic

from bapo_jax.knobs import NoKnobs, Section, knob

Range = tuple[float, float]


class FixedThresholds(Section):
  """The same thresholds at every step."""

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
  """Thresholds c2 and c3 that follow the mean verdict (arXiv:2602.20722, Eq. 8).

  The defaults lower the band as the policy improves, like the paper's text and code.
  Its printed Eq. 8 raises the band: exchange the ends of `low` and of `high` for that.
  """

  hard: float = knob(
    1 / 8, 'c1: a problem is hard up to this pass rate.', least=0, below=1
  )
  low: Range = knob(
    (3 / 8, 1 / 8),
    'c2 at a mean verdict of 0 and of 1: smallest pass rate of a reusable group; it '
    "falls as in the paper's code, and rises as in its Eq. 8 with the ends exchanged.",
    least=0,
    most=1,
  )
  high: Range = knob(
    (7 / 8, 5 / 8),
    'c3 at a mean verdict of 0 and of 1: largest pass rate of a reusable group; it '
    "falls as in the paper's code, and rises as in its Eq. 8 with the ends exchanged.",
    least=0,
    most=1,
  )

  @pydantic.model_validator(mode='after')
  def _ordered(self) -> Self:
    for c2, c3 in zip(self.low, self.high, strict=True):
      if c2 > c3:
        raise ValueError(
          f'low={self.low} and high={self.high}: c2={c2} is above c3={c3}'
        )
    return self


class ThresholdsConfig(Section):
  """Pass rates that make a problem hard or a group reusable."""

  rule: Literal['fixed', 'moving', 'threshold_free', 'everything'] = knob(
    'fixed', 'Threshold rule: pass rates of hard problems and of reusable groups.'
  )
  fixed: FixedThresholds = knob(FixedThresholds, 'Constant thresholds.')
  moving: MovingThresholds = knob(
    MovingThresholds, 'Thresholds that follow the policy.'
  )
  threshold_free: NoKnobs = knob(NoKnobs, 'Hard: never solved; reusable: half solved.')
  everything: NoKnobs = knob(NoKnobs, 'Every group is reusable, no problem is hard.')


HardOrder = Literal['fifo', 'least_recent']


class BufferConfig(Section):
  """The replay buffer."""

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
    'one with the oldest last attempt.',
  )
  thresholds: ThresholdsConfig = knob(ThresholdsConfig, 'Hard and reusable.')

  @pydantic.model_validator(mode='after')
  def _has_room(self) -> Self:
    if self.reevaluate > self.capacity:
      raise ValueError(
        f'reevaluate={self.reevaluate} is more than buffer.capacity={self.capacity}'
      )
    return self


class SourceWeights(Section):
  """Factors on the advantage of a row, by its source."""

  fresh: float = knob(1.0, 'Factor on the advantage of fresh rows.', least=0)
  reevaluated: float = knob(
    1.0, 'Factor on the advantage of re-evaluated rows.', least=0
  )
  reused: float = knob(1.0, 'Factor on the advantage of reused rows.', least=0)


class ReplayRule(Section):
  """Plain experience replay."""

  replay_ratio: int = knob(
    1, 'Replayed groups per fresh group in a batch.', least=1, most=1024
  )


class BatchConfig(Section):
  """Batch rule: selects the groups of a batch."""

  rule: Literal['fresh_only', 'learnable_only', 'replay', 'adapted'] = knob(
    'fresh_only', 'Batch rule: selects the groups of a batch.'
  )
  max_extra_rounds: int = knob(
    2,
    'Extra rounds of prompts per step while learnable_only has empty seats.',
    least=0,
    most=1024,
  )
  weights: SourceWeights = knob(SourceWeights, 'Weights by source.')
  fresh_only: NoKnobs = knob(NoKnobs, 'GRPO.')
  learnable_only: NoKnobs = knob(NoKnobs, "DAPO's dynamic sampling.")
  replay: ReplayRule = knob(ReplayRule, 'Experience replay.')
  adapted: NoKnobs = knob(NoKnobs, 'Batch Adaptation PO.')

  @property
  def uses_buffer(self) -> bool:
    """Whether the rule reads the replay buffer."""
    return self.rule in ('replay', 'adapted')

  @property
  def reevaluates(self) -> bool:
    """Whether the rule re-evaluates hard problems."""
    return self.rule == 'adapted'

  @property
  def extra_rounds(self) -> int:
    """Maximum number of further rounds of prompts after the first round of a step."""
    return self.max_extra_rounds if self.rule == 'learnable_only' else 0

  def seats(self, prompts: int) -> int:
    """Returns the number of groups in a batch, for `prompts` prompts per step."""
    replayed = self.replay.replay_ratio if self.rule == 'replay' else 0
    return prompts * (1 + replayed)
