"""A response without a verdict is in no mean, in no pass rate and not in the loss."""

import functools
import math
import types as python_types

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from three_problems import TOKENIZER, sample

from bapo_jax import custom_code, types
from bapo_jax.algorithms import advantage, batch_rules, replay_buffer
from bapo_jax.autosetup import check_rules
from bapo_jax.learner import learner
from bapo_jax.rewards import rewards
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample, Scorer
from bapo_jax.rewards.shaping import Standard
from bapo_jax.run import comparison, report
from bapo_jax.training import evaluate, step_metrics
from bapo_jax.training.config import Config

RULES = [advantage.GroupRelative(), advantage.LeaveOneOut(), advantage.GroupCentred()]


def sampled(rights, ids=(0,)):
  """A rollout with these verdicts, and its groups with a bonus and a penalty.

  Wrong answers cost 1.
  """
  costs = {None: None, False: -1.0, True: 1.0}
  verdicts = [Verdict(x, 'judged', None, costs[x]) for x in rights]
  found = sample(np.asarray(ids, np.int32), making.ScriptedVerifier(verdicts))
  shaping = Standard(overlong_penalty=1.0, overlong_cache=1, format_bonus=0.5)
  is_formatted = np.ones(len(found.texts), bool)
  return found, rewards.shaped(
    found.groups, is_formatted, eos=TOKENIZER.eos, longest=7, shaping=shaping
  )


def batch(groups, rule):
  return learner.flatten(groups, jnp.zeros(len(groups.id_P), jnp.int32), rule)


@pytest.mark.parametrize('rule', RULES)
def test_an_outage_of_a_judge_is_neither_rewarded_nor_punished(rule):
  # Wrong answers cost 1, so 0 for the undecided ones would be the best of the group.
  found, shaped = sampled([False, None, False, None])
  assert found.undecided == 2
  for groups in (found.groups, shaped):
    made = batch(groups, rule)
    loss_mask_BT = np.asarray(made.loss_mask_BT)
    assert loss_mask_BT.any(1).tolist() == [True, False, True, False]
    assert not np.asarray(made.adv_BT[1::2]).any()
    # No penalty, bonus or punishment makes a number of nothing.
    assert not np.asarray(groups.reward_PG[0, 1::2]).any()
  assert not np.asarray(batch(found.groups, rule).adv_BT).any()


@pytest.mark.parametrize('rule', RULES)
def test_the_others_are_compared_as_if_it_were_not_there(rule):
  found, _ = sampled([True, None, False, False])
  adv_BT = np.asarray(batch(found.groups, rule).adv_BT)
  alone_P3 = rule(jnp.asarray([[1.0, -1.0, -1.0]]))
  decided = [0, 2, 3]
  np.testing.assert_allclose(adv_BT[decided].max(1), np.maximum(alone_P3[0], 0), 1e-6)
  np.testing.assert_allclose(adv_BT[decided].min(1), np.minimum(alone_P3[0], 0), 1e-6)
  assert not adv_BT[1].any()


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('rights', [[None] * 4, [None, True, None, None]])
def test_a_group_with_fewer_than_two_verdicts_teaches_nothing(rights, rule):
  found, _ = sampled(rights)
  made = batch(found.groups, rule)
  assert not np.asarray(made.adv_BT).any()  # and no nan
  assert not types.learnable(found.groups).any()


def test_steps_of_the_others_are_compared_alone():
  # Of three responses the second is undecided; the steps of the others are 1 and 3.
  end_PGT = np.zeros((1, 3, 4), bool)
  end_PGT[0, [0, 2], 2] = True
  groups = making.groups([0], [0], [0], G=3, T=4)._replace(
    response_mask_PGT=jnp.ones((1, 3, 4), bool),
    decided_PG=jnp.asarray([[True, False, True]]),
    step_reward_PGT=jnp.zeros((1, 3, 4)).at[0, 0, 2].set(1.0).at[0, 2, 2].set(3.0),
    step_end_PGT=jnp.asarray(end_PGT),
  )
  adv_BT = batch(groups, advantage.GroupCentred()).adv_BT
  np.testing.assert_array_equal(adv_BT, [[-1, -1, -1, 0], [0] * 4, [1, 1, 1, 0]])


def test_a_custom_rule_of_rewards_alone_skips_the_group():
  def signed(reward_PG):
    return jnp.sign(reward_PG)

  def by_group(groups):
    return jnp.where(groups.decided_PG, groups.reward_PG, jnp.nan)[..., None] + 0 * (
      groups.behavior_logp_PGT
    )

  found, _ = sampled([True, None, False, False, *[True, False] * 2], ids=(0, 1))
  path = custom_code.register(signed)
  rule = Config().with_values(advantage={'rule': path}).advantage
  adv_BT = np.asarray(batch(found.groups, rule).adv_BT)
  assert not adv_BT[:4].any()
  assert np.abs(adv_BT[4:]).max(1).tolist() == [1] * 4
  by_group.declares = {'reads': 'groups'}
  path = custom_code.register(by_group)
  rule = Config().with_values(advantage={'rule': path}).advantage
  for groups in (found.groups, learner.settled(types.take(found.groups, slice(1, 2)))):
    assert np.isfinite(batch(groups, rule).adv_BT).all()
  assert batch(found.groups, rule).adv_BT[:4].any()


