"""Computes outcomes of runs, and the statistics of their paired differences.

  python -m lab.outcomes

`OUTCOMES` computes scalar outcomes from the result of one run. After a divergence, the
accuracy is 0 up to the planned end. `contrast` pairs runs with equal seeds. The command
writes papers/results.csv, a row per run with the outcomes in LISTED.
"""

import csv
import functools
import io
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from bapo_jax.run.comparison import interval
from bapo_jax.runtime import files
from lab import experiments
from lab.experiments import Result

PAPERS = pathlib.Path(__file__).parents[1] / 'papers'
Cell = tuple[str, ...]  # (arm, level, ...)
COLLAPSE = 2 / 3  # share of the best accuracy of a run
SPIKE = 5.0  # multiple of the median gradient norm of a run
DIGITS = 12  # smaller differences of outcomes are rounding
FEWEST = 6  # seeds of a test; with five seeds the smallest two-sided p is 1/16
# Outcomes in papers/results.csv.
LISTED = """
  before final area newly_solved newly_failed accuracy_of_failed collapsed entropy
  grad_norm share clipped steps updates responses seconds
"""


def area(result: Result) -> float:
  """Returns the mean held-out accuracy over the steps, by the trapezoidal rule."""
  step_N, accuracy_N = _evaluations(result)
  return float(np.trapezoid(accuracy_N, step_N) / (step_N[-1] - step_N[0]))


def collapsed(result: Result) -> float:
  """Returns 1 if the last accuracy is below COLLAPSE times the best, else 0."""
  accuracy_N = _evaluations(result)[1]
  return float(accuracy_N[-1] < COLLAPSE * accuracy_N.max())


def spikes(result: Result) -> float:
  """Returns the share of steps with a gradient norm above SPIKE times the median."""
  norm_S = _finite(result, 'learner/grad_norm')
  return float((norm_S > SPIKE * np.median(norm_S)).mean()) if len(norm_S) else 0.0


def newly_solved(result: Result) -> float:
  """Returns the share solved at the end among the problems failed at the start.

  A problem is solved if at least one response is right, and failed otherwise. The
  share is nan if no problem was failed at the start.
  """
  start_P, end_P = _right(result)
  return _mean(end_P[start_P == 0] > 0)


def newly_failed(result: Result) -> float:
  """Returns the share failed at the end among the problems solved at the start."""
  start_P, end_P = _right(result)
  return _mean(end_P[start_P > 0] == 0)


def accuracy_of_failed(result: Result) -> float:
  """Returns the accuracy at the end on the problems failed at the start.

  Unlike `newly_solved`, this does not grow with the number of responses.
  """
  start_P, end_P = _right(result)
  return _mean(end_P[start_P == 0] / result['group_size'])


def solved_by_chance(result: Result) -> float:
  """Returns what `newly_solved` would be for weights that do not change.

  Divides the responses of the first evaluation into halves: of the problems failed in
  one half, the share solved in the other, expected over all divisions. nan if no
  half of the responses to a problem can be all wrong.
  """
  right_P, size = _right(result)[0], result['group_size']
  half = size // 2
  none_P = stats.hypergeom.pmf(0, size, right_P, half)
  failed = none_P.sum()
  return float(none_P[right_P > 0].sum() / failed) if failed else math.nan


def mean_of(result: Result, metric: str) -> float:
  """Returns the mean of a metric over the steps; nan without values."""
  return _mean(_finite(result, metric))


def mean_with_target(result: Result, metric: str) -> float:
  """Returns the mean of a metric of the bound search, or nan for other rules."""
  return mean_of(result, metric) if mean_of(result, 'clip/moved') > 0 else math.nan


def stopped_between(result: Result) -> float:
  """Returns the share of updates whose search stopped between its ends, or nan.

  Such an update moved a bound and met the target. An update without a token that counts
  did neither; every other one did at least one of the two. Older results do not
  have the share without evidence: there it is 0.
  """
  metrics = ('clip/moved', 'clip/target_met', 'clip/no_evidence')
  total = sum(mean_with_target(result, x) for x in metrics if x in result['steps'])
  return total if math.isnan(total) else max(0.0, total - 1)


def last_of(result: Result, metric: str) -> float:
  """Returns the last value of a metric; nan without values."""
  return float([math.nan, *_finite(result, metric)][-1])


