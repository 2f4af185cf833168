"""The numbers of a page: outcomes of a run, differences by seed, and their tests."""

import math

import making
import numpy as np
import pytest

from lab import claims, evidence, experiments, outcomes
from lab.evidence import Claim, Part
from lab.outcomes import OUTCOMES

CLAIMS = """
from lab.evidence import Check, Claim, Compared, Drawn, Part, Shown
SHOWN = {
  'main': Shown(
    (('area', 'final', 'newly_solved', 'collapsed'), ('moved',)),
    (Compared('b', ('a',), 'area', tested=True),),
    {'lines': Drawn('curves', ('b', 'a')), 'pairs': Drawn('differences', ('b', 'a'))},
  )
}
PART = Part('b less a', 'area', (('b',),), (('a',),), paper='twice')
CHECKS = {'differ': Check('a and b differ', 'main', lambda results: (False, 'p = .9'))}
CLAIMS = (
  Claim('b is better', 'Fig. 1', 'tiny', 'main', (PART,)),
  Claim('b is worse', 'Fig. 2', 'tiny', 'main', (PART._replace(sign=-1),)),
  Claim('b beats a', 'Fig. 3', 'tiny', 'main', (PART,), checks=('differ',)),
  Claim('b is huge', 'Table 1', '7 B'),
)
"""
SETUP = """
from bapo_jax.training.config import Config
from lab.experiments import Experiment
NAMES = ('main',)
def get_experiment(name):
  return Experiment(Config().model_dump(), {'a': {}, 'b': {'steps': 3}}, (0, 1, 2))
"""


NORMS = {'steps': {'learner/grad_norm': [1, 1, 1, 6, None]}}
# Problems failed, failed, solved, solved at the start; then 1, 2, 0 and 4 of 4 right.
CHANGED = {'right': {'0': [0, 0, 3, 2], '10': [1, 2, 0, 4]}}
LOST = {'right': {'0': [0, 2], '10': [4, 4]}, 'diverged': True}
# One, two and none of four updates moved the bound from .6 to .9.
MOVED = {
  'steps': {'clip/moved': [0.25, 0.5, 0.0, None], 'clip/low': [0.675, 0.75, 0.6, 0.7]}
}
BETWEEN = {'steps': {'clip/moved': [1, 0.5], 'clip/target_met': [0.25, 0.75]}}
BLIND = {
  'steps': {'clip/moved': [0.5], 'clip/target_met': [0.25], 'clip/no_evidence': [0.5]}
}
STILL = {
  'steps': {'clip/moved': [0, 0], 'clip/low': [0.6, 0.6], 'clip/target_met': [1, 1]}
}


@pytest.mark.parametrize(
  ('name', 'expected', 'values'),
  [
    # .2 to .6 over four steps, then .6 to .8 over six: (1.6 + 4.2) / 10.
    ('area', 0.58, {'evaluations': [(0, 0.2), (4, 0.6), (10, 0.8)]}),
    ('final', 0.8, {'evaluations': [(0, 0.2), (4, 0.6), (10, 0.8)]}),
    # After a divergence .6 to 0 over one step, and five steps of 0.
    ('area', 0.19, {'evaluations': [(0, 0.2), (4, 0.6)], 'diverged': True}),
    ('final', 0, {'evaluations': [(0, 0.2), (4, 0.6)], 'diverged': True}),
    ('collapsed', 1, {'evaluations': [(0, 0.2), (4, 0.6)], 'diverged': True}),
    ('collapsed', 0, {'evaluations': [(0, 0.2), (5, 0.9), (10, 0.61)]}),
    ('spikes', 1 / 4, NORMS),
    ('grad_norm', 9 / 4, NORMS),
    ('newly_solved', 2 / 2, CHANGED),
    ('newly_failed', 1 / 2, CHANGED),
    ('accuracy_of_failed', (1 / 4 + 2 / 4) / 2, CHANGED),
    ('newly_solved', 2 / 3, {'right': {'0': [0, 0, 3, 0], '10': [1, 0, 0, 16]}}),
    ('newly_solved', math.nan, {'right': {'0': [1], '10': [0]}}),
    # Of 6 divisions 6, 3 and 1 have a first half without any of 0, 1 and 2 right ones.
    ('by_chance', (3 + 1) / (6 + 3 + 1), {'right': {'0': [0, 1, 2, 3]}}),
    ('accuracy_of_failed', 0, LOST),
    ('newly_failed', 1, LOST),
    ('newly_failed', 1, LOST | {'right': {'0': [0, 2]}}),
    ('low_moved', 0.9, MOVED),
    ('low_moved', math.nan, STILL),
    ('moved', math.nan, STILL),
    # Of all updates 3/4 moved and 1/2 met the target: a quarter did both.
    ('between', 0.25, BETWEEN),
    # Half of the updates could do neither: a quarter did both, a quarter moved alone.
    ('between', 0.25, BLIND),
  ],
)
def test_outcomes_by_hand(name, expected, values):
  found = OUTCOMES[name][1](making.result(**values))
  assert found == pytest.approx(expected, nan_ok=True)


