"""Computes the attention of decoding from the live columns of each slot alone.

A slot's query attends to the first `length` columns of its cache, in a layer with a
window to the last `window` of these. `attend` runs a Pallas kernel that reads them in
blocks of columns, and no block before the first or past the last:

1. `fold` adds a block of keys and values to a running softmax, in float32;
2. on a TPU the grid has a step for each live block of each slot, with all key heads in
   a block, so that a step reads about a MiB (`_tpu`);
3. on a GPU a program reads a span of the columns of a slot and a key head in a loop,
   and the results of the spans are merged (`_gpu`). The programs also write the newest
   column, which costs a kernel per array otherwise.

The axis n counts the columns of a block, and G the query heads of a key head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models.attention import LANES
from bapo_jax.models.logprob_tiles import MASKED
from bapo_jax.models.scatter import KeysValues, put, put_values

STEP_BYTES = 2**20  # of keys and values that a step of the TPU kernel reads, about
MOST_COLUMNS = 1024  # per block of the TPU kernel
BLOCK = 64
# Columns per block and per program of the GPU kernel. Several programs per row keep the
# multiprocessors busy if few rows are long.
SPAN = 2048
SUBLANES = 16  # rows of a tile in bfloat16; also the fewest rows of a GPU's products

Softmax = tuple[Array, Array, Array]  # [G, 1] maximum, [G, 1] sum, [G, C] mixed values


def block_columns(heads: int, head_width: int, length: int, itemsize: int) -> int:
  """Returns the columns per block of the TPU kernel.

  A step with large blocks hides its own overhead, about a third of a microsecond; small
  blocks waste less, because a slot reads half a block too much on average.

  Args:
    heads: key heads of one device.
    length: columns of the cache, a multiple of LANES.
    itemsize: bytes of a number of the cache.
  """
  wanted = STEP_BYTES // (2 * heads * head_width * itemsize)
  sizes = range(LANES, min(wanted, MOST_COLUMNS, length) + 1, LANES)
  return max((n for n in sizes if length % n == 0), default=LANES)


def blocks(length_S: Any, n: int) -> Any:
  """Returns, for each slot, how many blocks of n columns the kernel reads."""
  return (length_S + n - 1) // n


def _last(length, n):
  """Returns the last live block, in a kernel: Python's // would ask for the device."""
  return lax.div(length - 1, np.int32(n))


def _first(length, n, window):
  """Returns the first live block, of n columns."""
  return lax.div(jnp.maximum(length - window, 0), np.int32(n)) if window else 0


