r"""Countdown: make a target from three or four numbers, each used exactly once.

A problem is made from its solution: numbers are drawn and combined two by two, at
random, until one is left, which is the target. All intermediate results are positive
integers and divisions leave no rest, so every problem can be solved without a fraction.

The answer is what a verifier needs: {"numbers": [3, 7, 25], "target": 46}.

Two wordings: `sentence` for a model that reads English, `short` for the embedded
policy, which the warm start shows worked solutions: chains of the numbers in random
order, each step with its result, until one ends in the target and becomes the answer:

    4 7 2=26  ->  7+2=9-4=5|7*4=28/2=14|7*4=28-2=26\boxed{(7*4)-2}

As in `search`, lucky answers are short, unlucky ones run into the token budget. But a
policy can learn where to look: of the chains few come near the target.
"""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from bapo_jax.data import builder, families

WORDINGS = {
  'sentence': (
    'Combine the numbers {listed} with +, -, * and / into an expression that equals '
    '{target}. Each number is used exactly once; parentheses are allowed. Give the '
    r'expression in \boxed{{}}.'
  ),
  'short': '{spaced}={target}',
}


def row(numbers: Any, target: Any, wording: str = 'sentence') -> dict[str, str]:
  """A problem as text and its answer, from the numbers and the target.

  Raises:
    ValueError: they are not integers.
  """
  whole = isinstance(numbers, list | tuple) and len(numbers) > 1
  for n in (*(numbers if whole else (numbers,)), target):
    if not whole or not isinstance(n, int) or isinstance(n, bool):
      raise ValueError(
        f'numbers {str(numbers)[:40]} and target {str(target)[:40]} are not two or '
        'more integers and one'
      )
  written = [str(n) for n in numbers]
  return {
    'problem': WORDINGS[wording].format(
      listed=', '.join(written), spaced=' '.join(written), target=target
    ),
    'answer': json.dumps({'numbers': list(numbers), 'target': target}),
    'verifier': 'countdown',
  }


def check(
  numbers: tuple[int, ...], largest: int, target: int, wording: str = 'sentence'
) -> None:
  """Raises ValueError unless problems of this kind can be made."""
  if not numbers or min(numbers) < 2 or max(numbers) > 6:
    raise ValueError(
      f'problems.countdown.numbers={numbers}: how many numbers a problem has, each '
      'from 2 to 6'
    )
  for name, value, least in (('largest', largest, 5), ('target', target, 10)):
    if value < least:
      raise ValueError(f'problems.countdown.{name}={value}: give at least {least}')
  if wording not in WORDINGS:
    raise ValueError(
      f'problems.countdown.wording={wording!r}: choose one of {sorted(WORDINGS)}'
    )


def generate(
  seed: int,
  count: int,
  *,
  numbers: tuple[int, ...],
  largest: int,
  target: int,
  wording: str = 'sentence',
) -> list[tuple[list[int], int]]:
  """`count` different (numbers, target): no two have the same numbers and target.

  Args:
    numbers: how many numbers a problem may have, drawn evenly.
    largest: the largest number; target: the largest target.
    wording: how they will be asked; it changes no problem.

  Raises:
    ValueError: there are fewer different problems than asked for.
  """
  check(numbers, largest, target, wording)
  rng = np.random.default_rng((seed, largest, target))
  found: dict[tuple, tuple[list[int], int]] = {}
  for _ in range(20 * count + 1000):
    drawn = [int(n) for n in rng.integers(1, largest + 1, rng.choice(numbers))]
    made = _combine(rng, drawn)
    if 1 <= made <= target:
      # In whatever order the numbers stand, it is one problem.
      found.setdefault((*sorted(drawn), -made), (drawn, made))
    if len(found) == count:
      # Kinds of which there are few are found early: unshuffled, the held-out problems,
      # which are the last, would be the hard ones.
      made = list(found.values())
      return [made[i] for i in rng.permutation(count)]
  raise ValueError(
    f'problems: countdown with numbers up to {largest} has about {len(found)} '
    f'different problems, fewer than train + test = {count}; ask for fewer or raise '
    'problems.countdown.largest'
  )


