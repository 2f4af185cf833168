"""Describes a page of papers/, and renders its tables and verdicts from results.

`means` has a row per cell, `difference_table` a row per pair of cells; only hypotheses
of the protocol have p-values. A claim consists of parts with one number per seed: the
outcome of some cells, minus the outcome of other cells, minus a constant. `judge` gives
the verdict:

  seen       every part has the claimed sign, with p < .05 by Holm over the parts;
  opposite   a part has the opposite sign, with p < .05;
  not seen   all other outcomes;
  not run    a run of these cells is missing, or the claim has no experiment here;
  by design  the experiment was built to have this property; nothing is tested.

With fewer than six seeds, p cannot be below .05. A sign then counts if all seeds share
the sign, and the verdict mentions this; four seeds do so by chance in one of 8 cases.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab.experiments import Result
from lab.outcomes import (
  FEWEST,
  OUTCOMES,
  Cell,
  bootstrap_interval,
  cells,
  contrast,
  holm,
  sign_flip,
  smallest_effect,
)

SEEN, OPPOSITE, NOT_SEEN, NOT_RUN = 'seen', 'opposite', 'not seen', 'not run'
BY_DESIGN = 'by design'
SIGNIFICANT = 0.05


class Compared(NamedTuple):
  """Differences of one arm to other arms, at every combination of levels."""

  arm: str
  others: tuple[str, ...]
  outcome: str
  tested: bool = False  # True: a hypothesis of the protocol with this outcome


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


class Part(NamedTuple):
  """An outcome of the cells `plus`, minus that of `minus`, minus a constant."""

  text: str
  outcome: str
  plus: tuple[Cell, ...]
  minus: tuple[Cell, ...] = ()
  less: float = 0.0
  sign: int = 1  # the sign that the paper claims


class Claim(NamedTuple):
  """A sentence of a paper."""

  text: str
  source: str  # figure, table or section
  scale: str
  experiment: str = ''
  parts: tuple[Part, ...] = ()
  by_design: bool = False  # True: a premise that the experiment was built to have


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
  header = ['arm', 'seeds', *(OUTCOMES[name][0] for name in columns)]
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def difference_table(
  pairs: Mapping[str, np.ndarray], outcome: str, tested: bool = False
) -> str:
  """Returns a table of differences; '' without pairs.

  Holm's method treats all rows as one family. Only hypotheses with enough seeds have
  p-values and the smallest effect that would have been visible with these seeds.

  Args:
    pairs: from `differences_of`.
    tested: whether the rows are a hypothesis of the protocol.
  """
  tested &= all(len(difference_S) >= FEWEST for difference_S in pairs.values())
  rows = []
  for text, difference_S in pairs.items():
    low, high = bootstrap_interval(difference_S)
    above = f'{int((difference_S > 0).sum())} of {len(difference_S)}'
    mean = f'{difference_S.mean():+.3f}'
    rows.append([text, mean, f'{low:+.3f} to {high:+.3f}', above])
  header = [f'difference in {OUTCOMES[outcome][0]}', 'mean', '95 % interval']
  header.append('seeds above 0')
  if tested:
    adjusted = holm([sign_flip(difference_S) for difference_S in pairs.values()])
    for row, difference_S, p in zip(rows, pairs.values(), adjusted, strict=True):
      row += [f'{p:.3f}', f'{smallest_effect(difference_S):.3f}']
    header += [f'p, Holm over {len(rows)}', 'visible from']
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1)) if rows else ''


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


def judge(
  claim: Claim, results: Mapping[str, Result], seeds: Sequence[int]
) -> tuple[str, list[str]]:
  """Returns the verdict on a claim, and the effect of each part as text.

  `seeds` are all seeds of the claim's experiment.
  """
  differences = [
    contrast(results, part.plus, part.minus, part.outcome, seeds) - part.less
    for part in claim.parts
  ]
  if not differences or min(map(len, differences)) < 2:
    return NOT_RUN, []
  adjusted = holm([sign_flip(difference_S) for difference_S in differences])
  tested = len(seeds) >= FEWEST and not claim.by_design
  verdicts, effects = [], []
  for part, difference_S, p in zip(claim.parts, differences, adjusted, strict=True):
    one_sign = bool((difference_S > 0).all() or (difference_S < 0).all())
    agrees = part.sign * difference_S.mean() > 0
    counts = p < SIGNIFICANT if tested else one_sign
    verdicts.append((SEEN if agrees else OPPOSITE) if counts else NOT_SEEN)
    low, high = bootstrap_interval(difference_S)
    effect = f'{part.text} {difference_S.mean():+.3f} ({low:+.3f} to {high:+.3f})'
    agreeing = int((part.sign * difference_S > 0).sum())
    evidence = f', {agreeing} of {len(difference_S)} seeds as claimed'
    evidence = f', p = {p:.3f}' if tested else evidence
    effects.append(effect + evidence * (not claim.by_design))
  if claim.by_design:
    return BY_DESIGN, effects
  verdict = SEEN if set(verdicts) == {SEEN} else NOT_SEEN
  verdict = OPPOSITE if OPPOSITE in verdicts else verdict
  few_seeds = not tested and verdict != NOT_SEEN
  return verdict + f' on all {len(seeds)} seeds' * few_seeds, effects


def verdicts(module: Any, results: Mapping[str, Mapping[str, Result]]) -> str:
  """Returns the table of a paper's claims with verdicts; see `claims.page`."""
  rows = []
  for claim in module.CLAIMS:
    name, verdict, effects, figure = claim.experiment, NOT_RUN, [], ''
    if claim.parts:
      seeds = module.get_experiment(name).seeds
      verdict, effects = judge(claim, results.get(name, {}), seeds)
      figure = next(iter(module.SHOWN[name].figures), '')
    link = f'[{name}](figures/{figure}.png)' if effects and figure else name
    effect = '; '.join(effects)
    rows.append([claim.text, claim.source, claim.scale, verdict, effect, link])
  header = ['claim', 'in the paper', 'scale', 'verdict', 'effect here', 'experiment']
  return markdown.table(rows, header, 'llllll')
