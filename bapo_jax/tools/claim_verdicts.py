"""A paper's claims: what each says of the results of an experiment, and its verdict.

A claim has parts, one comparison each. A comparison has one number per seed: an outcome
of some cells of an experiment, less that of others, or less a constant.

  seen       every part has the claimed sign, with p < .05 by Holm over the parts;
  opposite   one has the other sign, with such a p;
  not seen   neither;
  not run    a run of these cells is missing, or the claim has no experiment here;
  by design  the experiment was made so, and nothing is tested.

With fewer than six seeds no p can be below .05: a sign counts that all seeds share, and
the verdict says so. By chance alone four seeds share one in one of eight cases.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime import tables
from bapo_jax.tools import sweep_grid
from bapo_jax.tools.claim_statistics import (
  FEWEST,
  OUTCOMES,
  Result,
  bootstrap_interval,
  cells,
  holm,
  sign_flip,
)

Cell = tuple[str, ...]  # (arm, level, ...)
SEEN, OPPOSITE, NOT_SEEN, NOT_RUN = 'seen', 'opposite', 'not seen', 'not run'
BY_DESIGN = 'by design'
SIGNIFICANT = 0.05


class Part(NamedTuple):
  """One comparison: an outcome of the cells `plus`, less that of the cells `minus`."""

  text: str
  outcome: str
  plus: tuple[Cell, ...]
  minus: tuple[Cell, ...] = ()
  less: float = 0.0
  sign: int = 1  # that the claim says


class Claim(NamedTuple):
  """A sentence of a paper."""

  text: str
  source: str  # figure, table or section
  scale: str
  experiment: str = ''
  parts: tuple[Part, ...] = ()
  by_design: bool = False  # a premise that the experiment was made to have


class Found(NamedTuple):
  """What the results say of a claim."""

  verdict: str
  effects: list[str]  # of each part, as text


def differences(
  part: Part, results: Mapping[str, Result], seeds: Sequence[int]
) -> np.ndarray | None:
  """One number per seed that has one; None where a cell lacks one of the seeds."""
  found, compute = cells(results), OUTCOMES[part.outcome][1]
  total_S = np.full(len(seeds), -float(part.less))
  for sign, side in ((1, part.plus), (-1, part.minus)):
    for cell in side:
      by_seed = found.get(cell, {})
      if set(seeds) - set(by_seed):
        return None
      total_S += sign * np.asarray([compute(by_seed[seed]) for seed in seeds])
  return total_S[~np.isnan(total_S)]


def judge(claim: Claim, results: Mapping[str, Result], seeds: Sequence[int]) -> Found:
  """The verdict on a claim, by the results of all seeds of its experiment."""
  every = [differences(part, results, seeds) for part in claim.parts]
  there = [d for d in every if d is not None and len(d) > 1]
  if not claim.parts or len(there) < len(every):
    return Found(NOT_RUN, [])
  adjusted = holm([sign_flip(d) for d in there])
  tested = len(seeds) >= FEWEST and not claim.by_design
  verdicts, effects = [], []
  for part, d, p in zip(claim.parts, there, adjusted, strict=True):
    one_sign = bool((d > 0).all() or (d < 0).all())
    counts = p < SIGNIFICANT if tested else one_sign
    agrees = part.sign * d.mean() > 0
    verdicts.append((SEEN if agrees else OPPOSITE) if counts else NOT_SEEN)
    last = f'p = {p:.3f}' if tested else _agreement(part, d)
    effects.append(_effect(part, d, '' if claim.by_design else last))
  if claim.by_design:
    return Found(BY_DESIGN, effects)
  found = SEEN if set(verdicts) == {SEEN} else NOT_SEEN
  found = OPPOSITE if OPPOSITE in verdicts else found
  few = '' if tested or found == NOT_SEEN else f' on all {len(seeds)} seeds'
  return Found(found + few, effects)


def _effect(part: Part, difference_S: np.ndarray, evidence: str) -> str:
  low, high = bootstrap_interval(difference_S)
  mean = f'{part.text} {difference_S.mean():+.3f} ({low:+.3f} to {high:+.3f})'
  return f'{mean}, {evidence}' if evidence else mean


def _agreement(part: Part, difference_S: np.ndarray) -> str:
  agree = int((part.sign * difference_S > 0).sum())
  return f'{agree} of {len(difference_S)} seeds as claimed'


def table(module: Any, results: Mapping[str, Mapping[str, Result]]) -> str:
  """The claims of a paper, their verdicts and effects.

  Args:
    module: the paper's description, as `claims.load` gives it.
    results: experiment -> run -> result.
  """
  rows = []
  for claim in module.CLAIMS:
    name = claim.experiment
    seeds = module.get_experiment(name).seeds if claim.parts else ()
    found = judge(claim, results.get(name, {}), seeds)
    figure = next(iter(module.SHOWN[name].figures), '') if claim.parts else ''
    shown = found.verdict != NOT_RUN and figure
    link = f'[{name}](figures/{figure}.png)' if shown else name
    effect = '; '.join(found.effects)
    rows.append([claim.text, claim.source, claim.scale, found.verdict, effect, link])
  header = ['claim', 'in the paper', 'scale', 'verdict', 'effect here', 'experiment']
  return tables.markdown(rows, header, 'llllll')


def check(module: Any) -> None:
  """Checks that the parts of the claims name cells and outcomes that exist.

  Raises:
    ValueError: the first that does not.
  """
  for claim in module.CLAIMS:
    if not claim.experiment:
      continue
    runs = sweep_grid.runs(module.get_experiment(claim.experiment)).values()
    there = {(run.arm, *run.levels.values()) for run in runs}
    for part in claim.parts:
      unknown = (set(part.plus) | set(part.minus)) - there
      if unknown or part.outcome not in OUTCOMES:
        raise ValueError(f'{claim.text}: no {unknown or part.outcome} to compare')
