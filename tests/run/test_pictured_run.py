"""Whole runs on drawn pictures: the four cells, interrupted and resumed, one bit alike.

One warm start of two steps serves all, and a verdict that any text may earn: there is
something to learn at once. What is trained is then exported, evaluated and shown.
"""

import io
import json
import shutil
import signal

import jax.numpy as jnp
import making
import numpy as np
import pytest
from pictured import DRAWN
from rich.console import Console
from runs import last_run, one_device, same, tiny

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.run import experiment
from bapo_jax.runtime import metrics
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools import eval_checkpoint, export, viewer
from bapo_jax.training import build, policy, resolve, weights

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
    material = build.read(made, resolve.open_model(made), str(path))
    policy.load(
      made, str(path), material.tokenizer, resolve.make_mesh(made), PhaseTimer()
    )
  return path


@pytest.fixture(autouse=True)
def easy(monkeypatch):
  """Responses of an odd number of characters are right."""
  monkeypatch.setattr(build, 'make_verifier', lambda config: making.OddVerifier())


def config_of(**knobs):
  return tiny(**DRAWN | {'evaluate.every': 9} | knobs)


def train(warm, path, status=0, **knobs):
  """The run in a copy of the warm start, or as it goes on there."""
  if not path.exists():
    shutil.copytree(warm, path)
  with one_device():
    assert experiment.train(config_of(**knobs), str(path)) == status
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
def test_a_resumed_run_is_the_run_to_the_last_bit(warm, tmp_path, monkeypatch):
  knobs = CELLS['both'] | PARTIAL | {'steps': 4}
  whole = last_run(train(warm, tmp_path / 'whole', **knobs))
  train(warm, tmp_path / 'parts', **knobs | {'steps': 1})
  # The end of a reservation, in the midst of step 3.
  line = metrics.line
  monkeypatch.setattr(
    metrics,
    'line',
    lambda step, *row: (
      (step == 3 and signal.raise_signal(signal.SIGTERM)) or line(step, *row)
    ),
  )
  train(warm, tmp_path / 'parts', 128 + signal.SIGTERM, **knobs)
  assert last_run(tmp_path / 'parts').scalars['step'] == 3
  parts = last_run(train(warm, tmp_path / 'parts', **knobs))
  assert whole.scalars == parts.scalars and whole.scalars['updates'] > 0
  assert same(whole.arrays, parts.arrays)
  assert whole.arrays['partial/slots/shift_S'].any()
  for step, row in whole.rows.items():
    ended = parts.rows[step]  # the first part ends with an evaluation
    assert row == {name: ended[name] for name in row}


@pytest.mark.slow
@pytest.mark.parametrize(
  'knobs',
  [{}, {'model.train_tower': True}, {'model.dtype': 'bfloat16'}],
  ids=['frozen tower', 'trained tower', 'frozen tower, bfloat16'],
)
def test_what_was_trained_is_exported_evaluated_and_shown(warm, tmp_path, knobs):
  knobs = CELLS['both'] | {'steps': 2, 'optimizer.lr': 1e-2} | knobs
  path, made = train(warm, tmp_path / 'run', **knobs), config_of(**knobs)
  assert_exported(path, made, tmp_path / 'out')
  if 'model.dtype' in knobs:
    return
  # Evaluated as the run did, and on the same problems with empty pictures.
  before = json.loads((path / 'eval' / '2.json').read_text())['samples']
  blank = config_of(**knobs | {'problems.drawn.kind': 'blank'})
  for config in (made, blank):
    with one_device():
      assert eval_checkpoint.eval_checkpoint(config, str(path), '') == 0
  (first, second) = (
    [json.loads(line) for line in file.read_text().splitlines()]
    for file in sorted(
      (path / 'eval').glob('2-*.jsonl'), key=lambda x: x.stat().st_mtime
    )
  )
  assert first[0]['prompt'].startswith('(<image> x 16)x')
  for now, then in zip(first, before, strict=True):
    assert now['response'] == then['response'] and now['logp'] == then['logp']
  assert [x['logp'] for x in second] != [x['logp'] for x in first]
  # The first group was trained on; the second is of the buffer.
  with one_device():
    for number in (1, 2):
      console = Console(file=io.StringIO(), width=500, _environ={})
      assert viewer.show(str(path), number, 'pc', console) == 0
      shown = console.file.getvalue()
      assert '(<image> x 16)x' in shown and 'picture: ' in shown and '⟨.' in shown


def assert_exported(path, made, to):
  """The exported weights are those of the checkpoint; a frozen tower's of the start."""
  assert export.export(made, str(path), str(to), 'float32', 10**9) == 0
  spec = hf_config.read_spec(str(to), 'float32')
  found = transformer.flatten(hf_weights.load(str(to), spec, sharding.make(data=8)))
  assert set(found) == set(transformer.describe(spec))
  start = weights.read_saved(policy.warm_start_path(made, str(path)))
  saved = last_run(path).arrays
  part = 'params' if made.model.dtype == 'float32' else 'opt/master'
  for name, array in found.items():
    frozen = name.startswith('vision/') and not made.model.train_tower
    expected = start(name) if frozen else saved[f'{part}/{name}']
    if frozen and not name.endswith('norm'):  # the run computes with it as rounded
      expected = jnp.asarray(expected).astype(made.model.dtype)
    np.testing.assert_array_equal(array, np.asarray(expected, np.float32), name)
    assert frozen or not np.array_equal(expected, start(name)), f'{name} is trained'


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
