"""Figures of a page of papers/, from the results of its experiments.

`curves`: outcomes over the steps, a line per arm; `levels`: the share before the search
at every level of an experiment; `plane`: one arm less the best of others in every cell
of two factors. `write` draws what a folder's FIGURES names.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_jax.tools.claim_statistics import OUTCOMES, Result, cells
from bapo_jax.training import report_plots

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PANELS = (
  ('Accuracy on held-out problems', 'evaluations'),
  ('Entropy, nats per token', 'loss/entropy'),
  ('Positive share before the search', 'clip/share_start'),
  ('Gradient norm', 'learner/grad_norm'),
)
DPI = 90
COLOURS = 10  # of matplotlib's cycle
SMOOTH = 5  # steps under the running mean of a curve
PROMISED = (0.40, 0.33, 0.25)  # shares of the levels of imbalance


def write(
  module: Any, results: Mapping[str, Mapping[str, Result]], folder: str
) -> list[str]:
  """Draws <folder>/figures/<experiment>.png of each that has results; returns paths."""
  paths = []
  for name, (kind, chosen) in module.FIGURES.items():
    if results[name]:
      os.makedirs(os.path.join(folder, 'figures'), exist_ok=True)
      paths.append(os.path.join(folder, 'figures', f'{name}.png'))
      # Without its version in it the file of the same numbers is the same.
      figure = DRAWN[kind](results[name], chosen)
      figure.savefig(paths[-1], metadata={'Software': None})
  return paths


def curves(results: Mapping[str, Result], chosen: Sequence[str]) -> 'Figure':
  """Four panels over the steps: mean over seeds, and its standard error, per cell."""
  axes = _axes(2, 2, (11, 7))
  found = {key: by for key, by in cells(results).items() if key[0] in chosen}
  found = dict(sorted(found.items(), key=lambda item: chosen.index(item[0][0])))
  for (title, metric), ax in zip(PANELS, axes.flat, strict=True):
    for i, (key, by_seed) in enumerate(found.items()):
      x, y_SN = _series(list(by_seed.values()), metric)
      mean_N = np.nanmean(y_SN, 0)
      error_N = np.nanstd(y_SN, 0, ddof=1) / len(y_SN) ** 0.5 if len(y_SN) > 1 else 0
      bold = key[0] == chosen[0]
      how = {'lw': 2.5 if bold else 1, 'ls': '-' if i < COLOURS else '--'}
      (line,) = ax.plot(x, mean_N, label=', '.join(key), **how)
      ax.fill_between(
        x, mean_N - error_N, mean_N + error_N, color=line.get_color(), alpha=0.12, lw=0
      )
    report_plots.dress(ax, title)
    ax.set(xlabel='step')
    if metric == 'learner/grad_norm' and len(x):  # an empty axis has no logarithm
      ax.set(yscale='log')
  axes.flat[0].legend(fontsize=7)
  return axes.flat[0].figure


def levels(results: Mapping[str, Result], chosen: Sequence[str]) -> 'Figure':
  """The share before the search over the steps, a line per cell."""
  ax = _axes(1, 1, (8, 4)).flat[0]
  for key, by_seed in cells(results).items():
    x, y_SN = _series(list(by_seed.values()), 'clip/share_start')
    ax.plot(x, np.nanmean(y_SN, 0), label=', '.join(key[1:]))
  for share in PROMISED:
    ax.axhline(share, color='#777777', lw=0.8, ls=':')
  report_plots.dress(ax, 'Positive share before the search')
  ax.set(xlabel='step', ylim=(0, 0.6))
  ax.legend(fontsize=7, ncols=2)
  return ax.figure


def plane(results: Mapping[str, Result], chosen: Sequence[str]) -> 'Figure':
  """The first arm less the best of the others, in each cell of two factors."""
  found, (arm, *others) = cells(results), chosen
  compute = OUTCOMES['area'][1]
  rows = list(dict.fromkeys(key[1] for key in found))
  columns = list(dict.fromkeys(key[2] for key in found))
  gain_RC = np.full((len(rows), len(columns)), np.nan)
  ax = _axes(1, 1, (8, 4.5)).flat[0]
  for r, row in enumerate(rows):
    for c, column in enumerate(columns):
      sides = [found.get((name, row, column), {}) for name in (arm, *others)]
      seeds = sorted(set.intersection(*(set(side) for side in sides)))
      if len(seeds) < 2:
        continue
      value_AS = np.asarray([[compute(side[s]) for s in seeds] for side in sides])
      best = 1 + int(value_AS[1:].mean(1).argmax())
      gain_S = value_AS[0] - value_AS[best]
      gain_RC[r, c] = gain_S.mean()
      error = gain_S.std(ddof=1) / len(seeds) ** 0.5
      text = f'{gain_S.mean():+.3f} ± {error:.3f}\nover {others[best - 1]}'
      ax.text(c, r, text, ha='center', va='center', fontsize=8)
  largest = max(0.01, float(np.nanmax(np.abs(gain_RC), initial=0.0)))
  image = ax.imshow(gain_RC, cmap='RdBu', vmin=-largest, vmax=largest, aspect='auto')
  ax.set_xticks(range(len(columns)), columns)
  ax.set_yticks(range(len(rows)), rows)
  report_plots.dress(ax, f'Mean accuracy of {arm} less that of the best fixed bounds')
  ax.set(xlabel='updates per rollout batch', ylabel='wrong to right length')
  ax.figure.colorbar(image, ax=ax)
  return ax.figure


def _series(found: Sequence[Result], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """(x_N, y_SN): the steps that all results have, and the values of each."""
  if metric == 'evaluations':
    every = [dict(e[:2] for e in result['evaluations']) for result in found]
    x = sorted(set.intersection(*(set(e) for e in every)))
    return np.asarray(x), np.asarray([[e[step] for step in x] for e in every])
  rows = [np.asarray(result['steps'][metric], float) for result in found]
  n = min(map(len, rows))
  y_SN = np.asarray([_smooth(row[:n]) for row in rows])
  return np.arange(1, n + 1), y_SN


def _smooth(y_N: np.ndarray) -> np.ndarray:
  """The mean of what is finite around each value."""
  near = [y_N[max(0, i - SMOOTH // 2) : i + SMOOTH // 2 + 1] for i in range(len(y_N))]
  finite = [y[np.isfinite(y)] for y in near]
  return np.asarray([y.mean() if len(y) else np.nan for y in finite])


def _axes(rows: int, columns: int, size: tuple[float, float]) -> 'np.ndarray':
  """The panels of a new figure, [rows, columns]."""
  return np.atleast_2d(report_plots.new_figure(*size, DPI).subplots(rows, columns))


Draw = Callable[[Mapping[str, Result], Sequence[str]], 'Figure']
DRAWN: dict[str, Draw] = {'curves': curves, 'levels': levels, 'plane': plane}
