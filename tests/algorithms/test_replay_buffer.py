"""The buffer by hand: what is filed, expires, is drawn; histories: test_history.py."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import making
import pytest

from bapo_jax import types
from bapo_jax.algorithms import replay_buffer
from bapo_jax.algorithms.replay_buffer import FixedThresholds, MovingThresholds

G, T = 8, 3


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
