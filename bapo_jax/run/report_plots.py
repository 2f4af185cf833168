"""Draws the figures of the report: curves over the steps, and a timeline.

1. `series` and `mean` read a metric from the rows, skipping gaps;
2. `draw_curves` draws the panels: pale raw values under their running means;
3. `draw_timeline` draws when the last steps were sampled and trained.
"""

import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bapo_jax.runtime.metrics import Row
from bapo_jax.types import SOURCES

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#777777'  # colour-blind readers see three
FEW = 20  # at most this many points are drawn as dots


class Panel(NamedTuple):
  """A subplot with up to three metrics."""

  title: str
  unit: str  # of the vertical axis
  labels: dict[str, str]  # metric -> its name in the legend


SHARES = {'clip/share': 'bounds used', 'clip/share_start': 'start bounds'}
BOUNDS = {'clip/high': 'high', 'clip/low': 'low'}
CLIPPED = {'clip/fraction_positive': 'A > 0', 'clip/fraction_negative': 'A < 0'}
LENGTHS = {'rollout/length_right': 'right', 'rollout/length_wrong': 'wrong'}
REWARDS = {'rollout/reward': 'fresh responses', 'eval/reward': 'held-out problems'}
PANELS = (
  Panel('Reward', 'mean reward', REWARDS),
  Panel('Accuracy on held-out problems', 'accuracy ± error', {'eval/accuracy': ''}),
  Panel('Entropy of the policy', 'nats per token', {'loss/entropy': ''}),
  Panel('KL from behaviour to current policy', 'nats per token', {'loss/kl': ''}),
  Panel('Positive share', 'share of the gradient', SHARES),
  Panel('Clip bounds', 'probability ratio', BOUNDS),
  Panel('Tokens clipped', 'share', CLIPPED | {'clip/fraction': 'all tokens'}),
  Panel('Batch by source', 'share of the seats', {f'batch/{x}': x for x in SOURCES}),
  Panel('Gradient norm', 'norm', {'learner/grad_norm': ''}),
  Panel('Response length', 'tokens', LENGTHS | {'rollout/length': 'all'}),
  Panel('Groups of both verdicts', 'share of the groups', {'batch/learnable': ''}),
  Panel('Largest ratio of a token', 'probability ratio', {'loss/ratio_max': ''}),
)
# Metrics of evaluations -> their standard errors.
ERRORS = {'eval/accuracy': 'eval/stderr', 'eval/reward': 'eval/reward_stderr'}
# One spike would flatten the other values.
SPIKY = {'learner/grad_norm', 'loss/kl', 'loss/ratio_max'}


def series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (step_N, value_N) of the N rows in which the metric is finite."""
  pairs = [(r['step'], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]
  step_N, value_N = np.asarray(pairs, float).reshape(-1, 2).T
  return step_N, value_N


def mean(rows: Sequence[Row], name: str) -> float:
  """Averages over the rows that have the metric; nan if no row has it."""
  _, value_N = series(rows, name)
  return float(value_N.mean()) if len(value_N) else math.nan


def running_mean(
  step_N: np.ndarray, value_N: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (middle step, mean) of every full window of `width` (odd) values."""
  half = width // 2
  smooth = np.convolve(value_N, np.full(width, 1 / width), 'valid')
  return step_N[half : len(step_N) - half], smooth


def new_figure(
  width: float, height: float, dpi: int = 150, arrange: bool = True
) -> 'Figure':
  """Makes an empty figure of this size in inches, which arranges its axes or not."""
  # Imported here because matplotlib is slow to import.
  from matplotlib.figure import Figure
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1) if arrange else None
  return Figure(figsize=(width, height), dpi=dpi, layout=layout)


def dress(ax: 'Axes', title: str) -> None:
  """Sets the title and the style of the axes."""
  ax.set_title(title, loc='left', fontsize=11, fontweight='bold')
  ax.spines[['top', 'right']].set_visible(False)
  ax.tick_params(labelsize=9)


def curve(ax: 'Axes', step_N: np.ndarray, value_N: np.ndarray, **line: Any) -> None:
  """Draws pale raw values and their running mean; few points are drawn as dots."""
  width = len(value_N) // FEW | 1
  if width > 1:
    ax.plot(step_N, value_N, color=line['color'], linewidth=0.7, alpha=0.45)
  if len(value_N) <= FEW:
    line |= {'marker': 'o', 'markersize': 4}
  ax.plot(*running_mean(step_N, value_N, width), linewidth=1.8, **line)


def errors(rows: Sequence[Row], name: str) -> np.ndarray:
  """Returns the standard error of each value of a metric of ERRORS; 0 if missing."""
  error = dict(zip(*series(rows, ERRORS[name]), strict=True))
  return np.asarray([error.get(step, 0.0) for step in series(rows, name)[0]])


