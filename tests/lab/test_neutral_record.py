"""Records of other trainers: what is read from a file, what is refused, and TRL's."""

import json
import pathlib
import types

import numpy as np
import pytest
from recordings import by, neutral

from bapo_jax.run import step_record
from lab import counterfactual, neutral_record
from notebooks import make

ROOT = pathlib.Path(__file__).parents[2]
RUN, TRL = ROOT / 'notebooks' / '5_run', ROOT / 'notebooks' / '9_trl.jsonl'
GRPO = {'clip.rule': 'fixed'}
ONE_OF_FOUR = pytest.approx(np.asarray([3, -1, -1, -1]) / 3**0.5, abs=1e-3)


def written(tmp_path, *rows):
  """The file of these lines, as a program without our code would write it."""
  path = tmp_path / 'batch.jsonl'
  path.write_text(''.join(json.dumps(x, ensure_ascii=False) + '\n' for x in rows))
  return path


def test_lines_become_rows_with_advantages_of_their_groups(tmp_path):
  path = written(
    tmp_path,
    neutral('a', 1.0, [1.0, 1.5], pieces=['x', '\u2028']),
    neutral(7, 0.0, [1.0]),
    neutral('a', 0.0, [0.7, 1.0, 1.8]),
    neutral(7, 0.0, [2.0]),
  )
  found = counterfactual.read(path)
  # The group 7 has equal rewards, so nothing of it is moved.
  assert found.reward_PG.tolist() == [[1, 0], [0, 0]]
  assert found.row_B.tolist() == [0, 1] and found.step == 0
  assert found.loss_mask_BT.tolist() == [[1, 1, 0], [1, 1, 1]]
  assert found.pieces == [['x', '\u2028'], ['<0>', '<1>', '<2>']] and found.ids is None
  one = by(found, GRPO)
  assert one.adv_BT[:, 0] == pytest.approx([1, -1], abs=1e-3)


def test_a_masked_token_counts_nowhere_and_stays_in_the_text(tmp_path):
  noisy = neutral('a', 1.0, [1.0, 1.0, 1.5, 1.0], mask=[1, 0, 1, 0], pieces=[*'abcd'])
  noisy['logp'][1] = noisy['behavior_logp'][3] = None  # what a trainer has there
  path = written(tmp_path, noisy, neutral('a', 0.0, [1.0]), neutral('a', 0.0, []))
  found = counterfactual.read(path)
  assert found.reward_PG.tolist() == [[1, 0, 0]]  # the empty response has a reward
  assert found.loss_mask_BT.tolist() == [[1, 0, 1], [1, 0, 0]]
  assert found.pieces[0] == ['a', 'b', 'c']
  assert found.logp_BT[0, 1] == found.behavior_logp_BT[0, 1] == 0
  grpo = by(found, GRPO)
  # Advantages of 1, 0, 0: 2 and -1 over the root of 2; three tokens.
  assert grpo.weight_BT[0] == pytest.approx([2**0.5 / 3, 0, 0], abs=1e-4)


@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    ({'reward': float('nan')}, r'line 2: reward is nan; write a number of at most'),
    ({'logp': [-1.0]}, r'logp has 1 values for 2 tokens; write a list'),
    ({'logp': [-1.0, float('-inf')]}, r'logp\[1\] is -inf; write the log-probability'),
    ({'group': 'b'}, 'no recorded response has an advantage'),
    ({'masks': [1, 1]}, r'missing or unknown: masks; the fields are group'),
  ],
)
def test_a_wrong_line_is_refused_with_its_number_and_cure(tmp_path, changed, said):
  path = written(
    tmp_path, neutral('a', 1.0, [1.0]), neutral('a', 0.0, [1.0, 1.0]) | changed
  )
  with pytest.raises(ValueError, match=said):
    counterfactual.read(path)


def test_padded_rows_are_written_up_to_their_last_token_in_the_loss(tmp_path):
  path = tmp_path / 'batch.jsonl'
  logp = np.asarray([[-1.23456789, -2.0, np.nan], [-0.5, -0.5, -0.5]])
  given = {
    'group': np.asarray([[5, 6], [5, 6]]),
    'reward': np.asarray([1.0, 0.0]),
    'tokens': np.asarray([[3, 4, 0], [3, 4, 9]]),
    'behavior_logp': [*logp],  # a list of arrays
    'logp': logp,
    'mask': np.asarray([[1, 1, 0], [1, 1, 1]], bool),
  }
  neutral_record.append(path, **given, update=2)
  first, second = map(json.loads, path.read_text().splitlines())
  both = {'group': [5, 6], 'update': 2}
  numbers = {name: [-1.234568, -2.0] for name in ('behavior_logp', 'logp')}
  assert first == both | numbers | {'reward': 1.0, 'tokens': [3, 4], 'mask': [1, 1]}
  assert second['tokens'] == [3, 4, 9]
  size = path.stat().st_size
  with pytest.raises(ValueError, match=r'response 0: behavior_logp\[2\] is nan'):
    neutral_record.append(path, **given | {'mask': None})
  assert path.stat().st_size == size


