"""The numbers of a page: outcomes of a run, differences by seed, and their tests."""

import itertools
import math

import numpy as np
import pytest

from bapo_jax.tools import (
  claim_shown,
  claim_statistics,
  claim_verdicts,
  claims,
  sweep_grid,
)
from bapo_jax.tools.claim_shown import Compared
from bapo_jax.tools.claim_verdicts import Claim, Part

CLAIMS = """
from bapo_jax.tools.claim_shown import Compared, Drawn, Shown
from bapo_jax.tools.claim_verdicts import Claim, Part
SHOWN = {
  'main': Shown(
    (('area', 'final', 'newly_solved', 'collapsed'), ('moved',)),
    (Compared('b', ('a',), 'area', tested=True),),
    {'lines': Drawn('curves', ('b', 'a')), 'pairs': Drawn('differences', ('b', 'a'))},
  )
}
PART = Part('b less a', 'area', (('b',),), (('a',),))
CLAIMS = (
  Claim('b is better', 'Fig. 1', 'tiny', 'main', (PART,)),
  Claim('b is worse', 'Fig. 2', 'tiny', 'main', (PART._replace(sign=-1),)),
  Claim('b is huge', 'Table 1', '7 B'),
)
"""
SETUP = """
from bapo_jax.tools.sweep_grid import Experiment
from bapo_jax.training.config import Config, plain
NAMES = ('main',)
def get_experiment(name):
  return Experiment(plain(Config()), {'a': {}, 'b': {'steps': 3}}, (0, 1, 2))
"""


def result(evaluations, *, diverged=False, right=None, **steps):
  """A result with these evaluations, (step, accuracy)."""
  empty = {name: [] for name in sweep_grid.STEP_METRICS}
  return {
    'arm': 'a',
    'levels': {},
    'seed': 0,
    'diverged': diverged,
    'planned': 10,
    'evaluations': [[step, right, 0.01, 8.0 * step] for step, right in evaluations],
    'right': right or {'0': [0, 1], '10': [1, 1]},
    'group_size': 4,
    'steps': empty | steps,
  }


def test_the_area_is_the_mean_accuracy_over_the_steps():
  # .2 to .6 over four steps, then .6 to .8 over six: (1.6 + 4.2) / 10.
  found = result([(0, 0.2), (4, 0.6), (10, 0.8)])
  assert claim_statistics.area(found) == pytest.approx(0.58)
  assert claim_statistics.final(found) == 0.8 and claim_statistics.collapsed(found) == 0


def test_a_run_that_diverged_has_no_accuracy_afterwards():
  # .2 to .6 over four steps, .6 to 0 over one, and five steps of 0.
  found = result([(0, 0.2), (4, 0.6)], diverged=True)
  assert claim_statistics.area(found) == pytest.approx(0.19)
  assert claim_statistics.final(found) == 0 and claim_statistics.collapsed(found) == 1


def test_a_collapse_is_a_third_below_the_best():
  assert claim_statistics.collapsed(result([(0, 0.2), (5, 0.9), (10, 0.59)])) == 1
  assert claim_statistics.collapsed(result([(0, 0.2), (5, 0.9), (10, 0.61)])) == 0


def test_spikes_are_five_times_the_median_and_null_is_left_out():
  found = result([(0, 0.2), (10, 0.3)], **{'learner/grad_norm': [1, 1, 1, 6, None]})
  assert claim_statistics.spikes(found) == 1 / 4
  assert claim_statistics.mean_of('learner/grad_norm')(found) == 9 / 4
  assert math.isnan(claim_statistics.mean_of('clip/low')(found))


def test_newly_solved_counts_the_problems_failed_in_every_response():
  found = result([(0, 0), (10, 1)], right={'0': [0, 0, 3, 0], '10': [1, 0, 0, 16]})
  assert claim_statistics.newly_solved(found) == 2 / 3
  assert math.isnan(
    claim_statistics.newly_solved(result([(0, 0)], right={'0': [1], '10': [0]}))
  )


def test_what_is_lost_counts_as_what_is_won():
  found = result([(0, 0), (10, 1)], right={'0': [0, 0, 3, 2], '10': [1, 2, 0, 4]})
  assert claim_statistics.newly_failed(found) == 1 / 2
  assert claim_statistics.accuracy_of_failed(found) == (1 / 4 + 2 / 4) / 2


def test_a_run_that_diverged_has_solved_nothing():
  for right in ({'0': [0, 2], '10': [4, 4]}, {'0': [0, 2]}):
    found = result([(0, 0.2)], right=right, diverged=True)
    assert claim_statistics.newly_solved(found) == 0
    assert claim_statistics.accuracy_of_failed(found) == 0
    assert claim_statistics.newly_failed(found) == 1


