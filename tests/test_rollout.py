"""What a response is once it is recorded, and what the evaluation counts."""

import math

import jax
import numpy as np
import oracles
import pytest

from bapo_jax import evaluate, model, prompts, rollout, text, types
from bapo_jax.progress import Clock

TEXT = text.load('characters', '{problem}\n')
SPEC = model.ModelSpec(
  vocab=25, width=16, layers=1, heads=2, kv_heads=1, head_width=8, ffn=16
)
PARAMS = oracles.noisy(SPEC, 0)
PROBLEMS = ['1+1=', '2+30=', '7=']
WIDTH, NEW, GROUP = 6, 7, 4


def problems() -> prompts.Problems:
  tokens_NT, length_N = text.ask(TEXT, PROBLEMS, WIDTH)
  return prompts.Problems(
    np.arange(3, dtype=np.int32), tokens_NT, length_N, PROBLEMS, ['2', '32', '7']
  )


def odd(answers, texts):
  """A verdict anyone can check: the response has an odd number of characters."""
  return np.asarray([len(t) % 2 == 1 for _, t in zip(answers, texts, strict=True)])


def ask(params, problems, asked, key, *, group=GROUP, step, born, verify=odd):
  return rollout.rollout(
    params,
    problems,
    asked,
    key,
    step=step,
    born=born,
    text=TEXT,
    group=group,
    clock=Clock(),
    verify=verify,
    spec=SPEC,
    new=NEW,
    temperature=1.0,
    slots=4,
    refill=4,
    chunk=NEW,
  )


@pytest.fixture(scope='module')
def groups():
  """Problem 2, an empty seat, problem 0; sampled at step 9 with weights of step 8."""
  asked = prompts.again(problems(), [2, -1, 0])
  return ask(PARAMS, problems(), asked, jax.random.key(0), step=9, born=8)


def test_the_record_has_its_shapes_and_its_dates(groups):
  size = types.agree(**groups._asdict())
  assert size == {'P': 3, 'G': GROUP, 'T': WIDTH + NEW}
  like = types.empty(3, GROUP, WIDTH + NEW)
  assert [x.dtype for x in groups] == [x.dtype for x in like]
  np.testing.assert_array_equal(groups.id_P, [2, -1, 0])
  np.testing.assert_array_equal(groups.born_P, [9, -1, 9])
  np.testing.assert_array_equal(groups.born_PGT, np.where(groups.chosen_PGT, 8, -1))
  np.testing.assert_array_equal(groups.chosen_PGT.any((1, 2)), [True, False, True])


def test_an_empty_seat_says_nothing(groups):
  for field, nothing in zip(groups, types.empty(3, GROUP, WIDTH + NEW), strict=True):
    np.testing.assert_array_equal(field[1], nothing[1])


def test_the_verdict_is_on_what_the_policy_wrote(groups):
  said = rollout.texts(TEXT, groups)
  assert [len(group) for group in said] == [GROUP] * 3
  for p in (0, 2):
    prompt = PROBLEMS[int(groups.id_P[p])] + '\n'
    for g in range(GROUP):
      row = np.asarray(groups.tokens_PGT[p, g])
      n = len(text.encode(TEXT, [prompt])[0])
      ids = row[n : n + int(groups.chosen_PGT[p, g].sum())]
      assert said[p][g] == ''.join(text.CHARACTERS[i] for i in ids if i != 1)
  correct = [[len(t) % 2 == 1 for t in group] for group in said]
  assert 0 < np.sum(correct) < 2 * GROUP  # or nothing was tested
  np.testing.assert_array_equal(groups.correct_PG, correct)
  np.testing.assert_array_equal(groups.reward_PG, np.asarray(correct, np.float32))


def test_each_response_is_judged_by_its_own_answer():
  heard = []

  def listen(answers, texts):
    heard.extend(answers)
    return odd(answers, texts)

  asked = prompts.again(problems(), [1, 0])
  ask(PARAMS, problems(), asked, jax.random.key(0), step=1, born=0, verify=listen)
  assert heard == ['32'] * GROUP + ['2'] * GROUP


def test_no_prompts_are_a_record_of_no_rows():
  asked = prompts.again(problems(), [])
  groups = ask(PARAMS, problems(), asked, jax.random.key(0), step=9, born=8)
  assert types.agree(**groups._asdict()) == {'P': 0, 'G': GROUP, 'T': WIDTH + NEW}


def test_the_evaluation_counts_what_a_hand_counts():
  # Problem 0: '3' right, ended (2 tokens), '45678' wrong, cut (5 tokens). Problem 1:
  # '5' and '6', right, ended. Verdicts 1 0 1 1: accuracy 3/4; means 1/2 and 1, their
  # standard deviation 0.35355, over sqrt 2: 0.25. Tokens (2 + 5 + 2 + 2) / 4 = 2.75.
  said = [[[9, 1], [10, 11, 12, 13, 14]], [[11, 1], [12, 1]]]
  small = jax.tree.map(lambda x: x[:2], problems())
  small = small._replace(text=PROBLEMS[:2], answer=['2', '32'])

  def written(params, problems, asked, key, *, group, step, born):
    assert (params, group, step, born) == ('weights', 2, 40, 40)
    np.testing.assert_array_equal(asked.id_P, [0, 1])
    groups = jax.tree.map(np.array, types.empty(2, 2, WIDTH + 5))
    for p in range(2):
      for g in range(2):
        at = slice(asked.length_P[p], asked.length_P[p] + len(said[p][g]))
        groups.tokens_PGT[p, g, at] = said[p][g]
        groups.chosen_PGT[p, g, at] = True
    return groups._replace(correct_PG=np.asarray([[1, 0], [1, 1]], bool))

  result, samples = evaluate.evaluate(
    'weights', small, TEXT, None, rollout=written, group=2, step=40
  )
  assert result == {
    'accuracy': 0.75,
    'stderr': pytest.approx(0.25),
    'n': 2,
    'group': 2,
    'length': 2.75,
    'truncated': 0.25,
  }
  one, two = ({'problem': p, 'answer': a} for p, a in (('1+1=', '2'), ('2+30=', '32')))
  assert samples == [
    {**one, 'response': '3', 'correct': True},
    {**one, 'response': '45678', 'correct': False},
    {**two, 'response': '5', 'correct': True},
    {**two, 'response': '6', 'correct': True},
  ]


def test_the_evaluation_goes_through_the_same_door():
  result, samples = evaluate.evaluate(
    PARAMS, problems(), TEXT, jax.random.key(1), rollout=ask, group=GROUP, step=3
  )
  assert len(samples) == 3 * GROUP
  verdicts = [len(sample['response']) % 2 == 1 for sample in samples]
  assert [sample['correct'] for sample in samples] == verdicts
  assert result['accuracy'] == pytest.approx(np.mean(verdicts))


def test_stderr_by_hand():
  # Means 0, 1/2, 1: standard deviation 1/2, over sqrt 3.
  correct_PG = np.asarray([[0, 0], [1, 0], [1, 1]], bool)
  assert evaluate.stderr(correct_PG) == pytest.approx(0.5 / math.sqrt(3))
  # Problems are drawn, responses are not: the same verdicts asked twice prove no more.
  twice = np.concatenate([correct_PG, correct_PG], 1)
  assert evaluate.stderr(twice) == pytest.approx(0.5 / math.sqrt(3))
  assert evaluate.stderr(correct_PG[:1]) == 0
