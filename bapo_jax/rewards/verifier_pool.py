r"""Verdicts from processes that may hang, grow or die without harm.

1. a fork server (verifier_worker.py) loads math-verify once and forks a warm worker for
   every socket sent to it;
2. a thread per worker sends it one answer at a time and kills it at the deadline;
3. an answer whose worker died goes to the next one; after two deaths it is undecided.

A deadline is one of processor time: an answer gets the same verdict on an idle machine
and on a busy one. Wall time ends only a worker that stands still (`STALLED_S`), which
counts as its death.

    pool --- a socket's other end ---> fork server --- fork ---> worker
      \____________________ the socket: JSON lines ______________/

A fork takes milliseconds, loading sympy a second: so workers are replaced freely. None
of these processes loads JAX, runs the caller's main module or receives its Ctrl-C, and
all of them end with the caller, however it ends.
"""

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from bapo_jax.rewards import knobs, verifier_worker
from bapo_jax.rewards.verdict import Verdict

Request = tuple[str, str, str]  # rule, right answer, response

_D = knobs.RewardsConfig()
START_S = 120.0  # to load math-verify on a machine that is busy
DEATHS = 2  # workers that an answer may cost
STALLED_S = 600.0  # wall time per answer, or 100 deadlines where that is more
SHORTEST_S = 0.01  # between two looks at a worker's processor time
CLOSED = Verdict(None, 'the pool was closed', None)
LATE_BATCH = Verdict(None, 'its batch was due', None)


class Budget:
  """Processor time that the answers of one batch may still use, in seconds."""

  def __init__(self, seconds: float):
    self.left, self._lock = seconds, threading.Lock()

  def spend(self, seconds: float) -> None:
    """Takes what an answer used."""
    with self._lock:
      self.left -= seconds


class Task(NamedTuple):
  """One response to verify."""

  line: bytes  # the request to the worker
  budget: Budget  # of its batch
  future: Future[Verdict]


class Overdue(Exception):
  """A worker used more processor time than it was given."""


