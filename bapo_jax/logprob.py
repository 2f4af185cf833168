"""Log-probability of the chosen tokens and entropy, chunk by chunk over the tokens.

The [B, T, V] logits never exist: a chunk of columns is projected, reduced to two
numbers a token and forgotten, and projected again in the backward pass.
"""

import jax
import jax.numpy as jnp

from bapo_jax import model


def chosen(hidden_BTD, head_VD, token_BT, temperature, *, chunk: int = 256):
  """(logp_BT, entropy_BT), nats, float32: row t scores token_BT[:, t] given hidden t.

  Args:
    hidden_BTD: final hidden states that predict the tokens (already shifted by one).
    head_VD: output projection.
    token_BT: the tokens to score.
    temperature: divides the logits; the distribution is the one sampled from.
    chunk: columns of T projected at once; memory is B * chunk * V floats.
  """
  B, T, _ = hidden_BTD.shape
  chunk = min(chunk, T)
  pad = -T % chunk

  def columns(x):  # [B, T, ...] -> [T / chunk, B, chunk, ...]
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def score(_, xs):
    hidden_BtD, token_Bt = xs
    logits_BtV = jnp.einsum(
      'btd,vd->btv',
      hidden_BtD,
      head_VD.astype(hidden_BtD.dtype),
      preferred_element_type=jnp.float32,
    )
    logp_BtV = jax.nn.log_softmax(logits_BtV / temperature)
    logp_Bt = jnp.take_along_axis(logp_BtV, token_Bt[..., None], -1)[..., 0]
    entropy_Bt = -(jnp.exp(logp_BtV) * logp_BtV).sum(-1)
    return None, (logp_Bt, entropy_Bt)

  _, scored = jax.lax.scan(score, None, (columns(hidden_BTD), columns(token_BT)))
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(B, T + pad)[:, :T], scored
  )


def of_rows(params, tokens_BT, spec, temperature, *, chunk: int = 256):
  """(logp_BT, entropy_BT) of every token of whole rows; column 0, unpredicted, is 0."""
  hidden_BTD = model.forward(params, tokens_BT, spec)
  logp, entropy = chosen(
    hidden_BTD[:, :-1], model.head(params), tokens_BT[:, 1:], temperature, chunk=chunk
  )
  return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (logp, entropy))
