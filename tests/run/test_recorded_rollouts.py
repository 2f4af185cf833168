"""Runs on recorded rollouts: the updates of the run that sampled them, to the bit."""

import json
import pathlib

import jax
import numpy as np
import processes
import pytest
import runs
from refusals import sentence_of
from runs import BRIEF, last_run, same, tiny, train
from test_many_processes import assert_equal_runs

from bapo_jax import sharding
from bapo_jax.data import records, synthetic, tokenizer
from bapo_jax.models import logprobs
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import config as config_lib
from bapo_jax.training import needs
from bapo_jax.training.recorded_sampler import RecordedSampler
from bapo_jax.training.submission import Actor, Round
from bapo_jax.types import empty_groups
from notebooks import make

# How a step learned. Other metrics are of sampling, or of the age of tokens: a record
# does not know the step of their weights.
OF_UPDATES = ('loss/', 'clip/', 'learner/', 'advantage/')
KNOBS = {'steps': 3, 'optimizer.lr': 1e-2, 'checkpoint.keep': 99} | BRIEF
TEXT = tokenizer.load(tokenizer.EMBEDDED, '{problem}\n')


def on(records: pathlib.Path, **knobs):
  """Returns the config of a tiny run on recorded groups."""
  return tiny(**KNOBS | {'rollout.records': str(records)} | knobs)


@pytest.fixture(scope='session')
def sampled(tmp_path_factory) -> pathlib.Path:
  """Returns the workdir of a run of three steps, all of whose groups are recorded."""

  def make(workdir):
    assert train(tiny(**KNOBS), workdir) == 0

  return runs.shared(tmp_path_factory, 'sampled', make)


@pytest.fixture(scope='session')
def again(sampled, tmp_path_factory) -> pathlib.Path:
  """Returns the workdir of a run on the groups of `sampled`."""

  def make(workdir):
    assert train(on(sampled), workdir) == 0

  return runs.shared(tmp_path_factory, 'again', make)


def updates(workdir: pathlib.Path):
  rows = last_run(workdir).rows.values()
  return [{k: v for k, v in row.items() if k.startswith(OF_UPDATES)} for row in rows]


def test_a_run_on_its_record_makes_the_same_updates(sampled, again):
  assert updates(again) == updates(sampled)
  assert all(float(row['learner/grad_norm']) > 0 for row in updates(again)[1:])
  before, after = last_run(sampled), last_run(again)
  assert same(after.arrays, before.arrays)  # weights and moments
  assert after.scalars == before.scalars | {'actor_version': 0}
  ages = [row['batch/age'] for row in after.rows.values() if 'batch/age' in row]
  assert ages == ['1.0', '2.0', '3.0']  # of version -1


def test_a_run_on_a_record_resumes_to_the_bit(sampled, again, tmp_path):
  config = on(sampled)
  workdir = runs.truncated(runs.Recorded(config, again), tmp_path / 'run', 1)
  assert train(config, workdir) == 0
  found, expected = last_run(workdir), last_run(again)
  assert same(found.arrays, expected.arrays)
  assert (found.scalars, found.rows) == (expected.scalars, expected.rows)
  # Not with another record under the same name.
  other = runs.copied(sampled, tmp_path / 'other')
  workdir = tmp_path / 'moved'
  assert train(on(other, steps=1), workdir) == 0
  (other / 'groups' / '3.jsonl').unlink()
  with pytest.raises(ValueError, match=r'records: .* then, .* now'):
    train(on(other), workdir)


def test_the_first_weights_score_a_record_once_and_after_a_resume(sampled, tmp_path):
  """They sampled step 1: their numbers are close to those recorded, but not equal."""
  bare = neutral(sampled, tmp_path / 'bare.jsonl')
  knobs = {'prompts.count': 8, 'learner.recompute_logprobs': 'on'}
  workdir = tmp_path / 'run'
  assert train(on(bare, **knobs), workdir) == 0
  whole = runs.copied(workdir, tmp_path / 'whole')
  runs.truncated(runs.Recorded(None, whole), tmp_path / 'broken', 1)
  assert train(on(bare, **knobs), tmp_path / 'broken') == 0
  assert same(last_run(tmp_path / 'broken').arrays, last_run(whole).arrays)
  assert same(last_run(tmp_path / 'broken').rows[3], last_run(whole).rows[3])
  found = responses(workdir / 'groups' / '1.jsonl')
  expected = responses(sampled / 'groups' / '1.jsonl')
  assert found.keys() == expected.keys()
  for ids, logp in expected.items():
    np.testing.assert_allclose(found[ids], logp, atol=1e-5)
  # Later weights sampled steps 2 and 3, and mu still is the first policy.
  found = responses(workdir / 'groups' / '3.jsonl')
  expected = responses(sampled / 'groups' / '3.jsonl')
  far = [np.abs(np.subtract(found[ids], expected[ids])).max() for ids in expected]
  assert max(far) > 1e-3


