"""Given responses take seats of a group, and change no bit of the sampled ones."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import runs
from runs import PARTIAL, last_run, same, tiny, train
from three_problems import ACTOR, ENGINE, GROUP, NEW, TOKENIZER, problems

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.data.conversation import Between
from bapo_jax.data.tokenizer import encode
from bapo_jax.rollout import given
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.types import GIVEN

SEATS = 2
SOLUTIONS = [
  (r'1+1\boxed{2}', '2'),  # the first has 7 tokens with its end: as many as fit
  lambda rng, slip, repeat: str(rng.integers(10, 99)),
  ('12345678', ('5', '=6', '7')),  # the first is too long
]


def drawn(ids, purpose=(0, 0)):
  table = problems()
  rows = zip(table.rows, SOLUTIONS, strict=True)
  table = table._replace(rows=[row._replace(solutions=x) for row, x in rows])
  return given.responses(
    table,
    prompts.prompts_by_id(table, ids),
    TOKENIZER,
    Between(),
    seats=SEATS,
    longest=NEW,
    purpose=purpose,
  )


def test_solutions_are_drawn_without_repeats_and_by_round_and_problem():
  responses = drawn([0, 1, 2, -1])
  texts = [x and TOKENIZER.decode([x.tokens])[0] for x in responses]
  assert sorted(texts[:2]) == [r'1+1\boxed{2}<eos>', '2<eos>']
  assert texts[2] != texts[3] and all(len(x) == 7 for x in texts[2:4])
  assert texts[4:] == ['5<eos>=67<eos>', None, None, None]
  assert responses[4].sampled == [1, 1, 0, 0, 1, 1]
  assert [x.turns for x in responses[:5]] == [1, 1, 1, 1, 2]
  assert drawn([0, 1, 2, -1]) == responses
  # A problem has the same solutions beside others, and other ones in the next round.
  assert drawn([1, 0]) == [*responses[2:4], *responses[:2]]
  assert drawn([1], (0, 1)) != responses[2:4]


@pytest.mark.parametrize('mesh', [None, sharding.make(4, 2, 1)])
def test_sampled_responses_keep_their_bits(mesh):
  engine = dataclasses.replace(ENGINE, mesh=mesh, max_num_seqs=8, prefill_batch_size=8)
  ids = [2, 0, 1, -1]
  asked = prompts.prompts_by_id(problems(), ids)
  uid_B = np.arange(len(ids) * GROUP, dtype=np.uint32)
  found = []
  for responses in (), drawn(ids):
    rollouts = PartialRollouts(engine, len(ids))
    # The rows have been used before.
    full = rollouts.rows.tokens_BT.at[:].set(9)
    rollouts.rows = rollouts.rows._replace(tokens_BT=full)
    rollouts.submit(asked, uid_B, given=responses)
    rollouts.decode(ACTOR, jax.random.key(0), policy_version=4)
    rows = rollouts.read(rollouts.finished(), len(ids))
    found.append(jax.tree.map(np.asarray, rows))
  before, after = found
  version_PGT = after.policy_version_BT
  given_PG = (version_PGT == GIVEN).any(-1)
  wanted_PG = np.zeros((4, GROUP), bool)
  wanted_PG[:, -SEATS:] = np.reshape([x is not None for x in drawn(ids)], (4, SEATS))
  np.testing.assert_array_equal(given_PG, wanted_PG)
  for x, y in zip(after, before, strict=True):
    if x is not None:
      np.testing.assert_array_equal(x[~given_PG], y[~given_PG])
  assert not after.logp_BT[given_PG].any()
  # Prompt, response, zeros; the message has no version.
  (prompt,) = encode(TOKENIZER, ['7=\n'])
  row = [*prompt, *encode(TOKENIZER, ['5<eos>=67<eos>'])[0]]
  assert after.tokens_BT[0, GROUP - SEATS].tolist() == row + [0] * (13 - len(row))
  versions = [-1] * 3 + [GIVEN] * 2 + [-1] * 2 + [GIVEN] * 2
  assert version_PGT[0, GROUP - SEATS].tolist() == versions + [-1] * (13 - len(row))


KNOBS = {'rollout.given': 1, 'loss.imitation': 0.1, 'optimizer.lr': 1e-2}
KNOBS |= {'steps': 5, 'checkpoint.keep': 99, 'rewards.shaping.truncated': 'masked'}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('given') / 'whole'
  assert train(tiny(**KNOBS), workdir) == 0
  return workdir


def test_a_run_imitates_its_given_responses(whole):
  rows = [row for row in last_run(whole).rows.values() if 'rollout/age' in row]
  logp = [float(row['given/logp']) for row in rows]
  assert logp[-1] > logp[0] + 0.1
  assert {row['given/filled'] for row in rows} == {'1.0'}
  # Metrics of rollouts are the policy's: all eight groups of a step are recorded.
  recorded = map(json.loads, (whole / 'groups' / '1.jsonl').read_text().splitlines())
  responses = [response for group in recorded for response in group['responses']]
  sampled = [x for x in responses if not x.get('given')]
  assert (len(responses), len(sampled)) == (32, 24)
  assert {tuple(x['version']) for x in responses if x.get('given')} == {(-1, -1)}
  # Also those that are masked.
  assert [x['taught'] for x in sampled] == [not x['truncated'] for x in sampled]
  for name, field in (('accuracy', 'correct'), ('length', 'tokens')):
    mean = np.mean([x[field] for x in sampled])
    assert float(rows[0][f'rollout/{name}']) == pytest.approx(mean, rel=1e-5)
    assert mean != pytest.approx(np.mean([x[field] for x in responses]), rel=1e-3)
  assert {row['rollout/age'] for row in rows} == {'0.0'}
  taught = sum(x['tokens'] for x in sampled if x['taught'])
  assert float(rows[0]['learner/tokens']) > taught


@pytest.mark.parametrize('knobs', [{}, PARTIAL, {'rollout.depth': 2}])
def test_a_run_with_given_responses_resumes_to_the_bit(knobs, whole, tmp_path):
  if knobs:
    whole = tmp_path / 'whole'
    assert train(tiny(**KNOBS | knobs), whole) == 0
  config = tiny(**KNOBS | knobs)
  workdir = runs.truncated(runs.Recorded(config, whole), tmp_path / 'run', 2)
  assert train(config, workdir) == 0
  found, expected = last_run(workdir), last_run(whole)
  assert same(found.arrays, expected.arrays)
  assert (found.scalars, found.rows) == (expected.scalars, expected.rows)
