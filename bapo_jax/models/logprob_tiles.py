"""Computes token statistics and their gradients on one device, tile by tile.

A tile is the logits of a chunk of columns over a block of the vocabulary. It is reduced
to a few numbers per token, dropped, and recomputed in the backward pass.

The head's gradient is always summed in float32: a bfloat16 sum over 128 chunks is off
by 1.3 %. Under a mesh (`sharded`) the head is gathered over fsdp before the tiles, and
its gradient is scattered after them; no tile waits for another device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def _gather(head_VD: Array, dtype: jax.typing.DTypeLike, sharded: bool) -> Array:
  """Gathers the part of the head that this device needs: a share of V, all of D."""
  if not sharded or jax.lax.axis_size('fsdp') == 1:
    return head_VD  # cast where it is used
  return jax.lax.all_gather(head_VD.astype(dtype), 'fsdp', axis=1, tiled=True)


def _first(head_VD: Array, sharded: bool) -> int | Array:
  """Returns the first token of this device's share of the vocabulary."""
  return jax.lax.axis_index('tensor') * head_VD.shape[0] if sharded else 0


def num_blocks(V: int, block: int) -> int:
  """Returns the least number of equal blocks of V, each at most `block`, or else 1."""
  least = -(-V // block)
  return next((n for n in range(least, 8 * least) if V % n == 0), 1)


def _cut(x: Array, i: int | Array, size: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _block_of(
  head_VD: Array, i: int | Array, size: int, dtype: jax.typing.DTypeLike
) -> Array:
  """Returns block i of the head's rows, cast to `dtype`.

  Before the cast the block is multiplied by 1.0 behind an optimization barrier.
  Otherwise XLA would move the cast out of the loops and copy the whole float32 head,
  1 GiB for the 7B model.
  """
  head_vD = _cut(head_VD, i, size, 0)
  if head_vD.dtype == dtype:
    return head_vD
  one = jax.lax.optimization_barrier(jnp.ones((), head_vD.dtype))
  return (head_vD * one).astype(dtype)


def _logits(hidden_BtD: Array, head_vD: Array, temperature: Array) -> Array:
  logits_Btv = jnp.einsum(
    'btd,vd->btv', hidden_BtD, head_vD, preferred_element_type=jnp.float32
  )
  return logits_Btv / temperature


def forward(
  hidden_BTD: Array,
  head_VD: Array,
  token_BT: Array,
  temperature: Array,
  columns: Array,
  *,
  sizes: tuple[int, int],
  sharded: bool,
) -> tuple[Array, ...]:
  """Computes `types.TokenStats` and lse_BT, the log-sum-exp of the logits.

  Args:
    columns: i32, number of leading columns to score; later chunks give 0.
    sizes: (columns, maximum head rows) of a tile; the columns divide T.
    sharded: whether the arrays are one device's shards, within `jax.shard_map`.
  """
  head_VD = _gather(head_VD, hidden_BTD.dtype, sharded)
  chunk, blocks = sizes[0], num_blocks(head_VD.shape[0], sizes[1])
  chunks, block = hidden_BTD.shape[1] // chunk, head_VD.shape[0] // blocks
  token_BT = token_BT - _first(head_VD, sharded)

  def reduce_tile(j: Array, tiles: tuple[Array, ...]) -> tuple[Array, ...]:
    hidden_BtD, token_Bt = (
      _cut(x, j // blocks, chunk, 1) for x in (hidden_BTD, token_BT)
    )
    head_vD = _block_of(head_VD, j % blocks, block, hidden_BTD.dtype)
    logits_Btv = _logits(hidden_BtD, head_vD, temperature)
    reduced = _reduced(logits_Btv, token_Bt - j % blocks * block)
    return tuple(
      jax.lax.dynamic_update_index_in_dim(all_jBt, x_Bt, j, 0)
      for all_jBt, x_Bt in zip(tiles, reduced, strict=True)
    )

  # Only chunks with scored columns are computed; the count is known at run time.
  zeros = jnp.zeros((chunks * blocks, hidden_BTD.shape[0], chunk), jnp.float32)
  used = -(-columns // chunk)
  tiles = jax.lax.fori_loop(0, used * blocks, reduce_tile, (zeros,) * 6)
  # [chunks * blocks, B, chunk] -> [blocks, B, T]
  shape = blocks, *token_BT.shape
  tiles = tuple(
    jnp.moveaxis(x.reshape(chunks, blocks, -1, chunk), 0, 2).reshape(shape)
    for x in tiles
  )
  return tuple(
    jnp.where(jnp.arange(token_BT.shape[1])[None] < used * chunk, x_BT, 0)
    for x_BT in _combine(tiles, sharded)
  )


def _reduced(logits_Btv: Array, at_Bt: Array) -> tuple[Array, ...]:
  """Reduces a tile for `_combine`; at_Bt is the scored token's index in the tile."""
  peak_Bt = logits_Btv.max(-1)
  below_Btv = logits_Btv - peak_Bt[..., None]
  weight_Btv = jnp.exp(below_Btv)
  block = logits_Btv.shape[-1]
  inside_Bt1 = jnp.clip(at_Bt, 0, block - 1)[..., None]
  logit_Bt1 = jnp.take_along_axis(logits_Btv, inside_Bt1, -1)
  chosen_Bt = jnp.where((at_Bt >= 0) & (at_Bt < block), logit_Bt1[..., 0], -jnp.inf)
  square_Btv = weight_Btv**2
  sums = [
    x_Btv.sum(-1)
    for part_Btv in (weight_Btv, square_Btv)
    for x_Btv in (part_Btv, part_Btv * below_Btv)
  ]
  return peak_Bt, *sums, chosen_Bt


def _combine(tiles: tuple[Array, ...], sharded: bool) -> tuple[Array, ...]:
  """Merges the blocks of this device and the shards of all devices into one softmax.

  All terms are relative to the maximum, so that no two large numbers are subtracted.

  Args:
    tiles: arrays [blocks, B, T] of `_reduced`: each block's largest logit, `peak`; the
      sums of exp(logit - peak) and of exp(logit - peak) * (logit - peak); the same sums
      of exp(logit - peak)^2; the logit of the token to score, -inf outside its block.
  """
  peak_bBT, sum_bBT, spread_bBT, square_bBT, square_spread_bBT, chosen_bBT = tiles
  top_BT = peak_bBT.max(0)
  top_BT = jax.lax.pmax(top_BT, 'tensor') if sharded else top_BT
  # Rescale the sums of each block from its maximum to the maximum of all blocks.
  fall_bBT = peak_bBT - top_BT[None]
  chosen_bBT = jnp.where(jnp.isinf(chosen_bBT), 0, chosen_bBT - top_BT[None])
  scale_bBT = jnp.exp(fall_bBT)
  spread_bBT = scale_bBT * (spread_bBT + fall_bBT * sum_bBT)
  square_spread_bBT = scale_bBT**2 * (square_spread_bBT + fall_bBT * square_bBT)
  parts = scale_bBT * sum_bBT, spread_bBT, scale_bBT**2 * square_bBT, square_spread_bBT
  sums = tuple(x.sum(0) for x in (*parts, chosen_bBT))
  sums = jax.lax.psum(sums, 'tensor') if sharded else sums
  sum_BT, spread_BT, square_BT, square_spread_BT, chosen_BT = sums
  log_sum_BT, mean_BT = jnp.log(sum_BT), spread_BT / sum_BT
  # log pi + H of a token is (logit - top) - mean, so no second pass is needed.
  covariance_BT = (square_spread_BT - mean_BT * square_BT) / sum_BT**2
  logp_BT, entropy_BT = chosen_BT - log_sum_BT, log_sum_BT - mean_BT
  return logp_BT, entropy_BT, covariance_BT, top_BT + log_sum_BT


class _Columns(NamedTuple):
  """Arrays that the backward pass reads by chunk; d_x is the loss gradient w.r.t. x."""

  hidden_BTD: Array
  token_BT: Array
  lse_BT: Array
  d_logp_BT: Array
  d_entropy_BT: Array | None  # None: the loss does not depend on the entropy
  entropy_BT: Array

  def d_logits(
    self, i: Array, chunk: int, head_vD: Array, id_v: Array, temperature: Array
  ) -> tuple[Array, Array]:
    """Returns (hidden_BtD, d_logits_Btv) of chunk i and the vocabulary block id_v."""
    hidden_BtD, token_Bt, lse_Bt, d_logp_Bt = (_cut(x, i, chunk, 1) for x in self[:4])
    logp_Btv = _logits(hidden_BtD, head_vD, temperature) - lse_Bt[..., None]
    p_Btv = jnp.exp(logp_Btv)
    chosen_Btv = token_Bt[..., None] == id_v[None, None]
    d_logits_Btv = d_logp_Bt[..., None] * (chosen_Btv - p_Btv)
    if self.d_entropy_BT is not None:  # dH/dz = -p (log p + H)
      d_entropy_Bt1, entropy_Bt1 = (
        _cut(x, i, chunk, 1)[..., None] for x in (self.d_entropy_BT, self.entropy_BT)
      )
      d_logits_Btv -= d_entropy_Bt1 * p_Btv * (logp_Btv + entropy_Bt1)
    return hidden_BtD, (d_logits_Btv / temperature).astype(hidden_BtD.dtype)


def _block_gradient(
  columns: _Columns,
  head_vD: Array,
  id_v: Array,
  temperature: Array,
  d_hidden_BTD: Array,
  chunk: int,
  used: Array,
  trained: bool,
) -> tuple[Array, Array | None]:
  """Returns (d_hidden_BTD plus the part of one vocabulary block, d_head_vD).

  `used` counts the chunks with a scored column; d_head_vD is None unless `trained`.
  """

  def add_chunk(i, grads):
    d_hidden_BTD, d_head_vD = grads
    hidden_BtD, d_logits_Btv = columns.d_logits(i, chunk, head_vD, id_v, temperature)
    d_hidden_BtD = _cut(d_hidden_BTD, i, chunk, 1) + jnp.einsum(
      'btv,vd->btd', d_logits_Btv, head_vD, preferred_element_type=jnp.float32
    )
    if trained:
      d_head_vD += jnp.einsum(
        'btv,btd->vd', d_logits_Btv, hidden_BtD, preferred_element_type=jnp.float32
      )
    d_hidden_BTD = jax.lax.dynamic_update_slice_in_dim(
      d_hidden_BTD, d_hidden_BtD, i * chunk, 1
    )
    return d_hidden_BTD, d_head_vD

  zeros_vD = jnp.zeros(head_vD.shape, jnp.float32) if trained else None
  return jax.lax.fori_loop(0, used, add_chunk, (d_hidden_BTD, zeros_vD))


def backward(
  hidden_BTD: Array,
  head_VD: Array,
  token_BT: Array,
  temperature: Array,
  columns: Array,
  lse_BT: Array,
  entropy_BT: Array,
  d_logp_BT: Array | None,
  d_entropy_BT: Array | None,
  *,
  sizes: tuple[int, int],
  sharded: bool,
  trained: bool = True,
) -> tuple[Array, Array | None]:
  """Computes the gradients w.r.t. hidden_BTD and head_VD, in their dtypes.

  The outer loop runs over blocks of the vocabulary and the inner loop over chunks, so
  that the head's gradient of a block is summed in float32 and written once.

  Args:
    columns, sizes, sharded: see `forward`; the gradient of later columns is 0.
    d_logp_BT, d_entropy_BT: gradients w.r.t. the outputs; None: the loss does not
      depend on this output.
    trained: whether the head is trained; its gradient is None if it is frozen.
  """
  dtype = head_VD.dtype
  head_VD = _gather(head_VD, hidden_BTD.dtype, sharded)
  chunk, blocks = sizes[0], num_blocks(head_VD.shape[0], sizes[1])
  block = head_VD.shape[0] // blocks
  token_BT = token_BT - _first(head_VD, sharded)
  d_logp_BT = jnp.zeros_like(lse_BT) if d_logp_BT is None else d_logp_BT
  arrays = _Columns(hidden_BTD, token_BT, lse_BT, d_logp_BT, d_entropy_BT, entropy_BT)
  used = -(-columns // chunk)

  def add_block(d_hidden_BTD, k):
    head_vD = _block_of(head_VD, k, block, hidden_BTD.dtype)
    id_v = k * block + jnp.arange(block)
    d_hidden_BTD, d_head_vD = _block_gradient(
      arrays, head_vD, id_v, temperature, d_hidden_BTD, chunk, used, trained
    )
    if d_head_vD is None:
      return d_hidden_BTD, None
    return d_hidden_BTD, d_head_vD.astype(jnp.float32 if sharded else dtype)

  zeros_BTD = jnp.zeros(hidden_BTD.shape, jnp.float32)
  d_hidden_BTD, d_head_bvD = jax.lax.scan(add_block, zeros_BTD, jnp.arange(blocks))
  d_hidden_BTD = d_hidden_BTD.astype(hidden_BTD.dtype)
  # Each device has the part from its vocabulary; hidden states need the sum of parts.
  if sharded:
    d_hidden_BTD = jax.lax.psum(d_hidden_BTD, 'tensor')
  if d_head_bvD is None:
    return d_hidden_BTD, None
  d_head_VD = d_head_bvD.reshape(head_VD.shape)
  if sharded:  # reverses `_gather` and sums over the rows of other devices
    d_head_VD = jax.lax.psum_scatter(d_head_VD, 'fsdp', scatter_dimension=1, tiled=True)
    d_head_VD = jax.lax.psum(d_head_VD, 'data')
  return d_hidden_BTD, d_head_VD.astype(dtype)
