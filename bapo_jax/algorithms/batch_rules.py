"""Which groups the learner sees.

A rule is (fresh, reevaluated, buffer, now, key, seats) -> (batch, source_P).

`fresh_only` takes what was just sampled (GRPO).
`learnable_only` takes the fresh groups that disagree with themselves; while seats stay
empty the loop asks for more (DAPO's dynamic sampling).
`replay` takes the fresh groups and as many older ones again, whatever they are.
`adapted` fills the batch in order of trust (Batch Adaptation PO, Definition 3.1):
1. fresh groups that disagree with themselves (some right, some wrong),
2. reevaluated problems the current policy now solves sometimes: hard < share < 1,
3. good groups from the shelf, drawn at random.

There are `seats` seats whatever happens: one that no group has earned is masked out.
`source_P` is the index into types.SOURCES, -1 where the seat is empty.
"""

import jax
import jax.numpy as jnp

from bapo_jax.types import SOURCES, Groups, ReplayBuffer, concat, first_of, take

FRESH, REEVALUATED, REUSED = range(len(SOURCES))


def fresh_only(
  fresh: Groups, reevaluated: Groups, buffer: ReplayBuffer, now, key, seats: int
):
  """The fresh groups, all of them: the identity of this slot."""
  del reevaluated, buffer, now, key
  return fresh, jnp.where(fresh.completed_step_P >= 0, FRESH, -1)


def learnable_only(
  fresh: Groups, reevaluated: Groups, buffer: ReplayBuffer, now, key, seats: int
):
  """The first fresh groups with both verdicts, one a problem: arXiv:2503.14476, Eq. 11.

  What is learnable and finds no seat is dropped, as in DAPO.
  """
  del reevaluated, buffer, now, key
  earned_N = first_of(fresh.id_P, _learnable(fresh))
  return _seated(fresh, earned_N, jnp.zeros_like(fresh.id_P), 0.0, seats)


def replay(
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now,
  key,
  seats: int,
  *,
  replay_ratio: int = 1,
):
  """The fresh groups, and `replay_ratio` times as many of the last steps', drawn at random.

  Plain experience replay, the baseline that `adapted` is to beat. What the shelf keeps
  is the business of buffer.thresholds; with 'everything' nothing is chosen.

  Args:
    replay_ratio: 1 or more; there are (1 + replay_ratio) times as many seats as fresh groups.
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
  there_N = (found.completed_step_P >= 0) & (
    (source_N == FRESH) | (found.completed_step_P < now)
  )
  return _seated(found, there_N, source_N, _luck(key, source_N), seats)


def adapted(
  fresh: Groups, reevaluated: Groups, buffer: ReplayBuffer, now, key, seats: int
):
  """Definition 3.1 of arXiv:2602.20722: X1, then X2 not in X1, then X3 in neither.

  What is hard and what is good is said by `buffer.thresholds`, how old a good group may be
  and how often it may be used by the shelf, which no longer holds it then.

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
  earned_N = _learnable(found)
  earned_N &= (source_N != REEVALUATED) | (k_N > thresholds.hard_max)
  earned_N &= (source_N != REUSED) | (reusable_N & (found.completed_step_P < now))
  # Earlier sources come first in `found`, so an earlier row of one problem wins.
  earned_N = first_of(found.id_P, earned_N)
  return _seated(found, earned_N, source_N, _luck(key, source_N), seats)


def _learnable(groups: Groups):
  k_P = groups.correct_PG.sum(1)
  return (k_P > 0) & (k_P < groups.correct_PG.shape[1]) & (groups.completed_step_P >= 0)


def _luck(key, source_N):
  """Reused groups are drawn, all others stand in line."""
  return jnp.where(source_N == REUSED, jax.random.uniform(key, source_N.shape), 0)


def _seated(found: Groups, earned_N, source_N, luck_N, seats: int):
  """(groups, source_P): those who earned it in order of source, then of luck."""
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