def test_units_refuse_a_response_that_is_longer_than_they_count_on(sampled, tmp_path):
  # Rows are as long as before: prompts are shorter than the maximum.
  knobs = {'sampler.max_new_tokens': 8, 'prompts.max_prompt_tokens': 99}
  words = 'more than sampler.max_new_tokens=8,.* set learner.share_prompts=1'
  with pytest.raises(ValueError, match=words):
    train(on(sampled, **knobs | {'learner.share_prompts': 2}), tmp_path)


def responses(path: pathlib.Path) -> dict:
  """Ids of prompt and response -> the sampler's log-probabilities."""
  rows = map(json.loads, path.read_text().splitlines())
  return {
    (*row['prompt_ids'], *r['ids']): r['sampler_logp']
    for row in rows
    for r in row['responses']
  }


def neutral(workdir: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
  """Writes the groups of a workdir as lines per response, without log-probabilities."""
  lines = []
  for file in sorted((workdir / 'groups').iterdir()):
    for number, row in enumerate(map(json.loads, file.read_text().splitlines())):
      shared = {'prompt': row['prompt_ids'], 'group': number, 'step': row['step']}
      lines += [
        shared | {'tokens': r['ids'], 'reward': r['reward']} for r in row['responses']
      ]
  path.write_text('\n'.join(map(json.dumps, lines)))
  return path


@pytest.mark.nightly
def test_two_processes_on_a_record_make_the_run_of_one(sampled, tmp_path):
  knobs = KNOBS | {'rollout.records': str(sampled)}
  one, two = tmp_path / 'one', tmp_path / 'two'
  for count, workdir in ((1, one), (2, two)):
    processes.trained(workdir, count, **knobs)
  assert_equal_runs(one, two)


def test_trl_recorded_the_numbers_of_the_shipped_policy():
  """The first step of notebooks/10_trl_run.jsonl, token by token."""
  sizes = {'count': 16, 'group_size': 8, 'length': 57, 'vocab': 32, 'scored': False}
  record = records.read(str(make.HERE / '10_trl_run.jsonl'), TEXT, **sizes)
  assert record.steps == [*range(20)] and len(record.groups) == 320
  # No held-out problem, and a reward for the right answer alone.
  answers = {f'{x["problem"]}\n': x['answer'] for x in synthetic.synthetic('train')}
  for group in record.groups:
    right = rf'\boxed{{{answers[record.problems.rows[group.problem].problem]}}}'
    for response in group.responses:
      (text,) = TEXT.decode([[x for x in response.tokens.tolist() if x != TEXT.eos[0]]])
      assert response.reward == (right in text)

  spec = hf_config.read_spec(str(make.AIME), compute='float32')
  with runs.on_devices(1):
    params = weights.load(str(make.AIME), spec, sharding.make(data=1))
  rows = [(x.prompt, r) for x in record.round(0, 0, 16) for r in x.responses]
  tokens_BT = np.zeros((len(rows), 57), np.int32)
  for row_T, (prompt, response) in zip(tokens_BT, rows, strict=True):
    row_T[: len(prompt) + len(response.tokens)] = [*prompt, *response.tokens]
  logp_BT = np.asarray(logprobs.sequence_stats(params, tokens_BT, spec, 1.0).logp_BT)
  for logp_T, (prompt, response) in zip(logp_BT, rows, strict=True):
    expected_T = logp_T[len(prompt) :][: len(response.tokens)]
    np.testing.assert_allclose(response.logp, expected_T, atol=1e-3)


# Two groups of two responses to one prompt, and one to another. 5 tokens are a row.
LINES = [
  {'group': 'a', 'prompt': [5, 6], 'tokens': [7, 8, 1], 'reward': 1.5},
  {'group': 'a', 'prompt': [5, 6], 'tokens': [7], 'reward': None},
  {'group': 'b', 'prompt': '1+', 'tokens': [9, 1], 'reward': 0.0, 'mask': [0, 1]},
  {'group': 'b', 'prompt': '1+', 'tokens': [9, 1], 'reward': -1, 'correct': True},
  {'group': 3, 'prompt': [5, 6], 'tokens': [2], 'reward': 0.5, 'taught': False},
  {'group': 3, 'prompt': [5, 6], 'tokens': [2], 'reward': 0, 'answer': '7'},
]


def with_logp(lines):
  return [
    row | {'behavior_logp': [-0.5 * (i + 1) for i in range(len(row['tokens']))]}
    for row in lines
  ]


def read(path, lines, **knobs) -> records.Record:
  path.write_text('\n'.join(map(json.dumps, lines)))
  sizes = {'count': 2, 'group_size': 2, 'length': 5, 'vocab': 29, 'scored': False}
  return records.read(str(path), TEXT, **sizes | knobs)


def test_a_neutral_record_becomes_groups(tmp_path):
  record = read(tmp_path / 'a.jsonl', with_logp(LINES))
  assert [group.problem for group in record.groups] == [0, 1, 0]
  assert record.problems.length_N.tolist() == [2, 2] and record.steps == []
  one, plus = tokenizer.encode(TEXT, ['1', '+'])
  with runs.on_devices(1):
    mesh = sharding.make(data=1)

  def empty(count):
    return empty_groups(count, 2, 5)

  # A record of one step fills three of four seats, whatever the number of the round.
  record = record._replace(
    steps=[4], groups=[x._replace(step=4) for x in record.groups]
  )
  sampler = RecordedSampler(record, 0, 4, empty, mesh, PhaseTimer())
  rollout = sampler.submit(Round(7), Actor(None, 0), 9).result().fresh
  groups = jax.tree.map(np.asarray, rollout.groups)
  assert rollout.undecided == 1 and len(rollout.verdicts) == 8
  assert groups.id_P.tolist() == [0, 1, 0, -1]
  assert groups.completed_step_P.tolist() == [9, 9, 9, -1]
  assert groups.tokens_PGT.tolist() == [
    [[5, 6, 7, 8, 1], [5, 6, 7, 0, 0]],
    [[*one, *plus, 9, 1, 0]] * 2,
    [[5, 6, 2, 0, 0]] * 2,
    [[0] * 5] * 2,
  ]
  assert groups.response_mask_PGT[:3].astype(int).tolist() == [
    [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]],
    [[0, 0, 0, 1, 0], [0, 0, 1, 1, 0]],
    [[0, 0, 1, 0, 0]] * 2,
  ]
  assert groups.behavior_logp_PGT[:2].tolist() == [
    [[0, 0, -0.5, -1, -1.5], [0, 0, -0.5, 0, 0]],
    [[0, 0, 0, -1, 0], [0, 0, -0.5, -1, 0]],
  ]
  assert groups.reward_PG.tolist() == [[1.5, 0], [0, -1], [0.5, 0], [0, 0]]
  assert groups.correct_PG[:3].tolist() == [[True, False], [False, True], [True, False]]
  assert groups.decided_PG[:3].tolist() == [[True, False], [True, True], [True, True]]
  assert groups.teaches_PG[:3].tolist() == [[True, False], [True, True], [False, True]]
  assert (groups.policy_version_PGT == -1).all()


