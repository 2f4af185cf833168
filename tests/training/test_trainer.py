"""The loop: rounds, counters, whose weights decode."""

import types as python_types
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import making
import numpy as np
import pytest
import runs
from runs import last_run, tiny

from bapo_jax import types
from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import prompt_rules
from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Row
from bapo_jax.rollout.rollout import Rollout, Verification
from bapo_jax.runtime.glossary import OF_UPDATES
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import sampler, trainer
from bapo_jax.training.state import Trainer, TrainState

P, G, T, N = 2, 8, 3, 96
MADE = dict.fromkeys(OF_UPDATES, 0.0)
MADE |= {'learner/skipped': 0.0, 'learner/tokens': 9.0, 'learner/tokens_computed': 9.0}
# On a device, like those of a train step.
MADE = {name: jnp.float32(value) for name, value in MADE.items()}
SKIPPED = MADE | {'learner/skipped': jnp.float32(1)}
EMPTY = MADE | {'learner/tokens': jnp.float32(0)}
EXTRA = {'batch.rule': 'learnable_only', 'batch.max_extra_rounds': 2}
HARD = {'batch.rule': 'adapted', 'buffer.reeval_interval': 1}
PROBLEMS = Problems(
  np.arange(N, dtype=np.int32),
  np.ones((N, 2), np.int32),
  np.full(N, 2),
  [Row('1', '')] * N,
)


class Scripted(Trainer):
  """A trainer whose weights are one number, the updates that made them."""

  def actor(self, params):
    """Returns a copy, as what decodes is one."""
    return {'updates': jnp.copy(params['updates'])}


class Script:
  """A loop whose rollouts have scripted verdicts, and which records them.

  Args:
    script: round -> correct responses of its P groups; later rounds have 4 of 8.
    updates: step -> the metrics of its update.
    knobs: of the config.
  """

  def __init__(
    self,
    patch: pytest.MonkeyPatch,
    script: Sequence[tuple[int, ...]] = (),
    updates: Callable[[int], dict] = lambda step: MADE,
    **knobs: Any,
  ):
    self.script, self.updates = script, updates
    self.rollouts = []  # (updates, key, keywords)
    self.asked = []  # hard problems of each re-evaluation
    self.fresh = []  # prompts of each round
    self.scored = []  # (updates, version)
    self.freed = []  # before each update, whether the actor was deleted
    sizes = {'prompts.count': P, 'sampler.group_size': G}
    self.config = tiny(**sizes, **{'learner.minibatches': 1}, **knobs)
    patch.setattr(sampler, 'rollout', self.rollout)
    patch.setattr(sampler, 'PartialRollouts', lambda engine, places: None)
    patch.setattr(sampler.decode, 'params_of', lambda actor, *_: actor)
    spec = making.SPEC
    sizes = {'group_size': G, 'length': T, 'spec': spec, 'mesh': None}
    engine = python_types.SimpleNamespace(**sizes)
    verifier = python_types.SimpleNamespace(steps=False)
    timer = PhaseTimer()
    fields = dict.fromkeys(Trainer.__dataclass_fields__)
    fields |= {
      'config': self.config,
      'problems': PROBLEMS,
      'engine': engine,
      'spec': spec,
      'tokenizer': python_types.SimpleNamespace(eos=(1,)),
      'timer': timer,
      'train_step': self.train_step,
      'sampler': sampler.LocalSampler(
        engine,
        Verification(PROBLEMS, None, verifier, timer),
        seed=self.config.seed,
        count=P,
        places=P,
        knobs=self.config.rollout,
        score=self.score,
      ),
    }
    self.trainer = Scripted(**fields)

  def rollout(self, rollouts, params, now, key, **keywords) -> Rollout:
    self.actor = params
    self.rollouts.append((float(params['updates']), key, keywords))
    ids = now.id_P
    prompt_round = keywords['first_uid'] // (P * G)
    correct = [0] * len(ids)
    if not self.is_fresh(key):
      self.asked.append(ids.tolist())
    else:
      self.fresh.append(ids.tolist())
      scripted = prompt_round < len(self.script)
      correct = self.script[prompt_round] if scripted else (4, 4)
    completed = np.where(ids < 0, -1, keywords['step'])
    groups = making.groups(ids, correct, completed, G, T)
    return Rollout(groups, [], [])

  def is_fresh(self, key) -> bool:
    return key == trainer.step_keys(self.config.seed, 0).fresh

  def score(self, params, groups, version, pictures):
    self.scored.append((float(params['updates']), version))
    return groups, types.LogpDiff(0.0, 0.0, 0)

  def train_step(self, params, opt, batch):
    self.freed.append(self.actor['updates'].is_deleted())
    metrics = self.updates(len(self.freed) - 1)
    if not batch.adv_BT.any():
      metrics = metrics | {'advantage/positive': jnp.float32(np.nan)}
    return {'updates': params['updates'] + 1}, opt, metrics, None

  def loop(self, **fields: int) -> list[tuple[TrainState, trainer.Metrics, Any]]:
    """Returns all steps, from a state whose buffer has two hard problems."""
    buffer = replay_buffer.init(4, G, T, self.config.buffer.thresholds)
    hard = making.groups([90, 91, -1, -1], [0] * 4, [3, 4, -1, -1], 1, 1)
    state = TrainState(
      params={'updates': jnp.float32(0)},
      opt=None,
      actor=None,
      buffer=buffer._replace(hard=hard),
      history=prompt_rules.no_history(len(PROBLEMS.id_N)),
      **fields,
    )
    return list(trainer.train_loop(self.trainer, state))


