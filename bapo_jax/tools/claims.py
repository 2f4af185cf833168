"""From the results of experiments to the numbers of a page, as its protocol has them.

  python -m bapo_jax.tools.claims papers/2510.18927 [--check]

1. `OUTCOMES` computes what is compared from the result of one run;
2. arms are compared seed by seed: `bootstrap_interval` and `sign_flip` of their
   differences, `holm` over a family of comparisons, `smallest_effect` for its power;
3. `page` writes the tables of every experiment between the markers of the README.

A folder of papers/ holds README.md, experiments.py and results/<experiment>/<run>.json.
experiments.py has NAMES, COMPARED (experiment -> (arm, the arms it is compared with))
and `get_experiment`.
"""

import argparse
import importlib.util
import itertools
import math
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from bapo_jax.runtime import files, tables
from bapo_jax.runtime.statistics import mean_and_error
from bapo_jax.tools import sweep_grid

Result = Mapping[str, Any]  # as sweep_grid.outcome makes it
COLLAPSE = 2 / 3  # of the best accuracy of a run
SPIKE = 5.0  # times the median gradient norm of a run
DRAWS, LEVEL, POWER = 10_000, 0.95, 0.8
EMPTY = 'Not run: there are no results yet.'


def area(result: Result) -> float:
  """Mean held-out accuracy over the steps, by trapezoids; 0 after a divergence."""
  step_N, accuracy_N = _evaluations(result)
  return float(np.trapezoid(accuracy_N, step_N) / (step_N[-1] - step_N[0]))


def final(result: Result) -> float:
  """Held-out accuracy of the last evaluation; 0 after a divergence."""
  return float(_evaluations(result)[1][-1])


def collapsed(result: Result) -> float:
  """1 where the last accuracy is a third below the best one of the run, else 0."""
  accuracy_N = _evaluations(result)[1]
  return float(accuracy_N[-1] < COLLAPSE * accuracy_N.max())


def spikes(result: Result) -> float:
  """Share of the steps whose gradient norm is above five times the run's median."""
  norm_S = _finite(result, 'learner/grad_norm')
  return float((norm_S > SPIKE * np.median(norm_S)).mean()) if len(norm_S) else 0.0


def newly_solved(result: Result) -> float:
  """Of the held-out problems failed in every response at first, the share solved last.

  Solved: right in at least one response. nan where none was failed.
  """
  first, *_, last = (np.asarray(right) for right in result['right'].values())
  failed_P = first == 0
  return float((last[failed_P] > 0).mean()) if failed_P.any() else math.nan


def mean_of(metric: str) -> Callable[[Result], float]:
  """The mean of a metric over the steps of a run; nan without any value."""

  def outcome(result: Result) -> float:
    value_S = _finite(result, metric)
    return float(value_S.mean()) if len(value_S) else math.nan

  return outcome


# name -> (heading, what it is of a run)
OUTCOMES: dict[str, tuple[str, Callable[[Result], float]]] = {
  'area': ('accuracy, mean over the run', area),
  'final': ('accuracy at the end', final),
  'newly_solved': ('solved of those failed before', newly_solved),
  'collapsed': ('collapsed', collapsed),
  'entropy': ('entropy', mean_of('loss/entropy')),
  'grad_norm': ('gradient norm', mean_of('learner/grad_norm')),
  'spikes': ('spikes', spikes),
  'share_start': ('share before', mean_of('clip/share_start')),
  'share': ('share after', mean_of('clip/share')),
  'low': ('lower bound', mean_of('clip/low')),
  'high': ('upper bound', mean_of('clip/high')),
}


def _evaluations(result: Result) -> tuple[np.ndarray, np.ndarray]:
  """(step_N, accuracy_N); after a divergence 0, up to the last step it should have."""
  found = [(step, accuracy) for step, accuracy, *_ in result['evaluations']]
  if result['diverged']:
    over = found[-1][0] + 1
    found += [(over, 0.0), (max(over + 1, result['planned']), 0.0)]
  step_N, accuracy_N = np.asarray(found, float).T
  return step_N, accuracy_N


def _finite(result: Result, metric: str) -> np.ndarray:
  values = result['steps'][metric]
  return np.asarray([value for value in values if value is not None], float)


def bootstrap_interval(difference_S: np.ndarray) -> tuple[float, float]:
  """The percentile interval of the mean of differences, one per seed.

  Seeds are drawn again with replacement, from a generator of a fixed seed.
  """
  rng = np.random.default_rng(0)
  n = len(difference_S)
  means = difference_S[rng.integers(n, size=(DRAWS, n))].mean(1)
  low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return float(low), float(high)


def sign_flip(difference_S: np.ndarray) -> float:
  """The exact two-sided p-value of the mean, over all 2^n signs of the differences."""
  sign_FS = np.asarray(list(itertools.product((1, -1), repeat=len(difference_S))))
  mean_F = np.abs(sign_FS @ difference_S)
  return float((mean_F >= mean_F[0] - 1e-12).mean())


def holm(p_values: Sequence[float]) -> list[float]:
  """p-values adjusted for their number (Holm, 1979), each at most 1, in their order."""
  adjusted, largest = [0.0] * len(p_values), 0.0
  for rank, i in enumerate(np.argsort(p_values, kind='stable')):
    largest = max(largest, (len(p_values) - rank) * p_values[i])
    adjusted[i] = min(1.0, largest)
  return adjusted


