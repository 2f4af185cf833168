"""The loop without a model: rounds, counters, whose weights decode, theory."""

import dataclasses
import types as python_types
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import making
import numpy as np
import pytest
from runs import last_run, same, tiny

from bapo_jax import types
from bapo_jax.algorithms import batch_rules, replay_buffer
from bapo_jax.rollout.rollout import Rollout
from bapo_jax.run import experiment
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import rules, step_metrics, trainer
from bapo_jax.training.state import NewestStep

P, G, T = 2, 8, 3
MADE = {'learner/skipped': 0.0, 'learner/tokens': 9.0}
SKIPPED = MADE | {'learner/skipped': 1.0}
EMPTY = MADE | {'learner/tokens': 0.0}
EXTRA: dict[str, Any] = {'batch.rule': 'learnable_only', 'batch.max_extra_rounds': 2}
HARD: dict[str, Any] = {'batch.rule': 'adapted', 'buffer.reeval_interval': 1}


class Fake:
  """A trainer whose rollouts follow a script, and which records every call.

  Args:
    script: round -> correct responses of its P groups.
    updates: step -> the metrics of its updates.
    knobs: of the config.
  """

  def __init__(
    self,
    patch: pytest.MonkeyPatch,
    script: Sequence[tuple[int, ...]],
    updates: Callable[[int], list[dict]] = lambda step: [MADE],
    group_size: int = G,
    **knobs: Any,
  ):
    self.script, self.updates, self.group_size = script, updates, group_size
    self.rounds: list[int] = []
    self.rollouts: list[tuple[str, str, dict]] = []  # (weights, key, keywords)
    self.batches: list[tuple[types.Groups, np.ndarray]] = []
    sizes = {'prompts.count': P, 'sampler.group_size': group_size}
    self.config = tiny(**sizes, **knobs)
    patch.setattr(trainer, 'rollout', self.rollout)
    patch.setattr(trainer, 'PartialRollouts', lambda engine, places: None)
    patch.setattr(trainer, 'step_keys', keys)
    patch.setattr(trainer.prompts, 'next_prompts', self.next_prompts)
    patch.setattr(
      trainer.prompts, 'prompts_by_id', lambda problems, ids: prompts_of(ids)
    )
    patch.setattr(trainer.decode, 'sync_actor', lambda params, *_: f'copy of {params}')
    patch.setattr(trainer.learner, 'update', self.update)
    patch.setattr(
      trainer.replay_buffer, 'insert', lambda buffer, *_, **__: (buffer, {})
    )
    patch.setattr(trainer.step_metrics, 'describe', lambda *_: {})
    bound = rules.bind(self.config)
    fields: dict[str, Any] = {
      field: None for field in trainer.Trainer.__dataclass_fields__
    }
    fields |= {
      'config': self.config,
      'rules': python_types.SimpleNamespace(
        batch=batch_rules.learnable_only,
        advantage=bound.advantage,
        thresholds=bound.thresholds,
      ),
      'engine': python_types.SimpleNamespace(group_size=group_size, length=T),
      'tokenizer': python_types.SimpleNamespace(eos=(1,)),
      'timer': PhaseTimer(),
      'newest': NewestStep(),
    }
    self.trainer = trainer.Trainer(**fields)

  def next_prompts(self, problems, prompt_round, seed, count) -> types.Prompts:
    self.rounds.append(prompt_round)
    return prompts_of(np.arange(P) + P * prompt_round)

  def rollout(self, rollouts, params, prompts, key, **keywords) -> Rollout:
    self.rollouts.append((params, key, keywords))
    ids = prompts.id_P
    fresh = key.startswith('fresh')
    correct = self.script[self.rounds[-1]] if fresh else [0] * len(ids)
    completed = np.where(ids < 0, -1, keywords['step'])
    groups = making.groups(ids, correct, completed, self.group_size, T)
    return Rollout(groups, [], [])

  def update(self, params, opt, groups, source_P, key, **_):
    self.batches.append((groups, source_P))
    step = int(key.split()[1])
    return f'weights {step + 1}', opt, self.updates(step)

  def loop(self, **fields: int) -> list[tuple[trainer.TrainState, trainer.Metrics]]:
    """All steps, from a state whose buffer holds two hard problems."""
    buffer = replay_buffer.init(4, self.group_size, T)
    buffer = buffer._replace(
      hard=making.groups([90, 91, -1, -1], [0] * 4, [3, 4, -1, -1], 1, 1)
    )
    state = trainer.TrainState(
      params='weights 0', opt=None, actor='none', buffer=buffer, **fields
    )
    return list(trainer.train_loop(self.trainer, state))


