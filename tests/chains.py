r"""Problems of the tiny runs of tests: chains of two operations modulo 10.

A worked solution writes the result of each operation:

  7*2-5 mod 10  ->  4|9\boxed{9}
"""

import functools

import numpy as np

from bapo_jax.data.generate import draw_distinct, of_split


def chains(split: str, *, seed: int = 0, train: int = 24, test: int = 16) -> list[dict]:
  """Returns distinct problems, `train` for training and `test` held-out ones."""
  rng = np.random.default_rng((seed, 1))
  problems = draw_distinct(lambda: _draw(rng), train + test, 'seed')
  return [
    {
      'problem': text,
      'answer': str(results[-1]),
      'solutions': functools.partial(solve, results),
      'rank': rank,
    }
    for rank, (text, results) in of_split(split, problems, train)
  ]


def _draw(rng):
  value = int(rng.integers(2, 10))
  text = str(value)
  results = []
  for _ in range(2):
    sign = '+-*'[rng.integers(3)]
    n = int(rng.integers(2, 10))
    value = {'+': value + n, '-': value - n, '*': value * n}[sign] % 10
    text += f'{sign}{n}'
    results.append(value)
  text += ' mod 10'
  return text, (text, results)


def solve(results, rng, slip: float, repeat: float) -> str:
  """Returns a worked solution; a slip adds one error to this and all later results."""
  results = [*results]
  for i in range(len(results)):
    if rng.random() < slip:
      shift = int(rng.integers(1, 10))
      results[i:] = [(r + shift) % 10 for r in results[i:]]
  written = [str(r) for r in results for _ in range(1 + (rng.random() < repeat))]
  return '|'.join(written) + rf'\boxed{{{results[-1]}}}'
