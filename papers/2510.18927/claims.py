"""What Balanced PO (arXiv:2510.18927) claims, and what of experiments.py speaks to it.

H1 to H6 are the hypotheses of ../protocol.md.
"""

from lab.evidence import Claim, Compared, Drawn, Part, Shown

FIXED = ('grpo', 'clip_higher', 'start', 'own_mean', 'widest')
OTHERS = ('recipe', 'gspo', 'cispo', 'decoupled', 'grpo_slow')
LEARNING = ('area', 'final', 'collapsed', 'entropy', 'grad_norm', 'spikes')
BOUNDS = ('share_start', 'share', 'clipped', 'low', 'high')
SEARCH = ('target_met', 'moved', 'low_moved', 'high_moved')  # of arms that have one
SHOWN = {
  'imbalance': Shown(
    ((*LEARNING[:4], 'share_start'),), (), {'imbalance': Drawn('levels', ('grpo',))}
  ),
  'main': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (
      Compared('balanced', FIXED, 'area', tested=True),
      Compared('balanced', OTHERS, 'area'),
      Compared('balanced', (*FIXED, *OTHERS), 'final'),
      Compared('grpo', ('clip_higher', 'start'), 'entropy'),
    ),
    {
      'main': Drawn('curves', ('balanced', *FIXED)),
      'main-differences': Drawn('differences', ('balanced', *FIXED)),
      'main-others': Drawn('curves', ('balanced', *OTHERS)),
    },
  ),
  'staleness': Shown(
    ((*LEARNING, 'share_start', 'clipped'),),
    (),
    {'staleness': Drawn('curves', ('grpo',))},
  ),
  'entropy': Shown(
    ((*LEARNING, 'clipped'),),
    (Compared('grpo', ('high', 'low'), 'entropy'),),
    {'entropy': Drawn('curves', ('grpo', 'high', 'low'))},
  ),
  'partial': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (
      Compared('balanced', ('grpo',), 'area'),
      Compared('balanced', ('grpo',), 'entropy'),
    ),
    {'partial': Drawn('curves', ('balanced', 'grpo'))},
  ),
  'plane': Shown(
    (('area', 'final', 'entropy', 'share_start', 'share'), SEARCH),
    (Compared('balanced', ('grpo', 'own_mean'), 'area'),),
    {'plane': Drawn('plane', ('balanced', 'grpo', 'own_mean'))},
  ),
  'epochs': Shown(
    (LEARNING, BOUNDS, SEARCH),
    (
      Compared('balanced', ('grpo', 'own_mean'), 'area'),
      Compared('balanced', ('grpo', 'own_mean'), 'final'),
    ),
    {'epochs': Drawn('curves', ('balanced', 'grpo', 'own_mean'))},
  ),
  'tuning': Shown((('area', 'final', 'entropy', *BOUNDS), SEARCH)),
}
# (experiment, arm of the runs, arms whose rules are applied to their last batch)
RECORDED = ('main', 'balanced', (*FIXED, 'balanced', 'recipe', 'gspo', 'cispo'))
MAIN = ('ratio2', 'k16')  # levels of the main comparison


def versus(arm: str, other: str, outcome: str, sign: int = 1) -> Part:
  """One arm less another, at the levels of the main comparison."""
  return Part(
    f'{arm} less {other}, {outcome}',
    outcome,
    ((arm, *MAIN),),
    ((other, *MAIN),),
    0,
    sign,
  )


