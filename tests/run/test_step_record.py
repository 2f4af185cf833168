"""What a step trained on is recorded: every number is that of the run's own arrays."""

import math
import types as python_types

import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.data import tokenizer
from bapo_jax.data.row import Row
from bapo_jax.learner.learner import Updated
from bapo_jax.run import step_record
from bapo_jax.training.config import Config
from bapo_jax.training.state import StepRecord
from bapo_jax.types import UpdatedTokens

P, G, T = 5, 2, 6
TEXT = tokenizer.load(tokenizer.EMBEDDED, '{problem}\n')


def held_step(source=(0, 0, -1, 2, 0), updates=((0, 4), (3, 1)), pictures=((),) * P):
  """Returns (trainer, record) of 5 seats: 2 tokens of prompt, then 3, 4, 5, end."""
  groups = making.groups(range(P), [1, 2, 1, 1, 0], [7] * P, G, T)
  row = np.asarray([*tokenizer.encode(TEXT, ['1+345'])[0], TEXT.eos[0]])
  mask_PGT = np.broadcast_to(np.arange(T) >= 2, (P, G, T))
  logp_PGT = np.where(mask_PGT, -np.arange(P * G * T).reshape(P, G, T) / 64, 0)
  groups = groups._replace(
    tokens_PGT=jnp.broadcast_to(row, (P, G, T)),
    response_mask_PGT=jnp.asarray(mask_PGT),
    behavior_logp_PGT=jnp.asarray(logp_PGT, jnp.float32),
  )
  made = []
  for n, seats in enumerate(updates, 1):
    # Row r of update n: log pi = -n - r / 8, ratio 1 + t / 16; group 1 not computed.
    row_B1 = np.arange(len(seats) * G)[:, None]
    computed_B1 = np.repeat([seat != 1 for seat in seats], G)[:, None]
    tokens = UpdatedTokens(
      jnp.asarray((-n - row_B1 / 8) * computed_B1 * np.ones(T), jnp.float32),
      jnp.asarray((1 + np.arange(T) / 16) * computed_B1, jnp.float32),
      jnp.asarray(((np.arange(T) == 3) + 2 * (np.arange(T) == 4)) * computed_B1),
    )
    bounds = {'clip/low': jnp.float32(1 - n / 8), 'clip/high': jnp.float32(1 + n / 8)}
    made.append(Updated(np.asarray(seats), bounds, tokens))
  record = StepRecord(7, groups, jnp.asarray(source, jnp.int32), made)
  weights = dict(fresh=1.0, reevaluated=1.0, reused=0.5)
  config = Config()
  config = config.with_values(
    batch={'weights': config.batch.weights.model_copy(update=weights)}
  )
  t = python_types.SimpleNamespace(
    config=config,
    tokenizer=TEXT,
    spec=making.SPEC,
    problems=python_types.SimpleNamespace(
      rows=[Row('', f'answer {i}', pictures=x) for i, x in enumerate(pictures)],
      grids=[((1, 1),) * len(x) for x in pictures],
    ),
  )
  return t, record


def test_a_group_has_the_pictures_of_its_problem(tmp_path):
  assert 'pictures' not in recorded(*held_step(), tmp_path)[0]
  files = [(b'GIF8%d' % i,) * (i % 3) for i in range(P)]
  t, record = held_step(pictures=files)
  image_token = making.CHARACTERS.index('+')
  t.spec = python_types.SimpleNamespace(image_token=image_token)
  for row in recorded(t, record, tmp_path):
    found = [(tmp_path / name).read_bytes() for name in row['pictures']]
    assert found == list(files[row['id']])
    assert len({*row['pictures']}) <= 1  # written once
    # The number of its patches for people, all tokens for a program.
    assert row['prompt'] == '1(+ x 1)' and row['prompt_ids'][1] == image_token


def recorded(t, record, workdir):
  step_record.write(t, str(workdir), record)
  return step_record.read(str(workdir), step_record.newest(str(workdir)))


def test_every_number_is_that_of_its_group_and_of_its_update(tmp_path):
  t, record = held_step()
  rows = recorded(t, record, tmp_path)
  assert [row['id'] for row in rows] == [0, 1, 3, 4]  # seat 2 is empty
  assert {row['step'] for row in rows} == {8} and rows[0]['completed_step'] == 7
  assert [row['source'] for row in rows] == ['fresh', 'fresh', 'reused', 'fresh']
  assert [row['update'] for row in rows] == [1, 2, 2, 1]
  bounds = [(row['low'], row['high']) for row in rows[:2]]
  assert bounds == [(0.875, 1.125), (0.75, 1.25)]
  assert {row['prompt'] for row in rows} == {'1+'} and rows[0]['prompt_tokens'] == 2
  assert [row['answer'] for row in rows] == [f'answer {i}' for i in (0, 1, 3, 4)]
  # One right of two: mean 1/2, deviation 1/2, so +1 and -1; reused rows count half.
  advantages = [sorted(r['advantage'] for r in row['responses']) for row in rows]
  expected = [[-1, 1], [0, 0], [-0.5, 0.5], [0, 0]]
  np.testing.assert_allclose(advantages, expected, atol=1e-3)
  for row in rows:
    for g, r in enumerate(row['responses']):
      assert r['correct'] == r['reward'] == record.groups.reward_PG[row['id'], g]
      assert r['response'] == '345' and r['pieces'] == ['3', '4', '5', '<eos>']
      assert r['tokens'] == 4 and not r['truncated'] and r['version'] == [7, 7]
      first = (row['id'] * G + g) * T + 2
      expected = [-(first + i) / 64 for i in range(4)]
      np.testing.assert_allclose(r['sampler_logp'], expected, atol=2e-4)  # 4 digits
  # Group 3 has the first two rows of update 2, group 4 the last two of update 1.
  of_3, of_4 = (row['responses'] for row in rows[2:])
  assert [r['learner_logp'] for r in of_3] == [[-2.0] * 4, [-2.125] * 4]
  assert [r['learner_logp'] for r in of_4] == [[-1.25] * 4, [-1.375] * 4]
  assert of_3[0]['ratio'] == [1.125, 1.1875, 1.25, 1.3125]
  assert of_3[0]['cut'] == [0, 1, 2, 0]
  # Without an advantage nothing was computed.
  assert all(r[k] is None for r in rows[1]['responses'] for k in ('ratio', 'cut'))


