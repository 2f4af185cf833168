"""Memory that the C library keeps."""

import os
import platform
import subprocess
import sys

import pytest

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