def test_without_undecided_responses_an_update_keeps_its_bits():
  # Three rewards per group: a mean over a mask multiplies by no rounded third.
  groups = making.groups(range(4), [1] * 4, [0] * 4, G=3, T=5)
  noise_PG = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  groups = groups._replace(reward_PG=jnp.asarray(noise_PG))

  def of_update(groups):
    batches = []

    def train_step(params, opt, batch):
      batches.append(batch)
      return params, opt, {}, None

    rule = advantage.GroupRelative()
    rules = learner.Rules(train_step, rule, epochs=1, minibatches=1)
    source_P = jnp.zeros(4, jnp.int32)
    learner.update({}, {}, groups, source_P, jax.random.key(0), rules)
    return batches[0].adv_BT

  bare = groups._replace(decided_PG=None)
  np.testing.assert_array_equal(of_update(groups), of_update(bare))
  some = groups._replace(decided_PG=groups.decided_PG.at[0, 0].set(False))
  assert learner.settled(some).decided_PG is not None


def marked(groups, undecided):
  """The groups with this number of undecided responses each, the last ones."""
  G = groups.correct_PG.shape[1]
  decided_PG = np.arange(G) < G - np.asarray(undecided)[:, None]
  assert not (np.asarray(groups.correct_PG) & ~decided_PG).any()
  decided_PG = jnp.asarray(decided_PG)
  return groups._replace(decided_PG=decided_PG, teaches_PG=decided_PG)


def test_pass_rates_are_those_of_the_decided_responses():
  # Eight responses. 1 right of 8 is hard (c1 = 1/8), 1 of 4 is not; 5 of 8 is reusable
  # (at most 5/8), 5 of 6 is not; 3 of 4 is not, though 3 of 8 would be.
  ids, right, undecided = [1, 2, 3, 4, 5, 6], [1, 1, 5, 5, 3, 0], [0, 4, 0, 2, 4, 8]
  fresh = marked(making.groups(ids, right, [0] * 6), undecided)
  none = types.empty_groups(0, 8, 3)
  buffer = replay_buffer.init(8, 8, 3)
  source_P = jnp.zeros(6, jnp.int32)
  ages = {'max_off_policy_steps': 3, 'max_reuse': 3}
  after, moves = replay_buffer.insert(buffer, fresh, none, fresh, source_P, 0, **ages)
  held = {
    name: np.asarray(part.id_P)[np.asarray(part.completed_step_P) >= 0].tolist()
    for name, part in (('hard', after.hard), ('reusable', after.reusable))
  }
  # Nothing is known of problem 6. 1 of 8 and 2 of 8 right are within (1/8, 5/8).
  assert held == {'hard': [1], 'reusable': [1, 2, 3]}
  assert int(moves['buffer/entered']) == 1
  # 15 right of the 8 + 4 + 8 + 6 + 4 decided responses.
  assert (int(after.num_correct), int(after.num_responses)) == (15, 30)


def test_a_hard_problem_stays_while_its_judge_is_down():
  hard = making.groups([7, 8], [0, 0], [0, 0])
  none = types.empty_groups(0, 8, 3)
  insert = functools.partial(
    replay_buffer.insert, max_off_policy_steps=3, max_reuse=3, hard_order='fifo'
  )
  no_P = jnp.full(2, -1)
  buffer, _ = insert(replay_buffer.init(4, 8, 3), hard, none, hard, no_P, 0)
  again = marked(making.groups([7, 8], [0, 6], [5, 5]), [8, 2])
  after, moves = insert(buffer, none, again, again, no_P, 5)
  # Problem 7 was tried, to no avail; 6 of 6 graduate problem 8.
  assert after.hard.completed_step_P.tolist() == [5, -1, -1, -1]
  assert int(after.hard.id_P[0]) == 7
  counts = {name: int(n) for name, n in moves.items() if n}
  assert counts == {'buffer/graduated': 1}


def test_a_right_and_an_undecided_response_are_no_contrast():
  groups = marked(making.groups([1, 2], [7, 7], [0, 0]), [1, 0])
  groups = groups._replace(reward_PG=groups.reward_PG.at[0, 0].set(2.0))
  assert types.learnable(groups).tolist() == [False, True]
  mixed_PG = np.asarray([[1, np.nan, np.nan, 1], [1, 0, np.nan, np.nan]])
  none_PG = np.zeros((2, 4), bool)
  assert check_rules.Sampled(mixed_PG, none_PG, ~none_PG, []).mixed == 1
  seated, source_P = batch_rules.LearnableOnly()(
    groups, None, None, 0, jax.random.key(0), 2
  )
  assert source_P.tolist() == [0, -1] and int(seated.id_P[0]) == 2


