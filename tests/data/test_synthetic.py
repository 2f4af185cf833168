r"""The generated congruences and pairs, and their worked solutions, by arithmetic."""

import re

import numpy as np
import pytest

from bapo_jax.data import synthetic
from bapo_jax.data.generate import draw_distinct
from bapo_jax.rewards import verifiers
from examples import pairs as pairs_lib

BOX = r'\boxed{'
EVERY_LEVEL = pytest.mark.parametrize(
  ('family', 'level'),
  [('trial', level) for level in synthetic.LEVELS]
  + [('pair', level) for level in pairs_lib.LEVELS],
)


def generate(family, level, seed):
  make = {'trial': synthetic.synthetic, 'pair': pairs_lib.pairs}[family]
  return make('train', level=level, seed=seed, train=40, test=1)


def solve(row, seed=0, slip=0.0, repeat=0.0) -> str:
  return row['solutions'](np.random.default_rng(seed), slip, repeat)


def pairs(count=300, **knobs):
  return pairs_lib.pairs('train', level=3, train=count, test=1, **knobs)


def coefficients(row):
  """(a, b, m, d, e) as the text has them."""
  found = re.fullmatch(r'(\d+)x=(\d+) mod (\d+)\|(\d+)x=(\d+)', row['problem'])
  return tuple(int(n) for n in found.groups())


def trial(row):
  """(a, c, b, m) as the text has them."""
  found = re.fullmatch(r'(\d+)x\+(\d+)=(\d+) mod (\d+)', row['problem'])
  return tuple(int(n) for n in found.groups())


def trials(m, solution):
  """The (x, ax, ax + c, ax + c - b) of worked trials."""
  digits = len(str(m - 1))
  tried = solution.split(BOX)[0].split('|')[1:]
  assert all(len(t) == 4 * digits for t in tried)
  return [[int(t[i : i + digits]) for i in range(0, 4 * digits, digits)] for t in tried]


def length(solution) -> int:
  """Tokens of a solution and its end: a box is one token, any other character too."""
  return len(solution.replace(BOX, '#')) + 1


@EVERY_LEVEL
def test_answers_are_right_and_unique(family, level):
  for row in generate(family, level, 0):
    if family == 'pair':
      a, b, m, d, e = coefficients(row)
      roots = [x for x in range(m) if (a * x - b) % m == 0 == (d * x - e) % m]
      # One equation leaves several x.
      assert sum((a * x - b) % m == 0 for x in range(m)) > 1
    else:
      a, c, b, m = trial(row)
      roots = [x for x in range(m) if (a * x + c - b) % m == 0]
    assert roots == [row['answer']]
    # No level gives its answer away: neither 0 nor the reduced b.
    assert 0 < row['answer'] <= 999 and a % m != 1


def check_pair(row, solution):
  """Every trial of a clean solution is right, and only the last one passes both."""
  a, b, m, d, e = coefficients(row)
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
  assert passed == [row['answer']] == [int(numbers[-1][0])]


@EVERY_LEVEL
def test_a_clean_solution_is_right_in_every_step(family, level):
  for seed, row in enumerate(generate(family, level, 1)):
    solution = solve(row, seed)
    assert verifiers.verify('aime', str(row['answer']), solution).right
    assert solution.endswith(f'{BOX}{row["answer"]}}}')
    if family == 'pair':
      check_pair(row, solution)
      continue
    a, c, b, m = trial(row)
    head = re.fullmatch(r'(\d+)x\+(\d+)=(\d+)', solution.split('|')[0]).groups()
    assert [int(n) for n in head] == [a % m, c % m, b % m]
    tried = trials(m, solution)
    for x, ax, ax_c, rest in tried:
      assert (ax, ax_c, rest) == (a * x % m, (a * x + c) % m, (a * x + c - b) % m)
    candidates = [x for x, *_ in tried]
    assert len(set(candidates)) == len(candidates)
    assert candidates[-1] == row['answer'] and 0 not in [r for *_, r in tried[:-1]]


def wrong_to_right(rows, limit):
  """Mean length of wrong solutions, cut at a number of tokens, over that of right."""
  lengths = {True: [], False: []}
  for seed, row in enumerate(rows):
    solution = solve(row, seed, slip=0.5, repeat=0.15)
    cut = solution.replace(BOX, '#')[:limit].replace('#', BOX)
    right = verifiers.verify('aime', str(row['answer']), cut).right
    lengths[right].append(min(length(solution), limit))
  assert min(len(x) for x in lengths.values()) > 20
  return np.mean(lengths[False]) / np.mean(lengths[True])


def test_a_wrong_reduction_runs_into_the_limit_which_sets_the_ratio():
  for limit, least in ((48, 1.5), (75, 2), (110, 3)):
    assert wrong_to_right(pairs(), limit) > least


def test_hard_problems_are_a_share_that_the_warm_start_never_reads():
  rows = pairs(1000, hard=0.3)
  hard = [coefficients(row) for row in rows if 'solutions' not in row]
  easy = [coefficients(row) for row in rows if 'solutions' in row]
  assert 0.25 < len(hard) / len(rows) < 0.35
  assert all(100 < n <= 160 for a, b, *_ in hard for n in (a, b))
  assert all(n <= 60 for a, b, *_ in easy for n in (a, b))
  assert {m for _, _, m, *_ in hard} == {8, 9}, 'the new digit counts'


def test_a_wrong_reduction_is_never_right_where_all_is_stated():
  made = pairs(hard=0.3, answer='all')
  x = pairs(hard=0.3)
  assert [row['problem'] for row in made] == [row['problem'] for row in x]
  met = 0
  for seed, (row, other) in enumerate(zip(made, x, strict=True)):
    a, b, m, *_ = coefficients(row)
    assert str(row['answer']) == f'{a % m}{b % m}{other["answer"]}'
    if 'solutions' in row:
      assert verifiers.verify('aime', str(row['answer']), solve(row, seed)).right
      wrong = solve(row, seed, slip=1.0)
      assert not verifiers.verify('aime', str(row['answer']), wrong).right
      met += BOX in wrong
  assert met > 3, 'none met the right x by a coincidence of both equations'


def test_all_problems_there_are_can_be_drawn():
  rng = np.random.default_rng(0)

  def draw():
    n = int(rng.integers(500))
    return (n, n) if n else None

  assert sorted(draw_distinct(draw, 499, '')) == list(range(1, 500))
  with pytest.raises(ValueError, match='about 499 different problems'):
    draw_distinct(draw, 500, '')
