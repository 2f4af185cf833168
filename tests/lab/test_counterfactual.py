"""Other rules on recorded tokens: by hand, and compared with a run."""

import json
import math
import pathlib

import numpy as np
import pytest

from bapo_jax.run import step_record
from bapo_jax.training.config import Config, plain
from lab import counterfactual

RUNS = pathlib.Path(__file__).parents[2] / 'notebooks' / '4_runs'
GRPO = {'clip.rule': 'fixed'}
WIDE = {'clip.rule': 'fixed', 'clip.fixed.high': 2.0, 'clip.fixed.low': 0.5}
BALANCED = {'clip.rule': 'balanced', 'clip.balanced.target': 0.4}


def response(reward, ratios, **changed):
  """A recorded response, whose tokens had the probability 1/2 when sampled."""
  old = [math.log(0.5)] * len(ratios)
  return {
    'reward': reward,
    'taught': True,
    'sampler_logp': old,
    'learner_logp': [o + math.log(r) for o, r in zip(old, ratios, strict=True)],
    'pieces': [*'abcdefgh'[: len(ratios)]],
  } | changed


def recorded(tmp_path, *responses, **fields):
  """The record of one group."""
  (tmp_path / 'groups').mkdir()
  (tmp_path / 'config.json').write_text(json.dumps(plain(Config())))
  group = {'source': 'fresh', 'prompt': '1+1\n', 'responses': responses} | fields
  (tmp_path / 'groups' / '7.jsonl').write_text(json.dumps(group) + '\n')
  return counterfactual.read(str(tmp_path))


def test_bounds_cut_what_they_say_and_leave_ratio_times_advantage(tmp_path):
  found = recorded(
    tmp_path, response(1.0, [1.0, 1.5, 2.5]), response(0.0, [0.7, 0.4, 1.0, 3.0])
  )
  assert found.step == 7 and found.logp_BT.shape == (2, 4)
  grpo = counterfactual.apply(found, counterfactual.config_of(found, GRPO))
  # Advantages +1 and -1, seven tokens; above 1.2 and below .8 nothing is moved.
  assert grpo.adv_B == pytest.approx([1, -1], abs=1e-4)
  expected = np.asarray([[1.0, 0, 0, 0], [0, 0, -1, -3]]) / 7
  assert grpo.weight_BT == pytest.approx(expected, abs=1e-4)
  assert grpo.cut_BT.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
  numbers = counterfactual.summary(found, grpo)
  assert numbers['share'] == pytest.approx(1 / 5, abs=1e-4)
  assert numbers['cut_positive'] == pytest.approx(2 / 3)
  assert numbers['cut_negative'] == 2 / 4


def test_the_tokens_that_one_rule_frees_are_named_far_ones_first(tmp_path):
  found = recorded(
    tmp_path, response(1.0, [1.0, 1.3, 1.9, 2.5]), response(0.0, [0.7, 0.4, 1.0])
  )
  grpo, wide = (
    counterfactual.apply(found, counterfactual.config_of(found, knobs))
    for knobs in (GRPO, WIDE)
  )
  freed = list(counterfactual.moved_by(found, wide, grpo))
  assert [(t.before, t.text) for t in freed] == [('ab', 'c'), ('', 'a'), ('a', 'b')]
  assert [round(t.ratio, 2) for t in freed] == [1.9, 0.7, 1.3]
  assert [round(t.advantage) for t in freed] == [1, -1, 1]
  assert freed[0].probability == pytest.approx(0.5)
  assert not list(counterfactual.moved_by(found, grpo, wide))


def test_the_search_sees_all_rows_and_staleness_scales_log_ratios(tmp_path):
  found = recorded(
    tmp_path, response(1.0, [1.0, 1.5]), response(0.0, [1.0, 0.7, 1.0, 1.0])
  )
  config = counterfactual.config_of(found, BALANCED)
  # P = 1, and 2.5 above 1.5; N = 3.7 at .6: shares .21 and .40.
  bounds = counterfactual.apply(found, config).bounds
  assert float(bounds.high) == pytest.approx(1.55)
  assert float(bounds.low) == pytest.approx(0.6)
  fresh = counterfactual.apply(counterfactual.staler(found, 0.0), config)
  assert fresh.ratio_BT == pytest.approx(np.ones((2, 4)))
  twice = counterfactual.apply(counterfactual.staler(found, 2.0), config)
  assert twice.ratio_BT[0, 1] == pytest.approx(2.25)


def test_rows_that_were_not_computed_are_left_out(tmp_path):
  idle = response(0.0, [1.0], learner_logp=None)
  masked = response(0.0, [1.0], taught=False)
  found = recorded(tmp_path, idle, response(1.0, [1.0, 1.1]), masked)
  assert found.row_B.tolist() == [1] and found.reward_PG.tolist() == [[0, 1, 0]]
  with pytest.raises(ValueError, match='no recorded response'):
    (tmp_path / 'groups' / '7.jsonl').unlink()
    (tmp_path / 'groups').rmdir()
    recorded(tmp_path, idle)


@pytest.mark.parametrize(
  ('fields', 'ids'),
  [
    ({'prompt_ids': [7]}, [([7], [8, 9])]),
    ({'prompt_ids': [7], 'pictures': ['a.png']}, None),
    ({}, None),
  ],
)
def test_token_ids_are_read_from_new_records_of_texts(tmp_path, fields, ids):
  one = response(1.0, [1.0, 1.1], ids=[8, 9])
  assert recorded(tmp_path, one, **fields).ids == ids


@pytest.mark.parametrize('run', ['grpo', 'both'])
def test_the_rules_of_the_run_cut_what_the_run_cut(run):
  workdir = str(RUNS / run)
  found = counterfactual.read(workdir)
  groups = step_record.read(workdir, found.step)
  rows = [r for g in groups for r in g['responses'] if r['learner_logp']]
  ratios = np.concatenate([r['ratio'] for r in rows])
  cuts = np.concatenate([r['cut'] for r in rows]).astype(bool)
  lows = np.concatenate(
    [[g['low']] * len(r['cut']) for g in groups for r in g['responses'] if r['cut']]
  )
  own = counterfactual.apply(found, found.config)
  mask_BT = found.loss_mask_BT
  # Four decimals are recorded of log-probabilities and ratios.
  assert own.ratio_BT[mask_BT] == pytest.approx(ratios, rel=3e-4, abs=1e-4)
  if run == 'grpo':  # with a search every update had bounds of its own
    assert (own.cut_BT[mask_BT] == cuts).all() and set(lows) == {0.8}


@pytest.mark.parametrize(
  'knobs',
  [
    {'clip.rule': 'recipe', 'loss.clipped.limit': 20.0},
    {**GRPO, 'loss.rule': 'sequence', 'loss.aggregate': 'sequence'},
    {**GRPO, 'loss.rule': 'cispo'},
    {**GRPO, 'loss.rule': 'decoupled'},
    {'clip.rule': 'unclipped', 'loss.rule': 'tis'},
    {**GRPO, 'advantage.rule': 'leave_one_out'},
  ],
)
def test_every_rule_applies(knobs):
  found = counterfactual.read(str(RUNS / 'grpo'))
  config = counterfactual.config_of(found, knobs)
  applied = counterfactual.apply(found, config)
  assert 0 < counterfactual.summary(found, applied)['share'] < 1
  with pytest.raises(ValueError, match=r"loss\.rule='ppo'"):
    counterfactual.config_of(found, {'loss.rule': 'ppo'})
