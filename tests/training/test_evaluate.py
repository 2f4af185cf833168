"""What an evaluation counts, and how sure it is."""

import itertools
import math
from fractions import Fraction

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from test_rollout import GROUP, PARAMS, PROBLEMS, TEXT, WIDTH, ask, problems

from bapo_jax import types
from bapo_jax.rewards import rewards
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.training import evaluate


class Odd:
  """A judge: a response of an odd number of characters is right."""

  def submit(self, answers, texts, rules=None):
    del answers
    verdicts = [Verdict(len(t) % 2 == 1, f'{len(t)} characters', t[:1]) for t in texts]
    return rewards.PendingVerdicts(verdicts, [], texts, [], rewards.pool.Ticket([]))


def test_the_evaluation_counts_what_a_hand_counts():
  # Problem 0: '3' right, ended (2 tokens), '4567' wrong, cut (4 tokens). Problem 1:
  # '5' and '6', right, ended. Verdicts 1 0 1 1: accuracy 3/4; means 1/2 and 1, their
  # standard deviation 0.35355, over sqrt 2: 0.25. Tokens (2 + 4 + 2 + 2) / 4 = 2.5.
  # pass@2 is 1 and 1. Votes: '3' and '4' tie, half of it right; '5' and '6', right.
  said = [[[9, 1], [10, 11, 12, 13]], [[11, 1], [12, 1]]]
  small = jax.tree.map(lambda x: x[:2], problems())
  small = small._replace(text=PROBLEMS[:2], answer=['2', '32'])

  def written(params, problems, asked, key, *, group, step, policy_version, verify):
    assert (params, group, step, policy_version) == ('weights', 2, 40, 40)
    np.testing.assert_array_equal(asked.id_P, [0, 1])
    groups = jax.tree.map(np.array, types.empty_groups(2, 2, WIDTH + 5))
    for p in range(2):
      for g in range(2):
        at = slice(asked.length_P[p], asked.length_P[p] + len(said[p][g]))
        groups.tokens_PGT[p, g, at] = said[p][g]
        groups.response_mask_PGT[p, g, at] = True
        groups.behavior_logp_PGT[p, g, at] = -0.5
    texts = ['3', '4567', '5', '6']
    correct_B = verify(['2', '2', '32', '32'], texts)
    return groups._replace(correct_PG=correct_B.reshape(2, 2))

  result, samples = evaluate.evaluate(
    'weights',
    small,
    TEXT,
    None,
    rollout=written,
    judge=Odd(),
    group_size=2,
    step=40,
    ks=(1, 2),
  )
  assert result == {
    'accuracy': 0.75,
    'stderr': pytest.approx(0.25),
    'n': 2,
    'group_size': 2,
    'length': 2.5,
    'truncated': 0.25,
    'undecided': 0.0,
    'pass': {
      1: {'mean': 0.75, 'stderr': pytest.approx(0.25)},
      2: {'mean': 1.0, 'stderr': 0.0},
    },
    'maj': {
      1: {'mean': 0.75, 'stderr': pytest.approx(0.25)},
      2: {'mean': 0.75, 'stderr': pytest.approx(0.25)},
    },
  }
  assert samples[1] == {
    'id': 0,
    'uid': 1,
    'problem': '1+1=',
    'answer': '2',
    'response': '4567',
    'said': '4',
    'verdict': 'wrong',
    'reason': '4 characters',
    'correct': False,
    'tokens': 4,
    'truncated': True,
    'logp': -2.0,
  }
  assert [s['uid'] for s in samples] == [0, 1, 2, 3]
  assert [s['id'] for s in samples] == [0, 0, 1, 1]
  assert [s['correct'] for s in samples] == [True, False, True, True]
  assert [s['truncated'] for s in samples] == [False, True, False, False]