def evaluations(ax: 'Axes', rows: Sequence[Row], name: str, **line: Any) -> None:
  """Draws a metric of ERRORS as dots with their standard errors."""
  line |= {'linewidth': 1.5, 'marker': 'o', 'ms': 4, 'capsize': 3}
  ax.errorbar(*series(rows, name), errors(rows, name), **line)


def spiky(name: str, value_N: np.ndarray) -> bool:
  """Returns whether a few values would flatten the others on a linear axis."""
  if name not in SPIKY or not len(value_N):
    return False
  return bool(value_N.min() > 0 and value_N.max() > 30 * np.median(value_N))


def _panel(ax: 'Axes', rows: Sequence[Row], target: float | None, panel: Panel) -> None:
  dress(ax, panel.title)
  found, colours = {}, (BLUE, ORANGE, GREY)
  for (name, label), color in zip(panel.labels.items(), colours, strict=False):
    points = series(rows, name)
    if len(points[0]):
      found[name] = points[1]
      if name in ERRORS:
        evaluations(ax, rows, name, color=color, label=label)
      else:
        curve(ax, *points, color=color, label=label)
  if not found:
    ax.text(0.5, 0.5, 'not recorded', color=GREY, ha='center', transform=ax.transAxes)
    ax.set(xticks=[], yticks=[])
    return
  if any(spiky(name, value_N) for name, value_N in found.items()):
    ax.set_yscale('log')
  if panel.title == 'Positive share' and target is not None:
    ax.axhline(target, color='black', linewidth=1, linestyle='--', label='target')
  ax.set_xlabel('step', fontsize=9)
  ax.set_ylabel(panel.unit, fontsize=9)
  ax.grid(color='0.9', linewidth=0.8)
  ax.locator_params(axis='x', integer=True)
  if len(panel.labels) > 1:  # above the axes: the legend hides no curve
    slim = {'borderaxespad': 0.2, 'frameon': False, 'handlelength': 1.2}
    ax.legend(loc='lower right', bbox_to_anchor=(1, 0.99), ncols=4, fontsize=8, **slim)


def draw_curves(
  path: str | os.PathLike[str], rows: Sequence[Row], target: float | None = None
) -> None:
  """Draws all panels into one PNG; a dashed line is the positive share's target."""
  figure = new_figure(11, 19, arrange=False)  # to arrange so many takes seconds
  room = {'left': 0.08, 'right': 0.99, 'bottom': 0.028, 'top': 0.983}
  figure.subplots_adjust(**room, hspace=0.38, wspace=0.2)
  steps = [r['step'] for r in rows] or [0]
  margin = max(1, 0.03 * (max(steps) - min(steps)))
  axes = figure.subplots(len(PANELS) // 2, 2)
  for ax, panel in zip(axes.flat, PANELS, strict=True):
    _panel(ax, rows, target, panel)
    if ax.get_xlabel():  # all panels have the same range of steps
      ax.set_xlim(min(steps) - margin, max(steps) + margin)
  figure.savefig(path)


LANES = ('sampling', 'training')
SHOWN = 6  # steps in a timeline


class Span(NamedTuple):
  """A time in which sampling or training was busy with the groups of a step."""

  lane: int  # index into LANES
  step: int  # that trains on the groups
  begin: float  # seconds since the first span
  end: float


def spans(rows: Sequence[Row]) -> list[Span]:
  """Returns when the last steps were sampled and trained; [] without mesh.rollout.

  A step trains from the end of the step before, without its waiting, to its own end.
  """
  known = [row for row in rows if 'overlap/ended' in row][-SHOWN - 1 :]
  found = []
  for before, row in itertools.pairwise(known):
    if before['overlap/ended'] > row['overlap/ended']:
      found = []  # the process was resumed between the steps
      continue
    waited = row.get('time/send', 0.0) + row.get('time/wait', 0.0)
    times = (row['overlap/sampling'], row['overlap/sampled'])
    found += [
      Span(0, int(row['step']), *times),
      Span(1, int(row['step']), before['overlap/ended'] + waited, row['overlap/ended']),
    ]
  first = min((span.begin for span in found), default=0.0)
  return [x._replace(begin=x.begin - first, end=x.end - first) for x in found]


def draw_timeline(path: str | os.PathLike[str], drawn: Sequence[Span]) -> None:
  """Draws the spans of both lanes into a PNG; a colour alternates with the step."""
  figure = new_figure(11, 2.2)
  ax = figure.subplots()
  dress(ax, 'Sampling beside training, last steps')
  for span in drawn:
    size, y = span.end - span.begin, 1 - span.lane
    ax.barh(y, size, 0.7, span.begin, color=(BLUE, ORANGE)[span.step % 2], alpha=0.8)
    middle = span.begin + size / 2
    ax.text(middle, y, str(span.step), ha='center', va='center', color='white')
  ax.set_yticks((1, 0), LANES)
  ax.set_xlabel('seconds', fontsize=9)
  figure.savefig(path)
