"""A published method is chosen by its name, in place of a variant of a config file."""

import re

import pytest
from refusals import refusal

from bapo_jax.algorithms.clip import Fixed
from bapo_jax.training.config import load, parse


@pytest.fixture
def config_file(tmp_path):
  """Writes a config file whose get_config has this body; returns its path."""

  def write(body):
    path = tmp_path / 'mine.py'
    path.write_text(f"""
from ml_collections import ConfigDict
from bapo_jax.training.config import defaults


def get_config():
  config = defaults()
{body}
  return config
""")
    return path

  return write


def test_a_method_has_its_own_values_and_the_others_of_the_file(config_file):
  path = config_file("""
  config.seed = 7
  config.clip.update(rule='fixed', high=1.5)
  config.loss.update(rule='decoupled', cap=9.0, kl=0.5)
""")
  config = parse(load(f'{path}:grpo'))
  assert config.clip == Fixed(low=0.8, high=1.2)
  assert (config.seed, config.loss.cap, config.loss.kl) == (7, 9.0, 0.5)
  # The penalty is a knob of every loss rule.
  config = parse(load(f'{path}:tis'))
  assert (config.clip.rule, config.loss.cap, config.loss.kl) == ('unclipped', 2.0, 0.5)
  few = config_file("  config = ConfigDict({'seed': 3})")
  assert parse(load(f'{few}:icepop')).mask.rule == 'icepop'


@pytest.mark.parametrize(
  ('knob', 'value', 'answer'),
  [
    ('clip.rule', 'grpo', r'PPO, GRPO is clip\.rule=fixed, or --config=FILE:grpo;'),
    (
      'loss.rule',
      'gspo',
      r'GSPO is loss\.rule=sequence, .*FILE:gspo; give one',
    ),
    ('loss.rule', 'bnpo', r"'bnpo': bnpo is loss\.aggregate=token, .*; give one of"),
  ],
)
def test_a_method_in_place_of_a_rule_is_answered_with_its_knobs(knob, value, answer):
  assert re.search(answer, refusal(**{knob: value}))
