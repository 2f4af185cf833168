"""Several runs that differ by their rules alone, and the table that compares them.

1. `run` trains the cells of `config.cells` one after another in <workdir>/<cell>, from
   one warm start; a finished cell is left alone, so the same command resumes;
2. `facts` reads what the table needs off a finished cell;
3. `over_seeds` puts the sweeps of several seeds side by side: means, standard errors,
   and differences to the first cell, seed by seed.

Cells are compared at equal `config.responses`: re-evaluations count as any other.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence

import jax
import numpy as np

from bapo_jax.runtime import files, metrics
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import writable
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate, experiment, report, setup
from bapo_jax.training.config import Config

# What is averaged over seeds: name -> (heading, format of a mean).
COLUMNS = {
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
LEGEND = (
  'Accuracy on the held-out problems at the temperature of the evaluation, ± one '
  'standard error. "Failed before" are the held-out problems that the starting policy '
  'got wrong in all its responses: their mean accuracy afterwards, and the share with '
  'one right response at least; some of them it failed by bad luck. Seconds leave out '
  'the warm start, which the cells share.'
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
    ValueError: a cell's config does not fit together; before any cell is trained.
  """
  cells = {name: cell(config, name, *rules) for name, *rules in config.cells}
  setup.check_available(config)
  setup.make_mesh(config)
  with writable(workdir):
    return _train(config, cells, workdir)


def _train(config: Config, cells: dict[str, Config], workdir: str) -> int:
  for i, (name, made) in enumerate(cells.items(), 1):
    folder = os.path.join(workdir, name)
    experiment.claim(folder, made)
    if finished(folder, made):
      log(f'Cell {i} of {len(cells)}, {name}: finished before, left alone.')
      continue
    log(f'Cell {i} of {len(cells)}, {name}')
    share_warm_start(workdir, name, list(cells))
    if status := experiment.train(made, folder):
      return status
    jax.clear_caches()  # the next cell compiles functions of its own
  found = {name: facts(os.path.join(workdir, name)) for name in cells}
  anonymous = config_lib.plain(config) | {'seed': None}
  files.write_json(
    os.path.join(workdir, 'sweep.json'),
    {
      'seed': config.seed,
      'config': config_lib.fingerprint(anonymous),
      'cells': report.plain(found),
    },
  )
  return _publish(workdir, f'{config.title}, seed {config.seed}', of_one(found))


def finished(folder: str, config: Config) -> bool:
  """Has this very config run to its end there?"""
  path = os.path.join(folder, 'report.json')
  if not os.path.exists(path):
    return False
  with open(path) as file:
    return json.load(file)['config_hash'] == config_lib.fingerprint(
      config_lib.plain(config)
    )


def share_warm_start(workdir: str, name: str, cells: Sequence[str]) -> None:
  """Copies another cell's warm start; it is looked up by what it was made of."""
  own = os.path.join(workdir, name, 'warmstart')
  others = (os.path.join(workdir, other, 'warmstart') for other in cells)
  source = next(filter(os.path.isdir, others), None)
  if source is None or os.path.exists(own):
    return
  shutil.rmtree(own + '.tmp', ignore_errors=True)
  shutil.copytree(source, own + '.tmp')
  os.replace(own + '.tmp', own)  # a kill leaves a whole copy or none


def facts(folder: str) -> dict[str, float]:
  """What COLUMNS name, of a finished run, and the standard errors over problems."""
  with open(os.path.join(folder, 'report.json')) as file:
    told = json.load(file)
  correct = []
  for step in (0, told['steps']):
    with open(os.path.join(folder, 'eval', f'{step}.json')) as file:
      done = json.load(file)
    verdicts = [sample['correct'] for sample in done['samples']]
    correct.append(np.asarray(verdicts).reshape(-1, done['result']['group_size']))
  before_PG, after_PG = correct
  failed_PG = after_PG[~before_PG.any(1)]
  some = len(failed_PG) > 0
  return {
    'before': float(before_PG.mean()),
    'before_error': evaluate.stderr(before_PG),
    'after': float(after_PG.mean()),
    'after_error': evaluate.stderr(after_PG),
    'failed': len(failed_PG),
    'failed_after': float(failed_PG.mean()) if some else math.nan,
    'failed_after_error': evaluate.stderr(failed_PG) if some else math.nan,
    'failed_solved': float(failed_PG.any(1).mean()) if some else math.nan,
    'failed_solved_error': evaluate.stderr(failed_PG.any(1, keepdims=True)),
    'responses': told['responses'],
    'steps': told['steps'],
    'updates': metrics.read(folder)[-1]['learner/updates'],
    'train_s': told['wall_s'] - told['phases'].get('warm start', 0.0),
  }


