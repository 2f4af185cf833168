"""Measures rules under the microscope and writes papers/bench/microscope.md.

  python -m lab.microscope_page              measures what is not stored, writes both
  python -m lab.microscope_page --write      writes the page from stored results

One run per seed: a warm start, then UPDATES real updates; the weights are stored. pi is
the last policy and mu the policy of k updates before. For every rule and k, `measure`
stores how the expected update (microscope_rules.py) relates to the true gradient of the
accuracy J:

- cosine: the angle between the expected update and grad J; 1 is the right direction;
- alignment at n responses: E[g . u] / sqrt(E |g|^2), u = grad J / |grad J|, of the
  update g of one minibatch: the cosine with its noise, since E |g|^2 counts both. It is
  exact, except for rules whose bounds depend on the minibatch: these are sampled at
  each n, beside GRPO on the same minibatches, whose exact moments correct the means.
"""

import functools
import itertools
import operator
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bapo_jax.models import transformer
from bapo_jax.run.comparison import interval
from bapo_jax.runtime import files, markdown
from bapo_jax.types import Tree
from lab import alignment, experiments, figures, microscope, plots, sweep
from lab.microscope import Tables, Task
from lab.microscope_rules import (
  FOLDER,
  GRID,
  LR,
  MINIBATCHES,
  RULES,
  SEARCHES,
  UPDATES,
  WARM,
  arm_of,
  updates,
)

RESULTS = FOLDER / 'results' / 'microscope'
SEEDS = (0, 1, 2, 3)
STALENESS = (0, 1, 4, 16, 64)  # updates between mu and pi
TITLE = '# The microscope: rules against the true gradient'
FEWEST = 2  # seeds of a page: an interval needs two
ROUNDED = 5e-4  # a difference below it is 0 on the page
SMALL = FOLDER.parents[1] / 'docs' / 'microscope.png'
CHOSEN = (
  'GRPO, clip-higher, DCPO, M2PO, IcePop, SAPO, unclipped, balanced .42, balanced .50'
)
CELLS = tuple((k, n) for k in STALENESS if k for n in MINIBATCHES)
FAMILIES = {
  'Bounds': (
    'GRPO, clip-higher, dual clip, GSPO, DCPO, unclipped, balanced .42, balanced .50'
  ),
  'Masks': 'GRPO, OPSM, M2PO, IcePop, KPop, DPPO-TV, DPPO-KL, balanced .42',
  'Objectives': 'GRPO, REINFORCE, TIS, CISPO, SAPO, VESPO, ASPO, FIPO, balanced .42',
}
SHOWN = {
  'cosine of the expected update': ('cosine',),
  'alignment of 16 responses': ('alignment', '16'),
  'alignment of 1024 responses': ('alignment', '1024'),
}
Run = dict[str, Any]  # of a seed: str(staleness) -> figures
Cell = tuple[int, int]  # staleness, responses


def measure(
  seed: int,
  stored: pathlib.Path = RESULTS.with_suffix('.npz'),
  staleness: Sequence[int] = STALENESS,
) -> Run:
  """Returns staleness -> rule -> figures of a seed; `stored` has its weights."""
  task = microscope.enumerate_task()
  weights = policies(task, seed, stored)
  logp_NT = microscope.table(weights[0], task)
  slopes_KP = microscope.slopes(weights[0], task)
  truth_P = microscope.true_gradient(slopes_KP, logp_NT, task)
  run: Run = {'accuracy': float(microscope.accuracy(logp_NT, task))}
  for k in staleness:
    tables = Tables(logp_NT, microscope.table(weights[k], task))
    run[str(k)] = {
      'spread of log r': _spread(tables, task),
      'accuracy of mu': float(microscope.accuracy(tables.logq_NT, task)),
      'rules': {
        name: {'cosine': microscope.cosine(update_P, truth_P), 'alignment': aligned}
        for name, (update_P, aligned) in updates(
          task, tables, slopes_KP, truth_P, seed
        ).items()
      },
    }
    print(f'seed {seed}, {k} updates old', flush=True)
  return run


