"""Packs rows into bins of one shape, so that little of a pass is spent on padding.

A text attends only to itself within its bin (`attention.attend`) and keeps the
positions of its row, so packing changes results only through the order of summation.
Rows of one group may share the cells of their prompt: a unit of such rows is placed as
one, [prompt, response, response, ...], and every response attends to the prompt too.
Axes: a micro-batch has R bins of T cells; the batch has B rows of T tokens, in U units
of G rows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Int32, UInt

from bapo_jax import sharding
from bapo_jax.models import attention
from bapo_jax.models.transformer import ModelSpec

# Attention's largest share of a layer's products in a bin of several rows.
ATTENTION = 0.02
# Time of a FLOP of `attention.blockwise`, softmax included, over that of one of other
# products on a CPU: 2.1 and 2.6 by the embedded policy with units of 8 and 4.
SLOWER = 2
# Counted share of the time above which units of rows are no faster: they fill bins less
# well, and shorter rows repeat less. Counts of .93 took .96 to 1.04.
WORTH = 0.9


class Shape(NamedTuple):
  """The number and width of bins that suffice for any batch: one compiled program."""

  micro_batches: int  # the maximum for any batch
  bins: int  # per micro-batch, R
  width: int  # cells of a bin


class Unit(NamedTuple):
  """Consecutive rows of a group that share their prompt in a bin; 1: no sharing."""

  rows: int = 1
  response: int = 0  # the maximum tokens of a response

  def cells(self, length: int) -> int:
    """Returns the cells that suffice for a unit of rows of up to `length` tokens."""
    return length + (self.rows - 1) * self.response


class Places(NamedTuple):
  """Positions and patches of tokens, in rows or in cells, if prompts have pictures."""

  parts_BT3: Int32[Array, 'B T 3']  # time, row and column of each token
  merged_BT: Int32[Array, 'B T']  # index among all merged patches; -1: a text token


class Cells(NamedTuple):
  tokens_RT: Int32[Array, 'R T']  # the input of the model; 0 in empty cells
  position_RT: Int32[Array, 'R T']  # column in the row; 0 in empty cells
  row_RT: Int32[Array, 'R T']  # row of the batch; -1 in empty cells
  target_RT: Int32[Array, 'R T']  # the next token of the row
  wanted_RT: Bool[Array, 'R T']  # True where the target is scored
  places: Places | None = None  # [R, T]; None: prompts have no pictures
  routes_RTX: UInt[Array, 'R T X'] | None = None  # see types.Batch
  shared: attention.Shared | None = None  # the prompts of units; None: none is shared


class Prompts(NamedTuple):
  """Locates each row's shared columns, which are cells of one row of its unit."""

  owner_B: Int32[Array, ' B']  # the row that has these cells
  length_B: Int32[Array, ' B']  # the shared columns, from column 0
  start_B: Int32[Array, ' B']  # their first cell in the bin


