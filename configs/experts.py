r"""A policy with experts, and the routes that its sampler took.

  .venv/bin/python -m bapo_jax.main --config=configs/experts.py --workdir=runs/experts
  .venv/bin/python -m bapo_jax.main --config=configs/experts.py:live --workdir=runs/live
  .venv/bin/python -m lab.sweep configs/experts.py:replay --results=runs/replay

The policy has 8 experts in every layer, of which a token uses 2, and as many active
parameters as the policy of configs/aime.py. The first command trains it with the
experts that the sampler used (`moe/agree`: how often the learner's routers would use
the same), the second with those of the learner's routers; the third trains both for
seeds 0 to 2 and prints a table. docs/system/experts.md has the figures.
"""

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults

if TYPE_CHECKING:
  from lab.experiments import Experiment

ARMS = {
  'replay': {'model.replay_routes': 'on'},
  'live': {'model.replay_routes': 'measure'},
}
NAMES = ('replay',)  # experiments
VARIANTS = tuple(ARMS)


def get_config(arg: str = 'replay') -> ConfigDict:
  """Returns the config of an arm: with the sampler's routes, or the learner's."""
  config = base()
  config.title += f': {arg}'
  config.update_from_flattened_dict(ARMS[arg])
  return config


def get_experiment(name: str) -> 'Experiment':
  """Returns the experiment `replay`: both arms with three seeds.

  Raises:
    KeyError: the name is not `replay`.
  """
  from lab.experiments import Experiment  # a training run does without lab

  return {'replay': Experiment(base().to_dict(), ARMS, (0, 1, 2))}[name]


def base() -> ConfigDict:
  """Returns the knobs that both arms share."""
  config = defaults()
  config.title = 'trial, experts'
  config.sft.update(experts=8, active=2, ffn=96)
  config.metrics.tensorboard = False
  return config
