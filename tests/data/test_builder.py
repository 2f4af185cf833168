"""Rows are stored once, as they are, and read without TensorFlow."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import runs

from bapo_jax.data import builder, hub
from bapo_jax.data.row import Row

ROWS = [Row(f'{i}+é', str(i), 'math' * (i % 2)) for i in range(40)]


def test_a_stored_row_comes_back_with_its_id(tmp_path):
  stored = builder.store(
    str(tmp_path), '../a b', {'train': ROWS[:30], 'test': ROWS[30:]}
  )
  train, test = (builder.problems(stored, split) for split in ('train', 'test'))
  assert sorted(train) == list(range(30)) and sorted(test) == list(range(30, 40))
  assert all(row == ROWS[i] for i, row in (train | test).items())
  assert tmp_path in stored.data_path.parents


def test_other_rows_are_another_data_set_and_the_first_one_stays(tmp_path):
  first, other = (
    builder.store(str(tmp_path), 'mine', {'rows': rows}) for rows in (ROWS, ROWS[1:])
  )
  assert first.data_path != other.data_path
  assert len(builder.problems(first, 'rows')) == 40
  assert len(builder.problems(other, 'rows')) == 39


WRITE_AND_READ = """
  import json, sys
  from bapo_jax.data import sources
  from bapo_jax.data.knobs import ProblemsConfig
  loaded = 'tensorflow_datasets' in sys.modules
  problems = ProblemsConfig(train=20, test=10)
  rows = [sources.load(problems, knob, sys.argv[1]) for knob in sources.SPLITS]
  print(json.dumps([rows, loaded, 'tensorflow' in sys.modules]))
"""


def test_problems_are_written_once_and_read_without_tensorflow(tmp_path):
  def run():
    command = [sys.executable, '-c', textwrap.dedent(WRITE_AND_READ), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])

  def files():
    return {p: os.stat(p).st_mtime_ns for p in tmp_path.rglob('*') if p.is_file()}

  rows, datasets_early, tensorflow = run()
  assert [len(split) for split in rows] == [20, 10]
  assert not datasets_early and not tensorflow
  written = files()
  assert run()[0] == rows
  assert files() == written


def test_a_builder_leaves_nothing_in_the_temporary_directory(tmp_path, monkeypatch):
  (tmp_path / 'temporary').mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  stored = builder.store(str(tmp_path / 'data'), 'mine', {'rows': ROWS})
  assert len(builder.problems(stored, 'rows')) == 40
  assert hub._builder('gsm8k', 'problems.source').name == 'gsm8k'  # the library's own
  assert tempfile.tempdir == str(tmp_path / 'temporary')
  assert not list((tmp_path / 'temporary').iterdir())


def temporary(tmp_path, steps=1):
  """An empty temporary directory, and the arguments of a run that uses it."""
  folder = tmp_path / 'temporary'
  folder.mkdir()
  command = runs.command(tmp_path / 'run', steps=steps, **{'sft.clean': 2})
  return folder, command | {'env': command['env'] | {'TMPDIR': str(folder)}}


@pytest.mark.slow
def test_a_run_leaves_nothing_in_the_temporary_directory(tmp_path):
  folder, command = temporary(tmp_path)
  done = subprocess.run(**command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert not list(folder.iterdir())


def test_a_run_stopped_at_once_leaves_nothing_in_the_temporary_directory(tmp_path):
  folder, command = temporary(tmp_path, steps=10_000)  # more than there is time for
  run = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  try:
    deadline = time.monotonic() + 120
    while not list(
      tmp_path.glob('run/data/stored_problems')
    ):  # the problems are being written
      assert run.poll() is None and time.monotonic() < deadline
      time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == 130
  finally:
    run.kill()
    run.communicate()
  assert not list(folder.iterdir())
