"""What the second protocol asks, and what of experiments.py answers it.

The checks M1 and M2 and the hypotheses A1 to A11 are those of ../protocol2.md.
"""

import functools
import itertools
from collections.abc import Mapping

import numpy as np

from lab.evidence import (
  Check,
  Claim,
  Compared,
  Drawn,
  Part,
  Shown,
  by_step_table,
  differ,
)
from lab.experiments import Experiment, Result
from lab.outcomes import stopped_between
from papers.bench import experiments, feedback, own_rates, rates, routes

FIXED = ('grpo', 'clip_higher', 'start', 'low85_high282', 'low90_high300')
ADAPTIVE_FIRST = ('balanced', *FIXED, 'recipe')
RATES = ('lr0.0006', 'lr0.0008')
OTHERS = (  # the ten rules that are not arms of S1
  'unclipped',
  'tis',
  'cispo',
  'gspo',
  'sapo',
  'vespo',
  'dcpo',
  'dppo_tv',
  'm2po',
  'icepop',
)
ARMS_AHEAD = ('grpo', 'decoupled', 'unclipped', 'tis', 'cispo', 'm2po', 'icepop')
YOKED_ARMS = {
  'yoked': ('recipe', 'yoked', 'coin', *itertools.chain(*feedback.FIXED['yoked'])),
  'yoked_s1': ('balanced', 'yoked', *itertools.chain(*feedback.FIXED['yoked_s1'])),
  'yoked_depths': ('recipe', 'yoked', 'low80_high120', 'low95_high200'),
}
FEWEST_BETWEEN = 0.15  # share of the updates, M1
LEARNING = ('area', 'final', 'collapsed', 'entropy', 'grad_norm')
BOUNDS = ('share_start', 'share', 'clipped', 'low', 'high')
SEARCH = ('target_met', 'moved', 'between')
SHOWN = {
  'tuning': Shown((('area', 'final', 'entropy', *BOUNDS), SEARCH)),
  's1': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (
      Compared('balanced', (*FIXED, 'recipe'), 'area'),
      Compared('balanced', (*FIXED, 'recipe'), 'final'),
    ),
    {
      's1-differences': Drawn('differences', ADAPTIVE_FIRST),
      's1': Drawn('curves', ADAPTIVE_FIRST),
    },
    whole=True,
    further=functools.partial(by_step_table, arm='balanced', others=FIXED),
  ),
  'rivals': Shown(
    ((*LEARNING, 'share', 'clipped'),),
    (
      Compared('balanced', OTHERS, 'area', tested=True),
      Compared('balanced', OTHERS, 'final'),
    ),
    {
      'rivals-differences': Drawn('differences', ('balanced', 'grpo', *OTHERS)),
      'rivals': Drawn('curves', ('balanced', 'grpo', *OTHERS)),
    },
    whole=True,
  ),
  'control': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (Compared('balanced', (*FIXED, 'recipe'), 'area'),),
    {'control-differences': Drawn('differences', ADAPTIVE_FIRST)},
    whole=True,
  ),
  'recipe_again': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (
      Compared('recipe', ('low87_high156', 'low90_high300'), 'area'),
      Compared('recipe', ('low87_high156', 'low90_high300'), 'final'),
    ),
    {
      'recipe-differences': Drawn(
        'differences', ('recipe', 'low87_high156', 'low90_high300')
      ),
    },
    whole=True,
  ),
  's3': Shown(
    (('before', 'final', 'entropy'), BOUNDS, SEARCH),
    (
      Compared('balanced', ('grpo',), 'final'),
      Compared('balanced', ('grpo',), 'entropy'),
    ),
    whole=True,
  ),
  'depths': Shown(
    (('area', 'final', 'collapsed', 'entropy', 'clipped', 'share'),),
    (Compared('balanced', ARMS_AHEAD, 'area'),),
    {
      'depths': Drawn('slopes', ('balanced', *ARMS_AHEAD), 'area'),
      'depths-entropy': Drawn('slopes', ('balanced', *ARMS_AHEAD), 'entropy'),
    },
    whole=True,
    ordered='area',
  ),
  **{
    name: Shown(
      (),
      figures={
        f'{name}-curves': Drawn('curves', arms),
        f'{name}-searches': Drawn('searches', arms),
      },
      whole=True,
      further=functools.partial(feedback.tables, name=name),
    )
    for name, arms in YOKED_ARMS.items()
  },
  'routes': Shown((), whole=True, further=routes.tables),
  'routes_first': Shown((), whole=True, further=routes.first_update),
  **{
    f'{stage}_{setting}': Shown(
      (), whole=True, further=functools.partial(further, setting=setting)
    )
    for stage, further in (('rates', own_rates.of_rates), ('own', own_rates.section))
    for setting in ('s1', 's2')
  },
  'quantised': Shown(
    (('before', 'final', 'collapsed', 'entropy', 'seconds'),),
    (Compared('int8', ('bfloat16',), 'final'),),
  ),
}
NAMES_OF = {  # arm -> its bounds in words
  'grpo': 'GRPO [.8, 1.2]',
  'clip_higher': 'clip-higher [.8, 1.28]',
  'start': 'start of the search [.6, 1.2]',
  'low85_high282': 'fixed [.85, 2.82]',
  'low90_high300': 'fixed [.9, 3]',
  'balanced': 'adaptive',
  'recipe': 'search of the public code',
  'low87_high156': 'fixed [.868, 1.56]',
}
OUTCOME_OF = {
  'area': 'mean accuracy',
  'final': 'accuracy at the end',
  'entropy': 'entropy',
  'share': 'positive share after the search',
}


