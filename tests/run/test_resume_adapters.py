"""What a checkpoint of adapters has, and what a finished run may leave out."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
import runs
from pictured import DRAWN
from rich.console import Console
from runs import last_run, one_device, tiny

from bapo_jax import sharding
from bapo_jax.models import lora, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.run import resume
from bapo_jax.runtime import metrics
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools import eval_checkpoint, export, viewer
from bapo_jax.training import build, checkpoint, inputs, policy


@pytest.fixture(scope='module')
def resumed(adapter_run):
  """Returns (trainer, state at step 0, state after the last step) of the adapters."""
  config, workdir, verifier = adapter_run
  with one_device():
    t, s = build.start(config, str(workdir), PhaseTimer(), verifier())
    with checkpoint.manager(str(workdir), 9, 1) as checkpoints:
      return t, s, resume.resume(checkpoints, t, s)[0]


def test_a_checkpoint_of_adapters_has_no_other_weight(adapter_run, resumed):
  for step in range(1, adapter_run.config.steps + 1):
    arrays = last_run(adapter_run.workdir, step).arrays
    names = [name for name in arrays if not name.startswith(('buffer', 'partial'))]
    assert {name.rpartition('/')[2] for name in names} <= {'a', 'b', 'count'}
    # The older adapters that decode the next step.
    assert any(name.startswith('actor') for name in names) == bool(step % 2)
  _, first, last = resumed
  for path, adapter in transformer.flatten(first.params).items():
    assert not np.array_equal(transformer.flatten(last.params)[path].b, adapter.b)


def test_adapters_are_read_merged_into_the_model(adapter_run, resumed):
  config, workdir, _ = adapter_run
  t, _, last = resumed
  read = policy.reader(config, inputs.open_model(config), str(workdir), 4)
  for path, w in transformer.flatten(lora.merge(t.weights(last.params))).items():
    np.testing.assert_array_equal(read(path), w)


def test_adapters_of_other_frozen_weights_are_refused(adapter_run, resumed):
  t, s, _ = resumed
  other = jax.tree.map(jnp.copy, t.base)
  embed = other['embed']
  other['embed'] = embed.at[1, 2].set(jnp.nextafter(embed[1, 2], jnp.float32(9)))
  t = dataclasses.replace(t, base=other)
  with (
    checkpoint.manager(str(adapter_run.workdir), 9, 1) as checkpoints,
    pytest.raises(ValueError, match=r'frozen weights.*model\.path'),
  ):
    resume.resume(checkpoints, t, s)


def test_a_fingerprint_is_of_the_numbers_and_their_places():
  rng = np.random.default_rng(0)
  a, b = jnp.asarray(rng.normal(size=(4, 8, 6)), jnp.float32), jnp.ones(3)
  found = policy.fingerprint({'a': a, 'b': b})
  assert found == policy.fingerprint({'a': jnp.copy(a), 'b': jnp.copy(b)})
  swapped = a.at[0, 0, 0].set(a[3, 7, 5]).at[3, 7, 5].set(a[0, 0, 0])
  turned, narrow = a.reshape(8, 4, 6).reshape(4, 8, 6)[::-1], a.astype(jnp.bfloat16)
  others = [{'a': x, 'b': b} for x in (swapped, turned, narrow)]
  others += [{'a': a, 'c': b}, {'a': a, 'b': -b}]
  assert len({found, *map(policy.fingerprint, others)}) == 6
  mesh = jax.make_mesh((4, 2), ('x', 'y'))
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x', None, 'y'))
  assert policy.fingerprint({'a': jax.device_put(a, layout), 'b': b}) == found
  assert policy.fingerprint(None) == ''


def test_a_finished_run_may_leave_its_optimiser_out(whole_run, tmp_path):
  workdir = runs.truncated(whole_run, tmp_path / 'run', 3)
  knobs = runs.RECORDED['whole'] | {'checkpoint.final': 'weights'}
  assert runs.train(tiny(**knobs), workdir) == 0
  names = set(last_run(workdir).arrays)
  assert 'params/embed' in names
  assert not any(name.startswith(('opt', 'actor')) for name in names)
  with pytest.raises(ValueError, match=r'checkpoint\.final'):
    runs.train(tiny(**knobs | {'steps': 5}), workdir)


# ------------- runs on drawn pictures: trained weights, export, evaluation, the viewer


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
