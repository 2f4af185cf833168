"""Verdicts on a batch, and the rewards they earn."""

import functools
import typing

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from refusals import sentence_of

from bapo_jax import custom_code
from bapo_jax.data.row import Row
from bapo_jax.rewards import gold, rewards, verifiers
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.shaping import Standard


def rights(verifier, answers, texts, rules=()):
  samples = map(Sample, texts, answers, rules or [''] * len(texts))
  return [verdict.right for verdict in verifier.submit(list(samples)).result()]


def test_the_knob_names_every_rule():
  rules, _ = typing.get_args(Verification.model_fields['rule'].annotation)
  assert set(typing.get_args(rules)) == set(verifiers.RULES) == set(verifiers.READERS)
  assert set(verifiers.RULES) >= verifiers.POOLED


def test_only_a_slow_rule_has_processes_and_before_the_first_response(verifier):
  aime, math = verifier('aime'), verifier('math')
  assert rights(aime, ['1'], [r'\boxed{1}']) == [True]
  assert aime._pool is None and math._pool is not None
  assert not aime.starts_early(['', 'gsm8k']) and aime.starts_early(['', 'math'])
  assert math.starts_early(['']) and not math.starts_early(['aime'])
  for _ in range(2):  # a closed verifier may be used again
    assert rights(math, ['1'], [r'\boxed{1.0}']) == [True]
    math.close()


def test_each_response_may_have_a_rule_of_its_own(verifier):
  aime = verifier('aime')
  answers = ['7', '1/2', '1000']
  texts = [r'\boxed{7}', r'\boxed{0.5}', r'\boxed{1,000}']
  assert rights(aime, answers, texts, ['', '', 'gsm8k']) == [True, None, True]
  assert rights(aime, answers, texts, ['aime', 'math', 'gsm8k']) == [True, True, True]


RIGHT_PG = np.asarray([[1, 1, 0, 0], [1, 0, 1, 0]], bool)
CUT_PG = np.asarray([[0, 1, 0, 1], [0, 0, 1, 1]], bool)
FORM_PG = np.asarray([[1, 1, 1, 0], [1, 0, 1, 0]], bool)
LENGTH_PG = np.asarray([[10, 100, 80, 100], [79, 81, 100, 90]])


