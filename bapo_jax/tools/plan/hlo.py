"""Collectives that a compiled program runs in its loops, read from its HLO text.

1. `computations` splits the text into computations and their instructions;
2. `in_loops` walks from the entry into loop bodies and the computations that they call,
   multiplying trip counts on the way.

XLA's own cost analysis counts a loop's body once, so it is of no use here.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
  'collective-broadcast',
)
# A TPU's scatter: a computation of this name sums all of it and keeps a slice.
SCATTER = 'all-reduce-scatter'
# `-done` ends what `-start` began and is not counted a second time.
COLLECTIVE = re.compile(rf' = (.+?) ({"|".join(KINDS)})(-start)?\(')
ARRAY = re.compile(r'\b(pred|[suf]\d+|bf16|f8\w*|c\d+)\[([\d,]*)\]')
CALLED = re.compile(
  r'(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)'
)
BRANCHES = re.compile(r'(?:branch|called)_computations=\{([^}]*)\}')
LOOP = re.compile(r' while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
BOUND = re.compile(r' constant\((\d+)\)')


class Collective(NamedTuple):
  """One kind and size of collective inside a loop."""

  kind: str
  bytes: int  # of the whole array on one device: gathered, summed or sent
  sites: int  # instructions of this kind and size
  times: int  # how often they run, together, per run of the program

  @property
  def received(self) -> int:
    """Bytes that a device receives per run of the program; a sum goes round twice."""
    return self.bytes * self.times * (2 if self.kind == 'all-reduce' else 1)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """(name -> instructions, name of the entry)."""
  found, entry, lines = {}, '', []
  for line in text.splitlines():
    if header := HEADER.match(line):
      lines = found[header[2]] = []
      entry = header[2] if header[1] else entry
    elif line.startswith('  '):
      lines.append(line)
  return found, entry


def in_loops(text: str, most: int = 1) -> list[Collective]:
  """The collectives that run inside loops, the most bytes first.

  Args:
    most: iterations of a loop that ends when its data do, at most.
  """
  bodies, entry = computations(text)
  sites: dict[tuple[str, int], set[tuple[str, str]]] = {}
  times: dict[tuple[str, int], int] = {}

  def walk(name: str, repeats: int, looped: bool) -> None:
    for line in bodies.get(name, ()):
      if looped and (found := COLLECTIVE.search(line)):
        bytes_ = size(found[1], found[2], bool(found[3]), line)
        key = ('reduce-scatter' if name.startswith(SCATTER) else found[2]), bytes_
        sites.setdefault(key, set()).add((name, line))
        times[key] = times.get(key, 0) + repeats
      if loop := LOOP.search(line):
        walk(loop[2], repeats * trips(line, bodies.get(loop[1], ()), most), True)
      for called in callees(line):
        walk(called, repeats, looped)

  walk(entry, 1, False)
  found = [
    Collective(kind, n, len(where), times[kind, n])
    for (kind, n), where in sites.items()
  ]
  return sorted(found, key=lambda c: -c.received)


def callees(line: str) -> list[str]:
  """Names of the computations that an instruction calls, loops excepted."""
  names = CALLED.findall(line)
  for group in BRANCHES.findall(line):
    names += [part.strip().lstrip('%') for part in group.split(',')]
  return names


def trips(line: str, condition: Iterable[str], most: int = 1) -> int:
  """Iterations of a loop: XLA's count, else the bound in its condition, else `most`."""
  if known := TRIPS.search(line):
    return int(known[1])
  bounds = [int(n) for text in condition for n in BOUND.findall(text)]
  return max(bounds, default=most)


def size(shape: str, kind: str, started: bool, line: str) -> int:
  """Bytes of the whole array: the result, or of a scatter the operand.

  Args:
    shape: the result's, as in the text.
    started: the instruction is the `-start` half of a collective.
  """
  arrays = [
    math.prod(int(n) for n in dims.split(',') if n) * itemsize(dtype)
    for dtype, dims in ARRAY.findall(shape)
  ]
  # A started gather or permute lists its operand before its result.
  paired = started and kind in ('all-gather', 'collective-permute')
  total = max(arrays, default=0) if paired else sum(arrays)
  return total * members(line) if kind == 'reduce-scatter' else total


def members(line: str) -> int:
  """Devices in a group of the collective."""
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', line):
    return listed[1].count(',') + 1
  if tiled := re.search(r'replica_groups=\[\d+,(\d+)\]', line):
    return int(tiled[1])
  return 1


def itemsize(dtype: str) -> int:
  """Bytes of one number of an HLO dtype: 'bf16', 's32', 'pred'."""
  bits = re.search(r'\d+', dtype)
  return max(int(bits[0]) // 8, 1) if bits else 1
