"""Log-probability and entropy of given tokens, without the [B, T, V] logits.

1. `sequence_logprobs` runs the model over whole rows and scores every token;
2. `token_logprobs` scores tokens given hidden states and the head: two floats per token
   come out, by the tiles of logprob_tiles.py, in both directions;
3. under a mesh the tiles run on one shard of rows and vocabulary per device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import knobs, logprob_tiles, transformer
from bapo_jax.types import Tree

_D = knobs.LogprobsConfig()


def token_logprobs(
  hidden_BTD: Array,
  head_VD: Array,
  token_BT: Array,
  temperature: float | Array,
  *,
  chunk: int = _D.chunk,
  block: int = 4096,
) -> tuple[Array, Array]:
  """(logp_BT, entropy_BT) of token_BT, column t given hidden t; float32, nats.

  Both have exact gradients to hidden and head; the entropy's costs nothing unless it is
  differentiated. The temperature has none.

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
  logp_BT, entropy_BT = _token_logprobs(
    (chunk, block), hidden_BTD, head_VD, token_BT, jnp.float32(temperature)
  )
  return logp_BT[:, :T], entropy_BT[:, :T]


def sequence_logprobs(
  params: Tree,
  tokens_BT: Array,
  spec: transformer.ModelSpec,
  temperature: float | Array,
  *,
  chunk: int = _D.chunk,
) -> tuple[Array, Array]:
  """(logp_BT, entropy_BT) of every token of whole rows; 0 in column 0, unpredicted.

  Args:
    temperature, chunk: as for `token_logprobs`.
  """
  hidden_BTD = transformer.forward(params, tokens_BT, spec)
  # The last column scores the first token and is dropped: cheaper than a copy of all
  # the others, and T divides into chunks where T - 1 does not.
  target_BT = jnp.roll(tokens_BT, -1, axis=1)
  logp_BT, entropy_BT = token_logprobs(
    hidden_BTD, transformer.head(params), target_BT, temperature, chunk=chunk
  )
  return _shifted(logp_BT), _shifted(entropy_BT)


def _shifted(x_BT: Array) -> Array:
  """Column t-1 moved to column t; column 0 is 0."""
  return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(sizes, *args):
  return _over_mesh(logprob_tiles.forward, sizes, *args)[:2]


def _token_logprobs_forward(sizes, *args):
  args = tuple(arg.value for arg in args)
  logp_BT, entropy_BT, lse_BT = _over_mesh(logprob_tiles.forward, sizes, *args)
  return (logp_BT, entropy_BT), (*args, lse_BT, entropy_BT)


def _token_logprobs_backward(sizes, residuals, cotangents):
  unused = jax.custom_derivatives.SymbolicZero
  wanted = (None if type(d) is unused else d for d in cotangents)
  return (*_over_mesh(logprob_tiles.backward, sizes, *residuals, *wanted), None, None)


_token_logprobs.defvjp(
  _token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True
)


def _over_mesh(
  function: Callable[..., Any], sizes: tuple[int, int], *args: Array | None
) -> Any:
  """The function over the ambient mesh; on whole arrays if no mesh divides them."""
  mesh, (hidden_BTD, head_VD) = sharding.ambient(), args[:2]
  assert hidden_BTD is not None and head_VD is not None
  tiled = functools.partial(function, sizes=sizes)
  head = P('tensor', 'fsdp')
  if mesh is None or (
    hidden_BTD.shape[0] % sharding.row_shards(mesh)
    or any(n % mesh.shape[axis] for n, axis in zip(head_VD.shape, head, strict=True))
  ):
    return tiled(*args, sharded=False)
  rows = P(sharding.ROWS)
  return jax.shard_map(
    functools.partial(tiled, sharded=True),
    # Arguments are rows, except the head and the temperature.
    in_specs=(rows, head, rows, P(), *[rows] * (len(args) - 4)),
    out_specs=(rows, head) if function is logprob_tiles.backward else rows,
    check_vma=False,
  )(*args)
