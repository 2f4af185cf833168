"""A test that takes too long and is not nightly fails, and no other."""

import os
import sys

import limits
import processes

TESTS = """
import subprocess, sys, time, pytest
BURN = 'import time\\nwhile time.process_time() < 6: pass'
def burn():
  began = time.process_time()
  while time.process_time() < began + 1.5:
    pass
def test_short(): pass
def test_that_sleeps(): time.sleep(1)
def test_long(): burn()
def test_long_child(): subprocess.run([sys.executable, '-c', BURN])
@pytest.mark.nightly
def test_nightly(): burn()
@pytest.fixture(scope='session')
def recorded(): burn()
def test_long_fixture(recorded): pass
"""


def test_a_test_beyond_the_limit_fails(tmp_path):
  (tmp_path / 'test_example.py').write_text(TESTS)
  command = [sys.executable, '-m', 'pytest', '-p', 'limits', '--limit=.5', '-rA', '-c']
  command += [os.devnull, '-p', 'no:cacheprovider', f'--rootdir={tmp_path}', tmp_path]
  done = processes.call(*command, status=1, PYTHONPATH=str(limits.HERE))
  failed = [x for x in done.stdout.splitlines() if x.startswith('FAILED')]
  assert [x.split('::')[1].split()[0] for x in failed] == [
    'test_long',
    'test_long_child',
  ]


def test_every_fast_file_exists():
  assert not [str(path) for path in limits.fast_files() if not path.exists()]
