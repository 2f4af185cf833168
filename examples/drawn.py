r"""Generates problems with pictures, from a seed; only the picture tells the answer.

configs/geometry.py uses these problems. A picture shows some quantities, random digits
from 0 to 9: heights of bars on an axis, columns of dots, lengths on a grid, or hands of
dials. The text asks for a sum or difference of some of the quantities modulo 10.
Without the picture every answer is equally likely, whatever the text: chance is 1 / 10.

The worked solution reads the quantities off, in the order of the question:

    <image>x1+x3 mod 10  ->  4+7=1\boxed{1}

A slip misreads a quantity; the digits that were read are nevertheless added correctly.
The wording `short` is for the embedded policy; the wording `sentence` is English.

`numbers` are the quantities shown, and `terms` or `asked` are the indices of the
quantities asked for, counted from 1 and negative if subtracted. Axes: H and W are rows
and columns of pixels.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bapo_jax.data import pictures
from bapo_jax.data.generate import draw_distinct

Numbers = Sequence[int]
Kind = Literal['bars', 'dots', 'lengths', 'dials', 'mixed', 'blank']
BASE = 10  # quantities are 0..9, and answers are modulo 10
LINE = np.array((120, 120, 120), np.uint8)  # of axes and rims
GRID = np.array((215, 215, 215), np.uint8)  # fainter than the quantities in front


def drawn(
  split: str,
  *,
  kind: Kind = 'bars',
  shown: int = 3,
  terms: int = 2,
  sides: tuple[int, ...] = (56,),
  wording: Literal['short', 'sentence'] = 'short',
  seed: int = 0,
  train: int = 4096,
  test: int = 512,
) -> list[dict[str, Any]]:
  """Returns problems about `terms` of the `shown` quantities of a picture.

  The side of a picture is one of `sides`, at least 56 pixels. `kind` changes no
  quantity; `mixed` is a random kind per problem, and `blank` shows nothing, to measure
  in an evaluation whether pictures are read.

  Raises:
    ValueError: there are too few distinct problems, or a knob is out of range.
  """
  if not 1 <= terms <= shown <= 4:
    raise ValueError(f'shown={shown} and terms={terms}: give 1 <= terms <= shown <= 4')
  rng = np.random.default_rng((seed, shown, terms))

  def draw():
    numbers = tuple(int(n) for n in rng.integers(0, BASE, shown))
    chosen = 1 + rng.permutation(shown)[:terms]
    signs = np.where(rng.random(terms) < 0.5, 1, -1)
    signs[0] = 1
    key = numbers, tuple(int(n) for n in chosen * signs)
    return key, key

  problems = draw_distinct(draw, train + test, 'shown')
  # Kinds use a separate random stream, so that quantities do not depend on kinds.
  kinds = [kind] if kind != 'mixed' else [k for k in KINDS if k != 'blank']
  stream = np.random.default_rng((seed, shown, terms, 1))
  kind_N = [kinds[stream.integers(len(kinds))] for _ in problems]
  chosen = range(train) if split == 'train' else range(train, len(problems))
  rows = []
  for i in chosen:
    numbers, asked = problems[i]
    # A square picture on a light ground; colours, widths and places are random.
    picture_rng = np.random.default_rng((seed, i))
    side = sides[int(picture_rng.integers(len(sides)))]
    light = picture_rng.integers(230, 256, 3).astype(np.uint8)
    canvas_HW3 = np.tile(light, (side, side, 1))
    KINDS[kind_N[i]][0](picture_rng, canvas_HW3, numbers)
    row = {
      'problem': _text(kind_N[i], numbers, asked, wording),
      'answer': _value([numbers[abs(n) - 1] for n in asked], asked),
      'images': [pictures.png(canvas_HW3)],
      'solutions': functools.partial(solve, numbers, asked),
    }
    rows.append(row)
  return rows


def solve(
  numbers: Numbers,
  terms: Numbers,
  rng: np.random.Generator,
  slip: float,
  repeat: float,
) -> str:
  """Returns the worked solution: quantities asked for, their sum, and the answer.

  Each quantity is misread with chance `slip`; with chance `repeat` the sum comes twice.
  """
  read = []
  for n in terms:
    slipped = int(rng.integers(1, BASE)) if rng.random() < slip else 0
    read.append((numbers[abs(n) - 1] + slipped) % BASE)
  value = _value(read, terms)
  line = f'{_sum(read, terms)}={value}'
  lines = [line] * (2 if rng.random() < repeat else 1)
  return '|'.join(lines) + rf'\boxed{{{value}}}'


def _value(read: Numbers, terms: Numbers):
  return sum(r if n > 0 else -r for r, n in zip(read, terms, strict=True)) % BASE


def _sum(values: Sequence[object], terms: Numbers):
  signed = zip(values, terms, strict=True)
  text = ''.join(f'{"+" if n > 0 else "-"}{value}' for value, n in signed)
  return text.removeprefix('+')


def _text(kind, numbers: Numbers, terms: Numbers, wording):
  asked = f'{_sum([f"x{abs(n)}" for n in terms], terms)} mod {BASE}'
  if wording == 'short':
    return f'{pictures.PLACEHOLDER}{asked}'
  names = ', '.join(f'x{i + 1}' for i in range(len(numbers)))
  return (
    f'{pictures.PLACEHOLDER}Let {names} be {KINDS[kind][1]}. Find {asked}, from 0 to '
    rf'{BASE - 1}, and give it in \boxed{{}}.'
  )


def _dark(rng):
  return rng.integers(0, 150, 3).astype(np.uint8)


def _bars(rng, canvas, numbers):
  """Draws bars on a line, beside an axis with a tick at every unit."""
  side = len(canvas)
  axis = 4
  unit = (side - 6) // BASE
  wide = (side - axis) // len(numbers)
  ground = side - 3
  canvas[ground, :] = canvas[:, axis - 1] = LINE
  for k in range(BASE):
    canvas[ground - k * unit, :axis] = LINE
  for i, n in enumerate(numbers):
    width = int(rng.integers(wide // 2, wide - 1))
    left = axis + i * wide + int(rng.integers(0, wide - width))
    colour = _dark(rng)
    canvas[ground - n * unit : ground, left : left + width] = colour
    canvas[ground + 1 :, left : left + width] = colour  # makes a height of 0 visible


def _dots(rng, canvas, numbers):
  """Draws a column of dots per quantity, in random cells out of ten, between lines."""
  wide = len(canvas) // len(numbers)
  across = (wide - 2) // 2
  down = len(canvas) // 5
  size = min(across, down) - 2
  for i, n in enumerate(numbers):
    canvas[:, i * wide] = GRID
    colour = _dark(rng)
    for cell in rng.permutation(BASE)[:n]:
      top = int(cell) // 2 * down + int(rng.integers(0, down - size))
      left = i * wide + 2 + int(cell) % 2 * across
      left += int(rng.integers(0, across - size))
      canvas[top : top + size, left : left + size] = colour


def _lengths(rng, canvas, numbers):
  """Draws horizontal segments, one per row, over vertical lines one unit apart."""
  unit = (len(canvas) - 2) // BASE
  high = len(canvas) // len(numbers)
  canvas[:, : BASE * unit + 1 : unit] = GRID
  for i, n in enumerate(numbers):
    left = int(rng.integers(0, BASE - n)) * unit
    row = i * high + int(rng.integers(3, high - 4))
    colour = _dark(rng)
    canvas[row : row + 2, left : left + n * unit + 1] = colour
    for end in (left, left + n * unit):  # makes a length of 0 visible
      canvas[row - 3 : row + 5, end : end + 2] = colour


def _dials(rng, canvas, numbers):
  """Draws dials in rows, with hands turned by tenths of a turn from the top."""
  across = math.ceil(math.sqrt(len(numbers)))
  cell = len(canvas) // across
  row_HW, column_HW = np.indices(canvas.shape[:2])
  for i, n in enumerate(numbers):
    radius = cell / 2 - 2 - rng.random()
    down = row_HW - (i // across + 0.5) * cell
    right = column_HW - (i % across + 0.5) * cell
    canvas[abs(np.hypot(down, right) - radius) < 0.8] = LINE
    angle = 2 * math.pi * n / BASE
    along = right * math.sin(angle) - down * math.cos(angle)
    aside = right * math.cos(angle) + down * math.sin(angle)
    canvas[(along > -1) & (along < radius) & (abs(aside) < 1.3)] = _dark(rng)


# Kind -> function that draws a picture, and phrase that names the quantities.
KINDS = {
  'blank': (lambda *_: None, 'quantities that the picture does not show'),
  'bars': (_bars, 'the heights of the bars in ticks of the axis, from the left'),
  'dots': (_dots, 'the numbers of dots in the columns, from the left'),
  'lengths': (
    _lengths,
    'the lengths of the segments in units of the grid, from the top',
  ),
  'dials': (
    _dials,
    'the angles of the hands, clockwise from the top in tenths of a turn, row by row',
  ),
}
