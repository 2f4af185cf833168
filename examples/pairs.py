r"""Pairs of congruences: generated problems whose wrong responses are the longer ones.

  --config.problems.source=examples/pairs.py:pairs \
    --config.problems.test_source=examples/pairs.py:pairs \
    --config.prompts.max_prompt_tokens=21

Find x with ax = b and dx = e (mod m). The worked solution reduces a and b, then tries
candidates, writing x and ax; if ax is b, it also writes dx and e, and stops if dx is e:

  16x=32 mod 10|7x=4  ->  6x=2|50|72=94|...|22=44\boxed{2}

If a or b is reduced wrongly, few candidates pass both equations, because d and e are
read from the problem. Wrong responses then run to sampler.max_new_tokens, which sets
the ratio of wrong to right lengths; with stops=False, worked solutions try every
candidate, and all responses are equally long. With answer='all', the answer is the
digits of the reduced a, the reduced b and x (622 above), so a wrong reduction is wrong
even if x is right. `hard` is the share of problems with larger numbers, which have no
solution to imitate: the warm start never reads them.
"""

import functools
import math
from typing import Any, Literal

import numpy as np

from bapo_jax.data.generate import draw_distinct, of_split
from bapo_jax.data.synthetic import joined

# Level -> (moduli, largest coefficient).
LEVELS = {
  1: ((9,), 40),
  2: ((8, 9), 40),
  3: ((8, 9, 10), 60),
  4: ((12, 14, 15, 16, 18, 20, 21, 22), 99),
}
HARD = 100  # added to a and b of a hard problem
Numbers = tuple[int, int, int, int, int, int]  # a, b, m, d, e, x


def pairs(
  split: str,
  *,
  level: int = 3,
  hard: float = 0.0,
  stops: bool = True,
  answer: Literal['x', 'all'] = 'x',
  seed: int = 0,
  train: int = 2048,
  test: int = 512,
) -> list[dict[str, Any]]:
  """Returns distinct problems, `train` for training and `test` held-out ones.

  Raises:
    ValueError: the level has too few problems.
  """
  rng = np.random.default_rng((seed, level))
  problems = draw_distinct(lambda: _draw(rng, level, hard), train + test, 'level')
  rows = []
  for rank, numbers in of_split(split, problems, train):
    a, b, m, d, e, x = numbers
    row: dict[str, Any] = {'problem': f'{a}x={b} mod {m}|{d}x={e}', 'rank': rank}
    row['answer'] = int(stated(a % m, b % m, x, m, answer))
    if b <= HARD:
      row['solutions'] = functools.partial(solve, numbers, stops=stops, answer=answer)
    rows.append(row)
  return rows


def _draw(rng, level, hard):
  """Draws numbers with one common solution, which is not 0. The text is their key."""
  moduli, largest = LEVELS[level]
  above = HARD * int(rng.random() < hard)
  # If m divides HARD, a policy could ignore the new hundreds digit.
  moduli = [m for m in moduli if above % m or not above]
  m = moduli[rng.integers(len(moduli))]
  # Several x solve the first equation, so some candidates fail the second; otherwise
  # the policy would learn to write e in place of dx.
  a = 1
  while not 1 < math.gcd(a, m) < m:
    a = above + int(rng.integers(2, largest + 1))
  # Only two values of d: a policy that cannot multiply by d would fake solutions.
  d = [n for n in range(2, m) if math.gcd(n, m) == 1][rng.integers(2)]
  x = int(rng.integers(1, m))
  least = above + 1 + (a * x - above - 1) % m  # the smallest b above `above`
  b = least + m * int(rng.integers((above + largest - least) // m + 1))
  numbers = a, b, m, d, d * x % m
  return numbers, (*numbers, x)


def stated(a: int, b: int, x: int, m: int, answer: str) -> str:
  """Returns the answer of a solution with the reduced a and b."""
  return str(x) if answer == 'x' else joined((a, b, x), len(str(m - 1)))


def solve(
  numbers: Numbers,
  rng: np.random.Generator,
  slip: float,
  repeat: float,
  *,
  stops: bool = True,
  answer: str = 'x',
) -> str:
  """Returns a worked solution; a or b is reduced wrongly with chance `slip`.

  A trial repeats an earlier candidate with chance `repeat`. With `stops` off, tries
  each candidate once and answers with the solution, or a random one if none passed.
  """
  a, b, m, d, e, _ = numbers
  digits = len(str(m - 1))
  reduced = [a % m, b % m]
  if rng.random() < slip:
    wrong = int(rng.integers(2))
    reduced[wrong] = (reduced[wrong] + int(rng.integers(1, m))) % m
  a_reduced, b_reduced = reduced
  written = [f'{a_reduced:0{digits}}x={b_reduced:0{digits}}']
  solution = int(rng.integers(m))
  untried = list(rng.permutation(m))
  tried = []
  for _ in range(m if not stops else 6 * m):  # bounded: there may be no solution
    if not untried:
      untried = list(rng.permutation(m))
    repeats = stops and tried and rng.random() < repeat
    x = int(tried[rng.integers(len(tried))] if repeats else untried.pop())
    tried.append(x)
    trial = joined((x, a_reduced * x % m), digits)
    if a_reduced * x % m == b_reduced:
      trial += '=' + joined((d * x % m, e), digits)
    written.append(trial)
    if '=' in trial and d * x % m == e:
      solution = x
      if stops:
        break
  else:
    if stops:
      return '|'.join(written)
  boxed = stated(a_reduced, b_reduced, solution, m, answer)
  return '|'.join(written) + rf'\boxed{{{boxed}}}'