def gain(level: str, updates: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The cells of balanced and of its mean bounds at MAIN."""
  return ('balanced', level, updates), ('own_mean', level, updates)


def partial_gain(budget: str, outcome: str) -> Part:
  """Balanced less GRPO at a token budget."""
  cell = tuple((arm, budget) for arm in ('balanced', 'grpo'))
  return Part(f'{budget}, {outcome}', outcome, cell[:1], cell[1:])


CLAIMS = (
  Claim(
    'Staleness harms GRPO (reward collapses at 4 and 8 times, entropy falls at 2): '
    'it ends less accurate, with less entropy (H2)',
    'Fig. 2',
    '0.1 M',
    'staleness',
    tuple(
      Part(
        f'k16 less k1, {o}', o, (('grpo', *MAIN),), (('grpo', 'ratio2', 'k1'),), 0, -1
      )
      for o in ('final', 'entropy')
    ),
  ),
  Claim(
    'Tokens with A < 0 dominate: their part of the loss is .55 to .63',
    'Fig. 4, Fig. 6',
    '0.1 M',
    'main',
    (Part('share of A > 0 less 1/2', 'share_start', (('grpo', *MAIN),), (), 0.5, -1),),
    by_design=True,  # the limit of tokens was chosen for it
  ),
  Claim(
    'A higher upper bound raises entropy, a lower lower bound lowers it (H3)',
    'Fig. 7',
    '0.1 M',
    'entropy',
    (
      Part(
        '[.8, 1.5] less [.8, 1.2]', 'entropy', (('high', 'k16'),), (('grpo', 'k16'),)
      ),
      Part(
        '[.5, 1.2] less [.8, 1.2]',
        'entropy',
        (('low', 'k16'),),
        (('grpo', 'k16'),),
        0,
        -1,
      ),
    ),
  ),
  Claim(
    'The bounds adapt (means .69 and 2.06)',
    'Fig. 8',
    '0.1 M',
    'main',
    (
      Part('share of updates that move them', 'moved', (('balanced', *MAIN),)),
      Part(
        'there, lower less its end .9', 'low_moved', (('balanced', *MAIN),), (), 0.9
      ),
      Part('upper less its end 3', 'high_moved', (('balanced', *MAIN),), (), 3.0),
    ),
    by_design=True,  # they cannot fall below their start
  ),
  Claim(
    'Higher entropy, no gradient spikes (H6)',
    'Fig. 9',
    '0.1 M',
    'main',
    (
      versus('balanced', 'grpo', 'entropy'),
      versus('balanced', 'grpo', 'spikes', -1),
    ),
  ),
  Claim(
    'Adaptation beats every fixed control (H1; the paper compares with two)',
    'Fig. 11',
    '0.1 M',
    'main',
    tuple(versus('balanced', other, 'area') for other in FIXED),
  ),
  Claim(
    'The gain over fixed bounds, the mean ones of the main comparison, grows with '
    'staleness and with imbalance (H4)',
    'ours, after Fig. 11',
    '0.1 M',
    'plane',
    tuple(
      Part(
        text,
        'area',
        (gain(*far)[0], gain(*near)[1]),
        (gain(*far)[1], gain(*near)[0]),
      )
      for text, far, near in (
        ('gain at k16 less at k4', ('ratio2', 'k16'), ('ratio2', 'k4')),
        ('gain at ratio 3 less at 1', ('ratio3', 'k16'), ('even', 'k16')),
      )
    ),
  ),
  Claim(
    'Stable under partial rollouts at two token budgets, entropy .24 against .08 (H5)',
    'Fig. 12',
    '0.1 M',
    'partial',
    tuple(
      partial_gain(budget, outcome)
      for budget in ('tokens28', 'tokens56')
      for outcome in ('area', 'entropy')
    ),
  ),
  Claim(
    'AIME 2024 and 2025: 87.1 and 80.0, GRPO 84.6 and 78.8',
    'Table 1',
    '32 B, `configs/aime.py:32b`',
  ),
  Claim(
    'AIME 2024 and 2025: 70.8 and 62.5, GRPO 69.2 and 59.2',
    'Table 1',
    '7 B, `configs/aime.py:7b`',
  ),
  Claim(
    'Llama: AIME 2024, 2025 and MATH 5.4, 5.8 and 66.0, GRPO 2.5, 2.9 and 58.4',
    'Table 2',
    '3 B',
  ),
)
