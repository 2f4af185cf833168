"""One page about a run: what happened, in words, curves, tables and samples.

1. `write` reads metrics.jsonl and draws curves.png and phases.png;
2. it writes report.md for people and, last, report.json for programs: where that one
   exists, the report is whole.
"""

import itertools
import json
import math
import pathlib
import re
from typing import NamedTuple

import numpy as np

from bapo_jax import metrics

BLUE, ORANGE, GREEN, GREY = '#0072B2', '#D55E00', '#009E73', '#777777'  # Okabe and Ito


class Panel(NamedTuple):
  title: str
  unit: str  # of the vertical axis
  curves: tuple  # (metric, label, colour), ...


PANELS = (
  Panel(
    'Reward of the sampled responses',
    'mean reward',
    (('sample/reward', 'reward', BLUE),),
  ),
  Panel(
    'Accuracy on held-out problems',
    'accuracy ± standard error',
    (('eval/accuracy', 'accuracy', BLUE),),
  ),
  Panel(
    'Entropy of the policy', 'nats per token', (('loss/entropy', 'entropy', BLUE),)
  ),
  Panel(
    'Positive share of the gradient',
    'share',
    (
      ('clip/share_start', 'at the start bounds', ORANGE),
      ('clip/share', 'at the bounds used', BLUE),
    ),
  ),
  Panel(
    'Clip bounds',
    'probability ratio',
    (('clip/high', 'upper', BLUE), ('clip/low', 'lower', ORANGE)),
  ),
  Panel(
    'Tokens clipped',
    'share of tokens',
    (
      ('clip/fraction_positive', 'A > 0', BLUE),
      ('clip/fraction_negative', 'A < 0', ORANGE),
      ('clip/fraction', 'all', GREY),
    ),
  ),
  Panel('Gradient norm', 'norm', (('learner/grad_norm', 'gradient norm', BLUE),)),
  Panel(
    'Response length',
    'tokens',
    (
      ('sample/length_right', 'right', BLUE),
      ('sample/length_wrong', 'wrong', ORANGE),
      ('sample/length', 'all', GREY),
    ),
  ),
)

MAIN = (
  'sample/reward',
  'sample/accuracy',
  'sample/length',
  'sample/length_right',
  'sample/length_wrong',
  'sample/truncated',
  'sample/tokens_per_s',
  'sample/mismatch',
  'batch/kept',
  'batch/learnable',
  'batch/age',
  'clip/share_start',
  'clip/share',
  'clip/low',
  'clip/high',
  'clip/moved',
  'clip/met',
  'clip/fraction',
  'loss/entropy',
  'loss/kl',
  'learner/grad_norm',
  'time/step',
)


# 1. numbers