def test_the_metrics_of_a_step_count_what_was_decided():
  fresh = marked(making.groups([1, 2], [1, 4], [0, 0]), [6, 4])
  buffer = replay_buffer.init(1, 8, 3)
  of = (fresh, types.empty_groups(0, 8, 3), fresh, jnp.zeros(2, jnp.int32), buffer, 0)
  row = step_metrics._step_metrics(*of, jnp.asarray([1]), None)
  # 1 of 2, and 4 of 4, which have no contrast.
  assert float(row['rollout/accuracy']) == pytest.approx(5 / 6)
  assert float(row['rollout/reward']) == pytest.approx(5 / 6)
  assert float(row['batch/learnable']) == 0.5
  nothing = marked(making.groups([1], [0], [0]), [8])
  of = (nothing, types.empty_groups(0, 8, 3), nothing, jnp.zeros(1, jnp.int32), buffer)
  row = step_metrics._step_metrics(*of, 0, jnp.asarray([1]), None)
  assert math.isnan(row['rollout/accuracy']) and math.isnan(row['rollout/reward'])


def answered(right, reward=None, answer=None, parts=None):
  return {
    'correct': right,
    'reward': float(right or 0) if reward is None else reward,
    'extracted': answer,
    'verdict': evaluate.WORDS[right],
    'reason': 'late' if right is None else 'equal',
    'tokens': 4,
    'truncated': False,
    'parts': parts or {},
  } | ({'reward': None} if right is None else {})


def test_an_evaluation_leaves_undecided_responses_out_and_counts_them():
  # Problem 0: 1 of 2 decided; problem 1: 3 of 4; problem 2: nothing is known.
  rights = [True, False, None, None, True, True, True, False, *[None] * 4]
  answers = ['a', 'b', None, None, 'c', 'c', 'd', 'e', *[None] * 4]
  samples = [answered(*x) for x in zip(rights, [None] * 12, answers, strict=True)]
  result = evaluate.summarize(samples, 4, (1, 2, 4))
  assert result['accuracy'] == result['reward'] == 0.625  # of 1/2 and 3/4
  assert result['stderr'] == pytest.approx(0.125)  # half of their difference
  assert (result['undecided'], result['undecided_because']) == (0.5, 'late')
  assert result['pass'][1]['mean'] == 0.625
  # Of two: 1, and 1 - C(1, 2) / C(4, 2) = 1. Of four, of problem 1 alone: 1.
  assert result['pass'][2]['mean'] == result['pass'][4]['mean'] == 1.0
  # Blocks of two: a or b, 1/2; c c and d or e, 3/4. Of four: c, right.
  assert result['maj'][2]['mean'] == 0.625 and result['maj'][4]['mean'] == 1.0
  assert 'undecided' in evaluate.table(result, 'title')


def test_an_evaluation_without_a_verdict_has_no_accuracy_and_no_traceback():
  samples = [answered(None) | {'parts': {}} for _ in range(4)]
  result = evaluate.summarize(samples, 2, (1, 2))
  for value in (result['accuracy'], result['stderr'], result['pass'][1]['mean']):
    assert math.isnan(value)
  assert 'nan' in evaluate.table(result, 'title')
  other = evaluate.summarize([answered(True)] * 4, 2, (1,))
  sentence = report.change_sentence(other, result)
  assert sentence.startswith('Accuracy is unknown')


def test_problems_are_paired_by_their_decided_responses():
  rows = [answered(True), answered(None), answered(None), answered(None)]
  samples = [x | {'id': i // 2, 'problem': str(i // 2)} for i, x in enumerate(rows)]
  run = python_types.SimpleNamespace(after={'samples': samples}, knobs={})
  means = comparison.by_problem(run)
  assert means['eval/accuracy'] == {(0, '0', ()): 1.0}
  assert set(means['eval/length']) == {(0, '0', ()), (1, '1', ())}


def scored(rule, **knobs):
  knobs = Verification.model_validate({'rule': rule} | knobs)
  return Scorer(knobs)([Sample('7', '7')])[0]


def test_one_undecided_rule_leaves_the_whole_reward_undecided(tmp_path):
  path = tmp_path / 'my.py'
  path.write_text(
    'from bapo_jax.rewards.answers import Verdict\n'
    'def none(sample): return None\n'
    "def odd(sample): return Verdict(None, 'down', None, 5.0, {'x': 5.0})\n"
  )
  for name in ('none', 'odd'):
    for rule in (f'{path}:{name}', f'exact,{path}:{name}'):
      verdict = scored(rule)
      assert verdict.right is None and verdict.earned == 0 and not verdict.parts
