"""Causal attention over whole rows, behind one function, by whichever kernel is there.

1. `resolve` says what a knob means on a platform, or why it cannot be had;
2. `causal` is the attention: XLA's own on a CPU, cuDNN's on a GPU, splash on a TPU.

The two kernels never hold the [T, T] scores; XLA's does.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bapo_jax import mesh

AUTO = {'tpu': 'splash', 'gpu': 'cudnn', 'cuda': 'cudnn'}  # elsewhere plain
NEEDS = {'splash': ('tpu',), 'cudnn': ('gpu', 'cuda')}
KINDS = ('auto', 'plain', 'cudnn', 'splash')
LANES = 128  # of a TPU's vector unit: head width and row length are padded to them


def resolve(kind: str, platform: str, compute) -> str:
  """The kernel that `model.attention` means on this platform, for this dtype.

  Raises:
    ValueError: no such kind, or the platform or the dtype has no such kernel.
  """
  if kind not in KINDS:
    raise ValueError(f'model.attention: no kind {kind!r}; choose one of {KINDS}')
  half = jnp.dtype(compute).itemsize == 2
  if kind == 'auto':
    kind = AUTO.get(platform, 'plain')
    return 'plain' if kind == 'cudnn' and not half else kind
  if platform not in NEEDS.get(kind, (platform,)):
    raise ValueError(
      f'model.attention={kind} needs a {NEEDS[kind][0]}, this is a {platform}; '
      'give auto or plain'
    )
  if kind == 'cudnn' and not half:
    raise ValueError(
      f'model.attention=cudnn needs model.compute=bfloat16, not {jnp.dtype(compute)}; '
      'give auto or plain'
    )
  return kind


def causal(q_BTHC, k_BTKC, v_BTKC, *, kind: str = 'auto', segment_BT=None):
  """Each query sees the keys up to its own column, [B, T, H, C].

  Args:
    q_BTHC, k_BTKC, v_BTKC: H a multiple of K.
    kind: 'auto', or a kernel's name, taken at its word.
    segment_BT: where rows are packed, which text a column belongs to: a query then
      sees its own text only.
  """
  if kind == 'auto':
    kind = resolve(kind, jax.default_backend(), q_BTHC.dtype)
  if kind == 'splash':
    return splash(q_BTHC, k_BTKC, v_BTKC, segment_BT)
  mask = None
  if segment_BT is not None:
    mask = segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
  return jax.nn.dot_product_attention(
    q_BTHC,
    k_BTKC,
    v_BTKC,
    mask=mask,
    is_causal=True,
    implementation={'plain': 'xla', 'cudnn': 'cudnn'}[kind],
  )


def splash(q_BTHC, k_BTKC, v_BTKC, segment_BT=None, *, interpret: bool = False):
  """The TPU's kernel, a shard of rows and heads each device.

  XLA cannot split a kernel over devices by itself, so under a mesh this does.
  """
  run = functools.partial(_splash, interpret=interpret)
  devices = mesh.ambient()
  if devices is None:
    return run(q_BTHC, k_BTKC, v_BTKC, segment_BT)
  B, _, H, _ = q_BTHC.shape
  K, shards = k_BTKC.shape[2], devices.shape['tensor']
  rows = None if B % mesh.row_shards(devices) else mesh.ROWS
  heads = None if H % shards else 'tensor'
  if heads and K % shards:
    # Fewer key/value heads than shards: each shard gets a copy of the one it reads.
    copies = (shards if shards % K == 0 else H) // K
    k_BTKC, v_BTKC = (jnp.repeat(x, copies, axis=2) for x in (k_BTKC, v_BTKC))
  by_head = P(rows, None, heads)
  return jax.shard_map(
    run,
    in_specs=(by_head, by_head, by_head, P(rows)),
    out_specs=by_head,
    check_vma=False,
  )(q_BTHC, k_BTKC, v_BTKC, segment_BT)


def _splash(q_BTHC, k_BTKC, v_BTKC, segment_BT, interpret):
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  _, T, H, C = q_BTHC.shape
  pad, wide = -T % LANES, -C % LANES
  # Padded columns come last and the mask is causal: no real query sees them.
  q, k, v = (
    jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, wide))).swapaxes(1, 2)
    for x in (q_BTHC * jnp.asarray(C**-0.5, q_BTHC.dtype), k_BTKC, v_BTKC)
  )
  length = T + pad
  n = next(size for size in (512, 256, LANES) if length % size == 0)
  sizes = lib.splash_attention_kernel.BlockSizes(
    block_q=n,
    block_kv=n,
    block_q_dkv=n,
    block_kv_dkv=n,
    use_fused_bwd_kernel=True,
  )
  mask = lib.splash_attention_mask.CausalMask((length, length))
  kernel = lib.make_splash_mha(
    lib.splash_attention_mask.MultiHeadMask([mask] * H),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=sizes,
    interpret=interpret,
  )
  ids = None
  if segment_BT is not None:
    segment_BT = jnp.pad(segment_BT, ((0, 0), (0, pad)), constant_values=-1)
    ids = lib.splash_attention_kernel.SegmentIds(segment_BT, segment_BT)
  out_BHTC = jax.vmap(kernel)(q, k, v, ids)
  return out_BHTC.swapaxes(1, 2)[:, :T, :, :C]
