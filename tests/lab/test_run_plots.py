"""The figures of a notebook show what the files of the runs say."""

import numpy as np
import pytest
import recordings

from lab import counterfactual, rule_maps, run_plots
from lab.microscope_rules import RULES
from lab.rule_maps import PROBABILITY, RATIO


@pytest.fixture
def two(tmp_path):
  rows = [{'rollout/reward': 0.1, 'loss/entropy': np.nan}, {'rollout/reward': 0.3}]
  rows[0] |= {'clip/low': 0.8, 'clip/high': 1.2}
  config = {'steps': 3, 'sampler': {}, 'clip': {'b': 1, 'c': [2]}}
  full = recordings.run(tmp_path / 'full', rows, config, first=1)
  responses = [recordings.response('abc', True, 1.0)]
  recordings.step(tmp_path / 'full', 2, *[{'responses': responses}] * 2)
  config |= {'clip': {'b': 2, 'c': [2]}}
  bare = recordings.run(tmp_path / 'bare', [{'rollout/reward': 0.2}], config, first=1)
  return [run_plots.read_run(full, 'first'), run_plots.read_run(bare)]


def test_a_run_is_read_without_model_or_config(two, tmp_path):
  full, bare = two
  assert (full.label, bare.label) == ('first', 'bare')
  assert [r['rollout/reward'] for r in full.rows] == [0.1, 0.3]
  assert [g.step for g in full.groups] == [2, 2] and bare.groups == []
  assert run_plots.differences(two) == {'clip.b': [1, 2]}
  with pytest.raises(ValueError, match='nowhere'):
    run_plots.read_run(tmp_path / 'nowhere')


def test_runs_are_overlaid_in_the_panels_that_they_recorded(two):
  axes = run_plots.overlay(two).axes
  assert [ax.get_title(loc='left') for ax in axes] == [
    'Reward: fresh responses',
    'Entropy of the policy',
    'Clip bounds: high, dashed: low',
    '',
  ]
  assert [line.get_ydata().tolist() for line in axes[2].lines][:2] == [[1.2], [0.8]]
  lines = [
    line.get_xydata().tolist() for line in axes[0].lines if len(line.get_xdata())
  ]
  assert lines == [[[1, 0.1], [2, 0.3]], [[1, 0.2]]]


def test_a_running_mean_begins_and_ends_half_a_window_inside():
  step_N, value_N = np.arange(6.0), np.array([0.0, 3.0, 6.0, 0.0, 30.0, 6.0])
  # window 3: (0+3+6)/3, (3+6+0)/3, (6+0+30)/3, (0+30+6)/3
  steps, smooth = run_plots.smoothed((step_N, value_N), 3)
  assert steps.tolist() == [1, 2, 3, 4]
  np.testing.assert_allclose(smooth, [3, 3, 12, 12], rtol=1e-14)  # 45 times float64's


# ------------------------------------------- the map of a rule has its weights by hand


def at(name, sign, ratio, probability):
  """The weight of the grid's point nearest to these values."""
  i = np.abs(np.log(RATIO / ratio)).argmin()
  j = np.abs(np.log(PROBABILITY / probability)).argmin()
  return rule_maps.weights(RULES[name], sign)[i, j], RATIO[i], PROBABILITY[j]


@pytest.mark.parametrize(
  ('name', 'sign', 'ratio', 'probability', 'by_hand'),
  [
    ('GRPO', 1, 0.5, 0.01, lambda r, p: r),
    ('GRPO', 1, 1.5, 0.01, lambda r, p: 0),
    ('GRPO', -1, 5, 0.01, lambda r, p: -r),
    ('TIS', 1, 5, 0.01, lambda r, p: 2),
    ('DPPO-TV', 1, 3, 0.01, lambda r, p: r),  # p - q is .007
    ('DPPO-TV', 1, 3, 0.9, lambda r, p: 0),  # p - q is .6, above .2
  ],
)
def test_weights_by_hand(name, sign, ratio, probability, by_hand):
  found, r, p = at(name, sign, ratio, probability)
  assert found == pytest.approx(by_hand(r, p), rel=1e-4)


# ---------------------------------------------------------------- a recorded batch


def recorded(tmp_path):
  """Seven tokens: ratios 1, 1.5, 2.5 with A = 1, and 0.7, 0.4, 1, 1.8 with A = -1."""
  lines = [
    recordings.neutral(0, 1.0, [1.0, 1.5, 2.5], p=0.3),
    recordings.neutral(0, 0.0, [0.7, 0.4, 1.0, 1.8], p=0.3),
  ]
  return counterfactual.read(recordings.jsonl(tmp_path / 'batch.jsonl', lines))


def of(found, knobs):
  config = counterfactual.config_of(found, knobs)
  return config, counterfactual.apply(found, config)


def test_the_region_is_where_a_token_of_that_sign_would_be_cut(tmp_path):
  found = recorded(tmp_path)
  p, r = 55, {'1.41': 35, '2': 40, '1/2': 20}  # p = .562
  assert rule_maps.PROBABILITY[p] == pytest.approx(0.562, abs=1e-3)
  assert rule_maps.RATIO[[*r.values()]] == pytest.approx([2**0.5, 2, 0.5])

  def cut(knobs, sign, ratio, column=p):
    return bool(rule_maps.cut_regions(*of(found, knobs))[sign][r[ratio], column])

  grpo = {'clip.rule': 'fixed'}
  assert cut(grpo, 1, '2') and cut(grpo, 1, '1.41') and not cut(grpo, 1, '1/2')
  # p = .562 and q = 1.12 for r = 1/2: there is no such token.
  assert not cut(grpo, -1, '1/2') and cut(grpo, -1, '1/2', column=40)
  # The search of the batch ends at 1.55: P is 1 + 1.5 and N is 1 + .7 + 1.8 above .6.
  balanced = {'clip.rule': 'balanced', 'clip.target': 0.4}
  assert not cut(balanced, 1, '1.41') and cut(balanced, 1, '2')
  # DCPO: a token with p = .1 is inside its bounds up to r (p - q) = .2, not with .562.
  dcpo = {'clip.rule': 'dcpo'}
  assert cut(dcpo, 1, '2') and not cut(dcpo, 1, '2', column=40)
  gspo = {'loss.rule': 'sequence', 'clip.rule': 'fixed', 'loss.aggregate': 'sequence'}
  assert rule_maps.cut_regions(*of(found, gspo)) == {}
