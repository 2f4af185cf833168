"""The loop without a model: rounds, counters, whose weights speak, theory."""

import making
import numpy as np
import pytest

from bapo_jax import types
from bapo_jax.algorithms import batch_rules, replay_buffer
from bapo_jax.training import setup, trainer

P, G, T = 2, 8, 3


class Fake:
  """A job whose rollouts give what a script says, and which notes what was called.

  Args:
    script: round -> right answers of its P groups.
    reevaluated: problems that are asked again in a step.
    lag: steps between copies to the actor.
    told: step -> what its updates told.
  """

  def __init__(self, script, steps, refills=0, reevaluated=0, lag=1, told=None):
    self.rollouts, self.asked, self.batches = [], [], []
    self.script, self.told = script, told or (lambda step: [{'learner/skipped': 0.0}])
    self.job = trainer.Trainer(
      done=lambda run: run.step >= steps,
      ask=self.ask,
      again=lambda ids: types.Prompts(np.asarray(ids), None, None),
      rollout=self.rollout,
      speak=lambda params: f'copy of {params}',
      stale=lambda step: step % lag == 0,
      reevaluated=lambda step: reevaluated,
      refills=refills,
      batch_rule=lambda *args: batch_rules.learnable_only(*args, P),
      update=self.update,
      shelve=lambda buffer, *_: (buffer, {'buffer/entered': 0}),
      describe=lambda *_: {},
      keys=lambda step: [f'{name} {step}' for name in ('fresh', 'again', 'fill', 'up')],
      evaluate=None,
      spec=None,
    )

  def ask(self, asked):
    self.asked.append(asked)
    return types.Prompts(np.arange(P) + P * asked, None, None)

  def rollout(self, params, prompts, key, **when):
    ids = prompts.id_P
    self.rollouts.append((params, key, when))
    right = [0] * len(ids) if key.startswith('again') else self.script[when['asked']]
    borns = np.where(ids < 0, -1, when['step'])
    return making.groups(ids, right, borns, G, T)

  def update(self, params, opt, groups, source_P, key):
    self.batches.append((groups, source_P))
    step = int(key.split()[1])
    return f'weights {step + 1}', opt, self.told(step)

  def run(self, **given):
    buffer = replay_buffer.init(4, G, T)
    buffer = buffer._replace(
      hard=making.groups([90, 91, -1, -1], [0] * 4, [3, 4, -1, -1], 1, 1)
    )
    return trainer.TrainState(0, 'weights 0', None, 'none', -1, buffer, **given)


def test_rounds_are_asked_until_the_seats_are_full_or_refills_are_spent():
  # Step 0: rounds 0 to 2 give 0, 1 and 1 groups that teach; step 1 is full at once,
  # step 2 after a refill (its surplus is dropped), step 3 spends both for one seat.
  script = [(0, 8), (4, 0), (0, 3), (1, 7), (8, 2), (5, 6), (0, 0), (0, 3), (8, 0)]
  fake = Fake(script, steps=4, refills=2)
  runs = list(trainer.train_loop(fake.job, fake.run()))
  assert fake.asked == list(range(9))
  assert [told['rollout/rounds'] for _, told in runs] == [3, 1, 2, 3]
  assert [run.asked for run, _ in runs] == [3, 4, 6, 9]
  assert [run.responses for run, _ in runs] == [48, 64, 96, 144]
  assert [told['rollout/responses'] for _, told in runs] == [48, 64, 96, 144]
  taught = [groups.id_P[source_P >= 0].tolist() for groups, source_P in fake.batches]
  assert taught == [[2, 5], [6, 7], [9, 10], [15]]


def test_a_resumed_run_asks_the_next_round():
  script = [(4, 4)] * 6
  fake = Fake(script, steps=2, refills=2)
  run, _ = list(trainer.train_loop(fake.job, fake.run(asked=4, responses=7)))[-1]
  assert fake.asked == [4, 5] and run.asked == 6
  assert run.responses == 7 + 2 * P * G


def test_rechecked_responses_count_and_empty_rows_do_not():
  fake = Fake([(4, 4)] * 2, steps=2, reevaluated=3)
  runs = list(trainer.train_loop(fake.job, fake.run()))
  # Two problems are on the shelf for three seats: 2 + 2 groups a step.
  assert [run.responses for run, _ in runs] == [32, 64]


def test_fresh_groups_are_the_actors_and_rechecked_ones_the_current_weights():
  fake = Fake([(4, 4)] * 5, steps=5, reevaluated=2, lag=3)
  list(trainer.train_loop(fake.job, fake.run()))
  again = [r for r in fake.rollouts if r[1].startswith('again')]
  fresh = [r for r in fake.rollouts if r[1].startswith('fresh')]
  for step in range(5):
    actor = step - step % 3
    params, key, when = fresh[step]
    assert params == f'copy of weights {actor}' and key == f'fresh {step}'
    assert (when['step'], when['born'], when['asked']) == (step, actor, step)
    params, _, when = again[step]
    assert params == f'copy of weights {step}'
    assert (when['step'], when['born']) == (step, step)


def test_skipped_updates_are_counted_over_steps():
  lost, good = {'learner/skipped': 1.0}, {'learner/skipped': 0.0}
  told = [[good, lost], [lost, lost], [lost, good], [lost, lost]]
  fake = Fake([(4, 4)] * 4, steps=4, told=lambda step: told[step])
  runs = list(trainer.train_loop(fake.job, fake.run()))
  assert [run.skipped for run, _ in runs] == [1, 3, 0, 2]
  assert trainer.consecutive_skips(5, []) == 5


@pytest.mark.parametrize('group', [4, 8])
def test_responses_are_numbered_through_the_rounds(group):
  numbers = []

  def sample(params, problems, prompts, key, *, group, first, **_):
    numbers.extend(range(first, first + group * len(prompts.id_P)))

  prompts = types.Prompts(np.arange(3), None, None)
  for asked in range(5):
    when = dict(asked=asked, step=asked // 2, policy_version=0)
    setup._ask_group(sample, None, group, {}, None, prompts, None, **when)
  assert numbers == list(range(5 * 3 * group))


def test_theory_golden():
  # Fresh: gain 0.5, K = 1, TV(pi, alpha) 0.1 on average, 0.02 at the first update:
  # 0.5 - 2 x 1 x 0.1 - 2 x 0.02 = 0.26. Reused: 0.3 - 2 x 3 x 0.2 - 2 x 0.15 = -1.2.
  # Rechecked: none, so it adds nothing to the sum.
  nan = float('nan')
  of = ('fresh', 'reevaluated', 'reused')
  mean = dict(zip((f'loss/gain_{s}' for s in of), (0.5, nan, 0.3), strict=True))
  mean |= zip((f'loss/tv_{s}' for s in of), (0.1, nan, 0.2), strict=True)
  first = dict(zip((f'loss/tv_{s}' for s in of), (0.02, nan, 0.15), strict=True))
  told = trainer.theory(mean, first, dict(zip(of, (1.0, nan, 3.0), strict=True)))
  expected = {
    'theory/gain_fresh': 0.5,
    'theory/moved_fresh': 0.2,
    'theory/stale_fresh': 0.04,
    'theory/gain_rechecked': nan,
    'theory/moved_rechecked': nan,
    'theory/stale_rechecked': nan,
    'theory/gain_reused': 0.3,
    'theory/moved_reused': 1.2,
    'theory/stale_reused': 0.3,
    'theory/bound': 0.26 - 1.2,
  }
  assert told.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(told[name], value, rtol=1e-6, err_msg=name)
