"""Processes of one run: they join, agree, refuse what differs, and end together."""

import re
import signal
import socket
import subprocess
import sys

import numpy as np
import processes
import pytest

from bapo_jax import sharding
from bapo_jax.runtime import cluster, exchange, hosts, watch

WRONG = [  # coordinator, process, processes, what the sentence says
  ('', 0, None, '--process=0: give --coordinator, --process and --processes, or none'),
  ('here:1', None, 2, '--coordinator=here:1 --processes=2: give --coordinator, '),
  ('here:1', 2, 2, '--process=2: give 0 to 1'),
  ('here', 0, 2, 'give host:port'),
  ('here:0', 0, 2, 'give host:port'),
  ('127.0.0.1:1', 1, 2, 'no coordinator answers at 127.0.0.1:1 within 0 s'),
]


@pytest.mark.parametrize(('coordinator', 'process', 'count', 'words'), WRONG)
def test_flags_that_do_not_fit_are_one_sentence(coordinator, process, count, words):
  with pytest.raises(ValueError, match=words):
    hosts.initialise(coordinator, process, count, start_s=0.0)
  assert hosts.processes() == 1


def test_a_port_that_is_taken_is_named():
  # gRPC would share it, and two runs would wait for each other's processes.
  with (
    socket.create_server(('', 0)) as taken,
    pytest.raises(ValueError, match='Address already in use'),
  ):
    hosts.initialise(f'127.0.0.1:{taken.getsockname()[1]}', 0, 2, start_s=0.0)


def test_one_process_needs_nothing():
  hosts.initialise('here:1', 0, 1)
  assert (hosts.process(), hosts.processes(), hosts.is_first()) == (0, 1, True)
  assert exchange.agree([3, 0]) == [3, 0]
  assert exchange.total([1, 2]).tolist() == [1, 2]
  assert exchange.merged({'a': 1}) == {'a': 1}
  hosts.same_everywhere({'config': 1})
  hosts.finish(0)
  hosts.leave(2, 'alone')


def test_the_place_is_read_from_slurm_and_from_a_jobset(monkeypatch):
  assert cluster.detect(1.0) is None
  for name, value in {
    'SLURM_JOB_ID': '4097',
    'SLURM_STEP_NODELIST': 'node[007-010]',
    'SLURM_NTASKS': '4',
    'SLURM_PROCID': '2',
    'SLURM_LOCALID': '0',
  }.items():
    monkeypatch.setenv(name, value)
  found = cluster.detect(1.0)
  assert found is not None
  # The port is 2^16 - 2^12 + the job's number modulo 2^12: 61440 + 1.
  assert found == ('node007:61441', 2, 4, [0])
  monkeypatch.setenv('SLURM_STEP_NUM_NODES', '4')
  assert cluster.detect(1.0) == ('node007:61441', 2, 4, None)
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'job-0:1234')
  monkeypatch.setenv('JOB_COMPLETION_INDEX', '3')
  monkeypatch.setenv('JAX_NUM_PROCESSES', '8')
  assert cluster.detect(1.0) == ('job-0:1234', 3, 8, None)
  monkeypatch.setenv('JAX_NUM_PROCESSES', 'many')
  with pytest.raises(ValueError, match='JAX_NUM_PROCESSES=many: give numbers'):
    cluster.detect(1.0)


def test_rows_of_an_array_on_eight_devices_come_back_in_the_order_asked_for():
  mesh = sharding.make(data=4, tensor=2)
  x_BT = np.arange(24).reshape(12, 2)
  array = exchange.placed(x_BT, sharding.over_rows(mesh))
  assert exchange.owned(array).all()
  rows = [11, 0, 5, 4, 5]
  np.testing.assert_array_equal(exchange.rows_of(array, rows), x_BT[rows])
  assert exchange.rows_of(array, []).shape == (0, 2)
  np.testing.assert_array_equal(exchange.whole(array), x_BT)


