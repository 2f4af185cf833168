r"""A calculator as a tool: products that the embedded policy cannot do by itself.

  .venv/bin/python -m bapo_jax.main --config=configs/tools.py --workdir=runs/tools
  .venv/bin/python -m bapo_jax.main --config=configs/tools.py:alone --workdir=runs/alone
  .venv/bin/python -m lab.sweep configs/tools.py:tools --results=runs/tools_or_not

The first command trains with the tool, the second without it; the third trains both
for seeds 0 to 2 and prints a table.

A problem is `37*48`. A turn that ends in `37*48=` is a call, which the environment
`calculator` answers with `1776`, and the policy repeats the answer: \boxed{1776}. The
warm start shows both ways: three solutions in four guess a number near the answer.
Without the tool nobody answers a call. docs/guide/conversations.md has the figures.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.training.config import defaults

if TYPE_CHECKING:
  from lab.experiments import Experiment

NAMES = ('tools',)  # experiments
ARMS = {
  'tool': {'rollout.environment': 'calculator', 'rollout.max_turns': 2},
  'alone': {'rollout.environment': ''},
}
VARIANTS = tuple(ARMS)
TRAIN, TEST = 1280, 256
NUMBERS = 90  # factors are from 10 to 99
CALLS = 0.25  # share of the solutions of the warm start that use the tool
OFF = 0.05  # by which share the guesses are off at most


def get_config(arg: str = 'tool') -> ConfigDict:
  """Returns the config of an arm: with the tool, or alone."""
  config = base()
  config.title += f': {arg}'
  config.update_from_flattened_dict(ARMS[arg])
  return config


def get_experiment(name: str) -> 'Experiment':
  """Returns the experiment `tools`: both arms with three seeds.

  Raises:
    KeyError: the name is not `tools`.
  """
  from lab.experiments import Experiment  # a training run does without lab

  return {'tools': Experiment(base().to_dict(), ARMS, (0, 1, 2))}[name]


def base() -> ConfigDict:
  """Returns the knobs that both arms share."""
  config = defaults()
  config.title = 'products'
  config.steps = 40
  problems = 'configs/tools.py:products'
  config.problems.update(source=problems, test_source=problems)
  config.prompts.update(count=48, max_prompt_tokens=10)
  config.sampler.max_new_tokens = 24
  config.rewards.rule = 'exact'
  config.clip.rule = 'fixed'
  config.sft.update(clean=800, noisy=0)
  config.evaluate.update(every=10, group_size=8)
  config.metrics.tensorboard = False
  return config


def products(split: str) -> list[dict[str, Any]]:
  """Returns the problems of a split, with solutions for the warm start."""
  rng = np.random.default_rng(0)
  pairs = rng.permutation(NUMBERS**2)[: TRAIN + TEST]
  rows = []
  for x, y in zip(*(part + 10 for part in np.divmod(pairs, NUMBERS)), strict=True):
    solutions = [_solution(rng, int(x), int(y)) for _ in range(8)]
    row = {'problem': f'{x}*{y}', 'answer': str(x * y), 'solutions': solutions}
    rows.append(row)
  return rows[:TRAIN] if split == 'train' else rows[TRAIN:]


def _solution(rng: np.random.Generator, x: int, y: int):
  """Returns a guess, or a call with its answer and the conclusion, in turn."""
  if rng.random() < CALLS:
    return [f'{x}*{y}=', f'{x * y}\n', rf'\boxed{{{x * y}}}']
  near = round(x * y * rng.uniform(1 - OFF, 1 + OFF))
  return [rf'\boxed{{{near}}}']
