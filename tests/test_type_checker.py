"""The type checker finds a wrong keyword at every joint of the wiring."""

import pathlib
import re
import subprocess
import sys

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
  now: Prompts, weigh: Weigh, v: Verification
) -> None:
""".strip()
ROLLOUT = 'rollout(p, s.params, now, x, verification=v, step=3, policy_version=3)'
RIGHT = (
  't.rules.clip(ratio_BT=x, batch=batch, weigh=weigh)',
  't.rules.advantage(reward_PG=x)',
  't.train_step(params=s.params, opt=s.opt, batch=batch)',
  's.replace(step=1)',
  ROLLOUT,
)
WRONG = (
  't.rules.clip(ratios_BT=x, batch=batch, weigh=weigh)',
  't.rules.advantage(rewards_PG=x)',
  't.rules.batch(groups, groups, s.buffer, 0, x, seat=3)',
  't.train_step(s.params, s.opt, batches=batch)',
  ROLLOUT.replace('step=3', 'stp=3', 1),
  'learner.update(s.params, s.opt, groups, x, x, epoch=1)',
  'batch.mask_BT',
)


def test_wrong_keywords_are_errors_and_right_ones_are_none(tmp_path):
  path = tmp_path / 'snippet.py'
  path.write_text('\n  '.join([HEAD, *RIGHT, *WRONG, '']))
  command = [sys.executable, '-m', 'pyrefly', 'check', '--config', 'pyproject.toml']
  done = subprocess.run(
    [*command, '--search-path', str(ROOT), '--output-format=min-text', str(path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  lines = {int(n) for n in re.findall(r'snippet\.py:(\d+)', done.stdout)}
  found = {path.read_text().splitlines()[n - 1].strip() for n in lines}
  assert found == set(WRONG), done.stdout + done.stderr
