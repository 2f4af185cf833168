r"""Verifies responses in processes that may hang, run out of memory or be killed.

A fork server (verifier_worker.py) loads math-verify once and forks a warm worker for
every socket sent to it. Each worker has a thread, which sends it one response at a time
and kills it at the deadline. If a worker dies, its response goes to another one, once.

    pool --- other end of a socket pair ---> fork server --- fork ---> worker
      \__________________ the socket pair: JSON lines _________________/

All turns of a response go to the worker that has its object, if the environment is a
class; a worker that replaces a dead one makes the object again (environments.py).

Deadlines count processor time, so a response gets the same verdict on an idle and a
busy machine. Wall time ends a worker that does not run at all (STALLED_S), and a custom
function that waits for longer than rewards.timeout.

A fork takes milliseconds, and loading sympy a second, so replacing a worker is cheap:
it costs what the user's file imports. None of these processes loads JAX (unless a
user's file does), runs the caller's main module or receives its Ctrl-C, and all of them
end with the caller, however it ends. A worker takes along what its functions started.

What the processes print appears on stderr, each line once.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from tqdm import tqdm

from bapo_jax import custom_code
from bapo_jax.rewards import score, verifier_worker
from bapo_jax.rewards.knobs import Environment, Verification
from bapo_jax.rewards.score import Sample

Request = Sequence[Sample]  # responses that are scored together

START_S = 120.0  # wall time to load math-verify on a busy machine
DEATHS = 2  # workers that one answer may cost
GRACE_S = 5.0  # for custom functions to stop at their timeout themselves
STALLED_S = 600.0  # wall time per answer; at least 100 deadlines
MEMORY_MB = 2048  # address space of a worker, in MiB
# Why a request has no results.
CLOSED = 'the pool was closed'
LATE_BATCH = 'its batch was due'
FATAL = f'{DEATHS} workers died of it'
LONGEST = 1000  # characters of a line that a function prints


@functools.lru_cache(1 << 14)
def _show(line):
  """Prints a line on stderr, unless it was printed before."""
  with contextlib.suppress(OSError, ValueError):  # closed, or cannot encode it
    tqdm.write(line, file=sys.stderr)


class Worker:
  """A connection to a forked worker process, which sends one reply to each request.

  Its methods raise an OSError or EOFError if the process is dead or silent.
  """

  def __init__(self, fork_server: socket.socket):
    ours, theirs = socket.socketpair()
    self.pid: int | None = None  # None: the worker was killed
    self._socket = ours
    self._replies = ours.makefile('rb')
    with theirs:
      socket.send_fds(fork_server, [b'+'], [theirs.fileno()])
    self._socket.settimeout(START_S)
    try:
      self.pid = self._reply()['pid']
      self._reply()  # it has loaded the custom functions
    except (OSError, EOFError):
      self.end()
      raise

  def request(
    self, request: Request, seconds: float, stalled: float
  ) -> dict[str, Any] | None:
    """Sends a request; returns the reply, or None if the worker ran out of time.

    That is after `seconds` of processor time; the caller must then kill the worker.
    Raises OSError if the worker sends nothing for `stalled` seconds.
    """
    self._socket.settimeout(stalled)
    line = json.dumps([seconds, request], default=str)  # a row may have a date
    self._socket.sendall(line.encode() + b'\n')
    if self._replies.peek(1)[:1] == verifier_worker.OVERDUE:
      return None
    return self._reply()

  def _reply(self):
    line = self._replies.readline()
    if not line.endswith(b'\n'):
      raise EOFError('the worker is dead')
    return json.loads(line)

  def kill(self) -> None:
    """Kills the process, and those that it started, once: a pid may be reused."""
    pid = self.pid
    self.pid = None
    if pid:
      with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills the process and closes the socket; called by the worker's thread only."""
    self.kill()
    self._replies.close()
    self._socket.close()


class ForkServer:
  """A fork server, which loads math-verify, and the socket to it."""

  def __init__(self, k: Verification):
    self.control, theirs = socket.socketpair()
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    arguments = str(MEMORY_MB), type(k).__name__, json.dumps(k.model_dump())
    with theirs:
      self.process = subprocess.Popen(
        [sys.executable, '-m', verifier_worker.__name__, *arguments],
        stdin=theirs.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        env=os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'},
        start_new_session=True,  # Ctrl-C in the terminal does not reach it
      )
    self.last = 'none'  # line of its output
    self._name = ','.join(custom_code.paths_in(k.rule)) or k.rule
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    """Prints the output of all its processes on stderr, each line once.

    Reads to the end, whatever becomes of the lines, so that no function has to wait.
    """
    while line := cast(Any, self.process.stdout).readline(LONGEST):
      if text := line.rstrip():
        self.last = text
        _show(f'{self._name}: {text}')

  def end(self) -> None:
    """Waits until it has ended and its output is read."""
    self.process.wait()
    self._reader.join(GRACE_S)  # a process that left its group may still print


