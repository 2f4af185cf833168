"""Protocol 5: comparisons, checks and words from results made by hand."""

import json

import making
import numpy as np
import pytest

from papers.bench import differences, own_rates, rates

pytestmark = pytest.mark.fast

ARMS = tuple(rates.ARMS)


def result(arm, seed, accuracy, start=0.4):
  """A run whose accuracy jumps to a value and stays there."""
  by_step = [(0, start), (1e-9, accuracy), (40, accuracy)]
  steps = {'loss/entropy': [0.5]}
  return making.result(None, by_step, arm=arm, seed=seed, planned=40, steps=steps)


def stage_2(accuracy_of, seeds, noise=0.01):
  """Results of arms at their own rates; seeds differ in what all arms share."""
  rng = np.random.default_rng(0)
  shared_S = rng.normal(scale=0.05, size=len(seeds))
  return {
    f'{arm}-seed{seed}': result(
      arm, seed, mean + shared + noise * rng.normal(), start=0.4 + shared
    )
    for seed, shared in zip(seeds, shared_S, strict=True)
    for arm, mean in accuracy_of.items()
  }


def stage_1(accuracy_of):
  """Results at three rates of which the middle one is the best."""
  return {
    f'{arm}_lr{rate:g}-seed{seed}': result(f'{arm}_lr{rate:g}', seed, mean - worse)
    for arm, mean in accuracy_of.items()
    for rate, worse in zip(rates.FIRST, (0.04, 0.0, 0.06), strict=True)
    for seed in rates.TUNING
  }


@pytest.fixture
def chosen(monkeypatch):
  """Every arm tried at the first three rates; its own one is the middle one."""
  monkeypatch.setattr(differences, 'FLIPS', 9_999)
  for setting in ('s1', 's2'):
    monkeypatch.setitem(rates.TRIED, setting, dict.fromkeys(ARMS, rates.FIRST))
    monkeypatch.setitem(rates.OWN, setting, dict.fromkeys(ARMS, 2e-4))


def accuracies(**changes):
  """Means of all arms; by these words: no effect of bounds, vespo ahead by .1."""
  means = dict.fromkeys(ARMS, 0.7) | {'vespo': 0.8, 'tis': 0.6}
  return means | {'low95_high200': 0.705} | changes


def planned(means, tried=None):
  """Results of both stages: setting -> results, of the means of its arms."""
  own = {x: stage_2(of_arms, rates.TEST[x]) for x, of_arms in means.items()}
  return own, {x: stage_1(tried or accuracies()) for x in own}


def words(own, tried):
  whole = own_rates.pooled(own)
  checked = own_rates.checks(whole, tried)
  holds = {name: check[0] for name, (_, check) in checked.items()}
  judged = own_rates.verdicts(own, tried, holds)
  return checked, {x.difference.text: x for x in judged}, own_rates.reading(judged)


def test_all_comparisons_have_their_words_and_their_reading(chosen):
  s1 = accuracies(grpo_common=0.5, gspo_common=0.65)
  checked, by_text, reading = words(*planned({'s1': s1, 's2': accuracies()}))
  assert all(holds for _, (holds, _) in checked.values()) and len(checked) == 8
  first = by_text['S2: mean of [.95, 1.2] and [.95, 2.0] less `grpo`']
  assert first.word == 'no effect of size'
  assert first.test.mean == pytest.approx(0.0025, abs=0.006)
  assert by_text['S1: `vespo` less `grpo`'].word == 'seen'
  assert by_text['S1: `gspo` less `grpo`'].word == 'no effect of size'
  lead = by_text['S1: `gspo` less `grpo` at 6e-4, less the same at own rates']
  assert lead.word == 'seen' and lead.test.mean == pytest.approx(0.15, abs=0.02)
  # The fixed arm that stage 1 ranks first is compared with, in both settings.
  assert by_text['S1: `recipe` less `low95_high200`'].word == 'no effect of size'
  assert by_text['S2: `tis` less `grpo`'].word == 'seen'  # no direction is claimed
  assert len(by_text) == 1 + 2 + 1 + 4 + 10
  assert reading == 'weight responses, not tokens; bounds do not matter'


def test_holm_is_over_the_family_of_both_settings(chosen):
  means = accuracies(grpo_common=0.5, gspo_common=0.5)
  _, by_text, _ = words(*planned({'s1': means, 's2': means}))
  family = [x for x in by_text.values() if x.difference.name == 'T4']
  smallest = min(family, key=lambda x: x.test.p)
  assert len(family) == 4
  assert smallest.adjusted == pytest.approx(min(1, 4 * smallest.test.p))


