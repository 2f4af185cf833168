r"""Countdown: make a target from a few numbers, each used exactly once.

configs/countdown.py uses these problems. A problem is generated from its solution:
random numbers are combined two by two, at random, until a single number is left, the
target. All intermediate results are positive integers and divisions are exact, so every
problem can be solved without a fraction.

The embedded policy reads the wording `short`; the wording `sentence` is English. The
warm start imitates worked solutions: chains of steps through all numbers in random
order, each step with its result. The first chain that ends in the target becomes the
answer:

    4 7 2=26  ->  7+2=9-4=5|7*4=28/2=14|7*4=28-2=26\boxed{(7*4)-2}

A policy can learn which chains to try: few come near the target.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bapo_jax.data.generate import draw_distinct, of_split

TURNS = 3  # most proposals in a solution of `proposals`
Numbers = tuple[int, ...]


def countdown(
  split: str,
  *,
  numbers: tuple[int, ...] = (2, 3),
  largest: int = 9,
  target: int = 30,
  wording: Literal['short', 'sentence'] = 'short',
  seed: int = 0,
  train: int = 1280,
  test: int = 256,
) -> list[dict[str, Any]]:
  """Returns problems of one of `numbers` numbers up to `largest`, and of a target.

  Raises:
    ValueError: there are too few distinct problems.
  """
  rows = []
  problems = generate(numbers, largest, target, seed, train + test)
  for rank, (chosen, reached) in of_split(split, problems, train):
    row: dict[str, Any] = {'numbers': chosen, 'target': reached}
    if wording == 'short':
      row = {
        'problem': f'{" ".join(map(str, chosen))}={reached}',
        'answer': row,
        'data_source': 'countdown',  # names the verifier
        'solutions': functools.partial(solve, chosen, reached, largest=target),
        'rank': rank,
      }
    rows.append(row)
  return rows


def proposals(
  split: str,
  *,
  numbers: tuple[int, ...] = (2, 3),
  largest: int = 9,
  target: int = 30,
  seed: int = 0,
  train: int = 1280,
  test: int = 256,
) -> list[dict[str, Any]]:
  """Returns the problems of `countdown`, with up to TURNS proposals as solutions.

  The environment `feedback` answers a proposal with its value.
  """
  rng = np.random.default_rng(seed)
  knobs = {'numbers': numbers, 'largest': largest, 'target': target}
  rows = countdown(split, **knobs, seed=seed, train=train, test=test)
  rows.sort(key=lambda row: row['rank'])
  for row in rows:
    asked = row['answer']['numbers'], row['answer']['target']
    row['solutions'] = [dialogue(*asked, rng, target) for _ in range(8)]
  return rows


def dialogue(
  numbers: Numbers, target: int, rng: np.random.Generator, largest: int
) -> list[str]:
  """Returns proposals and their values in turn, up to a right one: a, '=17', b, ..."""
  parts = []
  for turn in range(TURNS):
    expression, _, value = chain(rng, numbers, largest, 0.0)
    parts.append(rf'\boxed{{{expression}}}')
    if value == target or turn == TURNS - 1:
      break
    parts.append(f'={value}\n')
  return parts


def generate(
  sizes: Sequence[int], largest: int, most: int, seed: int, count: int
) -> list[tuple[Numbers, int]]:
  """Returns (numbers, target) of `count` distinct problems, targets up to `most`."""
  rng = np.random.default_rng((seed, largest, most))

  def draw():
    size = sizes[int(rng.integers(len(sizes)))]
    numbers = tuple(int(n) for n in rng.integers(1, largest + 1, size))
    target = _combine(rng, numbers)
    if target > most:
      return None
    # The order of the numbers does not matter.
    return (*sorted(numbers), -target), (numbers, target)

  drawn = draw_distinct(draw, count, 'largest')
  # Rare kinds of problems (few numbers, small targets) are drawn early. Without this
  # shuffle the held-out problems, which come last, would be harder.
  return [drawn[i] for i in rng.permutation(count)]


def _combine(rng, numbers: Sequence[int]):
  values = list(numbers)
  while len(values) > 1:
    b, a = (values.pop(rng.integers(len(values))) for _ in range(2))
    results = [a + b, a * b, abs(a - b)]
    results += [max(a, b) // min(a, b)] if max(a, b) % min(a, b) == 0 else []
    results = [r for r in results if r > 0]
    values.append(results[rng.integers(len(results))])
  return values[0]


# About 130 tokens of work. Chains beyond the length of a row only cost time: writing
# forty chains per solution took longer than the gradient of a step.
CHAINS = 12


def solve(
  numbers: Numbers,
  target: int,
  rng: np.random.Generator,
  slip: float,
  repeat: float,
  *,
  largest: int,
) -> str:
  """Returns up to CHAINS chains and, if the last one ends in the target, the answer.

  With chance `slip` the result of a step is wrong by 1 to 3; later steps use it, so a
  slip can hide or fake a solution. A chain repeats an earlier chain with chance
  `repeat`. Results are at most `largest`, which bounds the arithmetic to learn.
  """
  tried: list[tuple[str, str, int]] = []
  for _ in range(CHAINS):
    if tried and rng.random() < repeat:
      new = tried[rng.integers(len(tried))]
    else:
      for _ in range(8):  # two numbers have few chains, so a repeat may be unavoidable
        new = chain(rng, numbers, largest, slip)
        if new not in tried:
          break
    tried.append(new)
    if new[-1] == target:
      break
  expression, _, value = tried[-1]
  work = '|'.join(steps for _, steps, _ in tried)
  return work + (rf'\boxed{{{expression}}}' if value == target else '')


def chain(
  rng: np.random.Generator, numbers: Sequence[int], largest: int, slip: float
) -> tuple[str, str, int]:
  """Returns a chain's expression, steps and value: ('(7*4)-2', '7*4=28-2=26', 26).

  Arguments as in `solve`.
  """
  while True:
    first, *rest = (int(numbers[i]) for i in rng.permutation(len(numbers)))
    # The larger of the first two comes first: 4-7 is not positive, 4+7 is 7+4.
    first, rest[0] = max(first, rest[0]), min(first, rest[0])
    value = first
    steps = str(first)
    expression = str(first)
    for i, n in enumerate(rest):
      results = {'+': value + n, '-': value - n, '*': value * n}
      results |= {'/': value // n} if value % n == 0 else {}
      results = {sign: r for sign, r in results.items() if 1 <= r <= largest}
      if not results:
        break
      sign = list(results)[rng.integers(len(results))]
      value = results[sign]
      if rng.random() < slip:
        value = max(1, value + int(rng.choice((-3, -2, -1, 1, 2, 3))))
      steps += f'{sign}{n}={value}'
      expression = (f'({expression})' if i else expression) + f'{sign}{n}'
    else:
      return expression, steps, value
