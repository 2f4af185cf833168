"""Draws the figures of a page of papers/ from the results of its experiments.

The kinds of figures are the keys of DRAWN. An
arm has the same colour in all of them, that of COLOURS, and an unknown arm is grey;
levels of a factor differ in the line style.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from bapo_jax.run.panels import PANELS
from lab import plots
from lab.evidence import Drawn, differences_of, relation
from lab.experiments import Result
from lab.outcomes import (
  FEWEST,
  OUTCOMES,
  Cell,
  by_seed,
  cells,
  finite_pairs,
  sign_flip,
  t_interval,
)
from lab.plots import GREY

if TYPE_CHECKING:
  from matplotlib.figure import Figure

METRICS = (
  'eval/accuracy',
  'loss/entropy',
  'learner/grad_norm',
  'clip/share_start',
  'clip/share',
  'clip/fraction',
)
TITLES = {name: panel.caption(name) for panel in PANELS for name in panel.labels}
TITLES['loss/entropy'] += ', nats per token'
TITLES['learner/grad_norm'] += ': median and quartiles'
DPI = 90
POINTS = 41  # of a curve
PROMISED = (0.40, 0.33, 0.25)  # positive shares of the levels of imbalance
# Arms; black is Balanced PO.
COLOUR_TABLE = """
  balanced #000000
  adapted #00796B
  grpo #D55E00
  clip_higher #E69F00
  start #56B4E9
  low76_high219 #009E73
  low85_high282 #009E73
  low90_high300 #CC79A7
  recipe #0072B2
  yoked #D55E00
  coin #009E73
  low80_high120 #777777
  low80_high200 #CC79A7
  low80_high300 #009E73
  low95_high120 #E69F00
  low90_high120 #E69F00
  low95_high200 #56B4E9
  low87_high156 #6CC26C
  both #0072B2
  grpo_slow #8C564B
  high #8C564B
  low #7F7F7F
  balanced_50 #7F7F7F
  dual_clip #0072B2
  gspo #9467BD
  dcpo #2CA02C
  decoupled #556B2F
  unclipped #17BECF
  opsm #E377C2
  m2po #BCBD22
  icepop #1F77B4
  kpop #8FB7DE
  dppo_tv #8C564B
  dppo_kl #C49C94
  reinforce #6CC26C
  tis #2F4B7C
  cispo #FF7F7F
  sapo #A05195
  vespo #00A087
  aspo #B15928
  fipo #6A8F00
  dapo #8C564B
  dapo_more #C49C94
  replay #7F7F7F
  without_x2 #BCBD22
  without_x3 #17BECF
  grpo_fresh #9467BD
  grpo_epochs #2CA02C
"""
COLOURS = dict(re.findall(r'(\w+) (#\w+)', COLOUR_TABLE))
STYLES = ('-', '--', ':', '-.')


def write(
  module: Any, results: Mapping[str, Mapping[str, Result]], folder: str
) -> None:
  """Draws the figures of all experiments with results as PNG files; see claims.page."""
  for name, shown in module.SHOWN.items():
    for title, drawn in shown.figures.items() if results[name] else ():
      figure = DRAWN[drawn.kind](results[name], drawn)
      plots.save(figure, f'{folder}/figures/{title}.png', DPI)


def curves(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws six metrics over the responses: mean and standard error of each cell.

  A curve that ends before the others, at equal responses, ends in a cross.
  """
  axes = _axes(2, 3, (14, 7))
  for metric, ax in zip(METRICS, axes, strict=True):
    _draw_cells(ax, _ordered(results, drawn), metric, TITLES[metric])
    if metric == 'learner/grad_norm' and ax.lines:  # empty axes have no log scale
      ax.set(yscale='log')
  return _with_legend(axes[0])


