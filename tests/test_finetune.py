"""The three lines with something wrong in them: one sentence, nothing written."""

import os
import subprocess
import sys

import foreign
import pytest
from test_main import ROOT


def refused(tmp_path, model, training, held_out, **overrides):
  """The sentence on stderr."""
  knobs = {
    'model.path': model,
    'problems.source': training,
    'problems.test_source': held_out,
  }
  given = [f'--config.{name}={value}' for name, value in (knobs | overrides).items()]
  done = subprocess.run(
    [sys.executable, '-m', 'bapo_jax.main', '--config=configs/finetune.py']
    + [f'--workdir={tmp_path / "work"}', *given],
    cwd=ROOT,
    capture_output=True,
    text=True,
    # As on a machine without a network, and without its minute of attempts.
    env=os.environ | {'HF_HUB_OFFLINE': '1', 'XLA_FLAGS': ''},
  )
  assert done.returncode == 2, done.stderr
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: ') and not done.stdout
  assert not (tmp_path / 'work').exists()
  return line


@pytest.fixture
def files(tmp_path):
  model = foreign.model(tmp_path / 'model', 'qwen3')
  training = foreign.rows(tmp_path / 'a.jsonl', foreign.problems(24))
  held_out = foreign.rows(tmp_path / 'b.jsonl', foreign.problems(8, 24))
  return model, training, held_out


def test_a_wrong_path_is_one_sentence(files, tmp_path):
  model, training, held_out = files
  assert refused(tmp_path, 'models/nowhere', training, held_out).startswith(
    'bapo_jax: not found: --config.model.path=models/nowhere (no config.json'
  )
  line = refused(tmp_path, model, 'nowhere.jsonl', held_out)
  assert 'not found: --config.problems.source=nowhere.jsonl' in line


def test_a_broken_row_is_named_by_its_line(files, tmp_path):
  model, training, held_out = files
  with open(training, 'a') as file:
    file.write('{"problem": "What is 1 + 1?", "answer"\n')
  assert f'{training}, line 25: not JSON' in refused(
    tmp_path, model, training, held_out
  )


@pytest.mark.parametrize('knob', ['model.path', 'problems.source'])
def test_a_name_of_the_hub_without_a_network_is_one_sentence(knob, files, tmp_path):
  name = 'hub:some-owner/not-here'
  line = refused(tmp_path, *files, **{knob: name})
  assert name in line or 'some-owner/not-here' in line
  assert 'fetch it' in line or 'download' in line