class Packed(struct.PyTreeNode):
  """A batch of rows with the bin of each row; `shape` is static under jit."""

  tokens_BT: Int32[Array, 'B T']
  wanted_BT: Bool[Array, 'B T']  # True where a token is scored; False in column 0
  shape: Shape = struct.field(pytree_node=False)
  bin_B: Int32[Array, ' B']  # bin of each row; -1: the row is not computed
  start_B: Int32[Array, ' B']  # the cell of the row's column 0, if it is not shared
  length_B: Int32[Array, ' B']  # cells of the row: the tokens before its last target
  used: Int32[Array, '']  # number of micro-batches with rows; they come first
  places: Places | None = None  # of all tokens; None: prompts have no pictures
  routes_BTX: UInt[Array, 'B T X'] | None = None  # see types.Batch
  prompts: Prompts | None = None  # None: no prompt is shared

  def mine(self, n: Array | int) -> Array:
    """Returns a mask [B, 1] of the rows that belong to micro-batch n."""
    mine_B = (self.bin_B >= 0) & (self.bin_B // self.shape.bins == n)
    return mine_B[:, None]

  def cells(self, n: Array | int) -> Cells:
    """Gathers the cells of micro-batch n."""
    B, T = self.tokens_BT.shape
    # Scatter the flat index of every token into its cell; -1 stays in empty cells.
    index_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    empty = jnp.full(math.prod(self.shape), -1, jnp.int32)
    cell_BT = self._cell_BT()
    if shared := self.prompts:  # only the owner writes a shared cell
      owner_B1 = (shared.owner_B == jnp.arange(B))[:, None]
      own_BT = owner_B1 | (jnp.arange(T)[None] >= shared.length_B[:, None])
      cell_BT = jnp.where(own_BT, cell_BT, empty.size)
    all_cells = empty.at[cell_BT].set(index_BT, mode='drop')
    # Cut out the micro-batch, then gather what its cells need by these indices.
    size = self.shape.bins * self.shape.width
    at_RT = lax.dynamic_slice_in_dim(all_cells, n * size, size)
    at_RT = at_RT.reshape(self.shape[1:])
    filled_RT = at_RT >= 0
    at_RT = jnp.maximum(at_RT, 0)
    tokens = self.tokens_BT.ravel()
    wanted = self.wanted_BT.ravel()
    cells = Cells(
      tokens_RT=jnp.where(filled_RT, tokens[at_RT], 0),
      position_RT=jnp.where(filled_RT, at_RT % T, 0),
      row_RT=jnp.where(filled_RT, at_RT // T, -1),
      target_RT=jnp.where(filled_RT, tokens[at_RT + 1], 0),
      wanted_RT=filled_RT & wanted[at_RT + 1],
    )
    if self.routes_BTX is not None:
      none = jnp.iinfo(self.routes_BTX.dtype).max
      routes_CX = self.routes_BTX.reshape(B * T, -1)
      routes_RTX = jnp.where(filled_RT[..., None], routes_CX[at_RT], none)
      cells = cells._replace(routes_RTX=routes_RTX)
    if shared:
      row_RT = at_RT // T
      reads_RT = jnp.where(filled_RT, shared.owner_B[row_RT], -1)
      prompt_RT = filled_RT & (at_RT % T < shared.length_B[row_RT])
      reads = attention.Shared(reads_RT, jnp.where(prompt_RT, row_RT, -2))
      cells = cells._replace(shared=reads)
    if self.places is None:
      return cells
    parts_X3 = self.places.parts_BT3.reshape(-1, 3)
    merged_X = self.places.merged_BT
    parts_RT3 = jnp.where(filled_RT[..., None], parts_X3[at_RT], 0)
    merged_RT = jnp.where(filled_RT, merged_X.ravel()[at_RT], -1)
    return cells._replace(places=Places(parts_RT3, merged_RT))

  def unpack(self, x_RT: Array, n: Array | int) -> Array:
    """Gathers packed values of micro-batch n back to their targets [B, T]; 0 elsewhere.

    The value of a cell belongs to the next token of its row.
    """
    at_BT = self._cell_BT() - n * x_RT.size
    inside_BT = (at_BT >= 0) & (at_BT < x_RT.size)
    x_BT = jnp.where(inside_BT, x_RT.ravel()[jnp.clip(at_BT, 0, x_RT.size - 1)], 0)
    return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))

  def _cell_BT(self):
    """Returns the cell of each token over all bins; past the last if it has no cell."""
    column_T = jnp.arange(self.tokens_BT.shape[1])[None]
    cell_BT = (self.bin_B * self.shape.width + self.start_B)[:, None] + column_T
    if shared := self.prompts:
      in_prompt_BT = column_T < shared.length_B[:, None]
      cell_BT += jnp.where(in_prompt_BT, (shared.start_B - self.start_B)[:, None], 0)
    inside_BT = (column_T < self.length_B[:, None]) & (self.bin_B >= 0)[:, None]
    return jnp.where(inside_BT, cell_BT, math.prod(self.shape))


def cost(spec: ModelSpec, shape: Shape, is_shared: bool) -> float:
  """Estimates the time of a pass over all cells, in that of a cell's other products.

  In a bin of T cells a query attends to T / 2 keys on average.
  """
  channels = attention.width(spec.attention, spec.head_width, is_shared)
  attended = spec.heads * channels * shape.width
  return math.prod(shape) * (1 + SLOWER * attended / _weights(spec))


