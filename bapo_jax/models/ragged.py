"""Computes the attention of decoding from the live columns of each slot alone.

A slot's query attends to the first `length` columns of its cache. `attend` runs a
Pallas kernel that reads them in blocks of columns, and no block past the last:

1. `fold` adds a block of keys and values to a running softmax, in float32;
2. on a TPU the grid has a step for each live block of each slot, with all key heads in
   a block, so that a step reads about a MiB (`_tpu`);
3. on a GPU a program reads a span of the columns of a slot and a key head in a loop,
   and the results of the spans are merged (`_gpu`).

The axis n counts the columns of a block, and G the query heads of a key head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models.attention import LANES

STEP_BYTES = 2**20  # of keys and values that a step of the TPU kernel reads, about
MOST_COLUMNS = 1024  # per block of the TPU kernel
SPAN = 2048  # columns per program of the GPU kernel
SUBLANES = 16  # rows of a tile in bfloat16; also the fewest rows of a GPU's products
MASKED = -1e30  # score of a column past the length; -inf would give NaN differences

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
  """Returns the number of blocks of n columns that each slot reads."""
  return (length_S + n - 1) // n


def _last(length: Any, n: int) -> Any:
  """Returns the last live block, in a kernel: Python's // would ask for the device."""
  return jax.lax.div(length - 1, np.int32(n))