def test_the_sign_test_is_exact():
  # Of eight signs of (1, 2, 3) only two have a sum as large as 6.
  assert outcomes.sign_flip(np.asarray([1.0, 2, 3])) == 2 / 8
  # -1 + 2 + 3 = 4: sums of 4 or more are +-6 and +-4.
  assert outcomes.sign_flip(np.asarray([-1.0, 2, 3])) == 4 / 8
  assert outcomes.sign_flip(np.zeros(3)) == 1
  assert outcomes.sign_flip(np.arange(1.0, 9)) == 2 / 256


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls():
  # .01 x 3, .02 x 2 and .03 x 1, which is raised to the one before it.
  assert outcomes.holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
  assert outcomes.holm([0.6, 0.9]) == [1.0, 1.0] and outcomes.holm([]) == []


def test_the_t_interval_by_hand():
  # Mean .2, standard deviation .2160, error .1080; t of 3 degrees of freedom 3.1824.
  low, high = outcomes.t_interval(np.asarray([0.0, 0.1, 0.2, 0.5]))
  assert (low, high) == pytest.approx((0.2 - 0.3438, 0.2 + 0.3438), abs=1e-3)
  # At 90 %, t is 2.3534.
  low, high = outcomes.t_interval(np.asarray([0.0, 0.1, 0.2, 0.5]), 0.9)
  assert (low, high) == pytest.approx((0.2 - 0.2542, 0.2 + 0.2542), abs=1e-3)
  assert outcomes.t_interval(np.full(4, 0.3)) == pytest.approx((0.3, 0.3))


@pytest.mark.parametrize(
  ('seeds', 'shown'), [(4, 'p = 0.018'), (8, 'p < 0.001')], ids=str
)
def test_friedman_by_hand(seeds, shown):
  # Three arms ranked 1, 2, 3 by all four seeds: chi2 = 12 / (4 3 4) (16 + 64 + 144)
  # - 3 4 4 = 8, and exp(-8 / 2) = .0183 with 2 degrees of freedom; 16 with eight seeds.
  means = {'a': 0.1, 'b': 0.2, 'c': 0.3}
  ranked = with_seeds(**{x: dict.fromkeys(range(seeds), y) for x, y in means.items()})
  compared = [(x,) for x in means]
  expected = pytest.approx(math.exp(-seeds))
  assert outcomes.friedman(ranked, compared, 'area') == expected
  assert evidence.differ(compared, 'area')(ranked) == (True, shown)