def taught(record) -> list[tuple[int, int]]:
  """(round, place in it) of the groups of a batch, by the order of the prompts."""
  order = [prompt_rules.shuffled(N, (0, r), P)[:P].tolist() for r in range(9)]
  places = {id_: (r, p) for r, ids in enumerate(order) for p, id_ in enumerate(ids)}
  filled = np.asarray(record.source_P) >= 0
  return [places[i] for i in np.asarray(record.groups.id_P)[filled].tolist()]


def test_rounds_follow_until_the_seats_are_full_or_extra_rounds_are_spent(monkeypatch):
  # Step 0: rounds 0 to 2 give 0, 1 and 1 groups that teach; step 1 is full at once,
  # step 2 after a second round (its surplus is dropped), step 3 spends all three for
  # one seat.
  script = [(0, 8), (4, 0), (0, 3), (1, 7), (8, 2), (5, 6), (0, 0), (0, 3), (8, 0)]
  steps = Script(monkeypatch, script, steps=4, **EXTRA).loop()
  assert [row['rollout/rounds'] for _, row, _ in steps] == [3, 1, 2, 3]
  assert [s.prompt_round for s, _, _ in steps] == [3, 4, 6, 9]
  assert [s.responses for s, _, _ in steps] == [48, 64, 96, 144]
  assert [row['rollout/responses'] for _, row, _ in steps] == [48, 64, 96, 144]
  assert [taught(record) for _, _, record in steps] == [
    [(1, 0), (2, 1)],
    [(3, 0), (3, 1)],
    [(4, 1), (5, 0)],
    [(7, 1)],
  ]


def test_no_token_is_older_than_promised_whatever_the_rounds(tmp_path):
  # A step of three rounds submits three times the prompts that a step of one returns.
  knobs = EXTRA | {
    'rollout.max_off_policy_steps': 1,
    'rollout.max_tokens_per_step': 4.0,
    'prompts.count': 1,
    'sampler.group_size': 16,
    'learner.minibatches': 1,
    'steps': 7,
    'evaluate.every': 99,
    'checkpoint.every': 99,
  }
  workdir = tmp_path / 'whole'
  assert runs.train(tiny(**knobs), workdir) == 0
  whole = last_run(workdir)
  rows = [row for step, row in whole.rows.items() if step]
  rounds = [float(row['rollout/rounds']) for row in rows]
  ages = [float(row['rollout/age_max']) for row in rows]
  assert min(rounds) < 3 == max(rounds) and max(ages) > 0, 'or nothing is tested'
  assert max(ages) <= 1, ages
  submitted_W = whole.arrays['partial/host/submitted_W']
  assert (submitted_W[submitted_W >= 0] > 5).all(), 'all that is due is out'


def test_responses_are_numbered_through_rounds_and_resumes(monkeypatch):
  for start, rounds in ((0, 4), (4, 2)):
    script = Script(monkeypatch, [(0, 0), (0, 0), (1, 1)], steps=2, **EXTRA)
    s, *_ = script.loop(prompt_round=start, responses=7)[-1]
    uids = [keywords['first_uid'] for _, _, keywords in script.rollouts]
    assert uids == [P * G * n for n in range(start, start + rounds)]
    assert s.responses == 7 + rounds * P * G


