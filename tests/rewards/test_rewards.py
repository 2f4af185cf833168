"""Verdicts on a batch, and what they earn."""

import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.rewards import rewards, verifiers

HANGS = r'\boxed{10^9!}'
KNOBS = dict(workers=2, deadline=0.5, batch_deadline=60, memory_mb=2048, recycle=100)


def test_verify_pairs_answers_with_responses():
  verdicts = rewards.verify(['1', '2', '3'], [r'\boxed{1}', r'\boxed{1}', ''])
  assert verdicts.dtype == bool
  assert verdicts.tolist() == [True, False, False]
  assert rewards.verify([], []).shape == (0,)
  # Two answers and one response cannot be paired.
  with pytest.raises(ValueError, match='zip'):
    rewards.verify(['1', '2'], [r'\boxed{1}'])


def test_a_judge_is_verify_where_the_rule_is_fast():
  judge = rewards.Verifier('aime', **KNOBS)
  assert judge(['1', '2', '3'], [r'\boxed{1}', r'\boxed{1}', '']).tolist() == [1, 0, 0]
  assert judge([], []).dtype == bool
  assert not judge._pools, 'no process is started that nobody needs'
  judge.close()


def test_a_judge_counts_what_it_cannot_decide_as_wrong():
  judge = rewards.Verifier('math', **KNOBS)
  right = judge(['1/2'] * 4, [r'\boxed{0.5}', HANGS, r'\boxed{3}', 'Answer: 1/2'])
  assert right.tolist() == [True, False, False, True]
  assert judge.undecided() == 1 / 4
  assert judge.undecided() == 0  # since it was last asked
  judge(['1/2'], [r'\boxed{0.5}'])
  assert judge.undecided() == 0
  # `submit` does not count, and says what was found although the worker is gone.
  (verdict,) = judge.submit(['1/2'], [HANGS]).result()
  assert verdict == (None, 'took over 0.5 s', '10^9!')
  assert judge.undecided() == 0
  judge.close()


def test_each_response_may_have_a_rule_of_its_own():
  judge = rewards.Verifier('aime', **KNOBS)
  answers, texts = (
    ['7', '1/2', '1000'],
    [r'\boxed{7}', r'\boxed{0.5}', r'\boxed{1,000}'],
  )
  assert judge(answers, texts).tolist() == [True, False, False]
  assert judge(answers, texts, ['', '', 'gsm8k']).tolist() == [True, False, True]
  rules = ['aime', 'math', 'gsm8k']
  assert judge(answers, texts, rules).tolist() == [True, True, True]
  judge.close()


def test_submit_returns_before_the_verdicts_are_there():
  judge = rewards.Verifier('math', **KNOBS | {'deadline': 1.0})
  judge(['1'], [r'\boxed{1.0}'])  # warm
  waiting = judge.submit(['3'] * 2, [HANGS, r'\boxed{3.0}'])
  assert not waiting.ticket.futures[0].done()
  assert [v.right for v in waiting.result()] == [None, True]
  judge.close()


SHAPE = functools.partial(rewards.shape, longest=100)
RIGHT_PG = np.asarray([[1, 1, 0, 0], [1, 0, 1, 0]], bool)
CUT_PG = np.asarray([[0, 1, 0, 1], [0, 0, 1, 1]], bool)
FORM_PG = np.asarray([[1, 1, 1, 0], [1, 0, 1, 0]], bool)
LENGTH_PG = np.asarray([[10, 100, 80, 100], [79, 81, 100, 90]])


def shaped(**knobs):
  return SHAPE(RIGHT_PG, LENGTH_PG, CUT_PG, FORM_PG, **knobs)


def test_unshaped_a_reward_is_a_verdict():
  reward_PG, teaches_PG = shaped()
  np.testing.assert_array_equal(reward_PG, RIGHT_PG.astype(np.float32))
  assert reward_PG.dtype == jnp.float32
  assert teaches_PG.all()


def test_the_bonus_is_for_an_answer_in_its_place():
  reward_PG, _ = shaped(format_bonus=0.1)
  expected = [[1.1, 1.1, 0.1, 0], [1.1, 0, 1.1, 0]]
  np.testing.assert_allclose(reward_PG, expected, rtol=1e-6)


def test_the_overlong_penalty_is_dapos():
  # L_max 100, L_cache 20: 0 up to 80, then (80 - length) / 20, -1 at 100 (equation 13).
  reward_PG, _ = shaped(overlong_penalty=1.0, overlong_cache=20)
  penalty_PG = [[0, -1, 0, -1], [0, -1 / 20, -1, -1 / 2]]
  np.testing.assert_allclose(reward_PG, RIGHT_PG + np.asarray(penalty_PG), atol=1e-6)
  half_PG, _ = shaped(overlong_penalty=0.5, overlong_cache=20)
  np.testing.assert_allclose(half_PG, RIGHT_PG + np.asarray(penalty_PG) / 2, atol=1e-6)