def test_the_largest_rewards_have_the_advantages_of_small_ones(tmp_path):
  # One of four is right: 3 and -1 over the root of 3, whatever the unit.
  for unit in (1.0, neutral_record.LARGEST):
    rewards = (unit, 0.0, 0.0, 0.0)
    path = written(tmp_path, *(neutral('a', reward, [1.0]) for reward in rewards))
    found = counterfactual.read(path)
    one = by(found, GRPO)
    assert one.adv_BT[:, 0] == ONE_OF_FOUR


def test_the_record_of_a_run_and_its_neutral_file_are_the_same_batch(tmp_path):
  workdir = counterfactual.read(RUN)
  path = tmp_path / 'batch.jsonl'
  groups = step_record.read(str(RUN), workdir.step)
  neutral_record.append(path, **make.columns(groups))
  found = counterfactual.read(path)
  for name in workdir._fields:
    if name.endswith(('_B', '_BT', '_PG')):
      same = getattr(found, name) == getattr(workdir, name)
      assert same.all(), name
  assert found.pieces == workdir.pieces
  assert set(workdir.update_B.tolist()) == {3, 4, 6, 9, 11, 12, 16}


# ------------------------------------------------------------------ other trainers


def test_what_trl_wrote_is_cut_as_trl_cut_it():
  found = counterfactual.read(TRL)
  assert found.reward_PG.shape == (4, 4) and len(found.row_B) == 16
  one = by(found, GRPO)
  # One of four is right in the first group, so the advantages are 3 and -1 over the
  # root of 3. (TRL divides by the unbiased deviation and kept 1.4997 and -.4999.)
  assert one.adv_BT[:4, 0] == ONE_OF_FOUR
  # What notebooks.make printed: TRL's clip_ratio of the updates 3 and 4.
  printed = {
    3: (0.2075471729040146, 0.5094339847564697),
    4: (0.1071428582072258, 0.3452380895614624),
  }
  for update, (low, high) in printed.items():
    rows = np.flatnonzero(found.update_B == update)
    tokens = found.loss_mask_BT[rows].sum()
    negative = one.adv_BT[rows] < 0
    cut_BT = one.cut_BT[rows] > 0
    assert (cut_BT & negative).sum() / tokens == pytest.approx(low)
    assert (cut_BT & ~negative).sum() / tokens == pytest.approx(high)


ROWS = {  # two responses to one prompt, of three and two tokens
  'ids': np.asarray([[4, 5, 6], [7, 8, 0]]),
  'mask': np.asarray([[1, 1, 1], [1, 1, 0]]),
  'old': np.asarray([[-1.0, -1.0, -1.0], [-1.0, -2.0, 0.0]]),
  'new': np.asarray([[-0.5, -1.5, -1.0], [-2.0, -1.0, 0.0]]),
}
PROMPT = np.asarray([[1, 2], [1, 2]])


class Trainer:
  """Stands for the trainer of verl, whose methods the lines call."""

  global_steps = 5

  def _update_actor(self, batch):
    return 'output'

  def _compute_old_log_prob(self, batch):
    return types.SimpleNamespace(batch={'old_log_probs': ROWS['new']}), 0.5


def verl_writes(names):
  names['RayPPOTrainer'] = Trainer
  exec(make.documented('verl'), names)
  batch = {
    'responses': ROWS['ids'],
    'response_mask': ROWS['mask'],
    'old_log_probs': np.full((2, 3), -9.0),
    'rollout_log_probs': ROWS['old'],
    'token_level_scores': np.asarray([[0, 0, 1.0], [0, -1.0, 0]]),
  }
  uid = {'uid': np.asarray(['u', 'u'], object)}
  data = types.SimpleNamespace(batch=batch, non_tensor_batch=uid)
  assert names['Recorded']()._update_actor(data) == 'output'
  return 'batch-5.jsonl'


def openrlhf_writes(names):
  names['experience'] = types.SimpleNamespace(
    prompts=['p', 'p'],
    rewards=np.asarray([1.0, -1.0]),
    action_mask=np.concatenate([0 * PROMPT[:, 1:], ROWS['mask']], 1),
    sequences=np.concatenate([PROMPT, ROWS['ids']], 1),
    action_log_probs=None,
    rollout_log_probs=np.pad(ROWS['old'], ((0, 0), (1, 0))),
  )
  names['action_log_probs'] = np.pad(ROWS['new'], ((0, 0), (1, 0)))
  exec(make.documented('OpenRLHF'), names)
  return 'batch-3.jsonl'


# The lines of TRL have run: their file is TRL.
@pytest.mark.parametrize('write', [verl_writes, openrlhf_writes])
def test_the_documented_lines_write_the_batch(write, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  torch = types.SimpleNamespace(
    cat=np.concatenate,
    distributed=types.SimpleNamespace(get_rank=lambda: 3),
  )
  name = write({'torch': torch, 'neutral_record': neutral_record})
  found = counterfactual.read(tmp_path / name)
  assert found.reward_PG.tolist() == [[1, -1]]
  assert found.update_B.tolist() == [0, 0]
  logp_BT, old_BT = (
    x[found.loss_mask_BT] for x in (found.logp_BT, found.behavior_logp_BT)
  )
  assert logp_BT.tolist() == [-0.5, -1.5, -1.0, -2.0, -1.0]
  assert old_BT.tolist() == [-1.0, -1.0, -1.0, -1.0, -2.0]