def policies(task: Task, seed: int, path: pathlib.Path) -> dict[int, Tree]:
  """Returns staleness k -> the weights of k updates before the last.

  Trains the policy and stores these weights if `path` lacks the seed. Training is not
  reproducible on another processor, because 64 updates enlarge rounding errors; the
  figures of stored weights are.
  """
  _, unflatten = ravel_pytree(transformer.init(microscope.SPEC, jax.random.key(0)))
  stored = dict(np.load(path)) if path.exists() else {}
  if str(seed) not in stored:
    first = microscope.warm_start(task, WARM, seed)
    kept = microscope.train(first, task, UPDATES, lr=LR, seed=seed)
    stored[str(seed)] = np.stack([ravel_pytree(kept[-1 - k])[0] for k in STALENESS])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, allow_pickle=False, **stored)
  weights = map(unflatten, jnp.asarray(stored[str(seed)]))
  return dict(zip(STALENESS, weights, strict=True))


def _spread(tables: Tables, task: Task) -> float:
  """Returns the standard deviation of log r over the tokens of mu, nats."""
  share_NT = tables.seen(task)[:, None] * task.mask_NT
  gap_NT = tables.logp_NT - tables.logq_NT
  mean = (share_NT * gap_NT).sum() / share_NT.sum()
  return float(jnp.sqrt((share_NT * (gap_NT - mean) ** 2).sum() / share_NT.sum()))


def values(runs: Sequence[Run], k: int, name: str, *path: str) -> np.ndarray:
  """Returns a figure of a rule at a staleness, of every seed; 0 without an update."""
  figures = [run[str(k)]['rules'][name] for run in runs]
  values = [functools.reduce(operator.getitem, path, figure) for figure in figures]
  return np.nan_to_num(np.asarray(values, float))


def best(runs: Sequence[Run], cells: Sequence[Cell]) -> str:
  """Returns the fixed bounds with the largest mean alignment over seeds and cells."""

  def mean(name: str) -> Any:
    return np.mean([values(runs, k, name, 'alignment', str(n)) for k, n in cells])

  return max(GRID, key=mean)


def contest(
  runs: Sequence[Run], cell: Cell, rule: str, cells: Sequence[Cell], hindsight: bool
) -> tuple[list[str], np.ndarray]:
  """Compares a rule with the best fixed bounds, in the alignment of a cell.

  The bounds are the best of `cells`: in hindsight, which favours them, the best of all
  seeds; else, for every seed, the best of the other seeds.

  Returns:
    The bounds and the gap, rule less bounds, of every seed.

  Raises:
    ValueError: there are no other seeds.
  """
  if len(runs) < FEWEST:
    raise ValueError(f'{len(runs)} complete seeds; measure at least {FEWEST}')
  figure = str(cell[1])
  chosen = []
  gap_S = values(runs, cell[0], rule, 'alignment', figure)
  for i, run in enumerate(runs):
    others = runs if hindsight else [*runs[:i], *runs[i + 1 :]]
    chosen.append(best(others, cells))
    gap_S[i] -= values([run], cell[0], chosen[i], 'alignment', figure)[0]
  return chosen, gap_S


def conclusion(runs: Sequence[Run]) -> str:
  """Returns the sentence that a reader can cite."""
  gaps = {
    (*cell, rule): interval(contest(runs, cell, rule, [cell], hindsight=False)[1])
    for cell in CELLS
    for rule in SEARCHES
  }
  above = [key for key, (mean, half) in gaps.items() if mean - half > ROUNDED]
  below = [key for key, (mean, half) in gaps.items() if mean + half < -ROUNDED]
  most = max(above or gaps, key=lambda key: gaps[key][0])
  k, n, rule = most
  measure = (
    'alignment with the true gradient (the cosine of the update of one minibatch, its '
    f'noise counted; {len(runs)} seeds, 95 % t intervals, fixed bounds chosen on the '
    'other seeds)'
  )
  where = f'a staleness of {k} and {n} responses'
  size = signed(*gaps[most])
  if not above:
    return (
      'Adaptation of the bounds nowhere brings the update closer to the true gradient '
      f'than the best fixed bounds: in none of {len(gaps)} comparisons (1 to 64 '
      'updates of staleness, 16 to 1024 responses, two targets) is its gain in '
      f'{measure} above 0, in {len(below)} it is below; it is largest, '
      f'{size}, at {where} ({rule}).'
    )
  return (
    'Adaptation of the bounds brings the update closer to the true gradient than the '
    f'best fixed bounds in {len(above)} of {len(gaps)} comparisons, most at {where} '
    f'({rule}), by {size} in {measure}; in {len(below)} it is farther away.'
  )


