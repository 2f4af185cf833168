"""Reads metrics over the steps of a run from its rows, for tables and charts.

1. `series` and `mean` read a metric, skipping gaps; `errors` its standard errors;
2. `smoothed` smooths a series, and `spiky` asks for a logarithmic axis;
3. `fifths` selects the first and the last steps.
"""

import math
from collections.abc import Sequence

import numpy as np

from bapo_jax.runtime.metrics import Row

Points = tuple[np.ndarray, np.ndarray]  # (step_N, value_N), finite

FEW = 20  # a running mean is over 1/20 of the steps; so few values are not smoothed
# Metrics of evaluations -> their standard errors.
ERRORS = {'eval/accuracy': 'eval/stderr', 'eval/reward': 'eval/reward_stderr'}
# One spike would flatten the other values.
SPIKY = {'learner/grad_norm', 'loss/kl', 'loss/ratio_max'}


def series(rows: Sequence[Row], name: str) -> Points:
  """Returns (step_N, value_N) of the N rows in which the metric is finite."""
  pairs = [(r['step'], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]
  step_N, value_N = np.asarray(pairs, float).reshape(-1, 2).T
  return step_N, value_N


def mean(rows: Sequence[Row], name: str) -> float:
  """Averages over the rows that have the metric; nan if no row has it."""
  _, value_N = series(rows, name)
  return float(value_N.mean()) if len(value_N) else math.nan


def errors(rows: Sequence[Row], name: str) -> np.ndarray:
  """Returns the standard error of each value of a metric of ERRORS; 0 if missing."""
  error = dict(zip(*series(rows, ERRORS[name]), strict=True))
  return np.asarray([error.get(step, 0.0) for step in series(rows, name)[0]])


def smoothed(points: Points, width: int) -> Points:
  """Returns (middle step, mean) of every full window of `width` (odd) values.

  Returns `points` itself if they are few or `width` is 1.
  """
  step_N, value_N = points
  if width == 1 or len(step_N) < 2 * width:
    return points
  half = width // 2
  smooth = np.convolve(value_N, np.full(width, 1 / width), 'valid')
  return step_N[half : len(step_N) - half], smooth


def averaged(curves: Sequence[Points]) -> Points:
  """Returns the mean of the curves at the steps that all of them have."""
  values = [dict(zip(*(array.tolist() for array in p), strict=True)) for p in curves]
  steps = [step for step in (values or [{}])[0] if all(step in x for x in values)]
  means = [sum(x[step] for x in values) / len(values) for step in steps]
  return np.asarray(steps, float), np.asarray(means, float)


def spiky(name: str, value_N: np.ndarray) -> bool:
  """Returns whether a few values would flatten the others on a linear axis."""
  if name not in SPIKY or not len(value_N):
    return False
  return bool(value_N.min() > 0 and value_N.max() > 30 * np.median(value_N))


def fifths(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
  """Returns the first and last fifth of the training steps, at least one step each."""
  steps = [row for row in rows if any(name.startswith('rollout/') for name in row)]
  count = max(1, len(steps) // 5)
  return steps[:count], steps[-count:]
