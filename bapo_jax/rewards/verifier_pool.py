r"""Verifies responses in processes that may hang, run out of memory or be killed.

A fork server (verifier_worker.py) loads math-verify once and forks a warm worker for
every socket sent to it. Each worker has a thread, which sends it one response at a time
and kills it at the deadline. If a worker dies, its response goes to another one, once.

    pool --- other end of a socket pair ---> fork server --- fork ---> worker
      \__________________ the socket pair: JSON lines _________________/

Deadlines count processor time, so a response gets the same verdict on an idle and a
busy machine. Wall time ends a worker that does not run at all (STALLED_S), and a custom
function that waits for longer than rewards.timeout.

A fork takes milliseconds, and loading sympy a second, so replacing a worker is cheap.
None of these processes loads JAX, runs the caller's main module or receives its Ctrl-C,
and all of them end with the caller, however it ends.
"""

import contextlib
import dataclasses
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
from typing import Any

from bapo_jax import custom_code
from bapo_jax.rewards import verifier_worker
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample

Request = Sequence[Sample]  # responses that are scored together

START_S = 120.0  # wall time to load math-verify on a busy machine
DEATHS = 2  # workers that one answer may cost
GRACE_S = 5.0  # for custom functions to stop at their timeout themselves
STALLED_S = 600.0  # wall time per answer; at least 100 deadlines
MEMORY_MB = 2048  # address space of a worker, in MiB
CLOSED = Verdict(None, 'the pool was closed', None)
LATE_BATCH = Verdict(None, 'its batch was due', None)
FATAL = Verdict(None, f'{DEATHS} workers died of it', None)


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
    self.pid = self._reply()['pid']

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
    """Kills the process at most once, because its pid may be reused."""
    pid, self.pid = self.pid, None
    if pid:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills the process and closes the socket; called by the worker's thread only."""
    self.kill()
    self._replies.close()
    self._socket.close()


def start(k: Verification) -> tuple[socket.socket, subprocess.Popen]:
  """Starts the fork server, which loads math-verify; returns (socket to it, server)."""
  ours, theirs = socket.socketpair()
  root = str(pathlib.Path(__file__).parents[2])
  path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
  arguments = str(MEMORY_MB), type(k).__name__, json.dumps(k.model_dump())
  with theirs:
    process = subprocess.Popen(
      [sys.executable, '-m', verifier_worker.__name__, *arguments],
      stdin=theirs.fileno(),
      stdout=subprocess.DEVNULL,
      env=os.environ | {'PYTHONPATH': path},
      start_new_session=True,  # Ctrl-C in the terminal does not reach it
    )
  return ours, process


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
    self._tasks = queue.SimpleQueue()  # (request, batch, future); None: end
    self._lock = threading.Lock()  # guards the fork server and the budgets
    self._workers: dict[int, Worker] = {}  # by thread; a dead worker has no pid
    self._fork_server = start(k)
    self._threads = [
      threading.Thread(target=self._serve, args=(i,), daemon=True)
      for i in range(k.workers)
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, requests: Sequence[Request]) -> list[Future[list[Verdict]]]:
    """Queues a batch; returns a future for each request, in their order.

    A future gives one verdict per sample of its request.

    The `result()` of a future raises a RuntimeError if no worker can be started. A
    closed pool raises a ValueError.
    """
    if self._closed:
      raise ValueError('the verifier pool is closed; create a new pool')
    batch = Batch(self._knobs.batch_deadline * len(self._threads))
    tasks = [(request, batch, Future()) for request in requests]
    for task in tasks:
      self._tasks.put(task)
    return [future for *_, future in tasks]

  def close(self) -> None:
    """Ends all processes; answers without a verdict are undecided."""
    if self._closed:
      return
    self._closed = True
    for _ in self._threads:
      self._tasks.put(None)
    for worker in list(self._workers.values()):
      worker.kill()  # wakes its thread, which then finds the pool closed
    with self._lock:
      control, process = self._fork_server
      control.close()  # the server ends and kills all workers
      process.wait()
    for thread in self._threads:
      thread.join()

  def _serve(self, thread):
    while task := self._tasks.get():
      request, batch, future = task
      try:
        verdicts = self._verify(thread, request, batch)
        if isinstance(verdicts, Verdict):
          verdicts = [verdicts] * len(request)
        future.set_result(verdicts)
      except Exception as error:  # raised again by future.result()
        self._end(thread)
        future.set_exception(error)
    self._end(thread)

  def _end(self, thread):
    if worker := self._workers.get(thread):
      worker.end()

  def _verify(self, thread, request: Request, batch: Batch):
    """Returns the verdicts of a worker, or one for all samples if no worker has any."""
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
          limit = self._knobs.timeout
          return Verdict(None, f'took over rewards.timeout={limit:g} s', None)
        continue
      with self._lock:
        batch.seconds -= reply['seconds'] if reply else seconds
      if reply is None or reply['exits']:
        worker.end()
      if reply is not None:
        return [Verdict(*fields) for fields in reply['verdicts']]
      late = seconds == deadline
      return Verdict(None, f'took over {deadline:g} s', None) if late else LATE_BATCH
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
        if self._fork_server[1].poll() is not None:
          self._fork_server = start(self._knobs)
        control, process = self._fork_server
      try:
        self._workers[thread] = worker = Worker(control)
        return worker
      except (OSError, EOFError):  # TimeoutError is an OSError
        process.kill()
        process.wait()
    if self._closed:
      return None
    raise RuntimeError(
      f'cannot start a verifier process (exit status {process.returncode}); run '
      '`python -c "import math_verify"` to see why'
    )