def shaped(**knobs):
  """(reward_PG, teaches_PG), the same plain and jitted."""
  shape = functools.partial(Standard(**knobs), longest=100)
  plain = shape(RIGHT_PG, LENGTH_PG, CUT_PG, FORM_PG)
  jitted = jax.jit(shape)(RIGHT_PG, LENGTH_PG, CUT_PG, FORM_PG)
  for a, b in zip(plain, jitted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  assert plain[0].dtype == jnp.float32
  return plain


def test_a_reward_is_a_verdict_and_a_bonus_for_an_answer_in_its_place():
  reward_PG, teaches_PG = shaped()
  np.testing.assert_array_equal(reward_PG, RIGHT_PG)
  assert teaches_PG.all()
  reward_PG, _ = shaped(format_bonus=0.1)
  expected = [[1.1, 1.1, 0.1, 0], [1.1, 0, 1.1, 0]]
  np.testing.assert_allclose(reward_PG, expected, rtol=1e-6)


def test_the_overlong_penalty_is_dapos():
  # L_max 100, L_cache 20: 0 up to 80, then (80 - length) / 20, -1 at 100 (equation 13),
  # added to rewards of -1 and 1 (equation 7), which are 0 and 1 here: x to (x + 1) / 2.
  reward_PG, _ = shaped(overlong_penalty=1.0, overlong_cache=20)
  penalty_PG = np.asarray([[0, -1, 0, -1], [0, -1 / 20, -1, -1 / 2]])
  dapo_PG = np.where(RIGHT_PG, 1, -1) + penalty_PG
  np.testing.assert_allclose(reward_PG, (dapo_PG + 1) / 2, atol=1e-6)
  half_PG, _ = shaped(overlong_penalty=0.5, overlong_cache=20)
  np.testing.assert_allclose(half_PG, RIGHT_PG + penalty_PG / 4, atol=1e-6)
  # Standardised in their group, the two are the same advantages (equation 9).
  ours_PG, dapo_PG = (
    (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    for x in (np.asarray(reward_PG, float), dapo_PG)
  )
  np.testing.assert_allclose(ours_PG, dapo_PG, atol=1e-5)


def test_truncated_responses_are_verified_wrong_or_masked():
  wrong_PG, teaches_PG = shaped(truncated='wrong')
  np.testing.assert_array_equal(wrong_PG, [[1, 0, 0, 0], [1, 0, 0, 0]])
  assert teaches_PG.all()
  masked_PG, teaches_PG = shaped(truncated='masked')
  np.testing.assert_array_equal(masked_PG, RIGHT_PG)  # still in its group's mean
  np.testing.assert_array_equal(teaches_PG, ~CUT_PG)


@pytest.mark.parametrize('rule', ['aime', 'python:number', 'aime,python:number'])
def test_an_answer_is_where_the_reader_of_the_problems_own_verifier_looks(
  verifier, rule
):
  def number(sample):
    return 0.5

  custom_code.register(number)
  # GSM8K's reads after ####; AIME's reads a line `Answer:`, right or wrong.
  rules = ['gsm8k', 'gsm8k', 'aime', 'aime', '', '']
  texts = ['#### 1', 'Answer: 1'] * 3
  samples = map(Sample, texts, ['7'] * 6, rules)
  formatted = [v.formatted for v in verifier(rule).submit(list(samples)).result()]
  # Nobody knows where a function looks for a problem without a verifier.
  assert formatted == [True, False, False, True, False, not rule.startswith('python')]


def test_a_number_in_a_comment_is_no_answer(verifier):
  texts = ['<!-- #### 7 --> 7', '#### 7', r'<!-- \boxed{7} --> 7', 'It is 7.']
  verdicts = verifier('gsm8k').submit([Sample(x, '7') for x in texts]).result()
  assert [v.right for v in verdicts] == [True] * 4
  assert [v.formatted for v in verdicts] == [False, True, False, False]


# ------- right answers that a verifier cannot use are refused; all others are accepted


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
      assert verifiers.verify(rule, answer, r'\boxed{7}').right is not None


@pytest.mark.parametrize(('rule', 'answers'), UNUSABLE.items())
def test_an_answer_that_the_verifier_cannot_read_is_refused(rule, answers):
  for answer in answers:
    for row, default in ((Row('1', answer), rule), (Row('1', answer, rule), 'exact')):
      sentence = sentence_of(gold.check(default), row)
      assert f'verifier {rule!r}' in sentence and repr(answer[:40]) in sentence
      assert len(sentence) < 300


def test_a_conversation_cut_at_the_budget_has_the_full_overlong_penalty():
  # A prompt of one token, then a budget of 8: two turns of 3 and 2 tokens around a
  # message of 3, another of 4 tokens in all, with its answer in the place for it, and a
  # single turn of 8. The second group is an empty seat.
  rows = ['.XXX...XX', '.XX.X....', '.XXXXXXXX', *['.........'] * 3]
  mask_BT = np.asarray([[x == 'X' for x in row] for row in rows])
  groups = making.groups([0, -1], [0, 0], [0, -1], G=3, T=9)
  groups = groups._replace(response_mask_PGT=jnp.asarray(mask_BT.reshape(2, 3, 9)))
  formatted_B = np.arange(6) % 4 == 1
  shaping = Standard(overlong_penalty=1.0, overlong_cache=4, format_bonus=0.25)
  after = rewards.shaped(groups, formatted_B, eos=(99,), longest=8, shaping=shaping)
  assert after.reward_PG.tolist() == [[-0.5, 0.25, -0.5], [0, 0, 0]]
  for name in set(groups._fields) - {'reward_PG'}:
    np.testing.assert_array_equal(getattr(after, name), getattr(groups, name))
