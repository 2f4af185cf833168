"""Applies the rules of all arms to a recorded batch of every run.

`store` reads the newest recorded step of the runs named by RECORDED of claims.py,
(experiment, arm of the runs, arms whose rules are applied), and writes a small file per
run into results/recorded; `table` renders these files. They show the mechanism behind a
verdict: how many of the same tokens each rule cuts, and how much of the gradient it
leaves to tokens with A > 0.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.run import step_record
from bapo_jax.runtime import files, tables
from bapo_jax.runtime.statistics import mean_and_error
from lab import counterfactual, experiments
from lab.counterfactual import Recorded
from lab.experiments import Knobs

COLUMNS = {  # of counterfactual.summary -> heading
  'low': 'lower bound',
  'high': 'upper bound',
  'share': 'share',
  'cut_positive': 'cut, A > 0',
  'cut_negative': 'cut, A < 0',
}
INSIDE = (0.9, 1.2)  # ratios that no bounds of the search cut (section 5)
STALER = (0, 1, 2, 4, 8)  # factors of the recorded log-ratios
ENDS = ('start', 'between', 'ends')  # where a search can stop


def summarise(workdir: str, arms: Mapping[str, Knobs], arm: str) -> dict[str, Any]:
  """Applies every arm's rules to the newest recorded step of a run.

  Args:
    arm: the arm of the run, a key of `arms`.

  Returns:
    tokens: their number; inside: the share of them that no bounds of the search cut;
    arms: name -> `counterfactual.summary` and inside, five digits;
    staler: factor of the log-ratios -> the same under the run's own rules;
    searches: number of recorded updates with bounds at the start, between, and at both
      ends of the search; all 0 if the clip rule is not `balanced`.

  Raises:
    ValueError: no step is recorded.
  """
  recorded = counterfactual.read(workdir)

  def numbers(name: str, rows: Recorded) -> dict[str, float]:
    applied = counterfactual.apply(rows, counterfactual.config_of(rows, arms[name]))
    summary = counterfactual.summary(rows, applied) | {'inside': _inside(rows)}
    return {key: float(f'{value:.5g}') for key, value in summary.items()}

  return {
    'tokens': int(recorded.loss_mask_BT.sum()),
    'inside': float(f'{_inside(recorded):.5g}'),
    'arms': {name: numbers(name, recorded) for name in arms},
    'staler': {
      str(times): numbers(arm, counterfactual.staler(recorded, times))
      for times in STALER
    },
    'searches': _searches(workdir, recorded),
  }


def _searches(workdir: str, recorded: Recorded) -> dict[str, int]:
  counts, clip = dict.fromkeys(ENDS, 0), recorded.config.clip
  if clip.rule != 'balanced':
    return counts
  groups = step_record.read(workdir, recorded.step)
  bounds = {g['update']: (g['low'], g['high']) for g in groups if g['update']}
  start, end = zip(clip.balanced.low, clip.balanced.high, strict=True)
  for pair in bounds.values():
    at_end = 'ends' if np.allclose(pair, end) else 'between'
    counts['start' if np.allclose(pair, start) else at_end] += 1
  return counts


def _inside(recorded: Recorded) -> float:
  log_ratio_BT = recorded.logp_BT - recorded.behavior_logp_BT
  ratio = np.exp(log_ratio_BT[recorded.loss_mask_BT])
  return float(((ratio > INSIDE[0]) & (ratio < INSIDE[1])).mean())


def table(stored: Sequence[Mapping[str, Any]]) -> str:
  """Returns tables of the stored runs, a row per arm and a row per staleness.

  Numbers are means and standard errors over runs.
  """
  mean, error = mean_and_error([run['inside'] for run in stored])
  tokens = sum(run['tokens'] for run in stored)
  low, high = INSIDE
  inside = (
    f'{len(stored)} recorded steps, {tokens} tokens with an advantage: '
    f'{mean:.1%} ± {error:.1%} of them have a ratio between {low} and {high}.'
  )
  count = {at: sum(run['searches'][at] for run in stored) for at in ENDS}
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
      mean, error = mean_and_error([run[part][name][column] for run in stored])
      row.append(f'{mean:.3f} ± {error:.3f}')
    rows.append(row)
  return tables.markdown(rows, [what, *columns.values()], 'l' + 'r' * len(columns))


def read(folder: str) -> list[dict[str, Any]]:
  """Returns the stored summaries, ordered by run name."""
  path = os.path.join(folder, 'results', 'recorded')
  names = sorted(os.listdir(path)) if os.path.isdir(path) else []
  return [files.read_json(os.path.join(path, n), experiments.WAY_OUT) for n in names]


def store(module: Any, folder: str, runs: str) -> None:
  """Stores the summaries of the runs whose workdirs exist.

  Args:
    module: the description of the page, from `claims.load`.
    runs: folder of the workdirs.
  """
  experiment, arm, others = module.RECORDED
  arms = {name: module.ARMS[name] for name in others}
  path = os.path.join(folder, 'results', 'recorded')
  for name, run in experiments.runs(module.get_experiment(experiment)).items():
    workdir = os.path.join(runs, experiment, name)
    if run.arm == arm and os.path.isdir(workdir):
      experiments.write(path, name, summarise(workdir, arms, arm))
