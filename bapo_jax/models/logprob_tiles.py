"""Log-probability, entropy, a covariance and gradients on one device, tile by tile.

A chunk of columns meets a block of the vocabulary, is reduced to a few numbers per
token and dropped, and is computed again in the backward pass.

1. `forward` reduces each tile to its maximum, its sums and the chosen logit; `_combine`
   makes one softmax of them;
2. `backward` makes the gradient of a tile's logits. The head's is summed in float32
   whatever the head is in: a bfloat16 sum over 128 chunks is off by 1.3 %;
3. under a mesh (`sharded`) the head is gathered over fsdp before the tiles and its
   gradient scattered after them; no tile waits for another device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def _gather(head_VD: Array, dtype: jax.typing.DTypeLike, sharded: bool) -> Array:
  """The head that this device multiplies by: its share of V, the whole of D."""
  if not sharded or jax.lax.axis_size('fsdp') == 1:
    return head_VD  # cast where it is used
  return jax.lax.all_gather(head_VD.astype(dtype), 'fsdp', axis=1, tiled=True)


def _first(head_VD: Array, sharded: bool) -> int | Array:
  """The first token of this device's share of the vocabulary."""
  return jax.lax.axis_index('tensor') * head_VD.shape[0] if sharded else 0


def num_blocks(V: int, block: int) -> int:
  """Number of equal parts of at most `block` rows that V divides into; 1 if none."""
  least = -(-V // block)
  return next((n for n in range(least, 8 * least) if V % n == 0), 1)


def _cut(x: Array, i: int | Array, size: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _block_of(
  head_VD: Array, i: int | Array, size: int, dtype: jax.typing.DTypeLike
) -> Array:
  """Block i of the head's rows, in the dtype of its products.

  Before the cast the block is multiplied by a one that XLA cannot see through: without
  it the cast moves out of the loops and all of a float32 head is copied, 1 GiB for the
  7B model's.
  """
  head_vD = _cut(head_VD, i, size, 0)
  if head_vD.dtype == dtype:
    return head_vD
  return (head_vD * jax.lax.optimization_barrier(jnp.ones((), head_vD.dtype))).astype(
    dtype
  )


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
) -> tuple[Array, Array, Array, Array]:
  """(logp_BT, entropy_BT, covariance_BT, lse_BT), see `types.TokenStats`.

  lse is the logarithm of the softmax's divisor.

  Args:
    columns: i32, the first ones that are wanted; 0 in chunks without any of them.
    sizes: (columns, most rows of the head) of a tile; the columns divide T.
    sharded: the arrays are one device's shards, within `jax.shard_map`.
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
    found = _reduced(logits_Btv, token_Bt - j % blocks * block)
    return tuple(
      jax.lax.dynamic_update_index_in_dim(all_jBt, x_Bt, j, 0)
      for all_jBt, x_Bt in zip(tiles, found, strict=True)
    )

  nothing = jnp.zeros((chunks * blocks, hidden_BTD.shape[0], chunk), jnp.float32)
  used = -(-columns // chunk)
  tiles = jax.lax.fori_loop(0, used * blocks, reduce_tile, (nothing,) * 6)
  # [chunks * blocks, B, chunk] -> [blocks, B, T]
  most, total, spread, square, square_spread, chosen = (
    jnp.moveaxis(x.reshape(chunks, blocks, -1, chunk), 0, 2).reshape(
      blocks, *token_BT.shape
    )
    for x in tiles
  )
  logp_BT, entropy_BT, covariance_BT, lse_BT = (
    jnp.where(jnp.arange(token_BT.shape[1])[None] < used * chunk, x_BT, 0)
    for x_BT in _combine(most, total, spread, square, square_spread, chosen, sharded)
  )
  return logp_BT, entropy_BT, covariance_BT, lse_BT


def _reduced(logits_Btv: Array, at_Bt: Array) -> tuple[Array, ...]:
  """What `_combine` wants of a tile: its maximum, four sums, and the chosen logit.

  Args:
    at_Bt: the token to score, as a column of the tile; outside of it the chosen
      logit is -inf.
  """
  most_Bt = logits_Btv.max(-1)
  below_Btv = logits_Btv - most_Bt[..., None]
  share_Btv = jnp.exp(below_Btv)
  block = logits_Btv.shape[-1]
  logit_Bt1 = jnp.take_along_axis(
    logits_Btv, jnp.clip(at_Bt, 0, block - 1)[..., None], -1
  )
  chosen_logit_Bt = jnp.where(
    (at_Bt >= 0) & (at_Bt < block), logit_Bt1[..., 0], -jnp.inf
  )
  square_Btv = share_Btv**2
  sums = [
    x_Btv.sum(-1)
    for part_Btv in (share_Btv, square_Btv)
    for x_Btv in (part_Btv, part_Btv * below_Btv)
  ]
  return most_Bt, *sums, chosen_logit_Bt


def _combine(
  most_bBT: Array,
  sum_bBT: Array,
  spread_bBT: Array,
  square_bBT: Array,
  square_spread_bBT: Array,
  chosen_logit_bBT: Array,
  sharded: bool,
) -> tuple[Array, Array, Array, Array]:
  """One softmax of the blocks of this device and the shards of all devices.

  All terms are relative to the maximum, so that no two large numbers are subtracted.

  Args:
    most_bBT: maximum of each block's logits.
    sum_bBT: sum of exp(logit - most).
    spread_bBT: sum of exp(logit - most) * (logit - most).
    square_bBT, square_spread_bBT: the same sums of exp(logit - most)^2.
    chosen_logit_bBT: logit of the token to score; -inf outside its block.
  """
  top_BT = most_bBT.max(0)
  top_BT = jax.lax.pmax(top_BT, 'tensor') if sharded else top_BT
  fall_bBT = most_bBT - top_BT[None]
  chosen_bBT = jnp.where(
    jnp.isinf(chosen_logit_bBT), 0, chosen_logit_bBT - top_BT[None]
  )
  scale_bBT = jnp.exp(fall_bBT)
  spread_bBT = scale_bBT * (spread_bBT + fall_bBT * sum_bBT)
  square_spread_bBT = scale_bBT**2 * (square_spread_bBT + fall_bBT * square_bBT)
  parts = scale_bBT * sum_bBT, spread_bBT, scale_bBT**2 * square_bBT, square_spread_bBT
  sums = tuple(x.sum(0) for x in (*parts, chosen_bBT))
  sums = jax.lax.psum(sums, 'tensor') if sharded else sums
  sum_BT, spread_BT, square_BT, square_spread_BT, chosen_BT = sums
  log_sum_BT, mean_BT = jnp.log(sum_BT), spread_BT / sum_BT
  # log pi + H of a word is (logit - top) - mean, so S needs no second pass.
  covariance_BT = (square_spread_BT - mean_BT * square_BT) / sum_BT**2
  return (
    chosen_BT - log_sum_BT,
    log_sum_BT - mean_BT,
    covariance_BT,
    top_BT + log_sum_BT,
  )


class _Columns(NamedTuple):
  """Arrays that the backward pass reads chunk by chunk; d_x is the gradient by x."""

  hidden_BTD: Array
  token_BT: Array
  lse_BT: Array
  d_logp_BT: Array
  d_entropy_BT: Array | None  # None: the loss does not depend on the entropy
  entropy_BT: Array

  def d_logits(
    self, i: Array, chunk: int, head_vD: Array, id_v: Array, temperature: Array
  ) -> tuple[Array, Array]:
    """(hidden_BtD, d_logits_Btv) of the tile of chunk i and the tokens id_v."""
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
  """(d_hidden_BTD with one block's share added, d_head_vD), chunk by chunk.

  Args:
    used: i32, chunks with a wanted column.
    trained: of the head; d_head_vD is None where it is frozen.
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
  """The gradients of hidden_BTD and head_VD, in their dtypes.

  Block after block of the vocabulary, all chunks each: a block's share of the head's
  gradient is summed in float32 and written once.

  Args:
    columns: as for `forward`; the others' gradients are 0.
    d_logp_BT, d_entropy_BT: gradients by the outputs; None: the loss does not depend
      on that one.
    sizes, sharded: as for `forward`.
    trained: of the head; its gradient is None where it is frozen.
  """
  dtype = head_VD.dtype
  head_VD = _gather(head_VD, hidden_BTD.dtype, sharded)
  chunk, blocks = sizes[0], num_blocks(head_VD.shape[0], sizes[1])
  block = head_VD.shape[0] // blocks
  token_BT = token_BT - _first(head_VD, sharded)
  d_logp_BT = jnp.zeros_like(lse_BT) if d_logp_BT is None else d_logp_BT
  given = _Columns(hidden_BTD, token_BT, lse_BT, d_logp_BT, d_entropy_BT, entropy_BT)
  used = -(-columns // chunk)

  def add_block(d_hidden_BTD, k):
    head_vD = _block_of(head_VD, k, block, hidden_BTD.dtype)
    id_v = k * block + jnp.arange(block)
    d_hidden_BTD, d_head_vD = _block_gradient(
      given, head_vD, id_v, temperature, d_hidden_BTD, chunk, used, trained
    )
    if d_head_vD is None:
      return d_hidden_BTD, None
    return d_hidden_BTD, d_head_vD.astype(jnp.float32 if sharded else dtype)

  zeros_BTD = jnp.zeros(hidden_BTD.shape, jnp.float32)
  d_hidden_BTD, d_head_bvD = jax.lax.scan(add_block, zeros_BTD, jnp.arange(blocks))
  d_hidden_BTD = d_hidden_BTD.astype(hidden_BTD.dtype)
  if sharded:
    d_hidden_BTD = jax.lax.psum(d_hidden_BTD, 'tensor')
  if d_head_bvD is None:
    return d_hidden_BTD, None
  d_head_VD = d_head_bvD.reshape(head_VD.shape)
  if sharded:
    d_head_VD = jax.lax.psum_scatter(d_head_VD, 'fsdp', scatter_dimension=1, tiled=True)
    d_head_VD = jax.lax.psum(d_head_VD, 'data')
  return d_hidden_BTD, d_head_VD.astype(dtype)
