"""Processes of one run: they join, agree, refuse what differs, and end together."""

import contextlib
import pathlib
import re
import signal
import socket
import sys

import processes
import pytest

from bapo_jax.runtime import hosts


@pytest.mark.parametrize(
  ('coordinator', 'process', 'count', 'words'),
  [
    ('', 0, None, '--process=0: give'),
    ('here:1', 2, 2, '--process=2'),
    ('here:0', 0, 2, '--coordinator=here:0'),
  ],
)
def test_flags_that_do_not_fit_are_refused(coordinator, process, count, words):
  with pytest.raises(ValueError, match=words):
    hosts.initialise(coordinator, process, count, start_s=0.0)
  assert len(hosts.side()) == 1


def test_the_variables_of_a_jobset_stand_for_the_flags(monkeypatch):
  variables = {'COORDINATOR_ADDRESS': 'here:1', 'NUM_PROCESSES': '2'}
  for name, value in variables.items():
    monkeypatch.setenv(f'JAX_{name}', value)
  monkeypatch.setenv('JOB_COMPLETION_INDEX', '2')  # counts from 0
  with pytest.raises(ValueError, match='--process=2'):
    hosts.initialise(start_s=0.0)


def test_a_port_that_is_taken_is_refused():
  # gRPC would share it, and two runs would wait for each other's processes.
  with socket.create_server(('', 0)) as taken:
    address = f'127.0.0.1:{taken.getsockname()[1]}'
    with pytest.raises(ValueError, match=address):
      hosts.initialise(address, 0, 2, start_s=0.0)


def test_a_detected_port_that_is_taken_ends_a_start_that_may_be_repeated():
  # JAX takes a port by the number of the SLURM job; restarts.sh repeats status 4 only.
  job = next(n for n in range(4096) if is_free(61440 + n))
  task = {'JOB_ID': job, 'STEP_NODELIST': 'localhost', 'STEP_NUM_NODES': 1}
  task |= {'NTASKS': 2, 'PROCID': 0, 'LOCALID': 0}
  environment = {f'SLURM_{name}': str(value) for name, value in task.items()}
  code = 'from bapo_jax.runtime import hosts; hosts.initialise(start_s=10.0)'
  with socket.create_server(('', 61440 + job)):
    run = processes.call(sys.executable, '-c', code, status=hosts.LOST, **environment)
    alone = {**environment, 'SLURM_NTASKS': '1'}  # steps of a job would share a port
    processes.call(sys.executable, '-c', code, **alone)
    at = f'localhost:{processes.free_port()}'  # this port and no other is taken then
    elsewhere = {**environment, 'JAX_COORDINATOR_ADDRESS': at}
    code = code.replace('10.0', '2.0')
    waited = processes.call(sys.executable, '-c', code, status=hosts.LOST, **elsewhere)
  assert run.stderr.startswith(f'bapo_jax: port {61440 + job} of SLURM job {job}: ')
  assert 'start again' in run.stderr and len(run.stderr.splitlines()) == 1
  assert 'not all processes reached the coordinator' in waited.stderr


def is_free(port):
  with contextlib.suppress(OSError), socket.create_server(('', port)):
    return True
  return False


def test_the_port_of_transfers_is_none_that_the_system_gives_away():
  # Otherwise it may be in use when the first array crosses.
  range_ = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
  if not range_.exists():
    pytest.skip('the range of outgoing ports is read as on Linux')
  least = int(range_.read_text().split()[0])
  addresses = [hosts._own_address(('127.0.0.1:1', 0, 2)) for _ in range(200)]
  assert all(x.startswith('127.0.0.1:') for x in addresses)
  ports = {int(x.rpartition(':')[2]) for x in addresses}
  assert min(ports) > 1023 and max(ports) < least and len(ports) > 100


# Joins as a SLURM job does, where each task has a node for itself. At the end the
# processes differ, and all of them end with one sentence.
TOGETHER = """
import jax, numpy as np
from bapo_jax import sharding
me = hosts.process()
assert (len(hosts.side()), jax.process_count(), jax.device_count()) == (2, 2, 4)
assert exchange.agree([me, 1 - me, 7]) == [1, 1, 7]
assert exchange.total([[me, 2], [3, 4]]).tolist() == [[1, 4], [6, 8]]
assert exchange.total([me]).dtype == np.int32
long = 'é' * (3 + 700_000 * me)
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
try:
  hosts.same_everywhere({'config': {'steps': 4 + me, 'seed': 0}})
except ValueError as error:
  print(error)
hosts.leave(5)
"""


