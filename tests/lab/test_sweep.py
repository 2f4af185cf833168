"""The runner: order of runs, shared warm starts, signals, results and the table."""

import json
import os
import shutil
import subprocess
import sys

import making
import pytest

from bapo_jax.runtime import machine
from lab import experiments, sweep
from lab.experiments import RunSpec


def script(text):
  return subprocess.Popen([sys.executable, '-c', text])


DESCRIPTION = """
from bapo_jax.training.config import Config
from lab.experiments import Experiment
def get_experiment(name):
  arms = {'a': {}, 'b': {'clip.rule': 'fixed'}}
  return Experiment(Config().model_dump(), arms, (0, 1))
"""


def write_results(folder, arms, accuracies):
  """Results of arms of DESCRIPTION with these accuracies at the end, one per seed."""
  file = folder / 'experiments.py'
  file.write_text(DESCRIPTION)
  runs = experiments.runs(experiments.load(f'{file}:main'))
  for arm in arms:
    for seed, accuracy in enumerate(accuracies[arm]):
      stored = making.result(
        runs[f'{arm}-seed{seed}'],
        [(0, 0.25), (3, accuracy)],
        versions=machine.versions(),
        right={'0': [0, 1, 0, 1], '3': [1, 1, 0, 1]},
        group_size=1,
        steps={name: [1.0, 3.0] for name in experiments.STEP_METRICS},
      )
      experiments.write(str(folder / 'results' / 'main'), f'{arm}-seed{seed}', stored)
  return f'{file}:main'


def test_only_runs_without_a_result_are_started(tmp_path, monkeypatch, capsys):
  accuracies = {'a': (0.4, 0.6), 'b': (0.5,)}
  description = write_results(tmp_path, 'ab', accuracies)
  monkeypatch.setattr(sweep, 'commit', lambda *_: 'c0ffee')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '')  # restored at the end
  monkeypatch.setenv('XDG_CACHE_HOME', os.environ['XDG_CACHE_HOME'])
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '')
  commands = []

  def start(command, output, core, environment):
    commands.append(command[3:])
    write_results(tmp_path, 'b', {'b': (0.5, 0.8)})
    return script('')

  monkeypatch.setattr(sweep.runner, 'launch', start)
  call = [description, f'--results={tmp_path}/results', f'--runs={tmp_path}/runs']
  assert sweep.main(call) == 0
  assert commands == [[*call, '--only=b-seed1']]
  text = capsys.readouterr().out
  assert '3 of 4 runs are done' in text
  # Over the run (.25 + .5) / 2 and (.25 + .8) / 2.
  assert '| b | 2 | 0.250 | 0.450 ± 0.075 | 0.650 ± 0.150' in text
  files = {path.name for path in (tmp_path / 'results').iterdir()}
  assert files == {'main.jsonl', 'details.zip'}, 'a complete experiment is packed'
  # An override makes other runs, which the stored results are not mixed with.
  with pytest.raises(ValueError, match='another config'):
    sweep.main([*call, '--config.steps=3'])


def test_a_run_writes_its_result(tmp_path, monkeypatch, whole_run):
  def train(config, workdir):
    shutil.copytree(whole_run.workdir, workdir)
    return 0

  monkeypatch.setattr(sweep, 'commit', lambda *_: 'c0ffee')
  monkeypatch.setattr(sweep.experiment, 'train', train)
  run, results = RunSpec('both', {}, 3, whole_run.config, {}), str(tmp_path / 'results')
  assert sweep.train(run, 'name', str(tmp_path / 'runs'), results) == 0
  stored = json.loads((tmp_path / 'results' / 'name.json').read_text())
  # The accuracy of the last evaluation is that of its verdicts.
  assert stored['evaluations'][-1][1] == sum(stored['right']['4']) / 16
  assert (tmp_path / 'runs' / 'name' / 'checkpoints').is_dir()
