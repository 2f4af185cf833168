"""The batch rule and the buffer over whole histories, against Python lists.

A history is the cycle of train_loop without a model: a pool of problems, solved better
or worse as time goes on, is sampled, re-evaluated, seated and filed, step after step;
`oracles.py` does the same with lists. `PROPERTIES` must hold after every step:

- the batch has its seats; groups are whole, as their source has them
- problems and groups are unique in a batch
- only groups of both verdicts teach
- re-evaluated groups were hard, and are of this step and its weights
- reused groups are those stored, and those sampled
- reused groups are reusable, 1 to max_off_policy_steps steps old, reused max_reuse
  times at most
- no token is older than max_off_policy_steps + v - 1 steps
- a source is used when every candidate of those before it is in
- no seat is empty that a candidate could have
- the batch is one that the lists allow
- the buffer equals the lists, within its capacity
- the thresholds equal the fractions
- the counts equal those of the lists, and no problem is lost: in = out + resident

Beside these: the same seed gives the same history, a buffer saved and loaded at any
step changes nothing, without room only filtered GRPO is left, and a step whose fresh
groups teach nothing still learns from the others.
"""

import collections
import functools
import io
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest

from bapo_jax import sharding, types
from bapo_jax.algorithms import batch_rules, replay_buffer
from bapo_jax.training import checkpoint

P, T = 8, 2
FRESH, REEVALUATED, REUSED = range(3)


class Scene(NamedTuple):
  """Knobs of a history; shares are Fractions."""

  rule: str  # of the thresholds
  shares: dict = {}  # noqa: RUF012
  G: int = 8
  capacity: int = 5
  max_off_policy_steps: int = 3
  max_reuse: int = 3
  v: int = 1  # weight_sync_interval
  m: int = 1  # reeval_interval
  reevaluate: int = 3

  def ours(self):
    """The threshold rule as a run has it."""
    return threshold_rule(self.rule, tuple(self.shares.items()))

  def lists(self):
    """The threshold rule as the oracle has it."""
    return lambda rate: oracles.thresholds(self.G, rate, self.rule, **self.shares)


@functools.cache
def threshold_rule(rule, shares):
  floats = jax.tree.map(float, dict(shares))
  if rule == 'fixed':
    floats = {'hard': floats['hard'], 'reusable': (floats['low'], floats['high'])}
  return functools.partial(replay_buffer.THRESHOLD_RULES[rule], **floats)


def eighths(*numbers):
  """Shares c1, c2, c3 in eighths; pairs run from one to the other."""
  names = ('hard', 'low', 'high')
  return dict(zip(names, jax.tree.map(lambda n: Fraction(n, 8), numbers), strict=True))


SCENES = {
  'published': Scene('fixed', eighths(1, 1, 5), v=2, m=2),
  'between': Scene(  # no number of eight answers is one of these shares
    'fixed',
    {'hard': Fraction(3, 10), 'low': Fraction(1, 3), 'high': Fraction(7, 10)},
    max_off_policy_steps=2,
    max_reuse=1,
  ),
  'up': Scene('moving', eighths((1, 3), (1, 3), (5, 7)), v=3),
  'down': Scene(
    'moving', eighths((6, 0), (4, 1), (7, 4)), capacity=12, max_reuse=2, m=2
  ),
  'threshold free': Scene('threshold_free', max_reuse=1, v=2),
  'everything': Scene('everything', max_off_policy_steps=4, max_reuse=2),
  'overlapping': Scene('fixed', eighths(5, 2, 7), capacity=1, reevaluate=1),
  'roomless': Scene('fixed', eighths(1, 1, 5), capacity=0, reevaluate=0),
}


class Step(NamedTuple):
  """All inputs and outputs of one step, on the host."""

  now: int
  fresh: types.Groups
  reevaluated: types.Groups
  groups: types.Groups
  source_P: np.ndarray
  before: types.ReplayBuffer
  after: types.ReplayBuffer
  counts: dict
  tiers: list  # the oracle's X1, X2, X3
  lists: oracles.Lists  # after the step
  expected: dict  # the oracle's counts

  def seats(self, source=None):
    """The seats of the batch that teach, or those of one source."""
    taken_P = self.source_P >= 0 if source is None else self.source_P == source
    return np.flatnonzero(taken_P)


class Pool(NamedTuple):
  """Problems and the policy's pass rate on each."""

  ability_N: tuple
  drift: float
  seed: int
  steps: int


# Whole numbers, whatever the compiler does with them: it need not take its time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
adapted = jit(batch_rules.adapted, static_argnums=5)
draw = jit(replay_buffer.draw, static_argnums=1)
STATIC = ('thresholds', 'max_off_policy_steps', 'max_reuse')
insert = jit(replay_buffer.insert, static_argnames=STATIC)