class Worker:
  """A forked process, seen from its thread: one request, one reply.

  Args:
    fork_server: the socket that the fork server listens to.

  Raises:
    TimeoutError, EOFError, OSError: the fork server is of no more use.
  """

  def __init__(self, fork_server: socket.socket):
    ours, theirs = socket.socketpair()
    self.pid: int | None = None
    self._socket = ours
    with theirs:
      socket.send_fds(fork_server, [b'+'], [theirs.fileno()])
    self._replies = ours.makefile('rb')
    self._socket.settimeout(START_S)
    self.pid = self._reply()['pid']

  def request(self, line: bytes, seconds: float, stalled: float) -> dict[str, Any]:
    """The reply to a line.

    Args:
      seconds: processor time that the worker may use.
      stalled: wall time after which it is given up in any case.

    Raises:
      Overdue: it used more; the worker is of no more use.
      EOFError, OSError: the worker is gone, or stands still.
    """
    if self.pid is None:
      raise EOFError('the worker is gone')
    end = time.monotonic() + stalled
    limit = verifier_worker.processor_time(self.pid) + seconds
    self._socket.settimeout(stalled)
    self._socket.sendall(line)
    # One thread uses no more processor time than wall time passes, so what is left of
    # the one may be slept through.
    left = seconds
    while not self._answers_within(max(left, SHORTEST_S)):
      if self.pid is None:
        raise EOFError('the worker is gone')
      if (left := limit - verifier_worker.processor_time(self.pid)) <= 0:
        raise Overdue
      if time.monotonic() > end:
        raise TimeoutError('the worker stands still')
    self._socket.settimeout(stalled)
    return self._reply()

  def _answers_within(self, seconds: float) -> bool:
    self._socket.settimeout(seconds)
    try:
      self._socket.recv(1, socket.MSG_PEEK)
    except TimeoutError:
      return False
    return True

  def _reply(self) -> dict[str, Any]:
    if not (reply := self._replies.readline()).endswith(b'\n'):
      raise EOFError('the worker is gone')
    return json.loads(reply)

  def kill(self) -> None:
    """Kills it, busy or not; once, for its pid may soon be another process's."""
    pid, self.pid = self.pid, None
    if pid:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills it and closes its socket."""
    self.kill()
    self._replies.close()
    self._socket.close()


class ForkServer(NamedTuple):
  """The process that forks the workers."""

  socket: socket.socket
  process: subprocess.Popen

  @classmethod
  def start(cls, memory_mb: int, recycle: int, strict: bool) -> Self:
    """Starts it; it loads math-verify while the caller goes on."""
    ours, theirs = socket.socketpair()
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    command = [sys.executable, '-m', verifier_worker.__name__]
    with theirs:
      process = subprocess.Popen(
        [*command, str(memory_mb), str(recycle), str(strict)],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env=os.environ | {'PYTHONPATH': path},
        start_new_session=True,  # it receives no Ctrl-C
      )
    return cls(ours, process)


class VerifierPool:
  """`submit` returns futures of verdicts at once. A context manager.

  Args:
    workers: processes that verify side by side.
    strict: of verifiers.verify.
    deadline: seconds of processor time per answer; then its worker is killed.
    batch_deadline: seconds of processor time per worker and batch; once all workers
      have used that much for it, its answers without a verdict are undecided.
    memory_mb: address space of a worker, 2^20 bytes; past it the answer is undecided.
    recycle: answers after which a worker is replaced.
  """

  def __init__(
    self,
    workers: int = _D.workers,
    *,
    strict: bool = _D.strict,
    deadline: float = _D.deadline,
    batch_deadline: float = _D.batch_deadline,
    memory_mb: int = _D.memory_mb,
    recycle: int = _D.recycle,
  ):
    self._deadline, self._batch_deadline = deadline, batch_deadline
    self._stalled = max(STALLED_S, 100 * deadline)
    self._limits = memory_mb, recycle, strict
    self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    self._lock, self._closed = threading.Lock(), False
    self._workers: dict[int, Worker] = {}
    self._fork_server = ForkServer.start(*self._limits)
    self._threads = [
      threading.Thread(target=self._serve, args=(i,), daemon=True)
      for i in range(workers)
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, requests: Sequence[Request]) -> list[Future[Verdict]]:
    """Queues a batch of (rule, right answer, response).

    Returns:
      a future per request, in their order; its `result()` raises RuntimeError where no
      worker can be started.

    Raises:
      ValueError: the pool is closed.
    """
    if self._closed:
      raise ValueError('the pool is closed; make a new one')
    budget = Budget(self._batch_deadline * len(self._threads))
    futures: list[Future[Verdict]] = []
    for request in requests:
      futures.append(Future())
      line = json.dumps(request).encode() + b'\n'
      self._tasks.put(Task(line, budget, futures[-1]))
    return futures

  def pids(self) -> list[int]:
    """Processes of the workers alive now."""
    pids = [worker.pid for worker in list(self._workers.values())]
    return [pid for pid in pids if pid]

  def close(self) -> None:
    """Ends every process; answers without a verdict are undecided."""
    if self._closed:
      return
    self._closed = True
    for _ in self._threads:
      self._tasks.put(None)
    for worker in list(self._workers.values()):
      worker.kill()  # its thread wakes up, and sees that the pool is closed
    with self._lock:
      self._fork_server.socket.close()  # it ends with this, and kills its workers
      self._fork_server.process.wait()
    for thread in self._threads:
      thread.join()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _fork(self, thread: int) -> Worker:
    """A warm worker; where the fork server has died, from a new one."""
    for _ in range(2):
      with self._lock:
        if self._fork_server.process.poll() is not None and not self._closed:
          self._fork_server = ForkServer.start(*self._limits)
        control, process = self._fork_server
      try:
        self._workers[thread] = worker = Worker(control)
        return worker
      except (OSError, EOFError):  # TimeoutError is an OSError
        process.kill()
        process.wait()
    raise RuntimeError(
      f'no verifier process can be started (exit status {process.returncode}); '
      '`python -c "import math_verify"` may say why'
    )

  def _serve(self, thread: int) -> None:
    """One worker's thread: takes tasks until it receives None."""
    worker = None
    while task := self._tasks.get():
      try:
        worker, verdict = self._verify(thread, worker, task)
        task.future.set_result(verdict)
      except Exception as error:  # raised where the result is waited for
        worker = None
        task.future.set_exception(error)
    if worker:
      worker.end()

  def _verify(
    self, thread: int, worker: Worker | None, task: Task
  ) -> tuple[Worker | None, Verdict]:
    """(worker or None, verdict); the worker is None where the next needs a new one."""
    for _ in range(DEATHS):
      if self._closed:
        return worker, CLOSED
      try:
        worker = worker or self._fork(thread)
      except RuntimeError:
        if self._closed:
          return None, CLOSED
        raise
      if task.budget.left <= 0:
        return worker, LATE_BATCH
      seconds = min(task.budget.left, self._deadline)
      try:
        reply = worker.request(task.line, seconds, self._stalled)
      except Overdue:
        worker.end()
        task.budget.spend(seconds)
        if seconds < self._deadline:
          return None, LATE_BATCH
        return None, Verdict(None, f'took over {self._deadline:g} s', None)
      except (OSError, EOFError):
        worker.end()
        worker = None
        continue
      task.budget.spend(reply['seconds'])
      if reply['exits']:
        worker.end()
        worker = None
      return worker, Verdict(*reply['verdict'])
    if self._closed:
      return None, CLOSED
    return None, Verdict(None, f'{DEATHS} workers died of it', None)
