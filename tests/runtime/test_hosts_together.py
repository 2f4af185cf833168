"""Processes of one run: they join, agree, refuse what differs, and end together."""

import re
import signal
import socket

import numpy as np
import processes
import pytest

from bapo_jax import sharding
from bapo_jax.runtime import exchange, hosts

WRONG = [  # coordinator, process, processes, what the sentence names
  ('', 0, None, '--process=0: give'),
  ('here:1', None, 2, '--coordinator=here:1 --processes=2: give'),
  ('here:1', 2, 2, '--process=2'),
  ('here', 0, 2, '--coordinator=here'),
  ('here:0', 0, 2, '--coordinator=here:0'),
]


@pytest.mark.parametrize(('coordinator', 'process', 'count', 'words'), WRONG)
def test_flags_that_do_not_fit_are_refused(coordinator, process, count, words):
  with pytest.raises(ValueError, match=words):
    hosts.initialise(coordinator, process, count, start_s=0.0)
  assert hosts.processes() == 1


def test_a_port_that_is_taken_is_refused():
  # gRPC would share it, and two runs would wait for each other's processes.
  with socket.create_server(('', 0)) as taken:
    address = f'127.0.0.1:{taken.getsockname()[1]}'
    with pytest.raises(ValueError, match=address):
      hosts.initialise(address, 0, 2, start_s=0.0)


def test_a_jobset_with_a_number_that_is_none_is_refused(monkeypatch):
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'job-0:1234')
  monkeypatch.setenv('JOB_COMPLETION_INDEX', '3')
  monkeypatch.setenv('JAX_NUM_PROCESSES', 'many')
  with pytest.raises(ValueError, match='JAX_NUM_PROCESSES=many'):
    hosts.initialise()


def test_one_process_needs_nothing():
  hosts.initialise('here:1', 0, 1)
  assert (hosts.process(), hosts.processes(), hosts.is_first()) == (0, 1, True)
  assert exchange.agree([3, 0]) == [3, 0]
  assert exchange.merged({'a': 1}) == {'a': 1}
  hosts.same_everywhere({'config': 1})
  with pytest.raises(ValueError, match='alone'), hosts.first_ahead():
    raise ValueError('alone')
  hosts.finish(0)
  hosts.leave(2)


def test_differences_are_dotted_and_a_missing_value_is_none():
  before = {'a': {'b': 1, 'c': {'d': 2}}, 'e': [1]}
  now = {'a': {'b': 1, 'c': {'d': 3, 'f': 4}}}
  assert list(hosts.differences(before, now)) == [
    ('a.c.d', 2, 3),
    ('a.c.f', None, 4),
    ('e', [1], None),
  ]


def test_rows_of_an_array_on_eight_devices_come_back_in_the_order_asked_for():
  mesh = sharding.make(data=4, tensor=2)
  x_BT = np.arange(24).reshape(12, 2)
  array = exchange.placed(x_BT, sharding.over_rows(mesh))
  assert exchange.owned(array).all()
  rows = [11, 0, 5, 4, 5]
  np.testing.assert_array_equal(exchange.rows_of(array, rows), x_BT[rows])
  assert exchange.rows_of(array, []).shape == (0, 2)
  np.testing.assert_array_equal(exchange.whole(array), x_BT)


# Joins as a SLURM job does, where each task has a node for itself.
TOGETHER = """
import jax, numpy as np
from bapo_jax import sharding
me = hosts.process()
assert (hosts.processes(), jax.process_count(), jax.device_count()) == (2, 2, 4)
assert exchange.agree([me, 1 - me, 7]) == [1, 1, 7]
assert exchange.total([[me, 2], [3, 4]]).tolist() == [[1, 4], [6, 8]]
assert exchange.total([me]).dtype == np.int32
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
assert (exchange.taken({'a': rows}, np.asarray([11, 0]))['a'] == x[[11, 0]]).all()
every = exchange.placed({'a': x}, sharding.replicated(mesh))['a']
assert exchange.owned(every).tolist() == [i // 6 == me for i in range(12)]
with hosts.first_ahead():
  if me == 0:
    time.sleep(1)
    open(PATH, 'w').close()
  assert os.path.exists(PATH)
hosts.same_everywhere({'config': {'steps': 4}})
print('agreed')
hosts.finish(5)
"""


