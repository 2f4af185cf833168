"""From the results of experiments to the numbers of a page, as its protocol has them.

  python -m bapo_jax.tools.claims papers/2510.18927 [--check] [--runs=runs/2510.18927]

writes into README.md, between markers: the claims with their verdicts
(claim_verdicts.py), and for every experiment the mean of each outcome and the
differences of arms, seed by seed (claim_statistics.py); and its figures
(claim_plots.py). --runs first reads the recorded batches of the workdirs there
(claim_recorded.py). --check writes nothing.

A folder of papers/ holds README.md, results/<experiment>/<run>.json, and
  experiments.py: NAMES and `get_experiment`, what is run;
  claims.py: CLAIMS, COMPARED (experiment -> (arm, those it is compared with, outcome))
    and FIGURES (experiment -> (how it is drawn, the arms)), what is made of it; perhaps
    RECORDED.
"""

import argparse
import importlib.util
import itertools
import math
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.runtime import files, tables
from bapo_jax.runtime.statistics import mean_and_error
from bapo_jax.tools import claim_plots, claim_recorded, claim_verdicts, sweep_grid
from bapo_jax.tools.claim_statistics import (
  OUTCOMES,
  Result,
  bootstrap_interval,
  cells,
  holm,
  sign_flip,
  smallest_effect,
)

EMPTY = 'Not run: there are no results yet.'


def means(results: Mapping[str, Result]) -> str:
  """A table of all outcomes: mean and standard error over seeds."""
  rows = []
  for key, by_seed in cells(results).items():
    row = [', '.join(key), f'{len(by_seed)}']
    for _, outcome in OUTCOMES.values():
      mean, error = mean_and_error([outcome(r) for r in by_seed.values()])
      row.append(_number(mean, error))
    rows.append(row)
  header = ['arm', 'seeds', *(heading for heading, _ in OUTCOMES.values())]
  return tables.markdown(rows, header, 'l' + 'r' * (len(header) - 1))


def _number(mean: float, error: float) -> str:
  if math.isnan(mean):
    return '-'
  return f'{mean:.3f} ± {error:.3f}' if error >= 0.0005 else f'{mean:.3f}'


def comparisons(
  results: Mapping[str, Result], arm: str, others: Sequence[str], outcome: str
) -> str:
  """A table of one arm minus each other, paired by seed, in every cell of the factors.

  All rows are one family for Holm. A pair without two seeds in common has no row.
  """
  found, rows, differences = cells(results), [], []
  levels = dict.fromkeys(key[1:] for key in found)
  for level, other in itertools.product(levels, others):
    one, two = found.get((arm, *level), {}), found.get((other, *level), {})
    seeds = sorted(set(one) & set(two))
    compute = OUTCOMES[outcome][1]
    difference_S = np.asarray([compute(one[s]) - compute(two[s]) for s in seeds])
    difference_S = difference_S[~np.isnan(difference_S)]
    if len(difference_S) > 1:
      differences.append(difference_S)
      rows.append([' '.join([f'{arm} minus {other}', *level]), f'{len(difference_S)}'])
  adjusted = holm([sign_flip(d) for d in differences])
  for row, d, p in zip(rows, differences, adjusted, strict=True):
    low, high = bootstrap_interval(d)
    row += [f'{d.mean():+.3f}', f'{low:+.3f} to {high:+.3f}', f'{p:.3f}']
    row.append(f'{smallest_effect(d):.3f}')
  header = ['difference', 'seeds', 'mean', '95 % interval', 'p, Holm', 'visible from']
  return tables.markdown(rows, header, 'lrrrrr') if rows else ''


def load(folder: str) -> types.ModuleType:
  """experiments.py of a folder, with what its claims.py adds.

  Raises:
    ValueError: one of them is missing.
  """
  module = types.ModuleType('experiments')
  for name in ('experiments.py', 'claims.py'):
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
      raise ValueError(f'{folder} has no {name}')
    spec = importlib.util.spec_from_file_location(name.removesuffix('.py'), path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    vars(module).update(
      {key: value for key, value in vars(found).items() if key[:1] != '_'}
    )
  return module


def read(folder: str) -> Mapping[str, Mapping[str, Result]]:
  """Experiment -> run -> result, of what is there.

  Raises:
    ValueError: a result is refused.
  """
  module = load(folder)
  return {
    name: sweep_grid.read(
      module.get_experiment(name), os.path.join(folder, 'results', name)
    )
    for name in module.NAMES
  }


def page(folder: str) -> str:
  """README.md of a folder, its claims and the tables of its experiments written anew.

  Raises:
    ValueError: the markers of a table are not there, or a result is refused.
  """
  module, results = load(folder), read(folder)
  with open(os.path.join(folder, 'README.md'), encoding='utf-8') as file:
    text = _between(file.read(), 'claims', claim_verdicts.table(module, results))
  for name, found in results.items():
    content = EMPTY
    if found:
      first, planned = next(iter(found.values())), module.get_experiment(name)
      made = (
        f'{len(found)} of {len(sweep_grid.runs(planned))} runs, at commit '
        f'`{first["commit"][:12]}`.'
      )
      arm, others, outcome = module.COMPARED[name]
      parts = [made, means(found), comparisons(found, arm, others, outcome)]
      if name in module.FIGURES:
        parts.insert(1, f'![{name}](figures/{name}.png)')
      content = '\n\n'.join(part for part in parts if part)
    text = _between(text, f'results of {name}', content)
  if hasattr(module, 'RECORDED'):
    stored = claim_recorded.read(folder)
    shown = claim_recorded.table(stored) if stored else EMPTY
    text = _between(text, 'results of recorded', shown)
  return text


def _between(text: str, what: str, content: str) -> str:
  """The text with this content between the markers of `what`."""
  begin, end = f'<!-- {what} -->', f'<!-- end of {what.removeprefix("results of ")} -->'
  if text.count(begin) != 1 or text.count(end) != 1:
    raise ValueError(f'README.md needs the markers {begin} and {end}, once each')
  block = f'{begin}\n\n{content}\n\n{end}'
  pattern = re.escape(begin) + '.*?' + re.escape(end)
  return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page; with --check the exit status is 1 where it would change."""
  parser = argparse.ArgumentParser(description='The numbers of a page from its results')
  parser.add_argument('folder')
  parser.add_argument('--check', action='store_true')
  parser.add_argument('--runs', default='', help='workdirs, to read their last batches')
  flags = parser.parse_args(argv)
  if flags.runs:
    claim_recorded.store(load(flags.folder), flags.folder, flags.runs)
  path, text = os.path.join(flags.folder, 'README.md'), page(flags.folder)
  if flags.check:
    with open(path, encoding='utf-8') as file:
      return int(file.read() != text)
  files.write(path, text)
  claim_plots.write(load(flags.folder), read(flags.folder), flags.folder)
  return 0


if __name__ == '__main__':
  try:
    sys.exit(main())
  except ValueError as error:
    sys.exit(f'bapo_jax: {error}')
