"""Computes means and their standard errors."""

import math

import numpy as np
from numpy.typing import ArrayLike


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
  """Returns the mean of n >= 1 independent values and its standard error.

  The error is s / sqrt(n), nan for a single value; s is the sample standard deviation,
  with n - 1 in its denominator.
  """
  value_N = np.asarray(values, float)
  n = len(value_N)
  error = value_N.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
  return float(value_N.mean()), float(error)


def clustered_error(correct_PG: ArrayLike) -> float:
  """Returns the standard error of the mean of correct_PG, clustered by problem.

  Responses to one problem are correlated, so this is the standard error of the mean of
  the per-problem means; 0.0 with fewer than two problems. Treating all responses as
  independent would give too small an error.
  """
  mean_P = np.asarray(correct_PG, float).mean(1)
  return mean_and_error(mean_P)[1] if len(mean_P) > 1 else 0.0
