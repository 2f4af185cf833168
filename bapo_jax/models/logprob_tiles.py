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
from jax import Array, lax

# Uneven tiles have sides that are multiples of a CPU's register and of a TPU's lanes.
COLUMN_STEP = 8
ROW_STEP = 128
MASKED = -1e30  # a logit without weight; -inf would give NaN products and differences


class Tile(NamedTuple):
  """The largest tile: columns per device, and rows of the head."""

  columns: int = 256
  rows: int = 4096


def _share(hidden_BTD, head_VD, token_BT, tile: Tile, sharded):
  """Returns this device's part of the head, and tokens counted from its first token.

  The part is a share of V and all of D. It is followed by the number of blocks of its
  rows, and the rows of a block.
  """
  if sharded and lax.axis_size('fsdp') > 1:  # else it is cast where it is used
    head_VD = head_VD.astype(hidden_BTD.dtype)
    head_VD = lax.all_gather(head_VD, 'fsdp', axis=1, tiled=True)
  V = head_VD.shape[0]
  first = lax.axis_index('tensor') * V if sharded else 0
  return head_VD, token_BT - first, *split(V, tile.rows, ROW_STEP)


def largest(mib: int, V: int) -> Tile:
  """Returns the largest tile whose float32 logits take `mib` MiB.

  A large tile has about 2,048 columns: a product of the head then does over 1,000 FLOPs
  per byte, and every chip of `plan` is bound by its products. A tile has at least 4,096
  rows, or the whole head, and at most 64 columns per MiB, beyond which a small
  vocabulary gains nothing.
  """
  logits = mib << 18
  rows = min(V, max(4096, logits // 2048))
  return Tile(min(logits // rows, 64 * mib), rows)


def split(n: int, most: int, step: int) -> tuple[int, int]:
  """Returns (count, size) of equal parts of n, each at most `most`.

  If n has no such divisor, the size is rounded up to a multiple of `step`: count * size
  exceeds n, and the end of the last part is padding. `most` is a multiple of `step`, or
  smaller.
  """
  parts = -(-n // most)
  if n % parts == 0:
    return parts, n // parts
  step = min(step, most)
  size = min(n, -(-n // (parts * step)) * step)
  return -(-n // size), size


def _cut(x, start: int | Array, size, axis):
  return lax.dynamic_slice_in_dim(x, start, size, axis)


class _Block(NamedTuple):
  """A block of the vocabulary; the last one may repeat tokens of the block before."""

  head_vD: Array  # in the dtype of the hidden states
  start: Array  # token of the first row
  new_v: Array | None  # False for repeated tokens; None: no block has any


def _block(head_VD, k, size, dtype: jax.typing.DTypeLike):
  """Returns block k of the head's rows, cast to `dtype`.

  Before the cast the block is multiplied by 1.0 behind an optimization barrier.
  Otherwise XLA would move the cast out of the loops and copy the whole float32 head,
  1 GiB for the 7B model.
  """
  V = head_VD.shape[0]
  start = k * size
  new_v = None
  if V % size:
    start = jnp.minimum(start, V - size)
    new_v = start + jnp.arange(size) >= k * size
  head_vD = _cut(head_VD, start, size, 0)
  if head_vD.dtype != dtype:
    one = lax.optimization_barrier(jnp.ones((), head_vD.dtype))
    head_vD = (head_vD * one).astype(dtype)
  return _Block(head_vD, start, new_v)


def _logits(hidden_BtD, head_vD, temperature):
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
  tile: Tile,
  sharded: bool,
) -> tuple[Array, ...]:
  """Computes `types.TokenStats` and lse_BT, the log-sum-exp of the logits.

  Args:
    columns: i32, number of leading columns to score; later chunks give 0.
    tile: its columns divide T, its rows are a maximum.
    sharded: whether the arrays are one device's shards, within `jax.shard_map`.
  """
  share = _share(hidden_BTD, head_VD, token_BT, tile, sharded)
  head_VD, token_BT, blocks, block = share
  chunk = tile.columns
  # Only chunks with scored columns are computed; the count is known at run time.
  used = -(-columns // chunk)

  def reduce_block(_, k):
    head_vD, start, new_v = _block(head_VD, k, block, hidden_BTD.dtype)

    def reduce_tile(i, reduced):
      hidden_BtD, token_Bt = (
        _cut(x, i * chunk, chunk, 1) for x in (hidden_BTD, token_BT)
      )
      logits_Btv = _logits(hidden_BtD, head_vD, temperature)
      if new_v is not None:
        logits_Btv = jnp.where(new_v, logits_Btv, MASKED)
        token_Bt = jnp.where(token_Bt < k * block, -1, token_Bt)
      return tuple(
        lax.dynamic_update_slice_in_dim(x_BT, x_Bt, i * chunk, 1)
        for x_BT, x_Bt in zip(
          reduced, _reduced(logits_Btv, token_Bt - start), strict=True
        )
      )

    zeros = jnp.zeros(token_BT.shape, jnp.float32)
    return None, lax.fori_loop(0, used, reduce_tile, (zeros,) * 6)

  _, blocks_bBT = lax.scan(reduce_block, None, jnp.arange(blocks))
  return tuple(
    jnp.where(jnp.arange(token_BT.shape[1])[None] < used * chunk, x_BT, 0)
    for x_BT in _combine(blocks_bBT, sharded)
  )


def _reduced(logits_Btv, at_Bt):
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


def _combine(tiles: tuple[Array, ...], sharded):
  """Merges the blocks of this device and the shards of all devices into one softmax.

  All terms are relative to the maximum, so that no two large numbers are subtracted.

  Args:
    tiles: arrays [blocks, B, T] of `_reduced`: each block's largest logit, `peak`; the
      sums of exp(logit - peak) and of exp(logit - peak) * (logit - peak); the same sums
      of exp(logit - peak)^2; the logit of the token to score, -inf outside its block.
  """
  peak_bBT, sum_bBT, spread_bBT, square_bBT, square_spread_bBT, chosen_bBT = tiles
  top_BT = peak_bBT.max(0)
  chosen_BT = chosen_bBT.max(0)  # -inf if the token is outside the vocabulary
  if sharded:
    top_BT, chosen_BT = lax.pmax((top_BT, chosen_BT), 'tensor')
  # Rescale the sums of each block from its maximum to the maximum of all blocks.
  fall_bBT = peak_bBT - top_BT[None]
  scale_bBT = jnp.exp(fall_bBT)
  spread_bBT = scale_bBT * (spread_bBT + fall_bBT * sum_bBT)
  square_spread_bBT = scale_bBT**2 * (square_spread_bBT + fall_bBT * square_bBT)
  parts = scale_bBT * sum_bBT, spread_bBT, scale_bBT**2 * square_bBT, square_spread_bBT
  sums = tuple(x.sum(0) for x in parts)
  sums = lax.psum(sums, 'tensor') if sharded else sums
  sum_BT, spread_BT, square_BT, square_spread_BT = sums
  log_sum_BT = jnp.log(sum_BT)
  mean_BT = spread_BT / sum_BT
  # log pi + H of a token is (logit - top) - mean, so no second pass is needed.
  covariance_BT = (square_spread_BT - mean_BT * square_BT) / sum_BT**2
  logp_BT = chosen_BT - top_BT - log_sum_BT
  entropy_BT = log_sum_BT - mean_BT
  return logp_BT, entropy_BT, covariance_BT, top_BT + log_sum_BT


class _Columns(NamedTuple):
  """Arrays whose columns T the backward pass reads chunk by chunk.

  d_x is the gradient of the loss with respect to x.
  """

  hidden_BTD: Array
  token_BT: Array
  lse_BT: Array
  d_logp_BT: Array
  d_entropy_BT: Array | None  # None: the loss does not depend on the entropy
  entropy_BT: Array

  def d_logits(
    self, i: Array, chunk: int, block: _Block, temperature: Array
  ) -> tuple[Array, Array]:
    """Returns (hidden_BtD, d_logits_Btv) of chunk i and a block of the vocabulary."""
    hidden_BtD, token_Bt, lse_Bt, d_logp_Bt = (
      _cut(x, i * chunk, chunk, 1) for x in self[:4]
    )
    logp_Btv = _logits(hidden_BtD, block.head_vD, temperature) - lse_Bt[..., None]
    p_Btv = jnp.exp(logp_Btv)
    id_v = block.start + jnp.arange(block.head_vD.shape[0])
    chosen_Btv = token_Bt[..., None] == id_v[None, None]
    d_logits_Btv = d_logp_Bt[..., None] * (chosen_Btv - p_Btv)
    if self.d_entropy_BT is not None:  # dH/dz = -p (log p + H)
      d_entropy_Bt1, entropy_Bt1 = (
        _cut(x, i * chunk, chunk, 1)[..., None]
        for x in (self.d_entropy_BT, self.entropy_BT)
      )
      d_logits_Btv -= d_entropy_Bt1 * p_Btv * (logp_Btv + entropy_Bt1)
    if block.new_v is not None:
      d_logits_Btv = jnp.where(block.new_v, d_logits_Btv, 0)
    return hidden_BtD, (d_logits_Btv / temperature).astype(hidden_BtD.dtype)


Gradients = tuple[Array, Array | None]  # d_hidden_BTD; d_head_VD, None if frozen


def _add_block(
  grads: Gradients,
  columns: _Columns,
  block: _Block,
  temperature,
  chunk,
  used,
):
  """Adds the part of a vocabulary block; `used` counts chunks with scored columns."""
  d_hidden_BTD, d_head_VD = grads

  def add_chunk(i, grads):
    d_hidden_BTD, d_head_vD = grads
    hidden_BtD, d_logits_Btv = columns.d_logits(i, chunk, block, temperature)
    d_hidden_BtD = _cut(d_hidden_BTD, i * chunk, chunk, 1) + jnp.einsum(
      'btv,vd->btd', d_logits_Btv, block.head_vD, preferred_element_type=jnp.float32
    )
    if d_head_vD is not None:
      d_head_vD += jnp.einsum(
        'btv,btd->vd', d_logits_Btv, hidden_BtD, preferred_element_type=jnp.float32
      )
    d_hidden_BTD = lax.dynamic_update_slice_in_dim(
      d_hidden_BTD, d_hidden_BtD, i * chunk, 1
    )
    return d_hidden_BTD, d_head_vD

  if d_head_VD is None:
    return lax.fori_loop(0, used, add_chunk, (d_hidden_BTD, None))
  start = d_hidden_BTD, jnp.zeros(block.head_vD.shape, jnp.float32)
  d_hidden_BTD, d_head_vD = lax.fori_loop(0, used, add_chunk, start)
  d_head_vD = d_head_vD.astype(d_head_VD.dtype)
  if block.new_v is not None:  # repeated rows have a gradient from the block before
    d_head_vD += _cut(d_head_VD, block.start, d_head_vD.shape[0], 0)
  d_head_VD = lax.dynamic_update_slice_in_dim(d_head_VD, d_head_vD, block.start, 0)
  return d_hidden_BTD, d_head_VD


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
  tile: Tile,
  sharded: bool,
  trained: bool = True,
) -> tuple[Array, Array | None]:
  """Computes the gradients w.r.t. hidden_BTD and head_VD, in their dtypes.

  The outer loop runs over blocks of the vocabulary and the inner loop over chunks, so
  that the head's gradient of a block is summed in float32 and written once.

  Args:
    columns, tile, sharded: see `forward`; the gradient of later columns is 0.
    d_logp_BT, d_entropy_BT: gradients w.r.t. the outputs; None if the loss does
      not depend on this output.
    trained: whether the head is trained; its gradient is None if it is frozen.
  """
  dtype = head_VD.dtype
  share = _share(hidden_BTD, head_VD, token_BT, tile, sharded)
  head_VD, token_BT, blocks, block = share
  chunk = tile.columns
  d_logp_BT = jnp.zeros_like(lse_BT) if d_logp_BT is None else d_logp_BT
  arrays = _Columns(hidden_BTD, token_BT, lse_BT, d_logp_BT, d_entropy_BT, entropy_BT)
  used = -(-columns // chunk)

  def add_block(grads, k):
    head = _block(head_VD, k, block, hidden_BTD.dtype)
    return _add_block(grads, arrays, head, temperature, chunk, used), None

  zeros_VD = jnp.zeros(head_VD.shape, jnp.float32 if sharded else dtype)
  zeros = jnp.zeros(hidden_BTD.shape, jnp.float32), zeros_VD if trained else None
  (d_hidden_BTD, d_head_VD), _ = lax.scan(add_block, zeros, jnp.arange(blocks))
  d_hidden_BTD = d_hidden_BTD.astype(hidden_BTD.dtype)
  # Each device has the part from its vocabulary; hidden states need the sum of parts.
  if sharded:
    d_hidden_BTD = lax.psum(d_hidden_BTD, 'tensor')
  if d_head_VD is None:
    return d_hidden_BTD, None
  if sharded:  # reverses `_share` and sums over the rows of other devices
    d_head_VD = lax.psum_scatter(d_head_VD, 'fsdp', scatter_dimension=1, tiled=True)
    d_head_VD = lax.psum(d_head_VD, 'data')
  return d_hidden_BTD, d_head_VD.astype(dtype)
