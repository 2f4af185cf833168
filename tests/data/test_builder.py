"""Rows are stored once, as they are, and read without TensorFlow."""

import json
import os
import subprocess
import sys
import textwrap

from bapo_jax.data import builder
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
