"""SIGINT and SIGTERM end a run after its step; the second one ends it at once."""

import contextlib
import signal
from collections.abc import Iterator

from bapo_jax.runtime.progress import log


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
