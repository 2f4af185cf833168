"""Memory that the C library keeps, and the share of a GPU that JAX takes."""

import os
import platform
import subprocess
import sys

import pytest

from bapo_jax.runtime import machine

HOLDS = """
import resource, sys
import numpy as np
from bapo_jax.runtime import machine
if sys.argv[1] == 'hold':
  machine.hold_freed_memory()
def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(4):
    np.full(2**26, 1, np.uint8)  # freed at once; larger than glibc holds by itself
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
machine.trim()
print(faults())
"""


@pytest.mark.skipif(
  platform.libc_ver()[0] != 'glibc', reason='only glibc can be asked to hold memory'
)
def test_freed_memory_is_held_until_it_is_trimmed():
  def faults(how):
    # Huge pages would hide most faults.
    environment = os.environ | {'NUMPY_MADVISE_HUGEPAGE': '0'}
    command = [sys.executable, '-c', HOLDS, how]
    output = subprocess.run(command, env=environment, capture_output=True, check=True)
    return [int(line) for line in output.stdout.split()]

  anew, _ = faults('not')
  held, trimmed = faults('hold')
  assert held < anew / 20
  assert trimmed > 10 * max(held, 1), 'trim gives the pages back once'


@pytest.mark.parametrize('given', ['', *machine.GPU_SHARES])
def test_the_share_of_a_gpu_that_the_user_set_is_kept(given, monkeypatch):
  for name in machine.GPU_SHARES:
    monkeypatch.delenv(name, raising=False)
  if given:
    monkeypatch.setenv(given, '0.5')
  machine.prepare_gpu()
  found = {x: os.environ[x] for x in machine.GPU_SHARES if x in os.environ}
  # JAX refuses both names at once.
  assert found == ({given: '0.5'} if given else {machine.GPU_SHARES[0]: '0.92'})


@pytest.mark.parametrize('given', ['', '--xla_dump_to=/x', '--xla_a=1 --xla_b=2'])
def test_flags_of_xla_are_added_to_those_of_the_user(given, monkeypatch):
  flags = {'xla_a': '3', 'xla_gpu_c': 'true'}
  monkeypatch.setattr(machine, 'GPU_FLAGS', flags)
  monkeypatch.setenv('XLA_FLAGS', given)
  machine.prepare_gpu(plugins=('no_such_plugin',))
  assert os.environ['XLA_FLAGS'] == given
  machine.prepare_gpu(plugins=('json',))  # any module that is installed
  added = [] if '--xla_a' in given else ['--xla_a=3']
  assert os.environ['XLA_FLAGS'].split() == [*given.split(), *added, '--xla_gpu_c=true']


def test_xla_knows_the_flags_of_a_gpu():
  # XLA ends a process whose flags it does not know.
  flags = ' '.join(f'--{name}={value}' for name, value in machine.GPU_FLAGS.items())
  script = 'import jax; jax.numpy.zeros(1)'
  environment = os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', script], env=environment)
  assert done.returncode == 0
