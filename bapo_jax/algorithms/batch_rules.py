"""Batch rules: the groups that the learner sees.

A rule is (fresh, reevaluated, buffer, now, key, seats) -> (groups, source_P).

`fresh_only` takes the groups just sampled (GRPO).
`learnable_only` takes the fresh groups with both verdicts; while seats stay empty the
loop samples more prompts (DAPO's dynamic sampling).
`replay` takes the fresh groups and as many older ones again, whatever their verdicts.
`adapted` fills the batch in order of trust (Batch Adaptation PO, Definition 3.1):
1. fresh groups with both verdicts,
2. re-evaluated problems that the current policy now solves sometimes,
3. reusable groups from the replay buffer, drawn at random.

The verdicts decide, and the rewards of the responses that teach must differ: a group of
equal shaped rewards has no advantage, and takes no seat (`types.learnable`).
A batch always has `seats` seats: a seat that no group has earned is masked out.
`source_P` is the index into types.SOURCES, -1 where the seat is empty.
"""

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import batch_knobs
from bapo_jax.types import (
  SOURCES,
  Groups,
  ReplayBuffer,
  concat,
  first_of,
  learnable,
  take,
)

FRESH, REEVALUATED, REUSED = range(len(SOURCES))


def fresh_only(
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now: int | Array,
  key: Array,
  seats: int,
) -> tuple[Groups, Array]:
  """All fresh groups: the identity of this slot."""
  del reevaluated, buffer, now, key, seats
  return fresh, jnp.where(fresh.completed_step_P >= 0, FRESH, -1)


def learnable_only(
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now: int | Array,
  key: Array,
  seats: int,
) -> tuple[Groups, Array]:
  """The first fresh groups with both verdicts, one per problem.

  arXiv:2503.14476, Eq. 11. Learnable groups without a seat are dropped, as in DAPO.
  """
  del reevaluated, buffer, now, key
  earned_N = first_of(fresh.id_P, learnable(fresh))
  return _seated(fresh, earned_N, jnp.zeros_like(fresh.id_P), 0.0, seats)


def replay(
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now: int | Array,
  key: Array,
  seats: int,
  *,
  replay_ratio: int = batch_knobs.ReplayRule().replay_ratio,
) -> tuple[Groups, Array]:
  """The fresh groups, and `replay_ratio` times as many older ones, drawn at random.

  Plain experience replay, the baseline that `adapted` is to beat. buffer.thresholds
  decides which groups the buffer keeps; with 'everything' it keeps all.

  Args:
    replay_ratio: the batch has (1 + replay_ratio) times as many seats as fresh groups.
  """
  del reevaluated
  assert seats == len(fresh.id_P) * (1 + replay_ratio)
  reusable = buffer.reusable
  found = concat(fresh, reusable)
  source_N = jnp.repeat(
    jnp.asarray([FRESH, REUSED]),
    jnp.asarray([len(fresh.id_P), len(reusable.id_P)]),
    total_repeat_length=len(found.id_P),
  )
  earned_N = (found.completed_step_P >= 0) & (
    (source_N == FRESH) | (found.completed_step_P < now)
  )
  return _seated(found, earned_N, source_N, _luck(key, source_N), seats)


def adapted(
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now: int | Array,
  key: Array,
  seats: int,
) -> tuple[Groups, Array]:
  """Definition 3.1 of arXiv:2602.20722: X1, then X2 not in X1, then X3 in neither.

  `buffer.thresholds` decides which pass rates are hard and which reusable. The buffer
  holds no group that is too old or was used too often: `replay_buffer.insert`.

  Returns:
    (groups, source_P): groups of both verdicts, no problem twice.
  """
  found = concat(fresh, reevaluated, buffer.reusable)
  source_N = jnp.repeat(
    jnp.arange(len(SOURCES)),
    jnp.asarray([len(g.id_P) for g in (fresh, reevaluated, buffer.reusable)]),
    total_repeat_length=len(found.id_P),
  )
  k_N, thresholds = found.correct_PG.sum(1), buffer.thresholds
  reusable_N = (k_N >= thresholds.reusable_min) & (k_N <= thresholds.reusable_max)
  # A promoted group that has not been trained on is reusable whatever its pass rate.
  others = len(found.id_P) - len(buffer.usage_count_P)
  reusable_N |= jnp.pad(buffer.usage_count_P < 0, (others, 0))
  earned_N = learnable(found)
  earned_N &= (source_N != REEVALUATED) | (k_N > thresholds.hard_max)
  earned_N &= (source_N != REUSED) | (reusable_N & (found.completed_step_P < now))
  # Earlier sources come first in `found`, so an earlier row of one problem wins.
  earned_N = first_of(found.id_P, earned_N)
  return _seated(found, earned_N, source_N, _luck(key, source_N), seats)


def _luck(key: Array, source_N: Array) -> Array:
  """Reused groups are drawn: in [0, 1). All others keep their order: 0."""
  return jnp.where(source_N == REUSED, jax.random.uniform(key, source_N.shape), 0)


def _seated(
  found: Groups, earned_N: Array, source_N: Array, luck_N: Array | float, seats: int
) -> tuple[Groups, Array]:
  """(groups, source_P): the rows that earned a seat, by source and then by luck."""
  none = len(SOURCES) + 1  # 2 + luck may round to 3
  order_N = jnp.argsort(jnp.where(earned_N, source_N + luck_N, none), stable=True)
  # Fewer candidates than seats: the last one is repeated, and masked out.
  order_P = jnp.pad(order_N, (0, max(seats - len(order_N), 0)), mode='edge')[:seats]
  source_P = jnp.where(earned_N, source_N, -1)[order_P]
  return take(found, order_P), jnp.where(jnp.arange(seats) < len(order_N), source_P, -1)


RULES = {
  'fresh_only': fresh_only,
  'learnable_only': learnable_only,
  'replay': replay,
  'adapted': adapted,
}
