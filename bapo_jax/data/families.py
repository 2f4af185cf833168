r"""Two families of problems that need no file: what is asked, and how it can be solved.

`search`: find x with ax + c = b (mod m). The worked solution reduces a, c and b, then
  tries candidates in random order, writing x, ax, ax + c and ax + c - b, until the
  last is 0, and states the answer:

    12x+5=10 mod 7  ->  5x+5=3|2312|0052|1503|...|5220\boxed{5}

  Right answers come early and wrong ones run into the token budget: wrong responses
  are longer, as in the published runs (7k tokens against 4.7k), and stay so while the
  policy cannot know where the solution lies. With one modulus it learns to know (level
  2: accuracy 0.98 in 25 steps, more than blind search can reach), with three it does
  not.
`chain`: a chain of operations modulo m, with running results. Right and wrong responses
  are equally long, so the positive share is 1/2 and an adaptive bound has no work.

Every number has a fixed width, the number of digits of m - 1. Answers are 0..999.
"""

import math
from typing import NamedTuple

import numpy as np


class Problem(NamedTuple):
  text: str
  answer: int
  numbers: tuple[int, ...]  # what the family needs to work the solution out


# Level -> (moduli, largest coefficient): the difficulty of `search`.
TRIAL = {
  1: ((5,), 9),
  2: ((7,), 20),
  3: ((7, 8, 9), 40),
  4: ((11, 13), 99),
}
# Level -> (modulus, operations): the difficulty of `chain`.
CHAIN = {1: (10, 2), 2: (100, 2), 3: (100, 3), 4: (1000, 3)}


def trial(rng: np.random.Generator, level: int) -> Problem:
  """a x + c = b (mod m) with one solution that is neither 0 nor visible at once."""
  moduli, largest = TRIAL[level]
  m = int(rng.choice(moduli))
  while True:
    a, c, b = (int(n) for n in rng.integers(1, largest + 1, 3))
    if math.gcd(a, m) == 1 and a % m != 1 and c % m and (b - c) % m:
      break
  answer = (b - c) * pow(a, -1, m) % m
  return Problem(f'{a}x+{c}={b} mod {m}', answer, (a, c, b, m))


def solve_trial(problem: Problem, rng, slip: float, repeat: float) -> str:
  """A worked search; with chance `slip` a trial goes wrong, with `repeat` repeats."""
  a, c, b, m = problem.numbers
  digits = len(str(m - 1))
  reduced = (_join((n % m,), digits) for n in (a, c, b))
  out = ['{}x+{}={}'.format(*reduced)]
  left = list(rng.permutation(m))
  tried = []
  for _ in range(4 * m):  # slips and repeats alone could go on for ever
    again = tried and (not left or rng.random() < repeat)
    x = int(tried[rng.integers(len(tried))] if again else left.pop())
    tried.append(x)
    steps = [a * x % m, (a * x + c) % m, (a * x + c - b) % m]
    if rng.random() < slip:
      wrong = int(rng.integers(3))
      shift = int(rng.integers(1, m))
      # What follows a slip is computed from it, so a slip can hide or fake a solution.
      steps[wrong:] = [(s + shift) % m for s in steps[wrong:]]
    out.append(_join((x, *steps), digits))
    if steps[-1] == 0:
      return '|'.join(out) + rf'\boxed{{{x}}}'
  return '|'.join(out)


def chain(rng: np.random.Generator, level: int) -> Problem:
  """A left-to-right chain of +, - and * modulo m."""
  m, operations = CHAIN[level]
  value, text, numbers = int(rng.integers(2, 10)), '', []
  text = str(value)
  for _ in range(operations):
    sign, n = '+-*'[rng.integers(3)], int(rng.integers(2, 10))
    value = {'+': value + n, '-': value - n, '*': value * n}[sign] % m
    text += f'{sign}{n}'
    numbers.append(value)
  return Problem(f'{text} mod {m}', value, (*numbers, m))


def solve_chain(problem: Problem, rng, slip: float, repeat: float) -> str:
  """Running results, then the answer; a slip shifts one result and all after it."""
  *values, m = problem.numbers
  digits = len(str(m - 1))
  for i in range(len(values)):
    if rng.random() < slip:
      shift = int(rng.integers(1, m))
      values[i:] = [(v + shift) % m for v in values[i:]]
  written = [
    f'{v:0{digits}}' for v in values for _ in range(1 + (rng.random() < repeat))
  ]
  return '|'.join(written) + rf'\boxed{{{values[-1]}}}'


def _join(numbers, digits: int) -> str:
  return ''.join(f'{n:0{digits}}' for n in numbers)


FAMILIES = {'search': trial, 'chain': chain}
SOLVERS = {'search': solve_trial, 'chain': solve_chain}
LEVELS = {'search': TRIAL, 'chain': CHAIN}


def check(family: str, level: int) -> None:
  """Raises ValueError unless there is such a family and it has such a level."""
  if family not in FAMILIES:
    raise ValueError(
      f'problems.family: no family {family!r}; choose one of {sorted(FAMILIES)}'
    )
  if level not in LEVELS[family]:
    raise ValueError(
      f'problems.level: {family} has no level {level}; choose one of '
      f'{sorted(LEVELS[family])}'
    )


def generate(family: str, level: int, seed: int, count: int) -> list[Problem]:
  """`count` different problems, a function of the arguments.

  Raises:
    ValueError: an unknown family or level, or the level has fewer problems than asked.
  """
  check(family, level)
  rng = np.random.default_rng((seed, level))
  found: dict[str, Problem] = {}
  for _ in range(20 * count + 1000):
    problem = FAMILIES[family](rng, level)
    found.setdefault(problem.text, problem)
    if len(found) == count:
      return list(found.values())
  raise ValueError(
    f'problems: level {level} of {family} has about {len(found)} different problems, '
    f'fewer than train + test = {count}; ask for fewer or raise problems.level'
  )
