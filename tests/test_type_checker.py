"""The type checker finds a wrong keyword at every joint of the wiring."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEAD = """
from jax import Array
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Verification, rollout
from bapo_jax.learner import learner
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import Batch, Groups, Prompts, Weigh

def f(
  t: Trainer, s: TrainState, p: PartialRollouts, batch: Batch, groups: Groups, x: Array,
  now: Prompts, weigh: Weigh
) -> None:
"""
RIGHT = """
  t.rules.clip(ratio_BT=x, batch=batch, weigh=weigh)
  t.rules.advantage(reward_PG=x)
  t.train_step(params=s.params, opt=s.opt, batch=batch)
  s.replace(step=1)
"""
ROLLOUT = (
  'rollout(p, s.params, now, x, verification=Verification(t.problems, t.tokenizer, '
  't.verifier, t.timer), step=3, policy_version=3)'
)
WRONG = {
  'clip rule': 't.rules.clip(ratios_BT=x, batch=batch, weigh=weigh)',
  'advantage rule': 't.rules.advantage(rewards_PG=x)',
  'batch rule': 't.rules.batch(groups, groups, s.buffer, 0, x, seat=3)',
  'train step': 't.train_step(s.params, s.opt, batches=batch)',
  'rollout': ROLLOUT.replace('step=', 'stp='),
  'update': 'learner.update(s.params, s.opt, groups, x, x, epoch=1)',
  'field': 'batch.mask_BT',
}


RIGHT += f'  {ROLLOUT}\n'


def check(tmp_path, body: str) -> subprocess.CompletedProcess:
  path = tmp_path / 'snippet.py'
  path.write_text(f'{HEAD}  {body.strip()}\n')
  command = [sys.executable, '-m', 'pyrefly', 'check', '--config', 'pyproject.toml']
  return subprocess.run(
    [*command, '--search-path', str(ROOT), str(path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_the_right_keywords_pass(tmp_path):
  done = check(tmp_path, RIGHT)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('where', WRONG)
def test_a_wrong_keyword_is_an_error(where, tmp_path):
  done = check(tmp_path, WRONG[where])
  assert done.returncode == 1 and 'ERROR' in done.stdout, done.stdout
