"""Reads what a compiled program holds and sends from its HLO text."""

import collections
import math
import re

from bapo_jax.tools.plan.chips import GIB

# Name of an instruction, its result (an array or a tuple of arrays), its operation.
STEP = re.compile(r'^  (?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(')
# Bits of a number, and dimensions: bf16[8,4], f8e4m3[2], pred[].
ARRAY = re.compile(r'\b((?:pred|(?:[sufc]|bf)(\d+)\w*)\[([\d,]*)\])')
FUSED = re.compile(r' fusion\(.*calls=%?([\w.\-]+)')
SOURCE = re.compile(r'op_name="([^"]*)"')
# These name arrays that another instruction holds.
VIEWS = ('tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call')
COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)


def arrays(shape: str) -> list[tuple[int, str]]:
  """Returns (bytes, name) of the arrays of a shape in HLO, such as (4, 'f32[1]')."""
  return [
    (math.prod(map(int, filter(None, dims.split(',')))) * int(bits or 8) // 8, name)
    for name, bits, dims in ARRAY.findall(shape)
  ]


def largest(text: str, most: int = 4) -> list[tuple[int, str, str]]:
  """Returns (bytes per device, shape, source) of the largest arrays of a program.

  The source is an argument's name or the operation in the code. Of arrays of one shape,
  such as the caches of all layers, the first is listed. An array inside a fused kernel
  is never in memory and does not count.
  """
  fused = set(FUSED.findall(text))
  seen = dict[str, tuple[int, str, str]]()
  skipped = False
  for line in text.splitlines():
    if not line.startswith(' '):
      skipped = line.partition(' ')[0].lstrip('%') in fused
    step = STEP.match(line)
    if skipped or step is None or step[3] in VIEWS:
      continue
    source = SOURCE.search(line)
    if source or step[3] != 'parameter':  # only the entry's parameters have a source
      # An argument's name is quoted, and a path of the code ends with its operation.
      name = source[1].replace("\\'", "'") if source else step[1]
      for size, shape in arrays(step[2]):
        seen.setdefault(shape, (size, shape, name))
  return sorted(seen.values(), reverse=True)[:most]


def collectives(text: str) -> dict[str, tuple[int, int]]:
  """Returns kind -> (instructions, bytes of the largest result on one device).

  An instruction in a loop counts once.
  """
  sizes = collections.defaultdict[str, list[int]](list)
  for line in text.splitlines():
    if step := STEP.match(line):
      kind = step[3].removesuffix('-start')
      if kind in COLLECTIVES:
        sizes[kind].append(max((size for size, _ in arrays(step[2])), default=0))
  return {kind: (len(n), max(n)) for kind, n in sizes.items()}


def described(text: str) -> str:
  """Formats the largest arrays, with the end of their sources, and the collectives."""
  lines = [
    f'    {size / GIB:8.3f} GiB  {shape}  {"/".join(source.split("/")[-3:])}'
    for size, shape, source in largest(text)
  ]
  sent = [
    f'{count} {kind} of at most {size / GIB:.3f} GiB'
    for kind, (count, size) in collectives(text).items()
  ]
  return '\n'.join([*lines, f'    collectives: {", ".join(sent) or "none"}'])
