"""Figures of any workdirs: runs side by side, and their recorded tokens.

1. `read_run` reads metrics, config and a recorded step of a workdir;
2. `overlay` draws the curves of several runs into the same panels;
3. `ratios` draws the recorded tokens: probability, ratio and bounds;
4. `lengths` draws the recorded responses: length and advantage;
5. `differences` lists the knobs in which runs differ.

notebooks/4_your_run.ipynb shows them.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bapo_jax.run import report_plots, step_record
from bapo_jax.run.report_plots import BLUE, GREY, ORANGE
from bapo_jax.runtime import files, metrics
from bapo_jax.runtime.metrics import Row
from bapo_jax.tools import recorded_groups
from bapo_jax.tools.recorded_groups import RecordedGroup

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, '#009E73', '#CC79A7', '#000000')  # of runs, in their order
# Title, unit, the metrics: solid, then dashed.
PANELS = (
  ('Reward of the fresh responses', 'mean reward', ('rollout/reward',)),
  ('Accuracy on held-out problems', 'accuracy ± standard error', ('eval/accuracy',)),
  (
    'Response length, right (solid) and wrong (dashed)',
    'tokens',
    ('rollout/length_right', 'rollout/length_wrong'),
  ),
  ('Entropy of the policy', 'nats per token', ('loss/entropy',)),
  (
    'Clip bounds, upper (solid) and lower (dashed)',
    'probability ratio',
    ('clip/high', 'clip/low'),
  ),
  ('Tokens clipped', 'share', ('clip/fraction',)),
  ('Largest ratio of a token', 'probability ratio', ('loss/ratio_max',)),
  ('KL from behaviour to current policy', 'nats per token', ('loss/kl',)),
)
LINES = ('-', '--')
DPI = 80  # a notebook holds its figures


class RunFiles(NamedTuple):
  """What the files of a workdir say."""

  label: str
  rows: list[Row]  # of metrics.jsonl
  groups: list[RecordedGroup]  # what one step trained on; [] where none is recorded
  values: dict[str, Any]  # of config.json, dotted name -> value; {} without it


def read_run(
  workdir: str | os.PathLike[str], label: str = '', step: int | None = None
) -> RunFiles:
  """Reads a workdir, also one whose run goes on; needs no model.

  Args:
    label: in legends; '' for the name of the directory.
    step: a recorded one; None for the newest.

  Raises:
    ValueError: there are no metrics, or nothing is recorded of the step.
  """
  workdir = os.fspath(workdir)
  rows = metrics.read(workdir)
  if not rows:
    raise ValueError(f'{workdir} holds no row of metrics: give the workdir of a run')
  step = step_record.newest(workdir) if step is None else step
  path = os.path.join(workdir, 'config.json')
  found = files.read_json(path, 'take it away') if os.path.exists(path) else {}
  return RunFiles(
    label or os.path.basename(os.path.normpath(workdir)),
    rows,
    recorded_groups.trained(workdir, step),
    _flat(found),
  )


def _flat(values: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Dotted name -> value."""
  flat: dict[str, Any] = {}
  for name, value in values.items():
    inner = isinstance(value, dict)
    flat |= _flat(value, f'{prefix}{name}.') if inner else {prefix + name: value}
  return flat


def differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
  """Knob -> its value in each run (None: it has none), where they differ."""
  names = sorted({name for run in runs for name in run.values})
  found = {name: [run.values.get(name) for run in runs] for name in names}
  return {name: v for name, v in found.items() if len({json.dumps(x) for x in v}) > 1}


