"""What a step reports, and the precision of its products."""

import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import making
import pytest
import runs
from runs import tiny

from bapo_jax.runtime import exchange, metrics
from bapo_jax.runtime.glossary import OF_UPDATES
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, inputs, resolve, step_metrics, trainer


def test_sampler_and_learner_are_compared_under_the_same_weights(adapter_run):
  # In even steps the actor is a step behind weights that moved: nothing to compare.
  rows = metrics.read(str(adapter_run.workdir))[1:]
  assert all(row['loss/kl'] > 0 for row in rows[1::2])
  for name in ('rollout/logp_diff', 'rollout/logp_diff_max'):
    assert [math.isnan(row[name]) for row in rows] == [0, 1, 0, 1]
  for row in rows[::2]:
    assert 0 < row['rollout/logp_diff'] <= row['rollout/logp_diff_max'] < 1e-4


def test_the_updates_of_a_step_are_reduced_as_the_glossary_says():
  # The last update has no computed token; the second was skipped.
  series = {
    'moe/agree': [0.98, 0.9, 0.82, math.nan],
    'loss/entropy': [1.0, 4.0, 2.5, math.nan],
    'loss/ratio_max': [2.0, 5.0, 3.0, math.nan],
    'loss/value': [1.0, 2.0, 3.0, 0.0],
    'rollout/logp_diff': [math.nan, 1.0, 1.0, math.nan],
    'learner/skipped': [False, True, False, False],
    'learner/tokens': [9.0, 9.0, 8.0, 5.0],
  }
  expected = {
    'moe/agree': 0.9,
    'moe/agree_first': 0.98,
    'loss/entropy': 2.5,
    'loss/entropy_change': 0.75,  # + 3, - 1.5
    'loss/ratio_max': 5,
    'loss/value': 1.5,
    'rollout/logp_diff': math.nan,
    'learner/skipped': 1,
    'learner/tokens': 31,
  }
  names = [name for name, metric in OF_UPDATES.items() if not metric.optional]
  ones = dict.fromkeys(names, 1.0)
  updates = [ones | {name: x[i] for name, x in series.items()} for i in range(4)]
  row = step_metrics.of_updates(updates)
  assert {name: row[name] for name in expected} == pytest.approx(expected, nan_ok=True)
  assert row.keys() == {*names, 'moe/agree', 'moe/agree_first'}
  nothing = step_metrics.of_updates([])
  assert nothing.keys() == set(names)  # a run without experts has no agreement
  counts = {name for name, x in nothing.items() if x == 0}
  assert counts == {'learner/skipped', 'learner/tokens', 'learner/tokens_computed'}
  assert all(math.isnan(nothing[name]) for name in {*names} - counts)


CONVERSIONS = ('__array__', '__bool__', '__float__', '__index__', '__int__', 'item')


@pytest.fixture
def conversions(monkeypatch):
  """Names of the methods by which scalars came from a device, in order."""
  scalar, calls = type(jnp.zeros(())), []

  def counted(name, convert):
    def call(array, *args, **kwargs):
      if array.ndim == 0:
        calls.append(name)
      return convert(array, *args, **kwargs)

    return call

  for name in CONVERSIONS:
    monkeypatch.setattr(scalar, name, counted(name, getattr(scalar, name)))
  return calls


def test_metrics_come_from_the_device_in_few_transfers(one_device, conversions):
  # Eight updates of 60 metrics each: one by one they cost more than a small step.
  knobs = {'learner.minibatches': 8, 'steps': 2, 'batch.rule': 'adapted'}
  t, s = build.start(tiny(**knobs), PhaseTimer(), making.OddVerifier())
  loop = trainer.train_loop(t, s)
  next(loop)
  conversions.clear()
  float(jnp.ones(()))
  assert conversions == ['__float__']  # the count works
  _, row, record = next(loop)
  assert len(record.updates) > 4
  assert len(row) > 60
  assert len(conversions) <= 20, conversions


