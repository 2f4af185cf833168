"""Computes attention: queries, keys and values in, mixed values out.

Whole rows use `blockwise` on a CPU, `flash` on a GPU (cuDNN if rows are not packed and
it takes the heads) and `splash` on a TPU. Only `blockwise` stores scores, [T, T]; if
causal, half of them; with a window, fewer. The GPU's kernel for packed rows has no
windows: layers with a window use `windowed` there.
Decoding has one query per slot: `cached` reads the cache of every slot up to the
longest one, and the kernel of ragged.py, on accelerators, each up to its length.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding

# Kernels that store no scores, and what they need; remat 'dots' saves their results.
WIDEST = 256  # head of `flash`; wider heads exceed the shared memory of every GPU
FUSED = {
  'splash': 'a tpu',
  'flash': f'a gpu, model.compute=bfloat16 and heads of at most {WIDEST}',
}
ATTENDED = 'attended'  # the name under which remat policies save splash's results
BLOCK = 64  # of `blockwise`: minimum queries per block
MOST_BLOCKS = 8  # of `blockwise`
LANES = 128  # a TPU's vector unit: head width and row length are padded to multiples
# Of `flash`: queries and keys per block of the forward pass, both in the backward pass.
# Blocks of 32 are too small for an H100's warpgroup products, of 128 spill registers.
FLASH_Q = 128
FLASH_K = 64
FLASH_BACK = 64
FLASH_WARPS = 8
WINDOW_BLOCK = 512  # of `windowed`: queries per block
CUDNN_WIDEST = 128  # head that cuDNN takes on every GPU; a multiple of 8
CODE = 8  # bits that tell the segments of a shared column apart, for the kernels
FAR = 2.0**20  # below any other score


class Shared(NamedTuple):
  """Columns that several segments of packed rows attend to, such as a prompt.

  A query with reads_BT of s attends also to the columns before it with shared_BT of s.
  """

  reads_BT: Array  # i32; -1 in empty columns
  shared_BT: Array  # i32; -2 in columns that are not shared


def resolve(
  kind: str | None, platform: str, compute: jax.typing.DTypeLike, head_width: int
) -> str:
  """Returns the kernel that `model.attention=kind` selects on this platform.

  Without a kind it is the fastest kernel that fits.

  The platform is 'cpu', 'gpu', 'cuda' or 'tpu'; `compute` is the dtype of queries, keys
  and values.

  Raises:
    ValueError: the platform, the dtype or the heads do not fit the kernel.
  """
  small = jnp.dtype(compute).itemsize == 2 and head_width <= WIDEST
  fits = {'splash': platform == 'tpu', 'flash': platform in ('gpu', 'cuda') and small}
  if kind is None:
    kind = next((name for name, does_fit in fits.items() if does_fit), 'plain')
  if not fits.get(kind, True):
    raise ValueError(
      f'model.attention={kind} needs {FUSED[kind]}, but this is a {platform} with '
      f'model.compute={jnp.dtype(compute)} and heads of {head_width}; set '
      'model.attention to None or plain'
    )
  if kind != 'plain':
    # Since jax 0.11 this import adds a flag to the keys of jit. If the first trace of a
    # kernel imports it, all programs compiled until then compile again when called.
    importlib.import_module('jax.experimental.pallas.tpu')
  return kind


def attend(
  q_BTHC: Array,
  k_BTKC: Array,
  v_BTKC: Array,
  *,
  kind: str | None = None,
  segment_BT: Array | None = None,
  shared: Shared | None = None,
  window: int = 0,
  is_causal: bool = True,
  interpret: bool = False,
) -> Array:
  """Computes the attention of whole rows, [B, T, H, C].

  Args:
    q_BTHC, k_BTKC, v_BTKC: H is a multiple of K.
    kind: the name of a kernel, which is not checked; None: by platform.
    segment_BT: for packed rows, the segment of each column: a query attends to the
      columns of its segment only. Empty columns need a segment too, such as -1.
    shared: columns of other segments to attend to, by up to 2^CODE adjacent segments.
    window: if causal, the number of last columns that a query attends to, its own
      included; 0: no limit. Not with `shared`, whose columns may be anywhere before.
    is_causal: whether a query attends only to keys up to its column, not to all keys.
    interpret: emulates the kernel of a GPU or TPU on any platform, for tests.
  """
  C = q_BTHC.shape[-1]
  assert not (shared and window), 'columns of a window follow each other'
  if kind is None:
    kind = resolve(kind, jax.default_backend(), q_BTHC.dtype, C)
  if kind == 'flash' and segment_BT is None and C % 8 == 0 and C <= CUDNN_WIDEST:
    # cuDNN is faster, but on packed rows it needs a mask of [T, T].
    return jax.nn.dot_product_attention(
      q_BTHC,
      k_BTKC,
      v_BTKC,
      is_causal=is_causal,
      local_window_size=(window - 1, 0) if window else None,
      implementation='cudnn',
    )
  too_wide = shared and width(kind, C, True) > WIDEST
  if kind == 'plain' or (kind == 'flash' and too_wide):
    return blockwise(
      q_BTHC, k_BTKC, v_BTKC, segment_BT, shared, window=window, is_causal=is_causal
    )
  scale = C**-0.5
  if shared and segment_BT is not None:
    q_BTHC, k_BTKC = _tell_apart(q_BTHC, k_BTKC, segment_BT, shared)
    v_BTKC = jnp.pad(v_BTKC, ((0, 0), (0, 0), (0, 0), (0, 2 * CODE)))
    segment_BT = shared.reads_BT
  kernels = {
    'flash': functools.partial(flash, scale=scale),
    'splash': functools.partial(splash, scale=scale, window=window),
  }
  kernel = functools.partial(kernels[kind], is_causal=is_causal, interpret=interpret)
  if kind == 'flash' and window:
    kernel = functools.partial(windowed, window=window)
  return _on_mesh(kernel, q_BTHC, k_BTKC, v_BTKC, segment_BT)[..., :C]


def _on_mesh(
  kernel: Callable[..., Array],
  q_BTHC: Array,
  k_BTKC: Array,
  v_BTKC: Array,
  segment_BT: Array | None,
) -> Array:
  """Runs a kernel, which XLA cannot partition, on the rows and heads of each device."""
  mesh = sharding.ambient()
  if mesh is None:
    return kernel(q_BTHC, k_BTKC, v_BTKC, segment_BT)
  B, _, H, _ = q_BTHC.shape
  K = k_BTKC.shape[2]
  shards = mesh.shape['tensor']
  rows = None if B % sharding.row_shards(mesh) else sharding.ROWS
  heads = None if H % shards else 'tensor'
  if heads and K % shards:
    # Fewer key/value heads than shards: each shard gets a copy of its head.
    copies = (shards if shards % K == 0 else H) // K
    k_BTKC, v_BTKC = (jnp.repeat(x, copies, axis=2) for x in (k_BTKC, v_BTKC))
  by_head = P(rows, None, heads)
  return jax.shard_map(
    kernel,
    in_specs=(by_head, by_head, by_head, P(rows)),
    out_specs=by_head,
    check_vma=False,
  )(q_BTHC, k_BTKC, v_BTKC, segment_BT)


def width(kind: str | None, head_width: int, is_shared: bool = False) -> int:
  """Returns the channels of a head that a kernel computes with, if columns are shared.

  Pallas pads heads to powers of two on a GPU, and to LANES on a TPU.
  """
  if kind not in FUSED:
    return head_width
  channels = head_width + 2 * CODE * is_shared
  if kind == 'splash':
    return -(-channels // LANES) * LANES
  return 1 << (channels - 1).bit_length()


def _tell_apart(
  q_BTHC: Array, k_BTKC: Array, segment_BT: Array, shared: Shared
) -> tuple[Array, Array]:
  """Appends 2 CODE channels that take FAR from the scores of other segments.

  The kernels compare one id per column, that of the shared column here. A query's
  channels are the bits of its segment and their complements; a key's are -FAR where
  those of its segment are 0, unless it is shared. So a product is exactly 0 for keys of
  the query's segment and shared ones, and at most -FAR for others.
  """
  bit_BTX = (segment_BT[..., None] >> jnp.arange(CODE)[None, None]) & 1
  query_BTX = jnp.concatenate([bit_BTX, 1 - bit_BTX], -1)
  is_shared_BT1 = (shared.shared_BT == shared.reads_BT)[..., None]
  key_BTX = jnp.where(is_shared_BT1, 0, -FAR * (1 - query_BTX))

  def append(x_BTHC, channels_BTX):
    shape = *x_BTHC.shape[:3], 2 * CODE
    channels = jnp.broadcast_to(channels_BTX[:, :, None], shape)
    return jnp.concatenate([x_BTHC, channels.astype(x_BTHC.dtype)], -1)

  return append(q_BTHC, query_BTX), append(k_BTKC, key_BTX)


def query_block(length: int) -> int:
  """Returns the number of queries per block of `blockwise`.

  Small blocks skip more masked keys; large blocks make efficient products; and few
  blocks keep the program small, because the loop over blocks is unrolled.
  """
  return -(-length // max(1, min(length // BLOCK, MOST_BLOCKS)))


def blockwise(
  q_BTHC: Array,
  k_BTKC: Array,
  v_BTKC: Array,
  segment_BT: Array | None = None,
  shared: Shared | None = None,
  *,
  window: int = 0,
  is_causal: bool = True,
) -> Array:
  """Computes `attend` in plain JAX, a block of queries at a time.

  A causal block skips the keys past its end and those before the windows of all its
  queries. All queries of a key head share a product, and the softmax normalises the
  output [T, C] instead of the weights [T, T]. This takes half the time of
  `jax.nn.dot_product_attention` on a CPU (256 columns).
  """
  B, T, H, C = q_BTHC.shape
  K = k_BTKC.shape[2]
  scale = jnp.asarray(C**-0.5, q_BTHC.dtype)
  q_BKGTC = (q_BTHC * scale).reshape(B, T, K, -1, C).transpose(0, 2, 3, 1, 4)
  k_BKTC = k_BTKC.swapaxes(1, 2)
  v_BKTC = v_BTKC.swapaxes(1, 2)
  size = query_block(T)
  blocks = []
  for start in range(0, T, size):
    end = min(start + size, T)
    # Keys that some query of the block attends to.
    seen = slice(max(0, start + 1 - window) if window else 0, end if is_causal else T)
    live_Btj = _live(T, slice(start, end), seen, window, is_causal)
    if segment_BT is not None:
      same_Btj = segment_BT[:, start:end, None] == segment_BT[:, None, seen]
      if shared:
        reads_Bt1 = shared.reads_BT[:, start:end, None]
        same_Btj |= reads_Bt1 == shared.shared_BT[:, None, seen]
      live_Btj &= same_Btj
    # The mask repeats for each of the G query heads of a key head: [B, 1, G t, j].
    live_B1Xj = jnp.tile(live_Btj, (1, H // K, 1))[:, None]
    scores_BKXj = jnp.einsum(
      'bkxc,bkjc->bkxj',
      q_BKGTC[:, :, :, start:end].reshape(B, K, -1, C),
      k_BKTC[:, :, seen],
      preferred_element_type=jnp.float32,
    )
    scores_BKXj = jnp.where(live_B1Xj, scores_BKXj, -jnp.inf)
    # Softmax, normalised last. Each query attends to itself, so no maximum is -inf.
    max_BKX1 = lax.stop_gradient(scores_BKXj.max(-1, keepdims=True))
    weight_BKXj = jnp.exp(scores_BKXj - max_BKX1)
    sum_BKXC = jnp.einsum(
      'bkxj,bkjc->bkxc',
      weight_BKXj.astype(v_BTKC.dtype),
      v_BKTC[:, :, seen],
      preferred_element_type=jnp.float32,
    )
    sum_BKXC /= weight_BKXj.sum(-1, keepdims=True)
    blocks.append(sum_BKXC.astype(q_BTHC.dtype).reshape(B, K, H // K, -1, C))
  mixed_BKGTC = jnp.concatenate(blocks, axis=3)
  return mixed_BKGTC.transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)


def _live(T: int, queries: slice, seen: slice, window: int, is_causal: bool) -> Array:
  """Returns a mask [1, t, j] of the seen keys that each query of a text attends to."""
  column_T = jnp.arange(T)
  live_Btj = (column_T[queries, None] >= column_T[None, seen])[None]
  if window:
    live_Btj &= (column_T[queries, None] - column_T[None, seen] < window)[None]
  return live_Btj if is_causal else jnp.ones_like(live_Btj)


def windowed(
  q_BTHC: Array, k_BTKC: Array, v_BTKC: Array, segment_BT: Array | None, window: int
) -> Array:
  """Computes `attend` with a window; only one block of queries has scores at a time."""
  B, T, H, C = q_BTHC.shape
  if segment_BT is None:
    segment_BT = jnp.zeros((B, T), jnp.int32)
  n = min(T, WINDOW_BLOCK)
  # Every block has the keys of n queries and as many before them as a window.
  behind = -T % n
  q = jnp.pad(q_BTHC, ((0, 0), (0, behind), (0, 0), (0, 0)))
  k, v = (
    jnp.pad(x, ((0, 0), (window, behind), (0, 0), (0, 0))) for x in (k_BTKC, v_BTKC)
  )
  segment = jnp.pad(segment_BT, ((0, 0), (window, behind)), constant_values=-2)
  distance_nj = window + jnp.arange(n)[:, None] - jnp.arange(n + window)[None]
  near_nj = (distance_nj >= 0) & (distance_nj < window)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def block(start):
    def keys(x):
      return lax.dynamic_slice_in_dim(x, start, n + window, 1)

    segment_Bj = keys(segment)
    same_Bnj = segment_Bj[:, window:, None] == segment_Bj[:, None]
    return jax.nn.dot_product_attention(
      lax.dynamic_slice_in_dim(q, start, n, 1),
      keys(k),
      keys(v),
      mask=(near_nj[None] & same_Bnj)[:, None],
      implementation='xla',
    )

  out_XBnHC = lax.map(block, jnp.arange(0, T, n))
  return out_XBnHC.swapaxes(0, 1).reshape(B, -1, H, C)[:, :T]


def cached(
  q_SHC: Array,
  segments: Sequence[tuple[Array, Array]],
  position_S: Array,
  window: int = 0,
) -> Array:
  """Computes attention [S, H, C]: each slot's query attends to columns up to its own.

  Args:
    segments: keys [S, K, C, columns] and values [S, K, columns, C], in the order of the
      columns; both products read these layouts without a transpose, on every platform.
    position_S: column of each query.
    window: the number of last columns that a query attends to; 0: no limit.
  """
  S, H, C = q_SHC.shape
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  q_SKGC = q_SHC.reshape(S, segments[0][0].shape[1], -1, C)
  # One softmax over the columns of all segments.
  scores_SKGT = jnp.concatenate(
    [dot('skgc,skct->skgt', q_SKGC, k_SKCt) for k_SKCt, _ in segments], -1
  )
  column_T = jnp.arange(scores_SKGT.shape[-1])
  live_ST = column_T[None] <= position_S[:, None]
  if window:
    live_ST &= column_T[None] > position_S[:, None] - window
  scores_SKGT = jnp.where(live_ST[:, None, None], scores_SKGT * C**-0.5, -jnp.inf)
  share_SKGT = jax.nn.softmax(scores_SKGT).astype(q_SHC.dtype)
  # Values are mixed per segment, so that the segments are not copied to one array.
  mixed = []
  start = 0
  for _, v_SKtC in segments:
    columns = v_SKtC.shape[2]
    share_SKGt = lax.slice_in_dim(share_SKGT, start, start + columns, axis=-1)
    mixed.append(dot('skgt,sktc->skgc', share_SKGt, v_SKtC))
    start += columns
  return jnp.asarray(sum(mixed)).reshape(S, H, C).astype(q_SHC.dtype)


def flash(
  q_BTHC: Array,
  k_BTKC: Array,
  v_BTKC: Array,
  segment_BT: Array | None,
  *,
  scale: float,
  is_causal: bool,
  interpret: bool,
) -> Array:
  """Runs the GPU kernel on one device, padded to multiples of FLASH_Q."""
  # Imported late because it loads Pallas.
  from jax.experimental.pallas.ops.gpu import attention as lib

  B, T, H, C = q_BTHC.shape
  if segment_BT is None:
    segment_BT = jnp.zeros((B, T), jnp.int32)
  # Padded columns come last, in segment -2, so that no real query attends to them.
  pad = -T % FLASH_Q
  q, k, v = (
    jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q_BTHC, k_BTKC, v_BTKC)
  )
  segment_BT = jnp.pad(segment_BT, ((0, 0), (0, pad)), constant_values=-2)
  run = functools.partial(
    lib.mha,
    k=k,
    v=v,
    segment_ids=segment_BT,
    sm_scale=scale,
    causal=is_causal,
    block_sizes=lib.BlockSizes(FLASH_Q, FLASH_K, *[FLASH_BACK] * 4),
    num_warps=FLASH_WARPS,
    interpret=interpret,
  )
  # The kernel has as many key heads as query heads. `vmap` over the query heads of a
  # key head reads every key head in place, where repeating would copy it.
  q_BTKGC = q.reshape(B, T + pad, k.shape[2], -1, C)
  out_BTKGC = jax.vmap(run, in_axes=3, out_axes=3)(q_BTKGC)
  return out_BTKGC.reshape(B, T + pad, H, C)[:, :T]


def splash(
  q_BTHC: Array,
  k_BTKC: Array,
  v_BTKC: Array,
  segment_BT: Array | None,
  *,
  scale: float,
  window: int,
  is_causal: bool,
  interpret: bool,
) -> Array:
  """Runs the TPU kernel on one device, padded to multiples of LANES."""
  # Imported late because it loads Pallas.
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  _, T, H, C = q_BTHC.shape
  pad = -T % LANES
  wide = -C % LANES
  n = next(size for size in (512, 256, LANES) if (T + pad) % size == 0)
  shape = T + pad, T + pad
  mask = (lib.CausalMask if is_causal else lib.FullMask)(shape)
  if window:
    mask = lib.LocalMask(shape, (window - 1, 0), offset=0)
  kernel: Any = lib.make_splash_mha(
    lib.MultiHeadMask([mask] * H),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=lib.BlockSizes(
      block_q=n,
      block_kv=n,
      block_q_dkv=n,
      block_kv_dkv=key_block(T + pad, C + wide),
      block_kv_dkv_compute=n,
      use_fused_bwd_kernel=True,
    ),
    interpret=interpret,
    residual_checkpoint_name=ATTENDED,
  )
  # Padded columns come last, behind a causal mask or in segment -2, so that no real
  # query attends to them.
  q, k, v = (
    jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, wide))).swapaxes(1, 2)
    for x in (q_BTHC * jnp.asarray(scale, q_BTHC.dtype), k_BTKC, v_BTKC)
  )
  ids = None
  if segment_BT is not None:
    segment_BT = jnp.pad(segment_BT, ((0, 0), (0, pad)), constant_values=-2)
    ids = lib.SegmentIds(segment_BT, segment_BT)
  out_BHTC = jax.vmap(kernel)(q, k, v, ids)
  return out_BHTC.swapaxes(1, 2)[:, :T, :, :C]


def key_block(length: int, channels: int) -> int:
  """Returns the number of keys per block in the TPU kernel's backward pass.

  `length` is a multiple of LANES, and so are the `channels` of a head. The kernel
  writes the gradient of all queries for every block, [blocks, H, T, C], and sums over
  blocks afterwards. With small blocks the size of this array is quadratic in the
  length. Blocks of 1,536 keys of 256 channels exceed a v5e's 16 MiB for a kernel.
  """
  sizes = (2048, 1536, 1024, 512, 256, LANES)
  most = max(LANES, 2048 * LANES // channels)
  return next(n for n in sizes if n <= most and length % n == 0)