def overlay(runs: Sequence[RunFiles]) -> 'Figure':
  """The curves of all runs, panel by panel, each run in its colour."""
  figure = report_plots.new_figure(11, 12, DPI)
  axes = figure.subplots(len(PANELS) // 2, 2)
  for ax, (title, unit, names) in zip(axes.flat, PANELS, strict=True):
    report_plots.dress(ax, title)
    for run, colour in zip(runs, COLOURS, strict=False):
      _curves(ax, run, names, colour)
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


def _curves(ax: 'Axes', run: RunFiles, names: Sequence[str], colour: str) -> None:
  """The metrics of one run."""
  for name, line in zip(names, LINES, strict=False):
    step_N, value_N = report_plots.series(run.rows, name)
    if name == 'eval/accuracy':
      report_plots.errors(ax, run.rows, color=colour)
    elif len(step_N):
      report_plots.curve(ax, step_N, value_N, color=colour, linestyle=line)


def ratios(runs: Sequence[RunFiles]) -> 'Figure':
  """The recorded tokens of each run: probability when sampled, ratio, bounds.

  A token that its update cut is a cross. Grey lines: the bounds of the updates.
  """
  figure = report_plots.new_figure(5.5 * len(runs), 4, DPI)
  for ax, run in zip(
    figure.subplots(1, len(runs), squeeze=False, sharey=True)[0], runs, strict=True
  ):
    report_plots.dress(ax, run.label)
    for name, colour, sign in (('A > 0', BLUE, 1), ('A < 0', ORANGE, -1)):
      mu_N, ratio_N, cut_N = tokens(run.groups, sign)
      ax.scatter(
        mu_N[~cut_N], ratio_N[~cut_N], s=6, alpha=0.5, linewidth=0, color=colour
      )
      ax.scatter(mu_N[cut_N], ratio_N[cut_N], s=28, marker='x', color=colour)
      label = f'{name}: {len(mu_N)} tokens, {cut_N.sum()} cut'
      ax.scatter([], [], s=20, color=colour, label=label)
    updates = {group.update for group in run.groups if group.update is not None}
    for update in updates:
      for bound in (update.low, update.high):
        ax.axhline(bound, color=GREY, linewidth=0.8, zorder=0)
    ax.set_xlabel('probability when sampled', fontsize=9)
    ax.set_ylabel('ratio', fontsize=9)
    ax.set_yscale('log')
    ax.yaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_minor_formatter('{x:g}')
    _legend(ax)
  return figure


def tokens(
  groups: Sequence[RecordedGroup], sign: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(probability_N, ratio_N, cut_N) of recorded tokens that an update computed.

  Args:
    sign: of their advantage, 1 or -1.
  """
  found = [
    (np.exp(response.logp_T), response.ratio_T, response.cut_T)
    for group in groups
    for response in group.responses
    if response.logp_T is not None
    and response.ratio_T is not None
    and response.cut_T is not None
    and np.sign(response.advantage) == sign
  ]
  if not found:
    return np.zeros(0), np.zeros(0), np.zeros(0, bool)
  mu_N, ratio_N, cut_N = (np.concatenate(part) for part in zip(*found, strict=True))
  return mu_N, ratio_N, cut_N


def lengths(runs: Sequence[RunFiles]) -> 'Figure':
  """The recorded responses of each run: tokens and advantage, right and wrong ones."""
  figure = report_plots.new_figure(5.5 * len(runs), 3.2, DPI)
  for ax, run in zip(
    figure.subplots(1, len(runs), squeeze=False, sharex=True, sharey=True)[0],
    runs,
    strict=True,
  ):
    report_plots.dress(ax, run.label)
    of_run = [r for group in run.groups for r in group.responses]
    for name, colour, correct in (('right', BLUE, True), ('wrong', ORANGE, False)):
      pairs = [(r.length, r.advantage) for r in of_run if r.correct == correct]
      length_N, adv_N = np.asarray(pairs, float).reshape(-1, 2).T
      label = f'{name}: {len(pairs)} responses'
      ax.scatter(length_N, adv_N, s=14, alpha=0.6, color=colour, label=label)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.set_xlabel('tokens', fontsize=9)
    ax.set_ylabel('advantage', fontsize=9)
    ax.locator_params(axis='x', integer=True)
    _legend(ax)
  return figure


def _legend(ax: 'Axes') -> None:
  """Above the axes, where it hides no point."""
  at = (1, 0.98)
  ax.legend(loc='lower right', bbox_to_anchor=at, fontsize=8, frameon=False)
