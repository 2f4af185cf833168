"""Reads the collectives in the loops of a compiled program from its HLO text.

XLA's cost analysis counts a loop's body only once, so it cannot be used here.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bapo_jax.tools.plan import contents

HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
KINDS = '|'.join(contents.COLLECTIVES)
# A scatter on TPUs: a computation of this name sums the whole array, keeps a slice.
SCATTER = 'all-reduce-scatter'
# `-done` ends what `-start` began and is not counted a second time.
COLLECTIVE = re.compile(rf' = (.+?) ({KINDS})(-start)?\(')
# Bits of a number, and dimensions: bf16[8,4], f8e4m3[2], pred[].
ARRAY = re.compile(r'\b(?:pred|(?:[sufc]|bf)(\d+)\w*)\[([\d,]*)\]')
CALLED = re.compile(r'(?:calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)')
BRANCHES = re.compile(r'(?:branch|called)_computations=\{([^}]*)\}')
LOOP = re.compile(r' while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
BOUND = re.compile(r' constant\((\d+)\)')
# Groups of devices are a list, a permuted iota, or axes of a small mesh.
LISTED = re.compile(r'replica_groups=\{\{([\d,]*)\}')
TILED = re.compile(r'replica_groups=\[(?:\d+,)*(\d+)\]')
AXES = re.compile(r"replica_groups=mesh\[(.+?)\].*? \{('[^}]*)\}")


class Run(NamedTuple):
  """A collective instruction, and how often it runs."""

  kind: str
  bytes: int  # of the whole array on one device: gathered, summed or sent
  times: int  # per run of the program
  looped: bool

  @property
  def received(self) -> int:
    """Bytes that a device receives per run of the program; all-reduce counts twice."""
    return self.bytes * self.times * (2 if self.kind == 'all-reduce' else 1)


class Step(NamedTuple):
  """An instruction, and how often it runs."""

  line: str
  times: int  # per run of the program
  where: str  # name of the computation
  loops: int  # around the instruction
  unknown: int  # of these, loops whose length is known at run time only
  fused: bool  # a part of another instruction


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Splits a program into {computation: its instructions} and the name of the entry."""
  bodies, entry, lines = {}, '', []
  for line in text.splitlines():
    if header := HEADER.match(line):
      lines = bodies[header[2]] = []
      entry = header[2] if header[1] else entry
    elif line.startswith('  '):
      lines.append(line)
  return bodies, entry


def steps(text: str, turns: Sequence[int] = ()) -> Iterator[Step]:
  """Yields each instruction of the program, once per path of calls that leads to it.

  The iterations of a loop are XLA's trip count, or else the bound in the loop's
  condition. A loop that has neither runs turns[d] times, where d is the number of such
  loops around it, or once if `turns` has no entry d.
  """
  bodies, entry = computations(text)

  def walk(now: Step) -> Iterator[Step]:
    for line in bodies.get(now.where, ()):
      yield now._replace(line=line)
      if loop := LOOP.search(line):
        known = TRIPS.findall(line) or BOUND.findall('\n'.join(bodies.get(loop[1], ())))
        trips = max(map(int, known or turns[now.unknown :][:1]), default=1)
        yield from walk(
          now._replace(
            times=now.times * trips,
            where=loop[2],
            loops=now.loops + 1,
            unknown=now.unknown + (not known),
          )
        )
      called = CALLED.findall(line)
      for group in BRANCHES.findall(line):
        called += [name.strip().lstrip('%') for name in group.split(',')]
      fused = now.fused or not re.search(r' (call|conditional)\(', line)
      for name in called:
        yield from walk(now._replace(where=name, fused=fused))

  return walk(Step('', 1, entry, 0, 0, False))


def runs(text: str, most: int = 1) -> Iterator[Run]:
  """Yields each collective; loops of unknown length count as `most` iterations."""
  for step in steps(text, [most] * 9):
    if found := COLLECTIVE.search(step.line):
      bytes_ = size(found[1], found[2], bool(found[3]), step.line)
      kind = 'reduce-scatter' if step.where.startswith(SCATTER) else found[2]
      yield Run(kind, bytes_, step.times, step.loops > 0)


def in_loops(text: str, most: int = 1) -> list[Run]:
  """Lists the collectives inside loops; see `runs`."""
  return [run for run in runs(text, most) if run.looped]


def size(shape: str, kind: str, started: bool, line: str) -> int:
  """Returns the bytes of the whole array: the operand of a scatter, else the result.

  `shape` is the result's shape in HLO; `started` is True for a `-start` instruction.
  """
  # A `-start` lists (operands, results, ...), each an array or a tuple; that of a sum
  # lists the results alone.
  if started and kind != 'all-reduce':
    shape = elements(shape)[1]
  total = sum(
    math.prod(int(n) for n in dims.split(',') if n) * max(int(bits or 8) // 8, 1)
    for bits, dims in ARRAY.findall(shape)
  )
  return total * members(line) if kind == 'reduce-scatter' else total


def elements(shape: str) -> list[str]:
  """Splits the shape of a tuple, '((a, b), c)', at its outermost commas."""
  parts, depth = [''], 0
  for letter in shape.strip()[1:-1]:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += letter
  return parts


def members(line: str) -> int:
  """Returns the size of the device groups of an instruction; 1 if it has no groups."""
  if listed := LISTED.search(line):
    return listed[1].count(',') + 1
  if tiled := TILED.search(line):
    return int(tiled[1])
  if axes := AXES.search(line):
    sizes = dict(part.split('=') for part in axes[1].split(','))
    return math.prod(int(sizes[name]) for name in axes[2].split(','))
  return 1