def test_two_processes_agree_sum_and_read_their_own_rows(tmp_path):
  slurm = {
    # JAX's port is 2^16 - 2^12 + the number of the job modulo 2^12.
    'SLURM_JOB_ID': str(processes.free_port(61440) - 61440),
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_STEP_NUM_NODES': '2',
    'SLURM_NTASKS': '2',
    'SLURM_LOCALID': '0',
  }
  started = processes.scripts(
    TOGETHER.replace('PATH', repr(str(tmp_path / 'made'))),
    2,
    tmp_path,
    join='hosts.initialise()',
    env=[slurm | {'SLURM_PROCID': str(i)} for i in range(2)],
  )
  statuses, outputs = processes.ended(started, tmp_path)
  assert statuses == [5, 5], outputs
  assert all('agreed' in text for text in outputs)


# (what a process does, the sentence of all of them)
REFUSED = {
  'values that differ': (
    'hosts.same_everywhere({"config": {"steps": 4 + hosts.process() // 2, "seed": 0}})',
    'process 2 of 3 differs from process 0: config.steps 5 there and 4',
  ),
  'an error of the first': (
    'with hosts.first_ahead():\n'
    '    assert hosts.is_first()\n'
    '    raise ValueError("no such file")',
    'no such file',
  ),
  'an error of the last': (
    'with hosts.first_ahead():\n'
    '    if hosts.process() == 2:\n'
    '      raise ValueError("no such file")',
    'no such file',
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_an_error_of_one_process_is_an_error_of_all(tmp_path, name):
  body, sentence = REFUSED[name]
  source = (
    f'try:\n  {body}\n'
    'except ValueError as error:\n'
    '  print(error)\n'
    '  time.sleep(0.5 * hosts.process())\n'  # nobody is lost where others are slower
    '  hosts.leave(2)\n'
    'print("went on")\n'
  )
  statuses, outputs = processes.ended(processes.scripts(source, 3, tmp_path), tmp_path)
  assert statuses == [2, 2, 2], outputs
  assert all(sentence in text and 'went on' not in text for text in outputs), outputs


GONE = [  # what the survivor does, how the other one is lost, the one that is lost
  ('sleeps', signal.SIGKILL, 0),
  ('sleeps', signal.SIGKILL, 1),
  ('waits', signal.SIGKILL, 1),
  ('waits', signal.SIGSTOP, 0),
  ('waits', signal.SIGSTOP, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(('busy', 'number', 'victim'), GONE)
def test_the_others_end_with_a_sentence_when_a_process_is_gone(
  tmp_path, busy, number, victim
):
  source = (
    'print("up")\n'
    f'if {busy == "sleeps"} or hosts.process() == {victim}:\n'
    '  time.sleep(600)\n'
    'try:\n'
    '  exchange.agree([0])\n'
    'except Exception as error:\n'
    '  hosts.failed(error)\n'
  )
  started = processes.scripts(source, 2, tmp_path)
  processes.wait_for(tmp_path, 'up', started)
  started[victim].send_signal(number)
  status = started[1 - victim].wait(processes.PATIENCE_S)
  started[victim].kill()
  text = (tmp_path / f'{1 - victim}.txt').read_text()
  assert status == hosts.LOST, text
  assert re.search('bapo_jax: .*another process is gone', text)
  assert 'Traceback' not in text


@pytest.mark.slow
def test_an_unexpected_error_ends_all(tmp_path):
  source = (
    'if hosts.process() == 1:\n'
    '  try:\n'
    '    raise KeyError("lost")\n'
    '  except KeyError as error:\n'
    '    hosts.failed(error)\n'
    'time.sleep(600)\n'
  )
  statuses, outputs = processes.ended(processes.scripts(source, 2, tmp_path), tmp_path)
  assert statuses == [hosts.LOST, 1], outputs
  assert "process 1 of 2: KeyError: 'lost'" in outputs[1]
  assert 'Traceback' in outputs[1]


def test_a_process_that_stays_alone_ends_with_a_sentence(tmp_path):
  join = 'hosts.initialise("127.0.0.1:1", 1, 2, 1.0)'
  started = processes.scripts('', 1, tmp_path, join=join)
  (status,), (text,) = processes.ended(started, tmp_path)
  assert status == hosts.LOST
  assert 'not all processes came to 127.0.0.1:1' in text
