"""Slow, obvious versions of what the package does quickly, to compare it with."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax import model

# ---------------------------------------------------------------- policy and sampler


def noisy(spec: model.ModelSpec, seed: int, size: float = 0.3) -> dict:
  """Parameters with no zero bias and no unit scale left: each of them matters."""
  rng = np.random.default_rng(seed)
  flat = {}
  for path, (shape, scale) in model.describe(spec).items():
    noise, start = rng.standard_normal(shape, np.float32), float(scale == 'ones')
    scale = size if isinstance(scale, str) else math.hypot(scale, size)
    flat[path] = start + np.float32(scale) * noise
  return model.unflatten(jax.tree.map(jnp.asarray, flat))


def logprob_oracle(hidden_BTD, head_VD, token_BT, temperature):
  """(logp_BT, entropy_BT) by way of all the logits at once."""
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, head_VD) / temperature
  p_BTV = jnp.exp(logits_BTV - logits_BTV.max(-1, keepdims=True))
  p_BTV = p_BTV / p_BTV.sum(-1, keepdims=True)
  said_BTV = jax.nn.one_hot(token_BT, head_VD.shape[0])
  return jnp.log((p_BTV * said_BTV).sum(-1)), -(p_BTV * jnp.log(p_BTV)).sum(-1)


@functools.partial(jax.jit, static_argnames='spec')
def _best_next(params, tokens_T, n, spec):
  hidden_D = model.forward(params, tokens_T[None], spec)[0, n - 1]
  return jnp.argmax(model.head(params) @ hidden_D)


def decode_oracle(params, prompt: list[int], spec, new: int, eos: tuple[int, ...]):
  """The likeliest token, again and again; every time the whole row anew, no cache."""
  row, length = list(prompt), len(prompt) + new
  while len(row) < length:
    padded_T = jnp.asarray(row + [0] * (length - len(row)))
    row.append(int(_best_next(params, padded_T, len(row), spec)))
    if row[-1] in eos:
      break
  return row[len(prompt) :]
