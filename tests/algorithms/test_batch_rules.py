"""Batch rules: the groups that get a seat, and their order."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import types
from bapo_jax.algorithms import batch_rules, replay_buffer
from bapo_jax.algorithms.replay_buffer import FixedThresholds, MovingThresholds

G, NOW = 8, 20


def sources(fresh, reevaluated, reusable):
  """Three Groups of [(id, correct responses, step)], no two rows alike."""
  made = []
  for i, rows in enumerate((fresh, reevaluated, reusable)):
    ids, num_correct, steps = zip(*rows, strict=True) if rows else ((), (), ())
    made.append(making.groups(ids, num_correct, steps, G, seed=i))
  return made


def holding(reusable, **fields):
  """A buffer with these reusable groups."""
  buffer = replay_buffer.init(len(reusable.id_P), G, 3)
  return buffer._replace(reusable=reusable, **fields)


@functools.partial(jax.jit, static_argnames='seats')
def rule(fresh, reevaluated, reusable, now, key, thresholds, seats):
  buffer = holding(reusable, thresholds=thresholds)
  return batch_rules.Adapted()(fresh, reevaluated, buffer, now, key, seats)


def adapted(fresh, reevaluated, reusable, now, key, hard=1, seats=None):
  """As the loop calls it; c1 in correct responses, any learnable group is reusable."""
  thresholds = types.PassRateThresholds(*map(jnp.int32, (hard, 1, G - 1)))
  seats = seats or len(fresh.id_P)
  return rule(fresh, reevaluated, reusable, now, key, thresholds, seats)


def seated(groups, source_P):
  """[(id, correct responses, step)] of the seats that are not empty."""
  k_P = groups.correct_PG.sum(1)
  rows = zip(groups.id_P, k_P, groups.completed_step_P, source_P, strict=True)
  return [(int(i), int(k), int(step)) for i, k, step, source in rows if source >= 0]


def test_fresh_only_is_the_identity():
  fresh, reevaluated, _ = sources(
    [(1, 0, NOW), (2, 4, NOW), (-1, 0, -1)], [(3, 4, NOW)], [(4, 4, NOW - 1)]
  )
  buffer = replay_buffer.init(1, G, 3)
  groups, source_P = batch_rules.FreshOnly()(
    fresh, reevaluated, buffer, NOW, jax.random.key(0), 3
  )
  assert groups is fresh
  assert source_P.tolist() == [0, 0, -1]  # a row of step -1 is empty


# Correct responses of fresh groups; problem 2 comes twice, 7 is an empty row.
FRESH = [(1, 0, NOW), (2, 4, NOW), (2, 5, NOW), (3, 8, NOW)]
FRESH += [(4, 1, NOW), (7, 4, -1), (5, 7, NOW), (6, 3, NOW)]


@pytest.mark.parametrize('seats', [1, 4, 12])
def test_learnable_only_golden(seats):
  # 1 and 3 teach nothing; 2, 4, 5 and 6 are seated in order, or dropped without a seat.
  fresh, reevaluated, reusable = sources(FRESH, [(8, 4, NOW)], [(9, 4, NOW - 1)])
  buffer = holding(reusable)
  groups, source_P = jax.jit(batch_rules.LearnableOnly(), static_argnums=5)(
    fresh, reevaluated, buffer, NOW, jax.random.key(0), seats
  )
  learnable = [(2, 4, NOW), (4, 1, NOW), (5, 7, NOW), (6, 3, NOW)][:seats]
  assert len(groups.id_P) == len(source_P) == seats
  assert source_P.tolist() == [0] * len(learnable) + [-1] * (seats - len(learnable))
  assert seated(groups, source_P) == learnable
  for seat, row in enumerate(learnable):
    assert making.same_row(groups, seat, fresh, FRESH.index(row))


def replay(fresh, reusable, key, ratio):
  no_groups = types.empty_groups(0, G, 3)
  rule = batch_rules.Replay(replay_ratio=ratio)
  seats = rule.seats(len(fresh.id_P))
  return rule(fresh, no_groups, holding(reusable), NOW, key, seats)


@pytest.mark.parametrize('ratio', [1, 2])
@pytest.mark.parametrize('stored', [0, 2, 9])
def test_replay_takes_all_fresh_groups_and_as_many_older_ones(ratio, stored):
  # Groups of one verdict, too: any group may come. 5 is in the buffer since this very
  # step, 6 is an empty row. 1 is fresh and, older, in the buffer: both may come.
  rows = [(1, 0, NOW), (2, 8, NOW), (3, 4, NOW), (-1, 0, -1)]
  older = [(1, 3, NOW - 1), *((10 + i, i, NOW - 2) for i in range(8))][:stored]
  fresh, _, reusable = sources(rows, [], [*older, (5, 4, NOW), (6, 4, -1)])
  groups, source_P = replay(fresh, reusable, jax.random.key(0), ratio)
  seats = 4 * (1 + ratio)
  assert len(source_P) == len(groups.id_P) == seats
  replayed = min(stored, seats - 3)
  expected = [0] * 3 + [2] * replayed
  assert source_P.tolist() == expected + [-1] * (seats - len(expected))
  assert seated(groups, source_P)[:3] == rows[:3]
  found = seated(groups, source_P)[3:]
  assert set(found) <= set(older) and len(set(found)) == replayed
  for seat, row in enumerate(found, 3):
    assert making.same_row(groups, seat, reusable, older.index(row))


def test_adapted_golden():
  # Fresh: 1 always fails, 2 and 3 teach, 4 and 5 are solved          -> 2, 3
  # Re-evaluated: 6 solved, 7 at 1/8 still hard, 8 at 2/8 improved, 2 is in already -> 8
  # Reusable: 3 is in already, 10 is of this very step, 12 is an empty row -> 11
  fresh, reevaluated, reusable = sources(
    [(1, 0, NOW), (2, 3, NOW), (3, 7, NOW), (4, 8, NOW), (5, 8, NOW)],
    [(6, 8, NOW), (7, 1, NOW), (8, 2, NOW), (2, 4, NOW)],
    [(3, 4, 19), (10, 4, NOW), (11, 5, NOW - 3), (12, 4, -1)],
  )
  groups, source_P = adapted(fresh, reevaluated, reusable, NOW, jax.random.key(0))
  assert source_P.tolist() == [0, 0, 1, 2, -1]
  assert seated(groups, source_P) == [
    (2, 3, NOW),
    (3, 7, NOW),
    (8, 2, NOW),
    (11, 5, 17),
  ]
  assert making.same_row(groups, 0, fresh, 1)
  assert making.same_row(groups, 2, reevaluated, 2)
  assert making.same_row(groups, 3, reusable, 2)


def test_reused_groups_are_drawn_evenly():
  # One seat, four candidates: 400 draws give each 100, give or take 9.
  made = sources([(1, 0, NOW)], [], [(i, 4, NOW - 1) for i in (2, 3, 4, 5)])
  keys = jax.random.split(jax.random.key(0), 400)
  groups, source_P = jax.vmap(lambda key: adapted(*made, NOW, key))(keys)
  assert (source_P >= 0).all()
  counts = np.bincount(np.asarray(groups.id_P)[:, 0], minlength=6)[2:]
  assert counts.sum() == 400 and counts.min() > 60


# ---------------- thresholds of the buffer; what it keeps and draws: test_history.py


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  G=st.integers(2, 4096),
  c1=st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([1 - 2**-53, 0.99999999, 0.9999])
  ),
  rate=st.floats(0, 1, width=32),
)
def test_a_solved_problem_is_never_hard_whatever_the_float(G, c1, rate):
  # A share of whole responses, though 1 / 49 of 49 is 0.9999999999999999 in floats.
  k = 1 + int(c1 * (G - 1))
  exact = FixedThresholds(hard=k / G, reusable=(k / G, k / G))(jnp.float32(rate), G)
  assert list(exact) == [min(k, G - 1), k, k]
  for rule in (FixedThresholds, MovingThresholds):
    hard_max = int(rule(hard=c1)(jnp.float32(rate), G).hard_max)
    # Within one response of the fraction, and never all G.
    assert hard_max <= G - 1
    assert c1 * G - 1.01 <= hard_max <= c1 * G + 0.01


def test_eq_8_moves_the_band_and_not_what_is_hard():
  # The paper's code: c = high - (high - low) * rate falls; its printed formula rises.
  falling = [MovingThresholds()(jnp.float32(r), 8) for r in (0, 0.5, 1)]
  assert [tuple(map(int, t)) for t in falling] == [(1, 3, 7), (1, 2, 6), (1, 1, 5)]
  ends = {'low': (1 / 8, 3 / 8), 'high': (5 / 8, 7 / 8)}
  rising = [MovingThresholds(**ends)(jnp.float32(r), 8) for r in (0, 0.5, 1)]
  assert [tuple(map(int, t)) for t in rising] == [(1, 1, 5), (1, 2, 6), (1, 3, 7)]
