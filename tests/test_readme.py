"""The README says what is the case."""

import inspect
import pathlib
import re
import subprocess

from bapo_jax.algorithms import advantage, batch_rules, clip, loss
from bapo_jax.training import trainer

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def test_the_loop_is_the_loop():
  assert inspect.getsource(trainer.train_loop).rstrip() in README


def test_every_file_has_its_line():
  tracked = subprocess.run(
    ['git', 'ls-files', 'bapo_jax', 'configs', 'launch'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  ).stdout.split()
  listed = re.findall(r'^\| `([^`]+)` \|', README, re.M)
  listed = [name for name in listed if '/' in name and '<' not in name]
  listed = [name for name in listed if not name.endswith('/')]
  wanted = [name for name in tracked if not name.endswith('__init__.py')]
  assert sorted(listed) == sorted(wanted)


def test_every_rule_is_named():
  for rules in (batch_rules.RULES, clip.RULES, advantage.RULES, loss.RULES):
    for name in rules:
      assert f'`{name}`' in README, name


def test_two_commands_each_one_line():
  commands = re.findall(r'^python3 -m venv \.venv && .*$', README, re.M)
  assert len(commands) == 2
  assert commands[0].endswith('-m bapo_jax.main --config=configs/aime.py')
  assert commands[1].endswith('-m pytest')
