"""Shelves of groups that outlive their step: pure functions on Groups.

1. `shelve` files what was just tried: failures on `hard`, groups of both verdicts on
   `good`; a problem that was tried leaves its old place first;
2. `draw` gives back the problems of a shelf that were tried longest ago.

A row is empty when born_P is -1, and "oldest first" then means "empty first".
"""

import functools

import jax
import jax.numpy as jnp

from bapo_jax.types import Groups, Shelves, concat, empty, first_of, take


def start(capacity: int, group: int, length: int) -> Shelves:
  """Empty shelves. `hard` keeps no responses, so its rows are one token long."""
  return Shelves(hard=empty(capacity, 1, 1), good=empty(capacity, group, length))


def remove(shelf: Groups, id_P) -> Groups:
  """The shelf with the rows of these problems emptied (and -1 matches nothing)."""
  gone_P = ((shelf.id_P[:, None] == id_P[None]) & (id_P[None] >= 0)).any(1)
  return shelf._replace(born_P=jnp.where(gone_P, -1, shelf.born_P))


def insert(shelf: Groups, groups: Groups, wanted_P) -> Groups:
  """The newest rows of both, one a problem, as many as the shelf holds."""
  wanted_P = wanted_P & (groups.born_P >= 0)
  groups = groups._replace(born_P=jnp.where(wanted_P, groups.born_P, -1))
  shelf = remove(shelf, jnp.where(wanted_P, groups.id_P, -1))
  both = concat(groups, shelf)
  newest_P = jnp.argsort(-both.born_P, stable=True)
  return take(both, newest_P[: shelf.id_P.shape[0]])


@functools.partial(jax.jit, static_argnames=('hard', 'good', 'max_age'))
def shelve(
  shelves: Shelves,
  tried: Groups,
  now,
  *,
  hard: float,
  good: tuple[float, float],
  max_age: int,
) -> Shelves:
  """Files the groups completed at step `now` (Batch Adaptation PO, section 3).

  Args:
    tried: fresh groups, then rechecked ones; of a problem in both, the later counts.
    hard: c1, largest share of right answers that files a problem under `hard`.
    good: (c2, c3), the band of shares that files a group under `good`.
    max_age: learner steps after which a good group leaves.
  """
  last_P = first_of(tried.id_P[::-1], tried.born_P[::-1] >= 0)[::-1]
  tried = tried._replace(born_P=jnp.where(last_P, tried.born_P, -1))
  G = tried.correct_PG.shape[1]
  k_P = tried.correct_PG.sum(1)
  # Thresholds in whole answers: a share of 1/8 is 1 of 8, whatever floats make of it.
  most, first, last = (int(share * G + 1e-6) for share in (hard, *good))
  prompts = Groups(*(x[:, :1, :1] if x.ndim == 3 else x for x in tried))
  prompts = prompts._replace(
    correct_PG=tried.correct_PG[:, :1], reward_PG=tried.reward_PG[:, :1]
  )
  in_band_P = (k_P >= max(first, 1)) & (k_P <= min(last, G - 1))
  kept = insert(shelves.good, tried, in_band_P)
  return Shelves(
    hard=insert(remove(shelves.hard, tried.id_P), prompts, k_P <= most),
    good=kept._replace(
      born_P=jnp.where(now + 1 - kept.born_P > max_age, -1, kept.born_P)
    ),
  )


def draw(shelf: Groups, rows: int) -> Groups:
  """`rows` rows, tried longest ago first; empty ones come last.

  Raises:
    ValueError: the shelf has fewer rows than that.
  """
  if rows > shelf.id_P.shape[0]:
    raise ValueError(
      f'buffer.recheck={rows} is more than buffer.capacity={shelf.id_P.shape[0]}'
    )
  never = jnp.iinfo(jnp.int32).max
  oldest_P = jnp.argsort(jnp.where(shelf.born_P < 0, never, shelf.born_P), stable=True)
  drawn = take(shelf, oldest_P[:rows])
  return drawn._replace(id_P=jnp.where(drawn.born_P < 0, -1, drawn.id_P))
