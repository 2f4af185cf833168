"""Keeps hard problems and reusable groups between steps: functions on ReplayBuffer.

1. a threshold rule maps (rate, G) to the numbers of correct responses that make a
   group hard or reusable;
2. `draw` returns the hard problems with the oldest last attempt;
3. `insert` stores the groups completed at a step and counts the problems that enter or
   leave. A promoted group (of a hard problem that was re-evaluated and is now solved
   sometimes) becomes reusable if it has no seat in the batch.

A row is empty if completed_step_P is -1; empty rows come last.
With hard_order='fifo' the hard problems are in order of entry, the newest first.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from annotated_types import Interval
from jax import Array

from bapo_jax import sharding
from bapo_jax.knobs import Range, Rising, Section, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.types import (
  SOURCES,
  Groups,
  PassRateThresholds,
  ReplayBuffer,
  Routes,
  ThresholdFunction,
  concat,
  empty_groups,
  first_of,
  learnable,
  passing,
  take,
)

Share = Annotated[float, Interval(ge=0, le=1)]
HardOrder = Literal['fifo', 'least_recent']
REUSED = SOURCES.index('reused')
# Absorbs rounding: a pass rate of 1/8 is exactly 1 of 8.
SLACK = 1e-4
REEVALUATED = ('batch.reevaluates', 'buffer.reevaluate')
HARD = knob(
  1 / 8,
  'c1: a problem is hard up to this pass rate.',
  least=0,
  below=1,
  needs=REEVALUATED,
)


class ThresholdRule(Part):
  """Decides which pass rates make a problem hard, and a group reusable."""

  arguments = ('rate', 'G')
  returns = ('thresholds',)

  def __call__(self, rate: Array, G: int) -> PassRateThresholds:
    """Returns the thresholds in correct responses of a group.

    Args:
      rate: r_tot, the mean verdict of all decided fresh responses so far, scalar in
        [0, 1].
      G: responses per group.
    """
    raise NotImplementedError

  def fault(self, result, example) -> str:
    """Refuses thresholds whose last number is not the largest."""
    if max(result) > result.reusable_max > 0:
      return f'returns {[*map(int, result)]}; the last must be the largest, or 0'
    return ''


class FixedThresholds(ThresholdRule):
  """Pass rates that are the same at every step (arXiv:2602.20722, section 3)."""

  rule: Literal['fixed'] = 'fixed'
  hard: float = HARD
  reusable: Rising[Share] = knob(
    (1 / 8, 5 / 8),
    '(c2, c3): a group is reusable from the first to the second pass rate.',
  )

  def __call__(self, rate: Array, G: int) -> PassRateThresholds:
    c2, c3 = self.reusable
    # The moving rule with equal ends: one place rounds pass rates to counts.
    constant = MovingThresholds(hard=self.hard, low=(c2, c2), high=(c3, c3))
    return constant(rate, G)

  def refuses(self, config) -> Iterator[str]:
    """Refuses a range without a pass rate."""
    low, high = ((c, c) for c in self.reusable)
    yield from _without_rate(config, low, high, f'reusable={self.reusable}')


class MovingThresholds(ThresholdRule):
  """Pass rates that follow the mean verdict (arXiv:2602.20722, Eq. 8).

  c1 is constant; c2 and c3 are start + rate (end - start). By default both fall as the
  policy improves (start above end), as in the paper's text and code. To let them
  rise, as in the printed Eq. 8, swap the ends of `low` and of `high`. The paper does
  not print start and end; the defaults are ours.
  """

  rule: Literal['moving'] = 'moving'
  hard: float = HARD
  low: Range[Share] = knob(
    (3 / 8, 1 / 8),
    'c2 at a mean verdict of 0 and of 1: smallest pass rate of a reusable group; '
    "falls by default (the paper's code); swap the ends to let it rise (Eq. 8).",
  )
  high: Range[Share] = knob(
    (7 / 8, 5 / 8),
    'c3 at a mean verdict of 0 and of 1: largest pass rate of a reusable group; '
    "falls by default (the paper's code); swap the ends to let it rise (Eq. 8).",
  )

  def __call__(self, rate: Array, G: int) -> PassRateThresholds:
    # As start + rate (end - start), so that a constant threshold stays constant to the
    # bit.
    c2, c3 = (rate * (end - start) + start for start, end in (self.low, self.high))
    return PassRateThresholds(
      # At most G - 1 despite rounding: a solved problem is not hard.
      hard_max=jnp.minimum(_most(jnp.float32(self.hard), G), G - 1),
      # From 1 to G - 1: a group with one verdict has no advantage.
      reusable_min=jnp.maximum(jnp.ceil(c2 * G - SLACK).astype(jnp.int32), 1),
      reusable_max=jnp.minimum(_most(c3, G), G - 1),
    )

  def refuses(self, config) -> Iterator[str]:
    """Refuses ranges without a pass rate."""
    text = f'low={self.low} with high={self.high}'
    yield from _without_rate(config, self.low, self.high, text)

  @pydantic.model_validator(mode='after')
  def _ordered(self) -> Self:
    for c2, c3 in zip(self.low, self.high, strict=True):
      if c2 > c3:
        raise ValueError(
          f'low={self.low} and high={self.high}: the least pass rate of a reusable '
          f'group, {c2}, is above the largest, {c3}; lower low or raise high'
        )
    return self


class ThresholdFree(ThresholdRule):
  """A problem is hard if no response is right; a group is reusable if half are right.

  G must be even.
  """

  rule: Literal['threshold_free'] = 'threshold_free'

  def __call__(self, rate: Array, G: int) -> PassRateThresholds:
    return PassRateThresholds(jnp.int32(0), jnp.int32(G // 2), jnp.int32(G // 2))

  def refuses(self, config) -> Iterator[str]:
    """Refuses groups of an odd size."""
    if config.sampler.group_size % 2:
      yield (
        "buffer.thresholds.rule='threshold_free' keeps groups that are half right, but "
        f'sampler.group_size={config.sampler.group_size} is odd; give an even size, or '
        'another rule'
      )


class Everything(ThresholdRule):
  """All groups are reusable, and no problem is hard: plain experience replay."""

  rule: Literal['everything'] = 'everything'

  def __call__(self, rate: Array, G: int) -> PassRateThresholds:
    return PassRateThresholds(jnp.int32(-1), jnp.int32(0), jnp.int32(G))

  def refuses(self, config) -> Iterator[str]:
    """Refuses the re-evaluation of hard problems."""
    if 'reevaluated' in config.sources:
      yield (
        f'batch.rule={config.batch.rule!r} re-evaluates hard problems, but '
        "buffer.thresholds.rule='everything' makes no problem hard; choose another "
        "threshold rule, batch.rule='replay', or buffer.reevaluate=0"
      )


def _without_rate(config, low: Range, high: Range, text: str) -> Iterator[str]:
  """Yields a sentence if no number of right responses makes a group reusable.

  Groups with a pass rate from a lower to an upper limit are reusable. `low` and `high`
  have each limit twice: at a mean verdict of 0, and of 1. An upper limit below
  1 / group_size is accepted: it makes no group reusable on purpose.
  """
  G = config.sampler.group_size
  if 'reused' not in config.sources or G * max(high) < 1:
    return
  lows, highs = (G * np.linspace(*ends, 101) for ends in (low, high))
  counts = np.arange(1, G)[:, None]  # one verdict alone gives no advantage
  if not ((lows - SLACK <= counts) & (counts <= highs + SLACK)).any():
    yield (
      f'buffer.thresholds.{text} contains no pass rate of sampler.group_size={G} '
      f'responses, such as {G // 2}/{G}; widen the range, or choose an upper end below '
      f'1/{G} to reuse no group'
    )


Thresholds = Annotated[
  ThresholdRule,
  OneOf(
    'Threshold rule: pass rates of hard problems and of reusable groups.',
    FixedThresholds,
    MovingThresholds,
    ThresholdFree,
    Everything,
  ),
]


class Buffer(Section):
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
    16,
    'Hard problems per re-evaluation, oldest last attempt first.',
    least=0,
    needs='batch.reevaluates',
  )
  reeval_interval: int = knob(
    2,
    'Learner steps between re-evaluations of hard problems.',
    least=1,
    needs=REEVALUATED,
  )
  hard_order: HardOrder = knob(
    'fifo',
    'Hard problem that leaves a full buffer: the first to enter (the paper), or the '
    'problem tried least recently.',
    needs=REEVALUATED,
  )
  thresholds: Thresholds = knob(FixedThresholds, 'Thresholds.')

  @pydantic.model_validator(mode='after')
  def _has_room(self) -> Self:
    if self.reevaluate > self.capacity:
      raise ValueError(
        f'reevaluate={self.reevaluate} exceeds buffer.capacity={self.capacity}; choose '
        'a smaller reevaluate or a larger capacity'
      )
    return self


def _most(rate: Array, G: int) -> Array:
  return jnp.floor(rate * G + SLACK).astype(jnp.int32)


def init(
  capacity: int,
  group_size: int,
  length: int,
  thresholds: ThresholdFunction = FixedThresholds(),
  steps: bool = False,
  routes: Routes | None = None,
) -> ReplayBuffer:
  """Returns an empty buffer with `capacity` rows in each of its two parts.

  Rows of `hard` have one token: only their problems are needed. `steps` and `routes`
  add arrays, as in `empty_groups`.
  """
  return ReplayBuffer(
    hard=empty_groups(capacity, 1, 1, steps, routes),
    reusable=empty_groups(capacity, group_size, length, steps, routes),
    usage_count_P=jnp.zeros(capacity, jnp.int32),
    num_correct=jnp.int32(0),
    num_responses=jnp.int32(0),
    thresholds=thresholds(jnp.float32(0), group_size),
  )


@jax.jit(static_argnames='rows')
def draw(stored: Groups, rows: int) -> Groups:
  """Returns the `rows` least recently tried rows of `stored`, empty rows last."""
  # Empty rows have step -1 and would come first.
  never = jnp.iinfo(jnp.int32).max
  oldest_P = jnp.argsort(
    jnp.where(stored.completed_step_P < 0, never, stored.completed_step_P), stable=True
  )
  drawn = take(stored, oldest_P[:rows])
  return drawn._replace(id_P=jnp.where(drawn.completed_step_P < 0, -1, drawn.id_P))


@jax.jit(
  static_argnames=('thresholds', 'max_off_policy_steps', 'max_reuse', 'hard_order'),
)
def insert(
  buffer: ReplayBuffer,
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P: Array,
  now: int | Array,
  *,
  thresholds: ThresholdFunction = FixedThresholds(),
  max_off_policy_steps: int,
  max_reuse: int,
  hard_order: HardOrder = 'fifo',
) -> tuple[ReplayBuffer, dict[str, Array]]:
  """Stores the groups completed at step `now` (arXiv:2602.20722, section 3).

  The thresholds in `buffer` apply to these groups, whose verdicts affect the thresholds
  of the next step. A promoted group whose problem has no seat in the batch becomes
  reusable regardless of its pass rate; its usage count -1 means never trained on.

  Args:
    fresh, reevaluated: the groups completed at this step; if a problem is in both, the
      re-evaluated group counts.
    groups, source_P: the batch that the learner trained on.
    max_off_policy_steps, max_reuse: maximum age, learner steps, and maximum number of
      further uses of a reusable group.
    hard_order: the hard problem that leaves a full buffer: 'fifo', the first to enter,
      even if it was tried again; 'least_recent', the problem tried least recently.

  Returns:
    (buffer, counts of problems that entered `hard` or left it: re-evaluated and solved
    always (graduated) or sometimes (promoted), solved as a fresh prompt (progressed),
    or displaced by newer problems (evicted)).
  """
  # Keeps one attempt per problem, the last row; re-evaluated rows come last.
  tried = concat(fresh, reevaluated)
  last_P = first_of(tried.id_P[::-1], tried.completed_step_P[::-1] >= 0)[::-1]
  tried = tried._replace(completed_step_P=jnp.where(last_P, tried.completed_step_P, -1))
  hard_P = passing(tried, 0, buffer.thresholds.hard_max)
  reused_P = jnp.where(source_P == REUSED, groups.id_P, -1)
  usage_count_P = buffer.usage_count_P + _among(buffer.reusable.id_P, reused_P)
  # Promoted groups without a seat wait; if dropped, they would be lost untrained.
  waiting_P = learnable(tried) & ~hard_P
  waiting_P &= jnp.arange(len(hard_P)) >= len(fresh.id_P)
  waiting_P &= ~_among(tried.id_P, jnp.where(source_P >= 0, groups.id_P, -1))
  reusable, usage_count_P = _insert_reusable(
    buffer._replace(usage_count_P=usage_count_P),
    tried,
    waiting_P,
    now,
    max_off_policy_steps,
    max_reuse,
  )
  hard, counts = _insert_hard(buffer, tried, hard_P, len(fresh.id_P), hard_order)
  filled_P = fresh.completed_step_P >= 0
  correct = buffer.num_correct + jnp.where(filled_P, fresh.correct_PG.sum(1), 0).sum()
  responses = buffer.num_responses + (fresh.decided_PG & filled_P[:, None]).sum()
  rate = correct / jnp.maximum(responses, 1)
  bands = thresholds(rate.astype(jnp.float32), fresh.correct_PG.shape[1])
  stored = ReplayBuffer(hard, reusable, usage_count_P, correct, responses, bands)
  return sharding.constrain_rows(stored), counts


def _among(id_P: Array, others: Array) -> Array:
  """Returns whether `others` contains each problem of id_P, [P]; -1 never matches."""
  return ((id_P[:, None] == others[None]) & (others[None] >= 0)).any(1)


def _emptied(groups: Groups, where_P: Array) -> Groups:
  step_P = jnp.where(where_P, -1, groups.completed_step_P)
  return groups._replace(completed_step_P=step_P)


def _insert_reusable(
  buffer: ReplayBuffer,
  tried: Groups,
  waiting_P: Array,
  now: int | Array,
  max_off_policy_steps: int,
  max_reuse: int,
) -> tuple[Groups, Array]:
  """Returns (reusable, usage_count_P) with the reusable groups among `tried` added.

  waiting_P marks promoted groups without a seat. No marked group is evicted: their
  number is at most buffer.reevaluate, which is at most the capacity.
  """
  thresholds = buffer.thresholds
  reusable_P = passing(tried, thresholds.reusable_min, thresholds.reusable_max)
  # Plain replay (reusable_min 0) also keeps groups without an advantage.
  reusable_P &= learnable(tried) | (thresholds.reusable_min == 0)
  reusable_P = (reusable_P | waiting_P) & (tried.completed_step_P >= 0)
  stored = buffer.reusable
  usage_count_P = buffer.usage_count_P
  # Expire first, so that an expired row does not evict a live one.
  stays_P = (now + 1 - stored.completed_step_P <= max_off_policy_steps) & (
    usage_count_P < max_reuse
  )
  replaced_P = _among(stored.id_P, jnp.where(reusable_P, tried.id_P, -1))
  both = concat(_emptied(tried, ~reusable_P), _emptied(stored, ~stays_P | replaced_P))
  usage_count_P = jnp.concatenate([-waiting_P.astype(jnp.int32), usage_count_P])
  # Newest first; within a step, groups that were never trained on come first.
  waiting_P = jnp.pad(waiting_P, (0, len(stored.id_P)))
  order = jnp.argsort(-2 * both.completed_step_P - waiting_P, stable=True)
  rows = order[: len(stored.id_P)]
  return take(both, rows), usage_count_P[rows]


def _insert_hard(
  buffer: ReplayBuffer, tried: Groups, hard_P: Array, fresh: int, hard_order: str
) -> tuple[Groups, dict[str, Array]]:
  """Returns (hard, counts) with the hard problems among `tried` added; see `insert`.

  hard_P marks the groups whose pass rate is that of a hard problem. The first `fresh`
  rows of `tried` are fresh groups, the others re-evaluated groups.
  """
  filled_P = tried.completed_step_P >= 0
  n_P = tried.decided_PG.sum(1)
  before_P = jnp.where(buffer.hard.completed_step_P >= 0, buffer.hard.id_P, -1)
  known_P = filled_P & _among(tried.id_P, before_P)
  # An attempt without a verdict moves no problem in or out, and counts as the last one.
  hard_P = filled_P & jnp.where(n_P > 0, hard_P, known_P)
  reevaluated_P = jnp.arange(len(hard_P)) >= fresh
  solved_P = tried.correct_PG.sum(1) == n_P
  left_P = known_P & ~hard_P
  # `hard` stores one token and one response per problem; responses are sampled again.
  corner = np.s_[:, :1, :1]
  problems = jax.tree.map(lambda x: x[corner[: x.ndim]], tried)
  tried_P = _among(buffer.hard.id_P, jnp.where(filled_P, tried.id_P, -1))
  stored = _emptied(buffer.hard, tried_P)
  if hard_order == 'fifo':
    # A problem that is hard again keeps its place; only its last attempt is updated.
    again_P = _among(before_P, jnp.where(hard_P, tried.id_P, -1))
    step_P = jnp.where(again_P, tried.completed_step_P.max(), stored.completed_step_P)
    both = concat(
      _emptied(problems, ~hard_P | known_P), stored._replace(completed_step_P=step_P)
    )
    order = jnp.argsort(both.completed_step_P < 0, stable=True)
  else:
    both = concat(_emptied(problems, ~hard_P), stored)
    order = jnp.argsort(-both.completed_step_P, stable=True)
  hard = take(both, order[: len(stored.id_P)])
  counts = {
    'buffer/entered': hard_P & ~known_P,
    'buffer/graduated': left_P & reevaluated_P & solved_P,
    'buffer/promoted': left_P & reevaluated_P & ~solved_P,
    'buffer/progressed': left_P & ~reevaluated_P,
  }
  counts = {name: is_P.sum() for name, is_P in counts.items()}
  # Conservation: number before + entered - left = number after + evicted.
  wanted = (before_P >= 0).sum() + counts['buffer/entered'] - left_P.sum()
  return hard, counts | {'buffer/evicted': wanted - (hard.completed_step_P >= 0).sum()}
