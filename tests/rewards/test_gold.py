"""Answers that a verifier cannot use are refused; those that it can use are not."""

import pathlib
import re

import pytest

from bapo_jax.data import local_files
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import countdown, synthetic
from bapo_jax.data.row import Row
from bapo_jax.rewards import gold, verifiers

SHARED = pathlib.Path(__file__).parents[3] / 'shared/data'
DEEP = r'\frac{' * 101 + '1' + '}{2}' * 101
USABLE = [  # rule, answer
  ('aime', '0'),
  ('aime', '007'),
  ('aime', '999'),
  ('gsm8k', '18'),
  ('gsm8k', '-1,234.50'),
  ('gsm8k', 'Half of 8 is 4.\n#### 4'),
  ('gsm8k', '$42'),
  ('countdown', '{"numbers": [3, 5, 8], "target": 24}'),
  ('exact', 'two words'),
  ('exact', '1e999'),
  ('math', r'\frac{1}{2}'),
  ('math', r'\left\{ x = 1 \right.'),
  ('math', '[0, 1)'),
  ('math', '9' * 5000),
  ('math', DEEP[6:-4]),  # a hundred
]
UNUSABLE = [  # rule, answer, part of the sentence
  ('aime', '1000', 'is not an integer 0..999'),
  ('aime', '1/2', 'is not an integer 0..999'),
  ('aime', '1e999', 'is not an integer 0..999'),
  ('aime', '9' * 5000, 'is not an integer 0..999'),
  ('gsm8k', 'two', 'is not one number'),
  ('gsm8k', '1 and 2', 'is not one number'),
  ('gsm8k', '1e999', 'is not one number'),
  ('gsm8k', '9' * 5000, 'is not one number'),
  ('countdown', '24', 'is not {"numbers":'),
  ('countdown', '{"numbers": [3, 5, 8]}', 'is not {"numbers":'),
  ('countdown', '{"numbers": [3, 5, "8"], "target": 24}', 'is not {"numbers":'),
  ('countdown', '{"numbers": [3, 5.5], "target": 24}', 'is not {"numbers":'),
  ('countdown', '{"numbers": [3, 5], "target": 1e999}', 'is not {"numbers":'),
  ('countdown', '{"numbers": [3, 5], "target": NaN}', 'is not {"numbers":'),
  (
    'countdown',
    '{"numbers": [3, 5], "target": ' + '9' * 5000 + '}',
    'is not {"numbers"',
  ),
  ('countdown', '[' * 5000 + ']' * 5000, 'is not {"numbers":'),
  (
    'countdown',
    '{"numbers": [' + '1, ' * 100 + '1], "target": 3}',
    'needs an expression of more than 200 characters',
  ),
  ('math', DEEP, 'nests brackets more than 100 deep'),
]


@pytest.mark.parametrize(('rule', 'answer'), USABLE)
def test_an_answer_that_the_verifier_reads_is_accepted(rule, answer):
  gold.check(rule)(Row('1+1', answer))
  gold.check('aime')(Row('1+1', answer, rule))  # the row's own verifier counts
  # What the row may hold, some response gets right or wrong: none stays undecided.
  if rule not in verifiers.POOLED:
    assert verifiers.RULES[rule](answer, r'\boxed{7}').right is not None


@pytest.mark.parametrize(('rule', 'answer', 'message'), UNUSABLE)
def test_an_answer_that_the_verifier_cannot_read_is_refused(rule, answer, message):
  for row, default in ((Row('1', answer), rule), (Row('1', answer, rule), 'exact')):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
      gold.check(default)(row)
    sentence = str(error.value)
    assert (
      sentence.startswith(f'the right answer {answer[:40]!r}') and len(sentence) < 300
    )
    assert f'the verifier {rule!r} cannot use it; correct it' in sentence


def test_every_rule_is_asked():
  assert {rule for rule, _ in USABLE} == set(verifiers.RULES)


@pytest.mark.parametrize(
  ('file', 'rule'),
  [
    ('aime24.jsonl', 'aime'),
    ('gsm8k_test_300.jsonl', 'aime'),  # its rows name gsm8k
    ('math500_200.jsonl', 'math'),
  ],
)
def test_the_answers_of_real_files_are_accepted(file, rule):
  if not (SHARED / file).exists():
    pytest.skip(f'no {SHARED / file} here')
  assert local_files.read(str(SHARED / file), gold.check(rule))


def test_the_answers_of_made_problems_are_accepted():
  knobs = ProblemsConfig(train=200, test=100)
  for problem in synthetic.generate(knobs):
    gold.check('aime')(Row(problem.text, str(problem.answer)))
  for problem in countdown.generate(knobs):
    gold.check('aime')(countdown.row(problem.numbers, problem.answer, 'sentence'))