def keys(seed: int, step: int) -> Any:
  """Keys that say what they are for."""
  names = ('fresh', 'reevaluate', 'batch', 'update')
  return trainer.StepKeys(*(f'{name} {step}' for name in names))


def prompts_of(ids: Any) -> types.Prompts:
  """Prompts of these problems; their tokens are not looked at."""
  return types.Prompts(np.asarray(ids), None, None)


def test_rounds_follow_until_the_seats_are_full_or_extra_rounds_are_spent(monkeypatch):
  # Step 0: rounds 0 to 2 give 0, 1 and 1 groups that teach; step 1 is full at once,
  # step 2 after a second round (its surplus is dropped), step 3 spends all three for
  # one seat.
  script = [(0, 8), (4, 0), (0, 3), (1, 7), (8, 2), (5, 6), (0, 0), (0, 3), (8, 0)]
  fake = Fake(monkeypatch, script, steps=4, **EXTRA)
  steps = fake.loop()
  assert fake.rounds == list(range(9))
  assert [row['rollout/rounds'] for _, row in steps] == [3, 1, 2, 3]
  assert [s.prompt_round for s, _ in steps] == [3, 4, 6, 9]
  assert [s.responses for s, _ in steps] == [48, 64, 96, 144]
  assert [row['rollout/responses'] for _, row in steps] == [48, 64, 96, 144]
  taught = [groups.id_P[source_P >= 0].tolist() for groups, source_P in fake.batches]
  assert taught == [[2, 5], [6, 7], [9, 10], [15]]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('seed', 'oldest', 'interval'), [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 2, 1)]
)
def test_no_token_is_older_than_promised_whatever_the_rounds(
  seed, oldest, interval, warm, one_device
):
  # A step of three rounds submits three times the prompts that a step of one returns.
  knobs = EXTRA | {
    'rollout.max_off_policy_steps': oldest,
    'rollout.weight_sync_interval': interval,
    'rollout.max_tokens_per_step': 4.0,
    'prompts.count': 1,
    'sampler.group_size': 16,
    'learner.minibatches': 1,
    'steps': 10,
    'evaluate.every': 99,
    'checkpoint.keep': 99,
  }
  config = tiny(seed=seed, **knobs)
  workdir = warm('whole')
  assert experiment.train(config, str(workdir)) == 0
  whole = last_run(workdir)
  rows = [row for step, row in whole.rows.items() if step]
  rounds = [float(row['rollout/rounds']) for row in rows]
  ages = [float(row['rollout/age_max']) for row in rows]
  assert min(rounds) < 3 == max(rounds) and max(ages) > 0, 'or nothing is tested'
  assert max(ages) <= oldest + interval - 1, ages
  submitted_W = whole.arrays['partial/host/submitted_W']
  assert (submitted_W[submitted_W >= 0] > 9 - oldest).all(), 'all that is due is out'
  if (seed, oldest, interval) == (0, 1, 1):  # stopped in between, the run is the same
    parts = str(warm('parts'))
    for steps in (5, 10):
      assert experiment.train(config.model_copy(update={'steps': steps}), parts) == 0
    resumed = last_run(parts)
    assert whole.scalars == resumed.scalars and same(whole.arrays, resumed.arrays)


def test_a_resumed_run_goes_on_with_the_next_round(monkeypatch):
  fake = Fake(monkeypatch, [(4, 4)] * 6, steps=2, **EXTRA)
  s, _ = fake.loop(prompt_round=4, responses=7)[-1]
  assert fake.rounds == [4, 5] and s.prompt_round == 6
  assert s.responses == 7 + 2 * P * G


