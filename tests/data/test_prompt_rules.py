"""Prompt rules: goldens by hand, a slow oracle, and the bits of the shuffled order."""

import itertools
from fractions import Fraction

import making
import numpy as np
import pytest
from refusals import refusal

from bapo_jax.data import prompt_rules
from bapo_jax.data.prompt_rules import ByDifficulty, Shuffled
from bapo_jax.types import History

NEVER = prompt_rules.no_history(10)


def test_shuffled_prompts_are_those_of_the_runs_before_there_were_rules():
  # Seed 7, 10 problems by 3, recorded before the rules; the second epoch begins fourth.
  before = [[8, 0, 7], [1, 3, 6], [2, 4, 5], [9, 0, 8], [6, 7, 1]]
  rule = Shuffled(count=3)
  for number, ids in enumerate(before):
    assert prompt_rules.choose(rule, NEVER, (7, number)).tolist() == ids
  assert prompt_rules.choose(rule, NEVER, (7, 0)).dtype == np.int32


def test_the_history_of_some_groups_by_hand():
  # Problem 2 has 3 of 4 right; problem 5 has 1 right, 1 wrong and 2 undecided, and is
  # re-evaluated in the same step with 4 wrong; the last seat is empty.
  history = prompt_rules.submitted(NEVER, np.asarray([2, 5, 7]))
  history = prompt_rules.submitted(history, np.asarray([5, -1]))
  assert history.waiting_N.tolist() == [0, 0, 1, 0, 0, 2, 0, 1, 0, 0]
  fresh = making.groups([2, 5, -1], [3, 1, 0], [6, 6, -1], 4, 3)
  decided_PG = np.asarray([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]) > 0
  fresh = fresh._replace(decided_PG=decided_PG)
  again = making.groups([5], [0], [6], 4, 3)
  for groups in (fresh, again):
    history = prompt_rules.completed(history, groups, 6)
  assert history.tries_N.tolist() == [0, 0, 4, 0, 0, 6, 0, 0, 0, 0]
  assert history.right_N.tolist() == [0, 0, 3, 0, 0, 1, 0, 0, 0, 0]
  assert history.last_step_N.tolist() == [-1, -1, 6, -1, -1, 6, -1, -1, -1, -1]
  assert history.waiting_N.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
  # Later attempts add up.
  history = prompt_rules.completed(history, making.groups([2], [4], [9], 4, 3), 9)
  assert (history.tries_N[2], history.right_N[2], history.last_step_N[2]) == (8, 7, 9)
  assert all(x_N.dtype == np.int32 for x_N in history)
  assert NEVER.tries_N.sum() == 0 and NEVER.waiting_N.sum() == 0


def oracle(history: History, order: list[int], count: int) -> list[int]:
  """Chooses one problem after the other, with exact pass rates from 1/4 to 3/4."""
  chosen = []
  while len(chosen) < count:
    best = None
    for i in order:
      tries, right, last, waiting = (int(x_N[i]) for x_N in history)
      inside = not tries or Fraction(1, 4) <= Fraction(right, tries) <= Fraction(3, 4)
      if waiting:
        rank = [3, last] if inside else [4, 0]
      else:
        rank = [1, last] if inside else [2, 0]
      if i not in chosen and (best is None or rank < best[0]):
        best = rank, i
    chosen.append(best[1])
  return chosen


@pytest.mark.parametrize('seed', range(30))
def test_by_difficulty_is_the_slow_choice(seed):
  rng = np.random.default_rng(seed)
  N, count, number = 13, int(rng.integers(1, 13)), int(rng.integers(40))
  tries_N = rng.integers(0, 3, N) * 4
  history = History(
    tries_N=tries_N,
    right_N=rng.binomial(tries_N, 0.5),
    last_step_N=np.where(tries_N > 0, rng.integers(0, 4, N), -1),
    waiting_N=rng.integers(0, 2, N) * rng.integers(0, 3, N),
  )
  # The epoch's order from this round on, and then from its beginning.
  per_epoch = N // count
  epoch = np.random.default_rng((seed, number // per_epoch)).permutation(N).tolist()
  skipped = number % per_epoch * count
  order = [*itertools.islice(itertools.cycle(epoch), skipped, skipped + N)]
  rule = ByDifficulty(count=count, low=0.25, high=0.75)
  chosen = prompt_rules.choose(rule, history, (seed, number)).tolist()
  assert chosen == oracle(history, order, count)
  assert len(set(chosen)) == count


def test_a_window_without_width_is_refused():
  knobs = {'prompts.rule': 'by_difficulty', 'prompts.low': 0.5, 'prompts.high': 0.5}
  assert refusal(**knobs).startswith('prompts.low=0.5 is not below prompts.high=0.5')


def test_a_custom_rule_that_errs_later_ends_the_run_with_one_sentence():
  class Late(ByDifficulty):
    rule: str = 'my.py:late'

    def __call__(self, history, key, count):
      """Returns a problem twice from the second round on."""
      return [0, 0] if key[1] else [0, 1]

  late = Late(count=2)
  assert prompt_rules.choose(late, NEVER, (0, 0)).tolist() == [0, 1]
  with pytest.raises(
    ValueError, match=r'^prompts\.rule=my\.py:late returns the id 0 tw'
  ):
    prompt_rules.choose(late, NEVER, (0, 1))
