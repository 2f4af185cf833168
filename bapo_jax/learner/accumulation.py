"""Gradients summed over micro-batches, as many as a batch fills.

1. `summed` differentiates each micro-batch's own loss;
2. `forward_all` runs all forward passes first and holds what their backward passes
   read, for a loss that needs the statistics of all micro-batches at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.types import Tree

Aux = Any


def _zeros(params: Tree) -> Tree:
  """Where gradients are summed: float32, or a sum in bfloat16 loses what is small."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


def summed(
  value_of: Callable[[Tree, Array], tuple[Array, Aux]],
  params: Tree,
  used: Array,
  aux: Aux,
  merge: Callable[[Array, Aux, Aux], Aux],
) -> tuple[Array, Tree, Aux]:
  """(value, float32 gradients, aux) of the first `used` micro-batches, one by one.

  Args:
    value_of: (params, n) -> (value of micro-batch n, what else it found).
    aux: before the first; `merge(n, so_far, found)` adds to it.
  """

  def add(n: Array, state: tuple[Array, Tree, Aux]) -> tuple[Array, Tree, Aux]:
    total, sums, aux = state
    (value, found), grads = jax.value_and_grad(value_of, has_aux=True)(params, n)
    return total + value, jax.tree.map(jnp.add, sums, grads), merge(n, aux, found)

  return jax.lax.fori_loop(0, used, add, (jnp.float32(0), _zeros(params), aux))


def forward_all(
  stats_of: Callable[[Tree, Array], Tree],
  params: Tree,
  count: int,
  used: Array,
  frozen: Tree = None,
) -> tuple[Tree, Callable[[Tree], Tree]]:
  """(statistics summed over the micro-batches, their cotangents -> gradients).

  A loss over all micro-batches, such as one whose bounds are found over all tokens,
  costs no second forward pass; but what the backward pass of each reads lies in memory
  at the same time. The parameters, which all of them read, are there once.

  Args:
    stats_of: (params, n) -> statistics of micro-batch n.
    count: the most micro-batches; `used` of them are computed.
    frozen: arrays that `stats_of` reads besides; there once, too.
  """
  own = {id(x) for x in jax.tree.leaves((params, frozen))}

  def forward(n: Array) -> tuple[Tree, list[Array]]:
    stats, pull = jax.vjp(lambda params: stats_of(params, n), params)
    return stats, [x for x in jax.tree.leaves(pull) if id(x) not in own]

  def store(n: Array, state: tuple[Tree, list[Array]]) -> tuple[Tree, list[Array]]:
    stats, stored = state
    found, read = forward(n)
    put = jax.lax.dynamic_update_index_in_dim
    stored: list[Array] = [put(*pair, n, 0) for pair in zip(stored, read, strict=True)]
    return jax.tree.map(jnp.add, stats, found), stored

  shapes, read = jax.eval_shape(forward, jnp.int32(0))
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  stored = [jnp.zeros((count, *x.shape), x.dtype) for x in read]
  stats, stored = jax.lax.fori_loop(0, used, store, (nothing, stored))

  def backward(d_stats: Tree) -> Tree:
    def add(n: Array, sums: Tree) -> Tree:
      # The forward pass is written once more and its results replaced by those stored:
      # the compiler drops what nothing reads.
      _, pull = jax.vjp(lambda params: stats_of(params, n), params)
      leaves, tree = jax.tree.flatten(pull)
      mine = iter(stored)
      leaves = [x if id(x) in own else next(mine)[n] for x in leaves]
      (grads,) = jax.tree.unflatten(tree, leaves)(d_stats)
      return jax.tree.map(jnp.add, sums, grads)

    return jax.lax.fori_loop(0, used, add, _zeros(params))

  return stats, backward
