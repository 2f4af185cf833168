"""Log-probabilities in chunks equal those by way of all the logits, gradients too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bapo_jax import logprob, model

B, T, D, V = 8, 7, 16, 20
CHUNKS = pytest.mark.parametrize('chunk', [1, 3, T, T + 5])


def example(seed: int = 0):
  rng = np.random.default_rng(seed)
  return (
    rng.standard_normal((B, T, D), np.float32),
    rng.standard_normal((V, D), np.float32),
    rng.integers(0, V, (B, T), np.int32),
  )


@CHUNKS
@pytest.mark.parametrize('temperature', [0.6, 1.0])
def test_values_equal_the_oracle(variant, chunk, temperature):
  hidden_BTD, head_VD, token_BT = example()

  def score(hidden_BTD, token_BT):
    return logprob.chosen(hidden_BTD, head_VD, token_BT, temperature, chunk=chunk)

  found = variant(score, jnp.asarray(hidden_BTD), jnp.asarray(token_BT))
  expected = oracles.logprob_oracle(hidden_BTD, head_VD, token_BT, temperature)
  for a, b in zip(found, expected, strict=True):
    assert a.shape == (B, T) and a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=1e-5)


@CHUNKS
def test_gradients_equal_the_oracle(chunk):
  hidden_BTD, head_VD, token_BT = example()
  weight_2BT = np.random.default_rng(1).standard_normal((2, B, T), np.float32)

  def total(score, hidden_BTD, head_VD):
    scored = score(hidden_BTD, head_VD, token_BT, 0.8)
    return sum((w * x).sum() for w, x in zip(weight_2BT, scored, strict=True))

  score = functools.partial(logprob.chosen, chunk=chunk)
  found = jax.jit(jax.grad(functools.partial(total, score), argnums=(0, 1)))
  expected = jax.grad(functools.partial(total, oracles.logprob_oracle), argnums=(0, 1))
  for a, b in zip(
    found(hidden_BTD, head_VD), expected(hidden_BTD, head_VD), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_temperature_by_hand():
  # Logits 0 and ln 3: 1/4 and 3/4; at temperature 1/2 they double: 1/10 and 9/10.
  hidden_BTD, head_VD = jnp.ones((1, 2, 1)), jnp.array([[0.0], [math.log(3)]])
  token_BT = jnp.array([[0, 1]])
  for temperature, p in ((1.0, (1 / 4, 3 / 4)), (0.5, (1 / 10, 9 / 10))):
    logp_BT, entropy_BT = logprob.chosen(hidden_BTD, head_VD, token_BT, temperature)
    np.testing.assert_allclose(jnp.exp(logp_BT[0]), p, rtol=1e-6)
    entropy = -sum(q * math.log(q) for q in p)
    np.testing.assert_allclose(entropy_BT[0], [entropy, entropy], rtol=1e-6)


def test_a_uniform_policy_has_entropy_log_v():
  hidden_BTD, _, token_BT = example()
  logp_BT, entropy_BT = logprob.chosen(hidden_BTD, jnp.zeros((V, D)), token_BT, 1.0)
  np.testing.assert_allclose(entropy_BT, math.log(V), rtol=1e-6)  # 2.9957 nats
  np.testing.assert_allclose(logp_BT, -math.log(V), rtol=1e-6)


def test_rows_score_each_token_given_those_before_it():
  spec = model.ModelSpec(
    vocab=V, width=D, layers=1, heads=2, kv_heads=1, head_width=8, ffn=24, tied=False
  )
  params, (_, _, tokens_BT) = oracles.noisy(spec, 0), example()
  logp_BT, entropy_BT = logprob.of_rows(params, tokens_BT, spec, 0.7, chunk=4)
  assert not logp_BT[:, 0].any() and not entropy_BT[:, 0].any()
  for t in (1, T - 1):  # the row ends before t: nothing but what came before is seen
    hidden_B1D = model.forward(params, tokens_BT[:, :t], spec)[:, -1:]
    logp_B1, entropy_B1 = oracles.logprob_oracle(
      hidden_B1D, params['head'], tokens_BT[:, t : t + 1], 0.7
    )
    np.testing.assert_allclose(logp_BT[:, t], logp_B1[:, 0], atol=1e-5)
    np.testing.assert_allclose(entropy_BT[:, t], entropy_B1[:, 0], atol=1e-5)


def test_the_logits_never_exist():
  # 2 x 512 x 1000 logits are 4 MB; a chunk of 16 columns 128 kB, forward and backward.
  like = jax.ShapeDtypeStruct
  hidden, head = like((2, 512, 8), jnp.float32), like((1000, 8), jnp.float32)

  def loss(hidden_BTD, head_VD, token_BT):
    logp_BT, _ = logprob.chosen(hidden_BTD, head_VD, token_BT, 1.0, chunk=16)
    return logp_BT.sum()

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(hidden, head, like((2, 512), jnp.int32)).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2**20
