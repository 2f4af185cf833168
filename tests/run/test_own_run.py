"""Whole runs, tiny, with a user's own functions in every slot."""

import json
import pathlib
import shutil

import numpy as np
import processes
import pytest
import runs
from runs import copied, last_run, tiny

import bapo_jax
from bapo_jax.run import step_record
from bapo_jax.runtime import metrics
from lab import counterfactual

HERE = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def my(tmp_path_factory):
  """A user's file, in a folder of its own."""
  path = tmp_path_factory.mktemp('mine') / 'my.py'
  shutil.copy(HERE / 'my_functions.py', path)
  return path


def knobs(my):
  """Own functions in every slot, with knobs."""
  return {
    'rewards.rule': f'{my}:score,{my}:brief',
    'rewards.weights': (1.0, 0.5),
    'rewards.custom.per_token': 0.01,
    'loss.rule': f'{my}:sapo',
    'loss.tau': 1.5,
    'clip.rule': f'{my}:dppo_tv',
    'clip.low': 0.002,
    'clip.high': 0.002,
    'advantage.rule': f'{my}:signs',
    'batch.rule': f'{my}:all_fresh',
    'rewards.shaping.rule': f'{my}:half_for_truncated',
  }


@pytest.fixture(scope='module')
def whole(warm_start, my, tmp_path_factory):
  """The workdir of a run to the end."""
  workdir = copied(warm_start, tmp_path_factory.mktemp('own') / 'whole')
  assert runs.train(tiny(**knobs(my)), workdir) == 0
  return workdir


def test_every_own_function_has_an_effect(whole):
  rows = [row for row in metrics.read(str(whole)) if row['step']]
  assert all('reward/score' in row and 'reward/length' in row for row in rows)
  assert max(row['reward/brief'] for row in rows) > 0
  assert max(row['clip/masked'] for row in rows) > 0
  # Half of the reward of a truncated response is gone.
  sums = [row['reward/score'] + 0.5 * row['reward/brief'] for row in rows]
  pairs = zip(rows, sums, strict=True)
  assert any(abs(row['rollout/reward'] - x) > 1e-6 for row, x in pairs)


def test_an_evaluation_reports_graded_rewards(whole):
  written = json.loads((whole / 'eval' / '4.json').read_text())
  (row,) = [row for row in metrics.read(str(whole)) if row['step'] == 4]
  samples = written['samples']
  for name in ('score', 'brief', 'right', 'length'):
    mean = np.mean([sample['parts'][name] for sample in samples])
    assert row[f'eval/reward/{name}'] == pytest.approx(mean)
    assert row[f'eval/reward/{name}_stderr'] >= 0
  mean = np.mean([sample['reward'] for sample in samples])
  assert row['eval/reward'] == pytest.approx(mean) != row['eval/accuracy']
  # The weights of the two functions are 1 and 0.5.
  parts = row['eval/reward/score'] + 0.5 * row['eval/reward/brief']
  assert mean == pytest.approx(parts) and row['eval/reward_stderr'] > 0
  page = (whole / 'report.html').read_text()
  assert '>reward/brief</td>' in page
  assert f', reward {samples[0]["reward"]:.3g}</p>' in page


def test_a_changed_file_is_refused(whole, my, tmp_path):
  workdir, text = copied(whole, tmp_path / 'changed'), my.read_text()
  my.write_text(f'{text}\n# another\n')
  try:
    with pytest.raises(ValueError, match=r'another config \(code: .*my\.py'):
      runs.train(tiny(**knobs(my), steps=5), workdir)
  finally:
    my.write_text(text)


def test_two_processes_make_the_same_run(whole, warm_start, my, tmp_path):
  two = copied(warm_start, tmp_path / 'two')
  given = {name: str(value).replace(' ', '') for name, value in knobs(my).items()}
  processes.trained(two, 2, **given)
  a, b = last_run(whole), last_run(two)
  assert a.scalars == b.scalars
  for name in ('rollout/reward', 'reward/score', 'reward/brief', 'rollout/accuracy'):
    assert float(a.rows[1][name]) == pytest.approx(float(b.rows[1][name]), abs=1e-6)


