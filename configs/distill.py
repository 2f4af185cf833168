r"""On-policy distillation: the embedded policy learns from a larger one.

  .venv/bin/python -m bapo_jax.main --config=configs/distill.py:teacher \
    --workdir=runs/teacher
  .venv/bin/python -m bapo_jax export --workdir=runs/teacher --to=runs/teacher/weights
  .venv/bin/python -m bapo_jax.main --config=configs/distill.py --workdir=runs/distilled
  .venv/bin/python -m lab.sweep configs/distill.py:distill --results=runs/distill

The first command trains the teacher by GRPO, four times as wide in weights as the
policy; the second exports its weights, and the third trains the policy: log p(teacher)
- log mu is the advantage of a token, and no verdict enters. The last compares three
arms for seeds 0 to 2: `distilled`, `both` (the teacher and the reward), and `reward`
(GRPO alone). It needs the exported weights. log/ has the minutes on two CPU cores and
the scores.

The method: arXiv:2306.13649 (on-policy, reverse divergence), by token as in K. Lu,
"On-Policy Distillation" (2025). docs/guide/conversations.md explains the knobs.
"""

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults

if TYPE_CHECKING:
  from lab.experiments import Experiment

NAMES = ('distill',)  # experiments
LARGER = {'sft.width': 128, 'sft.heads': 8, 'sft.kv_heads': 4, 'sft.ffn': 384}
WEIGHTS = 'runs/teacher/weights'
ARMS = {
  'distilled': {'teacher.path': WEIGHTS, 'teacher.reward': False},
  'both': {'teacher.path': WEIGHTS},
  'reward': {},
}
VARIANTS = (*ARMS, 'teacher')


def get_config(arg: str = 'distilled') -> ConfigDict:
  """Returns the config of an arm, or of the teacher."""
  config = base()
  config.title += f': {arg}'
  config.update_from_flattened_dict((ARMS | {'teacher': LARGER})[arg])
  return config


def get_experiment(name: str) -> 'Experiment':
  """Returns the experiment `distill`: all arms with three seeds.

  Raises:
    KeyError: the name is not `distill`.
  """
  from lab.experiments import Experiment  # a training run does without lab

  return {'distill': Experiment(base().to_dict(), ARMS, (0, 1, 2))}[name]


def base() -> ConfigDict:
  """Returns the knobs that all arms share: GRPO with four updates per step."""
  config = defaults()
  config.title = 'distillation'
  config.clip.rule = 'fixed'
  config.learner.minibatches = 4
  config.optimizer.lr = 1e-3
  return config
