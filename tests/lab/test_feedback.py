"""Protocol 3: its checks, tests and words on results that are made by hand."""

import itertools
import math

import making
import numpy as np
import pytest
from scipy import stats

from lab import figures
from lab.evidence import Drawn
from lab.outcomes import OUTCOMES
from papers.bench import bounds, differences, experiments, feedback
from papers.bench.feedback import B, D, R


def updates(choice, low, high, no_evidence=None):
  return {
    'number': [*range(len(choice))],
    'low': [*low],
    'high': [*high],
    'choice': [*choice],
    'met': [0] * len(choice),
    'no_evidence': no_evidence or [0] * len(choice),
  }


def states_of(wide):
  """The bounds of recipe's two states."""
  return [0.95 if x else 0.8 for x in wide], [2.0 if x else 1.2 for x in wide]


BEST = {'recipe': 0.6, 'yoked': 0.6, 'coin': 0.5, 'low80_high120': 0.4}
BEST |= {'low80_high200': 0.38, 'low95_high120': 0.56, 'low95_high200': 0.54}


@pytest.fixture(scope='module')
def results():
  """R with 28 seeds: what is above is the accuracy of each arm, up to noise."""
  rng = np.random.default_rng(0)
  made = {}
  for seed, rate in itertools.product(experiments.YOKED_SEEDS, feedback.RATES):
    chosen = {x: rng.random(40) < 0.5 for x in experiments.YOKED}
    for arm in experiments.YOKED:
      wide = rng.random(40) < 0.5 if arm == 'coin' else chosen[arm]
      applied = states_of(wide)
      if arm.startswith('low'):
        applied = [int(arm[3:5]) / 100] * 40, [int(arm[-3:]) / 100] * 40
      accuracy = BEST[arm] + 0.1 * seed / 628 + rng.normal() * 0.02
      run = making.result(
        None,
        [(0, 0.3), (20, accuracy), (40, accuracy)],
        arm=arm,
        levels={'rate': rate},
        seed=seed,
        updates=updates(11 * chosen[arm], *applied),
      )
      made[f'{arm}-{rate}-seed{seed}'] = run
  for run in made.values():
    if run['arm'] == 'yoked':
      rate = run['levels']['rate']
      donor = made[f'recipe-{rate}-seed{run["seed"] ^ 1}']
      run['updates'] |= {x: donor['updates'][x] for x in ('low', 'high')}
  return made


@pytest.fixture(autouse=True)
def few_flips(monkeypatch):
  monkeypatch.setattr(differences, 'FLIPS', 9_999)


def test_words_of_the_protocol_follow_from_the_effects(results):
  found = {x.difference.name: x for x in feedback.verdicts(results, R)}
  assert found['H1'].word == 'no effect of size'
  assert found['H2'].word == 'seen' and found['H3'].word == 'seen'
  assert found['H4'].word.startswith('seen') and found['H4'].test.mean < 0
  assert found['H5'].word == 'seen'
  # Area: the mean of (.3 + a) / 2 and a, so three quarters of a difference.
  assert abs(found['H3'].test.mean - 0.75 * 0.16) < 0.01
  text = feedback.tables(results, R)
  assert (
    'H1: `recipe` less `yoked`: feedback' in text and '**no effect of size**' in text
  )
  assert len(found['H1'].test.values_S) == 28


def test_a_check_that_fails_is_a_premise_that_is_absent(results):
  broken = dict(results)
  name = f'yoked-{feedback.RATES[0]}-seed600'
  run = broken[name]
  changed = run['updates'] | {'low': run['updates']['low'][::-1]}
  broken[name] = run | {
    'updates': changed | {'high': [2.0 if x > 0.9 else 1.2 for x in changed['low']]}
  }
  found = {x.difference.name: x.word for x in feedback.verdicts(broken, R)}
  assert found['H1'] == found['H5'] == 'premise absent'
  assert found['H2'] == 'seen'
  assert not feedback.checks(broken, R)['C6'][1][0]
  assert all(check[0] for _, check in feedback.checks(results, R).values())


def test_a_yoked_run_that_has_its_own_bounds_is_no_control(results):
  own = {}
  for name, run in results.items():
    changed = run['updates']
    if run['arm'] == 'yoked':
      low, high = states_of(np.asarray(changed['choice']) == 11)
      changed = changed | {'low': low, 'high': high}
    own[name] = run | {'updates': changed}
  held, text = feedback.checks(own, R)['C4'][1]
  assert not held and text.startswith('kappa 1.000')


