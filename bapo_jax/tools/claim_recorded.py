"""What the arms of an experiment would each have done with one recorded batch per run.

`store` reads the newest recorded step of the runs that a folder's RECORDED names,
(experiment, arm of the runs, arms whose rules are applied), and writes one small file
per run into results/recorded; `table` is what a page shows of them. It is the mechanism
behind a verdict: of the same tokens, how many each rule cuts, and what share of the
gradient it leaves to those with A > 0.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.run import step_record
from bapo_jax.runtime import files, tables
from bapo_jax.runtime.statistics import mean_and_error
from bapo_jax.tools import counterfactual, sweep_grid

FOLDER = 'recorded'
COLUMNS = {  # of counterfactual.summary -> heading
  'low': 'lower bound',
  'high': 'upper bound',
  'share': 'share',
  'cut_positive': 'cut, A > 0',
  'cut_negative': 'cut, A < 0',
}
INSIDE = (0.9, 1.2)  # ratios that no bounds of the search cut (section 5)
STALER = (0, 1, 2, 4, 8)  # times the recorded log-ratios
ORDER = ('start', 'between', 'ends')  # where a search can stop


def summarise(
  workdir: str, arms: Mapping[str, sweep_grid.Knobs], own: str
) -> dict[str, Any]:
  """Of the newest recorded step of a run: what each arm's rules make of its tokens.

  Args:
    own: the arm of the run, one of `arms`.

  Returns:
    tokens: how many; inside: the share of them that no point of the search cuts;
    arms: name -> the numbers of `counterfactual.summary`, five digits;
    staler: times the log-ratios -> the same of the own arm, with `inside`;
    searches: how many of the step's recorded updates have bounds at their start, at
    the ends of both ranges, and between; all 0 where the rule is not `balanced`.

  Raises:
    ValueError: nothing is recorded.
  """
  recorded = counterfactual.read(workdir)

  def numbers(name: str, rows: counterfactual.Recorded) -> dict[str, float]:
    applied = counterfactual.apply(rows, counterfactual.config_of(rows, arms[name]))
    found = counterfactual.summary(rows, applied) | {'inside': _inside(rows)}
    return {key: float(f'{value:.5g}') for key, value in found.items()}

  return {
    'tokens': int(recorded.loss_mask_BT.sum()),
    'inside': float(f'{_inside(recorded):.5g}'),
    'arms': {name: numbers(name, recorded) for name in arms},
    'staler': {
      str(times): numbers(own, counterfactual.staler(recorded, times))
      for times in STALER
    },
    'searches': _searches(workdir, recorded),
  }


def _searches(workdir: str, recorded: counterfactual.Recorded) -> dict[str, int]:
  groups = step_record.read(workdir, recorded.step)
  bounds = {g['update']: (g['low'], g['high']) for g in groups if g['update']}
  ranges = recorded.config.clip.balanced
  start, ends = zip(ranges.low, ranges.high, strict=True)
  counts = dict.fromkeys(ORDER, 0)
  for found in bounds.values() if recorded.config.clip.rule == 'balanced' else ():
    at = [
      name for name, x in (('start', start), ('ends', ends)) if np.allclose(found, x)
    ]
    counts[at[0] if at else 'between'] += 1
  return counts


def _inside(recorded: counterfactual.Recorded) -> float:
  """The share of the tokens whose ratio lies within INSIDE."""
  log_ratio_BT = recorded.logp_BT - recorded.behavior_logp_BT
  ratio = np.exp(log_ratio_BT[recorded.loss_mask_BT])
  return float(((ratio > INSIDE[0]) & (ratio < INSIDE[1])).mean())


def table(stored: Sequence[Mapping[str, Any]]) -> str:
  """The tokens inside, a line per arm, and one of the own arm per staleness.

  Mean and standard error over runs.
  """
  mean, error = mean_and_error([one['inside'] for one in stored])
  tokens = sum(one['tokens'] for one in stored)
  low, high = INSIDE
  inside = (
    f'{len(stored)} recorded steps, {tokens} tokens with an advantage: '
    f'{mean:.1%} ± {error:.1%} of them have a ratio between {low} and {high}.'
  )
  count = {at: sum(one['searches'][at] for one in stored) for at in ORDER}
  if total := sum(count.values()):
    inside += (
      f' Of their {total} recorded updates {count["start"]} have the bounds of the '
      f'start, {count["ends"]} those of both ends, {count["between"]} others.'
    )
  arms = _rows(stored, 'arms', 'rules of', COLUMNS)
  staler = _rows(stored, 'staler', 'log-ratios times', COLUMNS | {'inside': 'inside'})
  return '\n\n'.join([inside, arms, staler])


def _rows(
  stored: Sequence[Mapping[str, Any]], part: str, what: str, columns: Mapping[str, str]
) -> str:
  rows = []
  for name in stored[0][part]:
    row = [name]
    for column in columns:
      mean, error = mean_and_error([one[part][name][column] for one in stored])
      row.append(f'{mean:.3f} ± {error:.3f}')
    rows.append(row)
  return tables.markdown(rows, [what, *columns.values()], 'l' + 'r' * len(columns))


def read(folder: str) -> list[dict[str, Any]]:
  """What is stored, in the order of the runs' names."""
  where = os.path.join(folder, 'results', FOLDER)
  names = sorted(os.listdir(where)) if os.path.isdir(where) else []
  return [files.read_json(os.path.join(where, n), sweep_grid.WAY_OUT) for n in names]


def store(module: Any, folder: str, runs: str) -> None:
  """Stores the summaries of the runs that are there.

  Args:
    module: the paper's description, as `claims.load` gives it.
    runs: folder of the workdirs.
  """
  experiment, arm, others = module.RECORDED
  arms = {name: module.ARMS[name] for name in others}
  where = os.path.join(folder, 'results', FOLDER)
  os.makedirs(where, exist_ok=True)
  for name, run in sweep_grid.runs(module.get_experiment(experiment)).items():
    workdir = os.path.join(runs, experiment, name)
    if run.arm == arm and os.path.isdir(workdir):
      text = json.dumps(summarise(workdir, arms, arm), separators=(',', ':'))
      files.write(os.path.join(where, f'{name}.json'), text + '\n')