def test_a_transfer_keeps_every_bit(conversions):
  values = {'b': True, 'a': 2**24 + 1, 'zero': -0.0}
  one = {name: jnp.asarray(value) for name, value in values.items()}
  other = {'only': jnp.float32(2.5)}
  found, only = exchange.fetched([one, other])
  assert not conversions
  assert (found['b'].dtype, bool(found['b'])) == (bool, True)
  assert found['a'] == 2**24 + 1  # not a float32
  assert math.copysign(1, found['zero']) == -1
  assert only == {'only': 2.5}


# ----- products have the precision that model.compute names, in every program of a run


SCRIPT = """
import sys, runs
from bapo_jax.run import experiment
small = {'sft.clean': 2, 'sft.noisy': 1, 'steps': 2, 'batch.rule': 'adapted'}
experiment.train(runs.tiny(**small), sys.argv[1])
"""
PRODUCT = re.compile('stablehlo.dot_general.*precision = .([A-Z]+), ([A-Z]+)')


@pytest.fixture
def restored():
  before = jax.config.jax_default_matmul_precision
  yield
  jax.config.update('jax_default_matmul_precision', before)


@pytest.mark.parametrize(
  ('compute', 'platform', 'precision'),
  [
    ('float32', 'cuda', 'HIGHEST'),
    ('tf32', 'gpu', 'HIGH'),
    ('float32', 'cpu', 'DEFAULT'),
  ],
)
def test_products_are_lowered_with_the_precision_of_the_run(
  compute, platform, precision, restored
):
  resolve.use_precision(compute, platform)
  text = jax.jit(jnp.matmul).lower(jnp.ones((2, 2)), jnp.ones((2, 2))).as_text()
  assert PRODUCT.search(text).groups() == (precision, precision)


@pytest.mark.parametrize(
  ('compute', 'dtype', 'when', 'again'),
  [
    ('float32', 'compute', None, False),
    ('tf32', 'compute', None, True),
    ('bfloat16', 'compute', None, True),
    ('bfloat16', 'compute', 'off', False),
    # A quantised actor is another policy than the learner's.
    ('bfloat16', 'int8', None, False),
    ('bfloat16', 'int8', 'on', True),
  ],
)
def test_auto_scores_again_unless_products_are_float32(compute, dtype, when, again):
  knobs = {'sampler.actor_dtype': dtype, 'learner.recompute_logprobs': when}
  config = runs.tiny(**knobs, **{'model.compute': compute})
  assert build.recomputes(config) == again
  spec = inputs.open_model(config).spec
  assert spec.compute == ('bfloat16' if compute == 'bfloat16' else 'float32')


def test_a_cpu_has_no_tf32(one_device):
  with pytest.raises(ValueError, match=r'model\.compute=tf32 needs a GPU or a TPU'):
    resolve.resolve(runs.tiny(**{'model.compute': 'tf32'}))


@pytest.mark.nightly
def test_no_product_of_a_run_has_another_precision(tmp_path):
  # A product with a precision of its own would ignore the default.
  (tmp_path / 'ir').mkdir()
  env = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': runs.FLAGS,
    'JAX_DUMP_IR_TO': str(tmp_path / 'ir'),
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
    'PYTHONPATH': f'{runs.ROOT}{os.pathsep}{runs.ROOT / "tests"}',
  }
  command = [sys.executable, '-c', SCRIPT, str(tmp_path / 'run')]
  subprocess.run(command, env=env, check=True, cwd=runs.ROOT, timeout=600)
  found = {}
  for path in pathlib.Path(tmp_path / 'ir').rglob('*'):
    if path.is_file():
      program = re.sub(r'.*jit_(.*)_compile.*', r'\1', path.name)
      found.setdefault(program, []).extend(PRODUCT.findall(path.read_text()))
  found = {program: set(products) for program, products in found.items() if products}
  assert {'imitate', 'run', 'admit', 'learn'} <= found.keys()
  assert set().union(*found.values()) == {('HIGHEST', 'HIGHEST')}
