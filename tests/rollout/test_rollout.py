"""What a response is once it is recorded."""

import hypothesis
import jax
import numpy as np
import oracles
import pytest
from hypothesis import strategies as st

from bapo_jax import types
from bapo_jax.data import prompts, tokenizer
from bapo_jax.models import transformer
from bapo_jax.rewards import rewards
from bapo_jax.rollout import rollout
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime.progress import PhaseTimer

TEXT = tokenizer.load('characters', '{problem}\n')
SPEC = transformer.ModelSpec(
  vocab=25, width=16, layers=1, heads=2, kv_heads=1, head_width=8, ffn=16
)
PARAMS = oracles.noisy(SPEC, 0)
PROBLEMS = ['1+1=', '2+30=', '7=']
WIDTH, NEW, GROUP = 6, 7, 4
FLYING = {
  'max_new_tokens': NEW,
  'temperature': 1.0,
  'max_num_seqs': 4,
  'prefill_batch_size': 4,
  'tokens_per_dispatch': NEW,
}
SAMPLING = FLYING | {'spec': SPEC}
FIELDS = ('tokens_PGT', 'behavior_logp_PGT', 'response_mask_PGT', 'reward_PG')


def problems() -> prompts.Problems:
  tokens_NT, length_N = tokenizer.tokenize_prompts(TEXT, PROBLEMS, WIDTH)
  return prompts.Problems(
    np.arange(3, dtype=np.int32), tokens_NT, length_N, PROBLEMS, ['2', '32', '7']
  )


def odd(answers, texts, rules):
  """A verdict anyone can check: the response has an odd number of characters."""
  return np.asarray([len(t) % 2 == 1 for _, t in zip(answers, texts, strict=True)])


def ask(
  params,
  problems,
  asked,
  key,
  *,
  group_size=GROUP,
  step,
  policy_version,
  verify=odd,
  **more,
):
  return rollout.rollout(
    params,
    problems,
    asked,
    key,
    step=step,
    policy_version=policy_version,
    text=TEXT,
    group_size=group,
    clock=PhaseTimer(),
    verify=verify,
    **SAMPLING | more,
  )


@pytest.fixture(scope='module')
def groups():
  """Problem 2, an empty seat, problem 0; sampled at step 9 with weights of step 8."""
  asked = prompts.prompts_by_id(problems(), [2, -1, 0])
  return ask(PARAMS, problems(), asked, jax.random.key(0), step=9, policy_version=8)


def test_the_record_has_its_shapes_and_its_dates(groups):
  size = types.agree(**groups._asdict())
  assert size == {'P': 3, 'G': GROUP, 'T': WIDTH + NEW}
  like = types.empty_groups(3, GROUP, WIDTH + NEW)
  assert [x.dtype for x in groups] == [x.dtype for x in like]
  np.testing.assert_array_equal(groups.id_P, [2, -1, 0])
  np.testing.assert_array_equal(groups.completed_step_P, [9, -1, 9])
  np.testing.assert_array_equal(
    groups.policy_version_PGT, np.where(groups.response_mask_PGT, 8, -1)
  )
  np.testing.assert_array_equal(
    groups.response_mask_PGT.any((1, 2)), [True, False, True]
  )


def test_an_empty_seat_says_nothing(groups):
  for field, nothing in zip(
    groups, types.empty_groups(3, GROUP, WIDTH + NEW), strict=True
  ):
    np.testing.assert_array_equal(field[1], nothing[1])


