"""The examples in the docstrings of the public API run, and print what they say."""

import doctest
import pathlib
import sys

import pytest

from bapo_jax.algorithms.clip import Balanced
from bapo_jax.learner.objective import Objective
from bapo_jax.models.logprobs import token_stats
from bapo_jax.models.packing import pack
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.run.library import train

EXAMPLES = [Balanced, Objective, RolloutEngine, pack, token_stats]


def failures(item):
  """Runs the example of a docstring; returns how many lines print something else."""
  names = dict(vars(sys.modules[item.__module__]))
  (test,) = doctest.DocTestFinder(recurse=False).find(item, globs=names)
  assert len(test.examples) >= 4
  return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed


@pytest.mark.parametrize('item', EXAMPLES, ids=lambda item: item.__name__)
def test_an_example_prints_what_it_says(item):
  assert failures(item) == 0


@pytest.mark.nightly
def test_the_example_of_train_runs(tmp_path, monkeypatch):
  (tmp_path / 'configs').symlink_to(pathlib.Path(__file__).parents[1] / 'configs')
  monkeypatch.chdir(tmp_path)
  assert failures(train) == 0