TOGETHER = """
import jax, numpy as np
from bapo_jax import sharding
me = hosts.process()
assert (hosts.processes(), jax.process_count()) == (2, 2)
assert exchange.agree([me, 1 - me, 7]) == [1, 1, 7]
assert exchange.total([[me, 2], [3, 4]]).tolist() == [[1, 4], [6, 8]]
long = 'é' * (3 + 700_000 * me)  # two blocks of one, a part of one of the other
assert exchange.merged({str(me): long}) == {'0': 'é' * 3, '1': 'é' * 700_003}
assert exchange.merged({}) == {}
x = np.arange(24).reshape(12, 2)
mesh = sharding.make(data=2, fsdp=2)
rows = exchange.placed(x, sharding.over_rows(mesh))
assert exchange.owned(rows).tolist() == [i // 6 == me for i in range(12)]
own = np.flatnonzero(exchange.owned(rows))[::-1]
assert (exchange.rows_of(rows, own) == x[own]).all()
assert not rows.is_fully_addressable and (exchange.whole(rows) == x).all()
every = exchange.placed({'a': x}, sharding.replicated(mesh))['a']
assert exchange.owned(every).tolist() == [i // 6 == me for i in range(12)]
path = sys.argv[2]
with hosts.first_ahead('file'):
  if me == 0:
    time.sleep(1)
    open(path, 'w').close()
  assert os.path.exists(path)
hosts.same_everywhere({'config': {'steps': 4}})
print('agreed')
hosts.finish(5)
"""


def test_two_processes_agree_sum_and_read_their_own_rows(tmp_path):
  source = TOGETHER.replace('sys.argv[2]', repr(str(tmp_path / 'made')))
  statuses, outputs = processes.ended(processes.scripts(source, 2, tmp_path), tmp_path)
  assert statuses == [5, 5], outputs
  assert all('agreed' in text for text in outputs)


def test_a_process_that_differs_is_refused_by_all_in_one_sentence(tmp_path):
  source = (
    'try:\n'
    '  hosts.same_everywhere({"config": {"steps": 4 + hosts.process(), "seed": 0}})\n'
    'except ValueError as error:\n'
    '  print(error)\n'
    '  hosts.leave(2, str(error))\n'
    'print("went on")\n'
  )
  statuses, outputs = processes.ended(processes.scripts(source, 3, tmp_path), tmp_path)
  assert statuses == [2, 2, 2], outputs
  assert not any('went on' in text for text in outputs)
  words = (
    r'process [12] of 3 differs from process 0: config.steps [56] here and 4 there'
  )
  assert all(re.search(words, text) for text in outputs), outputs


@pytest.mark.parametrize('victim', [0, 1])
def test_a_process_that_is_killed_ends_the_others_with_a_sentence(tmp_path, victim):
  started = processes.scripts('print("up"); time.sleep(600)', 2, tmp_path)
  while not all('up' in (tmp_path / f'{i}.txt').read_text() for i in (0, 1)):
    assert [process.poll() for process in started] == [None, None]
  started[victim].send_signal(signal.SIGKILL)
  statuses, outputs = processes.ended(started, tmp_path)
  other = 1 - victim
  assert statuses[other] == watch.LOST, outputs
  assert f'process {other} of 2: process {victim} is gone' in outputs[other]


def test_an_error_of_one_process_reaches_the_console_of_the_first(tmp_path):
  source = (
    'if hosts.process() == 1:\n'
    '  try:\n'
    '    raise KeyError("lost")\n'
    '  except KeyError as error:\n'
    '    hosts.failed(error)\n'
    'time.sleep(600)\n'
  )
  statuses, outputs = processes.ended(processes.scripts(source, 2, tmp_path), tmp_path)
  assert statuses == [1, 1], outputs
  assert "process 0 of 2 ends with process 1: KeyError: 'lost'" in outputs[0]
  assert 'Traceback' in outputs[1]


def test_an_abort_of_the_runtime_becomes_a_sentence_and_a_status():
  source = (
    'import os, threading\n'
    'from bapo_jax.runtime import watch\n'
    'watch.on_abort(lambda: "it aborted")\n'
    'threading.Thread(target=os.abort).start()\n'  # not the main one, as in JAX
  )
  done = subprocess.run(
    [sys.executable, '-c', source], capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stderr) == (watch.LOST, 'bapo_jax: it aborted\n')
