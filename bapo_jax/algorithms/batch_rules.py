"""Selects the groups of a batch: one class per batch rule.

A rule maps (fresh, reevaluated, buffer, now, key, seats) to (groups, source_P). A
batch always has `seats` seats for groups; an empty seat is masked out. `source_P` is
the index of each seat into types.SOURCES, -1 for an empty seat.

A group is learnable if it has correct and wrong responses and its unmasked responses
differ in reward: equal rewards, shaped or not, give no advantage (`types.learnable`).

`FreshOnly` returns the groups just sampled (GRPO).
`LearnableOnly` returns the fresh learnable groups; the loop samples more prompts while
seats are empty (DAPO's dynamic sampling).
`Replay` adds replayed groups to the fresh ones, learnable or not.
`Adapted` fills the seats in this order (Batch Adaptation PO, Definition 3.1):
1. X1: fresh learnable groups,
2. X2: groups of re-evaluated problems that the current policy sometimes solves,
3. X3: reusable groups from the replay buffer, drawn at random.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.knobs import Section, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.types import (
  SOURCES,
  Groups,
  ReplayBuffer,
  concat,
  first_of,
  learnable,
  passing,
  take,
)

Seated = tuple[Groups, Array]  # the groups in the seats, and source_P
FRESH, REEVALUATED, REUSED = range(len(SOURCES))


class SourceWeights(Section):
  """Factors that multiply the advantage of a row, one per source."""

  fresh: float = knob(1.0, 'Factor on the advantage of fresh rows.', least=0)
  reevaluated: float = knob(
    1.0,
    'Factor on the advantage of re-evaluated rows.',
    least=0,
    needs=('batch.reevaluates', 'buffer.reevaluate'),
  )
  reused: float = knob(
    1.0, 'Factor on the advantage of reused rows.', least=0, needs='batch.uses_buffer'
  )


class BatchRule(Part):
  """Selects the groups of a batch; its class variables declare what a rule needs."""

  arguments = ('fresh', 'reevaluated', 'buffer', 'now', 'key', 'seats')
  returns = ('groups', 'source_P')
  uses_buffer: ClassVar[bool] = False  # reads the replay buffer
  reevaluates: ClassVar[bool] = False  # reads re-evaluated groups of hard problems
  asks_again: ClassVar[bool] = False  # more prompts are sampled while seats are empty
  only_learnable: ClassVar[bool] = False  # drops groups with one verdict

  weights: SourceWeights = knob(SourceWeights, 'Weights by source.')
  max_extra_rounds: int = knob(
    2,
    'Maximum extra rounds of prompts per step while learnable_only has empty seats.',
    least=0,
    most=1024,
    needs='batch.asks_again',
  )

  def __call__(
    self,
    fresh: Groups,
    reevaluated: Groups,
    buffer: ReplayBuffer,
    now: int | Array,
    key: Array,
    seats: int,
  ) -> Seated:
    """Returns `seats` groups and source_P, their indices into SOURCES (-1 if empty)."""
    raise NotImplementedError

  def refuses(self, config) -> Iterator[str]:
    """Refuses knobs with which no row, or not every row that teaches, is used."""
    sources = config.sources
    if not any(getattr(self.weights, source) for source in sources):
      given = ', '.join(f'batch.weights.{source}=0' for source in sources)
      yield (
        f'{given} leaves no row with an advantage, because with batch.rule='
        f'{self.rule!r} rows are {", ".join(sources)}; set one of these weights above 0'
      )
    teacher = config.teacher
    if self.only_learnable and teacher.path and not teacher.reward:
      yield (
        f'batch.rule={self.rule!r} drops groups with one verdict, which also teach if '
        "teacher.reward=False; choose batch.rule='fresh_only' or 'replay'"
      )
    if config.rollout.depth and self.extra_rounds:
      yield (
        f'batch.rule={self.rule!r} samples up to batch.max_extra_rounds='
        f'{self.extra_rounds} more rounds if a step has too few groups, but '
        f'rollout.depth={config.rollout.depth} samples before that step; set '
        'rollout.depth=0 or batch.max_extra_rounds=0'
      )

  def fault(self, result, example) -> str:
    """Says whether a seat has a source that its group cannot have."""
    groups, source_P = result
    last_P = np.where(groups.completed_step_P < 0, -1, 2)
    if ((source_P < -1) | (source_P > last_P)).any():
      return f'returns source_P={source_P}; give -1 for empty groups, else 0, 1 or 2'
    return ''

  def seats(self, prompts: int) -> int:
    """Returns the number of groups in a batch, for `prompts` prompts per step."""
    return prompts

  @property
  def extra_rounds(self) -> int:
    """How many rounds of prompts a step may add to its first round."""
    return self.max_extra_rounds if self.asks_again else 0


class FreshOnly(BatchRule):
  """All fresh groups; the baseline: GRPO."""

  rule: Literal['fresh_only'] = 'fresh_only'

  def __call__(
    self,
    fresh: Groups,
    reevaluated: Groups,
    buffer: ReplayBuffer,
    now: int | Array,
    key: Array,
    seats: int,
  ) -> Seated:
    return fresh, jnp.where(fresh.completed_step_P >= 0, FRESH, -1)


class LearnableOnly(BatchRule):
  """The first fresh learnable groups, at most one per problem: DAPO's dynamic sampling.

  This is the filter of DAPO (arXiv:2503.14476, Eq. 11). As in DAPO, learnable groups
  beyond the last seat are dropped.
  """

  asks_again = True
  only_learnable = True

  rule: Literal['learnable_only'] = 'learnable_only'

  def __call__(
    self,
    fresh: Groups,
    reevaluated: Groups,
    buffer: ReplayBuffer,
    now: int | Array,
    key: Array,
    seats: int,
  ) -> Seated:
    # Extra rounds may sample a problem again: two groups of it would weigh it twice.
    earned_N = first_of(fresh.id_P, learnable(fresh))
    return _seated(fresh, earned_N, jnp.zeros_like(fresh.id_P), 0.0, seats)


class Replay(BatchRule):
  """The fresh groups and `replay_ratio` random older groups per fresh group.

  Plain experience replay, the baseline of `Adapted`. buffer.thresholds decides which
  groups the buffer keeps; with 'everything' the buffer keeps all groups.
  """

  uses_buffer = True

  rule: Literal['replay'] = 'replay'
  replay_ratio: int = knob(
    1, 'Replayed groups per fresh group in a batch.', least=1, most=1024
  )

  def __call__(
    self,
    fresh: Groups,
    reevaluated: Groups,
    buffer: ReplayBuffer,
    now: int | Array,
    key: Array,
    seats: int,
  ) -> Seated:
    reusable = buffer.reusable
    candidates = concat(fresh, reusable)
    source_N = _sources(jnp.asarray([FRESH, REUSED]), fresh, reusable)
    # Groups of this step are among the fresh ones already.
    earned_N = (candidates.completed_step_P >= 0) & (
      (source_N == FRESH) | (candidates.completed_step_P < now)
    )
    return _seated(candidates, earned_N, source_N, _luck(key, source_N), seats)

  def seats(self, prompts: int) -> int:
    """Returns the number of groups in a batch, fresh and replayed."""
    return prompts * (1 + self.replay_ratio)

  def refuses(self, config) -> Iterator[str]:
    """Also refuses a buffer with fewer groups than a batch replays."""
    yield from super().refuses(config)
    count = config.prompts.count or 0  # None: not decided yet
    replayed = count * self.replay_ratio
    if config.buffer.capacity < replayed:
      yield (
        f'buffer.capacity={config.buffer.capacity} is less than the groups that a '
        f'batch replays (prompts.count={count} x batch.replay_ratio='
        f'{self.replay_ratio} = {replayed}); give {replayed} or more'
      )


class Adapted(BatchRule):
  """Fills the seats from X1, X2 and X3 in this order (arXiv:2602.20722, Def. 3.1).

  `buffer.thresholds` defines the pass rates of hard and reusable groups. The buffer
  contains no group that is too old or was used too often (`replay_buffer.insert`).

  Returns:
    (groups, source_P): learnable groups; for each problem only the first in this order.
  """

  uses_buffer = True
  reevaluates = True
  only_learnable = True

  rule: Literal['adapted'] = 'adapted'

  def __call__(
    self,
    fresh: Groups,
    reevaluated: Groups,
    buffer: ReplayBuffer,
    now: int | Array,
    key: Array,
    seats: int,
  ) -> Seated:
    candidates = concat(fresh, reevaluated, buffer.reusable)
    source_N = _sources(jnp.arange(len(SOURCES)), fresh, reevaluated, buffer.reusable)
    thresholds = buffer.thresholds
    reusable_N = passing(candidates, thresholds.reusable_min, thresholds.reusable_max)
    # A promoted group without a seat so far is reusable regardless of its pass rate.
    others = len(candidates.id_P) - len(buffer.usage_count_P)
    reusable_N |= jnp.pad(buffer.usage_count_P < 0, (others, 0))
    # All sources need both verdicts. X2 must have improved; X3 must be in the band and
    # from an earlier step: groups of this step are among the fresh groups already.
    earned_N = learnable(candidates)
    earned_N &= (source_N != REEVALUATED) | ~passing(candidates, 0, thresholds.hard_max)
    earned_N &= (source_N != REUSED) | (
      reusable_N & (candidates.completed_step_P < now)
    )
    # Sources are concatenated by priority, so the first row of each problem is kept.
    earned_N = first_of(candidates.id_P, earned_N)
    return _seated(candidates, earned_N, source_N, _luck(key, source_N), seats)


Batching = Annotated[
  BatchRule,
  OneOf(
    'Batch rule: selects the groups of a batch.',
    FreshOnly,
    LearnableOnly,
    Replay,
    Adapted,
  ),
]


def _sources(source: Array, *groups: Groups) -> Array:
  """Returns the source of each row of the concatenated `groups`, [N]."""
  rows = [len(g.id_P) for g in groups]
  return jnp.repeat(source, jnp.asarray(rows), total_repeat_length=sum(rows))


def _luck(key: Array, source_N: Array) -> Array:
  """Returns a random sort key in [0, 1) for reused groups and 0 for other groups."""
  return jnp.where(source_N == REUSED, jax.random.uniform(key, source_N.shape), 0)


def _seated(
  candidates: Groups,
  earned_N: Array,
  source_N: Array,
  luck_N: Array | float,
  seats: int,
) -> Seated:
  """Returns (groups, source_P): the candidates of earned_N, by source, then luck_N."""
  # One stable argsort sorts by priority of the source (integer part), by the random
  # draw among reused groups (fraction), and by order of arrival (stability).
  last = len(SOURCES) + 1  # after all candidates: 2 + luck may round to 3
  order_N = jnp.argsort(jnp.where(earned_N, source_N + luck_N, last), stable=True)
  # With fewer candidates than seats the last is repeated, but masked out below.
  order_P = jnp.pad(order_N, (0, max(seats - len(order_N), 0)), mode='edge')[:seats]
  source_P = jnp.where(earned_N, source_N, -1)[order_P]
  groups = take(candidates, order_P)
  return groups, jnp.where(jnp.arange(seats) < len(order_N), source_P, -1)
