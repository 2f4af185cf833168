"""What Balanced PO (arXiv:2510.18927) claims, and what of experiments.py speaks to it.

The hypotheses are those of ../protocol.md, one comparison or family a row.
"""

from lab.evidence import Check, Claim, Compared, Drawn, Part, Shown, differ

FIXED = ('grpo', 'clip_higher', 'start', 'low76_high219', 'low90_high300')
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
      'main-differences': Drawn('differences', ('balanced', *FIXED, *OTHERS)),
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
    (Compared('balanced', ('grpo', 'low76_high219'), 'area'),),
    {'plane-differences': Drawn('differences', ('balanced', 'grpo', 'low76_high219'))},
  ),
  'tuning': Shown((('area', 'final', 'entropy', *BOUNDS), SEARCH)),
}
# (experiment, arm of the runs, arms whose rules are applied to their last batch)
RECORDED = ('main', 'balanced', (*FIXED, 'balanced', 'recipe', 'gspo', 'cispo'))
MAIN = ('ratio2', 'k16')  # levels of the main comparison
NAMES_OF = {  # arm -> its bounds in words
  'grpo': 'GRPO [.8, 1.2]',
  'clip_higher': 'clip-higher [.8, 1.28]',
  'start': 'start of the search [.6, 1.2]',
  'low76_high219': 'fixed [.76, 2.19]',
  'low90_high300': 'fixed [.9, 3]',
  'balanced': 'adaptive',
}
OUTCOME_OF = {
  'area': 'mean accuracy',
  'final': 'accuracy at the end',
  'entropy': 'entropy',
  'spikes': 'share of steps with a spike',
}
CHECKS = {
  'bounds differ': Check(
    'the five fixed bounds differ in mean accuracy (Friedman, p < .05)',
    'main',
    differ([(arm, *MAIN) for arm in FIXED], 'area'),
  )
}


def versus(arm: str, other: str, outcome: str, sign: int = 1, paper: str = '') -> Part:
  """One arm less another, at the levels of the main comparison."""
  return Part(
    f'{NAMES_OF[arm]} less {NAMES_OF[other]}, {OUTCOME_OF[outcome]}',
    outcome,
    ((arm, *MAIN),),
    ((other, *MAIN),),
    sign=sign,
    paper=paper,
  )


