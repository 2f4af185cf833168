"""What Batch Adaptation PO (arXiv:2602.20722) claims, and what speaks to it.

B1 to B4 are the hypotheses of ../protocol.md.
"""

from bapo_jax.tools.claim_verdicts import Claim, Part

OTHERS = ('grpo', 'dapo', 'replay', 'without_x2', 'without_x3')
# experiment -> (arm, the arms it is compared with, outcome)
COMPARED = {
  'tuning': ('lr0.0003', ('lr0.0001', 'lr0.001'), 'final'),
  'main': ('adapted', OTHERS, 'newly_solved'),
  'hardness': ('adapted', ('grpo',), 'newly_solved'),
  'delay': ('adapted', ('grpo',), 'final'),
}
# experiment -> (how it is drawn, the arms)
FIGURES = {
  'main': ('curves', ('adapted', *OTHERS, 'balanced', 'both')),
  'hardness': ('curves', ('adapted', 'grpo')),
  'delay': ('curves', ('adapted', 'grpo')),
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
    'The gain comes from hard problems (B3)',
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