def panels(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the accuracy over the responses: a panel per level, a line per arm."""
  by_level: dict[str, dict[Cell, list[Result]]] = {}
  for cell, runs in _ordered(results, drawn).items():
    by_level.setdefault(cell[1], {})[cell] = runs
  axes = _axes(1, len(by_level), (5 * len(by_level), 4))
  for (level, grouped), ax in zip(by_level.items(), axes, strict=True):
    title = f'{TITLES["eval/accuracy"]}, {level}'
    _draw_cells(ax, grouped, 'eval/accuracy', title)
    ax.set(ylim=(0, 1))
  return _with_legend(axes[0])


def _with_legend(ax: Any) -> 'Figure':
  """Adds the legend of one panel beside all panels; returns their figure."""
  handles, labels = ax.get_legend_handles_labels()
  if labels:
    where = 'outside right upper'
    ax.figure.legend(
      handles, labels, loc=where, fontsize=9, frameon=False, handlelength=3
    )
  return ax.figure


def _ordered(results: Mapping[str, Result], drawn: Drawn) -> dict[Cell, list[Result]]:
  """Returns cell -> results by seed of the drawn arms, in the order of these arms."""
  grouped = cells(results).items()
  return {
    cell: [*runs.values()]
    for arm in drawn.arms
    for cell, runs in grouped
    if cell[0] == arm
  }


def _draw_cells(
  ax: Any, grouped: Mapping[Cell, Sequence[Result]], metric: str, title: str
) -> None:
  """Draws a metric of cells over the responses, with its spread over the seeds."""
  plots.dress(ax, title)
  ax.set(xlabel='responses sampled')
  series = {cell: _series(runs, metric) for cell, runs in grouped.items()}
  series = {cell: (x_N, y_SN) for cell, (x_N, y_SN) in series.items() if len(y_SN)}
  # The legend names the arm and the factors with more than one level.
  parts = enumerate(zip(*grouped, strict=True))
  named = [i for i, names in parts if i == 0 or len(set(names)) > 1]
  styles = dict(zip(dict.fromkeys(x[1:] for x in grouped), itertools.cycle(STYLES)))
  last = max((x_N[-1] for x_N, _ in series.values()), default=0.0)
  for cell, (x_N, y_SN) in series.items():
    if metric == 'learner/grad_norm':
      low_N, middle_N, high_N = np.quantile(y_SN, (0.25, 0.5, 0.75), axis=0)
    else:
      middle_N = y_SN.mean(0)
      error_N = stats.sem(y_SN) if len(y_SN) > 1 else 0.0
      low_N = middle_N - error_N
      high_N = middle_N + error_N
    colour = COLOURS.get(cell[0], GREY)
    width = 2.5 if cell[0] == next(iter(grouped))[0] else 1.2
    style = {'color': colour, 'ls': styles[cell[1:]], 'lw': width}
    ax.plot(x_N, middle_N, label=', '.join(cell[i] for i in named), **style)
    ax.fill_between(x_N, low_N, high_N, color=colour, alpha=0.12, lw=0)
    if x_N[-1] < 0.95 * last:
      ax.plot(x_N[-1:], middle_N[-1:], 'x', color=colour)


def differences(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the first arm minus each other arm: seeds, mean, t interval, p and n."""
  arm, *others = drawn.arms
  pairs = differences_of(results, arm, others, drawn.outcome)
  (ax,) = _axes(1, 1, (9, 1.2 + 0.4 * len(pairs)))
  for row, (name, difference_S) in enumerate(pairs.items()):
    other = name.removeprefix(f'{arm} minus ').split(' at ')[0]
    row_S = np.full(len(difference_S), row)
    ax.plot(difference_S, row_S, 'o', ms=4, alpha=0.5, color=COLOURS.get(other, GREY))
    ax.plot(t_interval(difference_S), [row, row], color='black', lw=1.5)
    ax.plot(difference_S.mean(), row, 'D', color='black', ms=5)
    text = f'n = {len(difference_S)}'
    if len(difference_S) >= FEWEST:
      text = f'p {relation(sign_flip(difference_S))}, {text}'
    beside = ax.get_yaxis_transform()
    ax.text(1.02, row, text, transform=beside, va='center', fontsize=8)
  ax.axvline(0, color=GREY, lw=0.8)
  ax.set_yticks(range(len(pairs)), [name.removeprefix(f'{arm} ') for name in pairs])
  ax.invert_yaxis()
  plots.dress(ax, f'{arm} minus others, seed by seed')
  ax.set(xlabel=f'difference in {OUTCOMES[drawn.outcome][0]}; line: 95 % t interval')
  return ax.figure


def slopes(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws an outcome against the level of a factor: seeds joined, the mean bold."""
  levels_of = list(dict.fromkeys(level for _, level in cells(results)))
  (ax,) = _axes(1, 1, (7, 4))
  for arm in drawn.arms:
    colour = COLOURS.get(arm, GREY)
    compared = [(arm, level) for level in levels_of]
    y_SL = [*by_seed(results, compared, drawn.outcome).values()]
    for y_L in y_SL:
      ax.plot(levels_of, y_L, 'o-', color=colour, lw=0.7, ms=3, alpha=0.4)
    if y_SL:
      ax.plot(levels_of, np.mean(y_SL, 0), color=colour, lw=2.5, label=arm)
  plots.dress(ax, f'{OUTCOMES[drawn.outcome][0].capitalize()}, seeds joined')
  return _with_legend(ax)


def levels(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws the positive share before the search over the responses, a line per cell."""
  (ax,) = _axes(1, 1, (8, 4))
  for cell, runs in _ordered(results, drawn).items():
    x_N, y_SN = _series(runs, 'clip/share_start')
    ax.plot(x_N, y_SN.mean(0), label=', '.join(cell[1:]))
  for share in PROMISED:
    ax.axhline(share, color=GREY, lw=0.8, ls=':')
  plots.dress(ax, 'Positive share before the search')
  ax.set(xlabel='responses sampled', ylim=(0, 0.6))
  return _with_legend(ax)


def searches(results: Mapping[str, Result], drawn: Drawn) -> 'Figure':
  """Draws where the search of each arm stopped, and its positive shares: histograms.

  A column per level. The search is the arm's own, also where its choice was not
  applied; updates without evidence are left out. Shares are means over a step.
  """
  by_level: dict[Cell, dict[str, list[Result]]] = {}
  for cell, runs in _ordered(results, drawn).items():
    by_level.setdefault(cell[1:], {})[cell[0]] = runs
  axes = _axes(2, len(by_level), (6 * len(by_level), 6))
  for (levels, arms), top, bottom in zip(
    by_level.items(), axes[: len(by_level)], axes[len(by_level) :], strict=True
  ):
    for arm, runs in arms.items():
      updates = [run['updates'] for run in runs]
      points = [
        x
        for u in updates
        for x, none in zip(u['choice'], u['no_evidence'], strict=True)
        if not none
      ]
      shares = [x for r in runs for x in _points(r, 'clip/share')[1]]
      style: Any = {'histtype': 'step', 'density': True, 'lw': 1.5, 'label': arm}
      style['color'] = COLOURS.get(arm, GREY)
      top.hist(points, bins=np.arange(max(points) + 2) - 0.5, **style)
      bottom.hist(shares, bins=np.linspace(0, 1, 41), **style)
    plots.dress(top, ', '.join(['Where the search stopped', *levels]))
    top.set(xlabel='point on the path; 0: its start', ylabel='share of the updates')
    plots.dress(bottom, ', '.join(['Positive share after the clip', *levels]))
    bottom.set(xlabel='share, mean over a step', ylabel='density over the steps')
  return _with_legend(axes[0])


def _series(results: Sequence[Result], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Interpolates every run at common numbers of responses: (responses_N, y_SN).

  Steps of runs of one arm may use different numbers of responses. The common range ends
  where the shortest run ends.
  """
  points = [(x, y) for x, y in (_points(r, metric) for r in results) if len(x)]
  begin = max((x[0] for x, _ in points), default=0.0)
  end = min((x[-1] for x, _ in points), default=0.0)
  x_N = np.linspace(begin, end, POINTS)
  y_SN = [np.interp(x_N, x, y) for x, y in points]
  return x_N, np.asarray(y_SN).reshape(-1, POINTS)


def _points(result: Result, metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (responses, values) of a run where both are finite."""
  if metric != 'eval/accuracy':
    return finite_pairs(result, 'rollout/responses', metric)
  _, y, _, x = np.asarray(result['evaluations'], float).T
  return x, y


def _axes(rows: int, columns: int, size: tuple[float, float]) -> list[Any]:
  """Returns the axes of a new figure, row by row."""
  return [*plots.new_figure(*size, DPI).subplots(rows, columns, squeeze=False).flat]


Draw = Callable[[Mapping[str, Result], Drawn], 'Figure']
DRAWN: dict[str, Draw] = {
  'curves': curves,
  'differences': differences,
  'levels': levels,
  'panels': panels,
  'searches': searches,
  'slopes': slopes,
}
