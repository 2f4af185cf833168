"""The runs of protocol 5: every method at its own rate.

`rates_s1` and `rates_s2` try rates of the LADDER (stage 1), `own_s1` and `own_s2` train
every arm at its OWN rate (stage 2). `to_add` says which rates of stage 1 come next, and
`chosen` which rate is an arm's own:

  python -m papers.bench.rates s2
"""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from lab.experiments import Experiment, Result, read
from lab.outcomes import area
from papers.bench import experiments
from papers.bench.experiments import CLIPPING, DUAL, PUBLISHED, RIVALS, fixed

NAMES = ('rates_s1', 'rates_s2', 'own_s1', 'own_s2')
RESULTS = pathlib.Path(__file__).parent / 'results'
ARMS: dict[str, dict[str, Any]] = {
  'grpo': CLIPPING['grpo'],
  'low95_high120': fixed(0.95, 1.2),
  'low95_high200': fixed(0.95, 2.0),
  'balanced': CLIPPING['balanced'],
  'recipe': CLIPPING['recipe'],
  'gspo': PUBLISHED['gspo'],
  'vespo': PUBLISHED['vespo'],
  'cispo': RIVALS['cispo'],
  'tis': PUBLISHED['tis'],
  'sapo': PUBLISHED['sapo'],
  'decoupled': PUBLISHED['decoupled'] | {'clip.dual': DUAL},
  'dppo_tv': PUBLISHED['dppo_tv'],
}
LADDER = tuple(5e-5 * 2**k for k in range(7))
FIRST = LADDER[1:4]
LOWER = ('grpo', 'low95_high120', 'low95_high200')  # the arms of T1
COMMON = 6e-4  # the rate of protocol 2 in S1
# Setting -> arm -> rates tried so far, and arm -> own rate once stage 1 has chosen it.
TRIED: dict[str, dict[str, tuple[float, ...]]] = {
  's1': {arm: FIRST for arm in ARMS}
  | {arm: LADDER[:4] for arm in ('cispo', 'tis', 'sapo')}
  | {arm: LADDER[1:6] for arm in ('low95_high120', 'low95_high200', 'gspo')}
  | {'vespo': LADDER[1:5]},
  's2': {arm: FIRST for arm in ARMS}
  | {arm: LADDER[:4] for arm in ('grpo', 'cispo', 'tis', 'decoupled')},
}
OWN: dict[str, dict[str, float]] = {
  's1': {
    **dict.fromkeys(('cispo', 'tis', 'sapo'), 1e-4),
    **dict.fromkeys(('grpo', 'balanced', 'recipe', 'decoupled', 'dppo_tv'), 2e-4),
    'vespo': 4e-4,
    **dict.fromkeys(('low95_high120', 'low95_high200', 'gspo'), 8e-4),
  },
  's2': {
    **dict.fromkeys(('grpo', 'cispo', 'tis', 'decoupled'), 1e-4),
    **dict.fromkeys(('low95_high120', 'low95_high200', 'balanced', 'recipe'), 2e-4),
    **dict.fromkeys(('gspo', 'vespo', 'sapo', 'dppo_tv'), 2e-4),
  },
}
TUNING = (800, 801, 802)
TEST = {'s1': tuple(range(820, 836)), 's2': tuple(range(840, 864))}
SETTINGS = {'s1': experiments.s1, 's2': experiments.control}


def level(rate: float) -> str:
  """Returns the name of a rate in the names of runs."""
  return f'lr{rate:g}'


def get_experiment(name: str) -> Experiment:
  """Returns one of NAMES; stage 1 goes seed by seed, and so does stage 2.

  Raises:
    KeyError: no such experiment.
  """
  if name not in NAMES:
    raise KeyError(name)
  stage, setting = name.split('_')
  seeds = TUNING
  arms = {
    f'{arm}_{level(rate)}': ARMS[arm] | {'optimizer.lr': rate}
    for arm, rates in TRIED[setting].items()
    for rate in rates
  }
  if stage == 'own':
    seeds = TEST[setting]
    arms = {
      arm: ARMS[arm] | {'optimizer.lr': rate} for arm, rate in OWN[setting].items()
    }
    for arm in ('grpo', 'gspo') if setting == 's1' else ():
      arms[f'{arm}_common'] = ARMS[arm] | {'optimizer.lr': COMMON}
  return Experiment(SETTINGS[setting](), arms, seeds, of_run=of_run)


def of_run(arm: str, levels: Mapping[str, str], seed: int) -> dict[str, Any]:
  """Returns the knobs of one run: its problems."""
  return {'problems.custom.seed': seed}


def means(results: Mapping[str, Result], setting: str) -> dict[str, dict[float, float]]:
  """Returns arm -> rate -> mean accuracy over the run, mean of the tuning seeds.

  Rates with a seed missing are left out.
  """
  by_arm: dict[str, dict[float, float]] = {}
  for arm, rates in TRIED[setting].items():
    by_arm[arm] = {}
    for rate in rates:
      names = [f'{arm}_{level(rate)}-seed{seed}' for seed in TUNING]
      if all(name in results for name in names):
        by_arm[arm][rate] = float(np.mean([area(results[name]) for name in names]))
  return by_arm


def best(of_rate: Mapping[float, float]) -> float:
  """Returns the rate with the best mean; of equal ones the smallest."""
  return max(sorted(of_rate), key=lambda rate: of_rate[rate])


def to_add(of_rate: Mapping[float, float]) -> float | None:
  """Returns the next rate of the LADDER to try; None if the best one is inside.

  At an end of the LADDER the best rate is final as well.
  """
  rate = best(of_rate)
  at = LADDER.index(rate)
  if rate == min(of_rate) and at > 0:
    return LADDER[at - 1]
  if rate == max(of_rate) and at + 1 < len(LADDER):
    return LADDER[at + 1]
  return None


def main(setting: str) -> None:
  """Prints for every arm its means by rate, and the rate to add or its own rate."""
  results = read(get_experiment(f'rates_{setting}'), str(RESULTS / f'rates_{setting}'))
  for arm, of_rate in means(results, setting).items():
    if len(of_rate) < len(TRIED[setting][arm]):
      print(f'{arm}: not complete')
      continue
    shown = ', '.join(f'{level(rate)} {x:.4f}' for rate, x in sorted(of_rate.items()))
    following = to_add(of_rate)
    decision = f'own {best(of_rate):g}' if following is None else f'add {following:g}'
    print(f'{arm}: {shown}: {decision}')


if __name__ == '__main__':
  main(sys.argv[1])
