"""Writes the numbers of a page of papers/ from the results of its experiments.

  python -m lab.claims papers/balanced_po [--check] [--runs=runs/balanced_po]

Writes the claims with their verdicts and the tables of every experiment (evidence.py)
between markers in README.md, and the figures (figures.py) to figures/. --runs first
summarises the recorded batches of these workdirs (counterfactual.py). --check writes
nothing. Figures need matplotlib (requirements/notebooks.txt). A folder of papers/ has
README.md, results/<experiment>.jsonl (`experiments`), experiments.py with NAMES and
`get_experiment`, and claims.py with CLAIMS, SHOWN (experiment -> evidence.Shown) and,
optionally, RECORDED.
"""

import argparse
import pathlib
import statistics
import types
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_jax.runtime import files
from lab import counterfactual, evidence, experiments, figures
from lab.evidence import Shown
from lab.experiments import Result

EMPTY = 'Not run: there are no results yet.'
WAITING = 'Not finished: the results are shown when all runs are done.'


def load(folder: str) -> types.SimpleNamespace:
  """Returns the names of a folder's experiments.py and claims.py.

  Of a name that both have, the value is that of claims.py.

  Raises:
    ValueError: one of the files is missing.
  """
  parts = [experiments.run_file(f'{folder}/{x}.py') for x in ('experiments', 'claims')]
  return types.SimpleNamespace(**vars(parts[0]) | vars(parts[1]))


def read_page(module: Any, folder: str) -> dict[str, dict[str, Result]]:
  """Reads experiment -> run -> result; see `experiments.read`.

  An unfinished experiment that is shown as a whole has no results.
  """
  results = {}
  for name in module.NAMES:
    experiment = module.get_experiment(name)
    stored = experiments.read(experiment, f'{folder}/results/{name}')
    partial = len(stored) < len(experiments.labels(experiment))
    results[name] = {} if partial and module.SHOWN[name].whole else stored
  return results


def page(
  text: str, module: Any, results: Mapping[str, Mapping[str, Result]], folder: str
) -> str:
  """Returns the text of a README.md with all generated tables updated.

  `module` describes the page (`load`); `results` is experiment -> run -> result.

  Raises:
    ValueError: the text lacks the markers of a table.
  """
  text = between(text, 'claims', evidence.verdicts(module, results))
  for name, by_run in results.items():
    planned = len(experiments.labels(module.get_experiment(name)))
    shown = module.SHOWN[name]
    content = WAITING if shown.whole else EMPTY
    if by_run:
      content = section(by_run, planned, shown)
    text = between(text, f'results of {name}', content)
  if hasattr(module, 'RECORDED'):
    stored = experiments.read_runs(f'{folder}/results/recorded')
    content = counterfactual.recorded_table([*stored.values()]) if stored else EMPTY
    text = between(text, 'results of recorded', content)
  return text


def section(results: Mapping[str, Result], planned: int, shown: Shown) -> str:
  """Returns the part of a page about one experiment: commits, figures, tables."""
  commits = experiments.commits(results.values())
  noun = 'commit' + 's' * (',' in commits)
  seconds = statistics.median(result['seconds'] for result in results.values())
  parts = [
    f'{len(results)} of {planned} runs, at {noun} {commits}; training took '
    f'{seconds:.0f} s a run on one core (median, warm start excluded).'
  ]
  parts += [f'![{name}](figures/{name}.png)' for name in shown.figures]
  parts += [evidence.means(results, columns) for columns in shown.tables]
  for arm, others, outcome, tested in shown.compared:
    pairs = evidence.differences_of(results, arm, others, outcome)
    parts.append(evidence.difference_table(pairs, outcome, tested))
  if shown.ordered:
    parts.append(evidence.order_table(results, shown.ordered))
  if shown.further:
    parts.append(shown.further(results))
  return '\n\n'.join(part for part in parts if part)


def between(text: str, what: str, content: str) -> str:
  """Replaces the text between the markers of `what`."""
  begin, end = f'<!-- {what} -->', f'<!-- end of {what.removeprefix("results of ")} -->'
  before, found, rest = text.partition(begin)
  _, found_end, after = rest.partition(end)
  if not found or not found_end:
    raise ValueError(f'the page must have {begin} and, after it, {end}')
  return f'{before}{begin}\n\n{content}\n\n{end}{after}'


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page; with --check, only returns 1 if the page would change, else 0."""
  parser = argparse.ArgumentParser(description='Writes a page of papers/.')
  parser.add_argument('folder')
  parser.add_argument('--check', action='store_true')
  parser.add_argument('--runs', default='', help='workdirs with recorded batches')
  flags = parser.parse_args(argv)
  module = load(flags.folder)
  if flags.runs:
    counterfactual.store_summaries(module, flags.folder, flags.runs)
  results = read_page(module, flags.folder)
  path = pathlib.Path(flags.folder, 'README.md')
  before = path.read_text(encoding='utf-8')
  text = page(before, module, results, flags.folder)
  if flags.check:
    return int(before != text)
  files.write(path, text)
  figures.write(module, results, flags.folder)
  return 0


if __name__ == '__main__':
  experiments.command(main)
