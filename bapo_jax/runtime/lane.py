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
    # Seconds of the functions that have ended, and when the running one began. Another
    # thread reads this pair, so it is replaced as a whole.
    self._ran: tuple[float, float | None] = (0.0, None)
    threading.Thread(target=self._run, daemon=True).start()

  def submit(self, function: Callable[[], Result]) -> Future[Result]:
    """Queues a function; returns a future of its result."""
    ready = Future[Result]()
    self._tasks.put((function, ready))
    return ready

  def busy(self) -> float:
    """Returns the total seconds that functions have run so far."""
    ended, began = self._ran
    return ended if began is None else ended + time.perf_counter() - began

  def close(self) -> None:
    """Lets the thread end after the functions in the queue; does not wait for it.

    Waiting would delay the exit of a process that is interrupted while it samples.
    """
    self._tasks.put(None)

  def _run(self):
    while task := self._tasks.get():
      function, ready = task
      ended, _ = self._ran
      began = time.perf_counter()
      self._ran = (ended, began)
      try:
        ready.set_result(function())
      except BaseException as error:
        ready.set_exception(error)
      self._ran = (ended + time.perf_counter() - began, None)