def test_the_lab_applies_own_rules_to_a_recorded_step(whole, my):
  found = counterfactual.read(str(whole))
  own = counterfactual.apply(found, found.config)
  plain = {'clip.rule': 'unclipped'}
  without = counterfactual.apply(found, counterfactual.config_of(found, plain))
  masked = np.asarray(~own.bounds.keep_BT) & found.loss_mask_BT
  assert masked.any() and (own.cut_BT[masked & (own.adv_B != 0)[:, None]] == 2).all()
  assert counterfactual.summary(found, own)['masked'] > 0
  # The run recorded the same reason; the lab has one mask for all updates of the step.
  groups = step_record.read(str(whole), found.step)
  cuts = [cut for g in groups for r in g['responses'] for cut in r['cut'] or ()]
  assert set(cuts) == {0, 2}
  kept = ~masked & found.loss_mask_BT
  np.testing.assert_array_equal(own.weight_BT[kept], without.weight_BT[kept])
  assert (without.weight_BT[masked & (own.adv_B != 0)[:, None]] != 0).all()
  by_token = {'clip.rule': f'{my}:by_token', 'loss.rule': 'clipped'}
  wide = counterfactual.apply(found, counterfactual.config_of(found, by_token))
  assert counterfactual.summary(found, wide)['high'] > 1.2


def test_the_mask_of_a_clip_rule_is_the_built_in_mask_rule(whole, my):
  found = counterfactual.read(str(whole))
  same_region = {'loss.rule': 'tis', 'loss.cap': 20.0}
  builtin = {'clip.rule': 'unclipped', 'mask.rule': 'dppo_tv'}
  builtin |= {'mask.low': 0.002, 'mask.high': 0.002}
  builtin |= {'loss.rule': 'tis', 'loss.cap': 20.0}
  a, b = (
    counterfactual.apply(found, counterfactual.config_of(found, k)).weight_BT
    for k in (same_region, builtin)
  )
  # A region is open or closed where a token sits on its edge: rounding decides.
  np.testing.assert_array_equal(a == 0, b == 0)
  np.testing.assert_allclose(a, b, rtol=1e-6)


def test_python_trains_with_functions_and_rows_of_its_own(warm_start, tmp_path, capsys):
  def close(sample, *, scale: float = 10.0):
    if sample.row['next'] % 3 == 0:  # some rows of either set
      raise RuntimeError('no threes')
    digits = ''.join(c for c in sample.response if c.isdigit()) or '0'
    return max(0.0, 1 - abs(int(digits[:4]) - sample.row['next']) / scale)

  rows = [{'problem': f'{i}+1=', 'next': i + 1} for i in range(30)]
  values = runs.plain(**runs.TINY, **{'problems.overlap': 'keep'})
  workdir = copied(warm_start, tmp_path / 'python')
  with runs.one_device():
    given = {'steps': 1, 'rewards.custom.scale': 20.0}
    status = bapo_jax.train(values, str(workdir), knobs=given, reward=close, rows=rows)
  assert status == 0
  (row,) = [row for row in metrics.read(str(workdir)) if row['step'] == 1]
  assert 0 < row['rollout/reward'] < 1
  assert 0 < row['rollout/undecided'] < 1
  decided = row['reward/close'] * (1 - row['rollout/undecided'])
  assert decided == pytest.approx(row['rollout/reward'])
  reason = 'the most frequent reason: python:close raises RuntimeError: no threes'
  assert f'and count as wrong; {reason}' in capsys.readouterr().out


def test_a_reward_that_fails_at_once_is_refused_before_compiling(my, tmp_path):
  my.with_name('late.py').write_text('def score(sample): return sample.row["none"]')
  place = f'{my.with_name("late.py")}:score'
  with pytest.raises(
    ValueError, match=r"fails on a trial.*KeyError: 'none' \(late\.py, line 1\)"
  ):
    runs.train(tiny(**{'rewards.rule': place}), tmp_path / 'late')
