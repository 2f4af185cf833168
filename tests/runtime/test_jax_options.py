"""Options of JAX that the environment sets: which of them a run refuses, and how."""

import re
import sys

import jax
import processes
import pytest

from bapo_jax.runtime import jax_options

CHECK = 'from bapo_jax.runtime import jax_options; jax_options.check(); print("fine")'


@pytest.fixture
def option():
  """Returns a function that sets an option of JAX until the test ends."""
  before = {}

  def change(name, value):
    before.setdefault(name, jax.config.values[name])
    jax.config.update(name, value)

  yield change
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.parametrize(
  ('name', 'value', 'words'),
  [
    ('jax_enable_x64', True, 'JAX_ENABLE_X64=True: a run computes in float32'),
    ('jax_numpy_dtype_promotion', 'strict', 'PROMOTION=strict: a run relies on'),
    ('jax_transfer_guard', 'disallow', 'JAX_TRANSFER_GUARD=disallow: a run copies'),
  ],
)
def test_an_option_that_would_end_a_healthy_run_is_refused(name, value, words, option):
  jax_options.check()
  option(name, value)
  with pytest.raises(ValueError, match=rf'{re.escape(words)}.*; unset it$'):
    jax_options.check()


def test_an_option_that_a_run_can_work_with_is_accepted(option):
  option('jax_transfer_guard', 'log')
  jax_options.check()


def test_a_platform_that_is_missing_is_named_with_jaxs_own_words():
  call = sys.executable, '-c', CHECK
  ended = processes.call(*call, status=1, JAX_PLATFORMS='nonesuch')
  last = ended.stderr.strip().splitlines()[-1]
  assert 'JAX cannot start its devices with JAX_PLATFORMS=nonesuch (Unable to ' in last


def test_the_generator_is_told_by_its_options(option):
  assert jax_options.generator() == jax_options.GENERATOR
  first = jax.random.bits(jax.random.key(0), (3,)).tolist()
  for name, value in (
    ('jax_default_prng_impl', 'rbg'),
    ('jax_threefry_partitionable', False),
    ('jax_random_seed_offset', 1),
  ):
    option(name, value)
    assert jax.random.bits(jax.random.key(0), (3,)).tolist() != first
    assert jax_options.generator() == jax_options.GENERATOR | {name: value}
    option(name, jax_options.GENERATOR[name])
