"""The batch rule and the buffer over whole histories, against Python lists.

A history is the cycle of train_loop without a model: a pool of problems, solved better
or worse as time goes on, is sampled, re-evaluated, seated and filed, step after step;
`oracles.py` does the same with lists. `PROPERTIES` hold after every step.
"""

import collections
import functools
from fractions import Fraction
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import making
import numpy as np
import oracles
import pytest

from bapo_jax import types
from bapo_jax.algorithms import batch_rules, replay_buffer

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
  P: int = P  # prompts and seats
  hard_order: str = 'fifo'

  def ours(self):
    """The threshold rule as a run has it."""
    return threshold_rule(self.rule, tuple(self.shares.items()))

  def limits(self):
    """Age and use up to which a group is reused."""
    names = ('max_off_policy_steps', 'max_reuse')
    return {name: getattr(self, name) for name in names}

  def lists(self):
    """The threshold rule as the oracle has it."""
    return lambda rate: oracles.thresholds(self.G, rate, self.rule, **self.shares)


@functools.cache
def threshold_rule(rule, shares):
  floats = jax.tree.map(float, dict(shares))
  if rule == 'fixed':
    floats = {'hard': floats['hard'], 'reusable': (floats['low'], floats['high'])}
  return replay_buffer.ThresholdRule.rules.names[rule](**floats)


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
  'up': Scene('moving', eighths(1, (1, 3), (5, 7)), v=3),
  'down': Scene('moving', eighths(6, (4, 1), (7, 4)), capacity=12, max_reuse=2, m=2),
  'crowded': Scene(  # more promoted groups than seats, and few of them reusable
    'fixed', eighths(1, 4, 4), capacity=8, reevaluate=8, P=2, hard_order='least_recent'
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


pools = st.builds(
  Pool,
  st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]), min_size=1, max_size=16),
  st.sampled_from([0.0, 0.1, 0.4]),
  st.integers(0, 2**20),
  st.integers(1, 10),
)
MANY = Pool((0.0, 0.05, 0.05, 0.2, 0.2, 0.5, 0.5, 0.8, 1.0) * 2, 0.3, 7, 10)

# Whole numbers, whatever the compiler does with them: it need not take its time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
adapted = jit(batch_rules.Adapted(), static_argnums=5)
draw = jit(replay_buffer.draw, static_argnums=1)
STATIC = ('thresholds', 'max_off_policy_steps', 'max_reuse', 'hard_order')
insert = jit(replay_buffer.insert, static_argnames=STATIC)


def sampled(scene, rng, ability_N, ids, now, policy_version):
  """Groups of these problems at step `now`; -1 is an empty row."""
  ids = np.asarray(ids, np.int32)
  k = rng.binomial(scene.G, ability_N[ids]) * (ids >= 0)
  steps = np.where(ids < 0, -1, now)
  groups = making.groups(ids, k, steps, scene.G, T, seed=rng.integers(2**31))
  mask_PGT = np.asarray(groups.response_mask_PGT) & (ids >= 0)[:, None, None]
  # One group in eight is shaped so that its rewards are equal; of another, all right
  # responses are masked out: neither has an advantage. The others have a bonus.
  kind_P = rng.integers(0, 8, len(ids))
  correct_PG = np.asarray(groups.correct_PG)
  reward_PG = np.where((kind_P == 0)[:, None], np.float32(0.1), correct_PG + 0.1)
  mask_PGT &= ~((kind_P == 1)[:, None] & correct_PG)[:, :, None]
  return groups._replace(
    response_mask_PGT=mask_PGT,
    policy_version_PGT=np.where(mask_PGT, np.int32(policy_version), np.int32(-1)),
    reward_PG=reward_PG.astype(np.float32),
  )


def entries(groups):
  """The groups that are not empty, as the oracle has them."""
  columns = groups.id_P, groups.correct_PG.sum(1), groups.completed_step_P
  rows = zip(*(column.tolist() for column in columns), strict=True)
  return [
    oracles.Attempt(*row, (groups, p), has_advantage(groups, p))
    for p, row in enumerate(rows)
    if row[2] >= 0
  ]


def has_advantage(groups, p):
  """Whether two responses that teach have different rewards."""
  rewards = zip(groups.reward_PG[p], groups.response_mask_PGT[p], strict=True)
  return len({float(reward) for reward, mask_T in rewards if mask_T.any()}) > 1


def prompts(rng, problems, P):
  """Prompts of a step: most rows are filled, now and then one problem comes twice."""
  ids = np.full(P, -1)
  many = min(P, problems, rng.integers(0, 2 * P))
  ids[:many] = rng.permutation(problems)[:many]
  if many > 2 and rng.random() < 0.3:
    ids[1] = ids[0]
  return rng.permutation(ids)


