"""Shelves of groups that outlive their step: pure functions on Groups.

1. a band rule says, in whole right answers, what is hard and what is good;
2. `draw` gives the problems of `hard` that were tried longest ago;
3. `shelve` files what was tried: failures on `hard`, groups of both verdicts on `good`,
   and counts who came and who left.

A row is empty when completed_step_P is -1, and "oldest first" then means "empty first".
"""

import functools

import jax
import jax.numpy as jnp

from bapo_jax.types import (
  SOURCES,
  Groups,
  PassRateThresholds,
  ReplayBuffer,
  ThresholdRule,
  concat,
  empty_groups,
  first_of,
  take,
)

REUSED = SOURCES.index('reused')


def fixed(
  rate, G: int, *, hard: float = 1 / 8, reusable: tuple[float, float] = (1 / 8, 5 / 8)
) -> PassRateThresholds:
  """The same thresholds at every step (Batch Adaptation PO, section 3).

  Args:
    hard: c1, largest share of right answers that files a problem under `hard`.
    good: (c2, c3), smallest and largest share that files a group under `good`.
  """
  return moving(
    rate, G, hard=(hard, hard), low=(reusable[0],) * 2, high=(reusable[1],) * 2
  )


def moving(
  rate,
  G: int,
  *,
  hard: tuple[float, float] = (1 / 8, 3 / 8),
  low: tuple[float, float] = (1 / 8, 3 / 8),
  high: tuple[float, float] = (5 / 8, 7 / 8),
) -> PassRateThresholds:
  """Thresholds that follow the policy: c = rate (end - start) + start (Eq. 8).

  Args:
    rate: r_tot, the mean verdict of all fresh responses so far.
    G: responses a group.
    hard, low, high: (start, end) of c1, c2 and c3. The paper does not print its
      endpoints; these defaults are ours.

  Raises:
    ValueError: a share outside [0, 1], c1 of 1, or c2 above c3.
  """
  c1, c2, c3 = (rate * (end - start) + start for start, end in (hard, low, high))
  return PassRateThresholds(
    hard_max=jnp.minimum(
      _most(c1, G), G - 1
    ),  # whatever rounding says, solved is not hard
    reusable_min=jnp.maximum(_least(c2, G), 1),  # groups of one verdict teach nothing
    reusable_max=jnp.minimum(_most(c3, G), G - 1),
  )


