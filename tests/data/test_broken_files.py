"""Broken files of problems: one sentence each, or read right; in 10 s and 1 GB."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import broken_files
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def results():
  """How each file was read: in processes with limits of their own."""
  # Not in pytest's directory: a reader that is not root cannot open that.
  folder = tempfile.mkdtemp()
  try:
    os.chmod(folder, 0o755)
    done = subprocess.run(
      [sys.executable, broken_files.__file__, folder],
      capture_output=True,
      text=True,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
  finally:
    shutil.rmtree(folder)


@pytest.mark.parametrize('name', broken_files.CASES)
def test_a_broken_file_is_one_sentence_or_read_right(name, results):
  file, _, _, expected = broken_files.CASES[name]
  found = results[name]
  assert 'crash' not in found, found['crash']
  if isinstance(expected, str):
    message = found['message']
    alternatives = '|'.join(map(re.escape, expected.split('|')))
    assert re.search(alternatives, message), message
    assert file in message and len(message) < 600, message
  else:
    assert found.get('rows') == expected, found
  assert found['seconds'] < broken_files.SECONDS
  assert found['megabytes'] < broken_files.MEGABYTES


WHOLE = (  # through the command line
  'empty',
  'latin-1',
  'directory',
  'broken link',
  'failing disk',
  'line of 100 MB',
  'field twice',
  'surrogate in a problem',
  '1e999 as text',
  'nested list as text',
  'infinite target',
  'broken footer',
  'text that is none',
)


@pytest.mark.parametrize(
  'name',
  [*WHOLE[:4], *(pytest.param(n, marks=pytest.mark.nightly) for n in WHOLE[4:])],
)
def test_a_broken_file_ends_the_command_before_it_begins(name, tmp_path):
  file, content, rule, expected = broken_files.CASES[name]
  path = str(tmp_path / file)
  broken_files.write(path, content)
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py'),
      f'--workdir={tmp_path / "run"}',
      f'--config.problems.source={path}',
      f'--config.problems.test_source={path}',
      f'--config.rewards.rule={rule}',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert done.returncode == 2, done.stderr
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: ') and expected in line and path in line
  assert not done.stdout and not (tmp_path / 'run').exists()
