"""Means and their standard errors."""

import math

import numpy as np
from numpy.typing import ArrayLike


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
  """Mean of independent values and its standard error, s / sqrt(n); nan for one."""
  value_N = np.asarray(values, float)
  n = len(value_N)
  error = float(value_N.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
  return float(value_N.mean()), error


def clustered_error(correct_PG: ArrayLike) -> float:
  """Standard error of the mean verdict: problems are drawn, responses are not.

  Returns:
    0 for fewer than two problems.
  """
  mean_P = np.asarray(correct_PG, float).mean(1)
  return mean_and_error(mean_P)[1] if len(mean_P) > 1 else 0.0