@dataclasses.dataclass
class Batch:
  """The budget that the requests of one `submit` share."""

  seconds: float  # processor time that its requests may still use together


class VerifierPool:
  """Verifies batches of responses; `submit` returns futures immediately.

  The budget of a batch is k.batch_deadline seconds of processor time per worker; when
  it is spent, the remaining answers of the batch are undecided.
  """

  def __init__(self, k: Verification):
    self._knobs = k
    self._closed = False
    self._stalled = max(STALLED_S, 100 * k.deadline)
    self._custom = bool(custom_code.paths_in(k.rule))
    # Each thread's queue of (request, batch, future); None: end. All threads share one,
    # unless a response's turns must go to the same worker.
    self._stateful = isinstance(k, Environment) and k.stateful
    shared = queue.SimpleQueue()
    self._tasks = [
      queue.SimpleQueue() if self._stateful else shared for _ in range(k.workers)
    ]
    self._lock = threading.Lock()  # guards the fork server and the budgets
    self._workers: dict[int, Worker] = {}  # by thread; a dead worker has no pid
    self._fork_server = ForkServer(k)
    self._threads = [
      threading.Thread(target=self._serve, args=(i,), daemon=True)
      for i in range(k.workers)
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, requests: Sequence[Request]) -> list[Future[list[Any]]]:
    """Queues a batch; returns a future for each request, in their order.

    A future gives one verdict, or message of an environment, per sample of its request.

    The `result()` of a future raises a RuntimeError if no worker can be started. A
    closed pool raises a ValueError.
    """
    if self._closed:
      raise ValueError('the verifier pool is closed; create a new pool')
    batch = Batch(self._knobs.batch_deadline * len(self._threads))
    tasks = [(request, batch, Future()) for request in requests]
    for task in tasks:
      home = score.home(task[0][0]) if self._stateful else 0
      self._tasks[home % len(self._tasks)].put(task)
    return [future for *_, future in tasks]

  def close(self) -> None:
    """Ends all processes; answers without a verdict are undecided."""
    if self._closed:
      return
    self._closed = True
    for tasks in self._tasks:
      tasks.put(None)
    for worker in list(self._workers.values()):
      worker.kill()  # wakes its thread, which then finds the pool closed
    with self._lock:
      self._fork_server.control.close()  # the server ends and kills all workers
      self._fork_server.end()
    for thread in self._threads:
      thread.join()

  def _serve(self, thread):
    while task := self._tasks[thread].get():
      request, batch, future = task
      try:
        verdicts = self._verify(thread, request, batch)
        if isinstance(verdicts, str):
          verdicts = [self._knobs.result.failed(verdicts)] * len(request)
        future.set_result(verdicts)
      except Exception as error:  # raised again by future.result()
        self._end(thread)
        future.set_exception(error)
    self._end(thread)

  def _end(self, thread):
    if worker := self._workers.get(thread):
      worker.end()

  def _verify(self, thread, request: Request, batch: Batch):
    """Returns the verdicts of a worker, or the reason why no worker has any."""
    stalled = self._stalled
    if self._custom:  # an async function is called on `parallel` samples at once
      calls = -(-len(request) // self._knobs.parallel)
      stalled = GRACE_S + calls * self._knobs.timeout
    for _ in range(DEATHS):
      worker = self._worker(thread)
      if worker is None:
        return CLOSED
      if batch.seconds <= 0:
        return LATE_BATCH
      deadline = self._knobs.deadline * len(request)
      seconds = min(batch.seconds, deadline)
      try:
        reply = worker.request(request, seconds, stalled)
      except (OSError, EOFError) as error:
        worker.end()
        if self._custom and isinstance(error, TimeoutError):
          return f'took over rewards.timeout={self._knobs.timeout:g} s'
        continue
      with self._lock:
        batch.seconds -= reply['seconds'] if reply else seconds
      if reply is None or reply['exits']:
        worker.end()
      if reply is not None:
        return [self._knobs.result(*fields) for fields in reply['verdicts']]
      return f'took over {deadline:g} s' if seconds == deadline else LATE_BATCH
    return CLOSED if self._closed else FATAL

  def _worker(self, thread):
    """Returns a thread's worker, forked if necessary; None if the pool is closed."""
    worker = self._workers.get(thread)
    if not self._closed and worker and worker.pid:
      return worker
    for _ in range(2):
      with self._lock:
        if self._closed:
          return None
        if self._fork_server.process.poll() is not None:
          self._fork_server = ForkServer(self._knobs)
        server = self._fork_server
      try:
        self._workers[thread] = worker = Worker(server.control)
        return worker
      except (OSError, EOFError):  # TimeoutError is an OSError
        server.process.kill()
        server.end()
    if self._closed:
      return None
    raise RuntimeError(
      f'cannot start a verifier process within {START_S:g} s; its last output: '
      f'{server.last}'
    )
