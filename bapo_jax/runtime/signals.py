"""SIGINT and SIGTERM end a run after its step; the second one ends it at once."""

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
  """Repeats a KeyboardInterrupt that Python had to drop.

  Raised inside a callback of the garbage collector (JAX has one) or a finaliser, it is
  printed and forgotten, and the program goes on.
  """
  before = sys.unraisablehook

  def hook(lost: 'sys.UnraisableHookArgs') -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      return before(lost)
    # Later: at once it would be raised in here, and be lost again.
    timer = threading.Timer(AGAIN_S, _thread.interrupt_main)
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before


class Stop:
  """Remembers the first SIGINT or SIGTERM; the second one acts at once."""

  def __init__(self):
    self.signal = 0

  def __call__(self, number: int, frame: object) -> None:
    del frame
    if self.signal:
      raise KeyboardInterrupt
    self.signal = number
    log('Stopping after this step; once more to stop at once.')


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
  """Signals become a flag while the loop runs."""
  stop = Stop()
  before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