def folder(tmp_path, seeds=3):
  """A folder of papers/ with results of two arms; b is .1, .2, .3 better than a."""
  (tmp_path / 'experiments.py').write_text(SETUP)
  (tmp_path / 'claims.py').write_text(CLAIMS)
  begin, end = '<!-- results of main -->', '<!-- end of main -->'
  (tmp_path / 'README.md').write_text(
    f'# Page\n<!-- claims --><!-- end of claims -->\n{begin}\nold\n{end}\n\nLast.\n'
  )
  made = claims.load(str(tmp_path)).get_experiment('main')
  for name, run in experiments.runs(made).items():
    if run.seed < seeds:
      better = 0.1 * (run.seed + 1) * (run.arm == 'b')
      stored = making.result(run, [(0, 0.2 + better), (10, 0.2 + better)])
      experiments.write(str(tmp_path / 'results' / 'main'), name, stored)
  return str(tmp_path)


def test_the_page_has_the_numbers_of_its_results(tmp_path):
  page = folder(tmp_path)
  assert claims.main([page, '--check']) == 1
  assert claims.main([page]) == 0 and claims.main([page, '--check']) == 0
  text = (tmp_path / 'README.md').read_text()
  assert '6 of 6 runs, at commit `c0ffee`; training took 9 s a run' in text
  assert '\nold\n' not in text
  assert '| a | 3 | 0.200 | 0.200 | 1.000 | 0.000 |' in text
  assert '| a | 3 | - |' not in text, 'a row without a known value'
  # .1, .2, .3: mean .2, error .0577, t of 2 degrees of freedom 4.303.
  assert '| b minus a | +0.200 | -0.048 to +0.448 | 3 of 3 |' in text
  claim = '| b is better (Fig. 1; tiny) | **suggested** | b less a | twice | '
  claim += '+0.200 (-0.048 to +0.448) |  | 3 of 3 | [main](figures/lines.png) |'
  assert claim in text
  assert '| b is worse (Fig. 2; tiny) | **too few seeds** |' in text
  assert '| b is huge (Table 1; 7 B) | **not run** |  |  |' in text
  assert '| b beats a (Fig. 3; tiny) | **premise absent** | b less a |' in text
  assert '| a and b differ | main | p = ' in text and '| no |' in text
  for figure in ('lines', 'pairs'):
    assert (tmp_path / 'figures' / f'{figure}.png').stat().st_size > 1000
  assert text.startswith('# Page') and text.endswith('Last.\n')


def test_a_page_without_results_says_so_and_one_without_markers_is_refused(tmp_path):
  page = folder(tmp_path, seeds=0)
  assert claims.main([page]) == 0
  assert claims.EMPTY in (tmp_path / 'README.md').read_text()
  (tmp_path / 'README.md').write_text('# Page\n')
  with pytest.raises(ValueError, match='<!-- claims -->'):
    claims.main([page])


def with_seeds(**by_arm):
  """Results of arms with these accuracies throughout the run; seed -> accuracy."""
  return {
    f'{arm}{seed}': making.result(None, [(0, x), (10, x)], arm=arm, seed=seed)
    for arm, accuracies in by_arm.items()
    for seed, x in accuracies.items()
  }


def by_difference(differences):
  """Results of two arms, b better than a by these differences, one per seed."""
  a = dict.fromkeys(range(len(differences)), 0.5)
  return with_seeds(a=a, b={s: 0.5 + x for s, x in enumerate(differences)})


BETTER = Part('b less a', 'area', (('b',),), (('a',),))
WORSE = BETTER._replace(sign=-1)
CONSTANT = Part('a less .4', 'area', (('a',),), (), 0.4)
ALIKE = [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2]


def test_the_order_of_arms_by_hand():
  # Of three pairs, one is in another order at depth 4: (2 - 1) / 3.
  finals = {
    ('a', 'depth0'): (0.9, 0.7),
    ('b', 'depth0'): (0.6, 0.8),
    ('c', 'depth0'): (0.5, 0.1),
    ('a', 'depth4'): (0.4, 0.4),
    ('b', 'depth4'): (0.5, 0.5),
    ('c', 'depth4'): (0.3, 0.3),
  }
  results = {
    f'{arm}-{level}-seed{seed}': making.result(
      arm=arm, levels={'depth': level}, seed=seed, evaluations=[(0, 0.0), (9, value)]
    )
    for (arm, level), values in finals.items()
    for seed, value in enumerate(values)
  }
  rows = evidence.order_table(results, 'final').splitlines()[2:]
  assert rows == [
    '| depth0 | a, b, c |  |',
    '| depth4 | b, a, c | 0.33 |',
    # Seed 0 has a, b, c and seed 1 has b, a, c.
    '| depth0, even and odd seeds |  | 0.33 |',
  ]