def test_truncated_responses_are_judged_wrong_or_masked():
  wrong_PG, teaches_PG = shaped(truncated='wrong')
  np.testing.assert_array_equal(wrong_PG, [[1, 0, 0, 0], [1, 0, 0, 0]])
  assert teaches_PG.all()
  masked_PG, teaches_PG = shaped(truncated='masked')
  np.testing.assert_array_equal(masked_PG, RIGHT_PG)  # it stays in its group's mean
  np.testing.assert_array_equal(teaches_PG, ~CUT_PG)


def test_shape_is_the_same_under_jit():
  knobs = dict(format_bonus=0.1, overlong_penalty=1.0, overlong_cache=20)
  plain = shaped(**knobs)
  jitted = jax.jit(functools.partial(SHAPE, **knobs))
  for a, b in zip(plain, jitted(RIGHT_PG, LENGTH_PG, CUT_PG, FORM_PG), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def groups():
  """Two groups and an empty seat; token 10 ends a response where it is drawn."""
  return making.groups([4, 7, -1], [2, 5, 0], [3, 3, -1], T=5)


def reshaped(**knobs):
  knobs = dict(format_bonus=0.0, overlong_penalty=0.0, truncated='judged') | knobs
  texts = [r'\boxed{1}' if i % 3 else 'x' for i in range(24)]
  return rewards.shaped(groups(), texts, eos=(10,), rule='aime', longest=5, **knobs)


def test_neutral_knobs_leave_the_groups_alone():
  for a, b in zip(reshaped(), groups(), strict=True):
    np.testing.assert_array_equal(a, b)


def test_groups_get_their_rewards():
  old, new = groups(), reshaped(format_bonus=0.25, overlong_penalty=1.0)
  for p in range(2):
    for g in range(8):
      response_mask_T = np.asarray(old.response_mask_PGT[p, g])
      bonus = 0.25 if (p * 8 + g) % 3 else 0
      # A cache of one token: the penalty falls on the longest alone.
      penalty = float(response_mask_T.sum() == 5)
      expected = float(old.correct_PG[p, g]) + bonus - penalty
      assert float(new.reward_PG[p, g]) == pytest.approx(expected)
  assert not np.asarray(new.reward_PG[2]).any()  # nobody sits there
  for field in set(old._fields) - {'reward_PG'}:
    np.testing.assert_array_equal(getattr(new, field), getattr(old, field))


def test_a_masked_response_teaches_nothing_and_keeps_its_reward():
  old, new = groups(), reshaped(truncated='masked')
  response_mask_PGT, tokens_PGT = (
    np.asarray(old.response_mask_PGT),
    np.asarray(old.tokens_PGT),
  )
  ended_PG = (response_mask_PGT & (tokens_PGT == 10)).any(2)
  assert 0 < ended_PG[:2].sum() < 16
  np.testing.assert_array_equal(
    new.response_mask_PGT, response_mask_PGT & ended_PG[..., None]
  )
  np.testing.assert_array_equal(
    new.policy_version_PGT == -1, ~np.asarray(new.response_mask_PGT)
  )
  np.testing.assert_array_equal(new.reward_PG, old.reward_PG)
  np.testing.assert_array_equal(new.correct_PG, old.correct_PG)
  assert not np.asarray(new.behavior_logp_PGT)[~np.asarray(new.response_mask_PGT)].any()


GOOD = dict(format_bonus=0.0, overlong_penalty=0.0, overlong_cache=1, truncated='wrong')
BAD = [
  ('amie', {}, "rewards.rule: no rule named 'amie'"),
  ('aime', {'truncated': 'mask'}, "truncated='mask': choose one of"),
  ('aime', {'format_bonus': -1.0}, 'format_bonus=-1.0: give 0 or more'),
  (
    'aime',
    {'overlong_cache': 0},
    'overlong_cache=0 tokens: give 1 to sampler.max_new_tokens=9',
  ),
  ('aime', {'overlong_cache': 10}, 'overlong_cache=10 tokens'),
]


@pytest.mark.parametrize(('rule', 'knobs', 'says'), BAD)
def test_what_makes_no_sense_is_refused(rule, knobs, says):
  for good in verifiers.RULES:
    rewards.check(good, GOOD, 9)
  with pytest.raises(ValueError, match=says):
    rewards.check(rule, GOOD | knobs, 9)