def fastest_unit(
  spec: ModelSpec,
  rows: int,
  length: int,
  micro_batches: int,
  shards: int,
  *,
  group_size: int,
  response: int,
  fits: Callable[[Unit], bool] = lambda unit: True,
) -> tuple[Unit, float]:
  """Returns the fastest unit of full rows, and its time over that without sharing.

  The first arguments are those of `shape_of`; `response` is the maximum tokens of a
  response, and the units of a group are equal. Rows share nothing if no unit `fits`.
  """

  def time(unit: Unit) -> float:
    units = rows // unit.rows
    shape = shape_of(
      units, unit.cells(length), micro_batches, shards, width=widest(spec)
    )
    return cost(spec, shape, unit.rows > 1)

  sizes = (n for n in range(2, group_size + 1) if group_size % n == 0)
  units = filter(fits, (Unit(n, response) for n in sizes))
  alone = Unit(1, response)
  unit = min([alone, *units], key=time)
  share = time(unit) / time(alone)
  return (unit, share) if share < WORTH else (alone, 1.0)


def widest(spec: ModelSpec) -> int:
  """Returns the widest bin whose attention is cheap compared with other products.

  Wide bins waste fewer cells: only one row of 0.6 T tokens fits into T cells, but eight
  such rows fit into 5 T cells. Attention then costs 5 times as much per cell, mostly
  between tokens of different rows.
  """
  return int(ATTENTION * _weights(spec) / (2 * spec.heads * spec.head_width))


def _weights(spec: ModelSpec) -> int:
  """Returns the number of weights of a layer that a token is multiplied by."""
  heads = spec.heads + spec.kv_heads
  return spec.width * (2 * heads * spec.head_width + 3 * spec.active_ffn)


