"""`bapo sweep`: the grid by hand, refusals, and two runs to their end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from refusals import refused

from bapo_jax import main
from bapo_jax.runtime import machine, metrics
from bapo_jax.tools import sweep


def script(text, *args):
  return [sys.executable, '-c', text, *map(str, args)]


def test_every_worker_has_its_core_and_a_failed_run_is_named(tmp_path, capsys):
  wait = 'import os, sys, time; time.sleep(0.2); print(*os.sched_getaffinity(0)); '
  wait += 'sys.exit(int(sys.argv[1]))'
  commands = {f'r{i}': script(wait, 7 if i == 1 else 0) for i in range(5)}
  assert sweep.drive(commands, str(tmp_path), [{}, {}]) == ({'r1': 7}, 0)
  cores = {run: (tmp_path / f'{run}.log').read_text() for run in commands}
  assert all(cores.values()), 'a failed run does not stop the others'
  assert {*cores.values()} == {f'{core}\n' for core in machine.cores()[:2]}
  assert f'r1 failed with status 7; see {tmp_path}/r1.log' in capsys.readouterr().out


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

  def interrupt():
    while not (tmp_path / 'a').exists():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  commands = {run: script(child, tmp_path / run) for run in ('a', 'b')}
  ended = sweep.drive(commands, str(tmp_path), [{}])
  thread.join()
  assert ended == ({}, signal.SIGINT) and not (tmp_path / 'b').exists()
  assert (tmp_path / 'a').read_text() == '1', 'signalled once'


def test_a_grid_has_every_value_with_every_seed():
  found = sweep.grid(['clip.rule=fixed,balanced', 'clip.x=(1,2),[3,4]'], [0, 7])
  assert len(found) == 8
  assert found['clip.rule=balanced,clip.x=[3,4]/7'] == [
    '--config.clip.rule=balanced',
    '--config.clip.x=[3,4]',
    '--config.seed=7',
  ]
  first = [name.rpartition('/')[2] for name in found]
  assert first == ['0'] * 4 + ['7'] * 4  # blocks of a seed are together
  assert sweep.grid([], [3]) == {'3': ['--config.seed=3']}
  assert list(sweep.grid(['loss.rule=a/b.py:f'], [1])) == ['loss.rule=a_b.py:f/1']


def test_seeds_are_a_range_or_a_list():
  assert sweep.seeds_of('0:3') == [0, 1, 2]
  assert sweep.seeds_of('0,7,9') == [0, 7, 9]
  for text in ('3:3', '', '1,1', '-1', '0:3:1', 'a'):
    with pytest.raises(ValueError, match=r'--seeds=.*0:3.*0,7,9'):
      sweep.seeds_of(text)


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    (['--set', 'clip.rule'], r'--set clip.rule: give knob=value,value'),
    (['--set', 'clip.rule=fixed,'], r'give knob=value,value'),
    (['--set', 'clip.rule=fixed,fixed'], r'twice; give it once'),
    (['--set', 'clip.rule=fixed', '--set', 'clip.rule=dcpo'], r'twice; give it once'),
    (['--set', 'clip.rule=fixed,balence'], r"'balence': give one of 'balanced'"),
    (['--set', 'seed=1,2'], r'give the seeds as --seeds=1,2'),
    (['--config.seed=5'], r'--config\.seed=5: the sweep sets this knob'),
    (['--workers=0'], r'--workers=0: give at least 1'),
    (['--per_device=0'], r'--per_device=0 .*: give at least 1'),
    (['--config=configs/none.py'], r'no such file'),
  ],
)
def test_a_wrong_sweep_is_refused_before_a_run_starts(flags, sentence, tmp_path):
  folder = tmp_path / 'runs'
  config = [] if flags[0].startswith('--config=') else ['--config=configs/aime.py']
  command = ['sweep', *config, f'--workdir={folder}', *flags]
  assert re.search(sentence, refused(command))
  assert not folder.exists()


def test_runs_of_a_seed_share_a_policy_and_are_compared(tmp_path, capsys):
  sizes = 'steps=1 sft.clean=3 sft.noisy=1'
  sizes += ' problems.custom.train=64 problems.custom.test=16'
  flags = [f'--config.{size}' for size in sizes.split()]
  arguments = ['bapo', 'sweep', '--config=configs/aime.py', f'--workdir={tmp_path}']
  arguments += ['--set', 'clip.rule=fixed,unclipped', '--seeds=4', *flags]
  arguments += [f'--config.cache={tmp_path}/cache']
  for done_before in (0, 2):  # the second time all runs are done, and stay as they are
    assert main.start(main.parse(arguments)) == 0
    assert (
      capsys.readouterr().out.count('done before, held-out accuracy') == done_before
    )
  for run in sweep.grid(['clip.rule=fixed,unclipped'], [4]):
    assert len(metrics.read(str(tmp_path / run))) == 1 + 1  # of step 0, and a step
  logs = tmp_path.glob('*/4.log')
  assert sum('Warm start of' in log.read_text() for log in logs) == 1
  page = (tmp_path / 'compare.html').read_text()
  assert 'clip.rule=unclipped' in page


def test_a_process_has_one_core_or_all_cores_and_a_gpu(tmp_path):
  text = 'import os; print(len(os.sched_getaffinity(0)), os.environ.get("CARD"))'
  command = [sys.executable, '-c', f'import time; time.sleep(0.2); {text}']
  output = tmp_path / 'arm' / '0.log'
  for environment in ({}, {'CARD': '7'}):  # appends
    assert not sweep.launch(command, str(output), 1, environment).wait()
  assert output.read_text() == f'1 None\n{len(machine.cores())} 7\n'


@pytest.fixture
def cards(tmp_path, monkeypatch):
  """Returns a function that makes a machine with n GPUs: their devices, and CUDA."""
  (tmp_path / 'jax_cuda12_plugin.py').write_text('')
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(machine, 'GPUS', str(tmp_path / 'nvidia[0-9]*'))
  for name in ('CUDA_VISIBLE_DEVICES', 'JAX_PLATFORMS', *machine.GPU_SHARES):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('XLA_FLAGS', '')

  def make(count):
    for i in range(count):
      (tmp_path / f'nvidia{i}').touch()
    (tmp_path / 'nvidiactl').touch()
    machine.prepare_gpu()

  return make


def test_each_gpu_has_one_process(cards):
  cards(3)
  share = {machine.GPU_SHARES[0]: '0.92'}
  found = [share | {'CUDA_VISIBLE_DEVICES': gpu} for gpu in '012']
  assert sweep.environments(None, 1) == found
  assert sweep.environments(2, 1) == found[:2]


def test_the_gpus_and_the_share_that_the_user_chose_are_divided(cards, monkeypatch):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5,GPU-8e1')
  monkeypatch.setenv(machine.GPU_SHARES[1], '0.6')
  cards(8)
  share = {machine.GPU_SHARES[1]: '0.3'}
  found = [share | {'CUDA_VISIBLE_DEVICES': gpu} for gpu in ('5', 'GPU-8e1')] * 2
  assert sweep.environments(None, 2) == found


@pytest.mark.parametrize(
  ('name', 'value'),
  [('CUDA_VISIBLE_DEVICES', ''), ('JAX_PLATFORMS', 'cpu'), (None, '')],
)
def test_without_a_gpu_each_core_has_one_process(cards, monkeypatch, name, value):
  cards(2 if name else 0)
  if name:
    monkeypatch.setenv(name, value)
  assert sweep.environments(None, 1) == [{}] * len(machine.cores())
  assert sweep.environments(3, 1) == [{}] * 3


def test_a_sweep_starts_a_process_per_gpu_and_takes_none_itself(tmp_path):
  """If the parent started JAX, it would fail: there is no GPU."""
  (tmp_path / 'jax_cuda12_plugin.py').write_text('')
  program = tmp_path / 'python'
  program.write_text(
    f'#!/bin/sh\necho $CUDA_VISIBLE_DEVICES ${machine.GPU_SHARES[0]}\nexit 7'
  )
  program.chmod(0o755)
  code = 'import sys; from bapo_jax import main; sys.executable = sys.argv[1]; '
  code += 'main.main(main.parse(sys.argv[1:]))'
  command = [sys.executable, '-c', code, program, 'sweep']
  command += ['--config=configs/finetune.py', '--config.model.path=m']
  command += [f'--config.problems.{x}=a.jsonl' for x in ('source', 'test_source')]
  given = {'PYTHONPATH': os.pathsep.join([os.getcwd(), str(tmp_path)])}
  given |= {'JAX_PLATFORMS': 'cuda', 'CUDA_VISIBLE_DEVICES': '4,6'}
  done = subprocess.run(
    [*command, f'--workdir={tmp_path}', '--seeds=0:5', '--per_device=2'],
    env={k: v for k, v in os.environ.items() if k not in machine.GPU_SHARES} | given,
    capture_output=True,
    text=True,
  )
  assert done.stdout.startswith(f'5 runs, 4 at once, in {tmp_path}'), done.stderr
  found = [(tmp_path / f'{seed}.log').read_text() for seed in range(5)]
  assert found[:4] == ['4 0.46\n', '6 0.46\n', '4 0.46\n', '6 0.46\n']
  assert done.returncode == 1 and done.stdout.count('failed with status 7') == 5


def test_a_sweep_replaces_no_page_of_others(tmp_path):
  (tmp_path / 'compare.html').write_text('<h1>Mine</h1>')
  line = refused(['sweep', '--config=configs/aime.py', f'--workdir={tmp_path}'])
  assert 'compare.html exists, and this program did not write it' in line
  assert os.listdir(tmp_path) == ['compare.html']
