r"""Countdown: make a target from a few numbers, each used exactly once.

A problem is generated from its solution: random numbers are combined two by two, at
random, until a single number is left, the target. All intermediate results are positive
integers and divisions are exact, so every problem can be solved without a fraction.

The answer is JSON for the verifier: {"numbers": [3, 7, 25], "target": 46}.

The embedded policy reads the wording `short`. Its warm start imitates worked solutions:
chains of steps through all numbers in random order, each step with its result. The
first chain that ends in the target becomes the answer:

    4 7 2=26  ->  7+2=9-4=5|7*4=28/2=14|7*4=28-2=26\boxed{(7*4)-2}

A policy can learn which chains to try: few come near the target.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made.problem import Problem, draw_distinct
from bapo_jax.data.row import Row

WORDINGS = {
  'sentence': (
    'Combine the numbers {listed} with +, -, * and / into an expression that equals '
    '{target}. Each number is used exactly once; parentheses are allowed. Give the '
    r'expression in \boxed{{}}.'
  ),
  'short': '{spaced}={target}',
}


def row(numbers: Any, target: Any, wording: str) -> Row:
  """Returns the problem in this wording; its answer is numbers and target, as JSON.

  Raises:
    ValueError: `numbers` are not two or more integers, or `target` is not an integer.
  """
  listed = isinstance(numbers, list | tuple) and len(numbers) > 1
  if not listed or any(type(n) is not int for n in (*numbers, target)):
    raise ValueError(
      f'numbers={str(numbers)[:40]} with target={str(target)[:40]} is not a countdown '
      'problem; give two or more integers and an integer target'
    )
  answer = json.dumps({'numbers': list(numbers), 'target': target})
  words = [str(n) for n in numbers]
  text = WORDINGS[wording].format(
    listed=', '.join(words), spaced=' '.join(words), target=target
  )
  return Row(text, answer, 'countdown')


def generate(problems: ProblemsConfig) -> tuple[Problem, ...]:
  """Draws the training, then the held-out problems; `answer` is the target number.

  Raises a ValueError if there are too few distinct problems.
  """
  knobs = problems.countdown
  count = problems.count
  rng = np.random.default_rng((problems.seed, knobs.largest, knobs.target))

  def draw():
    size = knobs.numbers[rng.integers(len(knobs.numbers))]
    numbers = tuple(int(n) for n in rng.integers(1, knobs.largest + 1, size))
    target = _combine(rng, numbers)
    if target > knobs.target:
      return None
    # The order of the numbers does not matter.
    problem = Problem(row(numbers, target, knobs.wording), target, numbers)
    return (*sorted(numbers), -target), problem

  source = f'countdown with numbers up to {knobs.largest}'
  drawn = draw_distinct(draw, count, source, 'problems.countdown.largest')
  # Rare kinds of problems (few numbers, small targets) are drawn early. Without this
  # shuffle the held-out problems, which come last, would be harder.
  return tuple(drawn[i] for i in rng.permutation(count))


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
  problem: Problem,
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
        new = chain(rng, problem.numbers, largest, slip)
        if new not in tried:
          break
    tried.append(new)
    if new[-1] == problem.answer:
      break
  expression, _, value = tried[-1]
  work = '|'.join(steps for _, steps, _ in tried)
  return work + (rf'\boxed{{{expression}}}' if value == problem.answer else '')


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
