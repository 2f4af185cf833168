"""Describes a page of papers/, and renders its tables and verdicts from results.

`means` has a row per cell, `difference_table` a row per pair of cells. A claim consists
of parts with one number per seed: the outcome of some cells, minus the outcome of other
cells, minus a constant. `judge` gives the verdict:

  seen            every part has the claimed sign with p < .05; no correction is needed,
                  since all parts must hold (intersection-union test);
  opposite        a part has the opposite sign with p < .05;
  not seen        all other outcomes;
  suggested       every seed has the claimed sign, but there are fewer than six;
  too few seeds   there are fewer than six, and not every one has the claimed sign;
  premise absent  a check of the claim fails, so that nothing could have been seen;
  not measurable  the quantity cannot vary here, or too rarely; nothing is tested;
  not run         a run of these cells is missing, or the claim has no experiment here.

With fewer than six seeds, the exact p of the signs cannot be below .05.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab.experiments import Result
from lab.outcomes import (
  FEWEST,
  OUTCOMES,
  Cell,
  cells,
  contrast,
  friedman,
  holm,
  kendall,
  sign_flip,
  t_interval,
)

SEEN, OPPOSITE, NOT_SEEN = 'seen', 'opposite', 'not seen'
SUGGESTED, TOO_FEW = 'suggested', 'too few seeds'
PREMISE_ABSENT, NOT_MEASURABLE = 'premise absent', 'not measurable'
NOT_RUN = 'not run'
SIGNIFICANT = 0.05


class Compared(NamedTuple):
  """Differences of one arm to other arms, at every combination of levels."""

  arm: str
  others: tuple[str, ...]
  outcome: str
  tested: bool = False  # True: p-values, by Holm over the other arms


class Drawn(NamedTuple):
  """A figure of a page."""

  kind: str  # a key of figures.DRAWN
  arms: tuple[str, ...]
  outcome: str = 'area'  # only for kinds that draw one outcome


class Shown(NamedTuple):
  """What a page shows of an experiment."""

  tables: tuple[tuple[str, ...], ...]  # the outcomes of each table
  compared: tuple[Compared, ...] = ()
  figures: Mapping[str, Drawn] = {}  # file name without suffix -> figure
  whole: bool = False  # True: nothing is shown before all runs are done
  # results of the experiment -> tables of its own protocol, below the others
  further: Callable[[Mapping[str, Result]], str] | None = None
  ordered: str = ''  # outcome by which the arms are ranked at every level of a factor


class Part(NamedTuple):
  """An outcome of the cells `plus`, minus that of `minus`, minus a constant."""

  text: str
  outcome: str
  plus: tuple[Cell, ...]
  minus: tuple[Cell, ...] = ()
  less: float = 0.0
  sign: int = 1  # the sign that the paper claims
  paper: str = ''  # the effect in the paper


class Check(NamedTuple):
  """A premise without which comparisons cannot show anything."""

  text: str
  experiment: str
  # results of the experiment -> (whether it holds, the figure that decides)
  passes: Callable[[Mapping[str, Result]], tuple[bool, str]]


class Claim(NamedTuple):
  """A sentence of a paper."""

  text: str
  source: str  # figure, table or section
  scale: str
  experiment: str = ''
  parts: tuple[Part, ...] = ()
  checks: tuple[str, ...] = ()  # keys of the page's CHECKS
  measurable: bool = True  # False: `text` ends with the reason


def differ(
  compared: Sequence[Cell], outcome: str
) -> Callable[[Mapping[str, Result]], tuple[bool, str]]:
  """Returns a check that an outcome differs between cells, by Friedman's test."""

  def passes(results: Mapping[str, Result]) -> tuple[bool, str]:
    p = friedman(results, compared, outcome)
    return p < SIGNIFICANT, f'p {relation(p)}'

  return passes


def relation(p: float) -> str:
  """Returns what stands after `p`: '= 0.018', or '< 0.001' if it would round to 0."""
  return f'= {p:.3f}' if p >= 0.0005 else '< 0.001'


