"""Groups that outlive their step: pure functions on ReplayBuffer.

1. a threshold rule gives, in whole numbers of correct responses, what is hard and what
   is reusable;
2. `draw` gives the hard problems that were tried longest ago;
3. `insert` files the groups completed at a step: failures as hard, groups of both
   verdicts as reusable, and promoted groups that found no seat with them; and counts
   the problems that entered and left.

A row is empty when completed_step_P is -1, and "oldest first" then means "empty first".
In a FIFO of hard problems the rows stand in the order of entry, the newest first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import batch_knobs
from bapo_jax.algorithms.batch_knobs import HardOrder, Range
from bapo_jax.types import (
  SOURCES,
  Groups,
  PassRateThresholds,
  ReplayBuffer,
  ThresholdRule,
  concat,
  empty_groups,
  first_of,
  learnable,
  take,
)

REUSED = SOURCES.index('reused')
_FIXED = batch_knobs.FixedThresholds()
_MOVING = batch_knobs.MovingThresholds()


def fixed(
  rate: Array, G: int, *, hard: float = _FIXED.hard, reusable: Range = _FIXED.reusable
) -> PassRateThresholds:
  """The same thresholds at every step (Batch Adaptation PO, section 3).

  Args:
    hard: c1, largest pass rate of a hard problem.
    reusable: (c2, c3), smallest and largest pass rate of a reusable group.
  """
  return moving(rate, G, hard=hard, low=(reusable[0],) * 2, high=(reusable[1],) * 2)


def moving(
  rate: Array,
  G: int,
  *,
  hard: float = _MOVING.hard,
  low: Range = _MOVING.low,
  high: Range = _MOVING.high,
) -> PassRateThresholds:
  """c2 and c3 follow the policy: c = rate (end - start) + start (Eq. 8); c1 stays.

  The paper's text and code lower the band as the policy improves (start above end, the
  default), its printed Eq. 8 raises it. It does not print the ends: these are ours.

  Args:
    rate: r_tot, the mean verdict of all fresh responses so far, scalar in [0, 1].
    G: responses per group.
    hard: c1, largest pass rate of a hard problem.
    low, high: (start, end) of c2 and of c3.
  """
  c2, c3 = (rate * (end - start) + start for start, end in (low, high))
  return PassRateThresholds(
    # At most G - 1, whatever rounding does: a solved problem is not hard.
    hard_max=jnp.minimum(_most(jnp.float32(hard), G), G - 1),
    # From 1 to G - 1: groups of one verdict teach nothing.
    reusable_min=jnp.maximum(_least(c2, G), 1),
    reusable_max=jnp.minimum(_most(c3, G), G - 1),
  )


def threshold_free(rate: Array, G: int) -> PassRateThresholds:
  """Hard is never solved, reusable is solved half the time: no knobs (section 3).

  Args:
    G: responses per group, an even number.
  """
  del rate
  return PassRateThresholds(jnp.int32(0), jnp.int32(G // 2), jnp.int32(G // 2))


def everything(rate: Array, G: int) -> PassRateThresholds:
  """Every group is reusable and no problem is hard: plain replay."""
  del rate
  return PassRateThresholds(jnp.int32(-1), jnp.int32(0), jnp.int32(G))


THRESHOLD_RULES = {
  'fixed': fixed,
  'moving': moving,
  'threshold_free': threshold_free,
  'everything': everything,
}

# A pass rate of 1/8 is 1 of 8, whatever floats make of it.
SLACK = 1e-4


def _most(rate: Array, G: int) -> Array:
  return jnp.floor(rate * G + SLACK).astype(jnp.int32)


def _least(rate: Array, G: int) -> Array:
  return jnp.ceil(rate * G - SLACK).astype(jnp.int32)


def init(
  capacity: int, group_size: int, length: int, thresholds: ThresholdRule = fixed
) -> ReplayBuffer:
  """An empty buffer. `hard` holds no responses, so its rows are one token long.

  Args:
    capacity: rows of each part.
    group_size: G, responses per group.
    length: T, tokens per row.
    thresholds: a rule of THRESHOLD_RULES, its knobs bound.
  """
  return ReplayBuffer(
    hard=empty_groups(capacity, 1, 1),
    reusable=empty_groups(capacity, group_size, length),
    usage_count_P=jnp.zeros(capacity, jnp.int32),
    num_correct=jnp.int32(0),
    num_responses=jnp.int32(0),
    thresholds=thresholds(jnp.float32(0), group_size),
  )


def draw(stored: Groups, rows: int) -> Groups:
  """`rows` rows of one part, tried longest ago first; empty ones come last."""
  never = jnp.iinfo(jnp.int32).max
  oldest_P = jnp.argsort(
    jnp.where(stored.completed_step_P < 0, never, stored.completed_step_P), stable=True
  )
  drawn = take(stored, oldest_P[:rows])
  return drawn._replace(id_P=jnp.where(drawn.completed_step_P < 0, -1, drawn.id_P))


@functools.partial(
  jax.jit,
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
  thresholds: ThresholdRule = fixed,
  max_off_policy_steps: int,
  max_reuse: int,
  hard_order: HardOrder = 'fifo',
) -> tuple[ReplayBuffer, dict[str, Array]]:
  """Files the groups completed at step `now` (Batch Adaptation PO, section 3).

  The thresholds in force decide; the next ones count this step's verdicts too. A
  reusable group leaves once it would be more than `max_off_policy_steps` steps old, or
  was trained on again `max_reuse` times. A promoted group whose problem has no seat in
  the batch becomes reusable whatever its pass rate, its usage count -1: not trained on.

  Args:
    fresh, reevaluated: the groups completed at this step; of a problem in both, the
      re-evaluated group counts.
    groups, source_P: the batch that the learner trained on.
    thresholds: a rule of THRESHOLD_RULES, its knobs bound.
    hard_order: the hard problem that leaves a full buffer: under 'fifo' the one that
      entered first, tried again or not; under 'least_recent' the one tried longest ago.

  Returns:
    (buffer, counts): problems that entered `hard`, and that left it: re-evaluated and
    always solved (graduated) or sometimes (promoted), solved as a fresh prompt
    (progressed), or replaced by newer ones (evicted).
  """
  tried = concat(fresh, reevaluated)
  last_P = first_of(tried.id_P[::-1], tried.completed_step_P[::-1] >= 0)[::-1]
  tried = tried._replace(completed_step_P=jnp.where(last_P, tried.completed_step_P, -1))
  k_P = tried.correct_PG.sum(1)
  usage_count_P = buffer.usage_count_P + _among(
    buffer.reusable.id_P, jnp.where(source_P == REUSED, groups.id_P, -1)
  )
  waiting_P = learnable(tried) & (k_P > buffer.thresholds.hard_max)
  waiting_P &= jnp.arange(len(k_P)) >= len(fresh.id_P)
  waiting_P &= ~_among(tried.id_P, jnp.where(source_P >= 0, groups.id_P, -1))
  reusable, usage_count_P = _insert_reusable(
    buffer._replace(usage_count_P=usage_count_P),
    tried,
    waiting_P,
    now,
    max_off_policy_steps,
    max_reuse,
  )
  hard, counts = _insert_hard(buffer, tried, k_P, len(fresh.id_P), hard_order)
  filled_P = fresh.completed_step_P >= 0
  correct = buffer.num_correct + jnp.where(filled_P, fresh.correct_PG.sum(1), 0).sum()
  responses = buffer.num_responses + filled_P.sum() * fresh.correct_PG.shape[1]
  rate = correct / jnp.maximum(responses, 1)
  following = thresholds(rate.astype(jnp.float32), fresh.correct_PG.shape[1])
  after = ReplayBuffer(hard, reusable, usage_count_P, correct, responses, following)
  return after, counts


def _among(id_P: Array, others: Array) -> Array:
  """bool: which of these problems are among the others; -1 is no problem."""
  return ((id_P[:, None] == others[None]) & (others[None] >= 0)).any(1)


def _emptied(groups: Groups, where_P: Array) -> Groups:
  """The groups, empty at these rows."""
  return groups._replace(
    completed_step_P=jnp.where(where_P, -1, groups.completed_step_P)
  )


def _insert_reusable(
  buffer: ReplayBuffer,
  tried: Groups,
  waiting_P: Array,
  now: int | Array,
  max_off_policy_steps: int,
  max_reuse: int,
) -> tuple[Groups, Array]:
  """(reusable, usage_count_P) with the groups of `tried` that are reusable.

  Args:
    waiting_P: bool, promoted groups without a seat. They are at most as many as are
      re-evaluated at once, which is at most the capacity: none of them is evicted.
  """
  k_P, thresholds = tried.correct_PG.sum(1), buffer.thresholds
  reusable_P = (k_P >= thresholds.reusable_min) & (k_P <= thresholds.reusable_max)
  # Where groups of one verdict are kept (plain replay), no group has to teach.
  reusable_P &= learnable(tried) | (thresholds.reusable_min == 0)
  reusable_P = (reusable_P | waiting_P) & (tried.completed_step_P >= 0)
  stored, usage_count_P = buffer.reusable, buffer.usage_count_P
  # Expire first, so that an expired row evicts no other.
  stays_P = (now + 1 - stored.completed_step_P <= max_off_policy_steps) & (
    usage_count_P < max_reuse
  )
  replaced_P = _among(stored.id_P, jnp.where(reusable_P, tried.id_P, -1))
  both = concat(_emptied(tried, ~reusable_P), _emptied(stored, ~stays_P | replaced_P))
  usage_count_P = jnp.concatenate([-waiting_P.astype(jnp.int32), usage_count_P])
  # Newest first; of one step, those that have not been trained on.
  waiting_P = jnp.pad(waiting_P, (0, len(stored.id_P)))
  order = jnp.argsort(-2 * both.completed_step_P - waiting_P, stable=True)
  rows = order[: len(stored.id_P)]
  return take(both, rows), usage_count_P[rows]


def _insert_hard(
  buffer: ReplayBuffer, tried: Groups, k_P: Array, fresh: int, hard_order: HardOrder
) -> tuple[Groups, dict[str, Array]]:
  """(hard, counts) with the hard problems of `tried`.

  Args:
    fresh: rows of `tried` that are fresh; the others are re-evaluated.
  """
  filled_P = tried.completed_step_P >= 0
  hard_P = filled_P & (k_P <= buffer.thresholds.hard_max)
  before_P = jnp.where(buffer.hard.completed_step_P >= 0, buffer.hard.id_P, -1)
  known_P = filled_P & _among(tried.id_P, before_P)
  reevaluated_P = jnp.arange(len(k_P)) >= fresh
  solved_P = k_P == tried.correct_PG.shape[1]
  left_P = known_P & ~hard_P
  problems = Groups(*(x[:, :1, :1] if x.ndim == 3 else x for x in tried))
  problems = problems._replace(
    correct_PG=tried.correct_PG[:, :1],
    reward_PG=tried.reward_PG[:, :1],
    teaches_PG=tried.teaches_PG[:, :1],
  )
  tried_P = _among(buffer.hard.id_P, jnp.where(filled_P, tried.id_P, -1))
  stored = _emptied(buffer.hard, tried_P)
  if hard_order == 'fifo':  # what is hard again keeps its place
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
  room = (before_P >= 0).sum() + counts['buffer/entered'] - left_P.sum()
  return hard, counts | {'buffer/evicted': room - (hard.completed_step_P >= 0).sum()}
