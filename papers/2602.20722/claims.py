"""What Batch Adaptation PO (arXiv:2602.20722) claims, and what speaks to it.

B1 to B4 are the hypotheses of ../protocol.md.
"""

from lab.evidence import Claim, Compared, Drawn, Part, Shown

OTHERS = ('grpo', 'dapo', 'replay', 'without_x2', 'without_x3')
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
    {'hardness': Drawn('curves', ('adapted', 'grpo'))},
  ),
  'delay': Shown(
    (LEARNING, COST),
    (Compared('adapted', ('grpo',), 'final'),),
    {'delay': Drawn('curves', ('adapted', 'grpo'))},
  ),
  'tuning': Shown((LEARNING,)),
}


def versus(other: str, outcome: str) -> Part:
  """Adapted less another arm in the main comparison."""
  return Part(f'adapted less {other}, {outcome}', outcome, (('adapted',),), ((other,),))


def growth(outcome: str, far: str, near: str) -> Part:
  """The gain over GRPO at one level less that at another."""
  return Part(
    f'gain at {far} less at {near}, {outcome}',
    outcome,
    (('adapted', far), ('grpo', near)),
    (('grpo', far), ('adapted', near)),
  )


CLAIMS = (
  Claim(
    'Problems that the base model always fails are solved (40.7 %), more than by GRPO, '
    'dynamic sampling or replay, and than without X2 or X3 (B1)',
    'abstract, ablation on countdown',
    '0.1 M',
    'main',
    tuple(versus(other, 'newly_solved') for other in OTHERS),
  ),
  Claim(
    'Higher accuracy than GRPO, 12.5 % relative on average (B2)',
    'abstract',
    '0.1 M',
    'main',
    (versus('grpo', 'final'),),
  ),
  Claim(
    'More accurate than dynamic sampling at equal rollouts (733k for its 1921k)',
    'main table',
    '0.1 M',
    'main',
    (versus('dapo', 'final'),),
  ),
  Claim(
    'It loses less than GRPO where the actor is synchronised every 5 steps (B4)',
    'ours: the settings have v = 5 alone',
    '0.1 M',
    'delay',
    (growth('final', 'every5', 'every1'),),
  ),
  Claim(
    'The gain over GRPO comes from hard problems: it grows with their share (B3)',
    'section 3',
    '0.1 M',
    'hardness',
    (growth('final', 'hard60', 'hard0'),),
  ),
  Claim(
    'Average of five benchmarks 56.0, GRPO 51.6, DAPO 54.2',
    'main table',
    '1.5 B, `configs/aime.py:batch_paper`',
  ),
)