def test_two_processes_agree_read_their_own_rows_and_refuse_what_differs(tmp_path):
  slurm = {
    # JAX's port is 2^16 - 2^12 + the number of the job modulo 2^12.
    'SLURM_JOB_ID': str(processes.free_port(61440) - 61440),
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_STEP_NUM_NODES': '2',
    'SLURM_NTASKS': '2',
    'SLURM_LOCALID': '0',
  }
  source = TOGETHER.replace('PATH', repr(str(tmp_path / 'made')))
  env = [slurm | {'SLURM_PROCID': str(i)} for i in range(2)]
  join = 'hosts.initialise()'
  started = processes.scripts(source, 2, tmp_path, join=join, env=env)
  outputs = processes.outputs(started, tmp_path, 5)
  words = 'process 1 of 2 differs from process 0: config.steps 5 there and 4'
  assert all(words in text for text in outputs), outputs


# Uses JAX while it is loaded. Alone it is refused later, of two processes in one.
CONFIG = """
import jax, jax.numpy as jnp
from bapo_jax.runtime import hosts
ONES = jnp.ones(3)
def get_config():
  found = f'{int(ONES.sum())} ones in {jax.process_count()} processes'
  if hosts.process():
    raise ValueError(found)
  from bapo_jax.training import config
  values = config.defaults()
  values.model.path = f'absent/{found}'
  return values
"""


@pytest.mark.parametrize('count', [1, 2])
def test_a_config_may_use_jax_when_it_is_loaded(tmp_path, count):
  path = tmp_path / 'my.py'
  path.write_text(CONFIG)
  command = [sys.executable, '-m', 'bapo_jax', 'train', f'--config={path}']
  command.append(f'--workdir={tmp_path / "run"}')
  if count > 1:
    address = f'127.0.0.1:{processes.free_port()}'
    command += [f'--coordinator={address}', f'--processes={count}']
  commands = [
    {
      'args': [*command, *[f'--process={i}'] * (count > 1)],
      'env': processes.environment(count),
      'cwd': tmp_path,
    }
    for i in range(count)
  ]
  # All of them end, with its sentence.
  outputs = processes.outputs(processes.start(commands, tmp_path), tmp_path, 2)
  assert all(f'3 ones in {count} processes' in text for text in outputs), outputs


@pytest.mark.parametrize('wrong', [0, 1])
def test_an_error_of_one_process_is_an_error_of_all(tmp_path, wrong):
  source = (
    'try:\n'
    '  with hosts.first_ahead():\n'
    f'    if hosts.process() == {wrong}:\n'
    '      raise ValueError("no such file")\n'
    f'    assert {wrong}, "the first is ahead"\n'
    'except ValueError as error:\n'
    '  print(error)\n'
    '  time.sleep(0.5 * hosts.process())\n'  # nobody is lost if others are slower
    '  hosts.leave(2)\n'
    'print("went on")\n'
  )
  outputs = processes.outputs(processes.scripts(source, 2, tmp_path), tmp_path, 2)
  assert all('no such file' in t and 'went on' not in t for t in outputs), outputs


