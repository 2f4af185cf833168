"""Rows packed into bins of one shape: a pass computes what is wanted, and little else.

1. `shape_of` fixes the bins of a batch, so that one program serves every batch;
2. `pack` puts each wanted row into the first bin with room for it, the longest first;
3. `Packed.cells` are the tokens of one micro-batch of bins, with the position and the
   row of each; `Packed.unpack` moves what was computed for them back to whole rows.

A text in a bin sees itself alone (`attention.causal`), at the positions that it has in
its row: packing changes no number but the order of sums. The letters of a micro-batch
are R bins of T cells; the batch has B rows of T tokens.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from bapo_jax import sharding
from bapo_jax.models.transformer import ModelSpec

# Of the products of a layer, those of scores and values in a bin with several rows.
ATTENTION = 0.02


class Shape(NamedTuple):
  """Of all bins that a batch can need; fixed, so that one program is compiled."""

  micro_batches: int  # the most of them
  bins: int  # R of each
  width: int  # cells of a bin


class Places(NamedTuple):
  """Of rows, or of cells, with pictures among their tokens."""

  parts_BT3: Int32[Array, 'B T 3']  # time, row and column of each token
  merged_BT: Int32[
    Array, 'B T'
  ]  # merged patch in its place, of all; -1: a text's token


class Cells(NamedTuple):
  """A micro-batch of bins."""

  tokens_RT: Int32[Array, 'R T']  # what the model reads; 0 where nothing is
  position_RT: Int32[Array, 'R T']  # column in its own row
  row_RT: Int32[Array, 'R T']  # row of the batch; -1 where nothing is
  target_RT: Int32[Array, 'R T']  # the next token of its row
  wanted_RT: Bool[Array, 'R T']  # statistics of the target are wanted
  places: Places | None = None  # [R, T], where prompts have pictures


class Packed(NamedTuple):
  """A batch of rows, and the bin in which each is computed."""

  tokens_BT: Int32[Array, 'B T']
  wanted_BT: Bool[Array, 'B T']  # tokens whose statistics are wanted; none in column 0
  shape: Shape
  bin_B: Int32[Array, ' B']  # bin of each row; -1: the row is not computed
  start_B: Int32[Array, ' B']  # its first cell in that bin
  length_B: Int32[Array, ' B']  # its cells: the tokens before its last wanted one
  used: Int32[Array, '']  # micro-batches with a row in them: the first ones
  places: Places | None = None  # of the rows' tokens, where prompts have pictures

  def mine(self, n: Array | int) -> Array:
    """bool [B]: the rows of micro-batch n."""
    return (self.bin_B >= 0) & (self.bin_B // self.shape.bins == n)

  def cells(self, n: Array | int) -> Cells:
    """Micro-batch n."""
    B, T = self.tokens_BT.shape
    index_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    nothing = jnp.full(math.prod(self.shape), -1, jnp.int32)
    all_cells = nothing.at[self._cell_BT()].set(index_BT, mode='drop')
    size = self.shape.bins * self.shape.width
    at_RT = jax.lax.dynamic_slice_in_dim(all_cells, n * size, size)
    at_RT = at_RT.reshape(self.shape[1:])
    filled_RT, at_RT = at_RT >= 0, jnp.maximum(at_RT, 0)
    tokens, wanted = self.tokens_BT.ravel(), self.wanted_BT.ravel()
    return Cells(
      tokens_RT=jnp.where(filled_RT, tokens[at_RT], 0),
      position_RT=jnp.where(filled_RT, at_RT % T, 0),
      row_RT=jnp.where(filled_RT, at_RT // T, -1),
      target_RT=jnp.where(filled_RT, tokens[at_RT + 1], 0),
      wanted_RT=filled_RT & wanted[at_RT + 1],
      places=self._places(at_RT, filled_RT),
    )

  def _places(self, at_RT: Array, filled_RT: Array) -> Places | None:
    """Of the cells that hold these tokens of all rows."""
    if self.places is None:
      return None
    parts_X3, merged_X = self.places.parts_BT3.reshape(-1, 3), self.places.merged_BT
    return Places(
      jnp.where(filled_RT[..., None], parts_X3[at_RT], 0),
      jnp.where(filled_RT, merged_X.ravel()[at_RT], -1),
    )

  def unpack(self, x_RT: Array, n: Array | int) -> Array:
    """What the cells of micro-batch n say of their targets, at those [B, T]; else 0."""
    at_BT = self._cell_BT() - n * x_RT.size
    inside_BT = (at_BT >= 0) & (at_BT < x_RT.size)
    x_BT = jnp.where(inside_BT, x_RT.ravel()[jnp.clip(at_BT, 0, x_RT.size - 1)], 0)
    return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))

  def _cell_BT(self) -> Array:
    """The cell of each token among those of all bins; their number: it has none."""
    column_T = jnp.arange(self.tokens_BT.shape[1])[None]
    cell_BT = (self.bin_B * self.shape.width + self.start_B)[:, None] + column_T
    inside_BT = (column_T < self.length_B[:, None]) & (self.bin_B >= 0)[:, None]
    return jnp.where(inside_BT, cell_BT, math.prod(self.shape))


def widest(spec: ModelSpec) -> int:
  """Cells of a bin above which it scores too many pairs of tokens that are no pair.

  Rows of 60 % of T do not share a bin of T cells, and do share one of 5 T; but its
  attention costs 5 times as much.
  """
  D, H, K, C = spec.width, spec.heads, spec.kv_heads, spec.head_width
  weights = 2 * D * (H + K) * C + 3 * D * spec.ffn
  return int(ATTENTION * weights / (2 * H * C))


def shape_of(
  rows: int,
  length: int,
  micro_batches: int,
  shards: int = 1,
  *,
  width: int = 0,
  packed: bool = True,
) -> Shape:
  """Bins for `rows` rows of `length` tokens, all wanted: the worst case.

  A bin of n lengths takes n rows of any length, so that ceil(rows / n) are enough.

  Args:
    micro_batches: the most parts of the batch, computed one after the other; no more
      than leave a row to every device.
    shards: devices over which the bins of a micro-batch are split.
    width: most cells of a bin, if it holds several lengths; see `widest`.
    packed: False: a bin to each row.
  """
  micro_batches = min(micro_batches, -(-rows // shards))
  # No more rows to a bin than leave one to every device and micro-batch.
  fair = -(-rows // (shards * micro_batches))
  each = max(1, min(width // length, fair)) if packed else 1
  bins = -(-rows // (each * micro_batches))
  return Shape(micro_batches, -(-bins // shards) * shards, each * length)


def pack(
  tokens_BT: Array,
  wanted_BT: Array,
  micro_batches: int,
  *,
  width: int = 0,
  packed: bool = True,
) -> Packed:
  """First fit decreasing: the rows that have a wanted token, the longest first.

  Args:
    wanted_BT: bool, tokens whose statistics are wanted; none in column 0.
    micro_batches, width: see `shape_of`.
    packed: False: every row, whole, in the bin of its own number, all tokens wanted.
  """
  B, T = tokens_BT.shape
  shards = sharding.ambient_row_shards()
  shape = shape_of(B, T, micro_batches, shards, width=width, packed=packed)
  if not packed:
    row_B = jnp.arange(B, dtype=jnp.int32)
    bins = row_B, jnp.zeros_like(row_B), jnp.full_like(row_B, T - 1)
    all_BT = jnp.broadcast_to(jnp.arange(T) > 0, wanted_BT.shape)
    return Packed(tokens_BT, all_BT, shape, *bins, jnp.int32(-(-B // shape.bins)))
  length_B = jnp.where(wanted_BT, jnp.arange(T, dtype=jnp.int32), 0).max(1)
  order_B = jnp.argsort(-length_B, stable=True)
  free_K = jnp.full(math.prod(shape[:2]), shape.width, jnp.int32)

  def place(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    free_K, bin_B, start_B = state
    row = order_B[i]
    first = jnp.argmax(free_K >= length_B[row]).astype(jnp.int32)
    start_B = start_B.at[row].set(shape.width - free_K[first])
    return free_K.at[first].add(-length_B[row]), bin_B.at[row].set(first), start_B

  nowhere_B = jnp.full(B, -1, jnp.int32)
  state = free_K, nowhere_B, nowhere_B
  free_K, bin_B, start_B = jax.lax.fori_loop(0, B, place, state)
  bin_B = jnp.where(length_B > 0, bin_B, -1)
  used = -(-(free_K < shape.width).sum(dtype=jnp.int32) // shape.bins)
  return Packed(tokens_BT, wanted_BT, shape, bin_B, start_B, length_B, used)
