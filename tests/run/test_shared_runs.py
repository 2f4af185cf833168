"""Whole runs whose responses share prompts: the updates of rows by themselves."""

import pytest
import runs
from pictured import DRAWN
from runs import PARTIAL, ROUTED, TALK
from test_many_processes import RULES, assert_equal_runs

CASES = {
  'turns': TALK | {'sampler.stop': ('5', '66'), 'loss.imitation': 0.1},
  'reused': RULES | PARTIAL | {'learner.minibatches': 1},
  'given': ROUTED | {'rollout.given': 1, 'loss.imitation': 0.1},
  'scored': {
    'loss.rule': 'decoupled',
    'loss.reference': 0.1,
    'learner.recompute_logprobs': 'on',
    'learner.grad_accum_steps': 3,
  },
  'pictures': DRAWN,
}


@pytest.mark.nightly
@pytest.mark.parametrize('name', CASES)
def test_shared_prompts_change_no_update(name, tmp_path):
  for rows in (1, 4):
    knobs = {'steps': 3, 'checkpoint.keep': 99, 'learner.share_prompts': rows}
    config = runs.tiny(**runs.BRIEF | knobs | CASES[name])
    assert runs.train(config, tmp_path / str(rows)) == 0
  assert_equal_runs(tmp_path / '1', tmp_path / '4')
