"""The measures of an evaluation, and their standard errors."""

import dataclasses
import itertools
import math
from fractions import Fraction

import hypothesis
import jax
import making
import numpy as np
import pytest
from hypothesis import strategies as st
from three_problems import ACTOR, ENGINE, GROUP, NEW, PROBLEMS, TOKENIZER, problems

from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Row
from bapo_jax.rewards import rewards
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.rollout import rollout as rollout_lib
from bapo_jax.training import evaluate

AT_ONE = {'mean': 0.75, 'stderr': pytest.approx(0.25)}


# Problem 0: '3' right, ended (2 tokens), '4567' wrong, cut (4 tokens). Problem 1: '5'
# and '6', right, ended. Verdicts 1 0 1 1: accuracy 3/4; means 1/2 and 1, their standard
# deviation 0.35355, over sqrt 2: 0.25. Tokens (2 + 4 + 2 + 2) / 4 = 2.5. pass@2 is 1
# and 1. Votes: '3' and '4' tie, half of it right; '5' and '6', right.
BY_HAND = {
  'accuracy': 0.75,
  'stderr': pytest.approx(0.25),
  'reward': 0.75,  # of rules without grades: 1 if right, else 0
  'reward_stderr': pytest.approx(0.25),
  'n': 2,
  'group_size': 2,
  'length': 2.5,
  'truncated': 0.25,
  'undecided': 0.0,
  'undecided_because': '',
  'pass': {1: AT_ONE, 2: {'mean': 1.0, 'stderr': 0.0}},
  'maj': {1: AT_ONE, 2: AT_ONE},
  'parts': {},
}


def test_the_summary_is_what_a_hand_counts():
  rows = [('right', '3', 2), ('wrong', '4', 4), ('right', '5', 2), ('right', '6', 2)]
  samples = [
    {
      'verdict': verdict,
      'correct': verdict == 'right',
      'reward': float(verdict == 'right'),
      'extracted': answer,
      'tokens': tokens,
      'truncated': tokens == 4,
      'parts': {},
    }
    for verdict, answer, tokens in rows
  ]
  assert evaluate.summarize(samples, 2, (1, 2)) == BY_HAND
  assert evaluate.rewards_of(BY_HAND) == {}


def test_samples_are_those_of_the_rollout():
  result, samples = evaluated(making.OddVerifier(), group_size=2)
  assert [(s['uid'], s['id']) for s in samples] == list(enumerate([0, 0, 1, 1, 2, 2]))
  for s in samples:
    assert s['problem'] == PROBLEMS[s['id']] and s['verifier'] == 'exact'
    assert s['correct'] == (len(s['response']) % 2 == 1)
    assert s['reason'] == f'{len(s["response"])} characters'
    assert s['tokens'] == NEW if s['truncated'] else 0 < s['tokens'] <= NEW
    assert s['logp'] < 0
  assert result == evaluate.summarize(samples, 2, (1,))


def evaluated(verifier, group_size=GROUP, asked=None, **knobs):
  """(result, samples) of the three problems at step 3."""
  engine, key = dataclasses.replace(ENGINE, group_size=group_size), jax.random.key(1)
  given = ACTOR, asked or problems(), TOKENIZER, key
  return evaluate.evaluate(*given, engine=engine, verifier=verifier, step=3, **knobs)


def test_equal_answers_and_responses_have_the_verdicts_of_their_own_verifiers(
  monkeypatch,
):
  # One text, one answer, one response: 042 is the integer 42, and is not the word 42.
  def read(tokenizer, tokens_BT, mask_BT):
    return [r'\boxed{042}'] * len(tokens_BT)

  monkeypatch.setattr(rollout_lib.tokenizer_lib, 'decode_responses', read)
  rows = [Row('1+1=', '42', rule) for rule in ('aime', 'exact', 'aime')]
  same = problems()._replace(rows=rows)
  _, samples = evaluated(rewards.Verifier(Verification()), asked=same)
  assert [s['correct'] for s in samples] == [*[True] * 4, *[False] * 4, *[True] * 4]
  verifiers = [s['verifier'] for s in samples[::GROUP]]
  assert verifiers == ['aime', 'exact', 'aime']


def test_a_named_set_has_its_own_number_and_error():
  # One set of problems 0 and 1, one of problem 2. The verdicts of the first set are
  # those of BY_HAND; the second has one problem, and so no error.
  verdicts = [True, False, True, True, False, True]
  verifier = making.ScriptedVerifier([Verdict(x, 'slow', '3') for x in verdicts])
  named = problems()
  names = zip(named.rows, ('aime24', 'aime24', 'b'), strict=True)
  named = named._replace(rows=[row._replace(set=name) for row, name in names])
  result, samples = evaluated(verifier, group_size=2, asked=named)
  assert [s['set'] for s in samples] == ['aime24'] * 4 + ['b'] * 2
  first, second = result['sets']['aime24'], result['sets']['b']
  assert (first['accuracy'], first['n']) == (0.75, 2)
  assert first['stderr'] == pytest.approx(0.25)
  assert (second['accuracy'], second['stderr'], second['n']) == (0.5, 0.0, 1)
  # The mean of 1/2, 1 and 1/2 and its error: deviation sqrt(1/12), over sqrt 3.
  assert result['accuracy'] == pytest.approx(2 / 3)
  assert result['stderr'] == pytest.approx(1 / 6)
  # Names change nothing else.
  plain, without = evaluated(verifier, group_size=2)
  assert result == plain | {'sets': result['sets']}
  pairs = zip(without, samples, strict=True)
  assert samples == [x | {'set': y['set']} for x, y in pairs]


