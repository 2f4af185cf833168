r"""Verdicts: what counts as an answer in a box, and that no text stalls the judge."""

import time

import numpy as np
import pytest

from bapo_jax import rewards

CASES = [
  # (right answer, response, verdict)
  ('25', r'\boxed{25}', True),
  ('25', r'so x=25 and \boxed{25}.', True),
  ('25', r'\boxed{24}', False),
  ('25', '25', False),
  ('25', '', False),
  ('0', r'\boxed{0}', True),
  ('999', r'\boxed{999}', True),
  # The last box counts, and so does what follows it: not at all.
  ('25', r'\boxed{24} no, \boxed{25}', True),
  ('25', r'\boxed{25} no, \boxed{24}', False),
  ('25', r'\boxed{25} and 24 is wrong', True),
  ('25', r'\boxed{25}}}} {', True),
  # Zeros and blanks around the number are harmless.
  ('25', r'\boxed{025}', True),
  ('025', r'\boxed{25}', True),
  ('25', r'\boxed{ 25 }', True),
  ('25', '\\boxed{\n25\n}', True),
  ('25', r'\boxed{2 5}', False),
  ('0', r'\boxed{000}', True),
  # An answer is an integer from 0 to 999, spelled in digits.
  ('1000', r'\boxed{1000}', False),
  ('-1', r'\boxed{-1}', False),
  ('1', r'\boxed{-1}', False),
  ('1', r'\boxed{+1}', False),
  ('3', r'\boxed{3.0}', False),
  ('3', r'\boxed{3.}', False),
  ('3', r'\boxed{6/2}', False),
  ('3', r'\boxed{x=3}', False),
  ('100', r'\boxed{1e2}', False),
  ('10', r'\boxed{1_0}', False),
  ('16', r'\boxed{0x10}', False),
  ('three', r'\boxed{three}', False),
  # Digits of other scripts are no digits here, though str.isdigit likes them.
  ('2', '\\boxed{²}', False),
  ('25', '\\boxed{٢٥}', False),
  ('25', '\\boxed{２５}', False),  # noqa: RUF001
  # An empty box is a box: it hides the one before.
  ('0', r'\boxed{}', False),
  ('25', r'\boxed{25} \boxed{}', False),
  # Braces nest; what does not balance is no box.
  ('25', r'\boxed{25', False),
  ('25', r'\boxed{24} \boxed{25', False),
  ('24', r'\boxed{24} \boxed{25', True),
  ('25', r'\boxed{{25}}', False),
  ('25', r'\frac{1}{2} \boxed{25}', True),
  ('25', r'{ \boxed{25}', True),
  ('25', r'} \boxed{25}', True),
  ('12', r'\boxed{\frac{1}{2}}', False),
  # A box in a box: the outer one is last to close, and holds no integer.
  ('25', r'\boxed{\boxed{25}}', False),
  ('25', r'\boxed{1\boxed{25}}', False),
  ('25', r'\boxed{\boxed{24}} \boxed{25}', True),
  ('25', r'\boxed{24 \boxed{25}', True),
  # Other commands are no boxes.
  ('25', r'\fbox{25}', False),
  ('25', r'\framebox{25}', False),
  ('25', r'boxed{25}', False),
  ('25', r'\Boxed{25}', False),
  ('25', r'\boxed 25', False),
  # Nothing is evaluated.
  ('4', r'\boxed{2+2}', False),
  ('4', r'\boxed{__import__("os").getpid()}', False),
]


@pytest.mark.parametrize(('answer', 'response', 'verdict'), CASES)
def test_aime_reads_the_last_box(answer, response, verdict):
  assert rewards.aime(answer, response) is verdict


@pytest.mark.parametrize(
  ('inside', 'expected'),
  [(r'\frac{1}{2}', r'\frac{1}{2}'), ('', ''), (r'1\boxed{2}', r'1\boxed{2}')],
)
def test_boxed_keeps_what_stands_inside(inside, expected):
  assert rewards.boxed('therefore \\boxed{' + inside + '}, done') == expected
  assert rewards.boxed('therefore, done') is None


BOMBS = {
  'many characters': 'x' * 100_000 + r'\boxed{7}',
  'nested boxes': r'\boxed{' * 20_000 + '7' + '}' * 20_000 + r'\boxed{7}',
  'open boxes': r'\boxed{' * 20_000 + r'\boxed{7}',
  'open braces': '{' * 100_000 + r'\boxed{7}',
  'closing braces': '}' * 100_000 + r'\boxed{7}',
  'backslashes': '\\' * 100_000 + 'boxed{7}',
  'many digits': r'\boxed{' + '9' * 100_000 + r'}\boxed{7}',
}


@pytest.mark.parametrize('name', BOMBS)
def test_no_response_takes_a_second(name):
  start = time.process_time()
  assert rewards.aime('7', BOMBS[name])
  assert time.process_time() - start < 1


def test_nested_boxes_cost_linear_time():
  # Eight times the text, eight times the time; copying out each box took 30 times.
  def seconds(n):
    bomb = r'\boxed{' * n + '7' + '}' * n
    best = np.inf
    for _ in range(3):
      start = time.process_time()
      rewards.boxed(bomb)
      best = min(best, time.process_time() - start)
    return best

  assert seconds(80_000) < 20 * seconds(10_000)


def test_verify_pairs_answers_with_responses():
  verdicts = rewards.verify(['1', '2', '3'], [r'\boxed{1}', r'\boxed{1}', ''])
  assert verdicts.dtype == bool
  assert verdicts.tolist() == [True, False, False]
  assert rewards.verify([], []).shape == (0,)
  # Two answers and one response cannot be paired.
  with pytest.raises(ValueError, match='zip'):
    rewards.verify(['1', '2'], [r'\boxed{1}'])
