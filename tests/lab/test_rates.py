"""Protocol 5: which rates are tried, and which one is an arm's own."""

import pytest

from lab import experiments
from papers.bench import rates

pytestmark = pytest.mark.fast


def test_a_best_rate_at_an_edge_asks_for_the_next_one():
  assert rates.to_add({1e-4: 0.7, 2e-4: 0.6, 4e-4: 0.5}) == 5e-5
  assert rates.to_add({1e-4: 0.5, 2e-4: 0.6, 4e-4: 0.7}) == 8e-4
  assert rates.to_add({1e-4: 0.5, 2e-4: 0.7, 4e-4: 0.6}) is None
  assert rates.to_add({5e-5: 0.8, 1e-4: 0.7, 2e-4: 0.6, 4e-4: 0.5}) is None
  top = dict.fromkeys(rates.LADDER[:-1], 0.5) | {3.2e-3: 0.9}
  assert rates.to_add(top) is None


def test_of_equal_rates_the_smaller_one_is_an_arms_own():
  assert rates.best({4e-4: 0.7, 2e-4: 0.7, 1e-4: 0.6}) == 2e-4


def test_every_arm_is_a_valid_run_that_differs_in_its_rule_and_rate_alone():
  made = rates.get_experiment('rates_s2')._replace(seeds=(800,))
  arms = {
    arm: knobs | {'optimizer.lr': rate}
    for arm, knobs in rates.ARMS.items()
    for rate in rates.LADDER[:2]
  }
  specs = experiments.runs(made._replace(arms=arms))
  assert len(specs) == len(rates.ARMS) == 12
  assert {spec.config.problems.custom.seed for spec in specs.values()} == {800}


def test_the_mean_of_a_rate_needs_all_of_its_seeds(monkeypatch):
  monkeypatch.setitem(rates.TRIED, 's2', {'grpo': (1e-4, 2e-4)})

  def result(accuracy):
    return {'evaluations': [[0, accuracy], [40, accuracy]], 'diverged': False} | {
      'planned': 40
    }

  stored = {f'grpo_lr0.0001-seed{s}': result(s / 1000) for s in (800, 801, 802)}
  stored['grpo_lr0.0002-seed800'] = result(0.9)
  assert rates.means(stored, 's2') == {'grpo': {1e-4: pytest.approx(0.801)}}
