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


def summarise(workdir: str, arms: Mapping[str, sweep_grid.Knobs]) -> dict[str, Any]:
  """Of the newest recorded step of a run: what each arm's rules make of its tokens.

  Returns:
    tokens: how many; inside: the share of them that no point of the search cuts;
    arms: name -> the numbers of `counterfactual.summary`, five digits.

  Raises:
    ValueError: nothing is recorded.
  """
  recorded = counterfactual.read(workdir)
  found = {}
  for name, knobs in arms.items():
    applied = counterfactual.apply(recorded, counterfactual.config_of(recorded, knobs))
    numbers = counterfactual.summary(recorded, applied)
    found[name] = {key: float(f'{value:.5g}') for key, value in numbers.items()}
  log_ratio_BT = recorded.logp_BT - recorded.behavior_logp_BT
  ratio = np.exp(log_ratio_BT[recorded.loss_mask_BT])
  inside = ((ratio > INSIDE[0]) & (ratio < INSIDE[1])).mean()
  return {'tokens': len(ratio), 'inside': float(f'{inside:.5g}'), 'arms': found}


def table(stored: Sequence[Mapping[str, Any]]) -> str:
  """Mean and standard error over runs, a line per arm; and the tokens inside."""
  rows = []
  for arm in stored[0]['arms']:
    row = [arm]
    for column in COLUMNS:
      mean, error = mean_and_error([one['arms'][arm][column] for one in stored])
      row.append(f'{mean:.3f} ± {error:.3f}')
    rows.append(row)
  mean, error = mean_and_error([one['inside'] for one in stored])
  tokens = sum(one['tokens'] for one in stored)
  low, high = INSIDE
  inside = (
    f'{len(stored)} recorded steps, {tokens} tokens with an advantage: '
    f'{mean:.1%} ± {error:.1%} of them have a ratio between {low} and {high}.'
  )
  header = ['rules of', *COLUMNS.values()]
  return f'{inside}\n\n{tables.markdown(rows, header, "l" + "r" * len(COLUMNS))}'


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
      text = json.dumps(summarise(workdir, arms), separators=(',', ':'))
      files.write(os.path.join(where, f'{name}.json'), text + '\n')
