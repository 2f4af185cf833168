"""How a step of gradient ascent by other rules would change the entropy.

1. `weights_of` reads the model of a workdir at its newest recorded step;
2. `changes` takes, for each rule of counterfactual.py, one step on the recorded tokens:
   along the gradient of sum(weight * logp), the weights being those of the rule;
3. it predicts the change of the mean entropy, by its derivative along the step, and
   measures it, by a second forward pass.

The weights are those after the recorded step, so a little later than its updates; and a
step is plain ascent, where the run has its optimiser.
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
from bapo_jax.tools.counterfactual import Applied, Recorded
from bapo_jax.training import policy, resolve
from bapo_jax.types import Tree


class Policy(NamedTuple):
  """A model and its weights."""

  spec: ModelSpec
  params: Tree


class Change(NamedTuple):
  """Of the mean entropy of the recorded tokens, nats."""

  predicted: float
  measured: float


def weights_of(workdir: str, recorded: Recorded) -> Policy:
  """The policy of a workdir after its recorded step.

  Raises:
    ValueError: that step has no checkpoint, or a damaged one.
  """
  model = resolve.open_model(recorded.config)
  spec = model.spec
  read = policy.reader(recorded.config, model, workdir, recorded.step)
  flat = {path: read(path) for path in transformer.describe(spec)}
  return Policy(spec, traverse_util.unflatten_dict(flat, sep='/'))


def changes(
  recorded: Recorded, applied: Mapping[str, Applied], at: Policy, step: float
) -> dict[str, Change]:
  """The change of entropy by one step of each rule.

  Args:
    step: length of the first rule's step, as a share of the length of the weights; the
      others keep their proportion to it.

  Raises:
    ValueError: the record has no token ids, or its problems have pictures.
  """
  if recorded.pictured:
    raise ValueError(
      'the recorded problems have pictures, which this forward pass does not read; '
      'take the record of a run on texts'
    )
  if recorded.ids is None:
    raise ValueError(
      'the record has no token ids; a checkpoint of this version records them'
    )
  tokens_BX, column_BT = _laid_out(recorded)
  mask_BT = jnp.asarray(recorded.loss_mask_BT)
  temperature = recorded.config.sampler.temperature

  def stats(params: Tree) -> tuple[Array, Array]:
    """(logp_BT, mean entropy)."""
    found = logprobs.sequence_stats(params, tokens_BX, at.spec, temperature)
    logp_BT, entropy_BT = (
      jnp.take_along_axis(x, column_BT, 1) for x in (found.logp_BT, found.entropy_BT)
    )
    return logp_BT, (entropy_BT * mask_BT).sum() / mask_BT.sum()

  @jax.jit
  def direction(params: Tree, weight_BT: Array) -> Tree:
    return jax.grad(lambda p: (weight_BT * stats(p)[0]).sum())(params)

  @jax.jit
  def entropy(params: Tree) -> tuple[Array, Tree]:
    return jax.value_and_grad(lambda p: stats(p)[1])(params)

  before, slope = entropy(at.params)
  found, rate = {}, None
  for name, one in applied.items():
    gradient = direction(at.params, jnp.asarray(one.weight_BT))
    if rate is None:
      rate = step * _dot(at.params, at.params) ** 0.5 / _dot(gradient, gradient) ** 0.5
    moved = jax.tree.map(lambda x, g, rate=rate: x + rate * g, at.params, gradient)
    measured = float(entropy(moved)[0]) - float(before)
    found[name] = Change(rate * _dot(slope, gradient), measured)
  return found


def _laid_out(recorded: Recorded) -> tuple[Array, Array]:
  """(tokens_BX, column_BT): whole rows, and the column of each recorded token."""
  assert recorded.ids is not None
  rows = [[*prompt, *ids] for prompt, ids in recorded.ids]
  tokens_BX = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for row, found in zip(tokens_BX, rows, strict=True):
    row[: len(found)] = found
  start_B = np.asarray([len(prompt) for prompt, _ in recorded.ids])
  column_BT = start_B[:, None] + np.arange(recorded.loss_mask_BT.shape[1])
  last = tokens_BX.shape[1] - 1
  return jnp.asarray(tokens_BX), jnp.asarray(np.minimum(column_BT, last))


def _dot(one: Tree, other: Tree) -> float:
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return float(sum((x * y).sum() for x, y in pairs))
