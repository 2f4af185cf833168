"""Draws curves as SVG, whose numbers can be read: by hovering, tapping, or a program.

1. `Curve` has the lines of one metric: a bold one, pale ones, and exact values;
2. `chart` scales them to a box, with axes, a legend and a strip per step that shows
   the exact values of the step.

A chart scales with its column and takes its colours from the page.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import ArrayLike

from bapo_jax.run.series import Points
from bapo_jax.runtime.html import element

WIDTH, HEIGHT = 400, 210  # of a chart, in units of its coordinates
LEFT, RIGHT, TOP, BOTTOM = 46, 392, 8, 186  # of the plot
STRIPS = 200  # at most this many steps show their values
DOTS = 20  # a curve of at most this many points is drawn with dots
Level = tuple[float, str]  # the value and the label of a horizontal line


class Curve(NamedTuple):
  """The lines of one metric of one run or group of runs."""

  label: str  # '' if the chart has a single curve
  colour: int  # of the page, from 0
  exact: Points  # the values that hovering shows
  bold: Points  # the values drawn bold
  pale: Sequence[Points] = ()  # lines drawn pale
  error_N: np.ndarray | None = None  # half the length of the bars at the bold points
  dashed: bool = False


class Axis(NamedTuple):
  """Maps values to coordinates, linearly or by their logarithms."""

  low: float
  high: float
  start: float  # coordinate of low
  end: float
  log: bool = False

  def __call__(self, value_N: ArrayLike) -> np.ndarray:
    """Returns the coordinates of values."""
    scale = np.log10 if self.log else np.asarray
    low, high, at_N = map(scale, (self.low, self.high, value_N))
    return self.start + (self.end - self.start) * (at_N - low) / (high - low)


def chart(
  title: str,
  unit: str,
  curves: Sequence[Curve],
  steps: tuple[float, float],
  level: Level | None,
  log: bool,
  legend: bool,
) -> Element:
  """Returns a figure with the curves.

  Args:
    steps: first and last step of the horizontal axis.
    level: (value, label) of a dashed horizontal line.
    log: whether the vertical axis is logarithmic if all values are positive.
    legend: whether the labels of the curves are shown above the chart.
  """
  drawn = [curve for curve in curves if len(curve.exact[0])]
  keys = _legend(drawn, level) if legend else ()
  caption = element('figcaption', element('b', title), *keys)
  if not drawn:
    return element('figure', caption, element('p', 'not recorded', class_='empty'))
  x = Axis(*_spread(*steps), LEFT, RIGHT)
  y = _vertical(drawn, level, log)
  parts = [*_grid(x, y)]
  if level is not None:
    parts.append(_across(y, level[0], 'level'))
  for curve in drawn:
    parts.append(_lines(curve, x, y))
  cursor = element('line', class_='cursor', y1=TOP, y2=BOTTOM)
  drawing = element('svg', *parts, cursor, *_strips(drawn, x), role='img')
  drawing.set('viewBox', f'0 0 {WIDTH} {HEIGHT}')
  drawing.set('aria-label', f'{title}, {unit}, over the steps')
  return element('figure', caption, element('output', unit), drawing)


def _legend(curves: Sequence[Curve], level: Level | None):
  for curve in curves:
    if curve.label:
      kind = f'key c{curve.colour}{" dashed" if curve.dashed else ""}'
      yield element('span', element('i', class_=kind), curve.label)
  if level is not None:
    yield element('span', element('i', class_='key level'), level[1])


def _vertical(curves: Sequence[Curve], level: Level | None, log):
  """Returns the axis that all values, error bars and the level fit into."""
  values = [np.array([] if level is None else [level[0]])]
  for curve in curves:
    values += [line[1] for line in (curve.bold, *curve.pale)]
    if curve.error_N is not None:
      values += [curve.bold[1] - curve.error_N, curve.bold[1] + curve.error_N]
  value_N = np.concatenate(values)
  low = float(value_N.min())
  high = float(value_N.max())
  if not log or low <= 0:
    return Axis(*_spread(low, high), BOTTOM, TOP)
  margin = (high / low) ** 0.04 if high > low else 2.0
  return Axis(low / margin, high * margin, BOTTOM, TOP, log=True)


def _spread(low, high):
  """Adds a margin to a range, which may be empty."""
  margin = 0.04 * (high - low) or 0.1 * abs(high) or 0.5
  return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
  """Returns at most six multiples of 1, 2 or 5 times a power of ten."""
  least = (high - low) / 5  # the smallest distance
  power = 10.0 ** math.floor(math.log10(least))
  unit = next(u * power for u in (1, 2, 5, 10) if u * power >= least)
  return [n * unit for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def _log_ticks(low, high):
  """Returns powers of ten and their multiples by 2 and 5, or some of them if many."""
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
  marks = [mark for mark in marks if low <= mark <= high]
  return marks[:: len(marks) // 7 + 1]


def _across(y: Axis, value, kind):
  """Draws a horizontal line at a value."""
  at = f'{y(value):.1f}'
  return element('line', class_=kind, x1=LEFT, x2=RIGHT, y1=at, y2=at)


def _grid(x: Axis, y: Axis):
  """Yields the lines and the numbers of both axes."""
  for value in _log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
    yield _across(y, value, 'grid')
    at = f'{y(value) + 4:.1f}'
    text = f'{round(value, 12):g}'
    yield element('text', text, x=LEFT - 5, y=at, text_anchor='end')
  for value in ticks(x.low, x.high):
    if value == int(value):
      at = f'{x(value):.1f}'
      yield element('text', f'{value:g}', x=at, y=BOTTOM + 16, text_anchor='middle')


def thinned(points: Points) -> Points:
  """Keeps the lowest and the highest value of each stretch of a long curve."""
  step_N, value_N = points
  if len(step_N) <= 2 * STRIPS:
    return points
  stretches = np.array_split(np.arange(len(step_N)), STRIPS)
  ends = ((s[value_N[s].argmin()], s[value_N[s].argmax()]) for s in stretches)
  keep = sorted({int(i) for pair in ends for i in pair})
  return step_N[keep], value_N[keep]


def _lines(curve: Curve, x: Axis, y: Axis):
  """Draws the pale lines, the error bars, the bold line and its dots."""
  parts = [element('path', class_='pale', d=_path(p, x, y)) for p in curve.pale]
  step_N, value_N = curve.bold
  at_N = x(step_N)
  height_N = y(value_N)
  if curve.error_N is not None:
    ends = (y(value_N + sign * curve.error_N) for sign in (1, -1))
    bars = zip(at_N, *ends, strict=True)
    bars = ''.join(f'M{at:.1f},{a:.1f}V{b:.1f}' for at, a, b in bars)
    parts.append(element('path', class_='bar', d=bars))
  parts.append(element('path', class_='bold', d=_path(curve.bold, x, y)))
  if len(step_N) <= DOTS:
    dots = zip(at_N, height_N, strict=True)
    parts += [element('circle', cx=f'{a:.1f}', cy=f'{b:.1f}', r=2.6) for a, b in dots]
  dashed = ' dashed' if curve.dashed else ''
  return element('g', *parts, class_=f'curve c{curve.colour}{dashed}')


def _path(points: Points, x: Axis, y: Axis):
  step_N, value_N = thinned(points)
  pairs = zip(x(step_N), y(value_N), strict=True)
  return 'M' + 'L'.join(f'{a:.1f},{b:.1f}' for a, b in pairs) if len(step_N) else ''


def _strips(curves: Sequence[Curve], x: Axis):
  """Yields invisible strips, side by side, that name the exact values of a step."""
  texts: dict[float, list[str]] = {}  # step -> values
  for curve in curves:
    for step, value in zip(*curve.exact, strict=True):
      texts.setdefault(float(step), []).append(f'{curve.label} {value:.6g}'.strip())
  steps = np.sort([*texts])
  count = min(len(steps), STRIPS)
  steps = steps[np.linspace(0, len(steps) - 1, count).round().astype(int)]
  at_N = x(steps)
  edges = [LEFT, *((at_N[1:] + at_N[:-1]) / 2), RIGHT]
  strip = {'y': TOP, 'height': BOTTOM - TOP, 'class_': 'hit'}
  for step, at, left, right in zip(steps, at_N, edges, edges[1:], strict=False):
    title = element('title', f'step {step:g}: {", ".join(texts[step])}')
    box = {'x': f'{left:.1f}', 'width': f'{right - left:.1f}', 'data_x': f'{at:.1f}'}
    yield element('rect', title, **strip, **box)