def of_one(found: dict[str, dict]) -> dict[str, dict]:
  """Cell -> column -> (mean, standard error over problems or nan), of one seed."""
  return {
    name: {c: (f[c], f.get(f'{c}_error', math.nan)) for c in COLUMNS}
    for name, f in found.items()
  }


def over_seeds(sweeps: Sequence[dict]) -> dict[str, dict]:
  """Cell -> column -> (mean, standard error), both over seeds.

  Under 'minus <column>' the differences to the first cell of the same seed: what seeds
  have in common (warm start, prompts asked) cancels. With one seed errors are nan.

  Args:
    sweeps: what `run` wrote to sweep.json, one a seed.
  """
  first = next(iter(sweeps[0]['cells']))

  def column(name, c):
    value = (sweep['cells'][name][c] for sweep in sweeps)
    return np.asarray([math.nan if v is None else v for v in value], float)

  return {
    name: {c: mean_and_error(column(name, c)) for c in COLUMNS}
    | {
      f'minus {c}': mean_and_error(column(name, c) - column(first, c))
      for c in COMPARED
      if name != first
    }
    for name in sweeps[0]['cells']
  }


def mean_and_error(value_S) -> tuple[float, float]:
  """Mean over seeds and its standard error, s / sqrt(n); nan for one seed."""
  n = len(value_S)
  error = float(value_S.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
  return float(value_S.mean()), error


def table(workdir: str) -> int:
  """Writes table.md and table.json of the sweeps in the folders of `workdir`.

  Raises:
    ValueError: there is no finished sweep, or two that cannot be compared.
  """
  folders = sorted(os.listdir(workdir)) if os.path.isdir(workdir) else []
  paths = [os.path.join(workdir, name, 'sweep.json') for name in folders]
  paths = [path for path in paths if os.path.exists(path)]
  if not paths:
    raise ValueError(
      f'--workdir={workdir} holds no folder with a finished sweep (sweep.json); run '
      'launch/sweep.sh, or give the folder above those of the seeds'
    )
  sweeps = []
  for path in paths:
    with open(path) as file:
      sweeps.append(json.load(file))
  for path, sweep in zip(paths, sweeps, strict=True):
    if sweep['config'] != sweeps[0]['config']:
      raise ValueError(
        f'{path} is of another config than {paths[0]}, and not of another seed only; '
        'keep them in different folders'
      )
  seeds = [sweep['seed'] for sweep in sweeps]
  if len(set(seeds)) < len(seeds):
    raise ValueError(f'--workdir={workdir} holds a seed twice: {seeds}; remove one')
  listed = ', '.join(str(seed) for seed in seeds)
  compared = over_seeds(sweeps)
  files.write_json(
    os.path.join(workdir, 'table.json'),
    {'seeds': seeds, 'cells': {k: _json(v) for k, v in compared.items()}},
  )
  title = f'{len(seeds)} seed(s): {listed}; ± is the standard error over seeds'
  return _publish(workdir, title, compared, 'table.md')


def _json(columns: dict[str, tuple]) -> dict:
  return {
    c: report.plain({'mean': mean, 'stderr': error})
    for c, (mean, error) in columns.items()
  }


def markdown(cells: dict[str, dict]) -> str:
  """The cells as a table, and below it the differences to the first, if there are."""
  first = next(iter(cells))
  tables = [_rows('cell', {c: h for c, (h, _) in COLUMNS.items()}, cells)]
  if others := {k: v for k, v in cells.items() if f'minus {COMPARED[0]}' in v}:
    heads = {f'minus {c}': COLUMNS[c][0] for c in COMPARED}
    tables.append(_rows(f'minus {first}', heads, others))
  return '\n\n'.join(tables)


def _rows(corner: str, heads: dict[str, str], cells: dict[str, dict]) -> str:
  lines = [f'| {corner} | {" | ".join(heads.values())} |']
  lines.append('|:--|' + '--:|' * len(heads))
  for name, columns in cells.items():
    shown = [_cell(c, *columns[c]) for c in heads]
    lines.append(f'| {name} | {" | ".join(shown)} |')
  return '\n'.join(lines)


def _cell(column: str, mean: float, error: float) -> str:
  form = COLUMNS[column.removeprefix('minus ')][1]
  sign = '+' if column.startswith('minus ') else ''
  shown = '-' if math.isnan(mean) else f'{mean:{sign}{form}}'
  return shown if math.isnan(error) else f'{shown} ± {error:{form}}'


def _publish(workdir: str, title: str, cells: dict, name: str = 'sweep.md') -> int:
  """The table on the screen and in a file."""
  path = os.path.join(workdir, name)
  text = f'{title}\n\n{markdown(cells)}\n\n{LEGEND}\n'
  files.write(path, text)
  log(f'{text}\nTable: {path}')
  return 0
