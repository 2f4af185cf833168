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

BATCHES = batch_rules.BatchRule.rules.at_defaults()

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


@pytest.mark.parametrize('seats', [1, 3, 4, 6, 12])
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


@pytest.mark.parametrize('rule_name', ['learnable_only', 'adapted'])
def test_a_group_without_an_advantage_takes_no_seat(rule_name):
  # All have both verdicts. 1: equal shaped rewards. 2: the only right answer is masked
  # out. 3: as 2, but a format bonus tells the wrong ones apart. 4: as it comes.
  made = sources([(i, 1, NOW) for i in range(1, 5)], [], [])
  fresh, nothing, _ = made
  masked_PG = jnp.zeros((4, G), bool).at[1:3, 0].set(True)
  fresh = fresh._replace(
    reward_PG=fresh.reward_PG.at[0].set(0.1).at[2, 5].add(0.1),
    response_mask_PGT=fresh.response_mask_PGT & ~masked_PG[:, :, None],
  )
  groups, source_P = BATCHES[rule_name](
    fresh, nothing, replay_buffer.init(2, G, 3), NOW, jax.random.key(0), 4
  )
  assert source_P.tolist() == [0, 0, -1, -1]
  assert groups.id_P[:2].tolist() == [3, 4]


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


# ---- the buffer by hand: what is filed, expires, is drawn; histories: test_history.py


T = 3


def insert(buffer, fresh, now, reevaluated=None, thresholds=FixedThresholds()):
  """(buffer, counts) after a step whose batch was the fresh groups."""
  _, G, T = fresh.tokens_PGT.shape
  reevaluated = reevaluated or types.empty_groups(0, G, T)
  source_P = jnp.zeros(len(fresh.id_P), jnp.int32)
  groups, limits = (fresh, reevaluated, fresh), {'max_off_policy_steps': 3}
  limits |= {'max_reuse': 9, 'thresholds': thresholds}
  return replay_buffer.insert(buffer, *groups, source_P, now, **limits)


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


def test_thresholds_count_responses_and_not_floats():
  # 1/49 of 49 responses is one, though the floats say 0.9999999999999999.
  tried = making.groups([0], [1], [0], G=49)
  narrow = FixedThresholds(hard=1 / 49, reusable=(1 / 49, 1 / 49))
  buffer = replay_buffer.init(1, 49, T, narrow)
  buffer, _ = insert(buffer, tried, 0, thresholds=narrow)
  assert live(buffer.hard) == live(buffer.reusable) == [(0, 0)]


def test_a_problem_that_stays_hard_does_not_displace_newer_ones():
  # 0 entered first and is tried again at step 3: in a queue it is still the next out.
  buffer = replay_buffer.init(3, G, T)
  for now, problem in enumerate((0, 1, 2, 0)):
    buffer, _ = insert(buffer, making.groups([problem], [0], [now]), now)
  assert sorted(live(buffer.hard)) == [(0, 3), (1, 1), (2, 2)]
  assert replay_buffer.draw(buffer.hard, 3).id_P.tolist() == [1, 2, 0]
  buffer, counts = insert(buffer, making.groups([9], [0], [4]), 4)
  assert live(buffer.hard) == [(9, 4), (2, 2), (1, 1)]
  assert counts['buffer/evicted'] == counts['buffer/entered'] == 1


@pytest.mark.parametrize('k', [2, 7])
@pytest.mark.parametrize('seated', [True, False])
def test_a_promoted_group_without_a_seat_waits_in_the_reusable_part(k, seated):
  # Reusable is 4 of 8: neither 2 nor 7. The group itself is what must not be lost.
  narrow = FixedThresholds(hard=1 / 8, reusable=(4 / 8, 4 / 8))
  buffer = replay_buffer.init(2, G, T, narrow)
  buffer, _ = insert(buffer, making.groups([5], [0], [0]), 0, thresholds=narrow)
  again = making.groups([5], [k], [1], seed=7)
  fresh = making.groups([5 if seated else 6, 7, 8], [3, 4, 4], [1, 1, 1])
  buffer, counts = insert(buffer, fresh, 1, again, thresholds=narrow)
  assert counts['buffer/promoted'] == 1
  if seated:  # its problem is trained on with its fresh group
    assert live(buffer.reusable) == [(7, 1), (8, 1)]
  else:  # and it goes before groups that were trained on
    assert live(buffer.reusable) == [(5, 1), (7, 1)]
    assert making.same_row(buffer.reusable, 0, again, 0)
    assert buffer.usage_count_P.tolist() == [-1, 0]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  G=st.integers(2, 4096),
  c1=st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([1 - 2**-53, 0.99999999, 0.9999])
  ),
  rate=st.floats(0, 1, width=32),
)
def test_a_solved_problem_is_never_hard_whatever_the_float(G, c1, rate):
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
