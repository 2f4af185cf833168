"""Countdown: every problem can be solved, comes once, and depends on the seed alone."""

import json
import re

import numpy as np
import oracles
import pytest

from bapo_jax.data import builder, countdown, tokenizer
from bapo_jax.rewards import verifiers

KINDS = {'numbers': (3, 4), 'largest': 99, 'target': 999}
SMALL = {'numbers': (3, 4), 'largest': 7, 'target': 20}


def test_a_problem_says_the_numbers_the_target_and_where_the_answer_goes():
  row = countdown.row([3, 7, 25], 46)
  assert row['problem'].startswith('Combine the numbers 3, 7, 25 with')
  assert 'equals 46.' in row['problem'] and r'\boxed{}' in row['problem']
  assert json.loads(row['answer']) == {'numbers': [3, 7, 25], 'target': 46}


@pytest.mark.parametrize(
  ('numbers', 'target'),
  [([3], 3), ('37', 10), ([3, '7'], 10), ([3, 7], 1.5), ([3, True], 4), (None, 1)],
)
def test_what_is_no_problem_is_refused(numbers, target):
  with pytest.raises(ValueError, match='are not two or more integers and one'):
    countdown.row(numbers, target)


def test_every_problem_can_be_solved():
  found = countdown.generate(0, 150, **KINDS)
  assert {len(numbers) for numbers, _ in found} == {3, 4}
  for numbers, target in found:
    assert min(numbers) >= 1 and max(numbers) <= 99 and 1 <= target <= 999
    assert target in oracles.reachable(tuple(numbers)), (numbers, target)


def test_no_two_problems_are_one_and_the_seed_decides():
  # Of 1..10 there are few multisets: without a check some would come again.
  found = countdown.generate(1, 400, numbers=(3,), largest=10, target=20)
  assert len({(*sorted(numbers), target) for numbers, target in found}) == 400
  assert found == countdown.generate(1, 400, numbers=(3,), largest=10, target=20)
  assert found != countdown.generate(2, 400, numbers=(3,), largest=10, target=20)


@pytest.mark.parametrize(
  ('kinds', 'says'),
  [
    ({'numbers': ()}, r'numbers=\(\): how many numbers'),
    ({'numbers': (1, 3)}, r'numbers=\(1, 3\): how many'),
    ({'numbers': (7,)}, r'numbers=\(7,\): how many'),
    ({'largest': 4}, r'largest=4: give at least 5'),
    ({'target': 0}, r'target=0: give at least 10'),
    ({'wording': 'terse'}, r"wording='terse': choose one of \['sentence', 'short'\]"),
    (
      {'numbers': (2,), 'largest': 10, 'target': 10},
      r'fewer than train \+ test = 999; ask for fewer or raise problems\.countdown',
    ),
  ],
)
def test_what_cannot_be_made_is_refused(kinds, says):
  with pytest.raises(ValueError, match=says):
    countdown.generate(0, 999, **(KINDS | kinds))


def test_training_and_test_problems_are_written_and_do_not_meet(tmp_path):
  made = countdown.prepare(str(tmp_path), seed=0, train=60, test=30, **KINDS)
  splits = {s: builder.rows(made, s) for s in ('train', 'test')}
  assert {s: len(rows) for s, rows in splits.items()} == {'train': 60, 'test': 30}
  expected = [countdown.row(*each) for each in countdown.generate(0, 90, **KINDS)]
  for row in splits['train'] + splits['test']:
    assert row == {'id': row['id'], **expected[row['id']]}
  keys = {
    s: {(*sorted(a['numbers']), a['target']) for a in map(json.loads, answers)}
    for s, rows in splits.items()
    for answers in ([row['answer'] for row in rows],)
  }
  assert len(keys['train']) == 60 and len(keys['test']) == 30
  assert not keys['train'] & keys['test']


def worked(count=60, **noise):
  """(problem, answer for the verifier, solution) of small problems."""
  found = countdown.generate(0, count, **SMALL)
  for i, problem in enumerate(countdown.embedded(found, 'short')):
    rng = np.random.default_rng(i)
    noise = {'slip': 0.0, 'repeat': 0.0} | noise
    solution = countdown.solve(problem, rng, largest=SMALL['target'], **noise)
    yield problem, countdown.row(*found[i])['answer'], solution


def chains(solution):
  """Of each chain the numbers it takes and the steps (a, sign, b, result)."""
  for written in solution.split('\\')[0].split('|'):
    first, *steps = re.findall(r'\d+|[-+*/]\d+=\d+', written)
    assert written == first + ''.join(steps)
    numbers, made, value = [int(first)], [], int(first)
    for sign, b, result in (re.fullmatch(r'(.)(\d+)=(\d+)', s).groups() for s in steps):
      made.append((value, sign, int(b), int(result)))
      numbers.append(int(b))
      value = int(result)
    yield numbers, made


RESULT = {'+': lambda a, b: a + b, '-': lambda a, b: a - b, '*': lambda a, b: a * b}
RESULT |= {'/': lambda a, b: a / b}


def test_short_problems_and_their_solutions_are_in_the_embedded_alphabet():
  row = countdown.row([4, 7, 2], 26, 'short')
  assert row['problem'] == '4 7 2=26'
  assert row['answer'] == countdown.row([4, 7, 2], 26)['answer']
  for problem, _, solution in worked(slip=0.3, repeat=0.3):
    written = (problem.text + '\n' + solution).replace('\\boxed{', '')
    assert set(written) <= set(tokenizer.CHARACTERS)


def test_a_clean_solution_is_right_in_every_step():
  verdicts = []
  for problem, answer, solution in worked():
    tried = solution.split('\\')[0].split('|')
    assert len(set(tried)) == len(tried) or len(tried) == 40
    for numbers, made in chains(solution):
      assert sorted(numbers) == sorted(problem.numbers)
      for a, sign, b, result in made:
        assert RESULT[sign](a, b) == result and 1 <= result <= SMALL['target']
    *before, (_, last) = chains(solution)
    assert all(made[-1][-1] != problem.answer for _, made in before)
    reached = last[-1][-1] == problem.answer
    assert verifiers.countdown(answer, solution).right == reached
    verdicts.append(reached)
  # Forty chains miss some, and (a+b)*(c+d) is none: 0.90 over 300 problems.
  assert np.mean(verdicts) > 0.8


def test_slips_make_wrong_steps_and_wrong_answers():
  verdicts = []
  for _, answer, solution in worked(slip=1.0):
    verdicts.append(verifiers.countdown(answer, solution).right)
    for _, made in chains(solution):
      # At 1 a slip downwards has nowhere to go.
      assert all(r == 1 or RESULT[sign](a, b) != r for a, sign, b, r in made)
  assert np.mean(verdicts) < 0.5


def test_repeats_write_a_chain_again():
  def share(**noise):
    tried = [s.split('\\')[0].split('|') for _, _, s in worked(**noise)]
    return np.mean([len(set(t)) < len(t) for t in tried if len(t) < 40])

  assert share() == 0 and share(repeat=0.5) > 0.5


def test_sentences_are_not_for_the_embedded_policy():
  with pytest.raises(
    ValueError, match=r"wording='sentence' is not for .*wording='shor"
  ):
    countdown.embedded([([4, 7, 2], 26)], 'sentence')