def test_the_order_is_of_seed_and_round_or_of_recorded_steps(tmp_path):
  lines = [
    {'group': i, 'prompt': [5], 'tokens': [i + 2], 'reward': i, 'behavior_logp': [-1]}
    for i in range(5)
    for _ in range(2)
  ]

  def rounds(record, seed, count=2):
    return [
      [group.responses[0].reward for group in record.round(number, seed, count)]
      for number in range(4)
    ]

  record = read(tmp_path / 'a.jsonl', lines)
  first, second, *other = rounds(record, 0)
  assert len({*first, *second}) == 4 and other != [first, second]  # two epochs
  assert rounds(record, 0) == [first, second, *other] != rounds(record, 1)
  # Steps in ascending order, then from the first again; one of them has one group.
  stepped = [row | {'step': (9, 3, 9, 5, 3)[i // 2]} for i, row in enumerate(lines)]
  record = read(tmp_path / 'b.jsonl', stepped)
  assert rounds(record, 0) == rounds(record, 1) == [[1, 4], [3], [0, 2], [1, 4]]


WRONG = [
  ({'tokens': [7, 8, 1, 1]}, {}, '6 tokens, but a row has 5; raise prompts.max_prompt'),
  ({'tokens': [7, 29]}, {}, 'from 5 to 29, but the model has 29 tokens'),
  ({'tokens': [-1]}, {}, 'from -1 to 6'),
  ({'tokens': []}, {}, 'must be ids, at least one of each'),
  ({'behavior_logp': None}, {}, "learner.recompute_logprobs='on'"),
  ({'behavior_logp': [-1]}, {}, 'a number per token'),
  ({'behavior_logp': [-1, 0.5, -1]}, {}, 'finite and at most 0'),
  ({'reward': float('inf')}, {}, 'reward is inf'),
  ({'prompt': [5]}, {}, "group 'a' has another prompt"),
  ({'group': 'c'}, {}, 'has 1 responses, but sampler.group_size=2'),
  ({}, {'count': 4}, 'prompts.count=4 is too large for only 3 recorded groups'),
]


@pytest.mark.parametrize(('changed', 'knobs', 'words'), WRONG)
def test_a_wrong_record_is_refused_with_its_line(changed, knobs, words, tmp_path):
  first, *others = with_logp(LINES)
  path = tmp_path / 'a.jsonl'
  sentence = sentence_of(read, path, [first | changed, *others], **knobs)
  assert words in sentence and (knobs or 'a.jsonl, line ' in sentence)


def test_files_without_groups_and_too_many_in_a_step_are_refused(tmp_path):
  assert 'has no groups' in sentence_of(read, tmp_path / 'a.jsonl', [])
  assert 'no such file' in sentence_of(
    records.read,
    str(tmp_path),
    TEXT,
    count=2,
    group_size=2,
    length=5,
    vocab=29,
    scored=False,
  )
  assert 'line 1: no recorded response' in sentence_of(read, tmp_path / 'a.jsonl', [3])
  stepped = [row | {'step': 4} for row in with_logp(LINES)]
  with pytest.raises(ValueError, match=r'step 4 has 3 .* more than prompts.count=2'):
    read(tmp_path / 'a.jsonl', stepped)


def test_replayed_groups_and_groups_without_tokens_are_left_out(tmp_path, capsys):
  def line(source, ids):
    response = {'ids': ids, 'sampler_logp': [-1], 'reward': 1, 'correct': True}
    return {
      'source': source,
      'step': 1,
      'answer': '3',
      'prompt_ids': [5],
      'responses': [response | {'taught': True}] * 2,
    }

  rows = [line('fresh', [7]), line('reused', [8]), line('fresh', None)]
  record = read(tmp_path / '1.jsonl', rows)
  assert [x.responses[0].tokens.tolist() for x in record.groups] == [[7]]
  assert record.problems.rows[0].answer == '3' and record.steps == [1]
  assert '2 groups are left out' in capsys.readouterr().out


OF_SAMPLING = [
  ({'rollout.depth': 1}, 'rollout.depth=1 is for sampling'),
  ({'mesh.rollout': 1, 'rollout.depth': 1}, 'set mesh.rollout=0'),
  ({'batch.rule': 'adapted'}, 'set buffer.reevaluate=0'),
  ({'prompts.rule': 'by_difficulty'}, 'set prompts.rule=shuffled'),
]


@pytest.mark.parametrize(('knobs', 'words'), OF_SAMPLING)
def test_knobs_of_sampling_are_refused(knobs, words):
  with pytest.raises(ValueError) as error:
    tiny(**knobs, **{'rollout.records': 'a.jsonl'})
  assert any(words in sentence for sentence in error.value.refusals)


def test_shaping_has_no_effect_on_recorded_rewards():
  changes = {'rollout.records': 'a.jsonl', 'rewards.shaping.truncated': 'masked'}
  config = config_lib.parse(runs.plain(**changes))
  assert 'the rewards are those of the record' in sentence_of(
    needs.refuse, changes, [config]
  )
