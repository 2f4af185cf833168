"""Measures where the wall time goes, and shows how far along the run is.

1. `PhaseTimer` charges every second to the innermost open phase;
2. `progress_bar` shows a rate and the time left; it updates less often in a log;
3. `log` prints a line without breaking the bar.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

from bapo_jax.runtime import hosts

TERMINAL_S, LOG_S = 0.2, 20.0  # seconds between two updates of a bar


class PhaseTimer:
  """Counts seconds by phase; phases do not overlap, so the sum is at most wall time.

  >>> with timer('sample'):
  ...   with timer('verify'): ...  # these seconds are not counted in 'sample'

  JAX returns before the device is done: the seconds of a phase that does not wait for
  its result are charged to the phase that does. Use a timer in one thread only.
  """

  def __init__(self, now: Callable[[], float] = time.perf_counter):
    self.seconds: dict[str, float] = {}
    self._now = now
    self._open: list[str] = []
    self.began = self._mark = self._reported_at = now()
    self._reported: dict[str, float] = {}

  def _charge(self) -> float:
    now = self._now()
    if self._open:
      name = self._open[-1]
      self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
    self._mark = now
    return now

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    """Charges the seconds of the block to a phase."""
    self._charge()
    self._open.append(name)
    try:
      yield
    finally:
      self._charge()
      self._open.pop()

  def since(self) -> dict[str, float]:
    """Returns the seconds of each phase since the last call; 'other': in no phase.

    They sum to the wall time since then; an open phase is charged up to now.
    """
    now = self._charge()
    ran = {name: s - self._reported.get(name, 0.0) for name, s in self.seconds.items()}
    ran = {name: s for name, s in ran.items() if s > 0}
    other = now - self._reported_at - sum(ran.values())
    self._reported, self._reported_at = dict(self.seconds), now
    return {**ran, 'other': max(other, 0.0)}


class _Lines:
  """Makes each update of a bar a line of its own, for logs."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> None:
    if text.strip():
      self._stream.write(text.strip('\r\n ') + '\n')

  def flush(self) -> None:
    self._stream.flush()


def progress_bar(total: int, label: str, unit: str = 'it', initial: int = 0) -> tqdm:
  """Opens a bar on stderr: `with progress_bar(400, 'training', 'step') as b: ...`.

  In a log the bar prints a line every LOG_S seconds, and none if it ends sooner. A bar
  that was opened inside another one is erased when it closes. `b.update(n)` adds to the
  count; `initial` is its first value, such as the step resumed from.
  """
  terminal = sys.stderr.isatty()
  every = TERMINAL_S if terminal else LOG_S
  return tqdm(
    total=total,
    initial=initial,
    desc=label,
    unit=unit,
    file=sys.stderr if terminal else _Lines(sys.stderr),
    mininterval=every,
    miniters=0,  # look at the time on every update: steps differ in length
    delay=0 if terminal else every,
    ncols=None if terminal else 80,
    dynamic_ncols=terminal,
    smoothing=0.1,
    leave=None,
    disable=not hosts.is_first(),
  )


def log(text: str) -> None:
  """Prints a line to stdout, above a bar on the same terminal; in process 0 only."""
  if not hosts.is_first():
    return
  tqdm.write(text, file=sys.stdout)
  sys.stdout.flush()  # a reader of the log sees the line now
