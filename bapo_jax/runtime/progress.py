"""Measures where the wall time goes, and shows how far along the run is."""

import contextlib
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from bapo_jax.runtime import hosts

UPDATE_S = 0.2  # seconds between two updates of a bar


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


class _Forgiving(io.FileIO):
  """A stream that drops what it cannot write: to a full disk, or to a closed pipe."""

  def write(self, data: Any) -> int:
    try:
      return super().write(data)
    except OSError:
      return len(data)


def open_console() -> None:
  """Replaces stdout and stderr by streams that raise no error of the console.

  A character that the console cannot encode is written as an escape. A stream that is
  closed at the start is /dev/null: a file would otherwise get its number, and the
  console's lines.
  """
  for number, name in enumerate(('stdin', 'stdout', 'stderr')):
    stream = getattr(sys, name)
    if stream is None:
      os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    if number:
      binary = io.BufferedWriter(_Forgiving(number, 'w', closefd=False))
      encoding = stream and stream.encoding
      text = io.TextIOWrapper(binary, encoding, 'backslashreplace', line_buffering=True)
      setattr(sys, name, text)


def progress_bar(total: int, label: str, unit: str = 'it', initial: int = 0) -> tqdm:
  """Opens a bar on stderr: `with progress_bar(400, 'training', 'step') as b: ...`.

  Only a terminal shows it. A nested bar is erased when it closes. `b.update(n)` adds n
  to the count, which starts at `initial`, such as the step resumed from.
  """
  return tqdm(
    total=total,
    initial=initial,
    desc=label,
    unit=unit,
    file=sys.stderr,
    mininterval=UPDATE_S,
    miniters=0,  # check the time on every update: steps differ in length
    dynamic_ncols=True,
    smoothing=0.1,
    leave=None,
    disable=not (hosts.is_first() and sys.stderr and sys.stderr.isatty()),
  )


def log(text: str) -> None:
  """Prints a line to stdout, above any progress bar; only process 0 prints.

  A console that cannot be written, such as that of a Python program, ends no run.
  """
  if hosts.is_first() and sys.stdout:
    with contextlib.suppress(OSError, ValueError):
      tqdm.write(text, file=sys.stdout)
      sys.stdout.flush()  # the line appears in a redirected log at once