def test_bounds_where_the_search_moved_are_apart_from_those_where_it_did_not():
  # Of four updates one, two and none move the bound from .6 to .9.
  steps = {'clip/moved': [0.25, 0.5, 0.0, None], 'clip/low': [0.675, 0.75, 0.6, 0.7]}
  found = claim_statistics.bound_where_moved('clip/low')(result([(0, 0)], **steps))
  assert found == pytest.approx(0.9)
  still = {'clip/moved': [0.0, 0.0], 'clip/low': [0.6, 0.6], 'clip/target_met': [1, 1]}
  for name in ('low_moved', 'moved', 'target_met'):
    assert math.isnan(
      claim_statistics.OUTCOMES[name][1](result([(0, 0), (1, 0)], **still))
    )


def test_the_sign_test_is_exact():
  # Of eight signs of (1, 2, 3) only two have a sum as large as 6.
  assert claim_statistics.sign_flip(np.asarray([1.0, 2, 3])) == 2 / 8
  # -1 + 2 + 3 = 4: sums of 4 or more are +-6 and +-4.
  assert claim_statistics.sign_flip(np.asarray([-1.0, 2, 3])) == 4 / 8
  assert claim_statistics.sign_flip(np.zeros(3)) == 1
  assert claim_statistics.sign_flip(np.arange(1.0, 9)) == 2 / 256


def test_the_sign_test_is_seldom_small_where_nothing_differs():
  rng = np.random.default_rng(0)
  found = [claim_statistics.sign_flip(rng.standard_normal(6)) for _ in range(2000)]
  assert np.mean(np.asarray(found) <= 2 / 64 + 1e-9) == pytest.approx(2 / 64, abs=0.012)


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls():
  # .01 x 3, .02 x 2 and .03 x 1, which is raised to the one before it.
  assert claim_statistics.holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
  assert (
    claim_statistics.holm([0.6, 0.9]) == [1.0, 1.0] and claim_statistics.holm([]) == []
  )


def test_the_interval_is_that_of_all_draws_of_seeds():
  difference = np.asarray([0.0, 0.1, 0.2, 0.5])
  means = [np.mean(draw) for draw in itertools.product(difference, repeat=4)]
  exact = np.quantile(means, [0.025, 0.975])
  assert claim_statistics.bootstrap_interval(difference) == pytest.approx(
    exact, abs=0.026
  )
  found = claim_statistics.bootstrap_interval(difference)
  assert found == claim_statistics.bootstrap_interval(difference), (
    'the same seed, always'
  )


def test_the_smallest_effect_is_seen_with_its_power():
  rng = np.random.default_rng(0)
  spread = np.asarray([-1.0, 1, -1, 1, -1, 1, -1, 1]) * math.sqrt(7 / 8)  # deviation 1
  effect = claim_statistics.smallest_effect(spread)
  same_sign = (effect + rng.standard_normal((20_000, 8)) > 0).all(1).mean()
  assert same_sign == pytest.approx(0.8, abs=0.01)


def folder(tmp_path, seeds=3):
  """A folder of papers/ with results of two arms; b is .1, .2, .3 better than a."""
  (tmp_path / 'experiments.py').write_text(SETUP)
  (tmp_path / 'claims.py').write_text(CLAIMS)
  begin, end = '<!-- results of main -->', '<!-- end of main -->'
  (tmp_path / 'README.md').write_text(
    f'# Page\n<!-- claims --><!-- end of claims -->\n{begin}\nold\n{end}\n\nLast.\n'
  )
  experiment = claims.load(str(tmp_path)).get_experiment('main')
  for name, run in sweep_grid.runs(experiment).items():
    if run.seed < seeds:
      better = 0.1 * (run.seed + 1) * (run.arm == 'b')
      made = result([(0, 0.2 + better), (10, 0.2 + better)])
      made |= {'arm': run.arm, 'seed': run.seed, 'versions': {}, 'commit': 'c0ffee'}
      sweep_grid.write(str(tmp_path / 'results' / 'main'), name, made)
  return str(tmp_path)


def test_the_page_has_the_numbers_of_its_results(tmp_path):
  where = folder(tmp_path)
  assert claims.main([where, '--check']) == 1
  assert claims.main([where]) == 0 and claims.main([where, '--check']) == 0
  text = (tmp_path / 'README.md').read_text()
  assert '6 of 6 runs, at commit `c0ffee`.' in text and 'old' not in text
  assert '| a | 3 | 0.200 | 0.200 | 1.000 | 0.000 |' in text
  assert '| a | 3 | - |' not in text, 'nothing to say'
  # .1, .2, .3 have the mean .2; three seeds are too few for a test.
  assert '| b minus a | +0.200 | +0.100 to +0.300 | 3 of 3 |' in text
  claim = '| b is better | Fig. 1 | tiny | seen on all 3 seeds | b less a +0.200 '
  claim += '(+0.100 to +0.300), 3 of 3 seeds as claimed | [main](figures/lines.png) |'
  assert claim in text
  assert '| b is worse | Fig. 2 | tiny | opposite on all 3 seeds |' in text
  assert '| b is huge | Table 1 | 7 B | not run |  |  |' in text
  for figure in ('lines', 'pairs'):
    assert (tmp_path / 'figures' / f'{figure}.png').stat().st_size > 1000
  assert text.startswith('# Page') and text.endswith('Last.\n')


