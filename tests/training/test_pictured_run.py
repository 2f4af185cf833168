"""Whole runs on drawn pictures: the four cells, interrupted and resumed, one bit alike.

One warm start of two steps serves all, and a verdict that any text may earn: there is
something to learn at once.
"""

import shutil

import making
import numpy as np
import pytest
from pictured import DRAWN
from runs import last_run, one_device, same, tiny

from bapo_jax.runtime import metrics
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import experiment, policy, setup

CELLS = {
  'grpo': {'batch.rule': 'fresh_only', 'clip.rule': 'fixed'},
  'batch_adaptation': {'batch.rule': 'adapted', 'clip.rule': 'fixed'},
  'balanced': {'batch.rule': 'fresh_only', 'clip.rule': 'balanced'},
  'both': {'batch.rule': 'adapted', 'clip.rule': 'balanced'},
}
PARTIAL = {'rollout.max_off_policy_steps': 1, 'rollout.max_tokens_per_step': 5}


@pytest.fixture(scope='module')
def warm(tmp_path_factory):
  """A workdir with the policy after its warm start."""
  path = tmp_path_factory.mktemp('warm')
  made = tiny(**DRAWN)
  with one_device():
    material = setup.read(made, str(path))
    policy.load(
      made, str(path), material.tokenizer, setup.make_mesh(made), PhaseTimer()
    )
  return path


@pytest.fixture(autouse=True)
def easy(monkeypatch):
  """Responses of an odd number of characters are right."""
  monkeypatch.setattr(setup, 'make_verifier', lambda config: making.OddVerifier())


def train(warm, path, **knobs):
  """The run in a copy of the warm start, or as it goes on there."""
  if not path.exists():
    shutil.copytree(warm, path)
  with one_device():
    assert (
      experiment.train(tiny(**DRAWN | {'evaluate.every': 9} | knobs), str(path)) == 0
    )
  return path


def trained(saved):
  """The parts of the weights that a checkpoint holds."""
  names = [name.split('/') for name in saved.arrays]
  return {part for kind, part, *_ in names if kind == 'params'}


@pytest.mark.slow
@pytest.mark.parametrize('cell', CELLS)
def test_the_cells_learn_from_pictures_and_leave_the_tower(warm, tmp_path, cell):
  path = train(warm, tmp_path / 'run', steps=2, **CELLS[cell])
  saved = last_run(path)
  assert saved.scalars['updates'] > 0
  assert trained(saved) == {'embed', 'final_norm', 'layers'}
  (last,) = [row for row in metrics.read(str(path)) if row['step'] == 2]
  # What the sampler recorded is what the learner computes, pictures and all.
  assert last['rollout/logp_diff_max'] < 1e-4


@pytest.mark.slow
def test_a_resumed_run_is_the_run_to_the_last_bit(warm, tmp_path):
  knobs = CELLS['both'] | PARTIAL
  whole = last_run(train(warm, tmp_path / 'whole', steps=3, **knobs))
  train(warm, tmp_path / 'parts', steps=2, **knobs)
  parts = last_run(train(warm, tmp_path / 'parts', steps=3, **knobs))
  assert whole.scalars == parts.scalars and whole.scalars['updates'] > 0
  assert same(whole.arrays, parts.arrays)
  assert whole.arrays['partial/slots/shift_S'].any()


@pytest.mark.slow
def test_a_tower_is_trained_where_it_is_asked_for(warm, tmp_path):
  path = train(warm, tmp_path / 'run', steps=2, **{'model.train_tower': True})
  patch = [last_run(path, step).arrays['params/vision/patch'] for step in (1, 2)]
  assert not np.array_equal(*patch)


@pytest.mark.slow
def test_adapters_are_trained_beside_a_frozen_tower(warm, tmp_path):
  path = train(warm, tmp_path / 'run', steps=2, **{'lora.rank': 2})
  (last,) = [row for row in metrics.read(str(path)) if row['step'] == 2]
  assert last['rollout/logp_diff_max'] < 1e-4
  assert trained(last_run(path)) == {'layers'}
