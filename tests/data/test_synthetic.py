r"""The embedded problems and their worked solutions, by arithmetic."""

import json
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from bapo_jax.data import families, tokenizer
from bapo_jax.rewards import verifiers

BOX = r'\boxed{'
EVERY_LEVEL = pytest.mark.parametrize(
  ('family', 'level'),
  [(family, level) for family, levels in families.LEVELS.items() for level in levels],
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
  family = 'search' if 'x' in problem.text else 'chain'
  return families.SOLVERS[family](problem, np.random.default_rng(seed), slip, repeat)


def trials(problem, solution):
  """The (x, ax, ax + c, ax + c - b) of a worked search."""
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
  for problem in families.generate(family, level, 0, count):
    question, m = problem.text.split(' mod ')
    m = int(m)
    if family == 'search':
      a, c, b = (
        int(n) for n in re.fullmatch(r'(\d+)x\+(\d+)=(\d+)', question).groups()
      )
      roots = [x for x in range(m) if (a * x + c - b) % m == 0]
    else:
      roots = [value(question, m)[-1]]
    assert roots == [problem.answer]
    assert 0 <= problem.answer <= 999
    # No level of `search` gives its answer away: neither 0 nor the reduced b.
    assert family == 'chain' or (problem.answer and a % m != 1)


@EVERY_LEVEL
def test_a_clean_solution_is_right_in_every_step(family, level):
  for seed, problem in enumerate(families.generate(family, level, 1, 40)):
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
  for seed, problem in enumerate(families.generate(family, level, 2, 40)):
    solution = solve(problem, seed, slip=1.0)
    verdicts.append(verifiers.aime(str(problem.answer), solution).right)
    if family == 'search':
      a, c, b, m = problem.numbers
      for x, *rest in trials(problem, solution):
        assert rest != [a * x % m, (a * x + c) % m, (a * x + c - b) % m]
  assert np.mean(verdicts) < 0.5


@EVERY_LEVEL
def test_everything_is_written_in_the_embedded_alphabet(family, level):
  letters = set(tokenizer.CHARACTERS)
  for seed, problem in enumerate(families.generate(family, level, 3, 40)):
    for slip, repeat in ((0.0, 0.0), (0.35, 0.35)):
      written = problem.text + '\n' + solve(problem, seed, slip, repeat)
      assert set(written.replace(BOX, '')) <= letters


@pytest.mark.parametrize('noise', [(0.0, 0.0), (0.0, 0.35)])
def test_unlucky_searches_are_longer_than_lucky_ones(noise):
  # The premise of the default family: of 40 tokens, right answers take the fewest.
  lengths = {True: [], False: []}
  for seed, problem in enumerate(families.generate('search', 3, 4, 400)):
    solution = solve(problem, seed, *noise)
    cut = solution.replace(BOX, '#')[:40].replace('#', BOX)
    right = verifiers.aime(str(problem.answer), cut).right
    lengths[right].append(min(length(problem, solution), 40))
  assert min(len(x) for x in lengths.values()) > 20
  assert np.mean(lengths[False]) / np.mean(lengths[True]) > 1.2


@pytest.mark.parametrize('family', families.FAMILIES)
def test_chains_are_equally_long_and_searches_are_not(family):
  lengths = {
    length(p, solve(p, seed)) - len(str(p.answer))
    for seed, p in enumerate(families.generate(family, 2, 5, 60))
  }
  assert (len(lengths) == 1) == (family == 'chain')


@EVERY_LEVEL
def test_problems_are_a_function_of_the_seed_and_all_different(family, level):
  first = families.generate(family, level, 0, 60)
  assert first == families.generate(family, level, 0, 60)
  assert first[:30] == families.generate(family, level, 0, 30)
  assert first != families.generate(family, level, 1, 60)
  assert len({p.text for p in first}) == 60


def test_what_cannot_be_generated_is_refused():
  with pytest.raises(ValueError, match=r"problems\.family: no family 'maze'"):
    families.generate('maze', 1, 0, 1)
  with pytest.raises(ValueError, match=r'problems\.level: search has no level 9'):
    families.generate('search', 9, 0, 1)
  # Level 1 of `chain` has at most 8 * (3 * 8)^2 = 4608 problems.
  with pytest.raises(ValueError, match=r'fewer than train \+ test = 5000'):
    families.generate('chain', 1, 0, 5000)


WRITE_AND_READ = """
  import json, sys
  from bapo_jax.problems import synthetic
  config = dict(family='search', level=2, seed=0, train=20, test=10)
  builder = synthetic.prepare(sys.argv[1], **config)
  rows = {
    split: [(int(r['id']), r['problem'].decode(), r['answer'].decode())
            for r in builder.as_data_source(split)]
    for split in ('train', 'test')
  }
  print(json.dumps([rows, 'tensorflow' in sys.modules, str(builder.data_path)]))
"""


def test_problems_are_written_once_and_read_without_tensorflow(tmp_path):
  def run():
    command = [sys.executable, '-c', textwrap.dedent(WRITE_AND_READ), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])

  def files(folder):
    return {
      name: os.stat(os.path.join(folder, name)).st_mtime_ns
      for name in os.listdir(folder)
    }

  rows, tensorflow, folder = run()
  assert not tensorflow
  found = families.generate('search', 2, 0, 30)
  expected = [[i, p.text, str(p.answer)] for i, p in enumerate(found)]
  # array_record shuffles what it writes: the id says which problem a row is.
  assert sorted(rows['train']) == expected[:20]
  assert sorted(rows['test']) == expected[20:]
  written = files(folder)
  assert run()[0] == rows
  assert files(folder) == written
