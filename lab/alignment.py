"""Measures whether the rules that are closest to the true gradient train best.

  python -m lab.alignment              measures what is not stored
  python -m lab.microscope_page --write      writes the page

The question and its settings are registered in papers/protocol3.md. Per seed: the
alignment of every rule of the microscope's page at one staleness, and training with
each of them at each rate, by the exact accuracy J of the policy after each block.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab import experiments, figures, microscope, plots, sweep
from lab.microscope import Tables
from lab.microscope_rules import FOLDER, LR, RULES, UPDATES, WARM, arm_of, updates
from lab.outcomes import kendall

RESULTS = FOLDER / 'results' / 'alignment'
FIGURE = FOLDER / 'figures' / 'alignment.png'
SEEDS = (10, 11, 12, 13)
RATES = (1e-3, 5e-3)
STALENESS = 16
RESPONSES = 1024  # of the minibatch whose alignment is compared
BLOCKS, BLOCK = 12, 16  # blocks of updates on responses of the weights at their start
Run = dict[str, Any]


def measure(seed: int) -> Run:
  """Returns the alignment of each rule, and rate -> rule -> J after each block."""
  task = microscope.enumerate_task()
  first = microscope.warm_start(task, WARM, seed)
  kept = microscope.train(first, task, UPDATES, lr=LR, seed=seed)
  logp_NT, old_NT = (microscope.table(kept[-1 - k], task) for k in (0, STALENESS))
  slopes_KP = microscope.slopes(kept[-1], task)
  truth_P = microscope.true_gradient(slopes_KP, logp_NT, task)
  of_rules = updates(task, Tables(logp_NT, old_NT), slopes_KP, truth_P, seed)
  run: Run = {'alignment': {x: of_rules[x][1][str(RESPONSES)] for x in RULES}}
  for rate in RATES:
    curves = {}
    for name, rule in RULES.items():
      weights = microscope.train(
        first, task, BLOCKS * BLOCK, rule, rate, seed=seed, block=BLOCK
      )
      tables = (microscope.table(x, task) for x in weights[BLOCK::BLOCK])
      curves[name] = [float(microscope.accuracy(x, task)) for x in tables]
    run[f'{rate:g}'] = curves
    print(f'seed {seed}, rate {rate:g}', flush=True)
  return run


def orders(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
  """Returns what orders the rules -> rule -> its mean over the seeds."""
  by_outcome = {
    'alignment': {x: mean([r['alignment'][x] for r in runs]) for x in RULES}
  }
  for rate in RATES:
    of_rate = [run[f'{rate:g}'] for run in runs]
    where = f'at a rate of {rate:g}'
    by_outcome[f'J over the run {where}'] = {
      x: mean([mean(curves[x]) for curves in of_rate]) for x in RULES
    }
    by_outcome[f'J at the end {where}'] = {
      x: mean([curves[x][-1] for curves in of_rate]) for x in RULES
    }
  return by_outcome


def mean(values: Sequence[float]) -> float:
  """Returns the mean of values that are all finite; 0 for a rule without an update."""
  return float(np.mean(np.nan_to_num(values)))


def taus(runs: Sequence[Run]) -> dict[str, float]:
  """Returns outcome -> Kendall's tau of its order of the rules with alignment's."""
  by_outcome = orders(runs)
  alignment = by_outcome.pop('alignment')
  return {name: kendall(alignment, of_rules) for name, of_rules in by_outcome.items()}


def section(runs: Sequence[Run]) -> str:
  """Returns the part of the microscope's page about training; '' before the last."""
  if len(runs) < len(SEEDS):
    return ''
  correlations = '; '.join(f'{tau:.2f} with {name}' for name, tau in taus(runs).items())
  return '\n\n'.join(
    [
      '## Does the closest rule train best?',
      f"Kendall's tau of the {len(RULES)} rules by the alignment of {RESPONSES} "
      f'responses at a staleness of {STALENESS} is {correlations}. {BLOCKS} blocks of '
      f'{BLOCK} updates with {16 * microscope.GROUP} responses each, sampled by the '
      f'weights at the start of the block; means over {len(runs)} seeds, at '
      f'{experiments.commits(runs)}, registered in [protocol 3](../protocol3.md) '
      'before they were measured ([results](results/alignment.jsonl)). 21 rules are no '
      'sample, so nothing is tested.',
      'Both predictions held: above .5 over the run at the small rate, below .3 at the '
      'end at the large one. Where updates are small, the rules that are closest to '
      'the true gradient, those that cut least, train best; where they are large, '
      'the order is lost. In S1, with many tokens and a large rate, they train worst, '
      'so alignment does not explain [who leads there](README.md#other-rules-in-s1).',
      '![alignment against training](figures/alignment.png)',
    ]
  )


def draw(runs: Sequence[Run]) -> Any:
  """Returns a figure: alignment against J, a panel per outcome, a point per rule."""
  from matplotlib.figure import Figure

  by_outcome = orders(runs)
  alignment = by_outcome.pop('alignment')
  figure = Figure(figsize=(11, 9), layout='constrained')
  axes = figure.subplots(2, 2, sharex=True)
  points = []
  for (name, outcome), ax in zip(by_outcome.items(), axes.T.flat, strict=True):
    points.append({x: (alignment[x], outcome[x]) for x in RULES})
    for rule, at in points[-1].items():
      ax.plot(*at, 'o', color=figures.COLOURS[arm_of(rule)], ms=6)
    ax.margins(x=0.15)
    ax.set_title(f'{name} (tau {taus(runs)[name]:.2f})', fontsize=11)
    ax.set_ylabel('accuracy J')
    ax.spines[['top', 'right']].set_visible(False)
  for ax in axes[-1]:
    ax.set_xlabel(f'alignment of {RESPONSES} responses, k = {STALENESS}')
  figure.draw_without_rendering()  # fixes the axes
  for of_rules, ax in zip(points, axes.T.flat, strict=True):
    label(ax, of_rules)
  return figure


def label(ax: Any, points: Mapping[str, tuple[float, float]]) -> None:
  """Writes a name beside each point, below the names that it would cover."""
  scale = 72 / ax.figure.dpi  # points per pixel
  taken: list[tuple[float, float]] = []
  for name, at in sorted(points.items(), key=lambda item: -item[1][1]):
    x, y = scale * ax.transData.transform(at)
    height = y
    for other_x, other_height in taken:
      if abs(other_x - x) < 45 and other_height - height < 8:
        height = other_height - 8
    taken.append((x, height))
    ax.annotate(
      name, at, xytext=(5, height - y - 2), textcoords='offset points', fontsize=7
    )


def read() -> list[Run]:
  """Returns the stored results, a run per seed."""
  return [*experiments.read_runs(str(RESULTS)).values()]


def main() -> None:
  """Measures the seeds that are not stored, and draws the figure."""
  commit = {'commit': sweep.commit()}
  experiments.measure(str(RESULTS), SEEDS, lambda seed: measure(seed) | commit)
  plots.save(draw(read()), FIGURE, 100)


if __name__ == '__main__':
  main()
