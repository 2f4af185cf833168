r"""The embedded problems and their worked solutions, by arithmetic."""

import re

import numpy as np
import pytest

from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import synthetic
from bapo_jax.data.made.problem import draw_distinct
from bapo_jax.rewards import verifiers

BOX = r'\boxed{'
EVERY_LEVEL = pytest.mark.parametrize(
  ('family', 'level'),
  [('trial', level) for level in synthetic.TRIAL_LEVELS]
  + [('chain', level) for level in synthetic.CHAIN_LEVELS]
  + [('pair', level) for level in synthetic.PAIR_LEVELS],
)


def generate(family, level, seed, count):
  made = {'family': family, 'level': level, 'train': count - 1, 'test': 1}
  return synthetic.generate(ProblemsConfig(**made, seed=seed))


def value(chain: str, m: int) -> list[int]:
  """Running results of '7*2-5', left to right, modulo m."""
  first, *steps = re.findall(r'[+*-]?\d+', chain)
  results, now = [], int(first)
  for step in steps:
    n = int(step[1:])
    now = {'+': now + n, '-': now - n, '*': now * n}[step[0]] % m
    results.append(now)
  return results


def solve(problem, seed=0, slip=0.0, repeat=0.0, **knobs) -> str:
  marks = {'|': 'pair', 'x': 'trial', '': 'chain'}  # the first mark in the text counts
  family = next(name for mark, name in marks.items() if mark in problem.text)
  rng = np.random.default_rng(seed)
  return synthetic.SOLVE[family](problem, rng, slip, repeat, **knobs)


def pairs(count=300, level=3, **knobs):
  """Problems of the family `pair`."""
  made = {'family': 'pair', 'level': level, 'train': count - 1, 'test': 1}
  return synthetic.generate(ProblemsConfig(**made, pair=knobs))


def coefficients(problem):
  """(a, b, m, d, e) as the text has them."""
  found = re.fullmatch(r'(\d+)x=(\d+) mod (\d+)\|(\d+)x=(\d+)', problem.text)
  return tuple(int(n) for n in found.groups())


def trials(problem, solution):
  """The (x, ax, ax + c, ax + c - b) of worked trials."""
  m = problem.numbers[-1]
  digits = len(str(m - 1))
  tried = solution.split(BOX)[0].split('|')[1:]
  assert all(len(t) == 4 * digits for t in tried)
  return [[int(t[i : i + digits]) for i in range(0, 4 * digits, digits)] for t in tried]


def length(problem, solution) -> int:
  """Tokens of a solution and its end: a box is one token, any other character too."""
  return len(solution.replace(BOX, '#')) + 1


@EVERY_LEVEL
def test_answers_are_right_and_unique(family, level):
  for problem in generate(family, level, 0, 40):
    question, m = problem.text.split(' mod ')
    m = int(m.split('|')[0])
    if family == 'pair':
      a, b, m, d, e = coefficients(problem)
      roots = [x for x in range(m) if (a * x - b) % m == 0 == (d * x - e) % m]
    elif family == 'trial':
      a, c, b = map(int, re.fullmatch(r'(\d+)x\+(\d+)=(\d+)', question).groups())
      roots = [x for x in range(m) if (a * x + c - b) % m == 0]
    else:
      roots = [value(question, m)[-1]]
    assert roots == [problem.answer]
    assert 0 <= problem.answer <= 999
    # No level of `trial` gives its answer away: neither 0 nor the reduced b.
    assert family == 'chain' or (problem.answer and a % m != 1)
    # One equation of `pair` leaves several x.
    assert family != 'pair' or sum((a * x - b) % m == 0 for x in range(m)) > 1


def check_pair(problem, solution):
  """Every trial of a clean solution is right, and only the last one passes both."""
  a, b, m, d, e = coefficients(problem)
  digits = len(str(m - 1))
  head, *tried = solution.split(BOX)[0].split('|')
  assert [int(n) for n in head.split('x=')] == [a % m, b % m]
  numbers = [re.findall(rf'\d{{{digits}}}', t) for t in tried]
  for trial, (x, ax, *both) in zip(tried, numbers, strict=True):
    x = int(x)
    assert int(ax) == a * x % m
    assert ('=' in trial) == (a * x % m == b % m)
    assert [int(n) for n in both] == ([d * x % m, e] if both else [])
  passed = [int(x) for x, _, *both in numbers if both and both[0] == both[1]]
  assert passed == [problem.answer] == [int(numbers[-1][0])]


