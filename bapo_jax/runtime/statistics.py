"""Means and their standard errors: the one place where either is computed."""

import math
from collections.abc import Sequence

import numpy as np


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
  """(mean, standard error) of independent values, such as one per seed.

  Args:
    values: n of them, n >= 1.

  Returns:
    the mean, and s / sqrt(n) with s the sample standard deviation (n - 1 in its
    denominator): nan for a single value, which has no spread.
  """
  x = np.asarray(values, float)
  error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
  return float(x.mean()), error


def clustered_error(value_PG: Sequence | np.ndarray) -> float:
  """Standard error of the mean of value_PG, clustered by problem.

  Problems are drawn, responses are not: the error is that of the mean over problems of
  each problem's own mean. Responses to one problem counted as if they were independent
  would give too small an error.

  Args:
    value_PG: P problems by G responses.

  Returns:
    the error; 0.0 for fewer than two problems.
  """
  mean_P = np.asarray(value_PG, float).mean(1)
  return mean_and_error(mean_P)[1] if len(mean_P) > 1 else 0.0