@pytest.mark.parametrize('depth', [0, 1, 3])
def test_groups_are_sampled_by_the_weights_of_depth_steps_before(monkeypatch, depth):
  script = Script(monkeypatch, steps=5, **{'rollout.depth': depth})
  steps = script.loop()
  submitted = [(n, k['policy_version'], k['step']) for n, _, k in script.rollouts]
  versions = [0] * depth + [0, 1, 2, 3, 4]  # one update a step
  assert submitted == [(n, n, step) for step, n in enumerate(versions)]
  trained = [np.asarray(record.groups.completed_step_P) for *_, record in steps]
  assert [set(step_P.tolist()) for step_P in trained] == [{i} for i in range(5)]
  assert [len(s.queue) for s, *_ in steps] == [depth] * 5
  assert [s.prompt_round for s, *_ in steps] == [depth + i for i in range(1, 6)]


def test_a_hard_problem_in_flight_is_not_asked_again(monkeypatch):
  # 90 and 91 are hard; each is asked again once its answers are in the buffer.
  script = Script(
    monkeypatch, steps=3, **HARD, **{'buffer.reevaluate': 1, 'rollout.depth': 2}
  )
  script.loop()
  assert script.asked == [[90], [91], [-1], [90], [91]]


def test_a_run_ends_with_its_responses(monkeypatch):
  steps = Script(monkeypatch, steps=9, responses=2.5 * P * G).loop()
  assert [s.responses for s, *_ in steps] == [P * G, 2 * P * G, 3 * P * G]


def test_reevaluated_responses_count_and_empty_rows_do_not(monkeypatch):
  steps = Script(monkeypatch, steps=2, **HARD, **{'buffer.reevaluate': 3}).loop()
  # Two hard problems are in the buffer for three seats: 2 + 2 groups per step.
  assert [s.responses for s, *_ in steps] == [32, 64]


def test_hard_problems_are_reevaluated_when_due(monkeypatch):
  script = Script(monkeypatch, steps=4, **HARD | {'buffer.reeval_interval': 2})
  script.loop()
  reevaluated = [key for _, key, _ in script.rollouts if not script.is_fresh(key)]
  due = [trainer.step_keys(script.config.seed, step).reevaluate for step in (0, 2)]
  assert reevaluated == due


def test_fresh_groups_are_the_actors_and_reevaluated_ones_the_current_weights(
  monkeypatch,
):
  knobs = {'buffer.reevaluate': 2, 'rollout.weight_sync_interval': 3}
  script = Script(monkeypatch, steps=5, **HARD, **knobs)
  script.loop()
  fresh = [r for r in script.rollouts if script.is_fresh(r[1])]
  reevaluated = [r for r in script.rollouts if not script.is_fresh(r[1])]
  for step in range(5):
    actor = step - step % 3
    updates, _, keywords = fresh[step]
    assert updates == keywords['policy_version'] == actor and keywords['step'] == step
    updates, _, keywords = reevaluated[step]
    assert updates == keywords['policy_version'] == keywords['step'] == step
    # Scored by the weights that sampled.
    assert script.scored[2 * step : 2 * step + 2] == [(step, step), (actor, actor)]


@pytest.mark.parametrize(('interval', 'freed'), [(1, [0, 1, 2, 3, 4]), (3, [2])])
def test_an_actor_that_the_next_step_replaces_is_freed_before_the_updates(
  monkeypatch, interval, freed
):
  script = Script(monkeypatch, steps=5, **{'rollout.weight_sync_interval': interval})
  states = [s for s, *_ in script.loop()]
  assert np.flatnonzero(script.freed).tolist() == freed
  assert [i for i, s in enumerate(states) if s.actor is None] == freed


def test_skipped_updates_are_counted_over_steps(monkeypatch):
  # A minibatch without a token is neither applied nor skipped.
  updates = [MADE, SKIPPED, EMPTY, SKIPPED, MADE]
  steps = Script(monkeypatch, updates=updates.__getitem__, steps=5).loop(updates=7)
  assert [s.consecutive_skips for s, *_ in steps] == [0, 1, 1, 2, 0]
  assert [s.updates for s, *_ in steps] == [8, 8, 8, 8, 9]
  assert [row['learner/updates'] for _, row, _ in steps] == [8, 8, 8, 8, 9]


