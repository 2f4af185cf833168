"""A broken model directory ends in one sentence, soon, and in little memory."""

import json
import os
import subprocess
import sys

import broken_models
import pytest
import runs

SCRIPT = broken_models.__file__
# What each part of a directory looks like when it is broken, through the command line.
THROUGH_MAIN = (
  'config: nested',
  'config: a pipe',
  'config: a billion layers',
  "config: tie_word_embeddings='false'",
  'weights: a header of 8 GB',
  'weights: data_offsets=[0, 32]',
  'weights: a tensor twice',
  'weights: nan in bfloat16',
  "index: file='../x.safetensors'",
  'tokenizer: an empty object',
  "generation: eos='1'",
  'generation: eos=40',
  'template: never ends',
)


@pytest.mark.slow
def test_every_broken_directory_ends_in_one_sentence(tmp_path):
  names = [case.name for case in broken_models.cases()]
  assert len(names) == len(set(names)) >= 130
  done = subprocess.run(
    [sys.executable, SCRIPT, str(tmp_path)],
    env=os.environ | {'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
    timeout=600,
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith('CASE ')]
  found = [json.loads(line.removeprefix('CASE ')) for line in lines]
  assert [case['name'] for case in found] == ['valid', *names], done.stderr[-2000:]
  for case in found:
    assert case['kind'] == case['wanted'], case
    assert '\n' not in case['message'] and len(case['message']) < 600, case
    assert case['cpu_seconds'] < 10, case
    assert case['peak'] < 10**9, case


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    *THROUGH_MAIN[:4],
    *(pytest.param(n, marks=pytest.mark.nightly) for n in THROUGH_MAIN[4:]),
  ],
)
def test_the_command_line_ends_in_one_sentence(name, tmp_path):
  (case,) = (case for case in broken_models.cases() if case.name == name)
  path = tmp_path / 'model'
  runs.source(path)
  case.damage(path)
  knobs = {'model.path': str(path), 'tokenizer.template': case.template}
  command = runs.command(tmp_path / 'work', **knobs)
  done = subprocess.run(**command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 2, done.stderr[-2000:]
  (line,) = (x for x in done.stderr.splitlines() if x.startswith('bapo_jax: '))
  assert 'Traceback' not in done.stderr and str(path) in line