def test_graded_rewards_and_their_parts_by_hand():
  # Rewards .5 and 1, then .25 and undecided: problem means .75 and .25,
  # whose mean is .5 and standard error (.75 - .25) / 2; so has `fit`. Only the second
  # response has `style`: the means are -1 and 0.
  graded = [(0.5, {'fit': 0.5}), (1.0, {'fit': 1.0, 'style': -2.0})]
  graded += [(0.25, {'fit': 0.25}), (None, {})]
  verdicts = [Verdict(r and r > 0.4, 'slow', None, r, p or None) for r, p in graded]
  verifier = making.ScriptedVerifier(verdicts)
  asked = Problems(*(x[:2] for x in problems()))
  result, samples = evaluated(verifier, group_size=2, asked=asked)
  assert [(s['reward'], s['parts']) for s in samples] == [
    (reward, parts) for reward, parts in graded
  ]
  assert (result['accuracy'], result['undecided']) == (0.5, 0.25)
  assert samples[3]['verdict'] == 'undecided' and samples[3]['correct'] is None
  assert result['undecided_because'] == 'slow'
  assert evaluate.rewards_of(result) == {
    'reward': pytest.approx((0.5, 0.25)),
    'reward/fit': pytest.approx((0.5, 0.25)),
    'reward/style': pytest.approx((-0.5, 0.5)),
  }
  # The only part is the reward itself.
  del result['parts']['style']
  assert list(evaluate.rewards_of(result)) == ['reward']


@hypothesis.given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets(n, data):
  c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
  subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
  expected = Fraction(sum(map(any, subsets)), len(subsets))
  assert evaluate.pass_at(n, c, k) == float(expected)


def test_pass_at_k_of_many_responses_neither_overflows_nor_cancels():
  # 1 - C(n-c, k) / C(n, k) in floats gives nan (inf / inf) or loses all digits.
  assert evaluate.pass_at(5000, 1, 2500) == 1 / 2
  assert evaluate.pass_at(10**6, 1, 1) == 1e-6


VOTES = [  # answers, right, k, share
  ('a a b', '1 1 0', 3, 1.0),
  ('a b', '1 0', 2, 1 / 2),  # a tie: either may be drawn
  ('a b c', '1 0 0', 3, 1 / 3),
  ('a - -', '1 0 0', 3, 1.0),  # no answer, no vote
  ('a b b a', '1 0 0 1', 2, 1 / 2),  # two blocks, each a tie
  ('a a b b b', '1 1 0 0 0', 2, 1 / 2),  # the fifth fills no block
  ('a b b', '1 0 0', 1, 1 / 3),
]


@pytest.mark.parametrize(('answers', 'right', 'k', 'share'), VOTES)
def test_the_majority_by_hand(answers, right, k, share):
  responses = [
    {'extracted': None if s == '-' else s, 'correct': r == '1'}
    for s, r in zip(answers.split(), right.split(), strict=True)
  ]
  assert evaluate.majority(responses, k) == pytest.approx(share)


# --- means and their standard errors --------------------------------------------------


def test_mean_and_error_by_hand():
  # Values 1, 2, 6: mean 3, squares of the differences 4 + 1 + 9 = 14, over 2 is 7.
  mean, error = evaluate.mean_and_error([1, 2, 6])
  assert mean == 3
  assert error == pytest.approx(math.sqrt(7 / 3))
  mean, error = evaluate.mean_and_error(np.asarray([0.25]))
  assert mean == 0.25 and math.isnan(error)


@pytest.mark.parametrize(
  ('value', 'half', 'sign', 'text'),
  [
    (0.000651, 0.031, '+', '+0.001 ± 0.031'),
    (0.5, 0.0999, '', '0.50 ± 0.10'),  # rounds up to two digits
    (1234.5, 321.4, '', '1234 ± 321'),
    (0.123456, 0, '', '0.1235 ± 0'),
    (0.123456, math.nan, '', '0.1235'),
  ],
)
def test_a_value_has_the_decimals_of_its_interval(value, half, sign, text):
  assert evaluate.plus_minus(value, half, sign) == text


@pytest.mark.parametrize('group', [1, 8])
def test_the_standard_error_is_the_spread_of_repeated_evaluations(group):
  # Problems of very different difficulty, as in practice: rates from Beta(0.4, 0.4).
  rng, errors, means = np.random.default_rng(0), [], []
  for _ in range(4000):
    rate_P = rng.beta(0.4, 0.4, 60)
    correct_PG = rng.random((60, group)) < rate_P[:, None]
    means.append(correct_PG.mean())
    errors.append(evaluate.mean_of_decided(correct_PG)['stderr'])
  # Both known to 1/sqrt(2 * 4000) = 1.1 %; counting responses as if they were
  # independent gives a third of it at group 8.
  spread = np.std(means)
  assert np.mean(errors) == pytest.approx(spread, rel=0.05)
  naive = math.sqrt(0.25 / (60 * group))
  assert (abs(naive - spread) < 0.1 * spread) == (group == 1)