def fold(
  softmax: Softmax,
  q_GC: Array,
  k_Cn: Array,
  v: Array,
  left: Array | int,
  axis: int = 0,
  first: Array | int | None = None,
) -> Softmax:
  """Adds a block to a running softmax; its first `left` columns are live.

  If `first` is not None, columns before it are not; it may be negative.
  `axis` is the axis of the columns in the values v, [n, C] or [C, n].

  The final mixed values divided by the sum are softmax(q k / sqrt(C)) v (Milakov and
  Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).
  """
  max_G1, sum_G1, mixed_GC = softmax
  G, C = q_GC.shape
  n = k_Cn.shape[1]
  column_Gn = lax.broadcasted_iota(jnp.int32, (G, n), 1)
  live_Gn = column_Gn < left
  if first is not None:
    live_Gn &= column_Gn >= first
  score_Gn = jnp.dot(q_GC, k_Cn, preferred_element_type=jnp.float32) * C**-0.5
  score_Gn = jnp.where(live_Gn, score_Gn, MASKED)
  new_max_G1 = jnp.maximum(max_G1, score_Gn.max(1, keepdims=True))
  weight_Gn = jnp.exp(score_Gn - new_max_G1)
  decay_G1 = jnp.exp(max_G1 - new_max_G1)
  new_GC = lax.dot_general(
    weight_Gn.astype(v.dtype),
    v,
    (((1,), (axis,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  sum_G1 = sum_G1 * decay_G1 + weight_Gn.sum(1, keepdims=True)
  return new_max_G1, sum_G1, mixed_GC * decay_G1 + new_GC


def attend(
  q_SHC: Array,
  new: KeysValues,
  cache: KeysValues,
  position_S: Array,
  length_S: Array,
  window: int = 0,
) -> tuple[Array, KeysValues]:
  """Writes a column to the cache and computes attention, on a TPU or a GPU.

  Other platforms emulate the TPU's kernel, for tests. Under a mesh each device runs the
  kernel on its slots and key heads.

  Args:
    new: keys and values of the column, [S, K, C].
    cache: [S, K, C, T] and [S, K, T, C]. T is a multiple of LANES; C is a power of two,
      16 or more.
    position_S: i32, below T: where the column is written.
    length_S: i32, the number of columns that the query attends to: position_S + 1, or 1
      if the result is not used.
    window: the number of last columns that the query attends to; 0: no limit.

  Returns:
    the mixed values [S, H, C], and the cache.
  """
  S, K = cache[0].shape[:2]

  def local(q_SHC, new, *args):
    S, K, C = new[0].shape
    mixed_SKGC, cache = lax.platform_dependent(
      q_SHC.reshape(S, K, -1, C),
      new,
      *args,
      tpu=functools.partial(_tpu, window=window),
      cuda=functools.partial(_gpu, window=window),
      default=functools.partial(_tpu, window=window, interpret=True),
    )
    return mixed_SKGC.reshape(q_SHC.shape), cache

  mesh = sharding.ambient()
  if mesh is not None:
    slots = None if S % sharding.row_shards(mesh) else sharding.ROWS
    by_head = P(slots, None if K % mesh.shape['tensor'] else 'tensor')
    local = jax.shard_map(
      local,
      in_specs=(by_head, by_head, by_head, P(slots), P(slots)),
      out_specs=by_head,
      check_vma=False,
    )
  return local(q_SHC, new, cache, position_S, length_S)


def _tpu(
  q_SKGC,
  new: KeysValues,
  cache: KeysValues,
  position_S,
  length_S,
  *,
  window=0,
  n=0,
  interpret=False,
):
  """Writes the column, then runs the kernel in blocks of n (default block_columns).

  The slots are in two halves, for the two cores of a v4 or v5p; see `_visits`.
  """
  from jax.experimental.pallas import tpu as pltpu

  k_SKCT = put(cache[0], new[0], position_S, 3)
  v_SKTC = put_values(cache[1], new[1], position_S)
  heads = q_SKGC.shape[2]  # rows of zeros fill the tiles
  q_SKGC = jnp.pad(q_SKGC, ((0, 0), (0, 0), (0, -heads % SUBLANES), (0, 0)))
  S, K, G, C = q_SKGC.shape
  T = k_SKCT.shape[3]
  n = n or block_columns(K, C, T, k_SKCT.dtype.itemsize)
  halves = 2 - S % 2
  steps = S // (2 - S % 2) * (T // n)  # most steps of a half
  slot_N, zero_S, most = _visits(length_S, halves, steps, n, window)

  def keys(half, i, slot_N, zero_S, length_S):
    slot = slot_N[half * steps + i]
    return slot, 0, 0, jnp.minimum(i - zero_S[slot], _last(length_S[slot], n))

  def by_slot(*at):
    return keys(*at)[0], 0, 0, 0

  def values(*at):
    return keys(*at) if turned else (*keys(*at)[:2], keys(*at)[3], 0)

  # XLA stores such values with the columns last (put_values), and copies nothing here.
  turned = C % LANES > 0
  v = v_SKTC.swapaxes(2, 3) if turned else v_SKTC
  mixed_SKGC = pl.pallas_call(
    functools.partial(_tpu_step, steps=steps, n=n, axis=int(turned), window=window),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(halves, most),
      in_specs=[
        pl.BlockSpec((1, K, G, C), by_slot),
        pl.BlockSpec((1, K, C, n), keys),
        pl.BlockSpec((1, K, C, n) if turned else (1, K, n, C), values),
      ],
      out_specs=pl.BlockSpec((1, K, G, C), by_slot),
      scratch_shapes=[pltpu.VMEM((K, G, x), jnp.float32) for x in (1, 1, C)],
    ),
    out_shape=jax.ShapeDtypeStruct((S, K, G, C), q_SKGC.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    interpret=interpret,
    name='ragged_decode',
  )(slot_N, zero_S, length_S, q_SKGC, k_SKCT, v)
  return mixed_SKGC[:, :, :heads], (k_SKCT, v_SKTC)


def _visits(length_S, halves, steps, n, window):
  """Plans the grid of the TPU kernel: a step for each live block of a half.

  Returns (the slot of each step [halves * steps], the step of block 0 of each slot [S],
  the number of steps of the half that has more). Steps past the last live block keep
  the last slot of their half, and its last block, which is not read again. Blocks
  before a window have no step: block 0 then has a step of earlier slots, or none.
  """
  count_S = blocks(length_S, n)
  if window:
    count_S -= _first(length_S, n, window)
  count_hS = count_S.reshape(halves, -1)
  end_hS = jnp.cumsum(count_hS, 1)
  # Step i of a half visits the slot after all slots that end at or before i.
  step_N = jnp.arange(steps)
  slots = count_hS.shape[1]
  slot_hN = (end_hS[:, None] <= step_N[None, :, None]).sum(2, dtype=jnp.int32)
  slot_hN = jnp.minimum(slot_hN, slots - 1)
  slot_hN += slots * jnp.arange(halves, dtype=jnp.int32)[:, None]
  zero_S = (end_hS - count_hS).ravel()
  if window:
    zero_S -= _first(length_S, n, window)
  return slot_hN.ravel(), zero_S, end_hS[:, -1].max()


def _tpu_step(slot_N, zero_S, length_S, q, k, v, out, *softmax, steps, n, axis, window):
  """Folds one block of a slot, all key heads, into the running softmax of the slot."""
  i = pl.program_id(1)
  slot = slot_N[pl.program_id(0) * steps + i]
  block = i - zero_S[slot]
  last = _last(length_S[slot], n)

  @pl.when(block == _first(length_S[slot], n, window))
  def _start():
    for x, value in zip(softmax, (MASKED, 0.0, 0.0), strict=True):
      x[...] = jnp.full(x.shape, value, x.dtype)

  @pl.when(block <= last)  # false for the steps of a half after its last block
  def _fold():
    for head in range(k.shape[1]):
      state = tuple(x[head] for x in softmax)
      left = length_S[slot] - block * n
      first = left - window if window else None
      state = fold(state, q[0, head], k[0, head], v[0, head], left, axis, first)
      for x, value in zip(softmax, state, strict=True):
        x[head] = value

  @pl.when(block == last)
  def _finish():
    _, sum_KG1, mixed_KGC = (x[...] for x in softmax)
    out[0] = (mixed_KGC / sum_KG1).astype(out.dtype)


def _gpu(
  q_SKGC,
  new: KeysValues,
  cache: KeysValues,
  position_S,
  length_S,
  *,
  window=0,
  n=BLOCK,
  span=SPAN,
  warps=4,
  stages=3,
  interpret=False,
):
  """Runs the GPU kernel in blocks of n columns; a program reads `span` columns."""
  from jax.experimental.pallas import triton

  S, K, G, C = q_SKGC.shape
  T = cache[0].shape[3]
  spans = -(-T // span)
  # Products have at least SUBLANES rows; those past G are not loaded or stored.
  rows = max(SUBLANES, pl.next_power_of_2(G))

  def whole(*shape):
    return pl.BlockSpec((None, None, *shape), lambda s, k, _: (s, k, 0, 0))

  by_slot = [pl.BlockSpec((None,), lambda s, *_: (s,))] * 2
  by_head = [whole(C, T), whole(T, C)]
  dtype = jnp.float32 if spans > 1 else q_SKGC.dtype
  # XLA computes an array in one kernel, but its parts in several.
  new_SKNC = jnp.concatenate([*(x[:, :, None] for x in new), q_SKGC], 2)
  lse_SKXG1, mixed_SKXGC, k_SKCT, v_SKTC = pl.pallas_call(
    functools.partial(_gpu_span, G=G, n=n, span=span, window=window),
    grid=(S, K, spans),
    in_specs=[*by_slot, whole(2 + rows, C), *by_head],
    out_specs=[
      *(
        pl.BlockSpec((None, None, None, rows, x), lambda *at: (*at, 0, 0))
        for x in (1, C)
      ),
      *by_head,
    ],
    out_shape=[
      jax.ShapeDtypeStruct((S, K, spans, G, 1), jnp.float32),
      jax.ShapeDtypeStruct((S, K, spans, G, C), dtype),
      *cache,
    ],
    input_output_aliases={3: 2, 4: 3},
    # Two blocks are loaded at a time, with two stages one, between products. Blocks of
    # 128 columns of heads of 128 would not fit RTX cards, which have 99 KiB for them.
    compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=interpret,
    name='ragged_decode',
  )(position_S, length_S, new_SKNC, *cache)
  mixed_SKGC = mixed_SKXGC[:, :, 0]
  if spans > 1:
    mixed_SKGC = (jax.nn.softmax(lse_SKXG1, 2) * mixed_SKXGC).sum(2)
  return mixed_SKGC.astype(q_SKGC.dtype), (k_SKCT, v_SKTC)


def _gpu_span(*refs, G, n, span, window):
  """Writes the newest column, and folds the live blocks of a span of one key head.

  The softmax of the first span starts from the newest column, so that no program reads
  what another writes. All spans write the same numbers.
  """
  from jax.experimental.pallas import triton

  position, length, new, k, v, lse, mixed, extended_k, extended_v = refs
  rows, C = mixed.shape
  k_C = new[0, :]
  v_C = new[1, :]
  extended_k[:, position[...]] = k_C
  extended_v[position[...], :] = v_C
  start = pl.program_id(2) * span
  left = length[...] - 1 - start
  real_R1 = jnp.arange(rows)[:, None] < G
  q_RC = triton.load(new.at[pl.ds(2, rows), :], mask=real_R1, other=0.0)
  score_RC = q_RC.astype(jnp.float32) * k_C.astype(jnp.float32)[None]
  score_R1 = score_RC.sum(1, keepdims=True) * C**-0.5
  v_RC = jnp.broadcast_to(v_C.astype(jnp.float32)[None], (rows, C))
  # MASKED: the first live block, or the merging of spans, gives the column no weight.
  max_R1 = jnp.where(start == 0, score_R1, MASKED)

  def body(i, state):
    at = pl.ds(start + i * n, n)
    first = left + 1 - window - i * n if window else None
    return fold(state, q_RC, k[:, at], v[at, :], left - i * n, first=first)

  live = jnp.clip(blocks(left, n), 0, span // n)
  state = max_R1, jnp.ones_like(max_R1), v_RC
  max_R1, sum_R1, mixed_RC = lax.fori_loop(
    _first(left + 1, n, window), live, body, state
  )
  triton.store(lse, max_R1 + jnp.log(sum_R1), mask=real_R1)
  triton.store(mixed, (mixed_RC / sum_R1).astype(mixed.dtype), mask=real_R1)