def test_a_run_ends_with_its_responses(monkeypatch):
  fake = Fake(monkeypatch, [(4, 4)] * 9, steps=9, responses=2.5 * P * G)
  assert [s.responses for s, _ in fake.loop()] == [P * G, 2 * P * G, 3 * P * G]


def test_reevaluated_responses_count_and_empty_rows_do_not(monkeypatch):
  fake = Fake(monkeypatch, [(4, 4)] * 2, steps=2, **HARD, **{'buffer.reevaluate': 3})
  # Two hard problems are in the buffer for three seats: 2 + 2 groups per step.
  assert [s.responses for s, _ in fake.loop()] == [32, 64]


def test_hard_problems_are_reevaluated_when_due(monkeypatch):
  knobs = HARD | {'buffer.reeval_interval': 2}
  fake = Fake(monkeypatch, [(4, 4)] * 4, steps=4, **knobs)
  fake.loop()
  reevaluated = [key for _, key, _ in fake.rollouts if key.startswith('reevaluate')]
  assert reevaluated == ['reevaluate 0', 'reevaluate 2']


def test_fresh_groups_are_the_actors_and_reevaluated_ones_the_current_weights(
  monkeypatch,
):
  knobs: dict[str, Any] = {'buffer.reevaluate': 2, 'rollout.weight_sync_interval': 3}
  fake = Fake(monkeypatch, [(4, 4)] * 5, steps=5, **HARD, **knobs)
  scored: list[tuple[str, int]] = []

  def recompute(params, groups, version, pictures):
    scored.append((params, version))
    return groups, types.LogpDiff(0.0, 0.0, 0)

  fake.trainer = dataclasses.replace(fake.trainer, recompute=recompute)
  monkeypatch.setattr(
    trainer.decode, 'params_of', lambda actor, *_: f'params of {actor}'
  )
  fake.loop()
  reevaluated = [r for r in fake.rollouts if r[1].startswith('reevaluate')]
  fresh = [r for r in fake.rollouts if r[1].startswith('fresh')]
  for step in range(5):
    actor = step - step % 3
    params, key, keywords = fresh[step]
    assert params == f'copy of weights {actor}' and key == f'fresh {step}'
    assert (keywords['step'], keywords['policy_version']) == (step, actor)
    params, key, keywords = reevaluated[step]
    assert params == f'copy of weights {step}' and key == f'reevaluate {step}'
    # Scored by the learner's layout of the weights that sampled.
    weights = f'weights {step}'
    lagged = weights if actor == step else f'params of copy of weights {actor}'
    assert scored[2 * step : 2 * step + 2] == [(weights, step), (lagged, actor)]
    assert (keywords['step'], keywords['policy_version']) == (step, step)


@pytest.mark.parametrize(('interval', 'freed'), [(1, [0, 1, 2, 3, 4]), (3, [2])])
def test_an_actor_that_the_next_step_replaces_is_freed_before_the_updates(
  monkeypatch, interval, freed
):
  knobs = {'rollout.weight_sync_interval': interval}
  fake = Fake(monkeypatch, [(4, 4)] * 5, steps=5, **knobs)
  actors, found = [], []

  def sync_actor(*_):
    actors.append({'w': jnp.ones(3)})
    return actors[-1]

  def update(params, opt, groups, source_P, key, **_):
    found.append(actors[-1]['w'].is_deleted())
    return fake.update(params, opt, groups, source_P, key)

  monkeypatch.setattr(trainer.decode, 'sync_actor', sync_actor)
  monkeypatch.setattr(trainer.learner, 'update', update)
  states = [s for s, _ in fake.loop()]
  assert [i for i, gone in enumerate(found) if gone] == freed
  assert [i for i, s in enumerate(states) if s.actor is None] == freed


def test_skipped_updates_are_counted_over_steps(monkeypatch):
  # A minibatch without a token is neither made nor skipped, and ends no row of skips.
  updates = [
    [MADE, SKIPPED],
    [EMPTY, SKIPPED, EMPTY, SKIPPED],
    [SKIPPED, MADE],
    [],
    [SKIPPED] * 2,
  ]
  fake = Fake(monkeypatch, [(4, 4)] * 5, updates.__getitem__, steps=5)
  steps = fake.loop(updates=7)
  assert [s.consecutive_skips for s, _ in steps] == [1, 3, 0, 0, 2]
  assert [s.updates for s, _ in steps] == [8, 8, 9, 9, 9]
  assert [row['learner/updates'] for _, row in steps] == [8, 8, 9, 9, 9]
  assert step_metrics.consecutive_skips(5, []) == 5