@EVERY_LEVEL
def test_a_clean_solution_is_right_in_every_step(family, level):
  for seed, problem in enumerate(generate(family, level, 1, 40)):
    solution = solve(problem, seed)
    assert verifiers.aime(str(problem.answer), solution).right
    assert solution.endswith(f'{BOX}{problem.answer}}}')
    if family == 'pair':
      check_pair(problem, solution)
      continue
    *_, m = problem.numbers
    if family == 'chain':
      results = value(problem.text.split(' mod ')[0], m)
      digits = len(str(m - 1))
      expected = '|'.join(f'{r:0{digits}}' for r in results)
      assert solution.split('\\')[0] == expected
      continue
    a, c, b, _ = problem.numbers
    head = re.fullmatch(r'(\d+)x\+(\d+)=(\d+)', solution.split('|')[0]).groups()
    assert [int(n) for n in head] == [a % m, c % m, b % m]
    tried = trials(problem, solution)
    for x, ax, ax_c, rest in tried:
      assert (ax, ax_c, rest) == (a * x % m, (a * x + c) % m, (a * x + c - b) % m)
    candidates = [x for x, *_ in tried]
    assert len(set(candidates)) == len(candidates)
    assert candidates[-1] == problem.answer and 0 not in [r for *_, r in tried[:-1]]


def wrong_to_right(problems, limit=10**9, **how):
  """Mean length of wrong solutions, cut at a number of tokens, over that of right."""
  lengths = {True: [], False: []}
  for seed, problem in enumerate(problems):
    solution = solve(problem, seed, **how)
    cut = solution.replace(BOX, '#')[:limit].replace('#', BOX)
    right = verifiers.aime(str(problem.answer), cut).right
    lengths[right].append(min(length(problem, solution), limit))
  assert min(len(x) for x in lengths.values()) > 20
  return np.mean(lengths[False]) / np.mean(lengths[True])


@pytest.mark.parametrize('repeat', [0.0, 0.35])
def test_unlucky_trials_are_longer_than_lucky_ones(repeat):
  # The premise of the default family: of 40 tokens, right answers take the fewest.
  assert wrong_to_right(generate('trial', 3, 4, 400), 40, repeat=repeat) > 1.2


def test_a_wrong_reduction_runs_into_the_limit_which_sets_the_ratio():
  for limit, least in ((48, 1.5), (75, 2), (110, 3)):
    assert wrong_to_right(pairs(), limit, slip=0.5, repeat=0.15) > least


def test_solutions_that_do_not_stop_are_equally_long_right_or_wrong():
  how = {'slip': 0.5, 'repeat': 0.15, 'stops': False}
  for seed, problem in enumerate(pairs(stops=False)):
    assert solve(problem, seed, **how).count('|') == coefficients(problem)[2]
  # A wrong reduction meets fewer candidates that are checked, at three tokens each.
  assert 0.85 < wrong_to_right(pairs(stops=False), **how) < 1


def test_hard_problems_are_a_share_that_the_warm_start_never_reads():
  knobs = ProblemsConfig(family='pair', train=999, test=1, pair={'hard': 0.3})
  made = synthetic.generate(knobs)
  hard = [coefficients(p) for p in made if p.numbers[1] > synthetic.HARD]
  assert 0.25 < len(hard) / len(made) < 0.35
  assert all(100 < n <= 160 for a, b, *_ in hard for n in (a, b))
  assert {m for _, _, m, *_ in hard} == {8, 9}, 'the new digit counts'
  imitated, solve = synthetic.to_imitate(knobs, made)
  assert list(imitated) == [p for p in made[:999] if max(coefficients(p)[:2]) <= 60]
  assert solve.keywords == {'stops': True, 'answer': 'x'}


def test_a_wrong_reduction_is_never_right_where_all_is_stated():
  made = pairs(hard=0.3, answer='all')
  x = pairs(hard=0.3)
  assert [p.text for p in made] == [p.text for p in x]
  met = 0
  for seed, (problem, other) in enumerate(zip(made, x, strict=True)):
    a, b, m, *_ = coefficients(problem)
    assert str(problem.answer) == f'{a % m}{b % m}{other.answer}'
    clean = solve(problem, seed, answer='all')
    assert verifiers.aime(str(problem.answer), clean).right
    wrong = solve(problem, seed, slip=1.0, answer='all')
    assert not verifiers.aime(str(problem.answer), wrong).right
    met += BOX in wrong
  assert met > 3, 'none met the right x by a coincidence of both equations'


def test_all_problems_there_are_can_be_drawn():
  rng = np.random.default_rng(0)

  def draw():
    n = int(rng.integers(500))
    return (n, n) if n else None

  assert sorted(draw_distinct(draw, 499, '', '')) == list(range(1, 500))
  with pytest.raises(ValueError, match='about 499 different problems'):
    draw_distinct(draw, 500, '', '')