@pytest.mark.parametrize('rule', ['learnable_only', 'fresh_only'])
def test_steps_without_anything_to_learn_are_counted_in_a_row(monkeypatch, rule):
  # Groups of 8: 0 and 8 right are of one reward each, 3 right is not.
  script = [(0, 8), (8, 8), (0, 3), (0, 0)]
  knobs = {'batch.rule': rule, 'batch.max_extra_rounds': 0}
  steps = Script(monkeypatch, script, steps=4, **knobs).loop(idle_steps=4)
  assert [s.idle_steps for s, *_ in steps] == [5, 6, 0, 1]
  assert [row['learner/idle_steps'] for _, row, _ in steps] == [5, 6, 0, 1]
  if rule == 'fresh_only':
    return
  # Without an update a step has the metrics of its rollouts alone.
  _, row, _ = steps[0]
  assert row['rollout/accuracy'] == 0.5 and row['batch/filled'] == 0
  of_updates = [x for name, x in row.items() if name.startswith(('loss/', 'clip/'))]
  assert of_updates and np.isnan(of_updates).all()


# With four problems and two per round, the orders of the rounds 0 to 5 are 2013, 1320,
# 3021, 2130, 2103 and 0321: the epochs 2013, 3021, 2103, each from its first and its
# third problem on.
WINDOW = {'prompts.rule': 'by_difficulty', 'prompts.low': 0.25, 'prompts.high': 0.75}


@pytest.fixture
def few(monkeypatch):
  monkeypatch.setattr(prompt_rules, 'shuffled', order)
  few = Problems(*(x[:4] for x in PROBLEMS[:4]))
  monkeypatch.setitem(globals(), 'PROBLEMS', few)


def order(rows, key, count):
  assert (rows, count) == (4, 2)
  text = ['2013', '1320', '3021', '2130', '2103', '0321'][key[1]]
  return np.asarray([*map(int, text)])


def test_prompts_follow_the_verdicts_of_earlier_steps(few, monkeypatch):
  # 2 is 0/8 and out, 0 is 4/8; 1 is 8/8 and out, 3 is 4/8; then 0 is older than 3; now
  # both are as old, and the order decides, twice; 0 is 26/32 and out, and fills a seat.
  script = Script(
    monkeypatch, [(0, 4), (8, 4), (6, 4), (8, 8), (8, 0)], steps=6, **WINDOW
  )
  s, *_ = script.loop()[-1]
  assert script.fresh == [[2, 0], [1, 3], [0, 3], [3, 0], [0, 3], [3, 0]]
  assert s.history.tries_N.tolist() == [40, 8, 8, 40]
  assert s.history.right_N.tolist() == [30, 8, 0, 20]
  assert s.history.last_step_N.tolist() == [5, 1, 0, 5]
  assert s.history.waiting_N.tolist() == [0] * 4


def test_with_a_depth_prompts_follow_what_is_known_and_none_is_in_flight_twice(
  few, monkeypatch
):
  # Round 2 knows round 0 (2 is out, 0 is 4/8) and not round 1, in flight; round 3 knows
  # that 1 is out and 3 is not; round 4 would begin with 2, of 4/16, and 0, of 10/16.
  script = Script(
    monkeypatch, [(0, 4), (8, 4), (6, 4)], steps=3, **WINDOW, **{'rollout.depth': 1}
  )
  s, *_ = script.loop()[-1]
  assert script.fresh == [[2, 0], [1, 3], [0, 2], [3, 1]]
  assert s.history.tries_N.tolist() == [16, 8, 16, 8]
  assert s.history.right_N.tolist() == [10, 8, 4, 4]
  assert s.history.last_step_N.tolist() == [2, 1, 2, 1]
  assert s.history.waiting_N.tolist() == [0, 1, 0, 1]


def test_an_extra_round_asks_no_problem_of_its_step_again(few, monkeypatch):
  knobs = WINDOW | EXTRA | {'batch.max_extra_rounds': 1}
  script = Script(monkeypatch, [(0, 8), (0, 8), (4, 4)], steps=2, **knobs)
  script.loop()
  # All problems are out after the first step.
  assert script.fresh == [[2, 0], [1, 3], [3, 0]]


def test_a_reevaluated_problem_is_in_the_history(monkeypatch):
  knobs = HARD | WINDOW | {'buffer.reevaluate': 2}
  s, *_ = Script(monkeypatch, steps=2, **knobs).loop()[0]
  assert s.history.tries_N[[90, 91]].tolist() == [8, 8]
  assert s.history.last_step_N[[90, 91]].tolist() == [0, 0]
  assert s.history.tries_N.sum() == 4 * G and not s.history.waiting_N.any()
