"""Memory that the C library keeps, and the share of a GPU that JAX takes."""

import json
import os
import pathlib
import platform
import subprocess
import sys

import processes
import pytest
import runs

from bapo_jax.runtime import cache, machine

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
    done = processes.call(sys.executable, '-c', HOLDS, how, NUMPY_MADVISE_HUGEPAGE='0')
    return [int(line) for line in done.stdout.split()]

  anew, _ = faults('not')
  held, trimmed = faults('hold')
  assert held < anew / 20
  assert trimmed > 10 * max(held, 1), 'trim gives the pages back once'


@pytest.mark.parametrize('given', ['', '--xla_dump_to=/x', '--xla_a=1 --xla_b=2'])
def test_flags_of_xla_are_added_to_those_of_the_user(given, monkeypatch):
  flags = {'xla_a': '3', 'xla_gpu_c': 'true'}
  monkeypatch.setattr(machine, 'GPU_FLAGS', flags)
  monkeypatch.setenv('XLA_FLAGS', given)
  monkeypatch.setattr(machine, 'CUDA_PLUGINS', ('no_such_plugin',))
  machine.prepare_gpu()
  assert os.environ['XLA_FLAGS'] == given
  monkeypatch.setattr(machine, 'CUDA_PLUGINS', ('json',))  # any installed module
  machine.prepare_gpu()
  added = [] if '--xla_a' in given else ['--xla_a=3']
  assert os.environ['XLA_FLAGS'].split() == [*given.split(), *added, '--xla_gpu_c=true']


def test_xla_knows_the_flags_of_a_gpu():
  # XLA ends a process whose flags it does not know.
  flags = ' '.join(f'--{name}={value}' for name, value in machine.GPU_FLAGS.items())
  script = 'import jax; jax.numpy.zeros(1)'
  processes.call(sys.executable, '-c', script, XLA_FLAGS=flags, JAX_PLATFORMS='cpu')


# ------------- the folder that runs share: where it is, what it keeps, what it removes


def test_the_entries_used_longest_ago_are_removed(tmp_path, monkeypatch):
  key = '0123456789ab'
  files = {  # used at, of 100 bytes each
    f'policies/{key}/new/weights': 5,
    f'policies/{key}/new/digests': 1,
    f'policies/{key}/old/weights': 2,
    f'policies/{key}/old/digests': 1,
    f'xla/{key}/new': 4,
    f'xla/{key}/old': 3,
    'beside': 0,  # no entry
    'models/qwen/weights/of/others': 0,
  }
  for name, used in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(bytes(100))
    os.utime(tmp_path / name, (used, used))

  def left():
    return {str(x.relative_to(tmp_path)) for x in tmp_path.rglob('*') if x.is_file()}

  def prune(limit, folder=tmp_path):
    monkeypatch.setattr(cache, 'LIMIT', limit)
    cache.prune(str(folder))

  prune(600)
  assert left() == {*files}
  prune(599)  # a policy goes as a whole
  assert left() == {name for name in files if '/old/' not in name}
  prune(300)
  assert left() == {name for name in files if 'old' not in name}
  prune(0, tmp_path / 'absent')


def test_the_number_of_cores_tells_processors_apart(monkeypatch):
  whole = machine.processor()
  assert whole == machine.processor() and len(whole) == 12
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0}, raising=False)
  one = machine.processor()
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 1}, raising=False)
  assert machine.processor() != one


PROGRAM = """
import collections, json, sys
import jax
from bapo_jax.runtime import cache
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
cache.share_programs(sys.argv[1])
jax.config.update(cache.MIN_COMPILE, 0)  # this program takes milliseconds
assert jax.jit(lambda x: 3 * x + 1)(2) == 7
hits = events['/jax/compilation_cache/cache_hits']
print(json.dumps([jax.config.jax_compilation_cache_dir, hits]))
print(cache.described(sys.argv[1]))
"""


def compiled(knob: str, **environment: str) -> tuple[str, int, str]:
  """Compiles a program in a new process: (JAX's directory, hits, description)."""
  kept = {k: v for k, v in os.environ.items() if 'CACHE' not in k}
  run = subprocess.run(
    [sys.executable, '-c', PROGRAM, knob],
    env=kept | {'XLA_FLAGS': runs.FLAGS} | environment,  # one device
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  found, described = run.stdout.splitlines()
  return *json.loads(found), described


def test_a_program_is_compiled_once_for_all_processes(tmp_path):
  path, hits, described = compiled(str(tmp_path))
  assert pathlib.Path(path) == tmp_path / 'xla' / machine.processor() and not hits
  entries = list(pathlib.Path(path).iterdir())
  assert entries and f'{len(entries)} compiled programs' in described
  again = compiled(str(tmp_path))
  assert again[1] == len(entries) and again[2] == described
