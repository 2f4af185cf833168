"""Defines the optimiser: AdamW with gradient clipping and float32 master weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bapo_jax.sharding import path_name
from bapo_jax.types import Tree


def matrices(params: Tree) -> Tree:
  """Marks the parameters that decay: all but the scales of norms and the biases.

  Layers are stacked, so a norm of [L, D] is no matrix: paths decide, not ranks. This is
  the convention of Hugging Face's trainer: embedding, head, routers and adapters decay.
  """
  return jax.tree.map_with_path(
    lambda path, _: not path_name(path).endswith(('norm', 'bias')), params
  )


def adamw(
  *,
  lr: float,
  warmup: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  max_norm: float = 1.0,
  master: bool = False,
  decay_all: bool = False,
) -> optax.GradientTransformation:
  """Returns AdamW that first clips the gradient by its global norm.

  Args:
    warmup: optimiser updates of linear warm-up.
    b1, b2: decay of the moments.
    weight_decay: decoupled decay, of `matrices`.
    max_norm: maximum global norm of the gradient.
    master: keeps float32 master weights beside narrower parameters; see `mastered`.
    decay_all: all parameters decay.
  """
  schedule = optax.linear_schedule(lr / (warmup + 1), lr, warmup) if warmup else lr
  tx = optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.adamw(
      schedule,
      b1=b1,
      b2=b2,
      weight_decay=weight_decay,
      mask=None if decay_all else matrices,
    ),
  )
  return mastered(tx) if master else tx


class Mastered(NamedTuple):
  """The state of the optimiser that `mastered` returns."""

  master: Any  # the weights in float32
  inner: Any  # state of the wrapped optimiser


def mastered(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns an optimiser that applies `tx` to float32 copies of the parameters.

  The parameters are the rounded copies. Without copies, a step of 1e-6 would not change
  most bfloat16 weights: their spacing is larger (Micikevicius et al., 2018).
  """

  def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def init(params) -> Mastered:
    return Mastered(wide(params), tx.init(wide(params)))

  def update(grads, state, params) -> tuple[Tree, Mastered]:
    updates, inner = tx.update(wide(grads), state.inner, state.master)
    master = optax.apply_updates(state.master, updates)
    rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    moves = jax.tree.map(jnp.subtract, wide(rounded), wide(params))
    return moves, Mastered(master, inner)

  return optax.GradientTransformation(init, update)  # pyrefly: ignore
