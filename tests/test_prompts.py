"""What is asked when: a pure function of (seed, step)."""

import numpy as np
import pytest

from bapo_jax import prompts

N, WIDTH = 10, 4


@pytest.fixture
def problems():
  """Problem i is the row i+1, i+1, ... of length 1 + i % WIDTH."""
  length_N = 1 + np.arange(N, dtype=np.int32) % WIDTH
  tokens_NT = np.where(
    np.arange(WIDTH) < length_N[:, None], np.arange(1, N + 1)[:, None], 0
  ).astype(np.int32)
  names = [str(i) for i in range(N)]
  return prompts.Problems(
    np.arange(N, dtype=np.int32), tokens_NT, length_N, names, names
  )


def asked(problems, steps, seed=0, count=3):
  return [prompts.ask(problems, s, seed, count).id_P.tolist() for s in steps]


def epoch(problems, steps, seed=0, count=3):
  return [i for step in asked(problems, steps, seed, count) for i in step]


def test_ask_is_a_function_of_step_and_seed(problems):
  forwards = asked(problems, range(8))
  backwards = asked(problems, reversed(range(8)))[::-1]
  assert forwards == backwards


def test_an_epoch_asks_each_problem_once(problems):
  # 10 problems by 5: steps 0 and 1 are one epoch, 2 and 3 the next, in another order.
  first, second = epoch(problems, [0, 1], count=5), epoch(problems, [2, 3], count=5)
  assert sorted(first) == sorted(second) == list(range(N))
  assert first != second


def test_no_problem_comes_twice_in_a_step_nor_an_epoch(problems):
  # 10 by 3 leaves one problem over, another one each epoch; it is skipped.
  left = set()
  for start in range(0, 60, 3):
    ids = epoch(problems, range(start, start + 3))
    assert len(set(ids)) == 9
    left |= set(range(N)) - set(ids)
  assert len(left) > 3


def test_another_seed_is_another_order(problems):
  orders = {tuple(epoch(problems, range(3), seed)) for seed in range(5)}
  assert len(orders) == 5


def test_a_prompt_is_its_problem(problems):
  for step in range(4):
    found = prompts.ask(problems, step, 0, 3)
    np.testing.assert_array_equal(found.tokens_PT, problems.tokens_NT[found.id_P])
    np.testing.assert_array_equal(found.length_P, problems.length_N[found.id_P])


def test_all_problems_in_one_step(problems):
  assert sorted(asked(problems, [5], count=N)[0]) == list(range(N))


def test_too_many_prompts_names_both_numbers(problems):
  with pytest.raises(ValueError, match=r'prompts\.count=11 .* only 10 problems'):
    prompts.ask(problems, 0, 0, 11)


def test_again_asks_these_problems_and_leaves_empty_seats(problems):
  found = prompts.again(problems, np.asarray([7, -1, 2, -1]))
  assert found.id_P.tolist() == [7, -1, 2, -1]
  assert found.length_P.tolist() == [4, 0, 3, 0]
  np.testing.assert_array_equal(found.tokens_PT[[0, 2]], problems.tokens_NT[[7, 2]])
  nobody = prompts.again(problems, np.zeros(0, np.int32))
  assert nobody.tokens_PT.shape == (0, WIDTH) and nobody.length_P.shape == (0,)
