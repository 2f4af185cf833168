"""Runs on drawn pictures: trained weights, export, evaluation, the viewer."""

import io
import json

import jax.numpy as jnp
import making
import numpy as np
import pytest
import runs
from pictured import DRAWN
from rich.console import Console
from runs import last_run, tiny

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.runtime import metrics
from bapo_jax.tools import eval_checkpoint, export, viewer
from bapo_jax.training import build, checkpoint, policy

CELLS = {
  'fixed': {'batch.rule': 'fresh_only', 'clip.rule': 'fixed'},
  'adapters': {'lora.rank': 2},
  'trained tower': {'model.train_tower': True, 'optimizer.lr': 1e-2},
  'bfloat16': {'model.dtype': 'bfloat16', 'optimizer.lr': 1e-2},
}


@pytest.mark.nightly
@pytest.mark.parametrize('cell', CELLS)
def test_pictures_train_the_weights_that_are_not_frozen(cell, tmp_path):
  knobs = {'steps': 2, 'evaluate.every': 9} | CELLS[cell]
  trained = runs.Recorded(tiny(**DRAWN | knobs), tmp_path / 'run', making.OddVerifier)
  assert runs.train(*trained) == 0
  saved = last_run(trained.workdir)
  assert saved.scalars['updates'] > 0
  names = [name.split('/') for name in saved.arrays]
  parts = {part for kind, part, *_ in names if kind == 'params'}
  tower = {'vision'} if trained.config.model.train_tower else set()
  texts = {'layers'} if trained.config.lora.rank else {'embed', 'final_norm', 'layers'}
  assert parts == texts | tower
  (last,) = [row for row in metrics.read(str(trained.workdir)) if row['step'] == 2]
  # The sampler's log-probabilities are the learner's, pictures included: sums of some
  # ten float32 terms of size 10, and 25 times that.
  if trained.config.model.dtype == 'float32':
    assert last['rollout/logp_diff_max'] < 1e-4
  if not trained.config.lora.rank:
    assert_exported(trained, tmp_path / 'out')


def test_a_run_on_pictures_is_exported(pictured_run, tmp_path):
  assert_exported(pictured_run, tmp_path / 'out')


def test_a_run_on_pictures_is_evaluated_again_and_without_pictures(
  pictured_run, tmp_path, one_device, monkeypatch
):
  monkeypatch.setattr(build, 'make_verifier', lambda config: making.OddVerifier())
  config, workdir, _ = pictured_run
  before = json.loads((workdir / 'eval' / '4.json').read_text())['samples']
  blank = tiny(**runs.RECORDED['pictures'], **{'problems.drawn.kind': 'blank'})
  samples = []
  for name, made in (('same', config), ('blank', blank)):
    to = str(tmp_path / name)
    assert eval_checkpoint.eval_checkpoint(made, str(workdir), to) == 0
    lines = (tmp_path / f'{name}.jsonl').read_text().splitlines()
    samples.append([json.loads(line) for line in lines])
  assert samples[0][0]['prompt'].startswith('(<image> x 16)x')
  for now, then in zip(samples[0], before, strict=True):
    assert now['response'] == then['response'] and now['logp'] == then['logp']
  assert [x['logp'] for x in samples[1]] != [x['logp'] for x in samples[0]]


def test_groups_with_pictures_are_shown(pictured_run, one_device):
  workdir = pictured_run.workdir
  for number in (1, 2):
    console = Console(file=io.StringIO(), width=500, _environ={})
    viewer.show(str(workdir), number, 'pc', console=console)
    shown = console.file.getvalue()
    assert '(<image> x 16)x' in shown and 'picture: ' in shown and '⟨.' in shown


def assert_exported(run, to):
  """The exported weights are those of the checkpoint; a frozen tower's of the start."""
  made, path, _ = run
  assert export.export(made, str(path), str(to), 'float32', 10**9) == 0
  spec = hf_config.read_spec(str(to), 'float32')
  found = transformer.flatten(hf_weights.load(str(to), spec, sharding.make(data=8)))
  assert set(found) == set(transformer.describe(spec))
  start = checkpoint.read_saved(policy.warm_start_path(made, str(path)))
  saved = last_run(path).arrays
  part = 'params' if made.model.dtype == 'float32' else 'opt/master'
  for name, array in found.items():
    frozen = name.startswith('vision/') and not made.model.train_tower
    expected = start(name) if frozen else saved[f'{part}/{name}']
    if frozen and not name.endswith('norm'):  # the run computes with it as rounded
      expected = jnp.asarray(expected).astype(made.model.dtype)
    np.testing.assert_array_equal(array, np.asarray(expected, np.float32), name)
    assert frozen or not np.array_equal(expected, start(name)), f'{name} is trained'