def series(rows, name):
  """(steps, values) of the rows in which the metric is there and finite."""
  pairs = [(r['step'], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]
  step_N, value_N = np.asarray(pairs, float).reshape(-1, 2).T
  return step_N, value_N


def mean(rows, name) -> float:
  """Mean over the rows that have the metric; nan where none has."""
  _, value_N = series(rows, name)
  return float(value_N.mean()) if len(value_N) else math.nan


def fifths(rows):
  """The first and the last fifth of the training steps, one step at least."""
  rows = [r for r in rows if any(name.startswith('sample/') for name in r)]
  n = max(1, len(rows) // 5)
  return rows[:n], rows[-n:]


def running_mean(value_N, width: int):
  """Mean over a centred window of `width` (odd), which narrows at both ends."""
  sum_N = np.concatenate([[0.0], np.cumsum(value_N)])
  i = np.arange(len(value_N))
  half = np.minimum(width // 2, np.minimum(i, len(value_N) - 1 - i))
  return (sum_N[i + half + 1] - sum_N[i - half]) / (2 * half + 1)


def length_ratio(rows) -> float:
  """Mean wrong length over mean right length; nan where either is missing."""
  right = mean(rows, 'sample/length_right')
  return mean(rows, 'sample/length_wrong') / right if right else math.nan


def with_rest(phases, wall_s: float) -> dict[str, float]:
  """The phases, longest first, and under 'other' what they leave of the wall time."""
  rest = max(0.0, wall_s - sum(phases.values()))
  named = {k: float(v) for k, v in phases.items() if k != 'other'}
  named = dict(sorted(named.items(), key=lambda item: -item[1]))
  return {**named, 'other': float(phases.get('other', 0.0)) + rest}


def plain(tree):
  """Plain Python values; a number that is not finite becomes None, JSON's null."""
  if isinstance(tree, dict):
    return {k: plain(v) for k, v in tree.items()}
  if hasattr(tree, 'item'):  # a NumPy or JAX scalar
    tree = tree.item()
  return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# 2. figures


def _figure(width: float, height: float):
  from matplotlib import figure  # takes a second: only who wants a report pays
  from matplotlib.backends import backend_agg

  fig = figure.Figure(figsize=(width, height), dpi=150, layout='constrained')
  backend_agg.FigureCanvasAgg(fig)
  return fig


def _bare(ax):
  ax.spines[['top', 'right']].set_visible(False)
  ax.tick_params(labelsize=9)


def _curve(ax, step_N, value_N, label, colour):
  """The raw series thin and pale, its running mean strong; dots where points are few."""
  width = len(value_N) // 20 | 1
  few = dict(marker='o', markersize=4) if len(value_N) <= 20 else {}
  if width > 1:
    ax.plot(step_N, value_N, color=colour, linewidth=0.7, alpha=0.35)
  ax.plot(
    step_N,
    running_mean(value_N, width),
    color=colour,
    linewidth=1.8,
    label=label,
    **few,
  )


def _errors(ax, rows, colour):
  """Evaluation: few points, each with its standard error where it has one."""
  rows = [r for r in rows if math.isfinite(r.get('eval/accuracy', math.nan))]
  step_N, value_N = series(rows, 'eval/accuracy')
  error_N = np.asarray([r.get('eval/stderr', math.nan) for r in rows])
  error_N = np.where(np.isfinite(error_N), error_N, 0.0)
  ax.errorbar(
    step_N,
    value_N,
    error_N,
    color=colour,
    linewidth=1.5,
    marker='o',
    markersize=4,
    capsize=3,
  )


def _panel(ax, panel: Panel, rows, target):
  ax.set_title(panel.title, loc='left', fontsize=11, fontweight='bold')
  drawn = False
  for name, label, colour in panel.curves:
    step_N, value_N = series(rows, name)
    if len(value_N) == 0:
      continue
    drawn = True
    if name == 'eval/accuracy':
      _errors(ax, rows, colour)
    else:
      _curve(ax, step_N, value_N, label, colour)
    if name == 'learner/grad_norm' and value_N.min() > 0:
      # one spike of 100 would flatten the rest of a linear axis
      ax.set_yscale('log' if value_N.max() > 30 * np.median(value_N) else 'linear')
  _bare(ax)
  if not drawn:
    ax.text(0.5, 0.5, 'not recorded', color=GREY, ha='center', transform=ax.transAxes)
    ax.set(xticks=[], yticks=[])
    return
  if target is not None and panel.title.startswith('Positive share'):
    ax.axhline(target, color='black', linewidth=1, linestyle='--', label='target')
  ax.set_xlabel('step', fontsize=9)
  ax.set_ylabel(panel.unit, fontsize=9)
  ax.grid(color='0.9', linewidth=0.8)
  ax.set_axisbelow(True)
  ax.xaxis.get_major_locator().set_params(integer=True)
  n = len(ax.get_legend_handles_labels()[0])
  if n > 1:  # above the axes, where it can hide no curve
    ax.legend(
      loc='lower right',
      bbox_to_anchor=(1.0, 0.99),
      ncols=n,
      fontsize=8,
      frameon=False,
      handlelength=1.2,
      columnspacing=1.0,
      borderaxespad=0.2,
    )


def draw_curves(path, rows, target=None):
  fig = _figure(11, 13)
  steps = [r['step'] for r in rows] or [0]
  for ax, panel in zip(fig.subplots(4, 2).flat, PANELS, strict=True):
    _panel(ax, panel, rows, target)
    if ax.get_xlabel() and max(steps) > min(steps):  # all panels over the same steps
      margin = 0.03 * (max(steps) - min(steps))
      ax.set_xlim(min(steps) - margin, max(steps) + margin)
  fig.savefig(path)


def draw_phases(path, phases, wall_s: float):
  """Horizontal bars of the wall time; `phases` as `with_rest` gives them."""
  fig = _figure(8, 1.0 + 0.35 * len(phases))
  ax = fig.subplots()
  percent = [100 * s / wall_s if wall_s > 0 else 0.0 for s in phases.values()]
  colours = [GREY if name == 'other' else BLUE for name in phases]
  bars = ax.barh(list(phases), percent, color=colours, height=0.7)
  text = [
    f'{p:.1f} %  ({duration(s)})'
    for p, s in zip(percent, phases.values(), strict=True)
  ]
  ax.bar_label(bars, text, padding=4, fontsize=9)
  ax.set_title('Wall time by phase', loc='left', fontsize=11, fontweight='bold')
  ax.set_xlabel('percent of the wall time', fontsize=9)
  ax.set_xlim(0, max(1.0, *percent) * 1.3)  # room for the labels
  ax.invert_yaxis()
  _bare(ax)
  fig.savefig(path)
