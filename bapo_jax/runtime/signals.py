"""Stops a run on SIGINT or SIGTERM: after the step, or at once on a second signal."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from bapo_jax.runtime.progress import log


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
  """Re-raises a KeyboardInterrupt that Python dropped.

  Python prints and drops an exception raised inside a finaliser or a garbage-collector
  callback (JAX registers one), and the program continues.
  """
  before = sys.unraisablehook

  def hook(lost: 'sys.UnraisableHookArgs') -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      return before(lost)
    # Python would also drop an interrupt that this hook raises.
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before


class Stop:
  """Remembers the first SIGINT or SIGTERM; raises KeyboardInterrupt on the second."""

  signal = 0
  current = 'this step'  # what the process finishes before it stops

  def __call__(self, number: int, frame: object) -> None:
    """Remembers the first signal and logs it; interrupts on the second."""
    if self.signal:
      raise KeyboardInterrupt
    self.signal = number
    log(f'Finishing {self.current}. Send the signal again to stop now.')


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
  """Yields a `Stop` that handles SIGINT and SIGTERM during the `with` block."""
  stop = Stop()
  before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
