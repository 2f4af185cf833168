"""The runner: which run is next, warm starts shared, signals, results, progress."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import runs as tiny_runs

from bapo_jax.tools import sweep_grid, sweep_runner
from bapo_jax.tools.sweep_grid import Experiment
from bapo_jax.tools.sweep_runner import Summary
from bapo_jax.training.config import Config, plain


def script(text, *args):
  return subprocess.Popen([sys.executable, '-c', text, *map(str, args)])


def test_a_run_waits_for_the_warm_start_that_another_makes():
  waiting = {'a1': 'a', 'a2': 'a', 'b1': 'b'}

  def none(run, start):
    return False

  assert sweep_runner.choose(waiting, set(), none) == 'a1'
  assert sweep_runner.choose({'a2': 'a', 'b1': 'b'}, {'a'}, none) == 'b1'
  assert sweep_runner.choose({'a2': 'a'}, {'a'}, none) is None
  assert sweep_runner.choose({'a2': 'a'}, {'a'}, lambda run, start: True) == 'a2'


@pytest.mark.parametrize('of', ['main', 'staleness'])
def test_a_warm_start_is_copied_from_any_other_run(tmp_path, of):
  folder = tmp_path / 'main'
  assert not sweep_runner.share(str(folder), 'two', 'abc')
  made = tmp_path / of / 'one' / 'warmstart' / 'abc'
  made.mkdir(parents=True)
  (made / 'weights').write_text('1 2 3')
  torn = folder / 'two' / 'warmstart' / 'abc.tmp'
  torn.mkdir(parents=True)
  (torn / 'torn').write_text('')
  assert sweep_runner.share(str(folder), 'two', 'abc')
  copy = folder / 'two' / 'warmstart' / 'abc'
  assert [p.name for p in copy.iterdir()] == ['weights'] and not torn.exists()
  assert sweep_runner.share(str(folder), 'two', ''), 'a model of its own needs none'


def test_all_runs_are_done_by_so_many_workers_each_on_its_core(tmp_path):
  cores, most = {}, []

  def start(run, core):
    cores[run] = core
    most.append(len([p for p in processes if p.poll() is None]) + 1)
    processes.append(script('import time, sys; time.sleep(0.3)'))
    return processes[-1]

  processes = []
  waiting = {f'r{i}': f's{i}' for i in range(5)}
  summary = sweep_runner.drive(waiting, start, lambda run, start: True, workers=2)
  assert sorted(summary.done) == sorted(waiting) and not summary.failed
  assert set(cores.values()) == {0, 1} and max(most) == 2


def test_a_run_that_fails_is_named_and_the_others_go_on():
  def start(run, core):
    return script('import sys; sys.exit(int(sys.argv[1]))', 7 if run == 'b' else 0)

  waiting = {'a': 's', 'b': 's', 'c': 's'}
  summary = sweep_runner.drive(waiting, start, lambda run, start: True, workers=1)
  assert summary == Summary(['a', 'c'], {'b': 7}, 0)


def test_a_signal_reaches_the_runs_once_and_starts_no_more(tmp_path):
  child = (
    'import pathlib, signal, sys, time\n'
    'got = []\n'
    'signal.signal(signal.SIGINT, lambda *a: got.append(1))\n'
    'pathlib.Path(sys.argv[1]).touch()\n'
    'while not got: time.sleep(0.01)\n'
    'time.sleep(1.5)\n'
    'sys.exit(130 if len(got) == 1 else 1)\n'
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
  waiting = {'a': 's', 'b': 's'}
  summary = sweep_runner.drive(waiting, start, lambda run, start: True, workers=1)
  thread.join()
  assert started == ['a'] and summary == Summary([], {}, signal.SIGINT)


def test_progress_says_how_long_it_will_last():
  summary = Summary(['a', 'b', 'c'], {'d': 1}, 0)
  line = sweep_runner.progress('c', 0, summary, 10, 240.0)
  assert line == 'c: done. 4 of 10 over in 4.0 min, 6 min left.'
  line = sweep_runner.progress('d', 1, summary, 4, 240.0)
  assert line == 'd: ended with status 1. 4 of 4 over in 4.0 min.'


def test_what_is_done_is_left_alone(tmp_path, monkeypatch, capsys):
  file = tmp_path / 'experiments.py'
  file.write_text(
    'from bapo_jax.tools.sweep_grid import Experiment\n'
    'from bapo_jax.training.config import Config, plain\n'
    'def get_experiment(name):\n'
    "  return Experiment(plain(Config()), {'a': {}, 'b': {'steps': 3}}, (0,))\n"
  )
  monkeypatch.setattr(sweep_runner, 'commit', lambda: 'c0ffee')
  monkeypatch.setattr(sweep_runner.versions, 'all_of_them', lambda: {'code': 'a'})
  done = sweep_grid.runs(sweep_grid.load(f'{file}:main'))['a-seed0']
  stored = {'config': sweep_grid.fingerprint(done.config), 'versions': {'code': 'a'}}
  sweep_grid.write(str(tmp_path / 'results' / 'main'), 'a-seed0', stored)
  commands = []

  def start(command, folder, run, core):
    commands.append((command[3:], run))
    return script('')

  monkeypatch.setattr(sweep_runner, '_start', start)
  flags = [f'--results={tmp_path}/results', f'--runs={tmp_path}/runs']
  call = [f'{file}:main', *flags]
  assert sweep_runner.main(call) == 0
  assert commands == [([*call, '--only=b-seed0'], 'b-seed0')]
  assert '1 of 2 runs are done, 0 of them by another' in capsys.readouterr().out
  assert sweep_runner.main([f'{file}:twin', *flags]) == 0  # the one run is borrowed
  assert len(commands) == 2 and commands[1][1] == 'b-seed0'


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='Linux alone has it')
def test_a_run_by_itself_has_one_core_as_the_runs_of_workers_have():
  code = 'import os\nfrom bapo_jax.tools import sweep_runner\n'
  code += 'sweep_runner.on_one_core()\nprint(len(os.sched_getaffinity(0)))'
  call = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert call.stdout.split() == ['1'], call.stderr


@pytest.mark.slow
def test_a_run_writes_its_result(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep_runner, 'commit', lambda: 'c0ffee')
  made = Experiment(plain(Config()), {'tiny': tiny_runs.TINY | {'mesh.data': -1}}, (0,))
  (name, run), *_ = sweep_grid.runs(made).items()
  results = str(tmp_path / 'results')
  assert sweep_runner.train(run, name, str(tmp_path / 'runs'), results) == 0
  found = json.loads((tmp_path / 'results' / f'{name}.json').read_text())
  assert [step for step, *_ in found['evaluations']] == [0, 2, 4]
  assert len(found['steps']['clip/share']) == 4 and found['diverged'] is False
  # The accuracy of the last evaluation is that of its verdicts.
  assert found['evaluations'][-1][1] == sum(found['right']['4']) / 16
  assert sweep_grid.read(made, results) == {name: found}
  assert (
    tmp_path / 'runs' / name / 'warmstart' / sweep_runner.warm_start(run)
  ).is_dir()
