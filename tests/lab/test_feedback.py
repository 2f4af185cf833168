"""Protocol 3: its checks, tests and words on results that are made by hand."""

import itertools

import making
import numpy as np
import pytest

from lab.outcomes import OUTCOMES
from papers.bench import differences, feedback
from papers.bench.feedback import D, R


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