def test_the_other_rate_decides_where_one_has_no_difference(results):
  flat = {
    name: run
    | {
      'evaluations': results[
        f'low80_high120-{run["levels"]["rate"]}-seed{run["seed"]}'
      ]['evaluations']
    }
    if run['arm'].startswith('low') and run['levels']['rate'] == feedback.RATES[1]
    else run
    for name, run in results.items()
  }
  (h3,) = (x for x in feedback.verdicts(flat, R) if x.difference.name == 'H3')
  assert {cell[1] for cell in h3.difference.plus} == {feedback.RATES[0]}
  assert h3.word == 'seen' and abs(h3.test.mean - 0.75 * 0.16) < 0.015


@pytest.mark.parametrize(
  ('p', 'inner', 'mean', 'claimed', 'word'),
  [
    (0.01, (0.03, 0.06), 0.04, 1, 'seen'),
    (0.01, (0.03, 0.06), 0.04, -1, 'opposite'),
    (0.01, (-0.06, -0.03), -0.04, 0, 'seen'),
    (0.01, (0.005, 0.015), 0.01, 1, 'seen, inside the margin'),
    (0.3, (-0.015, 0.01), 0.0, 1, 'no effect of size'),
    (0.3, (-0.03, 0.01), -0.01, 1, 'undecided'),
  ],
)
def test_a_word_is_one_of_the_protocol(p, inner, mean, claimed, word):
  test = differences.Tested(mean, inner, inner, p, np.zeros(2))
  assert differences.word(test, p, 0.02, claimed) == word


# Accuracy of the arms a, b, c and d: d is the one with both bounds high.
SQUARE = {'low80_high120': 0.1, 'low80_high200': 0.2}
SQUARE |= {'low95_high120': 0.4, 'low95_high200': 0.8}


def square(gain):
  """Runs of two seeds whose accuracy never changes; d has `gain` at the second rate."""
  runs = {}
  for seed, rate in itertools.product((600, 601), feedback.RATES):
    for arm, accuracy in SQUARE.items():
      more = gain if arm == 'low95_high200' and rate == feedback.RATES[1] else 0.0
      more += 0.05 * (seed - 600)  # no comparison within a seed changes
      runs[f'{arm}-{rate}-seed{seed}'] = making.result(
        None,
        [(step, accuracy + more) for step in (0, 20, 40)],
        arm=arm,
        levels={'rate': rate},
        seed=seed,
      )
  return runs


def test_main_effects_and_the_interaction_of_a_square_are_those_worked_by_hand():
  # Lower bound: (.4 + .8) / 2 - (.1 + .2) / 2 = .45, and .5 where d is .9: mean .475.
  # Upper bound: (.2 + .8) / 2 - (.1 + .4) / 2 = .25 and .3. Interaction, (d - c) less
  # (b - a): .4 - .1 = .3, and .5 - .1 = .4.
  found = square(0.1)
  lower, upper = feedback.legs(R, feedback.RATES, '')
  np.testing.assert_allclose(differences.by_seed(lower, found), [0.475] * 2)
  np.testing.assert_allclose(differences.by_seed(upper, found), [0.275] * 2)
  both = feedback.interaction(R, feedback.RATES)
  np.testing.assert_allclose(differences.by_seed(both, found), [0.35] * 2)
  for rate, expected in zip(feedback.RATES, (0.3, 0.4), strict=True):
    alone = feedback.interaction(R, (rate,))
    np.testing.assert_allclose(differences.by_seed(alone, found), [expected] * 2)


def test_a_mean_of_two_cells_less_one_cell_is_no_sum():
  # (.4 + .8) / 2 - .1 = .5.
  cells = (differences.at((arm,), feedback.RATES[:1]) for arm in SQUARE)
  a, _, c, d = cells
  x = differences.Difference('T1', '', R, (*c, *d), a)
  np.testing.assert_allclose(differences.by_seed(x, square(0.0)), [0.5] * 2)


def test_effects_at_an_evaluation_end_there():
  evaluations = [(0, 0.3), (2, 0.5), (4, 0.9)]
  run = making.result(None, evaluations, planned=6)
  ends = [OUTCOMES['final'][1](feedback.until(run, i)) for i in range(3)]
  assert ends == [0.3, 0.5, 0.9]
  # A run that diverged after step 2 has 0 at the evaluation that it did not reach.
  lost = making.result(None, evaluations[:2], planned=6, diverged=True)
  assert [OUTCOMES['final'][1](feedback.until(lost, i)) for i in (1, 2)] == [0.5, 0.0]


