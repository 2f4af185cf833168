"""Draws the figures of a page of papers/ from the results of its experiments.

The kinds of figures are `curves`, `differences`, `levels` and `plane`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_jax.run import report_plots
from lab.evidence import Drawn, differences_of
from lab.experiments import Result
from lab.outcomes import OUTCOMES, cells, contrast, finite_pairs, t_interval

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PANELS = (
  ('Accuracy on held-out problems', 'evaluations'),
  ('Entropy, nats per token', 'loss/entropy'),
  ('Positive share before the search', 'clip/share_start'),
  ('Gradient norm', 'learner/grad_norm'),
)
DPI = 90
COLOURS = 10  # in matplotlib's cycle
POINTS = 41  # of a curve
PROMISED = (0.40, 0.33, 0.25)  # positive shares of the levels of imbalance


def write(
  module: Any, results: Mapping[str, Mapping[str, Result]], folder: str
) -> None:
  """Draws the figures of all experiments with results as PNG files; see claims.page."""
  os.makedirs(os.path.join(folder, 'figures'), exist_ok=True)
  for name, shown in module.SHOWN.items():
    for title, drawn in shown.figures.items() if results[name] else ():
      figure = DRAWN[drawn.kind](results[name], drawn)
      # Without matplotlib's version in the file, equal numbers give equal files.
      path = os.path.join(folder, 'figures', f'{title}.png')
      figure.savefig(path, metadata={'Software': None})


def curves(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws four metrics over the responses: mean and standard error of each cell."""
  axes = _axes(2, 2, (11, 7))
  grouped = {cell: by for cell, by in cells(results).items() if cell[0] in drawn.arms}
  order = sorted(grouped, key=lambda cell: drawn.arms.index(cell[0]))
  # The legend names the arm and the factors with more than one level.
  parts = range(len(order[0])) if order else ()
  parts = [i for i in parts if i == 0 or len({cell[i] for cell in order}) > 1]
  for (title, metric), ax in zip(PANELS, axes.flat, strict=True):
    for i, cell in enumerate(order):
      x_N, y_SN = _series(list(grouped[cell].values()), metric)
      if not len(y_SN):
        continue
      mean_N = y_SN.mean(0)
      error_N = y_SN.std(0, ddof=1) / len(y_SN) ** 0.5 if len(y_SN) > 1 else 0
      bold = cell[0] == drawn.arms[0]
      style = {'lw': 2.5 if bold else 1.2, 'ls': '-' if i < COLOURS else '--'}
      (line,) = ax.plot(x_N, mean_N, label=', '.join(cell[j] for j in parts), **style)
      band = {'color': line.get_color(), 'alpha': 0.12, 'lw': 0}
      ax.fill_between(x_N, mean_N - error_N, mean_N + error_N, **band)
    report_plots.dress(ax, title)
    ax.set(xlabel='responses sampled')
    if metric == 'learner/grad_norm' and ax.lines:  # empty axes have no log scale
      ax.set(yscale='log')
  axes.flat[0].legend(fontsize=7)
  return axes.flat[0].figure


