"""The scripts for a GPU: what they name exists, and a dry run passes every stage."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import processes
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bapo_jax import custom_code, sharding
from bapo_jax.main import read_config
from bapo_jax.tools.plan import devices, plan, programs
from benchmarks.first_contact import section
from benchmarks.on_gpu import models, ours, table, traces

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / 'benchmarks/on_gpu'
OURS = ('bapo_jax', 'benchmarks')
PACK = HERE / 'pack.sh'
RUN = HERE / 'on_gpu.sh'
README = HERE / 'README.md'


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


def test_the_planned_schedules_are_those_of_auto(tmp_path):
  planned = json.loads((HERE / 'planned.json').read_text())
  for chip_name in ('h100', 'h200'):
    chip, found = devices.count(f'{chip_name}:1')
    mesh = sharding.make(1, 1, 1, found)
    for name, plan_of_model in planned[chip.gpu.name].items():
      model_type, sizes = models.SHAPES[name]
      model = {'model_type': model_type, 'tie_word_embeddings': True} | sizes
      (tmp_path / name).mkdir(exist_ok=True)
      (tmp_path / name / 'config.json').write_text(json.dumps(model))
      config = read_config('configs/aime.py', ours.overrides(str(tmp_path), name))
      job = plan.planned(config, mesh, chip)
      assert str(job.schedule) == plan_of_model['schedule']
      assert plan_of_model['gib'].keys() == programs.programs_of(job.spec).keys()


def test_every_requirement_is_on_the_machine_or_packed():
  packed = dict(re.findall(r'(?m)^  ([\w.-]+)==(\S+)$', PACK.read_text()))
  packed = {canonicalize_name(name): version for name, version in packed.items()}
  there = re.search(r'(?s)The GPU machine has (.*?)\.\n', README.read_text())[1]
  there = {canonicalize_name(x) for x in re.findall(r'[a-z]\w+', there)}
  lines = (ROOT / 'requirements.txt').read_text().splitlines()
  lines = [line.split('#')[0] for line in lines]
  for wanted in map(Requirement, filter(None, lines)):
    name = canonicalize_name(wanted.name)
    if version := packed.get(name):
      assert version in wanted.specifier, wanted
    elif name not in ('tensorflow-datasets', 'importlib-resources'):  # only for tfds:
      assert name in there, wanted


def test_time_in_which_any_kernel_ran_by_hand():
  spans = [traces.Span(*x) for x in [('b', 5e6, 7e6), ('a', 0, 2e6), ('a', 1e6, 4e6)]]
  assert traces.busy_ms(spans) == 6  # 0 to 4 and 5 to 7
  assert traces.kernels(spans) == [('a', 5.0, 2), ('b', 2.0, 1)]


def test_a_stage_that_runs_again_replaces_its_line(tmp_path, capsys):
  output = tmp_path / 'output'
  file = str(tmp_path / 'results.jsonl')
  output.write_text('words\n{"failed": [], "figures": {"x, beside the CPU": 0.5}}\n')
  table.note(file, 'd', 'kernels', '124', '9')
  table.note(file, 'd', 'kernels', '0', '7', str(output))
  table.note(file, 'b', 'main job', '1', '3')
  table.show(file)
  b, d = capsys.readouterr().out.splitlines()
  assert re.match(r'b main job +failed \(1\) +3 s', b)
  assert re.match(r'd kernels +passed +7 s  all within; x, beside the CPU 0.5', d)


@pytest.mark.nightly
def test_packing_stays_below_the_limit(tmp_path):
  environment = os.environ | {
    'FOLDER': str(tmp_path / 'wheels'),
    'PIP': f'{sys.executable} -m pip',
  }
  done = subprocess.run(
    ['bash', str(PACK)], env=environment, capture_output=True, text=True
  )
  if 'No matching distribution' in done.stderr:
    pytest.skip('no package index')
  assert done.returncode == 0, done.stderr
  assert re.fullmatch(
    r'24 wheels, \d+ KiB; .* together \d+ of 60 MiB', done.stdout.strip()
  )
  assert (tmp_path / 'wheels/kit/on_gpu.sh').exists()


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
  assert {stage for stage, _ in states} == {*'abcdefpr'}
  assert not any(states.values()), states
  assert (tmp_path / 'out/kept.tar.gz').exists()
  assert '"error"' not in (tmp_path / 'out/e.log').read_text(), 'of parts.py'
