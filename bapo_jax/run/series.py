"""Reads metrics over the steps of a run from its rows, for tables and charts.

1. `series` and `mean` read a metric, skipping gaps;
2. `fifths` selects the first and the last steps;
3. `of_sets` finds the accuracies of named held-out sets.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from bapo_jax.runtime.glossary import OF_SET
from bapo_jax.runtime.metrics import Row

Points = tuple[np.ndarray, np.ndarray]  # (step_N, value_N), finite

# Metrics of evaluations -> their standard errors.
ERRORS = {'eval/accuracy': 'eval/stderr', 'eval/reward': 'eval/reward_stderr'}


def of_sets(rows: Iterable[Iterable[str]]) -> dict[str, str]:
  """Returns eval/<set>/accuracy -> its standard error, of each named set in rows."""
  return {
    name: name.replace('/accuracy', '/stderr')
    for row in rows
    for name in row
    if OF_SET.sub('', name) == 'accuracy'
  }


def series(rows: Sequence[Row], name: str) -> Points:
  """Returns (step_N, value_N) of the N rows in which the metric is finite."""
  pairs = [(r['step'], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]
  step_N, value_N = np.asarray(pairs, float).reshape(-1, 2).T
  return step_N, value_N


def mean(rows: Sequence[Row], name: str) -> float:
  """Averages over the rows that have the metric; nan if no row has it."""
  _, value_N = series(rows, name)
  return float(value_N.mean()) if len(value_N) else math.nan


def fifths(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
  """Returns the first and last fifth of the training steps, at least one step each."""
  steps = [row for row in rows if any(name.startswith('rollout/') for name in row)]
  count = max(1, len(steps) // 5)
  return steps[:count], steps[-count:]