def test_the_verdict_is_on_what_the_policy_wrote(groups):
  said = rollout.texts(TEXT, groups)
  assert [len(group) for group in said] == [GROUP] * 3
  for p in (0, 2):
    prompt = PROBLEMS[int(groups.id_P[p])] + '\n'
    for g in range(GROUP):
      row = np.asarray(groups.tokens_PGT[p, g])
      n = len(tokenizer.encode(TEXT, [prompt])[0])
      ids = row[n : n + int(groups.response_mask_PGT[p, g].sum())]
      assert said[p][g] == ''.join(tokenizer.CHARACTERS[i] for i in ids if i != 1)
  correct = [[len(t) % 2 == 1 for t in group] for group in said]
  assert 0 < np.sum(correct) < 2 * GROUP  # or nothing was tested
  np.testing.assert_array_equal(groups.correct_PG, correct)
  np.testing.assert_array_equal(groups.reward_PG, np.asarray(correct, np.float32))


def test_each_response_is_judged_by_its_own_answer():
  heard = []

  def listen(answers, texts, rules):
    heard.extend(answers)
    return odd(answers, texts, rules)

  asked = prompts.prompts_by_id(problems(), [1, 0])
  ask(
    PARAMS,
    problems(),
    asked,
    jax.random.key(0),
    step=1,
    policy_version=0,
    verify=listen,
  )
  assert heard == ['32'] * GROUP + ['2'] * GROUP


def test_no_prompts_are_a_record_of_no_rows():
  asked = prompts.prompts_by_id(problems(), [])
  groups = ask(PARAMS, problems(), asked, jax.random.key(0), step=9, policy_version=8)
  assert types.agree(**groups._asdict()) == {'P': 0, 'G': GROUP, 'T': WIDTH + NEW}


def test_rewards_are_shaped_on_the_way_out(groups):
  heard = []

  def shape(groups, texts):
    heard.extend(texts)
    return groups._replace(reward_PG=groups.reward_PG + 1)

  asked = prompts.prompts_by_id(problems(), [2, -1, 0])
  found = ask(
    PARAMS, problems(), asked, jax.random.key(0), step=9, policy_version=8, shape=shape
  )
  np.testing.assert_array_equal(found.reward_PG, np.asarray(groups.reward_PG) + 1)
  assert heard == [t for row in rollout.texts(TEXT, groups) for t in row]


def carried(
  steps: int,
  max_tokens_per_step: int,
  max_off_policy_steps: int,
  max_num_seqs: int,
  cache='refresh',
):
  """Groups of each step under weights that change, and the flight at the end."""
  flying = RolloutEngine(
    SPEC,
    places=2 * (max_age + 1),
    max_prompt_tokens=WIDTH,
    group_size=GROUP,
    eos=TEXT.eos,
    **FLYING | {'max_num_seqs': slots},
  )
  found = []
  for step in range(steps):
    params = jax.tree.map(lambda x, step=step: x * (1 + step / 50), PARAMS)
    asked = prompts.prompts_by_id(problems(), [step % 3, (step + 1) % 3])
    knobs = {
      'flight': flying,
      'max_tokens_per_step': budget,
      'max_off_policy_steps': max_age,
      'cache': cache,
    }
    key, first = jax.random.key(0), step * 2 * GROUP
    more = knobs | {'first': first}
    groups = ask(params, problems(), asked, key, step=step, policy_version=step, **more)
    found.append(jax.tree.map(np.asarray, groups))
  return found, flying