def sampled(scene, rng, ability_N, ids, now, policy_version):
  """Groups of these problems at step `now`; -1 is an empty row."""
  ids = np.asarray(ids, np.int32)
  k = rng.binomial(scene.G, ability_N[ids]) * (ids >= 0)
  steps = np.where(ids < 0, -1, now)
  groups = making.groups(ids, k, steps, scene.G, T, seed=rng.integers(2**31))
  response_mask_PGT = np.asarray(groups.response_mask_PGT) & (ids >= 0)[:, None, None]
  policy_version_PGT = np.where(
    response_mask_PGT, np.int32(policy_version), np.int32(-1)
  )
  return groups._replace(
    response_mask_PGT=response_mask_PGT, policy_version_PGT=policy_version_PGT
  )


def entries(groups):
  """The groups that are not empty, as the oracle has them."""
  columns = groups.id_P, groups.correct_PG.sum(1), groups.completed_step_P
  rows = zip(*(column.tolist() for column in columns), strict=True)
  return [
    oracles.Attempt(*row, (groups, p)) for p, row in enumerate(rows) if row[2] >= 0
  ]


def play(
  scene,
  pool,
  place=lambda groups: groups,
  between=lambda now, buffer: buffer,
  rules=(adapted, insert),
):
  """[Step] of a history.

  Args:
    place: of the fresh groups, before the rule sees them.
    between: (step, buffer) -> buffer, done to them before each step.
    rules: batch_rules.adapted and replay_buffer.insert, compiled or not.
  """
  rng = np.random.default_rng(pool.seed)
  ability_N = np.asarray(pool.ability_N, float)
  buffer = replay_buffer.init(scene.capacity, scene.G, T, scene.ours())
  lists = oracles.empty_lists(scene.G, scene.lists())
  knobs = {
    'max_off_policy_steps': scene.max_off_policy_steps,
    'max_reuse': scene.max_reuse,
  }
  history = []
  for now in range(pool.steps):
    buffer = between(now, buffer)
    due = scene.reevaluate if now % scene.m == 0 else 0
    drawn = [int(i) for i in draw(buffer.hard, due).id_P]
    expected = oracles.draw(lists, due)
    assert drawn == expected + [-1] * (due - len(expected)), 'tried longest ago first'
    actor = now - now % scene.v
    reevaluated = sampled(scene, rng, ability_N, drawn, now, now)
    fresh = sampled(scene, rng, ability_N, some(rng, len(ability_N)), now, actor)
    ability_N = np.clip(ability_N + pool.drift * rng.normal(size=len(ability_N)), 0, 1)

    key = jax.random.fold_in(jax.random.key(pool.seed), now)
    placed = place(fresh)
    groups, source_P = rules[0](placed, reevaluated, buffer, now, key, P)
    after, counts = rules[1](
      buffer,
      placed,
      reevaluated,
      groups,
      source_P,
      now,
      thresholds=scene.ours(),
      **knobs,
    )
    host = jax.device_get((fresh, reevaluated, groups, source_P, buffer, after, counts))
    tried = [entries(groups) for groups in host[:2]]
    tiers = oracles.fill(*tried, lists, now, scene.G, **knobs)
    reused = {int(i) for i in host[2].id_P[host[3] == REUSED]}
    lists, expected = oracles.insert(
      lists,
      *tried,
      reused,
      now,
      rule=scene.lists(),
      G=scene.G,
      capacity=scene.capacity,
      **knobs,
    )
    history.append(Step(now, *host, tiers, lists, expected))
    buffer = after
  return history


def some(rng, problems):
  """Prompts of a step: most rows are filled, now and then one problem comes twice."""
  ids = np.full(P, -1)
  many = min(P, problems, rng.integers(0, 2 * P))
  ids[:many] = rng.permutation(problems)[:many]
  if many > 2 and rng.random() < 0.3:
    ids[1] = ids[0]
  return rng.permutation(ids)


def same(a: Any, b: Any) -> bool:
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(x, y) for x, y in leaves)


# --- the properties ------------------------------------------------------------------


def groups_are_whole(scene, history):
  for step in history:
    types.agree(**step.groups._asdict(), source_P=step.source_P)
    assert step.groups.tokens_PGT.shape == (P, scene.G, T)
    found = (step.fresh, step.reevaluated, step.before.reusable)
    for seat in step.seats():
      rows = found[step.source_P[seat]]
      assert any(
        making.same_row(step.groups, seat, rows, row) for row in range(len(rows.id_P))
      )


