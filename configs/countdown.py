r"""Countdown: four cells at equal numbers of responses, on the embedded policy.

  .venv/bin/python -m bapo_jax.main --config=configs/countdown.py:both \
    --workdir=runs/both
  .venv/bin/python -m lab.sweep configs/countdown.py:cells --workers=2 \
    --results=runs/countdown

The first command trains a single cell. The second trains all four cells for seeds 0 to
2 and prints a table of them.

|                     | batch `fresh_only` | batch `adapted` |
|---------------------|--------------------|-----------------|
| clip `fixed`        | grpo               | batch           |
| clip `balanced`     | clip               | both            |

`configs/countdown.py:feedback` is GRPO with an environment (rollout.environment): the
policy proposes an expression, and hears its value, `=17`, up to three times. The
experiment `turns` compares it with `grpo`, one turn of as many tokens in which the
policy calculates by itself:

  .venv/bin/python -m lab.sweep configs/countdown.py:turns --results=runs/turns

`configs/countdown.py:given` puts a solution into every group (rollout.given); the
experiment `given` compares it, with two weights of the solutions, with `grpo`.

The cells of a seed share one warm start. A cell ends once it has sampled
`config.responses` responses, re-evaluations included: a cell that re-evaluates takes
fewer steps.

A problem has two or three numbers from 1 to 9 and a target up to 30, and its prompt is
`5 6 3=13` (examples/countdown.py). The warm start teaches the policy of 0.1 M
parameters to try random chains. It then reaches the target sometimes, and fails many
problems in all of eight responses.

From Batch Adaptation PO's public script: every 2 steps the actor gets the weights and
hard problems are re-evaluated; groups of 8; no KL term (older scripts: 0.005 on
Countdown). From its paper (arXiv:2602.20722, Table 3): at most half as many problems
are re-evaluated as a step has prompts (script: 32 of 32); thresholds 1/8 (hard) and 1/8
to 5/8 (reusable; script: 1/8 to 3/8). From Balanced PO (arXiv:2510.18927): the ranges
of the bounds. log/ has the minutes on two CPU cores and the scores.
"""

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults

if TYPE_CHECKING:
  from lab.experiments import Experiment

NAMES = ('cells', 'turns', 'given')  # experiments
CELLS = (  # name, batch rule, clip rule
  ('grpo', 'fresh_only', 'fixed'),
  ('clip', 'fresh_only', 'balanced'),
  ('batch', 'adapted', 'fixed'),
  ('both', 'adapted', 'balanced'),
)
# The share that these problems have by themselves; at 0.42 the bounds sat at their
# caps (log/2026-11-21.md).
TARGET = {'fixed': {}, 'balanced': {'clip.target': 0.39}}
ARMS = {
  name: {'batch.rule': batch, 'clip.rule': clip, **TARGET[clip]}
  for name, batch, clip in CELLS
}
PROBLEMS = 'examples/countdown.py:countdown'
ARMS_OF_TURNS = {
  'grpo': ARMS['grpo'],
  'feedback': ARMS['grpo']
  | {
    'problems.source': 'examples/countdown.py:proposals',
    'rollout.environment': 'feedback',
    'rollout.max_turns': 3,
  },
}
ARMS_OF_GIVEN = {
  'grpo': ARMS['grpo'],
  # One response of each group of eight is a solution of its problem.
  'given': ARMS['grpo'] | {'rollout.given': 1},
  'given_eighth': ARMS['grpo'] | {'rollout.given': 1, 'loss.given': 0.125},
}
VARIANTS = (*ARMS, 'feedback', 'given')


def get_config(arg: str = '') -> ConfigDict:
  """Returns the config of a cell; without a name that of the default rules."""
  config = embedded()
  if not arg:
    config.clip.target = TARGET['balanced']['clip.target']
    return config
  config.title += f': {arg}'
  config.update_from_flattened_dict((ARMS_OF_GIVEN | ARMS | ARMS_OF_TURNS)[arg])
  return config


def get_experiment(name: str) -> 'Experiment':
  """Returns `cells`, the four cells, `turns`, or `given`, with three seeds.

  Raises:
    KeyError: there is no such experiment.
  """
  from lab.experiments import Experiment  # a training run does without lab

  arms = {'cells': ARMS, 'turns': ARMS_OF_TURNS, 'given': ARMS_OF_GIVEN}[name]
  return Experiment(embedded().to_dict(), arms, (0, 1, 2))


def embedded() -> ConfigDict:
  """Returns the knobs that all cells share."""
  config = defaults()
  config.title = 'countdown, tiny'
  config.steps = 60
  config.responses = 30_720.0
  config.problems.update(source=PROBLEMS, test_source=PROBLEMS)
  config.model.remat = 'none'  # there is memory enough
  config.prompts.max_prompt_tokens = 10
  config.sampler.max_new_tokens = 48
  config.rewards.rule = 'countdown'
  config.rollout.weight_sync_interval = 2
  config.buffer.update(capacity=256, reevaluate=32, reeval_interval=2)
  config.sft.update(clean=800, noisy=0)  # what is not learned well slips enough
  config.evaluate.update(every=20, group_size=8)
  config.metrics.tensorboard = False
  return config