def threshold_free(rate, G: int) -> PassRateThresholds:
  """Hard is never solved, good is solved half the time: nothing to set (section 3).

  Raises:
    ValueError: G is odd, so that no group is half right.
  """
  del rate
  return PassRateThresholds(jnp.int32(0), jnp.int32(G // 2), jnp.int32(G // 2))


def everything(rate, G: int) -> PassRateThresholds:
  """Every group is good and no problem is hard: what plain replay keeps."""
  del rate
  return PassRateThresholds(jnp.int32(-1), jnp.int32(0), jnp.int32(G))


THRESHOLD_RULES = {
  'fixed': fixed,
  'moving': moving,
  'threshold_free': threshold_free,
  'everything': everything,
}

# A share of 1/8 is 1 of 8, whatever floats make of it.
SLACK = 1e-4


def _most(share, G: int):
  return jnp.floor(share * G + SLACK).astype(jnp.int32)


def _least(share, G: int):
  return jnp.ceil(share * G - SLACK).astype(jnp.int32)


def init(
  capacity: int, group: int, length: int, thresholds: ThresholdRule = fixed
) -> ReplayBuffer:
  """Empty buffer. `hard` keeps no responses, so its rows are one token long.

  Args:
    band: a rule of BANDS, its knobs bound.
  """
  return ReplayBuffer(
    hard=empty_groups(capacity, 1, 1),
    reusable=empty_groups(capacity, group, length),
    usage_count_P=jnp.zeros(capacity, jnp.int32),
    num_correct=jnp.int32(0),
    num_responses=jnp.int32(0),
    thresholds=thresholds(jnp.float32(0), group),
  )


def draw(held: Groups, rows: int) -> Groups:
  """`rows` rows, tried longest ago first; empty ones come last.

  Raises:
    ValueError: the held has fewer rows than that.
  """
  never = jnp.iinfo(jnp.int32).max
  oldest_P = jnp.argsort(
    jnp.where(held.completed_step_P < 0, never, held.completed_step_P), stable=True
  )
  drawn = take(held, oldest_P[:rows])
  return drawn._replace(id_P=jnp.where(drawn.completed_step_P < 0, -1, drawn.id_P))


@functools.partial(
  jax.jit, static_argnames=('thresholds', 'max_off_policy_steps', 'max_reuse')
)
def insert(
  buffer: ReplayBuffer,
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P,
  now,
  *,
  thresholds: ThresholdRule = fixed,
  max_off_policy_steps: int,
  max_reuse: int,
) -> tuple[ReplayBuffer, dict]:
  """Files the groups completed at step `now` (Batch Adaptation PO, section 3).

  Today's band decides, tomorrow's is made of today's verdicts too. A good group leaves
  once it would be older than `max_off_policy_steps` steps, or was learned from `max_reuse` times.

  Args:
    fresh, reevaluated: what was tried; of a problem in both, the recheck counts.
    groups, source_P: the batch that was learned from.
    band: a rule of BANDS, its knobs bound.

  Returns:
    (buffer, counts): who entered `hard`, and who left it and why: reevaluated and always
    solved (graduated) or sometimes (promoted), solved when asked afresh (progressed),
    or crowded out (evicted).
  """
  tried = concat(fresh, reevaluated)
  last_P = first_of(tried.id_P[::-1], tried.completed_step_P[::-1] >= 0)[::-1]
  tried = tried._replace(completed_step_P=jnp.where(last_P, tried.completed_step_P, -1))
  k_P = tried.correct_PG.sum(1)
  usage_count_P = buffer.usage_count_P + _among(
    buffer.reusable.id_P, jnp.where(source_P == REUSED, groups.id_P, -1)
  )
  good, usage_count_P = _insert_reusable(
    buffer._replace(usage_count_P=usage_count_P),
    tried,
    k_P,
    now,
    max_off_policy_steps,
    max_reuse,
  )
  hard, counts = _insert_hard(buffer, tried, k_P, len(fresh.id_P))
  there_P = fresh.completed_step_P >= 0
  right = buffer.num_correct + jnp.where(there_P, fresh.correct_PG.sum(1), 0).sum()
  answers = buffer.num_responses + there_P.sum() * fresh.correct_PG.shape[1]
  rate = right / jnp.maximum(answers, 1)
  bounds = thresholds(rate.astype(jnp.float32), fresh.correct_PG.shape[1])
  return ReplayBuffer(hard, good, usage_count_P, right, answers, bounds), counts


def _among(id_P, others):
  """bool: which of these problems are among the others (-1 is nobody)."""
  return ((id_P[:, None] == others[None]) & (others[None] >= 0)).any(1)


def _newest(groups: Groups, held: Groups, wanted_P) -> tuple[Groups, jax.Array]:
  """Both, and the rows of both that the held shall hold: the newest, one a problem."""
  wanted_P = wanted_P & (groups.completed_step_P >= 0)
  old_P = _among(held.id_P, jnp.where(wanted_P, groups.id_P, -1))
  both = concat(
    groups._replace(completed_step_P=jnp.where(wanted_P, groups.completed_step_P, -1)),
    held._replace(completed_step_P=jnp.where(old_P, -1, held.completed_step_P)),
  )
  return both, jnp.argsort(-both.completed_step_P, stable=True)[: held.id_P.shape[0]]


def _insert_reusable(
  buffer: ReplayBuffer, tried: Groups, k_P, now, max_off_policy_steps, max_reuse
):
  thresholds = buffer.thresholds
  reusable_P = (k_P >= thresholds.reusable_min) & (k_P <= thresholds.reusable_max)
  held, usage_count_P = buffer.reusable, buffer.usage_count_P
  # Before places are given away: what leaves in any case shall not crowd out another.
  stays_P = (now + 1 - held.completed_step_P <= max_off_policy_steps) & (
    usage_count_P < max_reuse
  )
  held = held._replace(completed_step_P=jnp.where(stays_P, held.completed_step_P, -1))
  both, kept = _newest(tried, held, reusable_P)
  return take(both, kept), jnp.concatenate([jnp.zeros_like(k_P), usage_count_P])[kept]


def _insert_hard(buffer: ReplayBuffer, tried: Groups, k_P, fresh: int):
  there_P = tried.completed_step_P >= 0
  hard_P = there_P & (k_P <= buffer.thresholds.hard_max)
  before_P = jnp.where(buffer.hard.completed_step_P >= 0, buffer.hard.id_P, -1)
  known_P = there_P & _among(tried.id_P, before_P)
  reevaluated_P = jnp.arange(len(k_P)) >= fresh
  solved_P = k_P == tried.correct_PG.shape[1]
  left_P = known_P & ~hard_P
  prompts = Groups(*(x[:, :1, :1] if x.ndim == 3 else x for x in tried))
  prompts = prompts._replace(
    correct_PG=tried.correct_PG[:, :1], reward_PG=tried.reward_PG[:, :1]
  )
  gone_P = _among(buffer.hard.id_P, jnp.where(there_P, tried.id_P, -1))
  rest = buffer.hard._replace(
    completed_step_P=jnp.where(gone_P, -1, buffer.hard.completed_step_P)
  )
  both, kept = _newest(prompts, rest, hard_P)
  hard = take(both, kept)
  counts = {
    'buffer/entered': hard_P & ~known_P,
    'buffer/graduated': left_P & reevaluated_P & solved_P,
    'buffer/promoted': left_P & reevaluated_P & ~solved_P,
    'buffer/progressed': left_P & ~reevaluated_P,
  }
  counts = {name: is_P.sum() for name, is_P in counts.items()}
  room = (before_P >= 0).sum() + counts['buffer/entered'] - left_P.sum()
  return hard, counts | {'buffer/evicted': room - (hard.completed_step_P >= 0).sum()}
