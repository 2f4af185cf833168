"""The batch rule and the buffer over whole histories, against Python lists.

`PROPERTIES` must hold after every step of every history.
"""

import collections
import io

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from histories import (
  FRESH,
  REEVALUATED,
  REUSED,
  SCENES,
  P,
  Pool,
  T,
  adapted,
  entries,
  insert,
  play,
)
from history_properties import PROPERTIES

from bapo_jax import sharding, types
from bapo_jax.algorithms import replay_buffer


def same(a, b) -> bool:
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(x, y) for x, y in leaves)


pools = st.builds(
  Pool,
  st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]), min_size=1, max_size=16).map(
    tuple
  ),
  st.sampled_from([0.0, 0.1, 0.4]),
  st.integers(0, 2**20),
  st.integers(1, 10),
)
MANY = Pool((0.0, 0.05, 0.05, 0.2, 0.2, 0.5, 0.5, 0.8, 1.0) * 2, 0.3, 7, 10)


@pytest.mark.parametrize('scene', SCENES)
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(pool=pools)
@hypothesis.example(pool=MANY)
def test_every_property_holds_over_random_histories(scene, pool):
  scene = SCENES[scene]
  history = play(scene, pool)
  for holds in PROPERTIES:
    holds(scene, history)


def test_the_histories_are_worth_it():
  # Every source, every way out of the buffer and every kind of move is in one of them.
  seen = collections.Counter()
  for scene in SCENES.values():
    for step in play(scene, MANY):
      seen.update({name: int(n) for name, n in step.counts.items()})
      seen.update(('seats', int(s)) for s in step.source_P)
      first = len(step.tiers[0])
      seen['X1 full'] += first >= scene.P
      seated = set(step.groups.id_P[step.seats()].tolist())
      waiting = [t for t in step.tiers[1] if t.problem not in seated]
      seen['promoted without a seat'] += len(waiting)
      hard = step.before.hard.completed_step_P
      seen['hard again'] += len(
        set(step.after.hard.id_P[step.after.hard.completed_step_P == step.now].tolist())
        & set(step.before.hard.id_P[hard >= 0].tolist())
      )
      seen['without advantage'] += sum(
        0 < t.k < scene.G and not t.teaches for t in entries(step.fresh)
      )
      seen['no X1, others'] += first == 0 and len(step.seats()) > 0
      seen['X3 drawn from more'] += 0 < len(step.seats(REUSED)) < len(step.tiers[2])
      before, after = tuple(step.before.thresholds), tuple(step.after.thresholds)
      seen['thresholds moved'] += before != after
  for name in ('entered', 'graduated', 'promoted', 'progressed', 'evicted'):
    assert seen[f'buffer/{name}'], name
  for name in [('seats', s) for s in (-1, 0, 1, 2)]:
    assert seen[name] >= 10, name
  moves = ('promoted without a seat', 'hard again', 'without advantage')
  for name in ('no X1, others', 'X3 drawn from more', 'thresholds moved', *moves):
    assert seen[name], name


def reloaded(buffer):
  """Through bytes, as numpy writes them."""
  file = io.BytesIO()
  leaves, treedef = jax.tree.flatten(buffer)
  np.savez(file, *map(np.asarray, leaves))
  file.seek(0)
  with np.load(file) as found:
    return treedef.unflatten(jnp.asarray(found[f'arr_{i}']) for i in range(len(leaves)))


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(pool=pools, at=st.integers(0, 9))
@hypothesis.example(pool=MANY, at=5)
def test_same_seed_same_history_also_through_save_and_load(pool, at):
  scene = SCENES['published']
  history = play(scene, pool)
  other = play(
    scene, pool, between=lambda now, buffer: reloaded(buffer) if now == at else buffer
  )
  for a, b in zip(history, other, strict=True):
    assert same((a.groups, a.source_P, a.after), (b.groups, b.source_P, b.after)), at


def test_without_room_and_lag_the_batch_is_filtered_grpo():
  scene = SCENES['roomless']
  assert scene.v == 1
  for step in play(scene, MANY):
    taught = [t for t in entries(step.fresh) if 0 < t.k < scene.G and t.teaches]
    first = {t.problem: t for t in reversed(taught)}
    taught = [t for t in taught if first[t.problem] is t]
    assert step.source_P.tolist() == [FRESH] * len(taught) + [-1] * (P - len(taught))
    for seat, t in enumerate(taught):
      assert making.same_row(step.groups, seat, *t.row)


def test_a_step_whose_fresh_groups_teach_nothing_uses_the_others():
  # Step 0 files 0 and 1 as hard, 1 and 2 as reusable; at step 1 nothing fresh teaches.
  scene, key = SCENES['published'], jax.random.key(0)
  knobs = {'thresholds': scene.ours(), 'max_off_policy_steps': 3, 'max_reuse': 3}
  nothing = types.empty_groups(0, 8, T)
  first = making.groups([0, 1, 2, -1] * 2, [0, 1, 4, 0] * 2, [0, 0, 0, -1] * 2, 8, T)
  buffer = replay_buffer.init(5, 8, T, scene.ours())
  groups, source_P = adapted(first, nothing, buffer, 0, key, P)
  buffer, _ = insert(buffer, first, nothing, groups, source_P, 0, **knobs)
  fresh = making.groups(range(3, 11), [0, 8] * 4, [1] * P, 8, T)
  reevaluated = making.groups(
    replay_buffer.draw(buffer.hard, 2).id_P, [3, 8], [1, 1], 8, T
  )
  groups, source_P = adapted(fresh, reevaluated, buffer, 1, key, P)
  # Re-evaluated, 0 improves and 1 is solved; the group of 1 from step 0 is reusable.
  assert source_P.tolist() == [REEVALUATED, REUSED, REUSED] + [-1] * 5
  assert groups.id_P[0] == 0 and set(groups.id_P[1:3].tolist()) == {1, 2}


def test_on_eight_devices_it_is_the_same_history():
  # Fresh groups arrive split over the devices, the buffer lies on all of them.
  scene, pool = SCENES['up'], MANY._replace(steps=5)
  devices = sharding.make(data=4, fsdp=2)
  split = play(
    scene,
    pool,
    place=lambda groups: jax.device_put(groups, sharding.over_rows(devices)),
    between=lambda now, buffer: jax.device_put(buffer, sharding.replicated(devices)),
  )
  assert_equal(play(scene, pool), split)


def assert_equal(history, other):
  assert any((step.source_P == REUSED).any() for step in history)
  for a, b in zip(history, other, strict=True):
    assert same((a.groups, a.source_P, a.after), (b.groups, b.source_P, b.after))
    assert same(a.counts, b.counts)
