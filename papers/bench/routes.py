"""The check, tests and words of protocol 4, computed from its stored results.

`DIFFERENCES` defines every comparison of ../protocol4.md, `routers_differ` its check,
and `tables` has the verdicts, the check and all cells for the page.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab.experiments import Result
from lab.outcomes import OUTCOMES, Cell, cells
from papers.bench import differences, experiments
from papers.bench.differences import Check, Difference, Results, Verdict

METHODS = ('grpo', 'balanced', 'gspo')
PRECISIONS = (*experiments.COMPUTED,)
STALENESS = (*experiments.STALENESS,)
AGREEING = 0.99  # C1: routers that agree this often agree anyway
MARGIN = {('routes', 'area'): 0.03}


def replay(
  name: str,
  methods: Sequence[str],
  precisions: Sequence[str],
  staleness: str,
  checks: tuple[str, ...] = (),
  outcome: str = 'area',
) -> Difference:
  """Returns the effect of replay on an outcome, mean over methods and precisions."""
  plus, minus = (
    tuple(
      (f'{x}_{routes}', precision, staleness)
      for x in methods
      for precision in precisions
    )
    for routes in ('on', 'measure')
  )
  updates = staleness.removeprefix('updates')
  where = f'{", ".join(methods)}; {", ".join(precisions)}, updates per step {updates}'
  return Difference(
    name,
    f'{where}: {OUTCOMES[outcome][0]}',
    'routes',
    plus,
    minus,
    claimed=-1 if outcome == 'mismatch' else 1,
    checks=checks,
    family=name,
    outcome=outcome,
  )


DIFFERENCES = (
  *(replay('H1', (x,), ('bfloat16',), 'updates64', ('C1',)) for x in METHODS),
  *(
    replay('H2', METHODS, ('bfloat16',), staleness, ('C1',), 'mismatch')
    for staleness in STALENESS
  ),
  *(replay('H3', (method,), ('float32',), 'updates64') for method in METHODS),
)


def routers_differ(results: Results) -> Check:
  """C1: without replay the learner's router differs from the sampler's in bfloat16.

  Measured where a step has one update: before it, both have the same weights.
  """
  of_cells = cells(results)
  means = {
    method: np.mean(
      outcomes(
        [*of_cells[f'{method}_measure', 'bfloat16', 'updates1'].values()], 'agree'
      )
    )
    for method in METHODS
  }
  text = ', '.join(f'{mean:.4f} ({method})' for method, mean in means.items())
  return bool(np.mean([*means.values()]) < AGREEING), text


def outcomes(runs: Sequence[Result], name: str) -> list[float]:
  """Returns an outcome of each run."""
  return [OUTCOMES[name][1](run) for run in runs]


def checks(results: Results) -> dict[str, tuple[str, Check]]:
  """Returns check -> (sentence, (whether it holds, figures))."""
  text = 'agreement of the routers below .99, bfloat16, first update of a step'
  return {'C1': (text, routers_differ(results))}


def verdicts(results: Results) -> list[Verdict]:
  """Returns the comparisons in the order of the protocol."""
  holds = {name: held for name, (_, (held, _)) in checks(results).items()}
  return differences.judged(DIFFERENCES, results, MARGIN, holds)


def tables(results: Results) -> str:
  """Returns the verdicts, the check and the cells of the experiment as Markdown."""
  parts = (
    differences.table(verdicts(results)),
    differences.check_table(checks(results)),
    had_it_held(results),
    effects(results),
    ends(results),
    cell_table(results),
  )
  return '\n\n'.join(parts)


def had_it_held(results: Results) -> str:
  """Returns the words of H1 and H2 without their check, as text."""
  words: dict[str, list[str]] = {}
  for x in differences.judged(DIFFERENCES, results, MARGIN, {'C1': True}):
    if x.difference.checks:
      what = x.difference.text.partition(':')[0]
      words.setdefault(x.difference.name, []).append(f'{what}: {x.word}')
  said = (f'{name} ({"; ".join(texts)})' for name, texts in words.items())
  return f'Had C1 held, the words would be: {", ".join(said)}.'


def effects(results: Results) -> str:
  """Returns the effect of replay on accuracy, without a test.

  By cell, and at the largest staleness for all methods, by precision and for both.
  """
  compared = [
    replay('', (method,), (precision,), staleness)
    for precision in PRECISIONS
    for staleness in STALENESS
    for method in METHODS
  ]
  largest = STALENESS[-1]
  compared += [replay('', METHODS, (x,), largest) for x in PRECISIONS]
  compared.append(replay('', METHODS, PRECISIONS, largest))
  rows = []
  for x in compared:
    row = (differences.by_seed(x, results, outcome) for outcome in ('area', 'final'))
    text = x.text.partition(':')[0]
    rows.append((text, *map(differences.mean_and_interval, row)))
  header = ['replay less none, without a test', 'mean over the run', 'at the end']
  return markdown.table(rows, header, 'lrr')


def ends(results: Results) -> str:
  """Returns how runs of the largest staleness end: both precisions, by arm."""
  by_arm: dict[str, list[Result]] = {arm: [] for arm in experiments.REPLAYED}
  for run in results.values():
    if run['levels']['staleness'] == STALENESS[-1]:
      by_arm[run['arm']].append(run)
  rows = []
  for arm, runs in by_arm.items():
    before, final = (outcomes(runs, name) for name in ('before', 'final'))
    kept_R = np.divide(final, before)
    means = (f'{np.mean(x):.3f}' for x in (before, final))
    ended = sum(outcomes(runs, 'collapsed')), (kept_R < 1).sum(), (kept_R < 0.5).sum()
    rows.append((arm, str(len(runs)), *(f'{count:g}' for count in ended), *means))
  updates = STALENESS[-1].removeprefix('updates')
  header = [f'{updates} updates per step, both precisions', 'runs', 'collapsed']
  header += [
    'below their start',
    'below half of it',
    OUTCOMES['before'][0],
    OUTCOMES['final'][0],
  ]
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def cell_table(results: Results) -> str:
  """Returns what was measured in every cell: mean and standard error over seeds."""
  of_cells: Mapping[Cell, Mapping[int, Result]] = cells(results)
  rows = []
  for cell, of_seeds in of_cells.items():
    runs = [*of_seeds.values()]
    row = [', '.join(cell), str(len(runs))]
    for name, digits in (('area', 3), ('final', 3), ('agree', 4), ('mismatch', 5)):
      mean, error = mean_and_error(outcomes(runs, name))
      row.append(f'{mean:.{digits}f} ± {error:.{digits}f}')
    row.append(f'{np.mean(outcomes(runs, "load")):.2f}')
    rows.append([*row, f'{sum(outcomes(runs, "collapsed")):g}'])
  names = ('area', 'final', 'agree', 'mismatch', 'load')
  header = ['cell', 'seeds', *(OUTCOMES[name][0] for name in names), 'collapsed']
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def first_update(results: Results) -> str:
  """Returns how often routers agree in the first update of a step, and in the mean."""
  rows = []
  for (arm, *levels), of_seeds in cells(results).items():
    runs = [*of_seeds.values()]
    shares = (np.mean(outcomes(runs, x)) for x in ('agree_first', 'agree'))
    mismatch = np.mean(outcomes(runs, 'mismatch'))
    texts = (*(f'{share:.4f}' for share in shares), f'{mismatch:.5f}')
    rows.append((', '.join((arm, *levels)), str(len(runs)), *texts))
  header = ['cell', 'seeds', 'agreement, first update of a step', 'all updates']
  return markdown.table(rows, [*header, OUTCOMES['mismatch'][0]], 'lrrrr')
