"""The buffer by hand: what is filed, expires, is drawn; histories: test_history.py."""

import functools

import jax.numpy as jnp
import making

from bapo_jax import types
from bapo_jax.algorithms import replay_buffer

G, T = 8, 3


def insert(
  buffer, fresh, now, reevaluated=None, thresholds=replay_buffer.fixed, max_reuse=9
):
  """(buffer, counts) after a step whose batch was the fresh groups."""
  length, group_size = fresh.tokens_PGT.shape[2], fresh.correct_PG.shape[1]
  if reevaluated is None:
    reevaluated = types.empty_groups(0, group_size, length)
  source_P = jnp.zeros(len(fresh.id_P), jnp.int32)
  return replay_buffer.insert(
    buffer,
    fresh,
    reevaluated,
    fresh,
    source_P,
    now,
    thresholds=thresholds,
    max_off_policy_steps=3,
    max_reuse=max_reuse,
  )


@functools.cache
def fixed(c1, c2, c3):
  return functools.partial(replay_buffer.fixed, hard=c1, reusable=(c2, c3))


def live(groups):
  """[(id, step)] of the rows that are not empty."""
  rows = zip(groups.id_P, groups.completed_step_P, strict=True)
  return [(int(i), int(step)) for i, step in rows if step >= 0]


def test_insert_golden():
  # Step 3 tried problem 0 with 0/8, 1 with 1/8, 2 with 2/8, 5 with 5/8, 6 with 6/8:
  # c1 = 1/8 files 0 and 1 as hard, 1/8..5/8 files 1, 2 and 5 as reusable.
  tried = making.groups([0, 1, 2, 5, 6], [0, 1, 2, 5, 6], [3] * 5)
  buffer, _ = insert(replay_buffer.init(4, G, T), tried, 3)
  assert live(buffer.hard) == [(0, 3), (1, 3)]
  assert live(buffer.reusable) == [(1, 3), (2, 3), (5, 3)]
  # Step 4: 0 improves to 3/8 and leaves `hard`; 1 fails again and is now the newest.
  tried = making.groups([0, 1], [3, 0], [4, 4])
  buffer, _ = insert(buffer, tried, 4)
  assert live(buffer.hard) == [(1, 4)]
  # Four rows in `reusable`: the newcomer 0 takes the last one, no group leaves.
  assert live(buffer.reusable) == [(0, 4), (1, 3), (2, 3), (5, 3)]
  # Step 6 reuses ages up to 3, that is of step 3 or later; after it, step 3 is too old.
  nothing = types.empty_groups(2, G, T)
  assert len(live(insert(buffer, nothing, 5)[0].reusable)) == 4
  assert live(insert(buffer, nothing, 6)[0].reusable) == [(0, 4)]


def test_an_expired_group_evicts_no_other():
  # Two rows: 1 (step 4) is trained on for the last time, 2 (step 3) stays, and the
  # newcomer 3 takes the row of 1, not that of 2, though 2 is older.
  buffer = replay_buffer.init(2, G, T)
  buffer, _ = insert(buffer, making.groups([2], [4], [3]), 3)
  buffer, _ = insert(buffer, making.groups([1], [4], [4]), 4)
  assert live(buffer.reusable) == [(1, 4), (2, 3)]
  fresh, nothing = making.groups([3], [4], [5]), types.empty_groups(0, G, T)
  buffer, _ = replay_buffer.insert(
    buffer,
    fresh,
    nothing,
    types.concat(fresh, types.take(buffer.reusable, jnp.asarray([0]))),
    jnp.asarray([0, 2]),
    5,
    max_off_policy_steps=3,
    max_reuse=1,
  )
  assert live(buffer.reusable) == [(3, 5), (2, 3)]
  assert buffer.usage_count_P.tolist() == [0, 0]


def test_a_problem_fresh_and_reevaluated_in_one_step_is_filed_once():
  # Both verdicts are failures: two rows would be re-evaluated twice. The other
  # problem, by the current weights, succeeds: it is no longer hard.
  fresh, reevaluated = (making.groups([3, 4], k, [7] * 2) for k in ([0, 0], [0, 4]))
  buffer, _ = insert(replay_buffer.init(4, G, T), fresh, 7, reevaluated)
  assert live(buffer.hard) == [(3, 7)]
  assert live(buffer.reusable) == [(4, 7)]
  assert making.same_row(buffer.reusable, 0, reevaluated, 1)


def test_thresholds_count_responses_and_not_floats():
  # 1/49 of 49 responses is one, though the floats say 0.9999999999999999.
  tried = making.groups([0], [1], [0], G=49)
  narrow = fixed(1 / 49, 1 / 49, 1 / 49)
  buffer = replay_buffer.init(1, 49, T, narrow)
  buffer, _ = insert(buffer, tried, 0, thresholds=narrow)
  assert live(buffer.hard) == live(buffer.reusable) == [(0, 0)]


def hard_problems(steps):
  ids = [10 + i for i in range(len(steps))]
  return making.groups(ids, [0] * len(steps), steps, 1, 1)


def test_draw_gives_the_oldest_first_and_empty_rows_last():
  drawn = replay_buffer.draw(hard_problems([5, -1, 2, 9, 2]), 5)
  assert drawn.id_P.tolist() == [12, 14, 10, 13, -1]
  assert drawn.completed_step_P.tolist() == [2, 2, 5, 9, -1]
  drawn = replay_buffer.draw(hard_problems([5, -1, 2, 9, 2]), 2)
  assert drawn.id_P.tolist() == [12, 14]
  assert replay_buffer.draw(hard_problems([-1, -1]), 2).id_P.tolist() == [-1, -1]


def test_a_buffer_of_capacity_0_stores_nothing():
  buffer = replay_buffer.init(0, G, T)
  buffer, _ = insert(buffer, making.groups([1, 2], [0, 4], [0, 0]), 0)
  assert [len(s.id_P) for s in buffer[:2]] == [0, 0]
  assert replay_buffer.draw(buffer.hard, 0).id_P.shape == (0,)