def shape_of(
  rows: int,
  length: int,
  micro_batches: int,
  shards: int = 1,
  *,
  width: int = 0,
  packed: bool = True,
) -> Shape:
  """Returns the number and width of bins for `rows` rows of up to `length` tokens.

  The bins suffice for any such rows: a bin of n * length cells takes any n rows, so
  ceil(rows / n) bins of this width are enough.

  Args:
    micro_batches: desired number, reduced if a device would have no row.
    shards: devices that share the bins of a micro-batch.
    width: maximum cells of a bin of several rows; see `widest`.
    packed: whether a bin may contain several rows.
  """
  micro_batches = min(micro_batches, -(-rows // shards))
  # Limit the rows per bin, so that every device has a bin in every micro-batch.
  fair = -(-rows // (shards * micro_batches))
  per_bin = max(1, min(width // length, fair)) if packed else 1
  bins = -(-rows // (per_bin * micro_batches))
  return Shape(micro_batches, -(-bins // shards) * shards, per_bin * length)


def pack(
  tokens_BT: Array,
  wanted_BT: Array,
  micro_batches: int,
  *,
  width: int = 0,
  packed: bool = True,
  unit: Unit = Unit(),
  prefer_B: Array | None = None,
) -> Packed:
  """Packs the rows that have a target into bins, by first-fit decreasing.

  wanted_BT marks the targets and is False in column 0. Unless `packed`, row i fills
  bin i, and all tokens after column 0 are targets. Rows of a `unit` share a prompt, if
  possible that of a row in prefer_B.

  Example: two prompts of one token (1), with responses of three tokens and of one.

    >>> import jax.numpy as jnp
    >>> tokens_BT = jnp.asarray([[1, 5, 6, 7], [1, 8, 0, 0]])
    >>> packed = pack(tokens_BT, tokens_BT > 1, micro_batches=1, width=4)
    >>> cells = packed.cells(0)
    >>> cells.tokens_RT[0].tolist(), cells.row_RT[0].tolist()
    ([1, 5, 6, 1], [0, 0, 0, 1])
    >>> cells.target_RT[0].tolist()
    [5, 6, 7, 8]
  """
  B, T = tokens_BT.shape
  shards = sharding.ambient_row_shards()
  units = B // unit.rows
  shape = shape_of(
    units, unit.cells(T), micro_batches, shards, width=width, packed=packed
  )
  if not packed:
    row_B = jnp.arange(B, dtype=jnp.int32)
    return Packed(
      tokens_BT=tokens_BT,
      wanted_BT=jnp.broadcast_to(jnp.arange(T) > 0, wanted_BT.shape),
      shape=shape,
      bin_B=row_B,
      start_B=jnp.zeros_like(row_B),
      length_B=jnp.full_like(row_B, T - 1),
      used=jnp.int32(-(-B // shape.bins)),
    )
  # The last target, in column t, is predicted from t tokens.
  length_B = jnp.where(wanted_BT, jnp.arange(T, dtype=jnp.int32), 0).max(1)
  prompts, length_U = None, length_B
  if unit.rows > 1:
    prompts, length_U = _shared(tokens_BT, wanted_BT, length_B, prefer_B, unit)
  free_K, bin_B, start_B = _first_fit(length_U, shape)
  if prompts:
    bin_B, start_B = (jnp.repeat(x_U, unit.rows) for x_U in (bin_B, start_B))
    prompts = prompts._replace(start_B=start_B)
    start_B += _before(length_B - prompts.length_B, unit)
  # Rows without a target were placed with length 0, but are not computed.
  bin_B = jnp.where(length_B > 0, bin_B, -1)
  used = -(-(free_K < shape.width).sum(dtype=jnp.int32) // shape.bins)
  return Packed(
    tokens_BT, wanted_BT, shape, bin_B, start_B, length_B, used, prompts=prompts
  )


def _first_fit(length_U: Array, shape: Shape) -> tuple[Array, Array, Array]:
  """Places units into bins, longest first; returns (free cells, bins, starts)."""
  order_U = jnp.argsort(-length_U, stable=True)
  free_K = jnp.full(math.prod(shape[:2]), shape.width, jnp.int32)

  def place(i, state):
    free_K, bin_U, start_U = state
    at = order_U[i]
    # argmax of booleans: the first bin with room. `shape_of` guarantees such a bin.
    k = jnp.argmax(free_K >= length_U[at]).astype(jnp.int32)
    start_U = start_U.at[at].set(shape.width - free_K[k])
    return free_K.at[k].add(-length_U[at]), bin_U.at[at].set(k), start_U

  none_U = jnp.full(len(length_U), -1, jnp.int32)
  state = free_K, none_U, none_U
  return lax.fori_loop(0, len(length_U), place, state)


def _before(own_B: Array, unit: Unit) -> Array:
  """Returns the cells of a unit's earlier responses, which follow each other."""
  own_UG = jnp.maximum(own_B, 0).reshape(-1, unit.rows)
  return (own_UG.cumsum(1, dtype=jnp.int32) - own_UG).ravel()


def _shared(
  tokens_BT: Array,
  wanted_BT: Array,
  length_B: Array,
  prefer_B: Array | None,
  unit: Unit,
) -> tuple[Prompts, Array]:
  """Returns the prompts of units, without their starts, and the cells of each unit."""
  T = tokens_BT.shape[1]
  computed_UG = (length_B > 0).reshape(-1, unit.rows)
  rank_UG = computed_UG.astype(jnp.int32)
  if prefer_B is not None:
    rank_UG += computed_UG & prefer_B.reshape(computed_UG.shape)
  owner_U = jnp.argmax(rank_UG, axis=1)
  tokens_UGT = tokens_BT.reshape(*computed_UG.shape, T)
  same_UGT = tokens_UGT == jnp.take_along_axis(tokens_UGT, owner_U[:, None, None], 1)
  # The last token of the prompt predicts another token in each response, so it is a
  # cell of each: every cell has one target, and the statistics of cells are those of
  # rows. That costs one cell per response.
  wanted_UGT = wanted_BT.reshape(tokens_UGT.shape)
  until_UG = jnp.argmax(wanted_UGT, axis=2) - 1
  until_UG = jnp.minimum(until_UG, same_UGT.cumprod(2).sum(2))
  shared_U = jnp.where(computed_UG, until_UG, T).min(1).astype(jnp.int32)
  shared_U = jnp.where(computed_UG.any(1), shared_U, 0)
  own_UG = jnp.where(computed_UG, length_B.reshape(computed_UG.shape), 0)
  own_UG -= computed_UG * shared_U[:, None]
  owner_B = jnp.arange(len(shared_U)) * unit.rows + owner_U
  owner_B, shared_B = (
    jnp.repeat(x_U.astype(jnp.int32), unit.rows) for x_U in (owner_B, shared_U)
  )
  return Prompts(owner_B, shared_B, shared_B), shared_U + own_UG.sum(1, dtype=jnp.int32)
