"""Stops a run on SIGINT or SIGTERM: after its step, or at once on the second signal."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from bapo_jax.runtime.progress import log

AGAIN_S = 0.1


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
  """Raises a KeyboardInterrupt again that Python dropped.

  Python prints and drops an exception that is raised inside a finaliser or a callback
  of the garbage collector (JAX has one), and the program continues.
  """
  before = sys.unraisablehook

  def hook(lost: 'sys.UnraisableHookArgs') -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      return before(lost)
    # Raised at once, in this hook, the interrupt would be lost again.
    timer = threading.Timer(AGAIN_S, _thread.interrupt_main)
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before


class Stop:
  """Remembers the first SIGINT or SIGTERM; the second one raises KeyboardInterrupt."""

  def __init__(self):
    self.signal = 0

  def __call__(self, number: int, frame: object) -> None:
    """Handles a signal."""
    del frame
    if self.signal:
      raise KeyboardInterrupt
    self.signal = number
    log('Finishing this step. Send the signal again to stop now.')


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
  """Turns SIGINT and SIGTERM into a flag while the loop runs."""
  stop = Stop()
  before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
