"""Right answers that a verifier cannot use are refused; all others are accepted."""

import pytest

from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import countdown, synthetic
from bapo_jax.data.row import Row
from bapo_jax.rewards import gold, verifiers

USABLE = {
  'aime': ['0', '007', '999'],
  'gsm8k': ['18', '-1,234.50', 'Half of 8 is 4.\n#### 4', '$42'],
  'countdown': ['{"numbers": [3, 5, 8], "target": 24}'],
  'exact': ['two words', '1e999'],
  'math': [r'\frac{1}{2}', r'\left\{ x = 1 \right.', '[0, 1)', '9' * 5000],
}
UNUSABLE = {
  'aime': ['1000', '1/2', '1e999', '9' * 5000],
  'gsm8k': ['two', '1 and 2', '1e999', '9' * 5000],
  'countdown': [
    '24',
    '{"numbers": [3, 5, 8]}',
    '{"numbers": [3, 5, "8"], "target": 24}',
    '{"numbers": [3, 5.5], "target": 24}',
    '{"numbers": [3, 5], "target": 1e999}',
    '{"numbers": [3, 5], "target": NaN}',
    '{"numbers": [3, 5], "target": ' + '9' * 5000 + '}',
    '[' * 5000 + ']' * 5000,
  ],
}


@pytest.mark.parametrize(('rule', 'answers'), USABLE.items())
def test_an_answer_that_the_verifier_reads_is_accepted(rule, answers):
  for answer in answers:
    gold.check(rule)(Row('1+1', answer))
    gold.check('aime')(Row('1+1', answer, rule))  # the row's own verifier counts
    # Some response to an accepted row is right or wrong: not all are undecided.
    if rule not in verifiers.POOLED:
      assert verifiers.RULES[rule](answer, r'\boxed{7}').right is not None


@pytest.mark.parametrize(('rule', 'answers'), UNUSABLE.items())
def test_an_answer_that_the_verifier_cannot_read_is_refused(rule, answers):
  for answer in answers:
    for row, default in ((Row('1', answer), rule), (Row('1', answer, rule), 'exact')):
      with pytest.raises(ValueError, match=f'verifier {rule!r}') as error:
        gold.check(default)(row)
      assert repr(answer[:40]) in str(error.value)
      assert len(str(error.value)) < 300


def test_the_answers_of_made_problems_are_accepted():
  knobs = ProblemsConfig(train=200, test=100)
  for problem in synthetic.generate(knobs):
    gold.check('aime')(Row(problem.text, str(problem.answer)))
  for problem in countdown.generate(knobs):
    gold.check('aime')(countdown.row(problem.numbers, problem.answer, 'sentence'))
