"""Tables of the bench: the arms step by step, and their order at every level."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from bapo_jax.runtime import markdown
from lab.evidence import relation
from lab.experiments import Result
from lab.outcomes import OUTCOMES, cells, kendall, sign_flip


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
  header = ['difference in accuracy', *(f'step {steps[i]:g}' for i in after)]
  return markdown.table(rows, header, 'l' + 'r' * len(after))


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