@pytest.mark.parametrize(
  ('changes', 'reading'),
  [
    ({}, 'bounds are a remedy for a rate that is too large'),
    (
      {'low95_high120': 0.8, 'low95_high200': 0.8},
      'a lower bound of .95 helps at the best rate',
    ),
    (
      {'low95_high120': 0.6, 'low95_high200': 0.6},
      'cutting early costs accuracy where training is stable',
    ),
  ],
)
def test_the_reading_is_that_of_the_protocols_table(chosen, changes, reading):
  values = accuracies(vespo=0.71, **changes)
  means = {'s1': values | dict.fromkeys(own_rates.COMMON, 0.5), 's2': values}
  assert words(*planned(means, values))[2] == reading


def test_a_ceiling_leaves_nothing_to_be_seen(chosen):
  checked, by_text, reading = words(*planned({'s2': accuracies(recipe=0.99)}))
  assert not checked['C4 s2'][1][0]
  assert {x.word for x in by_text.values()} == {'premise absent'}
  assert reading == ''  # T2 is another setting's


def test_arms_that_do_not_differ_have_no_order_but_the_first_test_stands(chosen):
  # Every arm has every rank twice in 24 seeds.
  own = {
    's2': {
      f'{arm}-seed{seed}': result(arm, seed, 0.7 + 0.001 * ((i + seed) % len(ARMS)))
      for i, arm in enumerate(ARMS)
      for seed in rates.TEST['s2']
    }
  }
  checked, by_text, _ = words(own, {'s2': stage_1(accuracies())})
  assert not checked['C3 s2'][1][0]
  of_words = {x.difference.name: x.word for x in by_text.values()}
  assert of_words == {'T1': 'no effect of size', 'T5': 'premise absent'}


def test_the_first_part_alone_has_a_word_and_few_seeds_have_none(chosen, monkeypatch):
  lower = {arm: 0.7 for arm in rates.LOWER}
  monkeypatch.setitem(rates.OWN, 's2', dict.fromkeys(rates.LOWER, 2e-4))
  monkeypatch.setitem(rates.TRIED, 's2', dict.fromkeys(rates.LOWER, rates.FIRST))
  tried = {'s2': stage_1(lower)}
  own = {'s2': stage_2(lower, rates.TEST['s2'][:16])}
  assert [x.difference.name for x in words(own, tried)[1].values()] == ['T1']
  own = {'s2': stage_2(lower, rates.TEST['s2'][:15])}
  assert not words(own, tried)[1]


def test_a_seed_without_one_of_its_arms_does_not_count(chosen):
  own, tried = planned({'s2': accuracies()})
  del own['s2']['sapo-seed840']
  _, by_text, _ = words(own, tried)
  number = {x.difference.name: len(x.test.values_S) for x in by_text.values()}
  assert number == {'T1': 24, 'T5': 23}


def test_an_own_rate_that_is_not_the_best_one_fails_its_check(chosen, monkeypatch):
  tried = stage_1(accuracies())
  assert own_rates.inside('s2', tried) == (True, 'at an end of the ladder: none')
  monkeypatch.setitem(rates.OWN['s2'], 'sapo', 1e-4)
  assert not own_rates.inside('s2', tried)[0]


def test_the_order_of_the_same_arms_has_a_tau_of_one():
  one = stage_2({'a': 0.5, 'b': 0.6, 'c': 0.7, 'only': 0.1}, range(8), noise=1e-4)
  same = stage_2({'a': 0.1, 'b': 0.2, 'c': 0.3}, range(20, 30), noise=1e-4)
  reverse = stage_2({'a': 0.3, 'b': 0.2, 'c': 0.1}, range(20, 30), noise=1e-4)
  text = 'the order of 3 arms at 6e-4 and at own rates: 1.00 (1.00 to 1.00).'
  assert own_rates.orders(one, same).endswith(text)
  assert own_rates.orders(one, reverse).endswith(': -1.00 (-1.00 to -1.00).')


def test_the_section_of_the_last_setting_reads_what_the_others_stored(
  chosen, tmp_path, monkeypatch
):
  for name in ('s1.jsonl', 'rivals.jsonl', 'details.zip'):
    (tmp_path / name).symlink_to(rates.RESULTS / name)
  monkeypatch.setattr(rates, 'RESULTS', tmp_path)
  s1 = stage_2(accuracies(grpo_common=0.5, gspo_common=0.65), rates.TEST['s1'])
  written = {f'rates_{x}': stage_1(accuracies()) for x in ('s1', 's2')}
  written['own_s2'] = stage_2(accuracies(), rates.TEST['s2'])
  for experiment, results in written.items():
    (tmp_path / experiment).mkdir()
    for run, content in results.items():
      (tmp_path / experiment / f'{run}.json').write_text(json.dumps(content))
  text = own_rates.section(s1, 's1')
  assert text.count('**no effect of size**') >= 3 and '| C4 s2 |' in text
  assert (
    'weight responses, not tokens' in text and 'the order of 9 arms at 6e-4' in text
  )
  alone = own_rates.section(written['own_s2'], 's2')
  assert 'T1: S2' in alone and 'T4' not in alone and 'By the table' not in alone
