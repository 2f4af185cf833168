"""Joins the processes of one run, one per host, and ends them together.

All processes run the same program with the same seed; process 0 writes the console and
the files. The processes of a *side* compute together: until `divide` all processes of
the *run*, then those that train, or those that only sample. An error in one process
ends the run: JAX aborts a process when another process sends no heartbeat, and a signal
handler turns the abort into a message and an exit status. With a single process these
functions cost nothing.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from bapo_jax.runtime.files import first_line

START_S = 300.0  # hosts of one job start minutes apart
HEARTBEAT_S = 10  # a process without a heartbeat for this long counts as gone
GRACE_S = 3.0  # `leave` waits this long for the other processes
SHUTDOWN_S = 24 * 3600  # processes wait this long for process 0 to write the report
PORTS = (10_000, 32_000)  # below the outgoing ports of Linux, macOS and BSD
LOST = 4  # exit status: another process is gone
Cluster = tuple[str, int, int] | None  # coordinator, process, processes; None: detected
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


@dataclasses.dataclass
class _Here:
  """Holds what this process knows of the others."""

  process: int = 0  # its number
  run: Sequence[int] = (0,)  # the numbers of all processes
  side: Sequence[int] = (0,)  # of those that compute together with this one
  handlers: list[Any] = dataclasses.field(default_factory=list)  # C keeps no callback


_here = _Here()


def process() -> int:
  """Returns the number of this process in the run, from 0."""
  return _here.process


def run() -> Sequence[int]:
  """Returns the numbers of all processes of the run."""
  return _here.run


def side() -> Sequence[int]:
  """Returns the numbers of the processes that compute together with this one."""
  return _here.side


def divide(side: Iterable[int]) -> None:
  """Makes the processes `side`, this one among them, compute without the others."""
  _here.side = sorted(side)


def is_first() -> bool:
  """Returns whether this process writes the console and the files of the run."""
  return process() == 0


def initialise(
  coordinator: str = '',
  process: int | None = None,
  processes: int | None = None,
  start_s: float = START_S,
) -> None:
  """Joins the other processes and waits for them; JAX must not be in use yet.

  Without arguments, reads the variables of a JobSet (JAX_COORDINATOR_ADDRESS,
  JAX_NUM_PROCESSES, JOB_COMPLETION_INDEX) or lets JAX look for SLURM, GKE and TPU
  metadata; without any of these, the process runs alone. `coordinator` is host:port of
  process 0, `process` counts from 0, and `start_s` limits the wait in seconds. Raises
  ValueError if the flags are inconsistent, the port is taken, or the environment
  describes a cluster but the other processes cannot be found.
  """
  flags = {'coordinator': coordinator, 'process': process, 'processes': processes}
  present = [f'--{name}={x}' for name, x in flags.items() if x not in ('', None)]
  if len(present) in (1, 2):
    raise ValueError(
      f'{" ".join(present)}: give all of --coordinator, --process, --processes, or none'
    )
  if process is None or processes is None:
    # A JobSet without TPUs sets these; JAX detects it only with access to Kubernetes.
    names = ('JAX_COORDINATOR_ADDRESS', 'JOB_COMPLETION_INDEX', 'JAX_NUM_PROCESSES')
    at, i, n = (os.environ.get(name, '') for name in names)
    cluster = (at, int(i), int(n)) if at and i and n else None
  else:
    cluster = coordinator, process, processes
  if cluster:
    _check(cluster)
  if (cluster[2] if cluster else _slurm_tasks()) == 1:
    return
  _explain_abort(
    f'not all processes reached {cluster[0] if cluster else "the coordinator"} within '
    f'{start_s:.0f} s; start every process with the same --coordinator'
  )
  if _join(cluster, int(start_s)):
    import jax

    _here.process = jax.process_index()
    _here.run = _here.side = range(jax.process_count())
  if len(_here.run) == 1:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    return
  _explain_abort(
    f'process {_here.process} of {len(_here.run)}: another process is gone '
    '(killed, lost with its host, or ended by an error); run the same command on all '
    'hosts to resume from the newest checkpoint'
  )


def _check(cluster: tuple[str, int, int]):
  """Raises ValueError if the flags are inconsistent or the port is taken."""
  coordinator, process, processes = cluster
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise ValueError(f'--coordinator={coordinator}: give host:port, port 1-65535')
  if not 0 <= process < processes:
    raise ValueError(
      f'--process={process}: give 0 to {processes - 1} for --processes={processes}'
    )
  if not process and processes > 1 and (problem := _taken(port)):
    raise ValueError(f'--coordinator={coordinator}: {problem}; give a free port')


def _slurm_tasks():
  """Returns the number of tasks of this SLURM step, 0 outside of one.

  Ends the process with status LOST if the first task finds the port of the job taken:
  it may be free when the job is started again.
  """
  names = ('STEP_NODELIST', 'JOB_ID', 'PROCID', 'NTASKS')
  step, job, task, tasks = (os.environ.get(f'SLURM_{name}', '') for name in names)
  if not (step and job and task and tasks):
    return 0
  # The number that JAX takes by itself, which then crashes if the port is taken.
  port = os.environ.setdefault('JAX_COORDINATOR_PORT', str(61440 + int(job) % 4096))
  # JAX_COORDINATOR_ADDRESS has a port of its own, which JAX takes instead.
  tested = int(tasks) > 1 and 'JAX_COORDINATOR_ADDRESS' not in os.environ
  if int(task) == 0 and tested and (problem := _taken(port)):
    _console(
      f'port {port} of SLURM job {job}: {problem}; start again, or set '
      'JAX_COORDINATOR_PORT to a free port for all tasks'
    )
    sys.exit(LOST)
  return int(tasks)


def _taken(port):
  """Returns why this host cannot listen on the port, '' if it can.

  gRPC would share a port with another run, whose processes would join this one.
  """
  try:
    with socket.create_server(('', int(port))):
      return ''
  except OSError as error:
    return error.strerror


def _join(cluster: Cluster, start_s):
  """Starts JAX's distributed runtime; returns False if no other process was found.

  `cluster` is (coordinator, process, processes); with None, JAX detects the cluster.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  import jax

  # runtime/signals.py handles SIGTERM; this service would swallow the signal.
  jax.config.update('jax_enable_preemption_service', False)
  # For runtime/link.py, on backends that cannot send arrays to other hosts themselves.
  jax.config.update('jax_cross_host_transfer_socket_address', _own_address(cluster))
  jax.config.update('jax_cross_host_transfer_timeout_seconds', SHUTDOWN_S)
  # By default JAX gives each SLURM task one device. An empty list lifts this limit: a
  # task that is alone on its node gets all devices of the node.
  nodes, tasks = (os.environ.get(f'SLURM_{x}') for x in ('STEP_NUM_NODES', 'NTASKS'))
  coordinator, process, processes = cluster or (None, None, None)
  try:
    jax.distributed.initialize(
      coordinator,
      processes,
      process,
      local_device_ids=[] if nodes and nodes == tasks else None,
      cluster_detection_method='deactivate' if cluster else None,
      initialization_timeout=start_s,
      heartbeat_timeout_seconds=HEARTBEAT_S,
      shutdown_timeout_seconds=SHUTDOWN_S,
    )
  except Exception as error:  # raised by metadata servers, host names or Kubernetes
    if not cluster and str(error) == 'coordinator_address should be defined.':
      return False
    raise ValueError(
      f'the processes of this run cannot be joined ({first_line(error)}); '
      'give --coordinator, --process and --processes'
    ) from error
  return True