def gain(level: str, updates: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The cells of balanced and of its mean bounds at MAIN."""
  return ('balanced', level, updates), ('low76_high219', level, updates)


def growth(text: str, far: tuple[str, str], near: tuple[str, str]) -> Part:
  """The gain over the mean bounds at one pair of levels less that at another."""
  return Part(
    text, 'area', (gain(*far)[0], gain(*near)[1]), (gain(*far)[1], gain(*near)[0])
  )


def stale(outcome: str, sign: int, paper: str) -> Part:
  """GRPO with 16 updates per batch less GRPO with one."""
  return Part(
    f'16 updates per batch less 1, {OUTCOME_OF[outcome]}',
    outcome,
    (('grpo', *MAIN),),
    (('grpo', 'ratio2', 'k1'),),
    sign=sign,
    paper=paper,
  )


def bounds(text: str, arm: str, sign: int) -> Part:
  """The entropy of an arm of `entropy` less that of GRPO."""
  return Part(text, 'entropy', ((arm, 'k16'),), (('grpo', 'k16'),), sign=sign)


def partial_gain(budget: str, outcome: str, paper: str = '') -> Part:
  """Balanced less GRPO at a token budget."""
  cell = tuple((arm, budget) for arm in ('balanced', 'grpo'))
  text = f'{budget[6:]} tokens per slot, adaptive less GRPO, {OUTCOME_OF[outcome]}'
  return Part(text, outcome, cell[:1], cell[1:], paper=paper)


CLAIMS = (
  Claim(
    'Staleness harms the accuracy of GRPO',
    'Fig. 2',
    '0.1 M',
    'staleness',
    (stale('final', -1, 'reward collapses at 4 and 8 times'),),
  ),
  Claim(
    'Staleness lowers the entropy of GRPO',
    'Fig. 2',
    '0.1 M',
    'staleness',
    (stale('entropy', -1, 'falls at 2 times'),),
  ),
  Claim(
    'Tokens with A < 0 dominate the loss (here by the choice of the response limit)',
    'Fig. 4, Fig. 6',
    '0.1 M',
    'main',
    (
      Part(
        'share of tokens with A > 0, less one half',
        'share_start',
        (('grpo', *MAIN),),
        less=0.5,
        sign=-1,
        paper='-.05 to -.13',
      ),
    ),
    measurable=False,
  ),
  Claim(
    'A higher upper bound raises the entropy',
    'Fig. 7',
    '0.1 M',
    'entropy',
    (bounds('[.8, 1.5] less [.8, 1.2]', 'high', 1),),
  ),
  Claim(
    'A lower lower bound lowers the entropy',
    'Fig. 7',
    '0.1 M',
    'entropy',
    (bounds('[.5, 1.2] less [.8, 1.2]', 'low', -1),),
  ),
  Claim(
    'The same, by two arms of the main comparison',
    'Fig. 7',
    '0.1 M',
    'main',
    (versus('start', 'grpo', 'entropy', -1),),
  ),
  Claim(
    'The bounds adapt (here they can only leave their start)',
    'Fig. 8',
    '0.1 M',
    'main',
    (
      Part('share of updates that move them', 'moved', (('balanced', *MAIN),)),
      Part(
        'lower bound where moved, less its end .9',
        'low_moved',
        (('balanced', *MAIN),),
        less=0.9,
        paper='mean .69',
      ),
      Part(
        'upper bound where moved, less its end 3',
        'high_moved',
        (('balanced', *MAIN),),
        less=3.0,
        paper='mean 2.06',
      ),
    ),
    measurable=False,
  ),
  Claim(
    'Adaptation keeps a higher entropy than GRPO',
    'Fig. 9',
    '0.1 M',
    'main',
    (versus('balanced', 'grpo', 'entropy'),),
  ),
  Claim(
    'Adaptation has fewer gradient spikes than GRPO (too rare here)',
    'Fig. 9',
    '0.1 M',
    'main',
    (versus('balanced', 'grpo', 'spikes', -1),),
    measurable=False,
  ),
  Claim(
    'Adaptation beats every fixed control (the paper compares with two)',
    'Fig. 11',
    '0.1 M',
    'main',
    tuple(versus('balanced', other, 'area') for other in FIXED),
    checks=('bounds differ',),
  ),
  Claim(
    'The gain over fixed bounds grows with staleness',
    'ours, after Fig. 11',
    '0.1 M',
    'plane',
    (
      growth(
        'gain over [.76, 2.19] at 16 updates less at 4',
        ('ratio2', 'k16'),
        ('ratio2', 'k4'),
      ),
    ),
  ),
  Claim(
    'The gain over fixed bounds grows with imbalance',
    'ours, after Fig. 11',
    '0.1 M',
    'plane',
    (
      growth(
        'gain over [.76, 2.19] at the longest wrong answers less at equal lengths',
        ('ratio3', 'k16'),
        ('even', 'k16'),
      ),
    ),
  ),
  Claim(
    'With partial rollouts adaptation is more accurate than GRPO',
    'Fig. 12',
    '0.1 M',
    'partial',
    tuple(partial_gain(budget, 'area') for budget in ('tokens28', 'tokens56')),
  ),
  Claim(
    'With partial rollouts adaptation keeps a higher entropy than GRPO',
    'Fig. 12',
    '0.1 M',
    'partial',
    tuple(
      partial_gain(budget, 'entropy', '+.16') for budget in ('tokens28', 'tokens56')
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
