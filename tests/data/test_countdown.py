"""Countdown: every problem can be solved, and solutions are right in every step."""

import operator as op
import re

import numpy as np
import oracles
import pytest

from bapo_jax.data.knobs import CountdownConfig, ProblemsConfig
from bapo_jax.data.made import countdown
from bapo_jax.rewards import verifiers

KNOBS = {'numbers': (3, 4), 'largest': 99, 'target': 999}
SMALL = {'numbers': (3, 4), 'largest': 7, 'target': 20}


def generate(count, seed=0, **knobs):
  made = CountdownConfig(**knobs)
  problems = ProblemsConfig(seed=seed, train=count - 1, test=1, countdown=made)
  return countdown.generate(problems)


@pytest.mark.parametrize(
  ('numbers', 'target'),
  [([3], 3), ('37', 10), ([3, '7'], 10), ([3, 7], 1.5), (None, 1)],
)
def test_numbers_that_are_no_problem_are_refused(numbers, target):
  with pytest.raises(ValueError, match='give two or more integers'):
    countdown.row(numbers, target, 'sentence')


def test_every_problem_can_be_solved():
  found = generate(150, **KNOBS)
  assert {len(p.numbers) for p in found} == {3, 4}
  for p in found:
    assert min(p.numbers) >= 1 and max(p.numbers) <= 99 and 1 <= p.answer <= 999
    assert p.answer in oracles.reachable(p.numbers), p


def solved(count=60, **noise):
  """(problem, answer for the verifier, solution) of small problems."""
  for i, problem in enumerate(generate(count, **SMALL, wording='short')):
    rng = np.random.default_rng(i)
    noise = {'slip': 0.0, 'repeat': 0.0} | noise
    solution = countdown.solve(problem, rng, largest=SMALL['target'], **noise)
    yield problem, problem.row.answer, solution


def chains(solution):
  """Of each chain the numbers it takes and the steps (a, sign, b, result)."""
  for written in solution.split('\\')[0].split('|'):
    first, *steps = re.findall(r'\d+|[-+*/]\d+=\d+', written)
    assert written == first + ''.join(steps)
    numbers, made, value = [int(first)], [], int(first)
    for sign, b, result in (re.fullmatch(r'(.)(\d+)=(\d+)', s).groups() for s in steps):
      made.append((value, sign, int(b), int(result)))
      numbers.append(int(b))
      value = int(result)
    yield numbers, made


RESULT = dict(zip('+-*/', (op.add, op.sub, op.mul, op.truediv), strict=True))


def test_a_clean_solution_is_right_in_every_step():
  verdicts = []
  for problem, answer, solution in solved():
    tried = solution.split('\\')[0].split('|')
    assert len(set(tried)) == len(tried) or len(tried) == countdown.CHAINS
    for numbers, made in chains(solution):
      assert sorted(numbers) == sorted(problem.numbers)
      for a, sign, b, result in made:
        assert RESULT[sign](a, b) == result and 1 <= result <= SMALL['target']
    *before, (_, last) = chains(solution)
    assert all(made[-1][-1] != problem.answer for _, made in before)
    reached = last[-1][-1] == problem.answer
    assert verifiers.countdown(answer, solution).right == reached
    verdicts.append(reached)
  # Twelve chains miss some, and (a+b)*(c+d) is none: 0.82 here, 0.74 over 300 problems.
  assert np.mean(verdicts) > 0.8
