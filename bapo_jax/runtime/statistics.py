"""Means and their standard errors: the one place where either is computed."""

import math

import numpy as np
from numpy.typing import ArrayLike


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
  """(mean, standard error) of independent values, such as one per seed.

  Args:
    values: n of them, n >= 1.

  Returns:
    the mean, and s / sqrt(n) with s the sample standard deviation (n - 1 in its
    denominator): nan for a single value, which has no spread.
  """
  value_N = np.asarray(values, float)
  n = len(value_N)
  error = float(value_N.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
  return float(value_N.mean()), error


def clustered_error(correct_PG: ArrayLike) -> float:
  """Standard error of the mean of correct_PG, clustered by problem.

  Problems are drawn, responses are not: the error is that of the mean over problems of
  each problem's own mean. Responses to one problem counted as if they were independent
  would give too small an error.

  Args:
    correct_PG: verdicts, or other values, of P problems by G responses.

  Returns:
    the error; 0.0 for fewer than two problems.
  """
  mean_P = np.asarray(correct_PG, float).mean(1)
  return mean_and_error(mean_P)[1] if len(mean_P) > 1 else 0.0
