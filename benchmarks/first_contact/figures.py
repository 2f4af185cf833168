"""Defines what a section of first contact receives and what it reports."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Context(NamedTuple):
  """Holds what a section may read; it travels to the section's process as JSON."""

  model: str = ''  # directory with the config.json of a model; '': none
  small: bool = False  # tiny sizes, to test the program and not the machine
  seconds: float = 600.0  # until the section is stopped
  platform: str = ''  # 'cpu', 'gpu' or 'tpu'; '' if no section has found out
  rates: Mapping[str, float] = {}  # figures of the section `rates`, by name


class Figure(NamedTuple):
  """One measured number."""

  name: str
  value: float | None  # None: the platform does not report it
  unit: str
  limit: float | None = None  # the largest value that passes; None: nothing is checked
  reference: float | None = None  # a number to compare the value with
  of: str = ''  # where the reference comes from

  @property
  def passed(self) -> bool:
    """Returns whether the value is within its limit; a missing value is not."""
    return self.limit is None or (
      self.value is not None and bool(self.value <= self.limit)
    )

  def record(self) -> dict[str, Any]:
    """Returns the figure for JSON, with None for numbers that are not finite."""

    def plain(x: float | None) -> float | None:  # NumPy's numbers are no JSON
      return None if x is None or not math.isfinite(x) else float(x)

    numbers = {k: plain(getattr(self, k)) for k in ('value', 'limit', 'reference')}
    return self._asdict() | numbers | {'passed': self.passed}


class Skip(Exception):
  """Ends a section that this machine or command gives no reason to run."""


# A section yields figures as it goes, and facts about the machine as a dict.
Run = Callable[[Context], Iterator[Figure | dict[str, Any]]]


class Section(NamedTuple):
  run: Run
  seconds: float  # not started with less time left
  decides: bool = False  # a failure makes the exit status 1