def play(scene, pool):
  """[Step] of a history."""
  rng = np.random.default_rng(pool.seed)
  ability_N = np.asarray(pool.ability_N, float)
  buffer = replay_buffer.init(scene.capacity, scene.G, T, scene.ours())
  lists = oracles.empty_lists(scene.G, scene.lists())
  history, limits = [], scene.limits()
  for now in range(pool.steps):
    due = scene.reevaluate if now % scene.m == 0 else 0
    drawn = [int(i) for i in draw(buffer.hard, due).id_P]
    expected = oracles.draw(lists, due)
    assert drawn == expected + [-1] * (due - len(expected)), 'tried longest ago first'
    reevaluated = sampled(scene, rng, ability_N, drawn, now, now)
    ids = prompts(rng, len(ability_N), scene.P)
    fresh = sampled(scene, rng, ability_N, ids, now, now - now % scene.v)
    ability_N = np.clip(ability_N + pool.drift * rng.normal(size=len(ability_N)), 0, 1)
    key = jax.random.fold_in(jax.random.key(pool.seed), now)
    groups, source_P = adapted(fresh, reevaluated, buffer, now, key, scene.P)
    batch = fresh, reevaluated, groups, source_P, now
    knobs = {'thresholds': scene.ours(), 'hard_order': scene.hard_order} | limits
    after, counts = insert(buffer, *batch, **knobs)
    host = jax.device_get((fresh, reevaluated, groups, source_P, buffer, after, counts))
    tried = [entries(groups) for groups in host[:2]]
    tiers = oracles.fill(*tried, lists, now, scene.G, **limits)
    seated = [{int(i) for i in host[2].id_P[s]} for s in (host[3] >= 0, host[3] == 2)]
    knobs |= {'rule': scene.lists(), 'G': scene.G, 'capacity': scene.capacity}
    del knobs['thresholds']
    lists, expected = oracles.insert(lists, *tried, seated, now, **knobs)
    history.append(Step(now, *host, tiers, lists, expected))
    buffer = after
  return history


# ------------------------------------ properties of a step: (scene, history, step)


def reused_groups_are_those_stored_and_sampled(scene, history, step):
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


def no_token_is_older_than_its_group_and_the_actors_lag(scene, history, step):
  teach_PGT = step.groups.response_mask_PGT & (step.source_P >= 0)[:, None, None]
  lag_n = step.now - step.groups.policy_version_PGT[teach_PGT]
  assert (lag_n >= 0).all()
  assert (lag_n <= scene.max_off_policy_steps + scene.v - 1).all()


def the_batch_is_full_and_allowed(scene, history, step):
  fields = step.groups._asdict().items()
  present = {name: x for name, x in fields if x is not None}
  types.agree(**present, source_P=step.source_P)
  assert step.groups.tokens_PGT.shape == (scene.P, scene.G, T)
  assert len(step.seats()) == min(scene.P, sum(map(len, step.tiers)))
  source_P = step.source_P[step.seats()]
  assert (np.diff(source_P) >= 0).all()
  assert (step.source_P[len(source_P) :] == -1).all()
  sure = [(FRESH, t) for t in step.tiers[0]]
  sure += [(REEVALUATED, t) for t in step.tiers[1]]
  for seat, (source, t) in zip(step.seats(), sure, strict=False):
    assert step.source_P[seat] == source
    assert making.same_row(step.groups, seat, *t.row)
  drawn = [int(i) for i in step.groups.id_P[step.seats(REUSED)]]
  assert set(drawn) <= {t.problem for t in step.tiers[2]}


def the_buffer_equals_the_lists(scene, history, step):
  hard, reusable = step.after.hard, step.after.reusable
  assert hard.id_P.shape == reusable.id_P.shape == (scene.capacity,)
  live = np.flatnonzero(hard.completed_step_P >= 0)
  stored = [(int(hard.id_P[row]), int(hard.completed_step_P[row])) for row in live]
  assert stored == step.lists.hard
  rows = np.flatnonzero(reusable.completed_step_P >= 0)
  used = [int(step.after.usage_count_P[row]) for row in rows]
  assert used == [used for _, used in step.lists.reusable]
  for row, (t, _) in zip(rows, step.lists.reusable, strict=True):
    assert making.same_row(reusable, row, *t.row)


def the_thresholds_equal_the_fractions(scene, history, step):
  hard_k, reusable_k = step.lists.thresholds
  hard, first, last = map(int, step.after.thresholds)
  assert hard_k == set(range(hard + 1))
  assert reusable_k == set(range(first, last + 1))
  assert step.after.num_correct == step.lists.num_correct
  assert step.after.num_responses == step.lists.num_responses


def the_counts_equal_the_lists_and_no_problem_is_lost(scene, history, step):
  names = ('entered', 'graduated', 'promoted', 'progressed', 'evicted')
  for name in names:
    assert step.counts[f'buffer/{name}'] == step.expected[name], name
  entered, *left = (
    sum(int(past.counts[f'buffer/{name}']) for past in history[: step.now + 1])
    for name in names
  )
  assert entered == sum(left) + (step.after.hard.completed_step_P >= 0).sum()


PROPERTIES = (
  reused_groups_are_those_stored_and_sampled,
  no_token_is_older_than_its_group_and_the_actors_lag,
  the_batch_is_full_and_allowed,
  the_buffer_equals_the_lists,
  the_thresholds_equal_the_fractions,
  the_counts_equal_the_lists_and_no_problem_is_lost,
)


@pytest.mark.parametrize('scene', SCENES)
@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(pool=pools)
@hypothesis.example(pool=MANY)
def test_every_property_holds_over_random_histories(scene, pool):
  history = play(SCENES[scene], pool)
  for step in history:
    for holds in PROPERTIES:
      holds(SCENES[scene], history, step)


def test_the_histories_are_worth_it():
  # Every source, every way out of the buffer and every kind of move is in one of them.
  seen = collections.Counter()
  for scene in SCENES.values():
    for step in play(scene, MANY):
      seen.update({name: int(n) for name, n in step.counts.items()})
      seen.update(('seats', int(s)) for s in step.source_P)
      seated = set(step.groups.id_P[step.seats()].tolist())
      waiting = [t for t in step.tiers[1] if t.problem not in seated]
      seen['promoted without a seat'] += len(waiting)
      seen['without advantage'] += sum(
        0 < t.k < scene.G and not t.teaches for t in entries(step.fresh)
      )
      seen['X3 drawn from more'] += 0 < len(step.seats(REUSED)) < len(step.tiers[2])
  assert min(seen.values()) > 0, seen
  assert min(seen['seats', s] for s in (-1, 0, 1, 2)) >= 10, seen