def differences(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the first arm minus each other arm: seeds, mean and interval."""
  arm, *others = drawn.arms
  pairs = differences_of(results, arm, others, drawn.outcome)
  ax = _axes(1, 1, (8, 1.2 + 0.4 * len(pairs))).flat[0]
  for row, difference_S in enumerate(pairs.values()):
    ax.plot(difference_S, np.full(len(difference_S), row), 'o', ms=4, alpha=0.4)
    low, high = t_interval(difference_S)
    ax.plot([low, high], [row, row], color='black', lw=1.5)
    ax.plot([difference_S.mean()], [row], 'D', color='black', ms=5)
  ax.axvline(0, color='#777777', lw=0.8)
  ax.set_yticks(range(len(pairs)), [name.removeprefix(f'{arm} ') for name in pairs])
  ax.invert_yaxis()
  report_plots.dress(ax, f'{arm} minus others, seed by seed')
  ax.set(xlabel=f'difference in {OUTCOMES[drawn.outcome][0]}; line: 95 % interval')
  return ax.figure


def levels(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the positive share before the search over the responses, a line per cell."""
  ax = _axes(1, 1, (8, 4)).flat[0]
  for cell, by_seed in cells(results).items():
    if cell[0] in drawn.arms:
      x_N, y_SN = _series(list(by_seed.values()), 'clip/share_start')
      ax.plot(x_N, y_SN.mean(0), label=', '.join(cell[1:]))
  for share in PROMISED:
    ax.axhline(share, color='#777777', lw=0.8, ls=':')
  report_plots.dress(ax, 'Positive share before the search')
  ax.set(xlabel='responses sampled', ylim=(0, 0.6))
  ax.legend(fontsize=7, ncols=2)
  return ax.figure


def plane(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the first arm minus each other arm in every cell of two factors."""
  grouped, (arm, *others) = cells(results), drawn.arms
  rows = list(dict.fromkeys(cell[1] for cell in grouped))
  columns = list(dict.fromkeys(cell[2] for cell in grouped))
  gain_ORC = np.full((len(others), len(rows), len(columns)), np.nan)
  axes = _axes(1, len(others), (1.5 + 4.2 * len(others), 4.5)).flat
  for o, r, c in np.ndindex(gain_ORC.shape):
    plus, minus = ((name, rows[r], columns[c]) for name in (arm, others[o]))
    difference_S = contrast(results, [plus], [minus], drawn.outcome)
    if len(difference_S) < 2:
      continue
    gain_ORC[o, r, c] = difference_S.mean()
    text = f'{difference_S.mean():+.3f}\n{int((difference_S > 0).sum())} of '
    text += f'{len(difference_S)} seeds above 0'
    axes[o].text(c, r, text, ha='center', va='center', fontsize=8)
  # At twice the largest gain no cell is too dark for its numbers to be read.
  largest = 2 * max(0.01, float(np.nanmax(np.abs(gain_ORC), initial=0.0)))
  for ax, other, gain_RC in zip(axes, others, gain_ORC, strict=True):
    image = ax.imshow(gain_RC, cmap='RdBu', vmin=-largest, vmax=largest, aspect='auto')
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    report_plots.dress(ax, f'{arm} less {other}')
    ax.grid(visible=False)
    ax.set(xlabel='updates per rollout batch', ylabel='wrong to right length')
  figure = axes[0].figure
  figure.colorbar(image, ax=list(axes), label=OUTCOMES[drawn.outcome][0])
  return figure


def _series(results: Sequence[Result], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Interpolates every run at common numbers of responses: (responses_N, y_SN).

  Steps of runs of one arm may use different numbers of responses. The common range ends
  where the shortest run ends.
  """
  points = [_points(result, metric) for result in results]
  begin = max((x[0] for x, _ in points if len(x)), default=0.0)
  end = min((x[-1] for x, _ in points if len(x)), default=0.0)
  x_N = np.linspace(begin, end, POINTS)
  y_SN = [np.interp(x_N, x, y) for x, y in points if len(x)]
  return x_N, np.asarray(y_SN).reshape(-1, POINTS)


def _points(result: Result, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (responses, values) of a run where both are finite."""
  if metric != 'evaluations':
    return finite_pairs(result, 'rollout/responses', metric)
  _, y, _, x = np.asarray(result['evaluations'], float).T
  return x, y


def _axes(rows: int, columns: int, size: tuple[float, float]) -> 'np.ndarray':
  """Returns the axes of a new figure, [rows, columns]."""
  return np.atleast_2d(report_plots.new_figure(*size, DPI).subplots(rows, columns))


Draw = Callable[[Mapping[str, Result], Drawn], 'Figure']
DRAWN: dict[str, Draw] = {
  'curves': curves,
  'differences': differences,
  'levels': levels,
  'plane': plane,
}