def test_a_step_without_an_update_has_the_metrics_of_its_rollouts_alone():
  # No seat is filled: no loss, no share, no skipped update to report.
  groups = making.groups([1, 2], [0, 8], [3, 3])
  found = step_metrics.describe(
    groups,
    types.empty_groups(0, G, T),
    groups,
    np.asarray([-1, -1]),
    replay_buffer.init(1, G, T),
    3,
    [],
    np.asarray([1]),
  )
  assert found['rollout/accuracy'] == 0.5 and found['batch/filled'] == 0
  of_updates = {n: x for n, x in found.items() if n.split('/')[0] in ('loss', 'clip')}
  assert of_updates and all(np.isnan(x) for x in of_updates.values())
  assert found['learner/tokens'] == found['learner/skipped'] == 0


def test_steps_without_anything_to_learn_are_counted_in_a_row(monkeypatch):
  # Groups of 8: 0 and 8 right are of one reward each, 3 right is not.
  script = [(0, 8), (8, 8), (0, 3), (0, 0)]
  knobs = EXTRA | {'batch.max_extra_rounds': 0}
  steps = Fake(monkeypatch, script, steps=4, **knobs).loop(idle_steps=4)
  assert [s.idle_steps for s, _ in steps] == [5, 6, 0, 1]
  assert [row['learner/idle_steps'] for _, row in steps] == [5, 6, 0, 1]


@pytest.mark.parametrize('group_size', [4, 8])
def test_responses_are_numbered_through_the_rounds(group_size, monkeypatch):
  script = [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2)]
  fake = Fake(monkeypatch, script, group_size=group_size, steps=3, **EXTRA)
  fake.loop()
  first = [keywords['first_uid'] for _, _, keywords in fake.rollouts]
  assert first == [P * group_size * prompt_round for prompt_round in range(5)]


def test_theory_golden():
  # Three of four filled seats are fresh, one is reused. Fresh: gain 0.5, K = 1,
  # TV(pi, alpha) 0.1 on average, 0.02 at the first update: 3/4 of 0.5 - 2 x 1 x 0.1 -
  # 2 x 0.02 = 0.26. Reused, which the first update lacks: a quarter of 0.3 -
  # 2 x 3 x 0.2 - 2 x 0.15 = -1.2. Re-evaluated: none, no evidence.
  nan = float('nan')
  of = types.SOURCES
  row = dict(zip((f'loss/gain_{s}' for s in of), (0.5, nan, 0.3), strict=True))
  row |= zip((f'loss/tv_{s}' for s in of), (0.1, nan, 0.2), strict=True)
  row |= zip((f'batch/{s}' for s in of), (3 / 8, 0, 1 / 8), strict=True)
  row['batch/filled'] = 4 / 8
  updates = [
    dict(zip((f'loss/tv_{s}' for s in of), tv, strict=True))
    for tv in ((0.02, nan, nan), (0.12, nan, 0.15), (0.16, nan, 0.25))
  ]
  spread = dict(zip(of, (1.0, nan, 3.0), strict=True))
  found = step_metrics.theory(row, updates, spread)
  expected = {
    'theory/gain_fresh': 0.375,
    'theory/moved_fresh': 0.15,
    'theory/stale_fresh': 0.03,
    'theory/gain_reevaluated': 0,
    'theory/moved_reevaluated': 0,
    'theory/stale_reevaluated': 0,
    'theory/gain_reused': 0.075,
    'theory/moved_reused': 0.3,
    'theory/stale_reused': 0.075,
    'theory/estimate': 0.75 * 0.26 - 1.2 / 4,
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
  # A number that is missing from a source with evidence is not dropped.
  broken = step_metrics.theory(row | {'loss/gain_reused': nan}, updates, spread)
  assert np.isnan(broken['theory/estimate'])