NAMES = (*experiments.NAMES, *rates.NAMES)


def get_experiment(name: str) -> Experiment:
  """Returns one of NAMES, of experiments.py or of rates.py."""
  file = rates if name in rates.NAMES else experiments
  return file.get_experiment(name)


def between(results: Mapping[str, Result]) -> tuple[bool, str]:
  """M1: whether the search of `balanced` stops between its ends often enough."""
  found = [stopped_between(r) for r in results.values() if r['arm'] == 'balanced']
  share = float(np.mean(found)) if found else 0.0
  return share >= FEWEST_BETWEEN, f'{share:.1%} of the updates'


def versus(arm: str, other: str, outcome: str, sign: int = 1, level: str = '') -> Part:
  """One arm less another."""
  at = (level,) if level else ()
  where = f' at a rate of {level[2:]}' if level else ''
  return Part(
    f'{NAMES_OF[arm]} less {NAMES_OF[other]}, {OUTCOME_OF[outcome]}{where}',
    outcome,
    ((arm, *at),),
    ((other, *at),),
    sign=sign,
  )


CHECKS = {
  'M1': Check('searches stop between their ends (15 % or more)', 's1', between),
  'M2': Check(
    'the five fixed bounds differ in mean accuracy (Friedman, p < .05)',
    's1',
    differ([(arm,) for arm in FIXED], 'area'),
  ),
  'M2 at the end': Check(
    'the five fixed bounds differ in accuracy at the end (Friedman, p < .05)',
    's1',
    differ([(arm,) for arm in FIXED], 'final'),
  ),
  **{
    rate: Check(
      f'the five fixed bounds differ at a rate of {rate[2:]} (Friedman, p < .05)',
      'control',
      differ([(arm, rate) for arm in FIXED], 'area'),
    )
    for rate in RATES
  },
}
CHECKS['M1 of S3'] = Check(CHECKS['M1'].text, 's3', between)

beats = functools.partial(versus, 'balanced')
CLAIMS = (
  Claim(
    'Adaptation beats every fixed control, over the run',
    'Fig. 11',
    'S1',
    's1',
    tuple(beats(other, 'area') for other in FIXED),
    checks=('M1', 'M2'),
  ),
  Claim(
    'Adaptation beats every fixed control, at the end',
    'Fig. 11',
    'S1',
    's1',
    tuple(beats(other, 'final') for other in FIXED),
    checks=('M1', 'M2', 'M2 at the end'),
  ),
  Claim(
    'Adaptation keeps a higher entropy than GRPO',
    'Fig. 9',
    'S1',
    's1',
    (beats('grpo', 'entropy'),),
  ),
  Claim(
    'A lower lower bound lowers the entropy',
    'Fig. 7',
    'S1',
    's1',
    (versus('start', 'grpo', 'entropy', -1),),
  ),
  Claim(
    'A higher upper bound raises the entropy',
    'Fig. 7',
    'S1',
    's1',
    (versus('clip_higher', 'grpo', 'entropy'),),
  ),
  *(
    Claim(
      f'Adaptation beats every fixed control at a rate of {rate[2:]}',
      'Fig. 11',
      'S2',
      'control',
      tuple(beats(other, 'area', level=rate) for other in FIXED),
      checks=(rate,),
    )
    for rate in RATES
  ),
  *(
    Claim(
      f'The search of the public code beats {what} at both rates',
      'public code',
      'S2, new seeds',
      'recipe_again',
      tuple(versus('recipe', other, 'area', level=rate) for rate in RATES),
    )
    for other, what in (
      ('low87_high156', 'fixed bounds, [.868, 1.56]'),
      ('low90_high300', 'the best fixed bounds of S2'),
    )
  ),
  Claim(
    'Adaptation raises the share of positive tokens above that of GRPO',
    'Fig. 6',
    'S1',
    's1',
    (beats('grpo', 'share'),),
  ),
  Claim(
    'On a model of 135 M parameters adaptation ends more accurate than GRPO',
    'main table',
    'S3',
    's3',
    (beats('grpo', 'final'),),
    checks=('M1 of S3',),
  ),
  Claim(
    'On a model of 135 M parameters adaptation keeps a higher entropy than GRPO',
    'Fig. 9',
    'S3',
    's3',
    (beats('grpo', 'entropy'),),
    checks=('M1 of S3',),
  ),
)