def evaluated(judge, **knobs):
  """(result, samples) of the three problems at step 3."""
  key, knobs = jax.random.key(1), knobs | {'rollout': ask, 'step': 3}
  return evaluate.evaluate(PARAMS, problems(), TEXT, key, judge=judge, **knobs)


def test_the_evaluation_goes_through_the_same_door():
  result, samples = evaluated(Odd(), group_size=GROUP, ks=(1, GROUP))
  assert len(samples) == 3 * GROUP
  verdicts = [len(sample['response']) % 2 == 1 for sample in samples]
  assert 0 < sum(verdicts) < len(verdicts)
  assert [sample['correct'] for sample in samples] == verdicts
  assert result['accuracy'] == pytest.approx(np.mean(verdicts))
  # The record is the rollout's own.
  groups = ask(
    PARAMS,
    problems(),
    evaluate.prompts_lib.again(problems(), [0, 1, 2]),
    jax.random.key(1),
    group_size=GROUP,
    step=3,
    policy_version=3,
  )
  tokens = np.asarray(groups.response_mask_PGT).sum(2).reshape(-1)
  assert [sample['tokens'] for sample in samples] == tokens.tolist()
  logp = np.asarray(groups.behavior_logp_PGT).sum(2).reshape(-1)
  np.testing.assert_allclose([s['logp'] for s in samples], logp, rtol=1e-5)


def test_undecided_is_wrong_and_said_to_be_undecided():
  class Lost(Odd):
    def submit(self, answers, texts, rules=None):
      made = super().submit(answers, texts)
      return made._replace(found=[Verdict(None, 'took over 3 s', '1')] * len(texts))

  result, samples = evaluated(Lost(), group_size=2)
  assert (result['accuracy'], result['undecided']) == (0, 1)
  assert {s['verdict'] for s in samples} == {'undecided'}
  assert result['maj'][1]['mean'] == 0


# C(n, k) by hand: of 4 responses 2 are right; of the 6 pairs one has none.
KNOWN = [
  (4, 2, 1, 1 / 2),
  (4, 2, 2, 5 / 6),
  (4, 2, 3, 1.0),
  (4, 0, 4, 0.0),
  (4, 4, 1, 1.0),
  (10, 3, 5, 11 / 12),  # 1 - 21/252
  (200, 1, 100, 1 / 2),
]


@pytest.mark.parametrize(('n', 'c', 'k', 'expected'), KNOWN)
def test_pass_at_k_on_known_counts(n, c, k, expected):
  assert evaluate.pass_at(n, c, k) == expected


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
  # One of the two right ones among 3 of 10^6: 1 - (1 - 3/10^6) (1 - 3/(10^6 - 1)).
  a, b = Fraction(3, 10**6), Fraction(3, 10**6 - 1)
  assert evaluate.pass_at(10**6, 2, 3) == float(1 - (1 - a) * (1 - b))


def test_pass_at_k_is_unbiased():
  # 6 responses at a success rate of 0.3: the estimate's mean over all counts is the
  # chance that one of k independent ones is right, 1 - 0.7^k.
  n, rate = 6, 0.3
  for k in (1, 2, 4, 6):
    mean = sum(
      math.comb(n, c) * rate**c * (1 - rate) ** (n - c) * evaluate.pass_at(n, c, k)
      for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - rate) ** k)


VOTES = [  # said, right, k, share
  ('a a b', '1 1 0', 3, 1.0),
  ('a b b', '1 0 0', 3, 0.0),
  ('a b', '1 0', 2, 1 / 2),  # a tie: either may be drawn
  ('a b c', '1 0 0', 3, 1 / 3),
  ('a - -', '1 0 0', 3, 1.0),  # no answer, no vote
  ('- - -', '0 0 0', 3, 0.0),
  ('a b b a', '1 0 0 1', 2, 1 / 2),  # two blocks, each a tie
  ('a a b b', '1 1 0 0', 2, 1 / 2),  # two blocks, one right
  ('a a b b b', '1 1 0 0 0', 2, 1 / 2),  # the fifth fills no block
  ('a b b', '1 0 0', 1, 1 / 3),
]


