"""A config of your own: the small policy with a graded reward, RLOO and 40 steps.

  .venv/bin/python -m bapo_jax.main --config=examples/own_config.py --workdir=runs/own

Every knob that is not set here has its default (docs/reference/config.md), and the
command line may override each of them.
"""

import os

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults

HERE = os.path.dirname(os.path.abspath(__file__))


def get_config() -> ConfigDict:
  """Returns the config."""
  config = defaults()
  config.title = 'a rubric, RLOO'
  config.steps = 40
  config.rewards.rule = os.path.join(HERE, 'rubric.py:score')
  config.rewards.right_from = 0.8  # the answer alone
  config.advantage.rule = 'leave_one_out'
  config.clip.update(target=0.45)
  return config
