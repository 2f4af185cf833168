"""The results of a run as sentences and JSON: the numbers by hand, gaps as gaps."""

import json
import math

import numpy as np
import pytest

from bapo_jax.run import report, series
from bapo_jax.runtime import metrics
from bapo_jax.training.config import Config

NAN = math.nan
BEFORE = dict(accuracy=0.25, stderr=0.03, n=200)
AFTER = dict(accuracy=0.5, stderr=0.04, n=200)
SPENT = dict(wall_s=100.0, phases={'verify': 10.0}, peak_rss_bytes=3 * 2**29)


def facts_of(workdir, rows):
  """Returns report.json of these rows."""
  with metrics.writing(workdir, -1) as write:
    for step, row in enumerate(rows, 1):
      write(step, row)
  results = ({'result': result, 'samples': []} for result in (BEFORE, AFTER))
  report.write(workdir, Config(), *results, SPENT, len(rows))
  return json.loads((workdir / 'report.json').read_text())


def lengths(right, wrong):
  return {'rollout/length_right': right, 'rollout/length_wrong': wrong}


def test_numbers_by_hand(tmp_path):
  # ten steps: a fifth is two. First: wrong (30 + 50)/2 = 40 over right 20 (nan: none
  # is right) = 2; last: wrong 60 over right (10 + 30)/2 = 20 = 3
  rows = [lengths(20, 30), lengths(NAN, 50), *[lengths(1, 1000)] * 6]
  rows += [lengths(10, 60), lengths(30, 60)]
  rows = [dict(row, **{'clip/moved': i >= 6}) for i, row in enumerate(rows)]
  facts = facts_of(tmp_path, rows)
  assert facts['length_ratio'] == {'first_fifth': 2.0, 'last_fifth': 3.0}
  assert facts['clip_moved_fraction'] == 0.4  # 4 of 10
  assert facts['eval_after'] == AFTER and facts['phases'] == {'verify': 10.0}
  text = report.summary(BEFORE, AFTER, 10, SPENT)
  assert 'from 0.250 ± 0.030 to 0.500 ± 0.040 on 200 held-out problems' in text
  assert '10 steps, 0:01:40 h of wall time and 1.50 GiB' in text
  assert 'more than two standard errors' in text  # 0.25 against 2 * 0.05


def test_graded_rewards_are_compared_with_their_errors():
  def result(reward, fit):
    parts = {'fit': {'mean': fit, 'stderr': 0.04}, 'a|b': {'mean': 1, 'stderr': 0}}
    return {'reward': reward, 'reward_stderr': 0.03, 'parts': parts}

  # The error of a difference: sqrt(.03^2 + .03^2), sqrt(.04^2 + .04^2).
  assert list(report.rewards(result(0.5, 0.5), result(0.25, 0.75))) == [
    ('reward', '0.500 ± 0.030', '0.250 ± 0.030', '-0.250 ± 0.042'),
    ('reward/fit', '0.500 ± 0.040', '0.750 ± 0.040', '+0.250 ± 0.057'),
    ('reward/a|b', '1.000 ± 0.000', '1.000 ± 0.000', '+0.000 ± 0.000'),
  ]
  assert not list(report.rewards(dict(accuracy=0.5), result(0.5, 0.5)))


@pytest.mark.parametrize(
  'rows',
  [
    [],
    [{'rollout/reward': 0.5}],
    [{'eval/accuracy': 0.5}],  # no standard error, no training step
    [{'loss/entropy': NAN, 'eval/accuracy': NAN, 'eval/stderr': NAN}] * 2,
    [{'learner/grad_norm': g, 'clip/share': math.inf} for g in (1.0, 0.0, 1000.0)],
  ],
)
def test_gaps_are_shown_as_gaps(tmp_path, rows):
  facts = facts_of(tmp_path, rows)
  assert facts['length_ratio'] == {'first_fifth': None, 'last_fifth': None}
  assert facts['clip_moved_fraction'] is None


def test_a_running_mean_begins_and_ends_half_a_window_inside():
  step_N, value_N = np.arange(5.0), np.array([0.0, 3.0, 6.0, 0.0, 30.0])
  # window 3: (0+3+6)/3, (3+6+0)/3, (6+0+30)/3; the raw last value stands nowhere
  steps, smooth = series.running_mean(step_N, value_N, 3)
  assert steps.tolist() == [1, 2, 3]
  np.testing.assert_allclose(smooth, [3, 3, 12], rtol=1e-14)  # 45 times float64's


def test_a_missed_target_is_explained():
  # 1/2, 0, 1: met in half of the updates
  rows = [{'step': i, 'clip/target_met': met} for i, met in enumerate((0.5, 0.0, 1.0))]
  sentence = report.target_sentence(rows, 0.45)
  assert all(words in sentence for words in ('0.45', '50.0 %', 'limits'))
  met = report.target_sentence(rows[2:], 0.45)
  assert '100.0 %' in met and 'limits' not in met
  assert report.target_sentence(rows, None) == report.target_sentence([], 0.45) == ''