@hypothesis.given(
  st.integers(1, NEW), st.integers(1, 3), st.sampled_from([4, 16]), st.booleans()
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_no_token_is_older_than_its_bound(budget, max_age, slots, kept):
  steps = 6
  found, flying = carried(steps, budget, max_age, slots, 'keep' if kept else 'refresh')
  told = []
  for step, groups in enumerate(found):
    assert groups.id_P.shape == (2,)
    there_P = groups.completed_step_P >= 0
    np.testing.assert_array_equal(there_P, groups.id_P >= 0)
    assert (groups.completed_step_P[there_P] == step).all()
    np.testing.assert_array_equal(
      groups.policy_version_PGT >= 0, groups.response_mask_PGT
    )
    age_PGT = np.where(groups.response_mask_PGT, step - groups.policy_version_PGT, 0)
    assert age_PGT.min() >= 0 and age_PGT.max() <= max_age
    # Within a response dates do not fall.
    for p, g in np.argwhere(groups.response_mask_PGT.any(2)):
      version_t = groups.policy_version_PGT[p, g][groups.response_mask_PGT[p, g]]
      assert (np.diff(version_t) >= 0).all()
    told += groups.id_P[there_P].tolist()
  # Every problem that was asked came back once, or is in flight still.
  left = flying.id_W[flying.asked_W >= 0].tolist()
  asked = [(step + i) % 3 for step in range(steps) for i in range(2)]
  assert sorted(told + left) == sorted(asked)
  assert (steps - 1 - flying.asked_W[flying.asked_W >= 0] < max_age).all()


def test_a_quarter_of_the_longest_at_a_time_finishes_the_same_responses():
  # The weights stay: what is cut into steps is what was written at once, to the bit.
  flying = RolloutEngine(
    SPEC,
    places=6,
    max_prompt_tokens=WIDTH,
    group_size=GROUP,
    eos=TEXT.eos,
    **FLYING | {'max_num_seqs': 16},
  )
  parts, whole = [], []
  for step in range(6):
    asked = prompts.prompts_by_id(
      problems(), [step % 3, (step + 1) % 3] if step < 2 else []
    )
    knobs = {
      'flight': flying,
      'max_tokens_per_step': -(-NEW // 4),
      'max_off_policy_steps': 9,
      'cache': 'keep',
    }
    key, first = jax.random.key(0), step * 2 * GROUP
    if step < 2:
      once = {'max_num_seqs': 16, 'first': first}
      whole += [ask(PARAMS, problems(), asked, key, step=0, policy_version=0, **once)]
      asked_now = asked
    else:
      asked_now = prompts.prompts_by_id(problems(), [-1, -1])
    more = knobs | {'first': first}
    parts += [
      ask(PARAMS, problems(), asked_now, key, step=step, policy_version=0, **more)
    ]
  assert not flying.unfinished

  def rows(found):
    kept = []
    for groups in found:
      for p in np.flatnonzero(np.asarray(groups.id_P) >= 0):
        kept += [
          tuple(np.asarray(getattr(groups, name))[p, g].tobytes() for name in FIELDS)
          for g in range(GROUP)
        ]
    return sorted(kept)

  assert len(rows(whole)) == 4 * GROUP
  assert rows(parts) == rows(whole)
  assert sum((np.asarray(groups.id_P) >= 0).any() for groups in parts) > 1


class Slow:
  """A judge whose verdicts are asked for early; counts who was asked when."""

  def __init__(self):
    self.parts, self.settled = [], 0

  def slow(self, rules):
    return rules == {''}

  def submit(self, answers, texts, rules):
    self.parts.append(len(texts))
    judge = rewards.Verifier('exact')
    return judge.submit(answers, texts, rules)

  def settle(self, verdicts):
    self.settled += len(verdicts)
    return rewards.right(verdicts)

  def __call__(self, answers, texts, rules):
    return rewards.verify(answers, texts, 'exact')


def test_slow_verdicts_are_asked_for_while_others_write(groups):
  judge, said = Slow(), rollout.texts(TEXT, groups)
  answers = [said[2][1].strip(), 'no', said[0][2].strip()]
  known = problems()._replace(answer=answers)
  asked = prompts.prompts_by_id(known, [2, -1, 0])
  early, late = (
    ask(
      PARAMS, known, asked, jax.random.key(0), step=9, policy_version=8, verify=verify
    )
    for verify in (judge, judge.__call__)
  )
  assert judge.parts[0] < 2 * GROUP < sum(judge.parts) == 3 * GROUP
  assert judge.settled == 3 * GROUP  # the empty seat's too, all wrong
  assert np.asarray(early.correct_PG).any() and not early.correct_PG[1].any()
  for a, b in zip(early, late, strict=True):
    np.testing.assert_array_equal(a, b)
