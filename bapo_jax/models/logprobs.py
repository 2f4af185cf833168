"""Log-probability of the chosen tokens and entropy, tile by tile.

The [B, T, V] logits never exist: a chunk of columns meets a block of the vocabulary,
is reduced to a few numbers a token and forgotten, and meets it again in the backward
pass.

1. `_forward` keeps of each tile its maximum, its sums and the chosen logit; `_combine`
   makes one softmax of them;
2. `_backward` makes the gradient of a tile's logits. The head's is summed in float32
   whatever the head is in: a bfloat16 sum over 128 chunks is off by 1.3 %;
3. under a mesh both run a shard of rows and vocabulary each device: the head is
   gathered over fsdp before the tiles, its gradient scattered after them, and no tile
   waits for another device.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import transformer


def token_logprobs(
  hidden_BTD, head_VD, token_BT, temperature, *, chunk: int = 256, block: int = 4096
):
  """(logp_BT, entropy_BT), nats, float32: row t scores token_BT[:, t] given hidden t.

  Both have exact gradients to hidden and head; that of the entropy costs nothing where
  it is not asked for. The temperature gets none.

  Args:
    hidden_BTD: final hidden states that predict the tokens (already shifted by one).
    head_VD: output projection.
    token_BT: the tokens to score.
    temperature: divides the logits; the distribution is the one sampled from.
    chunk: columns of T projected at once; memory is B * chunk * block floats.
    block: most rows of the head projected at once.
  """
  T = hidden_BTD.shape[1]
  chunk = min(chunk, T)
  if pad := -T % chunk:
    hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
    token_BT = jnp.pad(token_BT, ((0, 0), (0, pad)))
  scored = _token_logprobs(
    (chunk, block), hidden_BTD, head_VD, token_BT, jnp.float32(temperature)
  )
  return tuple(x[:, :T] for x in scored)


def sequence_logprobs(params, tokens_BT, spec, temperature, *, chunk: int = 256):
  """(logp_BT, entropy_BT) of every token of whole rows; column 0, unpredicted, is 0."""
  hidden_BTD = transformer.forward(params, tokens_BT, spec)
  # The last column scores the first token and is dropped: cheaper than a copy of all
  # the others, and T divides into chunks where T - 1 does not.
  said_BT = jnp.roll(tokens_BT, -1, axis=1)
  scored = token_logprobs(
    hidden_BTD, transformer.head(params), said_BT, temperature, chunk=chunk
  )
  return tuple(jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in scored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(sizes, *args):
  return _spread(_forward, sizes, *args)[:2]


def _token_logprobs_forward(sizes, *args):
  args = tuple(arg.value for arg in args)
  logp_BT, entropy_BT, lse_BT = _spread(_forward, sizes, *args)
  return (logp_BT, entropy_BT), (*args, lse_BT, entropy_BT)


def _token_logprobs_backward(sizes, kept, cotangents):
  unused = jax.custom_derivatives.SymbolicZero
  asked = (None if type(g) is unused else g for g in cotangents)
  return (*_spread(_backward, sizes, *kept, *asked), None, None)


_token_logprobs.defvjp(
  _token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True
)


def _spread(function, sizes, *args):
  """The function over the ambient mesh, or as it is where none is or none divides."""
  devices, (hidden_BTD, head_VD) = sharding.ambient(), args[:2]
  function = functools.partial(function, sizes=sizes)
  head = P('tensor', 'fsdp')
  divides = devices is not None and not (
    hidden_BTD.shape[0] % sharding.row_shards(devices)
    or any(n % devices.shape[axis] for n, axis in zip(head_VD.shape, head, strict=True))
  )
  if not divides:
    return function(*args, sharded=False)
  rows = P(sharding.ROWS)
  backward = function.func is _backward
  return jax.shard_map(
    functools.partial(function, sharded=True),
    # Arguments are rows, but for the head and the temperature.
    in_specs=(rows, head, rows, P(), *[rows] * (len(args) - 4)),
    out_specs=(rows, head) if backward else rows,
    check_vma=False,
  )(*args)


def _gather(head_VD, dtype, sharded):
  """The head that this device multiplies by: its share of V, the whole of D."""
  if not sharded or jax.lax.axis_size('fsdp') == 1:
    return head_VD  # cast where it is used
  return jax.lax.all_gather(head_VD.astype(dtype), 'fsdp', axis=1, tiled=True)


def _first(head_VD, sharded):
  """The first token of this device's share of the vocabulary."""
  return jax.lax.axis_index('tensor') * head_VD.shape[0] if sharded else 0


