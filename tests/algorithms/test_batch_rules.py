"""Batch rules: who gets a seat, and in whose place."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import sharding, types
from bapo_jax.algorithms import batch_rules, replay_buffer

G, NOW = 8, 20


def sources(fresh, reevaluated, good):
  """Three Groups of [(id, right answers, policy_version)], each row stamped with its place."""
  made = []
  for i, rows in enumerate((fresh, reevaluated, good)):
    ids, right, policy_version = zip(*rows, strict=True) if rows else ((), (), ())
    made.append(making.groups(ids, right, policy_version, G, seed=i))
  return made


@functools.partial(jax.jit, static_argnames='seats')
def rule(fresh, reevaluated, good, now, key, band, seats):
  buffer = replay_buffer.init(len(good.id_P), G, 3)._replace(good=good, band=band)
  return batch_rules.adapted(fresh, reevaluated, buffer, now, key, seats)


def adapted(fresh, reevaluated, good, now, key, hard=1, seats=None):
  """The rule as it is called by the loop; c1 in whole answers, any group is good."""
  band = types.PassRateThresholds(*map(jnp.int32, (hard, 1, G - 1)))
  return rule(fresh, reevaluated, good, now, key, band, seats or len(fresh.id_P))


def kept(groups, source_P):
  """[(id, right answers, policy_version)] of the seats that teach."""
  right_P = groups.correct_PG.sum(1)
  rows = zip(groups.id_P, right_P, groups.completed_step_P, source_P, strict=True)
  return [(int(i), int(k), int(b)) for i, k, b, source in rows if source >= 0]


def test_fresh_only_is_the_identity():
  fresh, reevaluated, _ = sources(
    [(1, 0, NOW), (2, 4, NOW), (-1, 0, -1)], [(3, 4, NOW)], [(4, 4, NOW - 1)]
  )
  buffer = replay_buffer.init(1, G, 3)
  groups, source_P = batch_rules.fresh_only(
    fresh, reevaluated, buffer, NOW, jax.random.key(0), 3
  )
  assert groups is fresh
  assert source_P.tolist() == [0, 0, -1]  # born -1 is no group at all


# Right answers of fresh groups; problem 2 was asked twice, 7 is an empty row.
FRESH = [(1, 0, NOW), (2, 4, NOW), (2, 5, NOW), (3, 8, NOW)]
FRESH += [(4, 1, NOW), (7, 4, -1), (5, 7, NOW), (6, 3, NOW)]


@pytest.mark.parametrize('seats', [1, 3, 4, 6, 12])
def test_learnable_only_golden(seats):
  # 1 and 3 teach nothing; 2, 4, 5 and 6 stand in line, without a seat they are dropped.
  fresh, reevaluated, good = sources(FRESH, [(8, 4, NOW)], [(9, 4, NOW - 1)])
  buffer = replay_buffer.init(1, G, 3)._replace(good=good)
  groups, source_P = jax.jit(batch_rules.learnable_only, static_argnums=5)(
    fresh, reevaluated, buffer, NOW, jax.random.key(0), seats
  )
  line = [(2, 4, NOW), (4, 1, NOW), (5, 7, NOW), (6, 3, NOW)][:seats]
  assert len(groups.id_P) == len(source_P) == seats
  assert source_P.tolist() == [0] * len(line) + [-1] * (seats - len(line))
  assert kept(groups, source_P) == line
  for seat, row in enumerate(line):
    assert making.same_row(groups, seat, fresh, FRESH.index(row))


def test_seats_beyond_the_last_candidate_are_empty():
  # Both of two groups teach, and there are four seats: nobody sits twice.
  fresh, nobody, _ = sources([(1, 4, NOW), (2, 4, NOW)], [], [])
  groups, source_P = batch_rules.learnable_only(
    fresh, nobody, replay_buffer.init(1, G, 3), NOW, jax.random.key(0), 4
  )
  assert source_P.tolist() == [0, 0, -1, -1] and len(groups.id_P) == 4
  assert kept(groups, source_P) == [(1, 4, NOW), (2, 4, NOW)]


def replay(fresh, good, key, older):
  buffer = replay_buffer.init(len(good.id_P), G, 3)._replace(good=good)
  nobody = types.empty_groups(0, G, 3)
  seats = len(fresh.id_P) * (1 + older)
  return batch_rules.replay(fresh, nobody, buffer, NOW, key, seats, older=older)


@pytest.mark.parametrize('older', [1, 2])
@pytest.mark.parametrize('held', [0, 2, 9])
def test_replay_takes_all_that_is_fresh_and_as_many_older_ones(older, held):
  # Groups of one verdict, too: nothing is chosen. 5 is on the shelf since this very
  # step, 6 is an empty row. 1 is fresh and, older, on the shelf: both may come.
  rows = [(1, 0, NOW), (2, 8, NOW), (3, 4, NOW), (-1, 0, -1)]
  shelved = [(1, 3, NOW - 1), *((10 + i, i, NOW - 2) for i in range(8))][:held]
  fresh, _, good = sources(rows, [], [*shelved, (5, 4, NOW), (6, 4, -1)])
  groups, source_P = replay(fresh, good, jax.random.key(0), older)
  seats = batch_rules.seats('replay', len(rows), {'replay': {'older': older}})
  assert len(source_P) == len(groups.id_P) == seats == 4 * (1 + older)
  replayed = min(held, seats - 3)
  expected = [0] * 3 + [2] * replayed
  assert source_P.tolist() == expected + [-1] * (seats - len(expected))
  assert kept(groups, source_P)[:3] == rows[:3]
  found = kept(groups, source_P)[3:]
  assert set(found) <= set(shelved) and len(set(found)) == replayed
  for seat, row in enumerate(found, 3):
    assert making.same_row(groups, seat, good, shelved.index(row))


def test_replay_draws_evenly():
  # One seat for six old groups, the newest of them no likelier: 600 draws, 100 each.
  fresh, _, good = sources(
    [(1, 4, NOW)], [], [(i, i % 9, NOW - 1 - i % 3) for i in range(2, 8)]
  )
  keys = jax.random.split(jax.random.key(0), 600)
  groups, source_P = jax.vmap(lambda key: replay(fresh, good, key, 1))(keys)
  assert (source_P[:, 0] == 0).all() and (source_P[:, 1] == 2).all()
  counts = np.bincount(np.asarray(groups.id_P)[:, 1], minlength=8)[2:]
  assert counts.sum() == 600 and counts.min() > 60


def test_adapted_golden():
  # Fresh: 1 always fails, 2 and 3 teach, 4 and 5 are solved          -> 2, 3
  # Recheck: 6 solved, 7 at 1/8 still hard, 8 at 2/8 improved, 2 is in already -> 8
  # Good: 3 is in already, 10 is written this very step, 12 is an empty row -> 11
  fresh, reevaluated, good = sources(
    [(1, 0, NOW), (2, 3, NOW), (3, 7, NOW), (4, 8, NOW), (5, 8, NOW)],
    [(6, 8, NOW), (7, 1, NOW), (8, 2, NOW), (2, 4, NOW)],
    [(3, 4, 19), (10, 4, NOW), (11, 5, NOW - 3), (12, 4, -1)],
  )
  groups, source_P = adapted(fresh, reevaluated, good, NOW, jax.random.key(0))
  assert source_P.tolist() == [0, 0, 1, 2, -1]
  assert kept(groups, source_P) == [(2, 3, NOW), (3, 7, NOW), (8, 2, NOW), (11, 5, 17)]
  assert making.same_row(groups, 0, fresh, 1)
  assert making.same_row(groups, 2, reevaluated, 2)
  assert making.same_row(groups, 3, good, 2)


def rows(n, borns):
  """n rows of different problems; id -1 with born -1 is an empty seat."""
  return st.tuples(
    st.lists(st.integers(0, 11), min_size=n, max_size=n, unique=True),
    st.lists(st.integers(0, G), min_size=n, max_size=n),
    st.lists(st.sampled_from(borns), min_size=n, max_size=n),
  ).map(lambda columns: list(zip(*columns, strict=True)))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
  fresh=rows(5, [NOW, NOW, NOW, -1]),
  reevaluated=rows(4, [NOW, NOW, -1]),
  good=rows(6, [-1, *range(NOW - 5, NOW + 1)]),
  hard=st.sampled_from([1, 0, 4]),
  seed=st.integers(0, 3),
)
def test_adapted_is_definition_3_1(fresh, reevaluated, good, hard, seed):
  # The definition, row by row: what earns a seat, and earlier sources first.
  x1 = [(i, k, b) for i, k, b in fresh if b >= 0 and 0 < k < G]
  seen = {i for i, _, _ in x1}
  x2 = [(i, k, b) for i, k, b in recheck if b >= 0 and hard < k < G and i not in seen]
  seen |= {i for i, _, _ in x2}
  x3 = [
    (i, k, b)
    for i, k, b in good
    if b >= 0 and NOW - b >= 1 and 0 < k < G and i not in seen
  ]
  made = sources(fresh, reevaluated, good)
  key = jax.random.key(seed)
  groups, source_P = adapted(*made, NOW, key, hard)
  found = kept(groups, source_P)
  seats = len(fresh)
  assert len(source_P) == len(groups.id_P) == seats
  # Strict priority and maximal fill: the sure ones in order, then any of x3.
  sure = (x1 + x2)[:seats]
  assert found[: len(sure)] == sure
  assert len(found) == min(seats, len(sure) + len(x3))
  assert set(found[len(sure) :]) <= set(x3)
  assert len({i for i, _, _ in found}) == len(found)
  assert all(0 < k < G for _, k, _ in found)
  # Kept seats come first, each a row of its source to the last bit.
  assert (source_P[len(found) :] == -1).all()
  for seat, row in enumerate(found):
    source = 0 if seat < len(x1) else 1 if seat < len(sure) else 2
    assert source_P[seat] == source
    place = (fresh, reevaluated, good)[source].index(row)
    assert making.same_row(groups, seat, made[source], place)
  # And the same key makes the same batch.
  for a, b in zip(groups, adapted(*made, NOW, key, hard)[0], strict=True):
    np.testing.assert_array_equal(a, b)


def test_reused_groups_are_drawn_evenly():
  # One seat, four candidates: 400 draws give each 100, give or take 9.
  made = sources([(1, 0, NOW)], [], [(i, 4, NOW - 1) for i in (2, 3, 4, 5)])
  keys = jax.random.split(jax.random.key(0), 400)
  groups, source_P = jax.vmap(lambda key: adapted(*made, NOW, key))(keys)
  assert (source_P >= 0).all()
  counts = np.bincount(np.asarray(groups.id_P)[:, 0], minlength=6)[2:]
  assert counts.sum() == 400 and counts.min() > 60


def test_empty_sources_and_no_seat_earned():
  nothing = types.empty_groups(0, G, 3)
  fresh, _, good = sources([(1, 0, NOW), (2, 8, NOW)], [], [(3, 4, NOW - 1)])
  groups, source_P = adapted(fresh, nothing, nothing, NOW, jax.random.key(0))
  assert source_P.tolist() == [-1, -1] and groups.tokens_PGT.shape == (2, G, 3)
  # Without a fresh group that teaches, the other sources are still used.
  groups, source_P = adapted(fresh, nothing, good, NOW, jax.random.key(0))
  assert kept(groups, source_P) == [(3, 4, NOW - 1)]


def test_adapted_is_the_same_split_over_devices():
  made = sources(
    [(i, i % 9, NOW) for i in range(16)],
    [(i, i % 9, NOW) for i in range(8, 24)],
    [(i, i % 9, NOW - i % 5) for i in range(16, 40)],
  )
  split = jax.device_put(made, sharding.over_rows(sharding.make(data=4, fsdp=2)))
  expected, found = (adapted(*xs, NOW, jax.random.key(1)) for xs in (made, split))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(a, b)
