"""Runs that differ by their rules alone, and the table that compares them.

1. `run` trains the cells of `config.cells` one after another in <workdir>/<cell>, from
   one warm start; a finished cell is left alone, so the same command resumes;
2. `read_cell` reads the quantities of the table from the files of a finished cell;
3. `table` puts the sweeps of several seeds together: means, standard errors, and
   differences to the first cell, seed by seed.

Cells are compared at equal `config.responses`: re-evaluations count as any other.
"""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bapo_jax.run import experiment, report
from bapo_jax.runtime import files, metrics, tables
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.statistics import clustered_error, mean_and_error
from bapo_jax.runtime.workdir import locked, writable
from bapo_jax.training import config as config_lib
from bapo_jax.training import resolve
from bapo_jax.training.config import Config


class Estimate(NamedTuple):
  """A mean and its standard error; nan where one is not known."""

  mean: float
  error: float


Row = dict[str, Estimate]  # quantity -> estimate, of one cell

# Quantities averaged over seeds: name -> (heading, format of a mean).
QUANTITIES = {
  'before': ('accuracy before', '.3f'),
  'after': ('accuracy after', '.3f'),
  'failed_after': ('of problems failed before', '.3f'),
  'failed_solved': ('of those ever solved', '.3f'),
  'responses': ('responses', '.0f'),
  'steps': ('steps', '.1f'),
  'updates': ('updates', '.0f'),
  'train_s': ('seconds', '.0f'),
}
COMPARED = ('after', 'failed_after', 'failed_solved')  # with the first cell
MINUS = 'minus '  # begins the name of a difference to the first cell
LEGEND = (
  'Accuracy on the held-out problems at the temperature of the evaluation, ± one '
  'standard error. "Failed before" are the held-out problems of which the starting '
  'policy got every response wrong, some of them by bad luck: their mean accuracy '
  'afterwards, and the share with at least one right response. Seconds leave out the '
  'warm start, which the cells share.'
)


def cell(config: Config, name: str, batch: str, clip: str) -> Config:
  """The config of one cell: a single run with these two rules."""
  made = config.with_values(batch={'rule': batch}, clip={'rule': clip})
  return made.model_copy(update={'cells': (), 'title': f'{config.title}: {name}'})


def run(config: Config, workdir: str) -> int:
  """Trains the cells that are not finished and writes sweep.md and sweep.json.

  Returns:
    0 when all are finished, else the exit status of the cell that was stopped.

  Raises:
    ValueError: data, devices or the workdir do not suit, or another process is at work
      there; before any cell is trained.
  """
  cells = {name: cell(config, name, *rules) for name, *rules in config.cells}
  resolve.check_available(config)
  resolve.make_mesh(config)
  with locked(workdir), writable(workdir):
    return _train(config, cells, workdir)


def _train(config: Config, cells: dict[str, Config], workdir: str) -> int:
  """Trains and compares the cells, name -> config; returns the exit status."""
  for i, (name, made) in enumerate(cells.items(), 1):
    folder = os.path.join(workdir, name)
    experiment.claim(folder, made)
    if is_finished(folder, made):
      log(f'Cell {i} of {len(cells)}, {name}: finished before, left alone.')
      continue
    log(f'Cell {i} of {len(cells)}, {name}')
    share_warm_start(workdir, name, list(cells))
    if status := experiment.train(made, folder):
      return status
    jax.clear_caches()  # the next cell compiles functions of its own
  found = {name: read_cell(os.path.join(workdir, name)) for name in cells}
  without_seed = config_lib.plain(config) | {'seed': None}
  files.write_json(
    os.path.join(workdir, 'sweep.json'),
    {
      'seed': config.seed,
      'config': config_lib.fingerprint(without_seed),
      'cells': report.plain(found),
    },
  )
  return _publish(workdir, f'{config.title}, seed {config.seed}', of_one_seed(found))


def is_finished(folder: str, config: Config) -> bool:
  """Whether this very config ran to its end in the folder."""
  path = os.path.join(folder, 'report.json')
  if not os.path.exists(path):
    return False
  fingerprint = config_lib.fingerprint(config_lib.plain(config))
  try:
    return _read_json(path)['config_hash'] == fingerprint
  except (ValueError, TypeError, KeyError):  # the run goes on and writes it again
    return False


def _read_json(path: str) -> Any:
  return files.read_json(path, 'remove it, and run the command of the sweep again')


def share_warm_start(workdir: str, name: str, cells: Sequence[str]) -> None:
  """Copies the warm start of another cell, if this one has none.

  A warm start lies under the fingerprint of its settings: one that does not fit is not
  found, and is made anew.
  """
  own = os.path.join(workdir, name, 'warmstart')
  others = (os.path.join(workdir, other, 'warmstart') for other in cells)
  source = next(filter(os.path.isdir, others), None)
  if source is None or os.path.exists(own):
    return
  files.copy_folder(source, own)


def read_cell(folder: str) -> dict[str, float]:
  """QUANTITIES of a finished run, and the standard errors over problems."""
  summary = _read_json(os.path.join(folder, 'report.json'))
  correct = []
  for step in (0, summary['steps']):
    evaluation = _read_json(os.path.join(folder, 'eval', f'{step}.json'))
    verdicts = [sample['correct'] for sample in evaluation['samples']]
    correct.append(np.asarray(verdicts).reshape(-1, evaluation['result']['group_size']))
  before_PG, after_PG = correct
  failed_PG = after_PG[~before_PG.any(1)]
  some = len(failed_PG) > 0
  return {
    'before': float(before_PG.mean()),
    'before_error': clustered_error(before_PG),
    'after': float(after_PG.mean()),
    'after_error': clustered_error(after_PG),
    'failed': len(failed_PG),
    'failed_after': float(failed_PG.mean()) if some else math.nan,
    'failed_after_error': clustered_error(failed_PG) if some else math.nan,
    'failed_solved': float(failed_PG.any(1).mean()) if some else math.nan,
    'failed_solved_error': clustered_error(failed_PG.any(1, keepdims=True)),
    'responses': summary['responses'],
    'steps': summary['steps'],
    'updates': metrics.read(folder)[-1]['learner/updates'],
    'train_s': summary['wall_s'] - summary['phases'].get('warm start', 0.0),
  }