def _blocks(V: int, block: int) -> int:
  """Into how many equal parts of at most `block` rows V falls; else 1."""
  least = -(-V // block)
  return next((n for n in range(least, 8 * least) if V % n == 0), 1)


def _cut(x, i, size, axis):
  return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _block_of(head_VD, i, size, dtype):
  """Rows of the head in the dtype of its products.

  A one that XLA cannot see through stands before the cast: without it the cast moves
  out of the loops and all of a float32 head is copied, 1 GiB for the 7B model's.
  """
  head_vD = _cut(head_VD, i, size, 0)
  if head_vD.dtype == dtype:
    return head_vD
  return (head_vD * jax.lax.optimization_barrier(jnp.ones((), head_vD.dtype))).astype(
    dtype
  )


def _logits(hidden_BtD, head_vD, temperature):
  logits_Btv = jnp.einsum(
    'btd,vd->btv', hidden_BtD, head_vD, preferred_element_type=jnp.float32
  )
  return logits_Btv / temperature


def _forward(hidden_BTD, head_VD, token_BT, temperature, *, sizes, sharded):
  """(logp_BT, entropy_BT, lse_BT); lse is the logarithm of the softmax's divisor."""
  head_VD = _gather(head_VD, hidden_BTD.dtype, sharded)
  chunk, blocks = sizes[0], _blocks(head_VD.shape[0], sizes[1])
  chunks, block = hidden_BTD.shape[1] // chunk, head_VD.shape[0] // blocks
  token_BT = token_BT - _first(head_VD, sharded)

  def score(_, j):
    hidden_BtD, token_Bt = (
      _cut(x, j // blocks, chunk, 1) for x in (hidden_BTD, token_BT)
    )
    head_vD = _block_of(head_VD, j % blocks, block, hidden_BTD.dtype)
    logits_Btv = _logits(hidden_BtD, head_vD, temperature)
    most_Bt = logits_Btv.max(-1)
    below_Btv = logits_Btv - most_Bt[..., None]
    share_Btv = jnp.exp(below_Btv)
    at_Bt = token_Bt - j % blocks * block
    said_Bt1 = jnp.take_along_axis(
      logits_Btv, jnp.clip(at_Bt, 0, block - 1)[..., None], -1
    )
    said_Bt = jnp.where((at_Bt >= 0) & (at_Bt < block), said_Bt1[..., 0], -jnp.inf)
    sums = share_Btv.sum(-1), (share_Btv * below_Btv).sum(-1)
    return None, (most_Bt, *sums, said_Bt)

  # [chunks * blocks, B, chunk] -> [blocks, B, T]
  parts = (
    jnp.moveaxis(x.reshape(chunks, blocks, -1, chunk), 0, 2).reshape(
      blocks, *token_BT.shape
    )
    for x in jax.lax.scan(score, None, jnp.arange(chunks * blocks))[1]
  )
  return _combine(*parts, sharded)


def _combine(most_bBT, sum_bBT, spread_bBT, said_bBT, sharded):
  """One softmax of many: blocks of the vocabulary here, and shards elsewhere.

  All is relative to the maximum, so that nothing large is subtracted from a like.
  """
  top_BT = most_bBT.max(0)
  top_BT = jax.lax.pmax(top_BT, 'tensor') if sharded else top_BT
  fall_bBT = most_bBT - top_BT[None]
  said_bBT = jnp.where(jnp.isinf(said_bBT), 0, said_bBT - top_BT[None])
  spread_bBT = jnp.exp(fall_bBT) * (spread_bBT + fall_bBT * sum_bBT)
  parts = (jnp.exp(fall_bBT) * sum_bBT).sum(0), spread_bBT.sum(0), said_bBT.sum(0)
  sum_BT, spread_BT, said_BT = jax.lax.psum(parts, 'tensor') if sharded else parts
  log_sum_BT = jnp.log(sum_BT)
  entropy_BT = log_sum_BT - spread_BT / sum_BT
  return said_BT - log_sum_BT, entropy_BT, top_BT + log_sum_BT


def _backward(
  hidden_BTD,
  head_VD,
  token_BT,
  temperature,
  lse_BT,
  entropy_BT,
  by_logp_BT,
  by_entropy_BT,
  *,
  sizes,
  sharded,
):
  """The gradients of hidden_BTD and head_VD, in their dtypes.

  Block after block of the vocabulary, all chunks each: a block's share of the head's
  gradient is summed in float32 and written once.
  """
  kind = head_VD.dtype
  head_VD = _gather(head_VD, hidden_BTD.dtype, sharded)
  chunk, blocks = sizes[0], _blocks(head_VD.shape[0], sizes[1])
  chunks, block = hidden_BTD.shape[1] // chunk, head_VD.shape[0] // blocks
  token_BT = token_BT - _first(head_VD, sharded)
  by_logp_BT = jnp.zeros_like(lse_BT) if by_logp_BT is None else by_logp_BT

  def of_block(by_hidden_BTD, k):
    head_vD = _block_of(head_VD, k, block, hidden_BTD.dtype)
    id_v = k * block + jnp.arange(block)

    def of_chunk(grads, i):
      by_hidden_BTD, by_head_vD = grads
      hidden_BtD, token_Bt, lse_Bt, by_logp_Bt = (
        _cut(x, i, chunk, 1) for x in (hidden_BTD, token_BT, lse_BT, by_logp_BT)
      )
      logp_Btv = _logits(hidden_BtD, head_vD, temperature) - lse_Bt[..., None]
      p_Btv = jnp.exp(logp_Btv)
      said_Btv = token_Bt[..., None] == id_v[None, None]
      by_Btv = by_logp_Bt[..., None] * (said_Btv - p_Btv)
      if by_entropy_BT is not None:  # dH/dz = -p (log p + H)
        g_Bt1, entropy_Bt1 = (
          _cut(x, i, chunk, 1)[..., None] for x in (by_entropy_BT, entropy_BT)
        )
        by_Btv -= g_Bt1 * p_Btv * (logp_Btv + entropy_Bt1)
      by_Btv = (by_Btv / temperature).astype(hidden_BTD.dtype)
      by_hidden_BtD = _cut(by_hidden_BTD, i, chunk, 1) + jnp.einsum(
        'btv,vd->btd', by_Btv, head_vD, preferred_element_type=jnp.float32
      )
      by_head_vD += jnp.einsum(
        'btv,btd->vd', by_Btv, hidden_BtD, preferred_element_type=jnp.float32
      )
      by_hidden_BTD = jax.lax.dynamic_update_slice_in_dim(
        by_hidden_BTD, by_hidden_BtD, i * chunk, 1
      )
      return (by_hidden_BTD, by_head_vD), None

    zeros_vD = jnp.zeros((block, head_VD.shape[1]), jnp.float32)
    grads, _ = jax.lax.scan(of_chunk, (by_hidden_BTD, zeros_vD), jnp.arange(chunks))
    return grads[0], grads[1].astype(jnp.float32 if sharded else kind)

  zeros_BTD = jnp.zeros(hidden_BTD.shape, jnp.float32)
  by_hidden_BTD, by_head_bvD = jax.lax.scan(of_block, zeros_BTD, jnp.arange(blocks))
  by_hidden_BTD = by_hidden_BTD.astype(hidden_BTD.dtype)
  by_head_VD = by_head_bvD.reshape(head_VD.shape)
  if sharded:
    by_hidden_BTD = jax.lax.psum(by_hidden_BTD, 'tensor')
    by_head_VD = jax.lax.psum_scatter(
      by_head_VD, 'fsdp', scatter_dimension=1, tiled=True
    )
    by_head_VD = jax.lax.psum(by_head_VD, 'data')
  return by_hidden_BTD, by_head_VD.astype(kind)