def _combine(rng: np.random.Generator, numbers: list[int]) -> int:
  """One number made of all of them, by positive integers only."""
  left = list(numbers)
  while len(left) > 1:
    b, a = (left.pop(rng.integers(len(left))) for _ in range(2))
    results = [a + b, a * b, abs(a - b)]
    results += [max(a, b) // min(a, b)] if max(a, b) % min(a, b) == 0 else []
    results = [r for r in results if r > 0]
    left.append(results[rng.integers(len(results))])
  return left[0]


def embedded(
  problems: list[tuple[list[int], int]], wording: str
) -> list[families.Problem]:
  """Made problems as the warm start wants them: text, target, numbers.

  Raises:
    ValueError: the embedded policy cannot read them.
  """
  if wording != 'short':
    raise ValueError(
      f'problems.countdown.wording={wording!r} is not for the embedded policy '
      "(model.path=''), whose tokenizer has no such letters; give wording='short', or "
      'a model.path'
    )
  return [
    families.Problem(row(numbers, target, wording)['problem'], target, tuple(numbers))
    for numbers, target in problems
  ]


# Some 130 tokens of work. What the warm start cuts away is not worth its time: with
# forty chains the solutions of a step took longer than its gradient.
CHAINS = 12


def solve(
  problem: families.Problem, rng, slip: float, repeat: float, *, largest: int
) -> str:
  """Chains until one ends in the target; each of their steps slips with chance `slip`.

  With chance `repeat` a chain is written again. A slip moves a result by 1 to 3; what
  follows is computed from it, so it can hide or fake a solution.

  Args:
    largest: no result is above it: there is that much arithmetic to learn.
  """
  tried: list[tuple[str, str, int]] = []
  for _ in range(CHAINS):
    if tried and rng.random() < repeat:
      chain = tried[rng.integers(len(tried))]
    else:
      for _ in range(8):  # two numbers have few chains: one may have to come again
        chain = _chain(rng, problem.numbers, largest, slip)
        if chain not in tried:
          break
    tried.append(chain)
    expression, _, value = chain
    if value == problem.answer:
      break
  work = '|'.join(written for _, written, _ in tried)
  return work + (rf'\boxed{{{expression}}}' if value == problem.answer else '')


def _chain(rng: np.random.Generator, numbers, largest: int, slip: float):
  """('(7*4)-2', '7*4=28-2=26', 26): all the numbers, results within 1..largest."""
  while True:
    first, *rest = (int(numbers[i]) for i in rng.permutation(len(numbers)))
    # 4-7 is not positive and 4+7 is 7+4: the larger of the first two comes first.
    first, rest[0] = max(first, rest[0]), min(first, rest[0])
    value, written, expression = first, f'{first}', f'{first}'
    for i, n in enumerate(rest):
      results = _results(value, n, largest)
      if not results:
        break
      sign = list(results)[rng.integers(len(results))]
      value = results[sign]
      if rng.random() < slip:
        value = max(1, value + int(rng.choice((-3, -2, -1, 1, 2, 3))))
      written += f'{sign}{n}={value}'
      expression = (f'({expression})' if i else expression) + f'{sign}{n}'
    else:
      return expression, written, value


def _results(a: int, b: int, largest: int) -> dict[str, int]:
  """From + - * / to what it makes of a and b, where that is whole and in 1..largest."""
  made = {'+': a + b, '-': a - b, '*': a * b} | ({'/': a // b} if a % b == 0 else {})
  return {sign: value for sign, value in made.items() if 1 <= value <= largest}


@dataclasses.dataclass
class CountdownConfig(tfds.core.BuilderConfig):
  """Kinds and sizes; training and test problems never coincide."""

  seed: int = 0
  train: int = 2048
  test: int = 512
  numbers: tuple[int, ...] = (3, 4)
  largest: int = 99
  target: int = 999
  wording: str = 'sentence'


class Countdown(builder.Builder):
  """Problems whose answer is an expression."""

  def splits(self):
    c = self.builder_config
    kinds = {'numbers': c.numbers, 'largest': c.largest, 'target': c.target}
    found = generate(c.seed, c.train + c.test, **kinds)
    rows = [{'id': i, **row(*each, c.wording)} for i, each in enumerate(found)]
    return {'train': rows[: c.train], 'test': rows[c.train :]}


def prepare(data_dir: str, **config) -> tfds.core.DatasetBuilder:
  """The builder of these problems, written to `data_dir` unless it is there already."""
  name = '-'.join(re.sub(r'\W+', '_', str(value)) for value in config.values())
  return builder.write(
    Countdown(
      data_dir=data_dir,
      config=CountdownConfig(name=name, **config),
      file_format='array_record',
    )
  )
