"""Writes one column per slot into arrays [slots, ...], without copying the arrays."""

import functools

import jax.numpy as jnp
from jax import Array, lax

from bapo_jax.models.attention import LANES

KeysValues = tuple[Array, Array]  # [S, K, C, columns] and [S, K, columns, C]


def put(x: Array, new: Array, at_S: Array, axis: int = 1) -> Array:
  """Writes one value per slot to x [S, ...], at index at_S along `axis`.

  `new` has the shape of `x` without `axis`. A value past the end is dropped.

  The scatter is batched over slots. If its indices contained slot numbers, every device
  of a mesh that shards slots would gather all values, and XLA's TPU backend would copy
  the cache: 16.9 GB of temporaries for a cache of 16.9 GB (7B, 2048 slots of 9216).
  """
  within_slots = lax.ScatterDimensionNumbers(
    update_window_dims=tuple(range(1, x.ndim)),
    inserted_window_dims=(),
    scatter_dims_to_operand_dims=(axis,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
  )
  return lax.scatter(
    x,
    at_S[:, None],
    jnp.expand_dims(new, axis),
    within_slots,
    indices_are_sorted=True,
    unique_indices=True,
    mode='drop',
  )


def put_values(v_SKtC: Array, v_SKC: Array, at_S: Array) -> Array:
  """Writes a column of values per slot; see `put`.

  A TPU stores rows of fewer than LANES numbers with the columns last, because it would
  pad them otherwise. A scatter along the columns would have all values transposed and
  padded for it, at every token; a scatter of the transposed values leaves the order.
  """

  def turned(v_SKtC, v_SKC, at_S):
    return put(v_SKtC.swapaxes(2, 3), v_SKC, at_S, 3).swapaxes(2, 3)

  upright = functools.partial(put, axis=2)
  return lax.platform_dependent(
    v_SKtC,
    v_SKC,
    at_S,
    tpu=turned if v_SKC.shape[2] % LANES else upright,
    default=upright,
  )
