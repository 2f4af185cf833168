"""The README is short and true: its loop is the code, its commands are those of CI."""

import inspect
import pathlib
import re

from bapo_jax.training import trainer

README = (pathlib.Path(__file__).parents[1] / 'README.md').read_text()


def test_the_loop_is_the_loop():
  assert inspect.getsource(trainer.train_loop).rstrip() in README


def test_two_commands_each_one_line():
  commands = re.findall(r'^python3 -m venv \.venv && .*$', README, re.M)
  assert len(commands) == 2
  assert commands[0].endswith('-m bapo_jax.main --config=configs/aime.py')
  assert commands[1].endswith('-m pytest')


def test_it_is_read_in_ten_minutes():
  assert len(README.splitlines()) <= 150