def bound_where_moved(result: Result, metric: str) -> float:
  """Returns the mean bound over the updates whose search moved the bounds, or nan.

  Fits the mean bound of a step as a linear function of the share of updates that moved,
  and returns the value at share 1.
  """
  moved_S, bound_S = finite_pairs(result, 'clip/moved', metric)
  if len(set(moved_S.tolist())) < 2:
    return math.nan
  return float(np.polyval(np.polyfit(moved_S, bound_S, 1), 1))


def _evaluations(result: Result) -> tuple[np.ndarray, np.ndarray]:
  """Returns (step_N, accuracy_N), with zeros appended after a divergence."""
  step_N, accuracy_N = np.asarray(result['evaluations'], float)[:, :2].T
  if result['diverged']:
    over = step_N[-1] + 1
    step_N = np.append(step_N, [over, max(over + 1, result['planned'])])
    accuracy_N = np.append(accuracy_N, [0.0, 0.0])
  return step_N, accuracy_N


def _right(result: Result) -> tuple[np.ndarray, np.ndarray]:
  """Returns right responses per held-out problem at the start and at the end."""
  right = [np.asarray(counts) for counts in result['right'].values()]
  return right[0], np.zeros_like(right[0]) if result['diverged'] else right[-1]


def _mean(value_N: np.ndarray) -> float:
  return float(value_N.mean()) if len(value_N) else math.nan


def _finite(result: Result, metric: str) -> np.ndarray:
  return finite_pairs(result, metric, metric)[0]


