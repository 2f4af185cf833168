"""Histories of the batch rule and the buffer, played beside an oracle of lists.

A history is the cycle of train_loop without a model: a pool of problems, solved better
or worse as time goes on, is sampled, re-evaluated, seated and filed, step after step;
`oracles.py` does the same with lists.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax
import making
import numpy as np
import oracles

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
  return making.bound(replay_buffer.THRESHOLD_RULES[rule], **floats)


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


# Whole numbers, whatever the compiler does with them: it need not take its time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
adapted = jit(batch_rules.adapted, static_argnums=5)
draw = jit(replay_buffer.draw, static_argnums=1)
STATIC = ('thresholds', 'max_off_policy_steps', 'max_reuse', 'hard_order')
insert = jit(replay_buffer.insert, static_argnames=STATIC)


def sampled(scene, rng, ability_N, ids, now, policy_version):
  """Groups of these problems at step `now`; -1 is an empty row."""
  ids = np.asarray(ids, np.int32)
  k = rng.binomial(scene.G, ability_N[ids]) * (ids >= 0)
  steps = np.where(ids < 0, -1, now)
  groups = making.groups(ids, k, steps, scene.G, T, seed=rng.integers(2**31))
  response_mask_PGT = np.asarray(groups.response_mask_PGT) & (ids >= 0)[:, None, None]
  # One group in eight is shaped so that its rewards are equal; of another, all right
  # responses are masked out: neither has an advantage. The others have a bonus.
  kind_P = rng.integers(0, 8, len(ids))
  correct_PG = np.asarray(groups.correct_PG)
  reward_PG = np.where((kind_P == 0)[:, None], np.float32(0.1), correct_PG + 0.1)
  response_mask_PGT &= ~((kind_P == 1)[:, None] & correct_PG)[:, :, None]
  policy_version_PGT = np.where(
    response_mask_PGT, np.int32(policy_version), np.int32(-1)
  )
  return groups._replace(
    response_mask_PGT=response_mask_PGT,
    policy_version_PGT=policy_version_PGT,
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
  history, limits = [], scene.limits()
  for now in range(pool.steps):
    buffer = between(now, buffer)
    due = scene.reevaluate if now % scene.m == 0 else 0
    drawn = [int(i) for i in draw(buffer.hard, due).id_P]
    expected = oracles.draw(lists, due)
    assert drawn == expected + [-1] * (due - len(expected)), 'tried longest ago first'
    actor = now - now % scene.v
    reevaluated = sampled(scene, rng, ability_N, drawn, now, now)
    ids = prompts(rng, len(ability_N), scene.P)
    fresh = sampled(scene, rng, ability_N, ids, now, actor)
    ability_N = np.clip(ability_N + pool.drift * rng.normal(size=len(ability_N)), 0, 1)
    key = jax.random.fold_in(jax.random.key(pool.seed), now)
    placed = place(fresh)
    groups, source_P = rules[0](placed, reevaluated, buffer, now, key, scene.P)
    after, counts = rules[1](
      buffer,
      placed,
      reevaluated,
      groups,
      source_P,
      now,
      thresholds=scene.ours(),
      hard_order=scene.hard_order,
      **limits,
    )
    host = jax.device_get((fresh, reevaluated, groups, source_P, buffer, after, counts))
    tried = [entries(groups) for groups in host[:2]]
    tiers = oracles.fill(*tried, lists, now, scene.G, **limits)
    seated = [{int(i) for i in host[2].id_P[s]} for s in (host[3] >= 0, host[3] == 2)]
    lists, expected = oracles.insert(
      lists,
      *tried,
      seated,
      now,
      rule=scene.lists(),
      G=scene.G,
      capacity=scene.capacity,
      hard_order=scene.hard_order,
      **limits,
    )
    history.append(Step(now, *host, tiers, lists, expected))
    buffer = after
  return history
