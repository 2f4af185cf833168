"""Draws figures of workdirs: metrics of several runs, and their recorded tokens.

`read_run` reads metrics, config and a recorded step of a workdir. `overlay` draws the
curves of several runs into the same panels; `ratios` and `lengths` draw their recorded
tokens and responses. notebooks/4_your_run.ipynb shows the figures.
"""

import math
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bapo_jax.run import run_files
from bapo_jax.run.panels import PANELS
from bapo_jax.run.series import ERRORS, Points, series
from bapo_jax.runtime.metrics import Row
from lab.plots import BLUE, GREY, ORANGE, dress, new_figure

COLOURS = (BLUE, ORANGE, '#009E73', '#CC79A7', '#000000')  # one per run, in order
FEW = 20  # a running mean is over 1/20 of the steps; so few values have dots
MARKS: tuple[dict[str, Any], ...] = (  # of kept, clipped and masked tokens, as in CUTS
  {'s': 6, 'alpha': 0.5, 'linewidth': 0},
  {'s': 28, 'marker': 'x'},
  {'s': 28, 'marker': '+'},
)
DPI = 80  # a notebook contains its figures


class RunFiles(NamedTuple):
  """The content of a workdir."""

  label: str
  rows: list[Row]  # of metrics.jsonl
  groups: list[Any]  # of the newest recorded step; [] if no step is recorded
  values: dict[str, Any]  # of config.json, dotted name -> value


def read_run(workdir: str | os.PathLike[str], label: str = '') -> RunFiles:
  """Reads a workdir, finished or in progress; needs no model.

  Args:
    label: for legends; '' for the name of the directory.

  Raises:
    ValueError: the directory has no run.
  """
  run = run_files.read(os.fspath(workdir), label)
  for group in run.groups:
    group['responses'] = [SimpleNamespace(**x) for x in group['responses']]
  groups = [SimpleNamespace(**group) for group in run.groups]
  return RunFiles(run.name, run.rows, groups, run_files.flat(run.values))


def differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
  """Returns knob -> value in each run, or None, for knobs that differ."""
  names = sorted({name for run in runs for name in run.values})
  by_name = {name: [run.values.get(name) for run in runs] for name in names}
  return {n: v for n, v in by_name.items() if any(x != v[0] for x in v)}


def smoothed(points: Points, width: int) -> Points:
  """Returns (middle step, mean) of every full window of `width` (odd) values."""
  step_N, value_N = points
  half = width // 2
  smooth = np.convolve(value_N, np.full(width, 1 / width), 'valid')
  return step_N[half : len(step_N) - half], smooth


def errors(rows: Sequence[Row], name: str) -> np.ndarray:
  """Returns the standard error of each value of a metric of ERRORS; 0 if missing."""
  error = dict(zip(*series(rows, ERRORS[name]), strict=True))
  return np.asarray([error.get(step, 0.0) for step in series(rows, name)[0]])