def problems_and_groups_are_unique(scene, history):
  for step in history:
    ids = step.groups.id_P[step.seats()].tolist()
    assert len(set(ids)) == len(ids)
    payloads = [step.groups.behavior_logp_PGT[seat].tobytes() for seat in step.seats()]
    assert len(set(payloads)) == len(payloads)


def only_groups_of_both_verdicts_teach(scene, history):
  for step in history:
    k = step.groups.correct_PG[step.seats()].sum(1)
    assert ((k > 0) & (k < scene.G)).all()


def reevaluated_groups_were_hard_and_are_of_this_step(scene, history):
  for step in history:
    hard = set(step.before.hard.id_P[step.before.hard.completed_step_P >= 0].tolist())
    hard_k, _ = history[step.now - 1].lists.thresholds if step.now else (set(), 0)
    for seat in step.seats(REEVALUATED):
      assert int(step.groups.id_P[seat]) in hard
      assert int(step.groups.correct_PG[seat].sum()) not in hard_k
      mask_GT = step.groups.response_mask_PGT[seat]
      assert (step.groups.policy_version_PGT[seat][mask_GT] == step.now).all()
      assert step.groups.completed_step_P[seat] == step.now


def reused_groups_are_those_stored_and_sampled(scene, history):
  for step in history:
    for seat in step.seats(REUSED):
      i, completed = step.groups.id_P[seat], step.groups.completed_step_P[seat]
      reusable = step.before.reusable
      (stored,) = np.flatnonzero(
        (reusable.id_P == i) & (reusable.completed_step_P == completed)
      )
      assert making.same_row(step.groups, seat, reusable, stored)
      then = history[completed]
      assert any(
        making.same_row(step.groups, seat, rows, row)
        for rows in (then.fresh, then.reevaluated)
        for row in np.flatnonzero(rows.id_P == i)
      )


def reused_groups_are_reusable_and_neither_old_nor_used_up(scene, history):
  used = collections.Counter()
  for step in history:
    for seat in step.seats(REUSED):
      _, reusable_k = history[step.now - 1].lists.thresholds
      i = int(step.groups.id_P[seat])
      completed = int(step.groups.completed_step_P[seat])
      assert int(step.groups.correct_PG[seat].sum()) in reusable_k
      assert 1 <= step.now - completed <= scene.max_off_policy_steps
      used[i, completed] += 1
      assert used[i, completed] <= scene.max_reuse


def no_token_is_older_than_its_group_and_the_actors_lag(scene, history):
  for step in history:
    teach_PGT = step.groups.response_mask_PGT & (step.source_P >= 0)[:, None, None]
    lag_n = step.now - step.groups.policy_version_PGT[teach_PGT]
    assert (lag_n >= 0).all()
    assert (lag_n <= scene.max_off_policy_steps + scene.v - 1).all()


def a_source_waits_until_those_before_it_are_in(scene, history):
  for step in history:
    ids = {s: set(step.groups.id_P[step.seats(s)].tolist()) for s in range(3)}
    for source in (REEVALUATED, REUSED):
      if ids[source]:
        for before in range(source):
          assert {t.problem for t in step.tiers[before]} == ids[before]


def no_seat_is_empty_that_could_be_filled(scene, history):
  for step in history:
    assert len(step.seats()) == min(P, sum(map(len, step.tiers)))


def the_batch_is_allowed(scene, history):
  for step in history:
    source_P = step.source_P[step.seats()]
    assert (np.diff(source_P) >= 0).all() and (
      step.source_P[len(source_P) :] == -1
    ).all()
    sure = [(FRESH, t) for t in step.tiers[0]]
    sure += [(REEVALUATED, t) for t in step.tiers[1]]
    for seat, (source, t) in zip(step.seats(), sure, strict=False):
      assert step.source_P[seat] == source
      assert making.same_row(step.groups, seat, *t.row)
    drawn = [int(i) for i in step.groups.id_P[step.seats(REUSED)]]
    assert set(drawn) <= {t.problem for t in step.tiers[2]}


def the_buffer_equals_the_lists(scene, history):
  for step in history:
    hard, reusable = step.after.hard, step.after.reusable
    assert hard.id_P.shape == reusable.id_P.shape == (scene.capacity,)
    live = np.flatnonzero(hard.completed_step_P >= 0)
    stored = [(int(hard.id_P[row]), int(hard.completed_step_P[row])) for row in live]
    assert stored == step.lists.hard and len(stored) <= scene.capacity
    rows = np.flatnonzero(reusable.completed_step_P >= 0)
    used = [int(step.after.usage_count_P[row]) for row in rows]
    assert used == [used for _, used in step.lists.reusable]
    for row, (t, _) in zip(rows, step.lists.reusable, strict=True):
      assert making.same_row(reusable, row, *t.row)


