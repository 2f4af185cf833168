"""Prompts with and without pictures in one batch, sampled as the learner scores."""

import functools
import json

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
import runs
from pictured import DRAWN, SEEING, forward, problems
from runs import last_run, tiny

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime import ahead, metrics
from bapo_jax.tools import eval_checkpoint, export
from bapo_jax.training import build, inputs
from bapo_jax.types import Pictures

G, NEW, TEMPERATURE, EOS = 2, 7, 0.7, (3, 7)
PROMPTS, GALLERY = problems()
P, WIDTH = PROMPTS.tokens_PT.shape
UID_B = np.arange(P * G, dtype=np.uint32) + 100
KEY = jax.random.key(10)
PARAMS = making.params(SEEING)
ACTOR = decoder.actor(PARAMS, SEEING)
KNOBS = {
  'group_size': G,
  'max_new_tokens': NEW,
  'temperature': TEMPERATURE,
  'eos': EOS,
  'max_num_seqs': 4,
  'prefill_batch_size': 3,
  'tokens_per_dispatch': 4,
  'gallery': GALLERY,
}


def rollouts(**changes) -> PartialRollouts:
  engine = RolloutEngine(SEEING, max_prompt_tokens=WIDTH, **KNOBS | changes)
  found = PartialRollouts(engine, P)
  found.submit(PROMPTS, UID_B)
  return found


def of_rows() -> Pictures:
  """The pictures of every response."""
  return GALLERY.of(np.repeat(PROMPTS.id_P, G))


@functools.partial(jax.jit, static_argnames='temperature')
def logits(params, tokens_BT, pictures, temperature):
  hidden_BTD = forward(params, tokens_BT, pictures, SEEING)
  return hidden_BTD @ transformer.head(params).T / temperature


def logp_of(params, tokens_BT):
  """Log-probabilities [B, T] of whole rows, without a cache; 0 in column 0."""
  logp_BTV = jax.nn.log_softmax(logits(params, tokens_BT, of_rows(), TEMPERATURE))
  next_BT1 = jnp.roll(tokens_BT, -1, 1)[..., None]
  return jnp.roll(jnp.take_along_axis(logp_BTV, next_BT1, 2)[..., 0], 1, 1)


@pytest.fixture(scope='module')
def sampled():
  run = rollouts()
  run.decode(ACTOR, KEY)
  return jax.tree.map(np.asarray, run.rows)


def test_recorded_logp_is_that_of_whole_rows(sampled):
  mask_BT = sampled.response_mask_BT
  assert (mask_BT.any(1)).all() and len({tuple(x) for x in sampled.tokens_BT}) > P
  wanted_BT = logp_of(PARAMS, sampled.tokens_BT)
  np.testing.assert_allclose(sampled.logp_BT[mask_BT], wanted_BT[mask_BT], atol=1e-5)


def test_the_text_depends_on_the_pictures(sampled):
  blank = rollouts()
  blank.id_W[:] = -1
  blank.decode(ACTOR, KEY)
  seen_B = np.repeat([bool(row.pictures) for row in GALLERY.rows], G)
  same_B = (np.asarray(blank.rows.logp_BT) == sampled.logp_BT).all(1)
  np.testing.assert_array_equal(same_B, ~seen_B)


def test_eight_devices_sample_the_same(sampled):
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  run = rollouts(mesh=mesh, max_num_seqs=8, prefill_batch_size=4)
  placed = jax.device_put(PARAMS, sharding.shardings(PARAMS, mesh))
  actor = decode.sync_actor(placed, SEEING, mesh)
  run.decode(actor, KEY, max_tokens=3)
  run.refresh(actor)
  run.decode(actor, KEY)
  np.testing.assert_array_equal(run.rows.tokens_BT, sampled.tokens_BT)
  np.testing.assert_allclose(run.rows.logp_BT, sampled.logp_BT, atol=1e-5)


def test_every_shape_is_compiled_at_the_start(compiled):
  run = rollouts()
  jax.clear_caches()
  kept = ahead.compile_all(run.engine.programs(ACTOR, places=P))
  compiled.clear()
  run.decode(ACTOR, KEY, max_tokens=3)
  run.refresh(ACTOR)
  run.decode(ACTOR, KEY)
  assert kept and compiled == []


# ------------------------- runs on drawn pictures: trained weights, export, evaluation


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


def test_a_run_on_pictures_trains_with_them_and_is_exported(pictured_run, tmp_path):
  # A minibatch with the pictures of other groups would have other log-probabilities.
  rows = metrics.read(str(pictured_run.workdir))[1:]
  diffs = [row['rollout/logp_diff_max'] for row in rows]
  assert 0 < np.nanmax(diffs) < 1e-4
  assert_exported(pictured_run, tmp_path / 'out')


def test_a_run_on_pictures_is_evaluated_again_and_without_pictures(
  pictured_run, tmp_path, one_device, monkeypatch
):
  monkeypatch.setattr(build, 'make_verifier', lambda config: making.OddVerifier())
  config, workdir, _ = pictured_run
  before = json.loads((workdir / 'eval' / '4.json').read_text())['samples']
  blank = tiny(**runs.RECORDED['pictures'], **{'problems.custom.kind': 'blank'})
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


def assert_exported(run, to):
  """The exported weights are those of the checkpoint; a frozen tower's of the start."""
  made, path, _ = run
  assert export.export(made, str(path), str(to), 'float32') == 0
  spec = hf_config.read_spec(str(to), 'float32')
  found = transformer.flatten(hf_weights.load(str(to), spec, sharding.make(data=8)))
  assert set(found) == set(transformer.describe(spec))
  start = hf_weights.reader(inputs.resolve(made), spec)
  saved = last_run(path).arrays
  part = 'params' if made.model.dtype == 'float32' else 'opt/master'
  for name, array in found.items():
    frozen = name.startswith('vision/') and not made.model.train_tower
    expected = start(name) if frozen else saved[f'{part}/{name}']
    if frozen and not name.endswith('norm'):  # the run computes with it as rounded
      expected = jnp.asarray(expected).astype(made.model.dtype)
    np.testing.assert_array_equal(array, np.asarray(expected, np.float32), name)
    assert frozen or not np.array_equal(expected, start(name)), f'{name} is trained'
