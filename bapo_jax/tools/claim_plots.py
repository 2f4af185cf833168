"""Figures of a page of papers/, from the results of its experiments.

`curves`: outcomes over the responses sampled, a line per cell; `differences`: one arm
less each other, a point per seed; `levels`: the share before the search at every level
of an experiment; `plane`: one arm less others in every cell of two factors. `write`
draws what a folder's SHOWN names.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_jax.run import report_plots
from bapo_jax.tools.claim_shown import Drawn, differences_of, paired
from bapo_jax.tools.claim_statistics import OUTCOMES, Result, bootstrap_interval, cells

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
POINTS = 41  # of a curve
PROMISED = (0.40, 0.33, 0.25)  # shares of the levels of imbalance


def write(
  module: Any, results: Mapping[str, Mapping[str, Result]], folder: str
) -> list[str]:
  """Draws the figures of the experiments that have results; returns their paths."""
  paths = []
  for name, shown in module.SHOWN.items():
    for title, drawn in shown.figures.items() if results[name] else ():
      os.makedirs(os.path.join(folder, 'figures'), exist_ok=True)
      paths.append(os.path.join(folder, 'figures', f'{title}.png'))
      # Without its version in it the file of the same numbers is the same.
      figure = DRAWN[drawn.kind](results[name], drawn)
      figure.savefig(paths[-1], metadata={'Software': None})
  return paths


def curves(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Four panels over responses: mean over seeds, and its standard error, per cell."""
  axes = _axes(2, 2, (11, 7))
  found = {key: by for key, by in cells(results).items() if key[0] in drawn.arms}
  found = dict(sorted(found.items(), key=lambda item: drawn.arms.index(item[0][0])))
  parts = [i for i in range(len(next(iter(found), ()))) if i == 0 or _varies(found, i)]
  for (title, metric), ax in zip(PANELS, axes.flat, strict=True):
    for i, (key, by_seed) in enumerate(found.items()):
      x_N, y_SN = _series(list(by_seed.values()), metric)
      if not len(y_SN):
        continue
      mean_N = y_SN.mean(0)
      error_N = y_SN.std(0, ddof=1) / len(y_SN) ** 0.5 if len(y_SN) > 1 else 0
      bold = key[0] == drawn.arms[0]
      how = {'lw': 2.5 if bold else 1.2, 'ls': '-' if i < COLOURS else '--'}
      (line,) = ax.plot(x_N, mean_N, label=', '.join(key[j] for j in parts), **how)
      ax.fill_between(
        x_N,
        mean_N - error_N,
        mean_N + error_N,
        color=line.get_color(),
        alpha=0.12,
        lw=0,
      )
    report_plots.dress(ax, title)
    ax.set(xlabel='responses sampled')
    if metric == 'learner/grad_norm' and ax.lines:  # an empty axis has no logarithm
      ax.set(yscale='log')
  axes.flat[0].legend(fontsize=7)
  return axes.flat[0].figure


def _varies(found: Mapping[tuple[str, ...], Any], i: int) -> bool:
  """Whether cells differ in this part of their names."""
  return len({key[i] for key in found}) > 1


def differences(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """The first arm less each other in each cell: seeds, their mean and its interval."""
  arm, *others = drawn.arms
  pairs = differences_of(results, arm, others, drawn.outcome)
  ax = _axes(1, 1, (8, 1.2 + 0.4 * len(pairs))).flat[0]
  for row, difference_S in enumerate(pairs.values()):
    ax.plot(difference_S, np.full(len(difference_S), row), 'o', ms=4, alpha=0.4)
    low, high = bootstrap_interval(difference_S)
    ax.plot([low, high], [row, row], color='black', lw=1.5)
    ax.plot([difference_S.mean()], [row], 'D', color='black', ms=5)
  ax.axvline(0, color='#777777', lw=0.8)
  ax.set_yticks(range(len(pairs)), [name.removeprefix(f'{arm} ') for name in pairs])
  ax.invert_yaxis()
  report_plots.dress(ax, f'{arm} minus others, seed by seed')
  ax.set(xlabel=f'difference in {OUTCOMES[drawn.outcome][0]}; line: 95 % interval')
  return ax.figure


def levels(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """The share before the search over responses, a line per cell."""
  ax = _axes(1, 1, (8, 4)).flat[0]
  for key, by_seed in cells(results).items():
    if key[0] in drawn.arms:
      x_N, y_SN = _series(list(by_seed.values()), 'clip/share_start')
      ax.plot(x_N, y_SN.mean(0), label=', '.join(key[1:]))
  for share in PROMISED:
    ax.axhline(share, color='#777777', lw=0.8, ls=':')
  report_plots.dress(ax, 'Positive share before the search')
  ax.set(xlabel='responses sampled', ylim=(0, 0.6))
  ax.legend(fontsize=7, ncols=2)
  return ax.figure


def plane(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """The first arm less each other, a panel each, in each cell of two factors."""
  found, (arm, *others) = cells(results), drawn.arms
  rows = list(dict.fromkeys(key[1] for key in found))
  columns = list(dict.fromkeys(key[2] for key in found))
  gain_ORC = np.full((len(others), len(rows), len(columns)), np.nan)
  axes = _axes(1, len(others), (1.5 + 4.2 * len(others), 4.5)).flat
  for o, r, c in np.ndindex(gain_ORC.shape):
    cell = rows[r], columns[c]
    difference_S = paired(found, (arm, *cell), (others[o], *cell), drawn.outcome)
    if len(difference_S) < 2:
      continue
    gain_ORC[o, r, c] = difference_S.mean()
    text = f'{difference_S.mean():+.3f}\n{int((difference_S > 0).sum())} of '
    text += f'{len(difference_S)} seeds above 0'
    axes[o].text(c, r, text, ha='center', va='center', fontsize=8)
  # Twice the largest: no cell is so dark that its numbers cannot be read.
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


def _series(found: Sequence[Result], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """(responses_N, y_SN): up to where the first run ends, a line through each run.

  Runs of one arm may spend their responses in steps of different cost.
  """
  every = [_points(result, metric) for result in found]
  begin = max((x[0] for x, _ in every if len(x)), default=0.0)
  end = min((x[-1] for x, _ in every if len(x)), default=0.0)
  x_N = np.linspace(begin, end, POINTS)
  y_SN = [np.interp(x_N, x, y) for x, y in every if len(x)]
  return x_N, np.asarray(y_SN).reshape(-1, POINTS)


def _points(result: Result, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """(responses, values) of a run, where they are finite."""
  if metric == 'evaluations':
    _, y, _, x = np.asarray(result['evaluations'], float).T
    return x, y
  values = zip(
    *(result['steps'][name] for name in ('rollout/responses', metric)), strict=True
  )
  x, y = (
    np.asarray([pair for pair in values if None not in pair], float).reshape(-1, 2).T
  )
  return x, y


def _axes(rows: int, columns: int, size: tuple[float, float]) -> 'np.ndarray':
  """The panels of a new figure, [rows, columns]."""
  return np.atleast_2d(report_plots.new_figure(*size, DPI).subplots(rows, columns))


Draw = Callable[[Mapping[str, Result], Drawn], 'Figure']
DRAWN: dict[str, Draw] = {
  'curves': curves,
  'differences': differences,
  'levels': levels,
  'plane': plane,
}