def test_an_undecided_response_is_neither_right_nor_wrong(tmp_path):
  t, record = held_step()
  decided_PG = record.groups.decided_PG.at[0, 1].set(False)
  groups = record.groups._replace(
    decided_PG=decided_PG, teaches_PG=record.groups.teaches_PG & decided_PG
  )
  first, *others = recorded(t, record._replace(groups=groups), tmp_path)
  decided, undecided = first['responses']
  assert (undecided['correct'], undecided['reward']) == (None, None)
  # Alone in its group, the other one is compared with none.
  assert decided['advantage'] == undecided['advantage'] == 0
  assert not undecided['taught'] and not step_record.taught(first)
  assert all(r['correct'] is not None for row in others for r in row['responses'])


def test_advantages_that_differ_by_token_are_recorded_by_token(tmp_path):
  t, record = held_step()
  # Seat 3, reused: of two responses, the first ends a step of reward 1 after `4`, and
  # the second one of reward 0 after its end: +1 and -1, half of which counts.
  end_PGT = np.zeros((P, G, T), bool)
  end_PGT[3, 0, 3] = end_PGT[3, 1, 5] = True
  reward_PGT = jnp.float32(end_PGT & (np.arange(T) == 3))
  groups = record.groups._replace(
    step_end_PGT=jnp.asarray(end_PGT), step_reward_PGT=reward_PGT
  )
  rows = recorded(t, record._replace(groups=groups), tmp_path)
  first, second = rows[2]['responses']
  np.testing.assert_allclose(first['advantages'], [1, 1, 0.5, 0.5], atol=1e-3)
  assert first['advantage'] == pytest.approx(0.75, abs=1e-3)
  assert second['advantages'] is None
  assert second['advantage'] == pytest.approx(-1, abs=1e-3)
  assert [r['advantages'] for r in rows[0]['responses']] == [None, None]


def test_the_last_update_that_had_a_group_is_recorded(tmp_path):
  rows = recorded(*held_step(updates=((0, 4), (3, 1), (4, 0), (1, 3))), tmp_path)
  assert [row['update'] for row in rows] == [3, 4, 4, 3]
  assert rows[0]['responses'][0]['learner_logp'] == [-3.25] * 4


def test_what_is_missing_or_not_finite_is_null(tmp_path):
  t, record = held_step(updates=())
  logp_PGT = record.groups.behavior_logp_PGT.at[0, 0, 3].set(-jnp.inf)
  groups = record.groups._replace(behavior_logp_PGT=logp_PGT)
  rows = recorded(t, record._replace(groups=groups), tmp_path)
  assert {(row['update'], row['low'], row['high']) for row in rows} == {(None,) * 3}
  first = rows[0]['responses'][0]
  assert first['ratio'] is None and first['sampler_logp'][1] is None


def test_a_file_is_bounded_in_groups_and_in_tokens(tmp_path, monkeypatch):
  assert step_record.chosen(np.ones(40, bool), 4).tolist() == [0, 10, 20, 30]
  assert step_record.chosen(np.asarray([0, 1, 1, 0, 1], bool), 4).tolist() == [1, 2, 4]
  monkeypatch.setattr(step_record, 'MOST_GROUPS', 3)
  monkeypatch.setattr(step_record, 'MOST_TOKENS', 13)
  rows = recorded(*held_step(), tmp_path)
  # 8 tokens, then 4 that still fit and 4 that do not; then none is left.
  written = [[r['pieces'] is not None for r in row['responses']] for row in rows]
  assert written == [[True, True], [True, False]]
  assert rows[1]['responses'][1]['response'] == '345'


def test_the_newest_up_to_a_step_is_found_and_a_broken_file_named(tmp_path):
  (tmp_path / 'groups').mkdir()
  for step in (2, 10, 9):
    (tmp_path / 'groups' / f'{step}.jsonl').write_text('{"a": 1}\n')
  (tmp_path / 'groups' / '11.jsonl.tmp').write_text('')
  found = [step_record.newest(str(tmp_path), until) for until in (math.inf, 9, 1)]
  assert found == [10, 9, None]
  for step in (10, 3):  # no groups, no file
    with pytest.raises(ValueError, match=rf'{step}\.jsonl'):
      step_record.read(str(tmp_path), step)