def finite_pairs(result: Result, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values of two metrics at the steps where both are finite."""
  pairs = zip(result['steps'][x], result['steps'][y], strict=True)
  finite = [pair for pair in pairs if None not in pair]
  x_S, y_S = np.asarray(finite, float).reshape(-1, 2).T
  return x_S, y_S


Outcome = Callable[[Result], float]
# name -> (heading, function)
OUTCOMES: dict[str, tuple[str, Outcome]] = {
  'before': ('accuracy before', lambda result: result['evaluations'][0][1]),
  'area': ('accuracy, mean over the run', area),
  'final': ('accuracy at the end', lambda result: float(_evaluations(result)[1][-1])),
  'newly_solved': ('solved of those failed before', newly_solved),
  'by_chance': ('solved by chance of those failed', solved_by_chance),
  'newly_failed': ('failed of those solved before', newly_failed),
  'accuracy_of_failed': ('accuracy on those failed before', accuracy_of_failed),
  'collapsed': ('collapsed', collapsed),
  'spikes': ('spikes', spikes),
  'between': ('stopped between', stopped_between),
  'steps': ('steps', lambda result: float(len(result['steps']['learner/updates']))),
  'seconds': ('seconds', lambda result: result['seconds']),
}
_OF_METRICS = {  # name -> (heading, function, metric)
  'entropy': ('entropy', mean_of, 'loss/entropy'),
  'grad_norm': ('gradient norm', mean_of, 'learner/grad_norm'),
  'share_start': ('share before', mean_of, 'clip/share_start'),
  'share': ('share after', mean_of, 'clip/share'),
  'target_met': ('target met', mean_with_target, 'clip/target_met'),
  'moved': ('moved', mean_with_target, 'clip/moved'),
  'clipped': ('tokens cut', mean_of, 'clip/fraction'),
  'low': ('lower bound', mean_of, 'clip/low'),
  'high': ('upper bound', mean_of, 'clip/high'),
  'low_moved': ('lower, where moved', bound_where_moved, 'clip/low'),
  'high_moved': ('upper, where moved', bound_where_moved, 'clip/high'),
  'learnable': ('learnable', mean_of, 'batch/learnable'),
  'filled': ('seats filled', mean_of, 'batch/filled'),
  'reevaluated': ('re-evaluated', mean_of, 'batch/reevaluated'),
  'reused': ('reused', mean_of, 'batch/reused'),
  'agree': ('agreement of routes', mean_of, 'moe/agree'),
  'agree_first': ('agreement, first update', mean_of, 'moe/agree_first'),
  'load': ('load', mean_of, 'moe/load'),
  'mismatch': ('mismatch, nats', mean_of, 'rollout/logp_diff'),
  'responses': ('responses', last_of, 'rollout/responses'),
  'updates': ('updates', last_of, 'learner/updates'),
}
OUTCOMES |= {
  name: (heading, functools.partial(compute, metric=metric))
  for name, (heading, compute, metric) in _OF_METRICS.items()
}


def cells(results: Mapping[str, Result]) -> dict[Cell, dict[int, Result]]:
  """Groups results by cell and seed."""
  grouped: dict[Cell, dict[int, Result]] = {}
  for result in results.values():
    cell = (result['arm'], *result['levels'].values())
    grouped.setdefault(cell, {})[result['seed']] = result
  return grouped


def contrast(
  results: Mapping[str, Result],
  plus: Sequence[Cell],
  minus: Sequence[Cell],
  outcome: str,
  seeds: Sequence[int] = (),
) -> np.ndarray:
  """Sums an outcome over the cells `plus` minus the cells `minus`, by seed.

  Args:
    seeds: seeds that every cell must have; () for the seeds that all cells share.

  Returns:
    f64 [S] without nan outcomes; empty if a cell lacks one of `seeds`.
  """
  of_seeds = by_seed(results, (*plus, *minus), outcome)
  if set(seeds) - set(of_seeds):
    return np.zeros(0)
  signs = [1] * len(plus) + [-1] * len(minus)
  values = [of_seeds[seed] for seed in seeds or of_seeds]
  total_S = np.reshape(values, (-1, len(signs))) @ signs
  return total_S[~np.isnan(total_S)]


def by_seed(
  results: Mapping[str, Result], compared: Sequence[Cell], outcome: str
) -> dict[int, list[float]]:
  """Returns seed -> outcome of each cell, for the seeds that all cells share."""
  grouped = cells(results)
  of_cells = [grouped.get(cell, {}) for cell in compared]
  shared = set.intersection(*map(set, of_cells))
  compute = OUTCOMES[outcome][1]
  return {seed: [compute(x[seed]) for x in of_cells] for seed in sorted(shared)}


def t_interval(difference_S: np.ndarray, level: float = 0.95) -> tuple[float, float]:
  """Returns the t interval of the mean over seeds."""
  mean, half = interval(difference_S, level)
  return mean - half, mean + half


@functools.cache
def _signs(n: int) -> np.ndarray:
  """Returns all 2^n patterns of n signs, [2^n, n]; the first has no minus."""
  return np.asarray([*itertools.product((1.0, -1.0), repeat=n)])


def sign_flip(difference_S: np.ndarray) -> float:
  """Returns the exact two-sided p-value of the mean over all 2^n sign patterns."""
  # Rounded, so that patterns with equal sums are equal.
  size_N = np.round(np.abs(_signs(len(difference_S)) @ difference_S), DIGITS)
  return float((size_N >= size_N[0]).mean())


def friedman(
  results: Mapping[str, Result], compared: Sequence[Cell], name: str
) -> float:
  """Returns the p-value of Friedman's test that an outcome is alike in all cells."""
  values = by_seed(results, compared, name).values()
  if len(values) < 2:
    return 1.0
  return float(stats.friedmanchisquare(*zip(*values, strict=True)).pvalue)


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
  """Returns Kendall's rank correlation of two values by the same names."""
  values = [other[name] for name in one]
  return float(stats.kendalltau([*one.values()], values).statistic)


def holm(p_values: Sequence[float]) -> list[float]:
  """Returns p-values adjusted for their number (Holm, 1979), in the given order."""
  order_N = np.argsort(p_values, kind='stable')
  adjusted_N = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order_N]
  largest_N = np.minimum(1, np.maximum.accumulate(adjusted_N))
  return largest_N[np.argsort(order_N)].tolist()


def results_csv(papers: pathlib.Path) -> str:
  """Returns a table of all runs below a folder: identity, commit and outcomes.

  Outcomes have five digits; an unknown outcome is empty.
  """
  rows = []
  for folder in sorted(papers.glob('*/results')):
    # Not an experiment under way, at which nobody looks before it is complete.
    for experiment in sorted(path.stem for path in folder.glob('*.jsonl')):
      for run, result in experiments.read_runs(f'{folder}/{experiment}').items():
        if 'evaluations' not in result:  # not a run of an experiment
          continue
        row = {'paper': folder.parent.name, 'experiment': experiment, 'run': run}
        row |= {name: result[name] for name in ('arm', 'seed', 'diverged')}
        row['levels'] = ' '.join(result['levels'].values())
        row['commit'] = result['commit'][:12]
        for name in LISTED.split():
          value = OUTCOMES[name][1](result)
          row[name] = '' if math.isnan(value) else f'{value:.5g}'
        rows.append(row)
  text = io.StringIO()
  table = csv.DictWriter(text, rows[0], lineterminator='\n')
  table.writeheader()
  table.writerows(rows)
  return text.getvalue()


if __name__ == '__main__':
  files.write(PAPERS / 'results.csv', results_csv(PAPERS))
