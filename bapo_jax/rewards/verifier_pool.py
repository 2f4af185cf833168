r"""Verdicts from processes that may hang, grow or die without harm.

1. a nursery loads math-verify once and forks a warm worker for every socket sent to it;
2. a thread for each worker hands it one answer at a time and kills it at the deadline;
3. an answer whose worker died goes to the next one; after two deaths it is undecided.

    pool --- a socket's other end ---> nursery --- fork ---> worker
      \__________________ the socket: JSON lines ____________/

A fork takes milliseconds, loading sympy a second: so workers are replaced freely. None
of these processes loads JAX, runs the caller's main module or hears its Ctrl-C, and all
of them end with the caller, however it ends.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from bapo_jax.rewards import verifiers
from bapo_jax.rewards.verifiers import Verdict

START_S = 120.0  # to load math-verify on a machine that is busy
DEATHS = 2  # workers that an answer may cost
PEAK_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes of ru_maxrss
CLOSED = Verdict(None, 'the pool was closed', None)


class Task(NamedTuple):
  """One response to be judged."""

  line: bytes  # what the worker is sent
  until: float  # time.monotonic() at which its batch is due
  future: Future  # of the Verdict


class Ticket(NamedTuple):
  """Verdicts that are being made."""

  futures: list[Future]

  def result(self) -> list[Verdict]:
    """All of them, in the order asked for; waits.

    Raises:
      RuntimeError: no worker could be started.
    """
    return [future.result() for future in self.futures]


class Worker:
  """A forked process, seen from its thread. One question, one answer."""

  def __init__(self, nursery: socket.socket):
    ours, theirs = socket.socketpair()
    self.pid, self._socket = None, ours
    with theirs:
      socket.send_fds(nursery, [b'+'], [theirs.fileno()])
    self._answers = ours.makefile('rb')
    self.pid = self.ask(b'', START_S)['pid']

  def ask(self, line: bytes, timeout: float) -> dict:
    """The reply to a line.

    Raises:
      TimeoutError: it took longer; the worker is of no more use.
      EOFError, OSError: the worker is gone.
    """
    self._socket.settimeout(max(timeout, 1e-3))
    self._socket.sendall(line)
    if not (answer := self._answers.readline()).endswith(b'\n'):
      raise EOFError('the worker is gone')
    return json.loads(answer)

  def kill(self) -> None:
    """Whatever it is doing; once, for its number may soon be another process's."""
    pid, self.pid = self.pid, None
    if pid:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills it and lets go of it."""
    self.kill()
    self._answers.close()
    self._socket.close()


class VerifierPool:
  """`submit(...)` returns at once, its ticket's `result()` waits. A context manager.

  Args:
    workers: processes that judge side by side.
    deadline: seconds an answer may take; its worker is then killed.
    batch_deadline: seconds a batch may take from its submission; what is not judged by
      then is undecided.
    memory_mb: address space of a worker, 2^20 bytes; past it the answer is undecided.
    recycle: answers after which a worker is replaced.
  """

  def __init__(
    self,
    workers: int,
    *,
    deadline: float = 3.0,
    batch_deadline: float = 300.0,
    memory_mb: int = 2048,
    recycle: int = 1000,
  ):
    self._deadline, self._batch_deadline = deadline, batch_deadline
    self._limits = memory_mb, recycle
    self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    self._lock, self._closed = threading.Lock(), False
    self._nursery = None
    self._working: dict[int, Worker] = {}
    self._start()
    self._threads = [
      threading.Thread(target=self._serve, args=(i,), daemon=True)
      for i in range(workers)
    ]
    for thread in self._threads:
      thread.start()

  def submit(
    self, rules: Sequence[str], answers: Sequence[str], texts: Sequence[str]
  ) -> Ticket:
    """Queues one response an entry: is texts[i] right by rules[i], given answers[i]?"""
    if self._closed:
      raise ValueError('the pool is closed; make a new one')
    until, futures = time.monotonic() + self._batch_deadline, []
    for asked in zip(rules, answers, texts, strict=True):
      futures.append(Future())
      line = json.dumps(asked).encode() + b'\n'
      self._tasks.put(Task(line, until, futures[-1]))
    return Ticket(futures)

  def pids(self) -> list[int]:
    """The workers alive now."""
    pids = [worker.pid for worker in list(self._working.values())]
    return [pid for pid in pids if pid]

  def close(self) -> None:
    """Ends every process; what is not judged yet is undecided."""
    if self._closed:
      return
    self._closed = True
    for _ in self._threads:
      self._tasks.put(None)
    for worker in list(self._working.values()):
      worker.kill()  # its thread wakes up, and sees that it is over
    with self._lock:
      control, nursery = self._nursery
      control.close()  # the nursery ends with this, and takes its workers along
      nursery.wait()
    for thread in self._threads:
      thread.join()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _start(self) -> None:
    """Starts a nursery; it loads while the caller goes on."""
    ours, theirs = socket.socketpair()
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    with theirs:
      process = subprocess.Popen(
        [
          sys.executable,
          '-m',
          'bapo_jax.rewards.verifier_pool',
          *map(str, self._limits),
        ],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        env=os.environ | {'PYTHONPATH': path},
        start_new_session=True,
      )
    self._nursery = ours, process

  def _hire(self, thread: int) -> Worker:
    """A warm worker; where the nursery has died, from a new one."""
    for _ in range(2):
      with self._lock:
        if self._nursery[1].poll() is not None and not self._closed:
          self._start()
        control, nursery = self._nursery
      try:
        self._working[thread] = worker = Worker(control)
        return worker
      except (OSError, EOFError):  # TimeoutError is an OSError
        nursery.kill()
        nursery.wait()
    raise RuntimeError(
      f'no verifier process can be started (exit status {nursery.returncode}); '
      '`python -c "import math_verify"` may say why'
    )

  def _serve(self, thread: int) -> None:
    """One worker's thread: takes tasks until it is given None."""
    worker = None
    while task := self._tasks.get():
      try:
        worker, verdict = self._judge(thread, worker, task)
        task.future.set_result(verdict)
      except Exception as error:  # told to whoever waits for the result
        worker = None
        task.future.set_exception(error)
    if worker:
      worker.end()

  def _judge(self, thread: int, worker: Worker | None, task: Task):
    """(worker or None, verdict); the worker is None where the next needs a new one."""
    for _ in range(DEATHS):
      if self._closed:
        return worker, CLOSED
      try:
        worker = worker or self._hire(thread)
      except RuntimeError:
        if self._closed:
          return None, CLOSED
        raise
      left = task.until - time.monotonic()
      if left <= 0:
        return worker, Verdict(None, 'its batch was due', None)
      try:
        reply = worker.ask(task.line, min(left, self._deadline))
      except TimeoutError:
        worker.end()
        late = left < self._deadline
        reason = 'its batch was due' if late else f'took over {self._deadline:g} s'
        return None, Verdict(None, reason, None)
      except (OSError, EOFError):
        worker.end()
        worker = None
        continue
      if reply['leaves']:
        worker.end()
        worker = None
      return worker, Verdict(*reply['verdict'])
    if self._closed:
      return None, CLOSED
    return None, Verdict(None, f'{DEATHS} workers died of it', None)


