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


# --- clip ----------------------------------------------------------------------------


def share(ratio_BT, adv_BT, mask_BT, low, high):
  """P / (P + N) of the clip module, in float64."""
  size_BT = np.float64(ratio_BT) * np.abs(adv_BT) * mask_BT
  positive = size_BT[(adv_BT > 0) & (ratio_BT < high)].sum()
  negative = size_BT[(adv_BT < 0) & (ratio_BT > low)].sum()
  return positive / (positive + negative) if positive + negative else 0.0


def algorithm_1(
  ratio_BT, adv_BT, mask_BT, *, target, low, high, low_step, high_step
) -> tuple[np.float32, np.float32, int, bool]:
  """Algorithm 1 of arXiv:2510.18927 as printed: (c_low, c_high, moves, met).

  The steps are counted, not added up: sixteen times 0.02 in floats is short of 0.32.
  """
  lows, highs = 0, 0
  last_low = round((low[1] - low[0]) / low_step)
  last_high = round((high[1] - high[0]) / high_step)
  while True:
    c_low = np.float32(low[0] + lows * low_step)
    c_high = np.float32(high[0] + highs * high_step)
    reached = np.float32(share(ratio_BT, adv_BT, mask_BT, c_low, c_high))
    met = bool(reached >= np.float32(target))
    if met or lows + 1 > last_low:
      return c_low, c_high, lows + highs, met
    if highs + 1 <= last_high:
      highs += 1
    else:
      lows += 1


# --- buffer --------------------------------------------------------------------------


def shelve(hard, good, tried, now, *, c1, c2, c3, G, max_age, capacity):
  """Section 3 of arXiv:2602.20722 on lists, newest first.

  Args:
    hard: [(id, step)]. good: [(id, step, row)]. tried: [(id, right answers, row)] in
      the order asked; of a problem asked twice the later verdict counts.
  """
  last = {problem: i for i, (problem, _, _) in enumerate(tried)}
  tried = [entry for i, entry in enumerate(tried) if last[entry[0]] == i]
  hard = [entry for entry in hard if entry[0] not in last]
  hard = [(problem, now) for problem, k, _ in tried if k <= c1 * G] + hard
  fits = [
    (problem, now, row)
    for problem, k, row in tried
    if c2 * G <= k <= c3 * G and 0 < k < G
  ]
  renewed = {problem for problem, _, _ in fits}
  good = fits + [entry for entry in good if entry[0] not in renewed]
  young = [entry for entry in good[:capacity] if now + 1 - entry[1] <= max_age]
  return hard[:capacity], young