def test_kappa_with_others_is_that_of_donors_that_are_no_partner():
  """Seeds 660 and 661 are partners; all but the yoked run of 660 search alike."""
  rising, falling = [0, 0, 1, 1], [1, 1, 0, 0]
  runs = {}
  for seed in (660, 661, 662, 663):
    for arm in ('recipe', 'yoked'):
      chosen = falling if (arm, seed) == ('yoked', 660) else rising
      made = updates(11 * np.asarray(chosen), *states_of(rising))
      levels = {'depth': 'depth4'}
      runs[f'{arm}-depth4-seed{seed}'] = making.result(
        arm=arm, levels=levels, seed=seed, updates=made
      )
  partners = feedback.with_partners(runs, D)
  assert partners.tolist() == pytest.approx([-1, 1, 1, 1])
  assert feedback.with_others(runs, D).tolist() == pytest.approx([-1, 1, 1, 1])
  # Another choice of the partner changes the one and not the other.
  runs['recipe-depth4-seed661']['updates'].update(
    updates(11 * np.asarray(falling), *states_of(falling))
  )
  runs['yoked-depth4-seed660']['updates'].update(
    dict(zip(('low', 'high'), states_of(falling), strict=True))
  )
  assert feedback.with_partners(runs, D)[0] == pytest.approx(1)
  assert feedback.with_others(runs, D)[0] == pytest.approx(-1)


def test_a_run_whose_states_never_change_is_counted_and_left_out():
  still = updates([11] * 4, *states_of([1] * 4))
  moving = updates([0, 0, 11, 11], *states_of([0, 0, 1, 1]))
  runs = {
    f'{arm}-seed{seed}': making.result(
      arm=arm, levels={'rate': 'lr0.0006'}, seed=seed, updates=found
    )
    for arm in ('recipe', 'yoked')
    for seed, found in ((600, still), (601, still), (602, moving), (603, moving))
  }
  held, text = feedback.unrelated(runs, R)
  assert not held and text == 'kappa 1.000, from 1.000 to 1.000, in 2 of 4 runs'


def test_p_values_are_those_of_all_sign_flips():
  values = np.asarray([0.3, -0.1, 0.25, 0.4, 0.05, 0.2, -0.15, 0.1])
  signs = np.asarray([*itertools.product((1, -1), repeat=8)])
  exact = (np.abs(signs @ values) >= abs(values.sum()) - 1e-12).mean()
  assert differences.tested(values).p == pytest.approx(exact)
  test = differences.tested(values)
  half = stats.t.ppf(0.95, 7) * values.std(ddof=1) / math.sqrt(8)
  assert test.inner == pytest.approx((values.mean() - half, values.mean() + half))


def test_kappa_is_that_of_a_table():
  # 20 both, 5 and 10 one of the two, 15 neither: agreement .7, by chance .5.
  one = np.repeat([1, 1, 0, 0], [20, 5, 10, 15]) == 1
  other = np.repeat([1, 0, 1, 0], [20, 5, 10, 15]) == 1
  assert feedback.kappa(one, other) == pytest.approx(0.4)


def test_paths_are_those_of_the_searches():
  recipe, balanced = feedback.path('recipe'), feedback.path('balanced')
  assert recipe[0] == (0.8, 1.2) and recipe[3] == (0.95, 1.2)
  assert recipe[-1] == (0.95, 2.0) and len(recipe) == 12
  assert balanced[0] == (0.6, 1.2) and balanced[36] == (0.6, 3.0)
  assert balanced[-1] == (0.9, 3.0) and len(balanced) == 52


def test_every_comparison_names_cells_of_its_experiment():
  for x in feedback.DIFFERENCES:
    made = experiments.get_experiment(x.experiment)
    levels = {level for factor in made.factors.values() for level in factor}
    for arm, *level in (*x.plus, *x.minus):
      assert arm in made.arms and set(level) <= levels
    assert len(x.plus) == len(x.minus)
  assert {x.experiment for x in feedback.DIFFERENCES} == {R, B, D}
  assert bounds.SEARCHES.keys() == {'recipe', 'balanced'}


def test_the_histogram_of_a_search_leaves_out_updates_without_evidence():
  found = updates([0, 0, 11, 0], *states_of([0, 0, 1, 0]), no_evidence=[0, 0, 0, 1])
  steps = {'rollout/responses': [8.0, 16.0], 'clip/share': [0.3, 0.5]}
  run = making.result(arm='recipe', updates=found, steps=steps)
  figure = figures.searches({'a': run}, Drawn('searches', ('recipe',)))
  top, bottom = figure.axes
  # A step histogram's outline: two of three updates at point 0, one at 11.
  assert max(y for _, y in top.patches[0].get_xy()) == pytest.approx(2 / 3)
  assert bottom.get_xlabel() == 'share, mean over a step'