def nurse(memory_mb: int, recycle: int) -> None:
  """Forks a worker for every socket that comes in; ends when the caller does."""
  control = socket.socket(fileno=os.dup(0))
  os.close(0)  # a worker must not hold it: the caller would not see the nursery die
  logging.disable()  # math-verify warns that its own alarms are off
  verifiers.equivalent(r'\frac{1}{2}', '0.5')
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
  while True:
    try:
      said, sockets, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
      said, sockets = b'', []
    if not said:
      os.killpg(0, signal.SIGKILL)  # workers that hang included, and itself
    if os.fork() == 0:
      control.close()
      try:
        work(socket.socket(fileno=sockets[0]), memory_mb, recycle)
      finally:
        os._exit(0)
    os.close(sockets[0])


def work(talk: socket.socket, memory_mb: int, recycle: int) -> None:
  """Judges line by line; leaves after `recycle` answers, and where memory ran out."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
  talk.sendall(json.dumps({'pid': os.getpid()}).encode() + b'\n')
  for done, line in enumerate(talk.makefile('rb'), 1):
    leaves = done == recycle
    try:
      rule, answer, text = json.loads(line)
      verdict = verifiers.RULES[rule](answer, text)
    except MemoryError:
      verdict, leaves = Verdict(None, f'took over {memory_mb} MiB', None), True
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
    leaves |= peak > memory_mb << 19  # half: sympy's caches do not shrink
    reply = {'verdict': verdict, 'leaves': leaves}
    talk.sendall(json.dumps(reply).encode() + b'\n')
    if leaves:
      return


if __name__ == '__main__':
  nurse(int(sys.argv[1]), int(sys.argv[2]))