def smallest_effect(difference_S: np.ndarray) -> float:
  """The mean difference that all seeds would share in sign with a chance of 80 %.

  With eight seeds the adjusted p-value of the smallest of five is below .05 only then.
  Differences are taken as normal, with the spread of these.
  """
  n = len(difference_S)
  return float(difference_S.std(ddof=1)) * NormalDist().inv_cdf(POWER ** (1 / n))


def cells(results: Mapping[str, Result]) -> dict[tuple[str, ...], dict[int, Result]]:
  """(arm, level, ...) -> seed -> result."""
  found: dict[tuple[str, ...], dict[int, Result]] = {}
  for result in results.values():
    key = (result['arm'], *result['levels'].values())
    found.setdefault(key, {})[result['seed']] = result
  return found


def means(results: Mapping[str, Result]) -> str:
  """A table of all outcomes: mean and standard error over seeds."""
  rows = []
  for key, by_seed in cells(results).items():
    row = [', '.join(key), f'{len(by_seed)}']
    for _, outcome in OUTCOMES.values():
      mean, error = mean_and_error([outcome(r) for r in by_seed.values()])
      row.append(_number(mean) if math.isnan(error) else f'{mean:.3f} ± {error:.3f}')
    rows.append(row)
  header = ['arm', 'seeds', *(heading for heading, _ in OUTCOMES.values())]
  return tables.markdown(rows, header, 'l' + 'r' * (len(header) - 1))


def _number(value: float) -> str:
  return '-' if math.isnan(value) else f'{value:.3f}'


def comparisons(
  results: Mapping[str, Result], arm: str, others: Sequence[str], outcome: str
) -> str:
  """A table of one arm minus each other, paired by seed, in every cell of the factors.

  All rows are one family for Holm. A pair without two seeds in common has no row.
  """
  found, rows, differences = cells(results), [], []
  levels = dict.fromkeys(key[1:] for key in found)
  for level, other in itertools.product(levels, others):
    one, two = found.get((arm, *level), {}), found.get((other, *level), {})
    seeds = sorted(set(one) & set(two))
    compute = OUTCOMES[outcome][1]
    difference_S = np.asarray([compute(one[s]) - compute(two[s]) for s in seeds])
    difference_S = difference_S[~np.isnan(difference_S)]
    if len(difference_S) > 1:
      differences.append(difference_S)
      rows.append([' '.join([f'{arm} minus {other}', *level]), f'{len(difference_S)}'])
  adjusted = holm([sign_flip(d) for d in differences])
  for row, d, p in zip(rows, differences, adjusted, strict=True):
    low, high = bootstrap_interval(d)
    row += [f'{d.mean():+.3f}', f'{low:+.3f} to {high:+.3f}', f'{p:.3f}']
    row.append(f'{smallest_effect(d):.3f}')
  header = ['difference', 'seeds', 'mean', '95 % interval', 'p, Holm', 'visible from']
  return tables.markdown(rows, header, 'lrrrrr') if rows else ''


def load(folder: str) -> types.ModuleType:
  """experiments.py of a folder."""
  path = os.path.join(folder, 'experiments.py')
  spec = importlib.util.spec_from_file_location('experiments', path)
  if spec is None or spec.loader is None or not os.path.isfile(path):
    raise ValueError(f'{folder} has no experiments.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def page(folder: str) -> str:
  """README.md of a folder, the tables of its experiments written anew.

  Raises:
    ValueError: the markers of an experiment are not there, or a result is refused.
  """
  path, module = os.path.join(folder, 'README.md'), load(folder)
  with open(path, encoding='utf-8') as file:
    text = file.read()
  for name in module.NAMES:
    where = os.path.join(folder, 'results', name)
    results = sweep_grid.read(module.get_experiment(name), where)
    content = EMPTY
    if results:
      first = next(iter(results.values()))
      made = f'{len(results)} runs at commit `{first["commit"][:12]}`.'
      arm, others, outcome = module.COMPARED[name]
      parts = [made, means(results), comparisons(results, arm, others, outcome)]
      content = '\n\n'.join(part for part in parts if part)
    begin, end = f'<!-- results of {name} -->', f'<!-- end of {name} -->'
    if text.count(begin) != 1 or text.count(end) != 1:
      raise ValueError(f'{path} needs the markers {begin} and {end}, once each')
    block = f'{begin}\n\n{content}\n\n{end}'
    pattern = re.escape(begin) + '.*?' + re.escape(end)
    text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
  return text


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page; with --check the exit status is 1 where it would change."""
  parser = argparse.ArgumentParser(description='The numbers of a page from its results')
  parser.add_argument('folder')
  parser.add_argument('--check', action='store_true')
  flags = parser.parse_args(argv)
  path, text = os.path.join(flags.folder, 'README.md'), page(flags.folder)
  if flags.check:
    with open(path, encoding='utf-8') as file:
      return int(file.read() != text)
  files.write(path, text)
  return 0


if __name__ == '__main__':
  try:
    sys.exit(main())
  except ValueError as error:
    sys.exit(f'bapo_jax: {error}')
