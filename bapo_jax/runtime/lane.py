"""Runs functions one after another, in a background thread or in the caller's."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar('Result')


def at_once(function: Callable[[], Result]) -> Future[Result]:
  """Runs a function in the calling thread; returns a future that is done."""
  ready = Future[Result]()
  ready.set_result(function())
  return ready


class Lane:
  """A thread that runs functions in the order of their submission.

  `Future.result` raises what a function raised. The thread is a daemon: it does not
  keep an interrupted process alive.
  """

  def __init__(self):
    self._tasks: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
    self._lock = threading.Lock()  # guards the two below
    self._busy = 0.0  # seconds of the functions that have ended
    self._began: float | None = None  # when the running function began
    threading.Thread(target=self._run, daemon=True).start()

  def submit(self, function: Callable[[], Result]) -> Future[Result]:
    """Queues a function; returns a future of its result."""
    ready = Future[Result]()
    self._tasks.put((function, ready))
    return ready

  def busy(self) -> float:
    """Returns the total seconds that functions have run so far."""
    with self._lock:
      running = 0.0 if self._began is None else time.perf_counter() - self._began
      return self._busy + running

  def close(self) -> None:
    """Lets the thread end after the functions in the queue; does not wait for it.

    Waiting would delay the exit of a process that is interrupted while it samples.
    """
    self._tasks.put(None)

  def _run(self):
    while task := self._tasks.get():
      function, ready = task
      began = time.perf_counter()
      with self._lock:
        self._began = began
      try:
        ready.set_result(function())
      except BaseException as error:
        ready.set_exception(error)
      with self._lock:
        self._busy = self._busy + time.perf_counter() - began
        self._began = None