def the_thresholds_equal_the_fractions(scene, history):
  for step in history:
    hard_k, reusable_k = step.lists.thresholds
    hard, first, last = map(int, step.after.thresholds)
    assert hard_k == set(range(hard + 1))
    assert reusable_k == set(range(first, last + 1))
    assert step.after.num_correct == step.lists.num_correct
    assert step.after.num_responses == step.lists.num_responses


def the_counts_equal_the_lists_and_no_problem_is_lost(scene, history):
  total = collections.Counter()
  for step in history:
    for name in ('entered', 'graduated', 'promoted', 'progressed', 'evicted'):
      assert step.counts[f'buffer/{name}'] == step.expected[name], name
      total[name] += int(step.counts[f'buffer/{name}'])
    left = sum(n for name, n in total.items() if name != 'entered')
    assert total['entered'] == left + (step.after.hard.completed_step_P >= 0).sum()


PROPERTIES = (
  groups_are_whole,
  problems_and_groups_are_unique,
  only_groups_of_both_verdicts_teach,
  reevaluated_groups_were_hard_and_are_of_this_step,
  reused_groups_are_those_stored_and_sampled,
  reused_groups_are_reusable_and_neither_old_nor_used_up,
  no_token_is_older_than_its_group_and_the_actors_lag,
  a_source_waits_until_those_before_it_are_in,
  no_seat_is_empty_that_could_be_filled,
  the_batch_is_allowed,
  the_buffer_equals_the_lists,
  the_thresholds_equal_the_fractions,
  the_counts_equal_the_lists_and_no_problem_is_lost,
)

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


# --- the tests -----------------------------------------------------------------------


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
      seen['X1 full'] += first >= P
      seen['no X1, others'] += first == 0 and len(step.seats()) > 0
      seen['X3 drawn from more'] += 0 < len(step.seats(REUSED)) < len(step.tiers[2])
      before, after = tuple(step.before.thresholds), tuple(step.after.thresholds)
      seen['thresholds moved'] += before != after
  for name in ('entered', 'graduated', 'promoted', 'progressed', 'evicted'):
    assert seen[f'buffer/{name}'], name
  for name in [('seats', s) for s in (-1, 0, 1, 2)]:
    assert seen[name] >= 10, name
  for name in ('no X1, others', 'X3 drawn from more', 'thresholds moved'):
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
    scene,
    pool,
    between=lambda now, buffer: reloaded(buffer) if now == at else buffer,
  )
  for a, b in zip(history, other, strict=True):
    assert same((a.groups, a.source_P, a.after), (b.groups, b.source_P, b.after)), at


def test_a_checkpoint_of_the_buffer_changes_nothing(tmp_path):
  scene = SCENES['up']

  def through_a_checkpoint(now, buffer):
    if now == 5:
      with checkpoint.manager(str(tmp_path), 1) as checkpoints:
        checkpoint.save(checkpoints, now, {'buffer': buffer}, {})
        like = replay_buffer.init(scene.capacity, scene.G, T, scene.ours())
        return checkpoint.restore(checkpoints, now, {'buffer': like})[0]['buffer']
    return buffer

  history, other = play(scene, MANY), play(scene, MANY, between=through_a_checkpoint)
  assert (history[4].after.reusable.completed_step_P >= 0).any()
  assert all(same(a.groups, b.groups) for a, b in zip(history, other, strict=True))
  assert same(history[-1].after, other[-1].after)


def test_another_seed_draws_others():
  drawn = []
  for seed in range(12):
    tried = making.groups(range(12), [4] * 12, [0] * 12, 8, T)
    buffer = replay_buffer.init(12, 8, T)._replace(reusable=tried)
    nothing = types.empty_groups(0, 8, T)
    groups, _ = adapted(
      types.empty_groups(P, 8, T), nothing, buffer, 1, jax.random.key(seed), P
    )
    drawn.append(tuple(groups.id_P.tolist()))
  assert len(set(drawn)) == 12


def test_without_room_and_lag_the_batch_is_filtered_grpo():
  scene = SCENES['roomless']
  assert scene.v == 1
  for step in play(scene, MANY):
    taught = [t for t in entries(step.fresh) if 0 < t.k < scene.G]
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


def test_plain_it_is_the_same_history():
  scene, pool = SCENES['up'], MANY._replace(steps=3)
  plain = batch_rules.adapted, replay_buffer.insert.__wrapped__
  assert_equal(play(scene, pool), play(scene, pool, rules=plain))


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