def means(results: Mapping[str, Result], columns: Sequence[str]) -> str:
  """Returns a table of outcomes: mean and standard error over seeds, a row per cell.

  Cells without a known value have no row.
  """
  rows = []
  for cell, by_seed in cells(results).items():
    row = [', '.join(cell), f'{len(by_seed)}']
    for name in columns:
      mean, error = mean_and_error([OUTCOMES[name][1](r) for r in by_seed.values()])
      text = f'{mean:.3f} ± {error:.3f}' if error >= 0.0005 else f'{mean:.3f}'
      row.append('-' if math.isnan(mean) else text)
    if set(row[2:]) != {'-'}:
      rows.append(row)
  return _table(rows, ['arm', 'seeds', *(OUTCOMES[name][0] for name in columns)])


def _table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def difference_table(
  pairs: Mapping[str, np.ndarray], outcome: str, tested: bool = False
) -> str:
  """Returns a table of differences with 95 % t intervals; '' without pairs.

  Args:
    pairs: from `differences_of`.
    tested: whether to add p-values, with Holm's correction over the rows; they need
      FEWEST seeds.
  """
  if not pairs:
    return ''
  heading = f'difference in {OUTCOMES[outcome][0]}'
  header = [heading, 'mean', '95 % interval', 'seeds above 0']
  rows = []
  for text, difference_S in pairs.items():
    low, high = t_interval(difference_S)
    above = f'{int((difference_S > 0).sum())} of {len(difference_S)}'
    mean = f'{difference_S.mean():+.3f}'
    rows.append([text, mean, f'{low:+.3f} to {high:+.3f}', above])
  if tested and min(map(len, pairs.values())) >= FEWEST:
    header.append(f'p, Holm over {len(rows)}')
    for row, p in zip(rows, holm(list(map(sign_flip, pairs.values()))), strict=True):
      row.append(relation(p).removeprefix('= '))
  return _table(rows, header)


def differences_of(
  results: Mapping[str, Result], arm: str, others: Sequence[str], outcome: str
) -> dict[str, np.ndarray]:
  """Returns description of a pair -> differences f64 [S] over the common seeds.

  Pairs with fewer than two common seeds are left out.
  """
  pairs = dict[str, np.ndarray]()
  combinations = dict.fromkeys(cell[1:] for cell in cells(results))
  for levels, other in itertools.product(combinations, others):
    difference_S = contrast(results, [(arm, *levels)], [(other, *levels)], outcome)
    if len(difference_S) > 1:
      where = ', '.join(levels) if len(combinations) > 1 else ''
      pairs[' at '.join(filter(None, [f'{arm} minus {other}', where]))] = difference_S
  return pairs


def by_step_table(
  results: Mapping[str, Result], arm: str, others: Sequence[str]
) -> str:
  """Returns a table of one arm less others at every evaluation, with their p-values.

  The arms have no levels. The last row is Friedman's p that the others are alike.
  """
  of_arms = {cell[0]: of_seeds for cell, of_seeds in cells(results).items()}
  curves = {
    name: np.asarray([[row[1] for row in x['evaluations']] for x in of_seeds.values()])
    for name, of_seeds in of_arms.items()
  }
  steps = [row[0] for row in next(iter(of_arms[arm].values()))['evaluations']]
  after = range(1, len(steps))
  rows = []
  for other in others:
    gap_SN = curves[arm] - curves[other]
    texts = [
      f'{gap_SN[:, i].mean():+.3f} (p {relation(sign_flip(gap_SN[:, i]))})'
      for i in after
    ]
    rows.append([f'{arm} minus {other}', *texts])
  alike = [
    stats.friedmanchisquare(*(curves[x][:, i] for x in others)).pvalue for i in after
  ]
  rows.append(['the others are alike (Friedman)', *(f'p {relation(p)}' for p in alike)])
  return _table(
    rows, ['difference in accuracy', *(f'step {steps[i]:g}' for i in after)]
  )


def order_table(results: Mapping[str, Result], outcome: str) -> str:
  """Returns a table of the arms' order at every level of the only factor.

  Kendall's tau compares an order with that of the first level. The last row compares
  halves of the seeds at the first level, as the same order looks with so few.
  """
  heading, compute = OUTCOMES[outcome]

  def means_at(level: str, halves: tuple[int, ...] = (0, 1)) -> dict[str, float]:
    """Returns arm -> mean over the even seeds, the odd seeds or both."""
    return {
      arm: float(np.mean([compute(r) for seed, r in x.items() if seed % 2 in halves]))
      for (arm, of), x in cells(results).items()
      if of == level
    }

  first, *others = dict.fromkeys(level for _, level in cells(results))
  rows = []
  for level in (first, *others):
    means_of = means_at(level)
    order = sorted(means_of, key=lambda arm: -means_of[arm])
    tau = '' if level == first else f'{kendall(means_at(first), means_of):.2f}'
    rows.append([level, ', '.join(order), tau])
  tau = kendall(means_at(first, (0,)), means_at(first, (1,)))
  rows.append([f'{first}, even and odd seeds', '', f'{tau:.2f}'])
  header = ['', f'order by {heading}', f"Kendall's tau with {first}"]
  return markdown.table(rows, header, 'llr')


