"""Log-probabilities by tiles equal those from all the logits, gradients too."""

import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.models import logprob_tiles, logprobs
from bapo_jax.models.logprob_tiles import Tile
from benchmarks import hlo

B = 8
T = 7
D = 16
V = 20
CHUNKS = pytest.mark.parametrize(('chunk', 'block'), [(1, 4096), (3, 5), (T + 5, 7)])


def example():
  rng = np.random.default_rng(0)
  return (
    rng.standard_normal((B, T, D), np.float32),
    rng.standard_normal((V, D), np.float32),
    rng.integers(0, V, (B, T), np.int32),
  )


def scored(variant, hidden_BTD, head_VD, token_BT, tile):
  """Returns the statistics of tokens by tiles, in a variant."""

  def score(hidden_BTD, token_BT):
    return logprobs.token_stats(hidden_BTD, head_VD, token_BT, 0.6, tile=tile)

  return variant(score, jnp.asarray(hidden_BTD), jnp.asarray(token_BT))


@CHUNKS
def test_values_equal_the_oracle(variant, chunk, block):
  hidden_BTD, head_VD, token_BT = example()
  found = scored(variant, hidden_BTD, head_VD, token_BT, Tile(chunk, block))
  expected = oracles.logprob_oracle(hidden_BTD, head_VD, token_BT, 0.6)
  assert all(x.dtype == jnp.float32 for x in found[:3])
  # Logits up to 10 / 0.6 from sums of 16; the exponentials of 20 are added up.
  making.close_trees(tuple(found), expected, count=256)


@CHUNKS
def test_a_token_outside_the_vocabulary_has_probability_0(variant, chunk, block):
  hidden_BTD, head_VD, token_BT = example()
  outside_BT = np.zeros((B, T), bool)
  outside_BT[1::2, 2:5] = True
  outsiders_BT = np.resize([-1, V, V + 9], (B, T)).astype(np.int32)
  moved_BT = np.where(outside_BT, outsiders_BT, token_BT)
  tile = Tile(chunk, block)
  inside = scored(variant, hidden_BTD, head_VD, token_BT, tile)
  found = scored(variant, hidden_BTD, head_VD, moved_BT, tile)
  expected_BT = np.where(outside_BT, -np.inf, inside.logp_BT)
  np.testing.assert_array_equal(found.logp_BT, expected_BT)
  np.testing.assert_array_equal(found.entropy_BT, inside.entropy_BT)


@CHUNKS
def test_gradients_equal_the_oracle(chunk, block):
  hidden_BTD, head_VD, token_BT = example()
  weight_2BT = np.random.default_rng(1).standard_normal((2, B, T), np.float32)

  def total(score, hidden_BTD, head_VD):
    scored = score(hidden_BTD, head_VD, token_BT, 0.8)[:2]
    return sum((w * x).sum() for w, x in zip(weight_2BT, scored, strict=True))

  score = functools.partial(logprobs.token_stats, tile=Tile(chunk, block))
  found = jax.jit(jax.grad(functools.partial(total, score), argnums=(0, 1)))
  expected = jax.grad(functools.partial(total, oracles.logprob_oracle), argnums=(0, 1))
  # Sums of 20 tokens, and of 56 columns, of the terms above.
  making.close_trees(
    found(hidden_BTD, head_VD), expected(hidden_BTD, head_VD), count=1024
  )


def test_the_covariance_by_hand_and_without_a_gradient():
  # pi = (.9, .1): H = .32508; sum of pi^2 (log pi + H) is .81 .21972 - .01 1.97750.
  head_VD = jnp.log(jnp.array([[0.9], [0.1]]))
  token_BT = jnp.zeros((1, 2), jnp.int32)

  def covariance(head_VD):
    hidden_BTD = jnp.ones((1, 2, 1))
    tile = Tile(rows=1)
    stats = logprobs.token_stats(hidden_BTD, head_VD, token_BT, 1.0, tile=tile)
    return stats.covariance_BT.sum()

  np.testing.assert_allclose(covariance(head_VD), 2 * 0.1582, atol=1e-4)
  np.testing.assert_array_equal(jax.grad(covariance)(head_VD), 0)


def test_parts_are_equal_and_no_larger_than_the_limit():
  # 151,936 = 2^7 1187 has no divisor near 4096: the last of 38 parts exceeds it.
  assert logprob_tiles.split(151936, 4096, 128) == (38, 4096)
  assert logprob_tiles.split(151936, 37120, 128) == (5, 30464)
  assert logprob_tiles.split(50257, 1 << 20, 128) == (1, 50257)
  # 900 columns at most 256 at a time.
  assert logprob_tiles.split(900, 256, 8) == (4, 225)
  assert logprob_tiles.split(901, 256, 8) == (4, 232)
  for n, most in ((20, 7), (151, 10), (1, 5), (257, 128)):
    parts, size = logprob_tiles.split(n, most, 128)
    assert size <= most and (parts - 1) * size < n <= parts * size


def test_the_largest_tile_fits_its_memory():
  # The sizes of a CPU, by hand: 2^20 logits, at most 256 columns.
  assert logprob_tiles.largest(4, 49152) == (256, 4096)
  # 1,300 MiB have room for all 151,936 words of 2,242 tokens; 290 MiB for 37,120.
  assert logprob_tiles.largest(1300, 151936) == (2242, 151936)
  assert logprob_tiles.largest(290, 151936) == (2048, 37120)
  for mib, V in ((1, 151936), (64, 32000), (512, 262144)):
    columns, rows = logprob_tiles.largest(mib, V)
    assert columns * rows * 4 <= mib * 2**20 and rows <= V


def test_no_tile_waits_for_another_device():
  hidden_BTD, head_VD, token_BT = example()

  def total(*args):
    stats = logprobs.token_stats(*args, 0.8, tile=Tile(2, 5))
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
  hidden_BTD = jnp.ones((1, 512, 1), jnp.bfloat16)
  head_VD = jnp.zeros((2, 1))
  token_BT = jnp.zeros((1, 512), jnp.int32)

  def total(head_VD):
    stats = logprobs.token_stats(hidden_BTD, head_VD, token_BT, 1.0, tile=Tile(1))
    return stats.logp_BT.sum()

  # d logp / d z = 1 - 1/2 of the chosen, -1/2 of the other, 512 times.
  by_head_VD = jax.jit(jax.grad(total))(head_VD.astype(jnp.bfloat16))
  assert by_head_VD.dtype == jnp.bfloat16
  np.testing.assert_array_equal(by_head_VD.astype(jnp.float32), [[256], [-256]])


@pytest.mark.parametrize(
  ('V', 'tile', 'most'),
  [
    # 2 x 512 x 1000 logits are 4 MB; a chunk of 16 columns 128 kB, in both passes.
    (1000, Tile(16), 2**20),
    # Gemma's vocabulary: a GiB of logits, in tiles of 2 x 4 MiB, and a head of 8 MiB.
    (262144, logprob_tiles.largest(4, 262144), 5 * 2**23),
  ],
)
def test_the_logits_never_exist(V, tile, most):
  like = jax.ShapeDtypeStruct
  hidden = like((2, 512, 8), jnp.float32)
  head = like((V, 8), jnp.float32)

  def loss(hidden_BTD, head_VD, token_BT):
    stats = logprobs.token_stats(hidden_BTD, head_VD, token_BT, 1.0, tile=tile)
    return stats.logp_BT.sum()

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(hidden, head, like((2, 512), jnp.int32)).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < most
