"""What Batch Adaptation PO (arXiv:2602.20722) claims, and what speaks to it.

The hypotheses are those of ../protocol.md, one comparison or family a row.
"""

from collections.abc import Mapping

import numpy as np

from lab.evidence import Check, Claim, Compared, Drawn, Part, Shown, relation
from lab.experiments import Result
from lab.outcomes import FEWEST, OUTCOMES, sign_flip

OTHERS = ('grpo', 'dapo', 'replay', 'without_x2', 'without_x3')
ABLATED = (
  'grpo_fresh',
  'grpo',
  'grpo_epochs',
  'dapo',
  'replay',
  'without_x2',
  'without_x3',
)
CELLS = ('balanced', 'both')  # of both methods; grpo and adapted are the other two
SOLVED = ('newly_solved', 'newly_failed', 'accuracy_of_failed')
LEARNING = ('area', 'final', *SOLVED, 'entropy')
COST = ('responses', 'steps', 'updates', 'learnable', 'filled', 'reevaluated', 'reused')
SHOWN = {
  'main': Shown(
    (LEARNING, COST),
    (
      Compared('adapted', OTHERS, 'newly_solved', tested=True),
      Compared('adapted', (*OTHERS, *CELLS), 'final'),
      Compared('adapted', (*OTHERS, *CELLS), 'accuracy_of_failed'),
      Compared('adapted', CELLS, 'newly_solved'),
    ),
    {
      'main': Drawn('curves', ('adapted', *OTHERS)),
      'main-differences': Drawn('differences', ('adapted', *OTHERS), 'newly_solved'),
      'main-cells': Drawn('curves', ('both', 'adapted', 'balanced', 'grpo')),
    },
  ),
  'hardness': Shown(
    (LEARNING, COST),
    (
      Compared('adapted', ('grpo',), 'final'),
      Compared('adapted', ('grpo',), 'newly_solved'),
    ),
    {'hardness': Drawn('panels', ('adapted', 'grpo'))},
  ),
  'delay': Shown(
    (LEARNING, COST),
    (Compared('adapted', ('grpo',), 'final'),),
    {'delay': Drawn('slopes', ('adapted', 'grpo'), 'final')},
  ),
  'tuning': Shown((LEARNING,)),
  'countdown_tuning': Shown((LEARNING,)),
  'countdown': Shown(
    (LEARNING, COST),
    (
      Compared('adapted', ABLATED, 'newly_solved', tested=True),
      Compared('adapted', (*ABLATED, 'dapo_more'), 'final'),
    ),
    {
      'countdown': Drawn('curves', ('adapted', *ABLATED, 'dapo_more')),
      'countdown-differences': Drawn(
        'differences', ('adapted', *ABLATED, 'dapo_more'), 'newly_solved'
      ),
    },
    whole=True,
  ),
  'still': Shown((('before', 'by_chance'),)),
}


NAMES_OF = {  # arm -> in words
  'grpo_fresh': 'GRPO with a fresh actor',
  'grpo': 'GRPO',
  'grpo_epochs': 'GRPO with two epochs',
  'dapo': 'dynamic sampling',
  'replay': 'replay alone',
  'without_x2': 'itself without re-evaluation',
  'without_x3': 'itself without reuse',
}
OUTCOME_OF = {
  'newly_solved': 'solved of those failed before',
  'final': 'accuracy at the end',
}


def versus(other: str, outcome: str, paper: str = '') -> Part:
  """Adapted less another arm at equal responses."""
  text = f'adapted less {NAMES_OF[other]}, {OUTCOME_OF[outcome]}'
  return Part(text, outcome, (('adapted',),), ((other,),), paper=paper)


def growth(text: str, far: str, near: str) -> Part:
  """The final gain over GRPO at one level less that at another."""
  return Part(
    text,
    'final',
    (('adapted', far), ('grpo', near)),
    (('grpo', far), ('adapted', near)),
  )


def improves(results: Mapping[str, Result]) -> tuple[bool, str]:
  """Returns whether GRPO ends more accurate than it began, p < .05."""
  gain_S = np.asarray(
    [
      OUTCOMES['final'][1](r) - OUTCOMES['before'][1](r)
      for r in results.values()
      if r['arm'] == 'grpo'
    ]
  )
  if len(gain_S) < FEWEST:
    return False, 'too few runs'
  p = sign_flip(gain_S)
  return bool(gain_S.mean() > 0 and p < 0.05), f'{gain_S.mean():+.3f}, p {relation(p)}'


CHECKS = {
  'training helps': Check(
    'GRPO ends more accurate on Countdown than it began', 'countdown', improves
  )
}
CLAIMS = (
  Claim(
    'Problems that the base model always fails are solved, more than by any other rule',
    'abstract, ablation on countdown',
    '0.1 M',
    'main',
    tuple(
      versus(other, 'newly_solved', '40.7 % are solved' * (other == 'grpo'))
      for other in OTHERS
    ),
  ),
  Claim(
    'Higher accuracy than GRPO (here with an actor that is as stale)',
    'abstract',
    '0.1 M',
    'main',
    (versus('grpo', 'final', '12.5 % relative on average'),),
  ),
  Claim(
    'More accurate than dynamic sampling at equal rollouts',
    'main table',
    '0.1 M',
    'main',
    (versus('dapo', 'final', '+1.8 with 733k rollouts for 1921k'),),
  ),
  Claim(
    'It loses less than GRPO where the actor is synchronised every 5 steps',
    'ours: the settings have 5 alone',
    '0.1 M',
    'delay',
    (growth('gain over GRPO at every 5 steps less at every step', 'every5', 'every1'),),
  ),
  Claim(
    'The gain over GRPO grows with the share of hard problems',
    'section 3',
    '0.1 M',
    'hardness',
    (growth('gain over GRPO at 60 % hard less at none', 'hard60', 'hard0'),),
  ),
  Claim(
    'On Countdown it solves more of the problems that it failed before than any other '
    'rule',
    'ablation on countdown',
    'Countdown',
    'countdown',
    tuple(versus(other, 'newly_solved') for other in ABLATED),
    checks=('training helps',),
  ),
  Claim(
    'On Countdown it ends more accurate than GRPO with a fresh actor',
    'abstract',
    'Countdown',
    'countdown',
    (versus('grpo_fresh', 'final'),),
    checks=('training helps',),
  ),
  Claim(
    'Average of five benchmarks 56.0, GRPO 51.6, DAPO 54.2',
    'main table',
    '1.5 B, `configs/aime.py:batch_paper`',
  ),
)
