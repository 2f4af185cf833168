"""The scripts for a GPU: what they name exists, and a dry run passes every stage."""

import importlib
import importlib.util
import json
import pathlib
import re
import sys

import processes
import pytest

from bapo_jax import custom_code
from bapo_jax.main import read_config
from benchmarks.first_contact import section
from benchmarks.on_gpu import models, ours, traces

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / 'benchmarks/on_gpu'
RUN = HERE / 'on_gpu.sh'


def test_the_scripts_start_modules_stages_and_sections_that_exist():
  text = RUN.read_text()
  for name in re.findall(r'-m ([\w.]+)', text):
    assert importlib.util.find_spec(name), name
  for path in re.findall(r'\$HERE/(\w+\.\w+)', text):
    assert (HERE / path).exists(), path
  for line in re.findall(r'(?s)contact \w \w+ \S+ \S+\.json (.*?)(?:&|})', text):
    names = re.findall(r"'([^']+)'|(\w+)", line)
    assert names and {a or b for a, b in names} <= section.SECTIONS.keys()
  stages = re.search(r'STAGES=\(([^)]*)\) #', text)[1].split()
  functions = {*re.findall(r'(?m)^stage_(\w)\(\)', text)}
  assert {stage[0] for stage in stages} | {'p'} == functions
  models_named = re.search(r'MODELS=\(([^)]*)\)', text)[1].split()
  assert {*models_named, 'tiny'} == models.SHAPES.keys()


def test_the_knobs_of_a_step_exist_and_the_reward_loads(tmp_path):
  given = ours.overrides(str(tmp_path), 'q05')
  config = read_config('configs/aime.py', given)
  assert config.minibatch_rows * config.updates_per_step == ours.CHOSEN.rows
  assert config.row_length == ours.CHOSEN.length
  assert custom_code.load(config.rewards.rule)


def test_time_in_which_any_kernel_ran_by_hand():
  spans = [traces.Span(*x) for x in [('b', 5e6, 7e6), ('a', 0, 2e6), ('a', 1e6, 4e6)]]
  assert traces.busy_ms(spans) == 6  # 0 to 4 and 5 to 7
  assert traces.kernels(spans) == [('a', 5.0, 2), ('b', 2.0, 1)]


@pytest.mark.nightly
def test_a_dry_run_passes_every_stage(tmp_path):
  pytest.importorskip('torch')
  # The packed wheels are for Python 3.12 and jax 0.11.
  environment = {
    'SMALL': '1',
    'SLOW': '5',
    'TOTAL': '3000',
    'WHEELS': '',
    'PYTHON': sys.executable,
    'OUT': str(tmp_path / 'out'),
    'WORK': str(tmp_path / 'work'),
    'SITE': str(tmp_path / 'site'),
    'XLA_FLAGS': '',
  }
  processes.call('bash', RUN, **environment)
  lines = (tmp_path / 'out/results.jsonl').read_text().splitlines()
  states = {(x['stage'], x['name']): x['status'] for x in map(json.loads, lines)}
  assert {stage for stage, _ in states} == {*'abcdefmpr'}
  assert not any(states.values()), states
  assert (tmp_path / 'out/kept.tar.gz').exists()
  assert '"error"' not in (tmp_path / 'out/e.log').read_text(), 'of parts.py'
