r"""The embedded problems and their worked solutions, by arithmetic."""

import re
import time

import numpy as np
import pytest

from bapo_jax.data import synthetic, tokenizer
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.rewards import verifiers

BOX = r'\boxed{'
EVERY_LEVEL = pytest.mark.parametrize(
  ('family', 'level'),
  [('trial', level) for level in synthetic.TRIAL_LEVELS]
  + [('chain', level) for level in synthetic.CHAIN_LEVELS],
)


def generate(family, level, seed, count):
  return synthetic.generate(
    ProblemsConfig(family=family, level=level, seed=seed, train=count - 1, test=1)
  )


def value(chain: str, m: int) -> list[int]:
  """Running results of '7*2-5', left to right, modulo m."""
  first, *steps = re.findall(r'[+*-]?\d+', chain)
  results, now = [], int(first)
  for step in steps:
    now = {
      '+': now + int(step[1:]),
      '-': now - int(step[1:]),
      '*': now * int(step[1:]),
    }[step[0]] % m
    results.append(now)
  return results


def solve(problem, seed=0, slip=0.0, repeat=0.0) -> str:
  family = 'trial' if 'x' in problem.text else 'chain'
  rng = np.random.default_rng(seed)
  return synthetic.FAMILIES[family].solve(problem, rng, slip, repeat)


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
  count = 40
  for problem in generate(family, level, 0, count):
    question, m = problem.text.split(' mod ')
    m = int(m)
    if family == 'trial':
      a, c, b = (
        int(n) for n in re.fullmatch(r'(\d+)x\+(\d+)=(\d+)', question).groups()
      )
      roots = [x for x in range(m) if (a * x + c - b) % m == 0]
    else:
      roots = [value(question, m)[-1]]
    assert roots == [problem.answer]
    assert 0 <= problem.answer <= 999
    # No level of `trial` gives its answer away: neither 0 nor the reduced b.
    assert family == 'chain' or (problem.answer and a % m != 1)


@EVERY_LEVEL
def test_a_clean_solution_is_right_in_every_step(family, level):
  for seed, problem in enumerate(generate(family, level, 1, 40)):
    solution = solve(problem, seed)
    assert verifiers.aime(str(problem.answer), solution).right
    assert solution.endswith(f'{BOX}{problem.answer}}}')
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


@EVERY_LEVEL
def test_slips_make_wrong_steps_and_wrong_answers(family, level):
  verdicts = []
  for seed, problem in enumerate(generate(family, level, 2, 40)):
    solution = solve(problem, seed, slip=1.0)
    verdicts.append(verifiers.aime(str(problem.answer), solution).right)
    if family == 'trial':
      a, c, b, m = problem.numbers
      for x, *rest in trials(problem, solution):
        assert rest != [a * x % m, (a * x + c) % m, (a * x + c - b) % m]
  assert np.mean(verdicts) < 0.5


@EVERY_LEVEL
def test_everything_is_written_in_the_embedded_alphabet(family, level):
  letters = set(tokenizer.CHARACTERS)
  for seed, problem in enumerate(generate(family, level, 3, 40)):
    for slip, repeat in ((0.0, 0.0), (0.35, 0.35)):
      written = problem.text + '\n' + solve(problem, seed, slip, repeat)
      assert set(written.replace(BOX, '')) <= letters


@pytest.mark.parametrize('noise', [(0.0, 0.0), (0.0, 0.35)])
def test_unlucky_trials_are_longer_than_lucky_ones(noise):
  # The premise of the default family: of 40 tokens, right answers take the fewest.
  lengths = {True: [], False: []}
  for seed, problem in enumerate(generate('trial', 3, 4, 400)):
    solution = solve(problem, seed, *noise)
    cut = solution.replace(BOX, '#')[:40].replace('#', BOX)
    right = verifiers.aime(str(problem.answer), cut).right
    lengths[right].append(min(length(problem, solution), 40))
  assert min(len(x) for x in lengths.values()) > 20
  assert np.mean(lengths[False]) / np.mean(lengths[True]) > 1.2


