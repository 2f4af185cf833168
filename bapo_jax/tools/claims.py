"""From the results of experiments to the numbers of a page, as its protocol has them.

  python -m bapo_jax.tools.claims papers/2510.18927 [--check] [--runs=runs/2510.18927]

writes into README.md, between markers: the claims with their verdicts
(claim_verdicts.py), and for every experiment what SHOWN names: means of outcomes and
differences of arms, seed by seed (claim_shown.py), and figures (claim_plots.py). --runs
first reads the recorded batches of the workdirs there (claim_recorded.py). --check
writes nothing.

A folder of papers/ holds README.md, results/<experiment>/<run>.json, and
  experiments.py: NAMES and `get_experiment`, what is run;
  claims.py: CLAIMS and SHOWN (experiment -> claim_shown.Shown), what is made of it;
    perhaps RECORDED.
"""

import argparse
import importlib.util
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence

from bapo_jax.runtime import files
from bapo_jax.tools import (
  claim_plots,
  claim_recorded,
  claim_shown,
  claim_verdicts,
  sweep_grid,
)
from bapo_jax.tools.claim_shown import Shown
from bapo_jax.tools.claim_statistics import Result

EMPTY = 'Not run: there are no results yet.'


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
    planned = len(sweep_grid.runs(module.get_experiment(name)))
    content = section(found, planned, module.SHOWN[name]) if found else EMPTY
    text = _between(text, f'results of {name}', content)
  if hasattr(module, 'RECORDED'):
    stored = claim_recorded.read(folder)
    shown = claim_recorded.table(stored) if stored else EMPTY
    text = _between(text, 'results of recorded', shown)
  return text


def section(results: Mapping[str, Result], planned: int, shown: Shown) -> str:
  """Of one experiment: which runs, the figures, means and differences."""
  commits = dict.fromkeys(f'`{result["commit"][:12]}`' for result in results.values())
  of_them = 'commit' if len(commits) == 1 else 'commits'
  figures = [f'![{name}](figures/{name}.png)' for name in shown.figures]
  parts = [
    f'{len(results)} of {planned} runs, at {of_them} {", ".join(commits)}.',
    *figures,
    *(claim_shown.means(results, columns) for columns in shown.tables),
    *(claim_shown.comparisons(results, compared) for compared in shown.compared),
  ]
  return '\n\n'.join(part for part in parts if part)


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
