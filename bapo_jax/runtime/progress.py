"""Measures where the wall time goes, and shows how far along the run is."""

import contextlib
import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from bapo_jax.runtime import hosts

TERMINAL_S = 0.2  # seconds between two updates of a bar
LOG_S = 20.0


class PhaseTimer:
  """Charges every second to the innermost open phase: the sum is at most wall time.

  >>> with timer('sample'):
  ...   with timer('verify'): ...  # these seconds are not counted in 'sample'

  JAX returns before the device is done, so device time is charged to the phase that
  waits for the result. Use a timer in one thread only.
  """

  def __init__(self, now: Callable[[], float] = time.perf_counter):
    # Phase -> seconds. A Counter is typed for integers, but counts floats as well.
    self.seconds: Any = Counter()
    self._now = now
    self._open: list[str] = []
    self.began = self._mark = self._reported_at = now()
    self._reported = Counter()

  def _charge(self):
    now = self._now()
    if self._open:
      self.seconds[self._open[-1]] += now - self._mark
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
    """Returns the seconds per phase since the last call; 'other' is time in no phase.

    The values sum to the elapsed wall time; an open phase is charged up to now.
    """
    now = self._charge()
    ran = self.seconds - self._reported  # only what is above 0
    other = now - self._reported_at - sum(ran.values())
    self._reported = self.seconds.copy()
    self._reported_at = now
    return {**ran, 'other': max(other, 0.0)}


class _Lines(io.TextIOBase):
  """Writes every update of a bar on a separate line of stderr, for logs."""

  def write(self, text: str) -> int:
    if text.strip():
      sys.stderr.write(text.strip('\r\n ') + '\n')
    return len(text)


def progress_bar(total: int, label: str, unit: str = 'it', initial: int = 0) -> tqdm:
  """Opens a bar on stderr: `with progress_bar(400, 'training', 'step') as b: ...`.

  Without a terminal the bar prints a line every LOG_S seconds, or no line if it closes
  sooner. A nested bar is erased when it closes. `b.update(n)` adds n to the count,
  which starts at `initial`, such as the step resumed from.
  """
  terminal = sys.stderr.isatty()
  every = TERMINAL_S if terminal else LOG_S
  return tqdm(
    total=total,
    initial=initial,
    desc=label,
    unit=unit,
    file=sys.stderr if terminal else _Lines(),
    mininterval=every,
    miniters=0,  # check the time on every update: steps differ in length
    delay=0 if terminal else every,
    ncols=None if terminal else 100,
    dynamic_ncols=terminal,
    smoothing=0.1,
    leave=None,
    disable=not hosts.is_first(),
  )


def log(text: str) -> None:
  """Prints a line to stdout, above any progress bar; only process 0 prints."""
  if hosts.is_first():
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()  # the line appears in a redirected log at once