def overlay(runs: Sequence[RunFiles]) -> Figure:
  """Draws the curves of all runs, a panel per metric and a colour per run.

  A panel has the first two of its metrics that a run recorded, solid and dashed.
  """
  recorded = {name for run in runs for row in run.rows for name in row}
  drawn = [(p, [x for x in p.labels if x in recorded][:2]) for p in PANELS]
  drawn = [(panel, names) for panel, names in drawn if names]
  count = max(1, math.ceil(len(drawn) / 2))
  figure = new_figure(11, 3 * count, DPI)
  axes = figure.subplots(count, 2).flatten()
  for ax, (panel, names) in zip(axes, drawn, strict=False):
    labels = [panel.labels[name] for name in names]
    dress(ax, ': '.join(filter(None, (panel.title, ', dashed: '.join(labels)))))
    for run, colour in zip(runs, COLOURS, strict=False):
      for name, line in zip(names, ('-', '--'), strict=False):
        points = series(run.rows, name)
        style: dict[str, Any] = {'color': colour, 'linestyle': line, 'linewidth': 1.8}
        dots = {'marker': 'o', 'markersize': 4}
        if name in ERRORS:
          ax.errorbar(*points, errors(run.rows, name), capsize=3, **dots, **style)
        elif len(points[0]) > FEW:
          ax.plot(*points, color=colour, linewidth=0.7, alpha=0.45)
          ax.plot(*smoothed(points, len(points[0]) // FEW | 1), **style)
        else:
          ax.plot(*points, **dots, **style)
    ax.set_xlabel('step', fontsize=9)
    ax.set_ylabel(panel.unit, fontsize=9)
    ax.grid(color='0.9', linewidth=0.8)
    if panel.spiky:
      ax.set_yscale('log')
    ax.locator_params(axis='x', integer=True)
  for ax in axes[len(drawn) :]:
    ax.set_axis_off()
  handles = [
    axes[0].plot([], [], color=colour, label=run.label)[0]
    for run, colour in zip(runs, COLOURS, strict=False)
  ]
  figure.legend(handles=handles, loc='outside upper left', ncols=5, frameon=False)
  return figure


def ratios(runs: Sequence[RunFiles]) -> Figure:
  """Draws the recorded tokens of each run: probability when sampled, ratio, bounds.

  Crosses are tokens cut by the bounds of their update, pluses are masked tokens. Grey
  lines are the bounds of all updates.
  """
  figure = new_figure(5.5 * len(runs), 4, DPI)
  labels = 'probability when sampled', 'ratio'
  for ax, run in _panels(figure, runs, labels):
    for name, colour, sign in (('A > 0', BLUE, 1), ('A < 0', ORANGE, -1)):
      mu_N, ratio_N, cut_N = tokens(run.groups, sign)
      for cut, style in enumerate(MARKS):
        ax.scatter(mu_N[cut_N == cut], ratio_N[cut_N == cut], color=colour, **style)
      label = f'{name}: {len(mu_N)} tokens, {(cut_N > 0).sum()} cut'
      ax.scatter([], [], s=20, color=colour, label=label)
    bounds = {bound for group in run.groups for bound in (group.low, group.high)}
    for bound in bounds - {None}:
      ax.axhline(bound, color=GREY, linewidth=0.8, zorder=0)
    ax.set_yscale('log')
    ax.locator_params(axis='y', subs=(1, 2, 5))
    ax.yaxis.set_major_formatter('{x:g}')
    ax.minorticks_off()
  return figure


def tokens(
  groups: Sequence[Any], sign: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (probability_N, ratio_N, cut_N) of tokens that were part of an update.

  cut_N has indices into CUTS.

  Args:
    sign: the sign of the tokens' advantage, 1 or -1.
  """
  # A ratio that is not finite is null.
  rows = [
    row
    for group in groups
    for response in group.responses
    if response.ratio is not None and np.sign(response.advantage) == sign
    for row in zip(
      np.exp(response.sampler_logp), response.ratio, response.cut, strict=True
    )
  ]
  mu_N, ratio_N, cut_N = np.asarray(rows, float).reshape(-1, 3).T
  return mu_N, ratio_N, cut_N


def lengths(runs: Sequence[RunFiles]) -> Figure:
  """Draws length and advantage of the recorded responses, coloured by verdict.

  The area of a dot is proportional to the number of responses at this point.
  """
  figure = new_figure(5.5 * len(runs), 3.2, DPI)
  for ax, run in _panels(figure, runs, ('tokens', 'advantage'), sharex=True):
    responses = [r for group in run.groups for r in group.responses]
    for name, colour, correct in (('right', BLUE, True), ('wrong', ORANGE, False)):
      pairs = [(r.tokens, r.advantage) for r in responses if r.correct == correct]
      points_2N = np.asarray(pairs, float).reshape(-1, 2).T
      area_N = [14 * pairs.count(pair) for pair in pairs]
      label = f'{name}: {len(pairs)} responses'
      ax.scatter(*points_2N, s=area_N, alpha=0.6, color=colour, label=label)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.locator_params(axis='x', integer=True)
  return figure


def _panels(
  figure: Figure,
  runs: Sequence[RunFiles],
  labels: tuple[str, str],
  sharex: bool = False,
) -> Iterator[tuple[Axes, RunFiles]]:
  """Yields (panel, run); the caller draws it before the next one.

  The legend is above the plot, where it hides no point.
  """
  panels = figure.subplots(1, len(runs), squeeze=False, sharex=sharex, sharey=True)[0]
  for ax, run in zip(panels, runs, strict=True):
    dress(ax, run.label)
    yield ax, run
    ax.set_xlabel(labels[0], fontsize=9)
    ax.set_ylabel(labels[1], fontsize=9)
    at = (1, 0.98)
    ax.legend(loc='lower right', bbox_to_anchor=at, fontsize=8, frameon=False)
