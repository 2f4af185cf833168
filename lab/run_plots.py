"""Draws figures of workdirs: metrics of several runs, and their recorded tokens.

`read_run` reads metrics, config and a recorded step of a workdir. `overlay` draws the
curves of several runs into the same panels; `ratios` and `lengths` draw their recorded
tokens and responses. notebooks/4_your_run.ipynb shows the figures.
"""

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import traverse_util

from bapo_jax.run import step_record
from bapo_jax.run.series import ERRORS, FEW, errors, series, smoothed
from bapo_jax.runtime import files, metrics
from bapo_jax.runtime.metrics import Row
from bapo_jax.types import CUTS
from lab.plots import BLUE, GREY, ORANGE, dress, new_figure

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, '#009E73', '#CC79A7', '#000000')  # one per run, in order
LENGTHS = ('rollout/length_right', 'rollout/length_wrong')
BOUNDS = ('clip/high', 'clip/low')
PANELS = (  # (title, unit, metrics: first solid, second dashed)
  ('Reward of the fresh responses', 'mean reward', ('rollout/reward',)),
  ('Accuracy on held-out problems', 'accuracy ± standard error', ('eval/accuracy',)),
  ('Response length, right (solid) and wrong (dashed)', 'tokens', LENGTHS),
  ('Entropy of the policy', 'nats per token', ('loss/entropy',)),
  ('Clip bounds, upper (solid) and lower (dashed)', 'probability ratio', BOUNDS),
  ('Tokens clipped', 'share', ('clip/fraction',)),
  ('Largest ratio of a token', 'probability ratio', ('loss/ratio_max',)),
  ('KL from behaviour to current policy', 'nats per token', ('loss/kl',)),
)
DPI = 80  # a notebook contains its figures


class RunFiles(NamedTuple):
  """The content of a workdir."""

  label: str
  rows: list[Row]  # of metrics.jsonl
  groups: list[Any]  # of one recorded step; [] if no step is recorded
  values: dict[str, Any]  # of config.json, dotted name -> value; {} without the file


def read_run(
  workdir: str | os.PathLike[str], label: str = '', step: int | None = None
) -> RunFiles:
  """Reads a workdir, finished or in progress; needs no model.

  Args:
    label: for legends; '' for the name of the directory.
    step: a recorded step; None for the newest.

  Raises:
    ValueError: the workdir has no metrics, or the step is not recorded.
  """
  workdir = os.fspath(workdir)
  rows = metrics.read(workdir)
  if not rows:
    raise ValueError(f'{workdir} has no rows of metrics; give the workdir of a run')
  step = step_record.newest(workdir) if step is None else step
  groups = [] if step is None else step_record.read(workdir, step)
  for group in groups:
    group['responses'] = [SimpleNamespace(**x) for x in group['responses']]
  path = os.path.join(workdir, 'config.json')
  config = files.read_json(path, 'remove the file') if os.path.exists(path) else {}
  return RunFiles(
    label or os.path.basename(os.path.normpath(workdir)),
    rows,
    [SimpleNamespace(**group) for group in groups],
    traverse_util.flatten_dict(config, sep='.'),
  )


def differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
  """Returns knob -> value in each run, or None, for knobs that differ."""
  names = sorted({name for run in runs for name in run.values})
  by_name = {name: [run.values.get(name) for run in runs] for name in names}
  return {n: v for n, v in by_name.items() if len({json.dumps(x) for x in v}) > 1}


