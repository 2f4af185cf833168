"""What is compared between runs, and the statistics of differences over seeds.

1. `OUTCOMES` computes what is compared from the result of one run;
2. `cells` sorts results by arm and levels; runs of one seed are pairs;
3. `bootstrap_interval` and `sign_flip` of the differences of pairs, `holm` over a
   family of comparisons, `smallest_effect` for its power.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

Result = Mapping[str, Any]  # as sweep_grid.outcome makes it
COLLAPSE = 2 / 3  # of the best accuracy of a run
SPIKE = 5.0  # times the median gradient norm of a run
DRAWS, LEVEL, POWER = 10_000, 0.95, 0.8
FEWEST = 6  # seeds of a test; of five the smallest p of two sides is 1/16


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

  Solved: right in at least one response. nan where none was failed, 0 after a
  divergence.
  """
  first_P, last_P = _right(result)
  return _share(last_P > 0, first_P == 0)


def newly_failed(result: Result) -> float:
  """Of the held-out problems solved at first, the share failed in every response last.

  nan where none was solved, 1 after a divergence.
  """
  first_P, last_P = _right(result)
  return _share(last_P == 0, first_P > 0)


def accuracy_of_failed(result: Result) -> float:
  """Accuracy at the end on the held-out problems failed in every response at first.

  Unlike `newly_solved` it does not grow with the number of responses. nan where none
  was failed, 0 after a divergence.
  """
  first_P, last_P = _right(result)
  return _share(last_P / result['group_size'], first_P == 0)


def _right(result: Result) -> tuple[np.ndarray, np.ndarray]:
  """Right responses to each held-out problem, first and last; 0 after a divergence."""
  every = [np.asarray(right) for right in result['right'].values()]
  return every[0], np.zeros_like(every[0]) if result['diverged'] else every[-1]


def _share(value_P: np.ndarray, of_P: np.ndarray) -> float:
  return float(value_P[of_P].mean()) if of_P.any() else math.nan


def bound_where_moved(metric: str) -> Callable[[Result], float]:
  """A bound in the updates in which the search moved it; nan where it never did.

  The mean bound of a step is a line in the share of its updates that moved: at 0 it is
  the start of the search, at 1 this.
  """

  def outcome(result: Result) -> float:
    every = zip(
      *(result['steps'][name] for name in ('clip/moved', metric)), strict=True
    )
    found = [pair for pair in every if None not in pair]
    moved_S, bound_S = np.asarray(found, float).reshape(-1, 2).T
    if len(set(moved_S.tolist())) < 2:
      return math.nan
    return float(np.polyval(np.polyfit(moved_S, bound_S, 1), 1))

  return outcome


def mean_with_target(metric: str) -> Callable[[Result], float]:
  """The mean of a metric of the bound search; nan of a rule that searches nothing."""
  mean, moved = mean_of(metric), mean_of('clip/moved')
  return lambda result: mean(result) if moved(result) > 0 else math.nan


def mean_of(metric: str) -> Callable[[Result], float]:
  """The mean of a metric over the steps of a run; nan without any value."""

  def outcome(result: Result) -> float:
    value_S = _finite(result, metric)
    return float(value_S.mean()) if len(value_S) else math.nan

  return outcome


def last_of(metric: str) -> Callable[[Result], float]:
  """The last value of a metric; nan without any."""

  def outcome(result: Result) -> float:
    value_S = _finite(result, metric)
    return float(value_S[-1]) if len(value_S) else math.nan

  return outcome


# name -> (heading, what it is of a run)
OUTCOMES: dict[str, tuple[str, Callable[[Result], float]]] = {
  'area': ('accuracy, mean over the run', area),
  'final': ('accuracy at the end', final),
  'newly_solved': ('solved of those failed before', newly_solved),
  'newly_failed': ('failed of those solved before', newly_failed),
  'accuracy_of_failed': ('accuracy on those failed before', accuracy_of_failed),
  'collapsed': ('collapsed', collapsed),
  'entropy': ('entropy', mean_of('loss/entropy')),
  'grad_norm': ('gradient norm', mean_of('learner/grad_norm')),
  'spikes': ('spikes', spikes),
  'share_start': ('share before', mean_of('clip/share_start')),
  'share': ('share after', mean_of('clip/share')),
  'target_met': ('target met', mean_with_target('clip/target_met')),
  'moved': ('moved', mean_with_target('clip/moved')),
  'clipped': ('tokens cut', mean_of('clip/fraction')),
  'low': ('lower bound', mean_of('clip/low')),
  'high': ('upper bound', mean_of('clip/high')),
  'low_moved': ('lower, where moved', bound_where_moved('clip/low')),
  'high_moved': ('upper, where moved', bound_where_moved('clip/high')),
  'learnable': ('learnable', mean_of('batch/learnable')),
  'filled': ('seats filled', mean_of('batch/filled')),
  'reevaluated': ('re-evaluated', mean_of('batch/reevaluated')),
  'reused': ('reused', mean_of('batch/reused')),
  'responses': ('responses', last_of('rollout/responses')),
  'updates': ('updates', last_of('learner/updates')),
  'steps': ('steps', lambda result: float(len(result['steps']['learner/updates']))),
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
