"""Computes how the rules under the microscope relate to the true gradient.

1. `RULES` are the published methods as rules, and `GRID` pairs of fixed bounds;
2. `updates` computes the expected update of each of them, and its alignment with the
   true gradient for several numbers of responses.
"""

import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms.clip import Fixed
from bapo_jax.methods import METHODS
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from lab import microscope
from lab.microscope import GROUP, GRPO, Rule, Tables, Task

FOLDER = pathlib.Path(__file__).parents[1] / 'papers' / 'bench'
UPDATES, LR, WARM = 64, 5e-4, 300
# Minibatches of each size, for rules that read the whole minibatch.
MINIBATCHES = {16: 2048, 64: 512, 256: 128, 1024: 48}
CHANGED = {  # name -> what differs from the method of this name
  'balanced .42': {'clip.target': 0.42},
  'balanced .50': {'clip.target': 0.5},
  'DPPO-TV': {'loss.cap': math.inf},
  'DPPO-KL': {'loss.cap': math.inf},
}
SEARCHES = ('balanced .42', 'balanced .50')
NAMES = (
  'GRPO, clip-higher, dual clip, balanced .42, balanced .50, unclipped, REINFORCE, '
  'TIS, CISPO, GSPO, SAPO, VESPO, ASPO, FIPO, DCPO, DPPO-TV, DPPO-KL, IcePop, KPop, '
  'M2PO, OPSM'
)


def arm_of(name: str) -> str:
  """Returns the name of a rule among the methods and arms of papers/."""
  return re.sub(r'\W+', '_', name.lower().removesuffix(' .42'))


def rule_of(name: str) -> Rule:
  """Returns a rule of NAMES: a published method, up to CHANGED."""
  method = METHODS[arm_of(name).removesuffix('_50')]
  knobs = {**method.overrides, **CHANGED.get(name, {})}
  config = config_lib.parse(config_lib.merged(Config().model_dump(), knobs))
  whole_batch = name in (*SEARCHES, 'M2PO')
  return Rule(config.loss, config.clip, config.mask, whole_batch=whole_batch)


RULES = {name: rule_of(name) for name in NAMES.split(', ')}
# The fixed bounds among which the best is taken, to compare with a search.
GRID = {
  f'[{low:g}, {high:g}]': Rule(clip=Fixed(low=low, high=high))
  for low in (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
  for high in (1.1, 1.2, 1.28, 1.5, 2.0, 3.0, math.inf)
}


def updates(
  task: Task, tables: Tables, slopes_KP: Array, truth_P: Array, seed: int
) -> dict[str, tuple[Array, dict[str, float]]]:
  """Returns rule -> (expected update, alignment by number of responses)."""
  exact = {n: rule for n, rule in (RULES | GRID).items() if not rule.whole_batch}
  unit_P = truth_P / jnp.linalg.norm(truth_P)
  mean_RP, square_R = microscope.moments(list(exact.values()), task, tables, slopes_KP)
  table = {}
  squares = {}
  for name, update_P, square in zip(exact, mean_RP, square_R, strict=True):
    signal = microscope.dot(update_P, update_P)
    noise = max(0.0, square - signal) * GROUP
    squares[name] = {n: signal + noise / n for n in MINIBATCHES}
    along = microscope.dot(update_P, unit_P)
    table[name] = (
      update_P,
      {str(n): _aligned(along, x) for n, x in squares[name].items()},
    )
  # GRPO on the same minibatches has known moments and the same heavy tail: very large
  # ratios of tokens with A < 0, which no bound of a search cuts.
  known_P, _ = table['GRPO']
  known = microscope.dot(known_P, unit_P)
  sampled = {n: rule for n, rule in RULES.items() if rule.whole_batch}
  rules = [GRPO, *sampled.values()]
  alignments: dict[str, dict[str, float]] = {name: {} for name in sampled}
  for n, count in MINIBATCHES.items():
    first, *others = microscope.sampled(
      rules, task, tables, slopes_KP, unit_P[None], n, count, seed
    )
    drawn_P = microscope.gradient(slopes_KP, task, first.weight_NT)
    for name, other in zip(sampled, others, strict=True):
      along, slope = controlled(other.along_MV[:, 0], first.along_MV[:, 0], known)
      square, _ = controlled(other.square_M, first.square_M, squares['GRPO'][n])
      alignments[name][str(n)] = _aligned(along, max(square, along**2))
      update_P = microscope.gradient(slopes_KP, task, other.weight_NT)
      table[name] = update_P - slope * (drawn_P - known_P), alignments[name]
  return table


def controlled(y_M: np.ndarray, x_M: np.ndarray, mean: float) -> tuple[float, float]:
  """Returns (the mean of y, b): the mean of y - b (x - mean), b of least variance."""
  covariance = ((x_M - x_M.mean()) * (y_M - y_M.mean())).mean()
  slope = float(covariance) / (float(x_M.var()) or math.inf)
  return float(y_M.mean()) - slope * (float(x_M.mean()) - mean), slope


def _aligned(along: float, square: float) -> float:
  return float(along / math.sqrt(square)) if square else math.nan
