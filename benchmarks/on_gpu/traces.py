"""Reads which kernels a traced program ran on the GPUs, and for how long."""

import pathlib
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import jax

WIDTH = 80  # characters of a kernel's name that are kept


class Span(NamedTuple):
  """One run of a kernel, in nanoseconds."""

  name: str
  start: float
  end: float


def spans(folder: str) -> list[Span]:
  """Returns all runs of kernels in the newest trace of a folder; none on a CPU."""
  path = max(pathlib.Path(folder).rglob('*.xplane.pb'))
  data = jax.profiler.ProfileData.from_file(str(path))
  return [
    Span(event.name, event.start_ns, event.start_ns + event.duration_ns)
    for plane in data.planes
    if '/device:GPU' in plane.name
    for line in plane.lines
    if 'Stream' in line.name
    for event in line.events
  ]


def kernels(found: Iterable[Span]) -> list[tuple[str, float, int]]:
  """Returns name, milliseconds and calls of every kernel, the longest first."""
  took: dict[str, list[float]] = defaultdict(list)
  for span in found:
    took[span.name].append((span.end - span.start) / 1e6)
  rows = [(name[:WIDTH], round(sum(ms), 2), len(ms)) for name, ms in took.items()]
  return sorted(rows, key=lambda row: -row[1])


def busy_ms(found: Iterable[Span]) -> float:
  """Returns the milliseconds in which at least one kernel ran."""
  total, end = 0.0, 0.0
  for span in sorted(found, key=lambda span: span.start):
    total += max(0.0, span.end - max(span.start, end))
    end = max(end, span.end)
  return total / 1e6