@pytest.mark.parametrize('family', synthetic.FAMILIES)
def test_chains_are_equally_long_and_trials_are_not(family):
  lengths = {
    length(p, solve(p, seed)) - len(str(p.answer))
    for seed, p in enumerate(generate(family, 2, 5, 60))
  }
  assert (len(lengths) == 1) == (family == 'chain')


@EVERY_LEVEL
def test_problems_are_a_function_of_the_seed_and_all_different(family, level):
  first = generate(family, level, 0, 60)
  synthetic.generate.cache_clear()
  assert first == generate(family, level, 0, 60)
  assert first[:30] == generate(family, level, 0, 30)
  assert first != generate(family, level, 1, 60)
  assert len({p.text for p in first}) == 60


GOLDEN = {  # (family, level) -> the first three problems and answers of seed 0
  ('trial', 1): [('9x+6=5 mod 5', 1), ('7x+1=9 mod 5', 4), ('4x+7=3 mod 5', 4)],
  ('trial', 2): [('20x+2=6 mod 7', 3), ('9x+5=13 mod 7', 4), ('18x+3=9 mod 7', 5)],
  ('trial', 3): [('13x+10=29 mod 8', 7), ('3x+36=7 mod 7', 2), ('29x+25=5 mod 9', 8)],
  ('trial', 4): [
    ('80x+41=61 mod 11', 3),
    ('82x+82=57 mod 11', 6),
    ('99x+66=4 mod 13', 2),
  ],
  ('chain', 1): [('6*9-4 mod 10', 0), ('8+9*2 mod 10', 4), ('2+4*4 mod 10', 4)],
  ('chain', 2): [('9+4-3 mod 100', 10), ('6*3-2 mod 100', 16), ('2+9+9 mod 100', 20)],
  ('chain', 3): [
    ('6*9*7+6 mod 100', 84),
    ('4*4-7+4 mod 100', 13),
    ('3*3+9+9 mod 100', 27),
  ],
  ('chain', 4): [
    ('5*5+8-6 mod 1000', 27),
    ('5+8+3-7 mod 1000', 9),
    ('8*6*9-2 mod 1000', 430),
  ],
}


@EVERY_LEVEL
def test_the_first_problems_are_those_of_recorded_runs(family, level):
  made = generate(family, level, 0, 200)
  assert [(p.text, p.answer) for p in made[:3]] == GOLDEN[family, level]


# Of `trial` level 1 has 336 problems and level 2 4580, of `chain` levels 1 and 2 have
# 8 * (3 * 8)^2 = 4608 each.
@EVERY_LEVEL
def test_fifty_thousand_problems_are_made_or_refused_within_seconds(family, level):
  problems = ProblemsConfig(family=family, level=level, train=50_000)
  begun = time.process_time()
  if level < 3:
    message = (
      rf'level {level} of {family} has about \d+ .* fewer than train \+ test = 5'
    )
    with pytest.raises(ValueError, match=message):
      synthetic.generate(problems)
  else:
    assert len(set(synthetic.generate(problems))) == 50_512
  assert time.process_time() - begun < 4  # measured: 1.4 at most


def test_all_problems_there_are_can_be_drawn():
  rng = np.random.default_rng(0)

  def draw():
    n = int(rng.integers(500))
    return (n, n) if n else None

  assert sorted(synthetic.draw_distinct(draw, 499)) == list(range(1, 500))
  assert len(synthetic.draw_distinct(draw, 500)) == 499


def test_drawing_stops_early_where_most_is_missing():
  draws = iter(range(10_000_000))

  def draw():
    n = next(draws) % 100
    return n, n

  assert synthetic.draw_distinct(draw, 100_000) == list(range(100))
  assert next(draws) < 1200
