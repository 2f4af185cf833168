"""What a page shows of an experiment: which numbers, comparisons and figures.

`means` is a row per cell, `comparisons` a row per pair of cells, seed by seed. What was
named as a hypothesis before the runs has p-values; everything else is described by its
interval and by how many seeds are above 0.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime import tables
from bapo_jax.runtime.statistics import mean_and_error
from bapo_jax.tools.claim_statistics import (
  FEWEST,
  OUTCOMES,
  Result,
  bootstrap_interval,
  cells,
  holm,
  sign_flip,
  smallest_effect,
)

UNKNOWN = '-'


class Compared(NamedTuple):
  """One arm less each of others, in every combination of levels."""

  arm: str
  others: tuple[str, ...]
  outcome: str
  tested: bool = False  # a hypothesis of the protocol, with this outcome


class Drawn(NamedTuple):
  """A figure; claim_plots.py has the kinds."""

  kind: str
  arms: tuple[str, ...]
  outcome: str = 'area'  # where the kind has a choice


class Shown(NamedTuple):
  """Of one experiment."""

  tables: tuple[tuple[str, ...], ...]  # outcomes of each
  compared: tuple[Compared, ...] = ()
  figures: Mapping[str, Drawn] = {}  # file name without its end -> figure


def means(results: Mapping[str, Result], columns: Sequence[str]) -> str:
  """A table of outcomes: mean and standard error over seeds, a row per cell.

  A cell of which none is known has no row.
  """
  rows = []
  for key, by_seed in cells(results).items():
    row = [', '.join(key), f'{len(by_seed)}']
    for name in columns:
      values = [OUTCOMES[name][1](result) for result in by_seed.values()]
      row.append(_number(*mean_and_error(values)))
    if set(row[2:]) != {UNKNOWN}:
      rows.append(row)
  header = ['arm', 'seeds', *(OUTCOMES[name][0] for name in columns)]
  return tables.markdown(rows, header, 'l' + 'r' * (len(header) - 1))


def _number(mean: float, error: float) -> str:
  if math.isnan(mean):
    return UNKNOWN
  return f'{mean:.3f} ± {error:.3f}' if error >= 0.0005 else f'{mean:.3f}'


def comparisons(results: Mapping[str, Result], compared: Compared) -> str:
  """A table of differences; '' where no pair has two seeds in common.

  All rows are one family for Holm. p-values, and the smallest effect that these seeds
  would have shown, stand only where a hypothesis is tested with seeds enough.
  """
  arm, others, outcome, tested = compared
  pairs = differences_of(results, arm, others, outcome)
  tested &= all(len(d) >= FEWEST for d in pairs.values())
  rows = []
  for text, d in pairs.items():
    low, high = bootstrap_interval(d)
    above = f'{int((d > 0).sum())} of {len(d)}'
    rows.append([text, f'{d.mean():+.3f}', f'{low:+.3f} to {high:+.3f}', above])
  header = [f'difference in {OUTCOMES[outcome][0]}', 'mean', '95 % interval']
  header.append('seeds above 0')
  if tested:
    adjusted = holm([sign_flip(d) for d in pairs.values()])
    for row, d, p in zip(rows, pairs.values(), adjusted, strict=True):
      row += [f'{p:.3f}', f'{smallest_effect(d):.3f}']
    header += [f'p, Holm over {len(rows)}', 'visible from']
  return tables.markdown(rows, header, 'l' + 'r' * (len(header) - 1)) if rows else ''


def differences_of(
  results: Mapping[str, Result], arm: str, others: Sequence[str], outcome: str
) -> dict[str, np.ndarray]:
  """What is compared, in words -> differences, one per seed that has both."""
  found, pairs = cells(results), dict[str, np.ndarray]()
  levels = dict.fromkeys(key[1:] for key in found)
  for level, other in itertools.product(levels, others):
    difference_S = paired(found, (arm, *level), (other, *level), outcome)
    if len(difference_S) > 1:
      where = ', '.join(level) if len(levels) > 1 else ''
      pairs[' at '.join(filter(None, [f'{arm} minus {other}', where]))] = difference_S
  return pairs


def paired(
  found: Mapping[tuple[str, ...], Mapping[int, Result]],
  one: tuple[str, ...],
  other: tuple[str, ...],
  outcome: str,
) -> np.ndarray:
  """Differences of an outcome between two cells, one per seed that both have."""
  first, second = found.get(one, {}), found.get(other, {})
  compute = OUTCOMES[outcome][1]
  seeds = sorted(set(first) & set(second))
  difference_S = np.asarray([compute(first[s]) - compute(second[s]) for s in seeds])
  return difference_S[~np.isnan(difference_S)]


def check(module: Any) -> None:
  """Checks that what a page shows names experiments, arms and outcomes that exist.

  Raises:
    ValueError: the first that does not.
  """
  if set(module.SHOWN) != set(module.NAMES):
    raise ValueError(f'SHOWN has {sorted(module.SHOWN)}, NAMES {sorted(module.NAMES)}')
  for name, shown in module.SHOWN.items():
    arms = set(module.get_experiment(name).arms)
    outcomes = {name for columns in shown.tables for name in columns}
    for compared in shown.compared:
      outcomes.add(compared.outcome)
      if {compared.arm, *compared.others} - arms or compared.arm in compared.others:
        raise ValueError(f'{name}: its arms are {sorted(arms)}, not all of {compared}')
    for drawn in shown.figures.values():
      outcomes.add(drawn.outcome)
      if set(drawn.arms) - arms:
        raise ValueError(f'{name}: its arms are {sorted(arms)}, not all of {drawn}')
    if outcomes - set(OUTCOMES):
      raise ValueError(f'{name}: no outcome {sorted(outcomes - set(OUTCOMES))}')
