r"""Generates congruences that are solved by trial, with worked solutions.

Find x with ax + c = b (mod m). The worked solution reduces a, c and b, then tries
candidates in random order, writing x, ax, ax + c and ax + c - b, until the last value
is 0, and states the answer:

  12x+5=10 mod 7  ->  5x+5=3|2312|0052|1503|...|5220\boxed{5}

While the policy cannot predict x, right responses are short and wrong ones reach the
token limit, as in the published runs (4.7k and 7k tokens). The policy learns to predict
x with one modulus (level 2: accuracy 0.98 in 25 steps), but not with three.

Every number has a fixed width, the number of digits of m - 1.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from bapo_jax.data.generate import draw_distinct, of_split

# Level -> (moduli, largest coefficient).
LEVELS = {1: ((5,), 9), 2: ((7,), 20), 3: ((7, 8, 9), 40), 4: ((11, 13), 99)}
Numbers = tuple[int, int, int, int]  # a, c, b, m


def synthetic(
  split: str, *, level: int = 3, seed: int = 0, train: int = 2048, test: int = 512
) -> list[dict[str, Any]]:
  """Returns distinct problems, `train` for training and `test` held-out ones.

  Raises:
    ValueError: there is no such level, or it has too few problems.
  """
  if level not in LEVELS:
    raise ValueError(f'level={level}: give {", ".join(map(str, LEVELS))}')
  rng = np.random.default_rng((seed, level))
  problems = draw_distinct(lambda: _draw(rng, level), train + test, 'level')
  return [
    {
      'problem': '{}x+{}={} mod {}'.format(*numbers),
      'answer': answer(*numbers),
      'solutions': functools.partial(solve, numbers),
      'rank': rank,
    }
    for rank, numbers in of_split(split, problems, train)
  ]


def _draw(rng, level):
  """Draws numbers (and their key) with one solution; x, c != 0 and a != 1."""
  moduli, largest = LEVELS[level]
  m = moduli[rng.integers(len(moduli))]
  while True:
    a, c, b = rng.integers(1, largest + 1, 3).tolist()
    if math.gcd(a, m) == 1 and a % m != 1 and c % m and (b - c) % m:
      return (a, c, b, m), (a, c, b, m)


def answer(a: int, c: int, b: int, m: int) -> int:
  """Returns the x with ax + c = b (mod m)."""
  return (b - c) * pow(a, -1, m) % m


def solve(
  numbers: Numbers, rng: np.random.Generator, slip: float, repeat: float
) -> str:
  """Returns a worked solution; a trial is wrong or repeated with these chances."""
  a, c, b, m = numbers
  digits = len(str(m - 1))
  written = [f'{a % m:0{digits}}x+{c % m:0{digits}}={b % m:0{digits}}']
  untried = list(rng.permutation(m))
  tried = []
  for _ in range(4 * m):  # slips and repeats could go on forever
    repeats = tried and (not untried or rng.random() < repeat)
    x = int(tried[rng.integers(len(tried))] if repeats else untried.pop())
    tried.append(x)
    steps = [a * x % m, (a * x + c) % m, (a * x + c - b) % m]
    if rng.random() < slip:
      wrong = int(rng.integers(3))
      shift = int(rng.integers(1, m))
      # Later steps use the wrong value, so a slip can hide or fake a solution.
      steps[wrong:] = [(s + shift) % m for s in steps[wrong:]]
    written.append(joined((x, *steps), digits))
    if steps[-1] == 0:
      return '|'.join(written) + rf'\boxed{{{x}}}'
  return '|'.join(written)


def joined(numbers: Iterable[int], digits: int) -> str:
  """Writes numbers of a fixed width without a space."""
  return ''.join(f'{n:0{digits}}' for n in numbers)
