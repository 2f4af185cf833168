"""Log-probabilities by tiles equal those from all the logits, gradients too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.models import logprob_tiles, logprobs
from bapo_jax.tools.plan import hlo

B, T, D, V = 8, 7, 16, 20
CHUNKS = pytest.mark.parametrize(('chunk', 'block'), [(1, 4096), (3, 5), (T + 5, 7)])


def example(seed: int = 0):
  rng = np.random.default_rng(seed)
  return (
    rng.standard_normal((B, T, D), np.float32),
    rng.standard_normal((V, D), np.float32),
    rng.integers(0, V, (B, T), np.int32),
  )


@CHUNKS
def test_values_equal_the_oracle(variant, chunk, block):
  hidden_BTD, head_VD, token_BT = example()

  def score(hidden_BTD, token_BT):
    return logprobs.token_stats(
      hidden_BTD, head_VD, token_BT, 0.6, chunk=chunk, block=block
    )

  found = variant(score, jnp.asarray(hidden_BTD), jnp.asarray(token_BT))
  expected = oracles.logprob_oracle(hidden_BTD, head_VD, token_BT, 0.6)
  assert all(x.dtype == jnp.float32 for x in found)
  # Logits up to 10 / 0.6 from sums of 16; the exponentials of 20 are added up.
  oracles.close(tuple(found), expected, 64)


@CHUNKS
def test_gradients_equal_the_oracle(chunk, block):
  hidden_BTD, head_VD, token_BT = example()
  weight_2BT = np.random.default_rng(1).standard_normal((2, B, T), np.float32)

  def total(score, hidden_BTD, head_VD):
    scored = score(hidden_BTD, head_VD, token_BT, 0.8)[:2]
    return sum((w * x).sum() for w, x in zip(weight_2BT, scored, strict=True))

  score = functools.partial(logprobs.token_stats, chunk=chunk, block=block)
  found = jax.jit(jax.grad(functools.partial(total, score), argnums=(0, 1)))
  expected = jax.grad(functools.partial(total, oracles.logprob_oracle), argnums=(0, 1))
  # Sums of 20 tokens, and of 56 columns, of the terms above.
  oracles.close(found(hidden_BTD, head_VD), expected(hidden_BTD, head_VD), 128)


def test_temperature_by_hand():
  # Logits 0 and ln 3: 1/4 and 3/4; at temperature 1/2 they double: 1/10 and 9/10.
  hidden_BTD, head_VD = jnp.ones((1, 2, 1)), jnp.array([[0.0], [math.log(3)]])
  token_BT = jnp.array([[0, 1]])
  for temperature, p in ((1.0, (1 / 4, 3 / 4)), (0.5, (1 / 10, 9 / 10))):
    logp_BT, entropy_BT, _ = logprobs.token_stats(
      hidden_BTD, head_VD, token_BT, temperature
    )
    np.testing.assert_allclose(jnp.exp(logp_BT[0]), p, rtol=1e-6)
    entropy = -sum(q * math.log(q) for q in p)
    np.testing.assert_allclose(entropy_BT[0], [entropy, entropy], rtol=1e-6)


def test_the_covariance_by_hand_and_without_a_gradient():
  # pi = (.9, .1): H = .32508; sum of pi^2 (log pi + H) is .81 .21972 - .01 1.97750.
  head_VD, token_BT = jnp.log(jnp.array([[0.9], [0.1]])), jnp.zeros((1, 2), jnp.int32)

  def covariance(head_VD):
    stats = logprobs.token_stats(jnp.ones((1, 2, 1)), head_VD, token_BT, 1.0, block=1)
    return stats.covariance_BT.sum()

  np.testing.assert_allclose(covariance(head_VD), 2 * 0.1582, atol=1e-4)
  np.testing.assert_array_equal(jax.grad(covariance)(head_VD), 0)


def test_blocks_are_equal_and_no_larger_than_the_limit():
  # 152064 = 2^9 27 11: 38 blocks of 4096 would do, 44 is the next that divides.
  assert logprob_tiles.num_blocks(152064, 4096) == 44
  assert logprob_tiles.num_blocks(20, 4096) == 1
  assert logprob_tiles.num_blocks(20, 10) == 2
  assert logprob_tiles.num_blocks(20, 7) == 4
  assert logprob_tiles.num_blocks(151, 10) == 1  # a prime divides into single rows only


def test_no_tile_waits_for_another_device():
  hidden_BTD, head_VD, token_BT = example()

  def total(*args):
    stats = logprobs.token_stats(*args, 0.8, chunk=2, block=5)
    return (stats.logp_BT * stats.entropy_BT).sum(), stats

  devices = sharding.make(2, 2, 2)
  rows = sharding.over_rows(devices)
  place = sharding.shardings({'head': head_VD}, devices)['head']
  args = jax.device_put((hidden_BTD, head_VD, token_BT), (rows, place, rows))
  gradient = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
  with sharding.current(devices):
    text = gradient.lower(*args).compile().as_text()
  assert hlo.in_loops(text) == []
  # The head [20/2, 16/2] becomes [10, 16] once forward and once backward.
  gathers = [line for line in text.splitlines() if ' all-gather(' in line]
  assert len(gathers) in (1, 2) and all('f32[10,16]' in line for line in gathers)


def test_a_bfloat16_head_gets_the_sum_that_float32_would_give():
  # 512 equal contributions: added up in bfloat16 they would stop growing at 256.
  hidden_BTD, head_VD = jnp.ones((1, 512, 1), jnp.bfloat16), jnp.zeros((2, 1))
  token_BT = jnp.zeros((1, 512), jnp.int32)

  def total(head_VD):
    stats = logprobs.token_stats(hidden_BTD, head_VD, token_BT, 1.0, chunk=1)
    return stats.logp_BT.sum()

  # d logp / d z = 1 - 1/2 of the chosen, -1/2 of the other, 512 times.
  by_head_VD = jax.jit(jax.grad(total))(head_VD.astype(jnp.bfloat16))
  assert by_head_VD.dtype == jnp.bfloat16
  np.testing.assert_array_equal(by_head_VD.astype(jnp.float32), [[256], [-256]])


def test_the_logits_never_exist():
  # 2 x 512 x 1000 logits are 4 MB; a chunk of 16 columns 128 kB, forward and backward.
  like = jax.ShapeDtypeStruct
  hidden, head = like((2, 512, 8), jnp.float32), like((1000, 8), jnp.float32)

  def loss(hidden_BTD, head_VD, token_BT):
    stats = logprobs.token_stats(hidden_BTD, head_VD, token_BT, 1.0, chunk=16)
    return stats.logp_BT.sum()

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(hidden, head, like((2, 512), jnp.int32)).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2**20