@pytest.mark.parametrize(('said', 'right', 'k', 'share'), VOTES)
def test_the_majority_by_hand(said, right, k, share):
  said = [None if s == '-' else s for s in said.split()]
  correct = [r == '1' for r in right.split()]
  assert evaluate.majority(said, correct, k) == pytest.approx(share)


@hypothesis.given(
  st.lists(st.tuples(st.sampled_from('abc'), st.booleans()), min_size=1, max_size=12)
)
def test_maj_at_one_is_the_accuracy(rows):
  right = dict(rows)  # one verdict an answer
  said = [s for s, _ in rows]
  correct = [right[s] for s in said]
  assert evaluate.majority(said, correct, 1) == pytest.approx(np.mean(correct))


def test_stderr_by_hand():
  # Means 0, 1/2, 1: standard deviation 1/2, over sqrt 3.
  correct_PG = np.asarray([[0, 0], [1, 0], [1, 1]], bool)
  assert evaluate.stderr(correct_PG) == pytest.approx(0.5 / math.sqrt(3))
  # Problems are drawn, responses are not: the same verdicts asked twice prove no more.
  twice = np.concatenate([correct_PG, correct_PG], 1)
  assert evaluate.stderr(twice) == pytest.approx(0.5 / math.sqrt(3))
  assert evaluate.stderr(correct_PG[:1]) == 0


@pytest.mark.parametrize('group', [1, 8])
def test_the_standard_error_is_the_spread_of_repeated_evaluations(group):
  # Problems of very different difficulty, as in practice: rates from Beta(0.4, 0.4).
  rng, errors, means = np.random.default_rng(0), [], []
  for _ in range(4000):
    rate_P = rng.beta(0.4, 0.4, 60)
    correct_PG = rng.random((60, group)) < rate_P[:, None]
    means.append(correct_PG.mean())
    errors.append(evaluate.stderr(correct_PG))
  # Both known to 1/sqrt(2 * 4000) = 1.1 %; counting responses as if they were
  # independent gives a third of it at group 8.
  spread = np.std(means)
  assert np.mean(errors) == pytest.approx(spread, rel=0.05)
  naive = math.sqrt(0.25 / (60 * group))
  assert (abs(naive - spread) < 0.1 * spread) == (group == 1)


def test_more_responses_than_there_are_is_refused():
  drawn = {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0}
  evaluate.check(8, (1, 8), **drawn)
  for ks in ((9,), (0,)):
    with pytest.raises(ValueError, match=r'evaluate\.k=.*evaluate\.group=8'):
      evaluate.check(8, ks, **drawn)


def test_the_table_holds_every_measure():
  samples = [
    dict(correct=c, said='1', verdict='right', tokens=3, truncated=False)
    for c in (True, False, True, True)
  ]
  table = evaluate.table(evaluate.summarize(samples, 2, (1, 2)), 'step 4 on x')
  lines = table.splitlines()
  assert lines[0] == 'step 4 on x: 2 problems x 2 responses'
  cells = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[2:]]
  assert cells[2] == ['avg@2', '0.7500', '0.2500']
  assert [row[0] for row in cells[2:]] == [
    'avg@2',
    'pass@1',
    'pass@2',
    'maj@1',
    'maj@2',
    'tokens',
    'truncated',
    'undecided',
  ]
  assert {len(line) for line in lines[4:]} == {len(lines[4])}


@pytest.mark.parametrize(
  'wrong', [{'temperature': -0.1}, {'top_k': -1}, {'top_p': 0.0}, {'top_p': 1.1}]
)
def test_a_way_to_draw_that_is_none(wrong):
  drawn = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0} | wrong
  with pytest.raises(ValueError, match='give temperature >= 0, top_k >= 0'):
    evaluate.check(1, (1,), **drawn)
