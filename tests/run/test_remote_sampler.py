"""Sampling in other processes equals sampling ahead in one process, bit for bit."""

import signal
import time

import processes
import pytest
import runs
from runs import PARTIAL, last_run, same
from test_many_processes import FAR, assert_states, texts
from test_overlap import ADAPTED, KNOBS, SAVED, check_equal, start, wait

from bapo_jax.runtime import hosts, metrics

BOTH = {'clip.rule': 'balanced', 'rollout.depth': 2} | ADAPTED


def apart(workdir, *, devices=1, train=1, sample=1, **knobs):
  """Starts a run in so many processes that train and that sample."""
  count = train + sample
  flags = f'{runs.FLAGS} --xla_force_host_platform_device_count={devices}'
  mesh = {'mesh.data': train * devices, 'mesh.rollout': sample * devices}
  env = processes.environment(1) | {'XLA_FLAGS': flags}
  own = [{'env': env}] * count
  return processes.trainings(
    workdir, count, apart=own, **KNOBS | {'mesh.fsdp': 1} | mesh | knobs
  )


def finished(workdir, started, status=0):
  """Waits for the processes; returns their outputs."""
  folder = workdir.parent / f'{workdir.name}.output'
  return processes.outputs(started, folder, status)


def reached(workdir, started, words):
  """Waits until process 0 has printed the words; returns the folder of outputs."""
  folder = workdir.parent / f'{workdir.name}.output'
  processes.wait_until(lambda: words in (folder / '0.txt').read_text(), started)
  return folder


def compared(tmp_path, *, devices=1, **knobs):
  """Compares two processes with one that samples ahead on as many devices."""
  folders = tmp_path / 'ahead', tmp_path / 'remote'
  started = apart(folders[1], devices=devices, **knobs)
  wait(start(folders[0], devices, **{'mesh.data': devices} | knobs))
  outputs = finished(folders[1], started)
  ahead, remote = ([last_run(x, step) for step in SAVED] for x in folders)
  check_equal(ahead, remote, folders)
  return folders[1], remote[-1], outputs


def test_another_process_samples_the_same(tmp_path):
  workdir, last, (first, second) = compared(tmp_path, **BOTH | PARTIAL | runs.BRIEF)
  assert float(last.rows[6]['learner/updates']) > 6
  assert 'held-out accuracy at step 6' in first and 'step' not in second
  assert 'Time without work' in (workdir / 'report.html').read_text()
  rows = metrics.read(str(workdir))[1:]
  assert all(row['overlap/sampling'] < row['overlap/sampled'] for row in rows)


@pytest.mark.nightly
def test_two_devices_in_each_process_and_an_older_actor(tmp_path):
  # Hard problems are sampled with newer weights than the actor's.
  older = {'rollout.weight_sync_interval': 2}
  workdir, *_ = compared(tmp_path, devices=2, **BOTH | PARTIAL | older)
  assert 'actor' in {name.split('/')[0] for name in last_run(workdir, 3).arrays}


@pytest.mark.nightly
@pytest.mark.parametrize('devices', [{'data': 2}, {'tensor': 2, 'data': 1}])
def test_two_processes_train_and_two_sample(tmp_path, devices):
  knobs = BOTH | PARTIAL | {f'mesh.{name}': n for name, n in devices.items()}
  folders = tmp_path / 'ahead', tmp_path / 'remote'
  wait(start(folders[0], 2, **knobs))
  finished(folders[1], apart(folders[1], train=2, sample=2, **knobs))
  ahead, remote = (last_run(x) for x in folders)
  assert_states(ahead, remote, FAR)
  assert texts(folders[0]) == texts(folders[1])


@pytest.mark.nightly
def test_a_killed_run_goes_on_as_if_unbroken(tmp_path):
  knobs = BOTH | PARTIAL | {'checkpoint.every': 1}
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  finished(whole, apart(whole, **knobs))
  started = apart(broken, **knobs | {'steps': 6})
  folder = reached(broken, started, '3/6')
  started[1].kill()  # the process that samples
  statuses, (output, _) = processes.ended(started, folder)
  assert statuses == [hosts.LOST, -signal.SIGKILL]
  assert 'another process is gone' in output
  finished(broken, apart(broken, **knobs))
  one, other = last_run(whole), last_run(broken)
  assert one.scalars == other.scalars and one.rows == other.rows
  assert same(one.arrays, other.arrays) and texts(whole) == texts(broken)


def test_a_signal_to_the_process_that_samples_ends_the_run(tmp_path):
  workdir = tmp_path / 'stopped'
  knobs = (
    BOTH | PARTIAL | {'steps': 400, 'evaluate.every': 400, 'checkpoint.every': 400}
  )
  started = apart(workdir, **knobs)
  reached(workdir, started, '2/400')
  started[1].send_signal(signal.SIGTERM)
  outputs = finished(workdir, started, 128 + signal.SIGTERM)
  assert 'Saved. Run the same command' in outputs[0]


@pytest.mark.parametrize('asked', [0, 1], ids=['trains', 'samples'])
def test_a_second_signal_ends_a_process_that_waits_for_the_other(tmp_path, asked):
  workdir = tmp_path / 'interrupted'
  knobs = BOTH | dict.fromkeys(('steps', 'evaluate.every', 'checkpoint.every'), 400)
  started = apart(workdir, **knobs)
  reached(workdir, started, '2/400')
  started[1 - asked].send_signal(signal.SIGSTOP)
  time.sleep(1)  # until it waits for an answer or an order
  started[asked].send_signal(signal.SIGINT)
  time.sleep(0.5)
  started[asked].send_signal(signal.SIGINT)
  assert started[asked].wait(20) == 130
  started[1 - asked].kill()
  assert started[1 - asked].wait() == -signal.SIGKILL


def test_a_process_cannot_do_both(tmp_path):
  workdir = tmp_path / 'both'
  started = apart(workdir, devices=2, **BOTH | {'mesh.data': 1, 'mesh.rollout': 3})
  outputs = finished(workdir, started, 2)
  assert 'mesh.rollout=3: process 0 would train and sample' in outputs[0]


def test_a_run_that_cannot_go_on_ends_both_sides(tmp_path):
  workdir = tmp_path / 'damaged'
  knobs = BOTH | {'checkpoint.every': 1, 'evaluate.every': 9}
  finished(workdir, apart(workdir, **knobs | {'steps': 1}))
  for file in (workdir / 'checkpoints').glob('*/meta/*'):
    file.write_text('{')
  started = apart(workdir, **knobs | {'steps': 2})
  outputs = finished(workdir, started, 2)
  assert 'has no complete checkpoint' in outputs[0]
