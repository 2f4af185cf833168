"""The runner: order of runs, shared warm starts, signals, results and the table."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import making
import pytest

from bapo_jax.runtime import machine
from lab import experiments, sweep
from lab.experiments import RunSpec


def script(text, *args):
  return subprocess.Popen([sys.executable, '-c', text, *map(str, args)])


def always(run, start):
  return True


def test_a_warm_start_is_copied_from_a_run_of_any_experiment(tmp_path):
  folder = tmp_path / 'main'
  assert not sweep.share(str(folder), 'two', 'abc')
  source = tmp_path / 'staleness' / 'one' / 'warmstart' / 'abc'
  source.mkdir(parents=True)
  (source / 'weights').write_text('1 2 3')
  torn = folder / 'two' / 'warmstart' / 'abc.tmp'
  torn.mkdir(parents=True)
  (torn / 'torn').write_text('')
  assert sweep.share(str(folder), 'two', 'abc')
  copy = folder / 'two' / 'warmstart' / 'abc'
  assert [p.name for p in copy.iterdir()] == ['weights'] and not torn.exists()
  assert sweep.share(str(folder), 'two', ''), 'a model read from files needs none'


def test_a_run_waits_for_the_warm_start_that_another_makes():
  ended, order = set(), []

  def start(run, core):
    order.append(run)
    processes[run] = script('import time; time.sleep(0.3)')
    return processes[run]

  def ready(run, start):
    ended.update(r for r, p in processes.items() if p.poll() is not None)
    return any(waiting[r] == start for r in ended)

  processes, waiting = {}, {'a1': 'a', 'a2': 'a', 'b1': 'b'}
  assert sweep.drive(waiting, start, ready, workers=2) == ({}, 0)
  # a2 needs the warm start of a1, so the second core takes b1 first.
  assert order == ['a1', 'b1', 'a2']


def test_every_worker_has_its_core_and_a_failed_run_is_named():
  cores, most, processes = {}, [], []

  def start(run, core):
    cores[run] = core
    most.append(len([p for p in processes if p.poll() is None]) + 1)
    wait = 'import sys, time; time.sleep(0.2); sys.exit(int(sys.argv[1]))'
    processes.append(script(wait, 7 if run == 'r1' else 0))
    return processes[-1]

  waiting = {f'r{i}': f's{i}' for i in range(5)}
  assert sweep.drive(waiting, start, always, workers=2) == ({'r1': 7}, 0)
  assert sorted(cores) == sorted(waiting), 'a failed run does not stop the others'
  assert set(cores.values()) == {0, 1} and max(most) == 2


def test_a_signal_reaches_the_runs_once_and_starts_no_more(tmp_path):
  child = (
    'import pathlib, signal, sys, time\n'
    'got = []\n'
    'signal.signal(signal.SIGINT, lambda *a: got.append(1))\n'
    'pathlib.Path(sys.argv[1]).touch()\n'
    'while not got: time.sleep(0.01)\n'
    'time.sleep(1.5)\n'
    'pathlib.Path(sys.argv[1]).write_text(str(len(got)))\n'
    'sys.exit(130)\n'
  )
  started = []

  def start(run, core):
    started.append(run)
    return script(child, tmp_path / run)

  def interrupt():
    while not (tmp_path / 'a').exists():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  ended = sweep.drive({'a': 's', 'b': 's'}, start, always, workers=1)
  thread.join()
  assert started == ['a'] and ended == ({}, signal.SIGINT)
  assert (tmp_path / 'a').read_text() == '1', 'signalled once'


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
  monkeypatch.setattr(sweep, 'commit', lambda: 'c0ffee')
  commands = []

  def start(command, folder, run, core):
    commands.append((command[3:], run))
    write_results(tmp_path, 'b', {'b': (0.5, 0.8)})
    return script('')

  monkeypatch.setattr(sweep, 'launch', start)
  call = [description, f'--results={tmp_path}/results', f'--runs={tmp_path}/runs']
  assert sweep.main(call) == 0
  assert commands == [(call, 'b-seed1')]
  text = capsys.readouterr().out
  assert '3 of 4 runs are done' in text and '| b | 2 | 0.250 | 0.650 ± 0.150' in text
  files = {path.name for path in (tmp_path / 'results').iterdir()}
  assert files == {'main.jsonl', 'details.zip'}, 'a complete experiment is packed'
  # An override makes other runs, which the stored results are not mixed with.
  with pytest.raises(ValueError, match='another config'):
    sweep.main([*call, '--config.steps=3'])


def test_a_run_has_one_core_and_writes_its_result(tmp_path, monkeypatch, whole_run):
  cores, begin = [], os.sched_getaffinity(0)

  def train(config, workdir):
    cores.extend(os.sched_getaffinity(0))
    shutil.copytree(whole_run.workdir, workdir)
    return 0

  monkeypatch.setattr(sweep, 'commit', lambda: 'c0ffee')
  monkeypatch.setattr(sweep.experiment, 'train', train)
  run, results = RunSpec('both', {}, 3, whole_run.config), str(tmp_path / 'results')
  try:
    assert sweep.train(run, 'name', str(tmp_path / 'runs'), results, core=1) == 0
  finally:
    os.sched_setaffinity(0, begin)
  assert len(cores) == 1
  stored = json.loads((tmp_path / 'results' / 'name.json').read_text())
  # The accuracy of the last evaluation is that of its verdicts.
  assert stored['evaluations'][-1][1] == sum(stored['right']['4']) / 16
  start = tmp_path / 'runs' / 'name' / 'warmstart' / sweep.warm_start(run)
  assert start.is_dir()