def fold(
  softmax: Softmax,
  q_GC: Array,
  k_Cn: Array,
  v: Array,
  left: Array | int,
  axis: int = 0,
) -> Softmax:
  """Adds a block to a running softmax; its first `left` columns are live.

  Axis `axis` of the values v, [n, C] or [C, n], is that of the columns.

  The final mixed values divided by the sum are softmax(q k / sqrt(C)) v (Milakov and
  Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).
  """
  max_G1, sum_G1, mixed_GC = softmax
  (G, C), n = q_GC.shape, k_Cn.shape[1]
  live_Gn = jax.lax.broadcasted_iota(jnp.int32, (G, n), 1) < left
  score_Gn = jnp.dot(q_GC, k_Cn, preferred_element_type=jnp.float32) * C**-0.5
  score_Gn = jnp.where(live_Gn, score_Gn, MASKED)
  new_max_G1 = jnp.maximum(max_G1, score_Gn.max(1, keepdims=True))
  weight_Gn = jnp.exp(score_Gn - new_max_G1)
  decay_G1 = jnp.exp(max_G1 - new_max_G1)
  new_GC = jax.lax.dot_general(
    weight_Gn.astype(v.dtype),
    v,
    (((1,), (axis,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  sum_G1 = sum_G1 * decay_G1 + weight_Gn.sum(1, keepdims=True)
  return new_max_G1, sum_G1, mixed_GC * decay_G1 + new_GC


def attend(q_SHC: Array, k_SKCT: Array, v_SKTC: Array, length_S: Array) -> Array:
  """Computes attention [S, H, C] of a query per slot, on a TPU or a GPU.

  Other platforms emulate the TPU's kernel, for tests. Under a mesh each device runs the
  kernel on its slots and key heads.

  Args:
    k_SKCT, v_SKTC: T is a multiple of LANES; C is a power of two, 16 or more.
    length_S: i32, at least 1: the number of columns that the query attends to.
  """
  if k_SKCT.shape[3] % LANES:
    raise ValueError(
      f'the cache has {k_SKCT.shape[3]} columns; give a multiple of {LANES}'
    )
  mesh = sharding.ambient()
  if mesh is None:
    return _local(q_SHC, k_SKCT, v_SKTC, length_S)
  slots = None if q_SHC.shape[0] % sharding.row_shards(mesh) else sharding.ROWS
  heads = None if k_SKCT.shape[1] % mesh.shape['tensor'] else 'tensor'
  by_head = P(slots, heads)
  return jax.shard_map(
    _local,
    in_specs=(by_head, by_head, by_head, P(slots)),
    out_specs=by_head,
    check_vma=False,
  )(q_SHC, k_SKCT, v_SKTC, length_S)


def _local(q_SHC: Array, k_SKCT: Array, v_SKTC: Array, length_S: Array) -> Array:
  """Runs the kernel of the platform on the slots and heads of one device."""
  S, H, C = q_SHC.shape
  mixed_SKGC = jax.lax.platform_dependent(
    q_SHC.reshape(S, k_SKCT.shape[1], -1, C),
    k_SKCT,
    v_SKTC,
    length_S,
    tpu=_tpu,
    cuda=_gpu,
    default=functools.partial(_tpu, interpret=True),
  )
  return mixed_SKGC.reshape(S, H, C)


def _tpu(
  q_SKGC: Array,
  k_SKCT: Array,
  v_SKTC: Array,
  length_S: Array,
  *,
  n: int = 0,
  interpret: bool = False,
) -> Array:
  """Runs the TPU kernel in blocks of n columns, by default `block_columns`.

  The slots are in two halves, for the two cores of a v4 or v5p. The half with fewer
  blocks repeats the last block, which is not read again.
  """
  from jax.experimental.pallas import tpu as pltpu

  heads = q_SKGC.shape[2]  # rows of zeros fill the tiles
  q_SKGC = jnp.pad(q_SKGC, ((0, 0), (0, 0), (0, -heads % SUBLANES), (0, 0)))
  (S, K, G, C), T = q_SKGC.shape, k_SKCT.shape[3]
  n = n or block_columns(K, C, T, k_SKCT.dtype.itemsize)
  halves, steps = 2 - S % 2, S // (2 - S % 2) * (T // n)  # most steps of a half
  slot_N, first_S, most = _visits(length_S, halves, steps, n)

  def where(half: Array, i: Array, slot_N: Any, first_S: Any, length_S: Any) -> Any:
    slot = slot_N[half * steps + i]
    return slot, jnp.minimum(i - first_S[slot], _last(length_S[slot], n))

  def by_slot(*at: Any) -> tuple[Any, ...]:
    return where(*at)[0], 0, 0, 0

  def keys(*at: Any) -> tuple[Any, ...]:
    slot, block = where(*at)
    return slot, 0, 0, block

  def values(*at: Any) -> tuple[Any, ...]:
    return keys(*at) if turned else (*keys(*at)[:2], keys(*at)[3], 0)

  # Rows of fewer than LANES numbers would be padded, so XLA stores such values with the
  # columns last. The kernel reads them in that order: the transposition copies nothing.
  turned = C % LANES > 0
  v = v_SKTC.swapaxes(2, 3) if turned else v_SKTC
  mixed_SKGC = pl.pallas_call(
    functools.partial(_tpu_step, steps=steps, n=n, axis=int(turned)),
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
  )(slot_N, first_S, length_S, q_SKGC, k_SKCT, v)
  return mixed_SKGC[:, :, :heads]


def _visits(
  length_S: Array, halves: int, steps: int, n: int
) -> tuple[Array, Array, Array]:
  """Plans the grid of the TPU kernel: a step for each live block of a half.

  Returns (the slot of each step [halves * steps], the first step of each slot [S], the
  number of steps of the half that has more). Steps past the last live block keep the
  last slot of their half.
  """
  count_hS = blocks(length_S, n).reshape(halves, -1)
  end_hS = jnp.cumsum(count_hS, 1)
  # Step i of a half visits the slot after all slots that end at or before i.
  step_N, slots = jnp.arange(steps), count_hS.shape[1]
  slot_hN = (end_hS[:, None] <= step_N[None, :, None]).sum(2, dtype=jnp.int32)
  slot_hN = jnp.minimum(slot_hN, slots - 1)
  slot_hN += slots * jnp.arange(halves, dtype=jnp.int32)[:, None]
  return slot_hN.ravel(), (end_hS - count_hS).ravel(), end_hS[:, -1].max()


def _tpu_step(
  slot_N: Any,
  first_S: Any,
  length_S: Any,
  q: Any,
  k: Any,
  v: Any,
  out: Any,
  *softmax: Any,
  steps: int,
  n: int,
  axis: int,
) -> None:
  """Folds one block of a slot, all key heads, into the running softmax of the slot."""
  i = pl.program_id(1)
  slot = slot_N[pl.program_id(0) * steps + i]
  block, last = i - first_S[slot], _last(length_S[slot], n)

  @pl.when(block == 0)
  def _start() -> None:
    for x, value in zip(softmax, (MASKED, 0.0, 0.0), strict=True):
      x[...] = jnp.full(x.shape, value, x.dtype)

  @pl.when(block <= last)  # false for the steps of a half after its last block
  def _fold() -> None:
    for head in range(k.shape[1]):
      state = tuple(x[head] for x in softmax)
      left = length_S[slot] - block * n
      state = fold(state, q[0, head], k[0, head], v[0, head], left, axis)
      for x, value in zip(softmax, state, strict=True):
        x[head] = value

  @pl.when(block == last)
  def _finish() -> None:
    _, sum_KG1, mixed_KGC = (x[...] for x in softmax)
    out[0] = (mixed_KGC / sum_KG1).astype(out.dtype)


def _gpu(
  q_SKGC: Array,
  k_SKCT: Array,
  v_SKTC: Array,
  length_S: Array,
  *,
  n: int = LANES,
  span: int = SPAN,
  interpret: bool = False,
) -> Array:
  """Runs the GPU kernel in blocks of n columns; a program reads `span` columns.

  Several programs per row keep all multiprocessors busy if few rows are long.
  """
  from jax.experimental.pallas import triton

  (S, K, G, C), T = q_SKGC.shape, k_SKCT.shape[3]
  spans = -(-T // span)

  def whole(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *shape), lambda s, k, _: (s, k, 0, 0))

  # Products have SUBLANES rows or more; those past G are neither loaded nor stored.
  rows = max(SUBLANES, 1 << (G - 1).bit_length())
  max_SKXG1, sum_SKXG1, mixed_SKXGC = pl.pallas_call(
    functools.partial(_gpu_span, G=G, n=n, span=span),
    grid=(S, K, spans),
    in_specs=[
      pl.BlockSpec((None,), lambda s, *_: (s,)),
      whole(rows, C),
      whole(C, T),
      whole(T, C),
    ],
    out_specs=[
      pl.BlockSpec((None, None, None, rows, x), lambda *at: (*at, 0, 0))
      for x in (1, 1, C)
    ],
    out_shape=[
      jax.ShapeDtypeStruct((S, K, spans, G, x), jnp.float32) for x in (1, 1, C)
    ],
    # With three stages, 128 columns of heads of 128 need 136 KiB of shared memory, and
    # do not compile for RTX cards, which have 99.
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name='ragged_decode',
  )(length_S, q_SKGC, k_SKCT, v_SKTC)
  # A span past the length has the maximum MASKED, and so no weight.
  weight_SKXG1 = jnp.exp(max_SKXG1 - max_SKXG1.max(2, keepdims=True))
  mixed_SKGC = (weight_SKXG1 * mixed_SKXGC).sum(2)
  return (mixed_SKGC / (weight_SKXG1 * sum_SKXG1).sum(2)).astype(q_SKGC.dtype)


def _gpu_span(
  length: Any, q: Any, k: Any, v: Any, *softmax: Any, G: int, n: int, span: int
) -> None:
  """Folds the live blocks of a span of one slot and key head."""
  from jax.experimental.pallas import triton

  rows, C = q.shape
  start = pl.program_id(2) * span
  left = length[...] - start
  real_R1 = jnp.arange(rows)[:, None] < G
  q_RC = triton.load(q, mask=real_R1, other=0.0)
  empty = tuple(
    jnp.full((rows, x), value, jnp.float32)
    for x, value in ((1, MASKED), (1, 0.0), (C, 0.0))
  )

  def body(i: Array, state: Softmax) -> Softmax:
    at = pl.ds(start + i * n, n)
    return fold(state, q_RC, k[:, at], v[at, :], left - i * n)

  live = jnp.clip(blocks(left, n), 0, span // n)
  for x, value in zip(softmax, jax.lax.fori_loop(0, live, body, empty), strict=True):
    triton.store(x, value, mask=real_R1)