def overlay(runs: Sequence[RunFiles]) -> 'Figure':
  """Draws the curves of all runs, a panel per metric and a colour per run."""
  figure = new_figure(11, 12, DPI)
  axes = figure.subplots(len(PANELS) // 2, 2)
  for ax, (title, unit, names) in zip(axes.flat, PANELS, strict=True):
    dress(ax, title)
    for run, colour in zip(runs, COLOURS, strict=False):
      for name, line in zip(names, ('-', '--'), strict=False):
        points = series(run.rows, name)
        style: dict[str, Any] = {'color': colour, 'linestyle': line, 'linewidth': 1.8}
        if name in ERRORS:
          error_N = errors(run.rows, name)
          ax.errorbar(*points, error_N, marker='o', markersize=4, capsize=3, **style)
        elif len(points[0]) > FEW:
          ax.plot(*points, color=colour, linewidth=0.7, alpha=0.45)
          ax.plot(*smoothed(points, len(points[0]) // FEW | 1), **style)
        elif len(points[0]):
          ax.plot(*points, marker='o', markersize=4, **style)
    ax.set_xlabel('step', fontsize=9)
    ax.set_ylabel(unit, fontsize=9)
    ax.grid(color='0.9', linewidth=0.8)
    ax.locator_params(axis='x', integer=True)
  handles = [
    axes.flat[0].plot([], [], color=colour, label=run.label)[0]
    for run, colour in zip(runs, COLOURS, strict=False)
  ]
  figure.legend(handles=handles, loc='outside upper left', ncols=5, frameon=False)
  return figure


def ratios(runs: Sequence[RunFiles]) -> 'Figure':
  """Draws the recorded tokens of each run: probability when sampled, ratio, bounds.

  Crosses are tokens clipped by their update, pluses are masked tokens. Grey lines are
  the bounds of the updates.
  """
  figure = new_figure(5.5 * len(runs), 4, DPI)
  panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
  for ax, run in zip(panels, runs, strict=True):
    dress(ax, run.label)
    for name, colour, sign in (('A > 0', BLUE, 1), ('A < 0', ORANGE, -1)):
      mu_N, ratio_N, cut_N = tokens(run.groups, sign)
      kept = {'s': 6, 'alpha': 0.5, 'linewidth': 0, 'color': colour}
      ax.scatter(mu_N[cut_N == 0], ratio_N[cut_N == 0], **kept)
      for cut_by, marker in (('clipped', 'x'), ('masked', '+')):
        of_N = cut_N == CUTS.index(cut_by)
        ax.scatter(mu_N[of_N], ratio_N[of_N], s=28, marker=marker, color=colour)
      label = f'{name}: {len(mu_N)} tokens, {(cut_N > 0).sum()} cut'
      ax.scatter([], [], s=20, color=colour, label=label)
    bounds = {bound for group in run.groups for bound in (group.low, group.high)}
    for bound in bounds - {None}:
      ax.axhline(bound, color=GREY, linewidth=0.8, zorder=0)
    _label(ax, 'probability when sampled', 'ratio')
    ax.set_yscale('log')
    ax.yaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_minor_formatter('{x:g}')
  return figure


def tokens(
  groups: Sequence[Any], sign: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (probability_N, ratio_N, cut_N) of tokens that were part of an update.

  cut_N has indices into CUTS.

  Args:
    sign: the sign of the tokens' advantage, 1 or -1.
  """
  responses = [
    (np.exp(response.sampler_logp), response.ratio, response.cut)
    for group in groups
    for response in group.responses
    if response.ratio is not None and np.sign(response.advantage) == sign
  ]
  none = np.zeros(0), np.zeros(0), np.zeros(0, np.uint8)
  columns = zip(none, *responses, strict=True)
  # A ratio that is not finite is null.
  mu_N, ratio_N, cut_N = (np.concatenate(column).astype(float) for column in columns)
  return mu_N, ratio_N, cut_N


def lengths(runs: Sequence[RunFiles]) -> 'Figure':
  """Draws length and advantage of the recorded responses, coloured by verdict."""
  figure = new_figure(5.5 * len(runs), 3.2, DPI)
  panels = figure.subplots(1, len(runs), squeeze=False, sharex=True, sharey=True)[0]
  for ax, run in zip(panels, runs, strict=True):
    dress(ax, run.label)
    responses = [r for group in run.groups for r in group.responses]
    for name, colour, correct in (('right', BLUE, True), ('wrong', ORANGE, False)):
      pairs = [(r.tokens, r.advantage) for r in responses if r.correct == correct]
      length_N, adv_N = np.asarray(pairs, float).reshape(-1, 2).T
      label = f'{name}: {len(pairs)} responses'
      ax.scatter(length_N, adv_N, s=14, alpha=0.6, color=colour, label=label)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    _label(ax, 'tokens', 'advantage')
    ax.locator_params(axis='x', integer=True)
  return figure


def _label(ax: 'Axes', x: str, y: str) -> None:
  """Labels both axes, and puts the legend above the plot, where it hides no point."""
  ax.set_xlabel(x, fontsize=9)
  ax.set_ylabel(y, fontsize=9)
  at = (1, 0.98)
  ax.legend(loc='lower right', bbox_to_anchor=at, fontsize=8, frameon=False)