def judge(
  claim: Claim,
  results: Mapping[str, Result],
  seeds: Sequence[int],
  checked: Mapping[str, bool] = {},
) -> tuple[str, list[list[str]]]:
  """Returns the verdict on a claim, and (effect, p, seeds) of each part as text.

  Args:
    seeds: all seeds of the claim's experiment.
    checked: check -> whether it holds.
  """
  differences = [
    contrast(results, part.plus, part.minus, part.outcome, seeds) - part.less
    for part in claim.parts
  ]
  if not differences or min(map(len, differences)) < 2:
    return NOT_RUN, []
  tested = len(seeds) >= FEWEST
  effects = []
  verdicts_of = set()
  for part, difference_S in zip(claim.parts, differences, strict=True):
    p = sign_flip(difference_S)
    low, high = t_interval(difference_S)
    agreeing = int((part.sign * difference_S > 0).sum())
    if tested and p < SIGNIFICANT:
      verdicts_of.add(SEEN if part.sign * difference_S.mean() > 0 else OPPOSITE)
    else:
      alike = agreeing == len(seeds)
      verdicts_of.add(NOT_SEEN if tested else SUGGESTED if alike else TOO_FEW)
    effect = f'{difference_S.mean():+.3f} ({low:+.3f} to {high:+.3f})'
    shown = relation(p).removeprefix('= ') if tested and claim.measurable else ''
    effects.append([effect, shown, f'{agreeing} of {len(difference_S)}'])
  if not claim.measurable:
    return NOT_MEASURABLE, effects
  if not all(checked[name] for name in claim.checks):
    return PREMISE_ABSENT, effects
  if OPPOSITE in verdicts_of:
    return OPPOSITE, effects
  missing = NOT_SEEN if tested else TOO_FEW
  return verdicts_of.pop() if len(verdicts_of) == 1 else missing, effects


def checks(
  module: Any, results: Mapping[str, Mapping[str, Result]]
) -> tuple[dict[str, bool], str]:
  """Returns check -> whether it holds, and the table of a page's checks."""
  holds = {}
  rows = []
  for name, check in getattr(module, 'CHECKS', {}).items():
    holds[name] = False
    row = [check.text, check.experiment, NOT_RUN, '']
    if stored := results.get(check.experiment):
      holds[name], row[2] = check.passes(stored)
      row[3] = 'yes' if holds[name] else 'no'
    rows.append(row)
  header = ['check', 'experiment', 'found', 'holds']
  return holds, markdown.table(rows, header, 'llll') if rows else ''


def verdicts(module: Any, results: Mapping[str, Mapping[str, Result]]) -> str:
  """Returns the tables of checks and claims of a page; see `claims.page`.

  A claim has a row per part; its sentence and verdict are in the first.
  """
  holds, table = checks(module, results)
  rows = []
  for claim in module.CLAIMS:
    verdict = NOT_RUN
    effects = []
    link = claim.experiment
    if claim.parts:
      seeds = module.get_experiment(link).seeds
      verdict, effects = judge(claim, results.get(link, {}), seeds, holds)
    if effects and (figure := next(iter(module.SHOWN[link].figures), '')):
      link = f'[{link}](figures/{figure}.png)'
    first = [f'{claim.text} ({claim.source}; {claim.scale})', f'**{verdict}**']
    parts = [[part.text, part.paper] for part in claim.parts] or [['', '']]
    effects = effects or [['', '', '']] * len(parts)
    for part, effect in zip(parts, effects, strict=True):
      rows.append([*first, *part, *effect, link])
      first = ['', '']
      link = ''
  header = (
    'claim',
    'verdict',
    'comparison',
    'in the paper',
    'here',
    'p',
    'seeds as claimed',
    'experiment',
  )
  return '\n\n'.join(filter(None, [table, markdown.table(rows, header, 'lllllrrl')]))