def of_one_seed(found: dict[str, dict[str, float]]) -> dict[str, Row]:
  """The row of every cell; errors are over problems, nan where there is none."""
  return {
    name: {q: Estimate(f[q], f.get(f'{q}_error', math.nan)) for q in QUANTITIES}
    for name, f in found.items()
  }


def over_seeds(sweeps: Sequence[dict[str, Any]]) -> dict[str, Row]:
  """The row of every cell: means and standard errors over seeds.

  'minus <quantity>' are the differences to the first cell of the same seed: what seeds
  have in common (warm start, prompts) cancels. With one seed errors are nan.

  Args:
    sweeps: the content of sweep.json, one per seed.
  """
  first = next(iter(sweeps[0]['cells']))

  def over(name: str, quantity: str) -> np.ndarray:
    values = (sweep['cells'][name][quantity] for sweep in sweeps)
    return np.asarray([math.nan if v is None else v for v in values], float)

  def row(name: str) -> Row:
    found = {q: Estimate(*mean_and_error(over(name, q))) for q in QUANTITIES}
    for q in COMPARED if name != first else ():
      found[MINUS + q] = Estimate(*mean_and_error(over(name, q) - over(first, q)))
    return found

  return {name: row(name) for name in sweeps[0]['cells']}


def table(workdir: str) -> int:
  """Writes table.md and table.json of the sweeps in the folders of `workdir`.

  Returns:
    The exit status, 0.

  Raises:
    ValueError: no sweep is finished, or two cannot be compared.
  """
  sweeps = _finished_sweeps(workdir)
  seeds = [sweep['seed'] for sweep in sweeps]
  if len(set(seeds)) < len(seeds):
    raise ValueError(f'--workdir={workdir} holds a seed twice: {seeds}; remove one')
  listed = ', '.join(str(seed) for seed in seeds)
  compared = over_seeds(sweeps)
  files.write_json(
    os.path.join(workdir, 'table.json'),
    {'seeds': seeds, 'cells': {name: _json(row) for name, row in compared.items()}},
  )
  title = f'{len(seeds)} seed(s): {listed}; ± is the standard error over seeds'
  return _publish(workdir, title, compared, 'table.md')


def _finished_sweeps(workdir: str) -> list[dict[str, Any]]:
  """The content of every sweep.json in the folders of `workdir`, by folder name."""
  folders = sorted(os.listdir(workdir)) if os.path.isdir(workdir) else []
  paths = [os.path.join(workdir, name, 'sweep.json') for name in folders]
  paths = [path for path in paths if os.path.exists(path)]
  if not paths:
    raise ValueError(
      f'--workdir={workdir} holds no folder with a finished sweep (sweep.json); run '
      'launch/sweep.sh, or give the folder above those of the seeds'
    )
  sweeps = [_read_json(path) for path in paths]
  for path, sweep in zip(paths, sweeps, strict=True):
    if sweep['config'] != sweeps[0]['config']:
      raise ValueError(
        f'{path} is of another config than {paths[0]}, and not of another seed only; '
        'keep them in different folders'
      )
  return sweeps


def _json(row: Row) -> dict[str, Any]:
  return {
    quantity: report.plain({'mean': each.mean, 'stderr': each.error})
    for quantity, each in row.items()
  }


def markdown(cells: dict[str, Row]) -> str:
  """The cells as a table, and below it the differences to the first, if there are."""
  first = next(iter(cells))
  parts = [_table('cell', QUANTITIES, cells)]
  if others := {name: row for name, row in cells.items() if MINUS + COMPARED[0] in row}:
    parts.append(_table(f'minus {first}', [MINUS + q for q in COMPARED], others))
  return '\n\n'.join(parts)


def _table(corner: str, quantities: Iterable[str], cells: dict[str, Row]) -> str:
  names = list(quantities)
  header = [corner, *(QUANTITIES[name.removeprefix(MINUS)][0] for name in names)]
  rows = [[cell, *(_text(q, row[q]) for q in names)] for cell, row in cells.items()]
  return tables.markdown(rows, header, 'l' + 'r' * len(names))


def _text(quantity: str, estimate: Estimate) -> str:
  """An estimate as '0.500 ± 0.058', '0.500' without an error, '-' without a mean."""
  form = QUANTITIES[quantity.removeprefix(MINUS)][1]
  sign = '+' if quantity.startswith(MINUS) else ''
  text = '-' if math.isnan(estimate.mean) else f'{estimate.mean:{sign}{form}}'
  return text if math.isnan(estimate.error) else f'{text} ± {estimate.error:{form}}'


def _publish(
  workdir: str, title: str, cells: dict[str, Row], name: str = 'sweep.md'
) -> int:
  """Logs the table and writes it to a file of the workdir; returns 0."""
  path = os.path.join(workdir, name)
  text = f'{title}\n\n{markdown(cells)}\n\n{LEGEND}\n'
  files.write(path, text)
  log(f'{text}\nTable: {path}')
  return 0