def _own_address(cluster: Cluster):
  """Returns host:port of this process, with a free port, as other processes see it."""
  # An address for documentation stands for the rest of the network.
  target = cluster[0].rpartition(':')[0] if cluster else '192.0.2.1'
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect((target, 9))  # sends nothing, but chooses the network
      host = probe.getsockname()[0]
    except OSError:  # `initialize` explains a name that cannot be resolved
      host = '127.0.0.1'
  # JAX listens at the first transfer only. Until then a port from the range of outgoing
  # connections, of which the system takes one for port 0, could be used for another.
  for port in random.sample(range(*PORTS), 100):
    with contextlib.suppress(OSError), socket.create_server((host, port)):
      return f'{host}:{port}'
  raise ValueError(
    f'{host} cannot listen on any of 100 ports in {PORTS}; free some ports'
  )


def _explain_abort(sentence):
  """Makes abort() in this process print the sentence and exit with status LOST.

  The handler is a C function: a Python signal handler would wait for the main thread,
  but the aborting thread never returns from abort().
  """

  def handle(number):
    del number
    _console(sentence)
    os._exit(LOST)

  _here.handlers.append(HANDLER(handle))
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, HANDLER]
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGABRT, _here.handlers[-1])


def _console(sentence):
  """Writes one line to stderr directly, without Python's buffers."""
  with contextlib.suppress(OSError):
    os.write(2, f'bapo_jax: {" ".join(sentence.split())}\n'.encode())


def leave(status: int) -> None:
  """Ends this process with `status`; returns if it is the only process of the run.

  The others end with status LOST, unless they too call this within GRACE_S seconds.
  """
  if len(_here.run) > 1:
    waiting = threading.Thread(target=_disconnect, daemon=True)
    waiting.start()
    waiting.join(GRACE_S)
    exit_now(status)


def finish(status: int) -> None:
  """Ends this process when all have called this; returns if it is the only process."""
  if len(_here.run) > 1:
    try:
      _disconnect()
    except Exception as error:  # another process was lost before this call
      failed(error)
    exit_now(status)


