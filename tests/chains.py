r"""Problems of the tiny runs of tests: chains of operations modulo m.

A worked solution writes the result of each operation:

  7*2-5 mod 10  ->  4|9\boxed{9}
"""

import functools
from typing import Any

import numpy as np

from bapo_jax.data.generate import draw_distinct, of_split

# Level -> (modulus, operations). At level 1 one guess in ten is right.
LEVELS = {1: (10, 2), 2: (100, 2), 3: (100, 3), 4: (1000, 3)}


def chains(
  split: str, *, level: int = 1, seed: int = 0, train: int = 24, test: int = 16
) -> list[dict[str, Any]]:
  """Returns distinct problems, `train` for training and `test` held-out ones."""
  rng = np.random.default_rng((seed, level))
  problems = draw_distinct(lambda: _draw(rng, level), train + test, 'level')
  return [
    {
      'problem': text,
      'answer': str(results[-1]),
      'solutions': functools.partial(solve, results, LEVELS[level][0]),
      'rank': rank,
    }
    for rank, (text, results) in of_split(split, problems, train)
  ]


def _draw(rng, level):
  m, operations = LEVELS[level]
  value = int(rng.integers(2, 10))
  text = str(value)
  results = []
  for _ in range(operations):
    sign = '+-*'[rng.integers(3)]
    n = int(rng.integers(2, 10))
    value = {'+': value + n, '-': value - n, '*': value * n}[sign] % m
    text += f'{sign}{n}'
    results.append(value)
  text += f' mod {m}'
  return text, (text, results)


def solve(
  results: list[int], m: int, rng: np.random.Generator, slip: float, repeat: float
) -> str:
  """Returns a worked solution; a slip adds one error to this and all later results."""
  results = [*results]
  digits = len(str(m - 1))
  for i in range(len(results)):
    if rng.random() < slip:
      shift = int(rng.integers(1, m))
      results[i:] = [(r + shift) % m for r in results[i:]]
  written = [
    f'{r:0{digits}}' for r in results for _ in range(1 + (rng.random() < repeat))
  ]
  return '|'.join(written) + rf'\boxed{{{results[-1]}}}'
