"""Shelves by hand: what is filed, what leaves, drawing; histories: test_history.py."""

import functools

import jax.numpy as jnp
import making
import pytest

from bapo_jax import types
from bapo_jax.algorithms import replay_buffer

G, T = 8, 3


def shelve(buffer, fresh, now, reevaluated=None, band=replay_buffer.fixed, max_reuse=9):
  """(buffer, counts) after a step whose batch was the fresh groups."""
  length, group = fresh.tokens_PGT.shape[2], fresh.correct_PG.shape[1]
  reevaluated = types.empty_groups(0, group, length) if recheck is None else recheck
  source_P = jnp.zeros(len(fresh.id_P), jnp.int32)
  return replay_buffer.insert(
    buffer,
    fresh,
    reevaluated,
    fresh,
    source_P,
    now,
    band=band,
    max_age=3,
    max_reuse=max_reuse,
  )


@functools.cache
def band(c1, c2, c3):
  return functools.partial(replay_buffer.fixed, hard=c1, good=(c2, c3))


def live(shelf):
  """[(id, policy_version)] of the rows that are not empty."""
  return [
    (int(i), int(b))
    for i, b in zip(shelf.id_P, shelf.completed_step_P, strict=True)
    if b >= 0
  ]


def test_shelve_golden():
  # Step 3 tried problem 0 with 0/8, 1 with 1/8, 2 with 2/8, 5 with 5/8, 6 with 6/8:
  # c1 = 1/8 files 0 and 1 as hard, the band 1/8..5/8 files 1, 2 and 5 as good.
  tried = making.groups([0, 1, 2, 5, 6], [0, 1, 2, 5, 6], [3] * 5)
  buffer, _ = shelve(replay_buffer.init(4, G, T), tried, 3)
  assert live(buffer.hard) == [(0, 3), (1, 3)]
  assert live(buffer.reusable) == [(1, 3), (2, 3), (5, 3)]
  # Step 4: 0 improves to 3/8 and leaves `hard`; 1 fails again and is now the newest.
  tried = making.groups([0, 1], [3, 0], [4, 4])
  buffer, _ = shelve(buffer, tried, 4)
  assert live(buffer.hard) == [(1, 4)]
  # Four places on `good`: the newcomer 0 takes the last one, nobody leaves.
  assert live(buffer.reusable) == [(0, 4), (1, 3), (2, 3), (5, 3)]
  # Step 6 reuses ages up to 3, that is born 3 or later; after it, born 3 is too old.
  nobody = types.empty_groups(2, G, T)
  assert len(live(shelve(buffer, nobody, 5)[0].good)) == 4
  assert live(shelve(buffer, nobody, 6)[0].good) == [(0, 4)]


def test_what_is_worn_out_or_too_old_crowds_nobody_out():
  # Two places: 1 (step 4) is learned from for the last time, 2 (step 3) stays, and the
  # newcomer 3 takes the place of 1, not that of 2, though 2 is older.
  buffer = replay_buffer.init(2, G, T)
  buffer, _ = shelve(buffer, making.groups([2], [4], [3]), 3)
  buffer, _ = shelve(buffer, making.groups([1], [4], [4]), 4)
  assert live(buffer.reusable) == [(1, 4), (2, 3)]
  fresh, nobody = making.groups([3], [4], [5]), types.empty_groups(0, G, T)
  buffer, _ = replay_buffer.insert(
    buffer,
    fresh,
    nobody,
    types.concat(fresh, types.take(buffer.reusable, jnp.asarray([0]))),
    jnp.asarray([0, 2]),
    5,
    max_age=3,
    max_reuse=1,
  )
  assert live(buffer.reusable) == [(3, 5), (2, 3)]
  assert buffer.usage_count_P.tolist() == [0, 0]


def test_a_problem_asked_afresh_and_again_in_one_step_is_filed_once():
  # Both verdicts are failures: two rows would be reevaluated twice. The other problem's
  # reevaluated, by the current weights, succeeded: it is no longer hard.
  fresh, reevaluated = (making.groups([3, 4], k, [7] * 2) for k in ([0, 0], [0, 4]))
  buffer, _ = shelve(replay_buffer.init(4, G, T), fresh, 7, reevaluated)
  assert live(buffer.hard) == [(3, 7)]
  assert live(buffer.reusable) == [(4, 7)]
  assert making.same_row(buffer.reusable, 0, reevaluated, 1)


def test_thresholds_count_answers_and_not_floats():
  # 1/49 of 49 answers is one answer, though the floats say 0.9999999999999999.
  tried = making.groups([0], [1], [0], G=49)
  narrow = band(1 / 49, 1 / 49, 1 / 49)
  buffer, _ = shelve(replay_buffer.init(1, 49, T, narrow), tried, 0, band=narrow)
  assert live(buffer.hard) == live(buffer.reusable) == [(0, 0)]


def shelf(policy_version):
  ids = [10 + i for i in range(len(policy_version))]
  return making.groups(ids, [0] * len(policy_version), policy_version, 1, 1)


def test_draw_gives_the_oldest_first_and_empties_last():
  drawn = replay_buffer.draw(shelf([5, -1, 2, 9, 2]), 5)
  assert drawn.id_P.tolist() == [12, 14, 10, 13, -1]
  assert drawn.completed_step_P.tolist() == [2, 2, 5, 9, -1]
  assert replay_buffer.draw(shelf([5, -1, 2, 9, 2]), 2).id_P.tolist() == [12, 14]
  assert replay_buffer.draw(shelf([-1, -1]), 2).id_P.tolist() == [-1, -1]


def test_draw_of_more_than_there_is_names_both_numbers():
  message = r'buffer\.reevaluated=3 is more than buffer\.capacity=2'
  with pytest.raises(ValueError, match=message):
    replay_buffer.draw(shelf([1, 2]), 3)


def test_capacity_nought_is_a_buffer_that_keeps_nothing():
  buffer = replay_buffer.init(0, G, T)
  buffer, _ = shelve(buffer, making.groups([1, 2], [0, 4], [0, 0]), 0)
  assert [len(s.id_P) for s in buffer[:2]] == [0, 0]
  assert replay_buffer.draw(buffer.hard, 0).id_P.shape == (0,)
