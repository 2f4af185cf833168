"""Means and their standard errors."""

import math

import numpy as np
import pytest

from bapo_jax.training import evaluate


def test_mean_and_error_by_hand():
  # Values 1, 2, 6: mean 3, squares of the differences 4 + 1 + 9 = 14, over 2 is 7.
  mean, error = evaluate.mean_and_error([1, 2, 6])
  assert mean == 3
  assert error == pytest.approx(math.sqrt(7 / 3))
  mean, error = evaluate.mean_and_error(np.asarray([0.25]))
  assert mean == 0.25 and math.isnan(error)
  assert isinstance(mean, float) and isinstance(error, float)


def test_the_clustered_error_by_hand():
  # Means 0, 1/2, 1: standard deviation 1/2, over sqrt 3.
  correct_PG = np.asarray([[0, 0], [1, 0], [1, 1]], bool)
  assert evaluate.clustered_error(correct_PG) == pytest.approx(0.5 / math.sqrt(3))
  # Problems are drawn, responses are not: the same verdicts twice prove no more.
  twice = np.concatenate([correct_PG, correct_PG], 1)
  assert evaluate.clustered_error(twice) == pytest.approx(0.5 / math.sqrt(3))
  assert evaluate.clustered_error(correct_PG[:1]) == 0


@pytest.mark.parametrize('group', [1, 8])
def test_the_standard_error_is_the_spread_of_repeated_evaluations(group):
  # Problems of very different difficulty, as in practice: rates from Beta(0.4, 0.4).
  rng, errors, means = np.random.default_rng(0), [], []
  for _ in range(4000):
    rate_P = rng.beta(0.4, 0.4, 60)
    correct_PG = rng.random((60, group)) < rate_P[:, None]
    means.append(correct_PG.mean())
    errors.append(evaluate.clustered_error(correct_PG))
  # Both known to 1/sqrt(2 * 4000) = 1.1 %; counting responses as if they were
  # independent gives a third of it at group 8.
  spread = np.std(means)
  assert np.mean(errors) == pytest.approx(spread, rel=0.05)
  naive = math.sqrt(0.25 / (60 * group))
  assert (abs(naive - spread) < 0.1 * spread) == (group == 1)