def signed(mean: float, half: float) -> str:
  """Formats a difference and half its interval."""
  return f'{mean:+.3f} ± {half:.3f}'


def rule_table(runs: Sequence[Run], *path: str) -> str:
  """Formats a figure of every rule at every staleness."""
  rows = []
  for name in RULES:
    pairs = (interval(values(runs, k, name, *path)) for k in STALENESS)
    rows.append((name, *(f'{mean:.3f} ± {half:.3f}' for mean, half in pairs)))
  head = ('rule', *(f'k = {k}' for k in STALENESS))
  return markdown.table(rows, head, 'l' + 'r' * len(STALENESS))


def contest_table(runs: Sequence[Run]) -> str:
  """Formats the gaps to the best fixed bounds, chosen in three ways."""
  head = ['k', 'responses', 'best fixed bounds', 'alignment']
  for rule in SEARCHES:
    target = rule.removeprefix('balanced ')
    head += [f'{target}: this cell', 'other seeds', 'one pair']
  rows = []
  for cell in CELLS:
    k, n = cell
    bounds = best(runs, [cell])
    mean = values(runs, k, bounds, 'alignment', str(n)).mean()
    row = [str(k), str(n), bounds, f'{mean:.3f}']
    for rule in SEARCHES:
      for cells, hindsight in (([cell], True), ([cell], False), (CELLS, False)):
        row.append(signed(*interval(contest(runs, cell, rule, cells, hindsight)[1])))
    rows.append(row)
  return markdown.table(rows, head, 'rrlr' + 'r' * 3 * len(SEARCHES))


def page(runs: Sequence[Run]) -> str:
  """Returns the page: the conclusion, the figure, the tables, and what trains best."""
  spread = ', '.join(
    f'{np.mean([r[str(k)]["spread of log r"] for r in runs]):.3f}' for k in STALENESS
  )
  accuracy, half = interval(np.asarray([run['accuracy'] for run in runs]))
  one_pair = best(runs, CELLS)
  return '\n\n'.join(
    [
      TITLE,
      f'**Conclusion:** {conclusion(runs)}',
      '![cosine and alignment against staleness](figures/microscope.png)',
      f'Written by `python -m lab.microscope_page`, which measures what is missing; '
      f'{len(runs)} of {len(SEEDS)} seeds, at {experiments.commits(runs)}; means with '
      '95 % t intervals over the seeds. Raw [results](results/microscope.jsonl) and '
      '[weights](results/microscope.npz). A seed takes two to four minutes of a core. '
      f'The policy has {transformer.count(microscope.SPEC):,} parameters and an '
      f'accuracy J of {accuracy:.3f} ± {half:.3f}, and every one of '
      f'its {microscope.SYMBOLS**microscope.POSITIONS:,} responses to each of '
      f'{microscope.PROMPTS} prompts is enumerated: the gradient of J is exact, and so '
      'is the expected update of every rule.',
      '- **k**: updates between the policy that sampled and the policy that learns. '
      f'The standard deviation of log r is {spread} at k = '
      f'{", ".join(map(str, STALENESS))}.\n'
      '- **cosine**: between the expected update and the true gradient: the bias of a '
      'rule, without noise.\n'
      '- **alignment** of n responses: the cosine of the update of one minibatch, its '
      'noise counted: E[g . u] / sqrt(E |g|^2), u the direction of the true gradient.\n'
      '- The update of GRPO on fresh data does not point along grad J, because its '
      'advantage is divided by the standard deviation of the group.\n'
      '- All is exact except the updates of rules that read the whole minibatch '
      '(the searches and M2PO), which are sampled: means over '
      f'{MINIBATCHES[1024]} minibatches of 1024 responses to {MINIBATCHES[16]} of 16.\n'
      '- The bounds of GSPO, .9997 and 1.0004, are made for long responses; a ratio of '
      'four tokens leaves them after one update.',
      '## Cosine of the expected update and the true gradient',
      rule_table(runs, 'cosine'),
      '## Alignment of 16 responses',
      rule_table(runs, 'alignment', '16'),
      '## Alignment of 1024 responses',
      rule_table(runs, 'alignment', '1024'),
      '## Searched bounds against fixed bounds',
      f'Alignment of the search (targets {" and ".join(SEARCHES)}) less that of the '
      f'best of {len(GRID)} pairs of fixed bounds. Best in three ways: in *this cell*, '
      'in hindsight; in this cell on the *other seeds*; and *one pair* for all cells, '
      f'on the other seeds (on all seeds {one_pair}). At k = 0 all ratios are 1 and no '
      'bound cuts.',
      contest_table(runs),
      alignment.section(alignment.read()),
    ]
  ).rstrip()


