"""Computes log-probability and entropy of given tokens without the [B, T, V] logits.

logprob_tiles.py reduces the logits to three floats per token, forward and backward.
Under a mesh each device runs the tiles of its shard of rows and vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import layers, logprob_tiles, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.logprob_tiles import Tile
from bapo_jax.models.packing import Cells
from bapo_jax.types import TokenStats, Tree


def token_stats(
  hidden_BTD: Array,
  head_VD: Array,
  token_BT: Array,
  temperature: float | Array,
  *,
  tile: Tile = Tile(),
  columns: Array | None = None,
) -> TokenStats:
  """Returns log-probability, entropy and covariance of token_BT: float32, in nats.

  Log-probability and entropy propagate exact gradients to hidden states and head. A
  loss without the entropy does not pay for its gradient. The covariance and the
  temperature have no gradient. A token outside the vocabulary has log-probability -inf.

  Args:
    hidden_BTD: final hidden states; the one in column t predicts the token in column t.
    temperature: divides the logits, as in sampling.
    tile: maximum columns of T and rows of the head that are projected at once.
    columns: i32, number of leading columns to score; later tiles cost nothing and
      give 0. None stands for all columns.

  Example: eight equal words.

    >>> import jax.numpy as jnp
    >>> token_BT = jnp.asarray([[3, 5]])
    >>> stats = token_stats(jnp.ones((1, 2, 4)), jnp.ones((8, 4)), token_BT, 1.0)
    >>> stats.logp_BT.round(3).tolist(), stats.entropy_BT.round(3).tolist()
    ([[-2.0789999961853027, -2.0789999961853027]], ...)
  """
  T = hidden_BTD.shape[1]
  chunks, chunk = logprob_tiles.split(T, tile.columns, logprob_tiles.COLUMN_STEP)
  if pad := chunks * chunk - T:
    hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
    token_BT = jnp.pad(token_BT, ((0, 0), (0, pad)))
  columns = jnp.int32(T) if columns is None else columns
  logp_BT, entropy_BT, covariance_BT = _token_logprobs(
    Tile(chunk, tile.rows),
    hidden_BTD,
    head_VD,
    token_BT,
    jnp.float32(temperature),
    columns,
  )
  covariance_BT = jax.lax.stop_gradient(covariance_BT)
  return TokenStats(logp_BT[:, :T], entropy_BT[:, :T], covariance_BT[:, :T])


def sequence_stats(
  params: Tree,
  tokens_BT: Array,
  spec: transformer.ModelSpec,
  temperature: float | Array,
) -> TokenStats:
  """Scores each token of whole rows; the first token, never predicted, gets zeros."""
  hidden_BTD = layers.forward(params, tokens_BT, spec)
  # The last column scores the first token and is dropped: cheaper than a copy of the
  # other columns.
  target_BT = jnp.roll(tokens_BT, -1, axis=1)
  stats = token_stats(hidden_BTD, transformer.head(params), target_BT, temperature)
  # Column t-1 moves to column t; column 0 is 0.
  return jax.tree.map(lambda x_BT: jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0))), stats)


def packed_stats(
  params: Tree,
  cells: Cells,
  spec: transformer.ModelSpec,
  temperature: float | Array,
  *,
  patch_XD: Array | None = None,
  schedule: Schedule = Schedule(),
) -> TokenStats:
  """Returns log-probability, entropy and covariance of each target of packed rows.

  The arrays [R, T] are 0 in cells without a target. To save memory, each device moves
  cells with a target to the front and projects them to the vocabulary in tiles of
  schedule.tile_mib. `patch_XD`: embedded merged patches, indexed by cells.places.
  """
  x_RTD = layers.embed_rows(params, cells.tokens_RT, spec)
  if cells.places is None or patch_XD is None:
    turns = layers.rotations(cells.position_RT, spec)
  else:
    x_RTD = layers.embed_patches(x_RTD, cells.places.merged_BT, patch_XD)
    turns = layers.rotations(cells.places.parts_BT3, spec, by_parts=True)
  hidden_RTD, agree_RT = layers.through(
    params,
    x_RTD,
    turns,
    spec,
    cells.row_RT,
    cells.routes_RTX,
    shared=cells.shared,
    schedule=schedule,
  )
  scored = _scored(hidden_RTD, transformer.head(params), cells, temperature, schedule)
  if agree_RT is None:
    return scored
  return scored._replace(agree_BT=jnp.where(cells.wanted_RT, agree_RT, 0))


def _scored(
  hidden_RTD: Array,
  head_VD: Array,
  cells: Cells,
  temperature: float | Array,
  schedule: Schedule,
) -> TokenStats:
  """Scores the cells with a target; each device moves its own to the front first."""
  R, T = cells.tokens_RT.shape
  shards = sharding.ambient_row_shards()
  shards = 1 if R % shards else shards

  def of_device(x):  # [R, T, ...] -> [shards, cells, ...]
    return x.reshape(shards, -1, *x.shape[2:])

  wanted_SX = of_device(cells.wanted_RT)
  target_SX = of_device(cells.target_RT)
  order_SX = jnp.argsort(~wanted_SX, axis=1, stable=True)
  mesh = sharding.ambient()
  rows = head_VD.shape[0] // (mesh.shape['tensor'] if mesh else 1)
  stats = token_stats(
    jnp.take_along_axis(of_device(hidden_RTD), order_SX[..., None], 1),
    head_VD,
    jnp.take_along_axis(target_SX, order_SX, 1),
    temperature,
    tile=logprob_tiles.largest(schedule.tile_mib, rows),
    columns=wanted_SX.sum(1, dtype=jnp.int32).max(),
  )
  back_SX = jnp.argsort(order_SX, axis=1)

  def moved_back(x_SX):
    x_RT = jnp.take_along_axis(x_SX, back_SX, 1).reshape(R, T)
    return jnp.where(cells.wanted_RT, x_RT, 0)

  return jax.tree.map(moved_back, stats)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(tile, *args):
  return _over_mesh(logprob_tiles.forward, tile, *args)[:3]


def _token_logprobs_forward(tile, *args):
  trained = () if args[1].perturbed else None  # a frozen head needs no gradient
  args = tuple(arg.value for arg in args)
  *stats, lse_BT = _over_mesh(logprob_tiles.forward, tile, *args)
  return tuple(stats), ((*args, lse_BT, stats[1]), trained)


def _token_logprobs_backward(tile, residuals, cotangents):
  unused = jax.custom_derivatives.SymbolicZero
  wanted = (None if type(d) is unused else d for d in cotangents[:2])
  args, trained = residuals
  backward = functools.partial(logprob_tiles.backward, trained=trained is not None)
  grads = _over_mesh(backward, tile, *args, *wanted)
  return (*grads, None, None, None)


_token_logprobs.defvjp(
  _token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True
)


def _over_mesh(function: Callable[..., Any], tile: Tile, *args):
  """Runs a function on shards of the mesh, or on whole arrays without a mesh."""
  mesh = sharding.ambient()
  hidden_BTD, head_VD = args[:2]
  tiled = functools.partial(function, tile=tile)
  head = P('tensor', 'fsdp')
  if mesh is None or (
    hidden_BTD.shape[0] % sharding.row_shards(mesh)
    or any(n % mesh.shape[axis] for n, axis in zip(head_VD.shape, head, strict=True))
  ):
    return tiled(*args, sharded=False)
  rows = P(sharding.ROWS)
  return jax.shard_map(
    functools.partial(tiled, sharded=True),
    # All arguments but the head, the temperature and `columns` are split by rows.
    in_specs=(rows, head, rows, P(), P(), *[rows] * (len(args) - 5)),
    out_specs=rows if function is logprob_tiles.forward else (rows, head),
    check_vma=False,
  )(*args)
