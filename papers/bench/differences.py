"""Comparisons that a protocol of the bench states beforehand, and their words.

1. A `Difference` names the cells that are compared, and the checks without which the
   comparison shows nothing;
2. `tested` tests it by seed, and `word` turns the test into a word of ../protocol3.md;
3. `judged` does both for all comparisons of an experiment, with Holm's correction in
   every family, and `table` and `check_table` show them.

Results are read as lab.experiments.read_runs gives them: run -> result.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from bapo_jax.runtime import markdown
from lab import outcomes
from lab.evidence import PREMISE_ABSENT, relation
from lab.experiments import Result
from lab.outcomes import Cell, holm, sign_flip, t_interval

Results = Mapping[str, Result]
FLIPS = 999_999  # random sign flips; all of them where there are fewer
SIGNIFICANT = 0.05
SEEN, OPPOSITE = 'seen', 'opposite'
NO_EFFECT, UNDECIDED = 'no effect of size', 'undecided'
Check = tuple[bool, str]  # whether it holds, and the figures that decide
DIGITS = {'mismatch': 5}  # of an outcome's table; 3 of the others


class Difference(NamedTuple):
  """A comparison: the mean over the cells `plus`, less the mean over `minus`.

  The interaction (d - c) - (b - a) is twice the mean of d and a, less that of c and b:
  its `summed` is 2.
  """

  name: str
  text: str
  experiment: str
  plus: tuple[Cell, ...]
  minus: tuple[Cell, ...]
  claimed: int = 1  # the sign that is claimed; 0 for none
  checks: tuple[str, ...] = ()
  family: str = ''  # comparisons of one family share Holm's correction
  outcome: str = 'area'  # a key of OUTCOMES
  summed: int = 1  # differences of means that the comparison adds up


def at(arms: Sequence[str], levels: Sequence[str]) -> tuple[Cell, ...]:
  """Returns the cells of some arms at some levels; () of levels for no factor."""
  return (
    tuple((arm, level) for arm in arms for level in levels)
    if levels
    else tuple((arm,) for arm in arms)
  )


class Tested(NamedTuple):
  """A difference with its test."""

  mean: float
  interval: tuple[float, float]  # 95 %
  inner: tuple[float, float]  # 90 %, for TOST
  p: float  # of sign flips, before any correction
  values_S: np.ndarray  # by seed


def by_seed(x: Difference, results: Results, outcome: str = '') -> np.ndarray:
  """Returns the comparison for each seed that has all of its cells.

  Args:
    outcome: '' for that of the comparison.
  """
  values = outcomes.by_seed(results, (*x.plus, *x.minus), outcome or x.outcome)
  plus_SN, minus_SN = np.split(np.asarray([*values.values()]), [len(x.plus)], 1)
  difference_S = x.summed * (plus_SN.mean(1) - minus_SN.mean(1))
  return difference_S[~np.isnan(difference_S)]


def tested(values_S: np.ndarray) -> Tested:
  """Tests whether the mean of differences by seed is 0."""
  values_S = np.round(values_S, 12)  # equal sums of signs are equal
  few = 2 ** len(values_S) <= FLIPS
  return Tested(
    float(values_S.mean()),
    t_interval(values_S),
    t_interval(values_S, 0.90),
    sign_flip(values_S) if few else _random_flips(values_S),
    values_S,
  )


def _random_flips(values_S: np.ndarray) -> float:
  """Returns the two-sided p-value of the mean over FLIPS random sign patterns."""
  flips = stats.permutation_test(
    (values_S,),
    np.mean,
    permutation_type='samples',
    n_resamples=FLIPS,
    vectorized=True,
    batch=20_000,
    rng=np.random.default_rng(0),
  )
  return float(flips.pvalue)


def word(test: Tested, p: float, margin: float, claimed: int) -> str:
  """Returns the protocol's word for a difference; p is corrected where it should be."""
  inside = margin > 0 and -margin < test.inner[0] and test.inner[1] < margin
  if p < SIGNIFICANT:
    as_claimed = not claimed or claimed * test.mean > 0
    return (SEEN if as_claimed else OPPOSITE) + ', inside the margin' * inside
  return NO_EFFECT if inside else UNDECIDED


class Verdict(NamedTuple):
  """A comparison of the protocol with its test and its word."""

  difference: Difference
  test: Tested
  adjusted: float  # p after Holm's correction in its family
  word: str


def judged(
  compared: Sequence[Difference],
  results: Results,
  margin: Mapping[tuple[str, str], float],
  holds: Mapping[str, bool],
) -> list[Verdict]:
  """Tests comparisons in their order.

  Args:
    margin: (experiment, outcome) -> size below which an effect is none; other
      outcomes have no margin.
    holds: check -> whether it holds.
  """
  tests = [tested(by_seed(x, results)) for x in compared]
  adjusted = [test.p for test in tests]
  for family in {x.family for x in compared} - {''}:
    members = [i for i, x in enumerate(compared) if x.family == family]
    corrected = holm([tests[i].p for i in members])
    for i, p in zip(members, corrected, strict=True):
      adjusted[i] = p
  verdicts = []
  for x, test, p in zip(compared, tests, adjusted, strict=True):
    term = word(test, p, margin.get((x.experiment, x.outcome), 0.0), x.claimed)
    if not all(holds[check] for check in x.checks):
      term = PREMISE_ABSENT
    verdicts.append(Verdict(x, test, p, term))
  return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
  """Returns a table of comparisons with their words, effects and p-values."""
  rows = []
  for x, test, adjusted, term in verdicts:
    n = DIGITS.get(x.outcome, 3)
    low, high, *inner = (f'{value:+.{n}f}' for value in (*test.interval, *test.inner))
    rows.append(
      (
        f'{x.name}: {x.text}',
        f'**{term}**',
        f'{test.mean:+.{n}f}',
        f'{low} to {high}',
        ' to '.join(inner),
        relation(adjusted).removeprefix('= '),
        f'{int((test.values_S > 0).sum())} of {len(test.values_S)}',
      )
    )
  header = ['difference', 'word', 'mean', '95 % interval', '90 % interval']
  return markdown.table(rows, [*header, 'p', 'seeds above 0'], 'llrrrrr')


def check_table(checks: Mapping[str, tuple[str, Check]]) -> str:
  """Returns a table of checks: name -> (sentence, (whether it holds, figures))."""
  rows = [
    (check, text, figures, 'yes' if holds else 'no')
    for check, (text, (holds, figures)) in checks.items()
  ]
  return markdown.table(rows, ('check', '', 'found', 'holds'), 'llll')


def mean_and_interval(values_S: np.ndarray) -> str:
  """Returns a mean with its 95 % interval, as text."""
  low, high = t_interval(values_S)
  return f'{values_S.mean():+.3f} ({low:+.3f} to {high:+.3f})'