def draw(
  runs: Sequence[Run],
  shown: Mapping[str, Sequence[str]] = SHOWN,
  families: Mapping[str, str] = FAMILIES,
) -> Any:
  """Returns a figure: a column per family of rules, a row per quantity."""
  from matplotlib.figure import Figure

  size = 4.4 * len(families), 3.2 * len(shown) + 1.4
  figure = Figure(figsize=size, layout='constrained')
  axes = figure.subplots(
    len(shown), len(families), sharex=True, sharey='row', squeeze=False
  )
  x = np.arange(len(STALENESS))
  panels = itertools.product(shown.values(), families.values())
  for (path, family), ax in zip(panels, axes.flat, strict=True):
    names = family.split(', ')
    for i, name in enumerate(names):
      pairs = [interval(values(runs, k, name, *path)) for k in STALENESS]
      moved = x + 0.04 * (i - len(names) / 2)  # so that intervals do not overlap
      # The colour of SAPO is close to that of GSPO.
      line = '--' if name in ('balanced .50', 'GSPO') else '-'
      style = {'color': figures.COLOURS[arm_of(name)], 'ls': line}
      width = 2.5 if name in ('GRPO', *SEARCHES) else 1.3
      mean, half = np.transpose(pairs)
      ax.errorbar(moved, mean, half, label=name, lw=width, elinewidth=1, **style)
    ax.axhline(0, color='#777777', lw=0.6)
    ax.set_xticks(x, [str(k) for k in STALENESS])
    ax.spines[['top', 'right']].set_visible(False)
  for family, first, last in zip(families, axes[0], axes[-1], strict=True):
    first.set_title(family, fontsize=12)
    last.set_xlabel('updates since the data were sampled')
    below = {'loc': 'upper center', 'bbox_to_anchor': (0.5, -0.18)}
    last.legend(fontsize=9, ncols=3, frameon=False, **below)
  for title, ax in zip(shown, axes[:, 0], strict=True):
    ax.set_ylabel(title)
    if 'cosine' in title:  # an interval may pass 1
      ax.set_ylim(top=1.02)
  return figure


def main(*flags: str) -> None:
  """Measures if asked to, then writes page and figures of the stored seeds."""
  if '--write' not in flags:
    commit = {'commit': sweep.commit()}
    experiments.measure(str(RESULTS), SEEDS, lambda seed: commit | measure(seed))
  runs = read()
  files.write(FOLDER / 'microscope.md', page(runs) + '\n')
  plots.save(draw(runs), FOLDER / 'figures' / 'microscope.png', 100)
  shown = {'cosine with the true gradient': ('cosine',)}
  small = draw(runs, shown, {'Expected update of a rule': CHOSEN})
  plots.save(small, SMALL, 100)


def read() -> list[Run]:
  """Returns the stored results, a run per seed."""
  return [*experiments.read_runs(str(RESULTS)).values()]


if __name__ == '__main__':
  main(*sys.argv[1:])