def test_a_page_without_results_says_so_and_one_without_markers_is_refused(tmp_path):
  where = folder(tmp_path, seeds=0)
  assert claims.EMPTY in claims.page(where)
  (tmp_path / 'README.md').write_text('# Page\n')
  with pytest.raises(ValueError, match='needs the markers <!-- claims -->'):
    claims.page(where)


def test_differences_are_paired_by_seed():
  runs = {}
  for arm, seed, accuracy in (
    ('a', 0, 0.2),
    ('a', 1, 0.4),
    ('b', 1, 0.5),
    ('b', 2, 0.9),
  ):
    made = result([(0, accuracy), (10, accuracy)]) | {'arm': arm, 'seed': seed}
    runs[f'{arm}{seed}'] = made
  compared = Compared('b', ('a',), 'area')
  assert claim_shown.comparisons(runs, compared) == '', 'one seed in common'
  runs['b0'] = runs['b1'] | {'seed': 0}
  assert '| b minus a | +0.200 |' in claim_shown.comparisons(runs, compared)


def of_arms(differences):
  """Results of two arms, b better than a by these differences, one per seed."""
  made = {}
  for seed, better in enumerate(differences):
    for arm, accuracy in (('a', 0.5), ('b', 0.5 + better)):
      one = result([(0, accuracy), (10, accuracy)]) | {'arm': arm, 'seed': seed}
      made[f'{arm}{seed}'] = one
  return made


@pytest.mark.parametrize(('tested', 'seeds'), [(True, 8), (True, 5), (False, 8)])
def test_only_hypotheses_with_seeds_enough_have_a_p(tested, seeds):
  compared = Compared('b', ('a',), 'area', tested)
  text = claim_shown.comparisons(of_arms([0.1] * seeds), compared)
  # Of 256 signs two have so large a mean; equal differences have no spread.
  assert text.endswith('8 of 8 | 0.008 | 0.000 |') == (tested and seeds == 8)
  assert ('p, Holm over 1' in text) == (tested and seeds == 8)


BETTER = Part('b less a', 'area', (('b',),), (('a',),))
WORSE = BETTER._replace(sign=-1)
CONSTANT = Part('a less .4', 'area', (('a',),), (), 0.4)


@pytest.mark.parametrize(
  ('parts', 'differences', 'verdict'),
  [
    ([BETTER], [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2], 'seen'),
    ([WORSE], [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2], 'opposite'),
    # The last seed alone, .4 off its neighbours: p = .15.
    ([BETTER, CONSTANT], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, -0.1], 'not seen'),
    ([BETTER, WORSE], [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2], 'opposite'),
    ([CONSTANT], [0.1] * 8, 'seen'),
    ([BETTER], [0.1, 0.2, 0.1, 0.2], 'seen on all 4 seeds'),
    ([BETTER], [0.1, 0.2, -0.1, 0.2], 'not seen'),
    ([BETTER], [0.1], 'not run'),
  ],
)
def test_a_verdict_needs_every_part_and_enough_seeds(parts, differences, verdict):
  claim = Claim('', '', '', 'main', tuple(parts))
  found = claim_verdicts.judge(claim, of_arms(differences), range(len(differences)))
  assert found.verdict == verdict
  assert len(found.effects) == len(parts) * (verdict != 'not run')


def test_what_was_made_so_has_no_verdict():
  claim = Claim('', '', '', 'main', (BETTER,), by_design=True)
  found = claim_verdicts.judge(claim, of_arms([0.1] * 8), range(8))
  assert found == ('by design', ['b less a +0.100 (+0.100 to +0.100)'])


def test_seeds_without_a_value_do_not_make_a_sign_count():
  # Two of eight runs had failed a problem at first, and both have solved it.
  part = Part('', 'newly_solved', (('b',),))
  runs = of_arms([0.1] * 8)
  for seed in range(2, 8):
    runs[f'b{seed}'] |= {'right': {'0': [1, 1], '10': [1, 1]}}
  claim = Claim('', '', '', 'main', (part,))
  assert claim_verdicts.judge(claim, runs, range(8)).verdict == 'not seen'
  runs['b1'] |= {'right': {'0': [1, 1], '10': [1, 1]}}
  assert claim_verdicts.judge(claim, runs, range(8)).verdict == 'not run'


def test_a_claim_is_not_run_until_every_seed_is_there():
  claim = Claim('', '', '', 'main', (BETTER,))
  assert claim_verdicts.judge(claim, of_arms([0.1] * 7), range(8)).verdict == 'not run'
  assert claim_verdicts.judge(claim, {}, range(8)).verdict == 'not run'
  assert claim_verdicts.judge(Claim('', '', ''), {}, ()).verdict == 'not run'


def test_the_p_of_a_claim_is_adjusted_for_its_parts():
  # Of 256 signs 2 give a mean of .1, times two parts.
  claim = Claim('', '', '', 'main', (BETTER, CONSTANT))
  found = claim_verdicts.judge(claim, of_arms([0.1] * 8), range(8))
  assert found.effects[0].endswith('p = 0.016')