@pytest.mark.parametrize(
  ('parts', 'differences', 'verdict'),
  [
    ([BETTER], ALIKE, 'seen'),
    ([WORSE], ALIKE, 'opposite'),
    # The last seed alone has the other sign: p = .0625.
    ([BETTER, CONSTANT], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, -0.1], 'not seen'),
    ([CONSTANT], [0.1] * 8, 'seen'),
    ([BETTER], [0.1, 0.2, 0.1, 0.2], 'suggested'),
    ([BETTER], [0.1, 0.2, -0.1, 0.2], 'too few seeds'),
    ([], ALIKE, 'not run'),
  ],
)
def test_a_verdict_needs_every_part_and_enough_seeds(parts, differences, verdict):
  claim = Claim('', '', '', 'main', tuple(parts))
  seeds = range(len(differences))
  found, effects = evidence.judge(claim, by_difference(differences), seeds)
  assert found == verdict
  assert len(effects) == len(parts) * (verdict != 'not run')


def test_seeds_without_a_value_do_not_make_a_sign_count():
  # Two of eight runs had failed a problem at first, and both have solved it.
  claim = Claim('', '', '', 'main', (Part('', 'newly_solved', (('b',),)),))
  runs = by_difference([0.1] * 8)
  for seed in range(2, 8):
    runs[f'b{seed}'] |= {'right': {'0': [1, 1], '10': [1, 1]}}
  assert evidence.judge(claim, runs, range(8))[0] == 'not seen'
  runs['b1'] |= {'right': {'0': [1, 1], '10': [1, 1]}}
  assert evidence.judge(claim, runs, range(8))[0] == 'not run'


def test_a_claim_needs_every_seed_and_its_checks():
  claim = Claim('', '', '', 'main', (BETTER, CONSTANT))
  assert evidence.judge(claim, by_difference([0.1] * 7), range(8))[0] == 'not run'
  runs = by_difference([0.1] * 8)
  # Of 256 signs 2 give a mean of .1; all parts must hold, so p is not corrected.
  verdict, effects = evidence.judge(claim, runs, range(8))
  assert verdict == 'seen'
  assert effects[0] == ['+0.100 (+0.100 to +0.100)', '0.008', '8 of 8']
  checked = claim._replace(checks=('differ',))
  for holds, verdict in ((True, 'seen'), (False, 'premise absent')):
    found = evidence.judge(checked, runs, range(8), {'differ': holds})
    assert found[0] == verdict
  still = claim._replace(measurable=False)
  assert evidence.judge(still, runs, range(8))[0] == 'not measurable'


def test_differences_by_step_are_those_of_each_evaluation():
  curves = {'a': (0.3, 0.6, 0.7), 'b': (0.3, 0.5, 0.7), 'c': (0.3, 0.4, 0.7)}
  results = {
    f'{arm}-seed{seed}': making.result(
      evaluations=[
        (step, y + seed / 100) for step, y in zip((0, 5, 10), curve, strict=True)
      ],
      arm=arm,
      seed=seed,
    )
    for arm, curve in curves.items()
    for seed in range(8)
  }
  text = evidence.by_step_table(results, 'a', ('b', 'c', 'b'))
  assert '| difference in accuracy | step 5 | step 10 |' in text
  # All eight seeds agree: two of 256 sign patterns.
  assert '| a minus b | +0.100 (p = 0.008) | +0.000 (p = 1.000) |' in text
  assert '| a minus c | +0.200 (p = 0.008) | +0.000 (p = 1.000) |' in text
