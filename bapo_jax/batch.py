"""Which groups the learner sees: (fresh, recheck, good, now, key) -> (batch, source_P).

`fresh_only` takes what was just sampled (GRPO, DAPO).
`adapted` fills the batch in order of trust (Batch Adaptation PO, Definition 3.1):
1. fresh groups that disagree with themselves (some right, some wrong),
2. rechecked problems the current policy now solves sometimes: hard < share < 1,
3. good groups from the shelf, at most `max_age` steps old, drawn at random;
a seat that no group has earned is masked out, and the batch keeps its shape.

`source_P` is the index into types.SOURCES, -1 where the seat is empty.
"""

import jax
import jax.numpy as jnp

from bapo_jax.types import Groups, concat, first_of, take

# Rules that look at neither `recheck` nor `good`: nothing need be rechecked for them.
SHELFLESS = frozenset({'fresh_only'})


def fresh_only(fresh: Groups, recheck: Groups, good: Groups, now, key):
  """The fresh groups, all of them: the identity of this slot."""
  del recheck, good, now, key
  return fresh, jnp.where(fresh.born_P >= 0, 0, -1)


def adapted(
  fresh: Groups,
  recheck: Groups,
  good: Groups,
  now,
  key,
  *,
  hard: float = 1 / 8,
  max_age: int = 3,
):
  """Definition 3.1 of arXiv:2602.20722: X1, then X2 not in X1, then X3 in neither.

  Args:
    hard: c1, the share of right answers that a rechecked problem must exceed.
    max_age: oldest age in learner steps of a reused group; the youngest is 1.

  Returns:
    (groups, source_P): as many seats as there are fresh groups.
  """
  P, G = fresh.correct_PG.shape
  found = concat(fresh, recheck, good)
  k_N = found.correct_PG.sum(1)
  source_N = jnp.repeat(
    jnp.arange(3),
    jnp.asarray([len(g.id_P) for g in (fresh, recheck, good)]),
    total_repeat_length=len(k_N),
  )
  age_N = now - found.born_P
  earned_N = (k_N > 0) & (k_N < G) & (found.born_P >= 0)
  earned_N &= (source_N != 1) | (k_N > int(hard * G + 1e-6))
  earned_N &= (source_N != 2) | ((age_N >= 1) & (age_N <= max_age))
  # Earlier sources come first in `found`, so an earlier row of one problem wins.
  earned_N = first_of(found.id_P, earned_N)
  luck_N = jnp.where(source_N == 2, jax.random.uniform(key, k_N.shape), 0)
  order_N = jnp.argsort(jnp.where(earned_N, source_N + luck_N, 3), stable=True)[:P]
  return take(found, order_N), jnp.where(earned_N, source_N, -1)[order_N]


RULES = {'fresh_only': fresh_only, 'adapted': adapted}