# How a process is lost while the other one waits for it: killed, stopped, or ended by
# an error of its own.
@pytest.mark.parametrize('loss', [signal.SIGKILL, signal.SIGSTOP, None])
def test_the_others_end_with_a_sentence_when_a_process_is_gone(tmp_path, loss):
  victim = 0 if loss == signal.SIGKILL else 1
  source = (
    'exchange.agree([0])\n'  # the next one fails in a program that is called again
    'print("up")\n'
    'try:\n'
    f'  if hosts.process() == {victim}:\n'
    f'    time.sleep({600 if loss else 1})\n'
    '    raise KeyError("lost")\n'
    '  exchange.agree([0])\n'
    'except Exception as error:\n'
    '  hosts.failed(error)\n'
  )
  address = f'"127.0.0.1:{processes.free_port()}", int(sys.argv[1]), 2, 900'
  join = f'hosts.HEARTBEAT_S = 4\nhosts.initialise({address})'
  started = processes.scripts(source, 2, tmp_path, join=join)
  if loss:
    processes.wait_for(tmp_path, 'up', started)
    started[victim].send_signal(loss)
  status = started[1 - victim].wait(processes.PATIENCE_S)
  if loss:
    started[victim].kill()
  ended = started[victim].wait(processes.PATIENCE_S)
  other, text = ((tmp_path / f'{i}.txt').read_text() for i in (victim, 1 - victim))
  assert status == hosts.LOST, text
  assert re.search('bapo_jax: .*another process is gone', text)
  assert 'Traceback' not in text
  if not loss:
    assert ended == 1
    assert "process 1 of 2: KeyError: 'lost'" in other and 'Traceback' in other


def test_a_failed_collective_is_no_refusal():
  # As JAX 0.10 raises it from compiled dispatch.
  lost = ValueError('UNKNOWN: Gloo AllGather failed: Connection closed by peer')
  assert hosts.is_collective(lost) and hosts.is_collective(TimeoutError())
  assert not hosts.is_collective(ValueError('steps=0: give an integer, at least 1'))


def test_a_process_that_stays_alone_ends_with_a_sentence(tmp_path):
  join = 'hosts.initialise("127.0.0.1:1", 1, 2, 1.0)'
  started = processes.scripts('', 1, tmp_path, join=join)
  (text,) = processes.outputs(started, tmp_path, hosts.LOST)
  assert 'not all processes reached 127.0.0.1:1' in text


# --------- values cross between processes unchanged, whatever the sizes of both meshes


SOURCE = """
import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from bapo_jax import sharding
from bapo_jax.runtime.link import Link

samplers, tensor = {samplers}, {tensor}
_, others = sharding.divide(samplers)
source = sharding.make(tensor=tensor, rollout=samplers)
target = sharding.make(tensor=tensor, devices=others)
there, back = Link(source, target), Link(target, source)


def value(mesh):
  rng = np.random.default_rng(0)
  kinds = "int32 uint32 bool int8 uint8 float32".split() + [ml_dtypes.bfloat16]
  arrays = [rng.integers(0, 2, (4, 6)).astype(kind) for kind in kinds]
  arrays += [np.zeros((0, 3), np.float32), np.float32(rng.normal(size=(1024, 2048)))]
  whole, split = (NamedSharding(mesh, P(*spec)) for spec in ((), (None, 'tensor')))
  return {{
    'text': 'Ωmega', 'none': None, 'host': np.asarray([2**40, -1]), 'empty': {{}},
    'arrays': [jax.device_put(x, whole) for x in arrays],
    'split': [jax.device_put(x, split) for x in arrays if x.size],
  }}


def shards(x):
  if not isinstance(x, jax.Array):
    return repr(x)
  return str(x.dtype), x.sharding.spec, [
    (str(s.index), np.asarray(s.data).tobytes()) for s in x.addressable_shards]


trains = any(d.process_index == hosts.process() for d in source.devices.flat)
for step in range(2):
  if trains:
    there.send(value(source))
    time.sleep(step)  # the other side waits
    found, expected = back.receive(), value(source)
  else:
    found, expected = there.receive(), value(target)
    back.send(found)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  assert all(shards(x) == shards(y) for x, y in leaves)
print('equal')
hosts.finish(0)
"""


@pytest.mark.parametrize(
  ('count', 'samplers', 'tensor'),
  [
    (2, 2, 2),
    pytest.param(4, 1, 1, marks=pytest.mark.nightly),
    pytest.param(4, 3, 1, marks=pytest.mark.nightly),
    pytest.param(4, 2, 2, marks=pytest.mark.nightly),
  ],
)
def test_values_cross_both_ways(tmp_path, count, samplers, tensor):
  source = SOURCE.format(samplers=samplers, tensor=tensor)
  started = processes.scripts(source, count, tmp_path)
  assert all('equal' in text for text in processes.outputs(started, tmp_path))