def _disconnect():
  """Waits until all processes call this, then stops watching their heartbeats."""
  import jax

  sys.stdout.flush()
  sys.stderr.flush()
  jax.distributed.shutdown()


def exit_now(status: int) -> NoReturn:
  """Ends this process, without waiting for a checkpoint that is being written."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def is_collective(error: BaseException) -> bool:
  """Returns whether a collective or barrier failed.

  A compiled program that is called again raises a plain ValueError then, without a
  frame of JAX, whose text begins with a status: UNKNOWN: Gloo AllGather failed.
  """
  if isinstance(error, TimeoutError) or type(error).__name__ == 'JaxRuntimeError':
    return True
  return isinstance(error, ValueError) and bool(re.match('[A-Z_]+: ', str(error)))


def failed(error: BaseException) -> NoReturn:
  """Prints the traceback of an unexpected error and ends this process with status 1.

  If a collective or barrier failed, another process is probably gone. Then this waits
  first, so that JAX can abort this process, with the sentence of `_explain_abort`.
  """
  if is_collective(error):
    time.sleep(HEARTBEAT_S + 3)
  traceback.print_exception(error)
  place = f'process {_here.process} of {len(_here.run)}'
  _console(f'{place}: {type(error).__name__}: {error}')
  exit_now(1)


def everyones(value: Any) -> list[Any]:
  """Returns a value of each process, which JSON can hold; all must call this."""
  if len(_here.side) == 1:
    return [value]
  import numpy as np  # late: bad knobs fail before this import

  data = np.frombuffer(json.dumps(value, default=str).encode(), np.uint8)
  length_P = _gathered(np.int32(len(data)))
  # Lengths are rounded up to powers of two, so that few programs are compiled.
  size = 1 << int(length_P.max()).bit_length()
  rows = _gathered(np.pad(data, (0, size - len(data))))
  return [json.loads(row[:n].tobytes()) for row, n in zip(rows, length_P, strict=True)]


def _gathered(own: Any):
  """Returns the host arrays of all processes as one; all must call this.

  Their equal shape gets a new leading axis, in the order of `side`.
  """
  import jax
  import numpy as np

  device, rows, copy = _row_per_process(tuple(_here.side))
  row = jax.device_put(np.asarray(own)[None], device)
  shape = len(_here.side), *row.shape[1:]
  return np.asarray(copy(jax.make_array_from_single_device_arrays(shape, rows, [row])))


@functools.cache
def _row_per_process(members: tuple[int, ...]):
  """Returns (a device of this process, a sharding with a row per process, a program).

  The program copies all rows to every process.
  """
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  first: dict[int, Any] = {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  mesh = Mesh(np.asarray([first[i] for i in members]), ('process',))
  copy = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
  return first[_here.process], NamedSharding(mesh, P('process')), copy


def _share(sentence):
  """Raises ValueError if another process has an error and this process has none.

  All processes must call this; `sentence` is the error of this process, '' for none.
  """
  sentences = everyones(sentence)
  if len(_here.side) == 1 or not any(sentences):
    return
  if len(_here.side) == len(_here.run):
    _disconnect()  # from here on, processes end independently
  if not sentence:
    errors = zip(_here.side, sentences, strict=True)
    i, text = next((i, text) for i, text in errors if text)
    raise ValueError(f'process {i} of {len(_here.run)}: {text}')


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Runs the body in all processes; a ValueError in any process is raised in all."""
  try:
    yield
  except ValueError as error:
    _share(str(error))
    raise
  _share('')


@contextlib.contextmanager
def first_ahead() -> Iterator[None]:
  """Runs the body in process 0, then in all others; errors as in `together`."""
  if not is_first():
    _share('')  # process 0 is done, or its error is raised here
  with together():
    yield
  if is_first():
    _share('')


def same_everywhere(values: dict[str, Any]) -> None:
  """Raises ValueError in all processes unless they all pass equal `values`."""
  expected, *others = everyones(values)
  for i, found in zip(_here.side[1:], others, strict=True):
    if differ := [
      f'{name} {new!r:.60} there and {old!r:.60} in process 0'
      for name, old, new in differences(expected, found)
    ]:
      with together():
        raise ValueError(
          f'process {i} of {len(_here.run)} differs from process 0: '
          f'{"; ".join(differ[:3])}; start every process with the same command, code, '
          'packages and data'
        )


def differences(old: Any, new: Any, name: str = '') -> Iterator[tuple[str, Any, Any]]:
  """Yields (dotted name, old, new) of values that differ; a missing value is None."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in sorted(old.keys() | new.keys()):
      dotted = f'{name}.{key}' if name else key
      yield from differences(old.get(key), new.get(key), dotted)
  elif old != new:
    yield name, old, new
