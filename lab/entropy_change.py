"""Measures how a step of gradient ascent under other rules would change the entropy.

1. `weights_of` reads the model of a workdir at its newest recorded step.
2. `changes` takes one step per rule on the recorded tokens, along the gradient of
   sum(weight * logp) with the weights of counterfactual.py.
3. The change of the mean entropy is predicted by its derivative along the step, and
   measured by a second forward pass.

The weights are those after the recorded step, slightly later than its updates, and the
step is plain ascent, where the run uses its optimiser.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array

from bapo_jax.models import logprobs, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training import policy as policy_lib
from bapo_jax.training import resolve
from bapo_jax.types import Tree
from lab.counterfactual import Applied, Recorded


class Change(NamedTuple):
  """The change of the mean entropy of the recorded tokens, nats."""

  predicted: float
  measured: float


def weights_of(workdir: str, recorded: Recorded) -> tuple[ModelSpec, Tree]:
  """Returns the model of a workdir and its weights after the recorded step.

  Raises:
    ValueError: the step has no checkpoint, or a damaged one.
  """
  model = resolve.open_model(recorded.config)
  read = policy_lib.reader(recorded.config, model, workdir, recorded.step)
  flat = {path: read(path) for path in transformer.describe(model.spec)}
  return model.spec, traverse_util.unflatten_dict(flat, sep='/')


def changes(
  recorded: Recorded,
  applied: Mapping[str, Applied],
  policy: tuple[ModelSpec, Tree],
  step: float,
) -> dict[str, Change]:
  """Returns the change of entropy by one step of each rule.

  Args:
    policy: model and weights, from `weights_of`.
    step: length of the first rule's step relative to the length of the weights; the
      steps of the other rules keep their proportion to it.

  Raises:
    ValueError: the record has no token ids, or its problems have pictures.
  """
  if recorded.pictured:
    raise ValueError(
      'the recorded problems have pictures, which this forward pass does not read; '
      'use the record of a run without pictures'
    )
  if recorded.ids is None:
    raise ValueError(
      'the record has no token ids; use a record written by this version'
    )
  (spec, start), (tokens_BX, column_BT) = policy, _rows(recorded)
  mask_BT = jnp.asarray(recorded.loss_mask_BT)
  temperature = recorded.config.sampler.temperature

  def stats(params: Tree) -> tuple[Array, Array]:
    """Returns (logp_BT, mean entropy)."""
    of_row = logprobs.sequence_stats(params, tokens_BX, spec, temperature)
    logp_BT, entropy_BT = (
      jnp.take_along_axis(x, column_BT, 1) for x in (of_row.logp_BT, of_row.entropy_BT)
    )
    return logp_BT, (entropy_BT * mask_BT).sum() / mask_BT.sum()

  @jax.jit
  def direction(params: Tree, weight_BT: Array) -> Tree:
    return jax.grad(lambda p: (weight_BT * stats(p)[0]).sum())(params)

  @jax.jit
  def entropy(params: Tree) -> tuple[Array, Tree]:
    return jax.value_and_grad(lambda p: stats(p)[1])(params)

  before, slope = entropy(start)
  change, rate = {}, None
  for name, rule in applied.items():
    gradient = direction(start, jnp.asarray(rule.weight_BT))
    if rate is None:
      rate = step * _dot(start, start) ** 0.5 / _dot(gradient, gradient) ** 0.5
    moved = jax.tree.map(lambda x, g, rate=rate: x + rate * g, start, gradient)
    measured = float(entropy(moved)[0]) - float(before)
    change[name] = Change(rate * _dot(slope, gradient), measured)
  return change


def _rows(recorded: Recorded) -> tuple[Array, Array]:
  """Returns rows of prompt and response, and the column of each recorded token."""
  assert recorded.ids is not None
  rows = [[*prompt, *ids] for prompt, ids in recorded.ids]
  tokens_BX = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for row_X, tokens in zip(tokens_BX, rows, strict=True):
    row_X[: len(tokens)] = tokens
  start_B = np.asarray([len(prompt) for prompt, _ in recorded.ids])
  column_BT = start_B[:, None] + np.arange(recorded.loss_mask_BT.shape[1])
  last = tokens_BX.shape[1] - 1
  return jnp.asarray(tokens_BX), jnp.asarray(np.minimum(column_BT, last))


def _dot(one: Tree, other: Tree) -> float:
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return float(sum((x * y).sum() for x, y in pairs))
