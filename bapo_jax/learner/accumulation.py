"""Sums gradients over the micro-batches that a batch fills.

1. `summed` differentiates the loss of one micro-batch after the other;
2. `forward_all` runs all forward passes first and stores the residuals of their
   backward passes, for a loss that needs the statistics of all micro-batches at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from bapo_jax.learner import pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.types import Tree

Aux = Any


def _zeros(params: Variables) -> Variables:
  # Accumulators in float32: a sum in bfloat16 would lose small terms.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  return pictured.constrain(zeros)


def _add(sums: Variables, grads: Variables) -> Variables:
  # Sums are sharded like the parameters, so a device scatters what it does not keep.
  return pictured.constrain(jax.tree.map(jnp.add, sums, grads))


def summed(
  value_of: Callable[[Variables, Array], tuple[Array, Aux]],
  params: Variables,
  used: Array,
  aux: Aux,
  merge: Callable[[Array, Aux, Aux], Aux],
) -> tuple[Array, Variables, Aux]:
  """Sums value and gradients of the first `used` micro-batches, one by one.

  Args:
    value_of: (params, n) -> (value, auxiliary output) of micro-batch n.
    merge: (n, aux so far, aux of micro-batch n) -> aux; starts from `aux`.

  Returns:
    (value, float32 gradients, aux).
  """

  # A loop with a dynamic end: a batch with few tokens to learn from runs few of them,
  # and all batches share one program.
  def add(n, state):
    total, sums, aux = state
    (value, new), grads = jax.value_and_grad(value_of, has_aux=True)(params, n)
    return total + value, _add(sums, grads), merge(n, aux, new)

  return lax.fori_loop(0, used, add, (jnp.float32(0), _zeros(params), aux))


def forward_all(
  stats_of: Callable[[Variables, Array], Tree],
  params: Variables,
  count: int,
  used: Array,
  frozen: Tree = None,
) -> tuple[Tree, Callable[[Tree], Variables]]:
  """Runs all forward passes and returns a function that runs all backward passes.

  Avoids a second forward pass for a loss over all micro-batches, such as one with
  bounds searched over all tokens, but keeps the residuals of all of them in memory.
  Parameters and frozen arrays, which every backward pass reads, are not copied.

  Args:
    stats_of: (params, n) -> statistics of micro-batch n.
    count: number of micro-batches, static.
    used: number of micro-batches that are computed.
    frozen: other arrays that `stats_of` reads.

  Returns:
    (summed statistics, a function from their cotangents to float32 gradients).
  """
  shared = {id(x) for x in jax.tree.leaves((params, frozen))}

  # The leaves of a vjp function are its residuals: store them, except shared arrays.
  def forward(n):
    stats, pull = jax.vjp(lambda params: stats_of(params, n), params)
    return stats, [x for x in jax.tree.leaves(pull) if id(x) not in shared]

  def store(n, state):
    stats, stored = state
    new, residuals = forward(n)
    put = lax.dynamic_update_index_in_dim
    pairs = zip(stored, residuals, strict=True)
    stored = [put(*pair, n, 0) for pair in pairs]
    return jax.tree.map(jnp.add, stats, new), stored

  # Space for all micro-batches, of which only the used ones are written.
  shapes, residuals = jax.eval_shape(forward, jnp.int32(0))
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  stored = [jnp.zeros((count, *x.shape), x.dtype) for x in residuals]
  stats, stored = lax.fori_loop(0, used, store, (nothing, stored))

  def backward(d_stats):
    def add(n, sums):
      # Traces the forward pass again and replaces its residuals by the stored arrays;
      # the compiler removes the forward pass, since nothing reads its results.
      _, pull = jax.vjp(lambda params: stats_of(params, n), params)
      leaves, tree = jax.tree.flatten(pull)
      restored = iter(stored)
      leaves = [x if id(x) in shared else next(restored)[n] for x in leaves]
      (grads,) = jax.tree.unflatten(tree, leaves)(d_stats)
      return _add(sums, grads)

    return lax.fori_loop(0, used, add, _zeros(params))

  return stats, backward
