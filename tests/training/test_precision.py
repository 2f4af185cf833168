"""Products have the precision that model.compute names, in every program of a run."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import runs

from bapo_jax.training import build, inputs, resolve

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
    ('bfloat16', 'tpu', 'DEFAULT'),
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
  ('compute', 'again'), [('float32', False), ('tf32', True), ('bfloat16', True)]
)
def test_auto_scores_again_unless_products_are_float32(compute, again):
  config = runs.tiny(**{'model.compute': compute})
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
