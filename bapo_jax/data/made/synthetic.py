r"""Three families of problems over residues, with worked solutions.

`trial`: find x with ax + c = b (mod m). The worked solution reduces a, c and b, then
  tries candidates in random order, writing x, ax, ax + c and ax + c - b, until the
  last value is 0, and states the answer:

    12x+5=10 mod 7  ->  5x+5=3|2312|0052|1503|...|5220\boxed{5}

  While the policy cannot predict x, right responses are short and wrong ones reach the
  token limit, as in the published runs (4.7k and 7k tokens). The policy learns to
  predict x with one modulus (level 2: accuracy 0.98 in 25 steps), but not with three.
`chain`: compute a chain of operations modulo m, writing each result. Right and wrong
  responses are equally long, so tokens with a positive advantage contribute half of the
  gradient, and adaptive clip bounds have no effect.
`pair`: find x with ax = b and dx = e (mod m). The worked solution reduces a and b, then
  tries candidates, writing x and ax; if ax is b, it also writes dx and e, and stops
  if dx is e:

    16x=32 mod 10|7x=4  ->  6x=2|50|72=94|...|22=44\boxed{2}

  If a or b is reduced wrongly, few candidates pass both equations, because d and e are
  read from the problem. Wrong responses then run to sampler.max_new_tokens, which sets
  the ratio of wrong to right lengths; with problems.pair.stops off, all responses are
  equally long. With problems.pair.answer='all', the answer is the digits of the reduced
  a, the reduced b and x (622 above), so a wrong reduction is wrong even if x is right.

Every number has a fixed width, the number of digits of m - 1. Answers are 0..999, or
have six digits for `pair` with answer='all' at level 4.
"""

import functools
import math
from collections.abc import Iterable

import numpy as np

from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made.problem import Problem, Solver, draw_distinct
from bapo_jax.data.row import Row

# Level -> (moduli, largest coefficient): the difficulty of `trial`.
TRIAL_LEVELS = {1: ((5,), 9), 2: ((7,), 20), 3: ((7, 8, 9), 40), 4: ((11, 13), 99)}
# Level -> (modulus, operations): the difficulty of `chain`.
CHAIN_LEVELS = {1: (10, 2), 2: (100, 2), 3: (100, 3), 4: (1000, 3)}
# Level -> (moduli, largest coefficient): the difficulty of `pair`.
PAIR_LEVELS = {
  1: ((9,), 40),
  2: ((8, 9), 40),
  3: ((8, 9, 10), 60),
  4: ((12, 14, 15, 16, 18, 20, 21, 22), 99),
}
HARD = 100  # added to a and b of a hard problem of `pair`


def _problem(text, answer, numbers: tuple[int, ...]):
  return Problem(Row(text, str(answer)), answer, numbers)


def _draw_trial(rng, problems):
  """Draws a problem `ax + c = b (mod m)` with one solution; x, c != 0 and a != 1."""
  moduli, largest = TRIAL_LEVELS[problems.level]
  m = moduli[rng.integers(len(moduli))]
  while True:
    a, c, b = rng.integers(1, largest + 1, 3).tolist()
    if math.gcd(a, m) == 1 and a % m != 1 and c % m and (b - c) % m:
      break
  answer = (b - c) * pow(a, -1, m) % m
  return _problem(f'{a}x+{c}={b} mod {m}', answer, (a, c, b, m))


def _solve_trial(problem, rng, slip, repeat):
  """Returns a worked solution; a trial is wrong or repeated with these chances."""
  a, c, b, m = problem.numbers
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
    written.append(_join((x, *steps), digits))
    if steps[-1] == 0:
      return '|'.join(written) + rf'\boxed{{{x}}}'
  return '|'.join(written)


def _draw_chain(rng, problems):
  """Draws a chain of +, - and *.

  `numbers` has the result after each operation, in order, and then the modulus.
  """
  m, operations = CHAIN_LEVELS[problems.level]
  value = int(rng.integers(2, 10))
  text = str(value)
  results = []
  for _ in range(operations):
    sign = '+-*'[rng.integers(3)]
    n = int(rng.integers(2, 10))
    value = {'+': value + n, '-': value - n, '*': value * n}[sign] % m
    text += f'{sign}{n}'
    results.append(value)
  return _problem(f'{text} mod {m}', value, (*results, m))


def _solve_chain(problem, rng, slip, repeat):
  """Returns a worked solution; a slip adds one error to this and all later results."""
  *results, m = problem.numbers
  digits = len(str(m - 1))
  for i in range(len(results)):
    if rng.random() < slip:
      shift = int(rng.integers(1, m))
      results[i:] = [(r + shift) % m for r in results[i:]]
  written = [
    f'{r:0{digits}}' for r in results for _ in range(1 + (rng.random() < repeat))
  ]
  return '|'.join(written) + rf'\boxed{{{results[-1]}}}'


def _draw_pair(rng, problems):
  """Draws `ax = b` and `dx = e` (mod m) with one common solution, which is not 0."""
  moduli, largest = PAIR_LEVELS[problems.level]
  above = HARD * int(rng.random() < problems.pair.hard)
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
  e = d * x % m
  stated = (a % m, b % m, x) if problems.pair.answer == 'all' else (x,)
  answer = int(_join(stated, len(str(m - 1))))
  return _problem(f'{a}x={b} mod {m}|{d}x={e}', answer, (a, b, m, d, e))


def _solve_pair(problem, rng, slip, repeat, *, stops=True, answer='x'):
  """Returns a worked solution; a or b is reduced wrongly with chance `slip`.

  A trial repeats an earlier candidate with chance `repeat`. With `stops` off, tries
  each candidate once and answers with the solution, or a random one if none passed.
  """
  a, b, m, d, e = problem.numbers
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
    trial = _join((x, a_reduced * x % m), digits)
    if a_reduced * x % m == b_reduced:
      trial += '=' + _join((d * x % m, e), digits)
    written.append(trial)
    if '=' in trial and d * x % m == e:
      solution = x
      if stops:
        break
  else:
    if stops:
      return '|'.join(written)
  stated = str(solution)
  if answer == 'all':
    stated = _join((a_reduced, b_reduced, solution), digits)
  return '|'.join(written) + rf'\boxed{{{stated}}}'


def _join(numbers: Iterable[int], digits):
  return ''.join(f'{n:0{digits}}' for n in numbers)


DRAW = {'trial': _draw_trial, 'chain': _draw_chain, 'pair': _draw_pair}
SOLVE = {'trial': _solve_trial, 'chain': _solve_chain, 'pair': _solve_pair}


def to_imitate(
  problems: ProblemsConfig, generated: tuple[Problem, ...]
) -> tuple[tuple[Problem, ...], Solver]:
  """Returns the warm start's problems and the function that writes their solutions."""
  training = generated[: problems.train]
  if problems.family != 'pair':
    return training, SOLVE[problems.family]
  easy = tuple(problem for problem in training if problem.numbers[1] <= HARD)
  knobs = problems.pair.model_dump(include={'stops', 'answer'})
  return easy, functools.partial(_solve_pair, **knobs)


def generate(problems: ProblemsConfig) -> tuple[Problem, ...]:
  """Draws distinct problems: first the training, then the held-out problems.

  Raises a ValueError if the level has too few problems.
  """
  rng = np.random.default_rng((problems.seed, problems.level))

  def draw():
    problem = DRAW[problems.family](rng, problems)
    return problem.text, problem

  source = f'level {problems.level} of {problems.family}'
  return tuple(draw_distinct(draw, problems.count, source, 'problems.level'))
