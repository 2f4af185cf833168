"""Tokens follow the distribution that is recorded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.rollout import knobs, sampling
from bapo_jax.training import budget

KEY = jax.random.key(5)


def drawn(uid_S, position_S, logits_V, temperature):
  """Tokens that were drawn, whose log-probabilities are right, and the softmax."""
  logits_SV = jnp.tile(logits_V, (len(uid_S), 1))
  token_S, logp_S = jax.jit(sampling.draw)(
    KEY, uid_S, position_S, logits_SV, temperature
  )
  p_V = np.exp(np.asarray(logits_V, float) / temperature)
  p_V /= p_V.sum()
  np.testing.assert_allclose(logp_S, np.log(p_V)[token_S], atol=1e-5)
  return token_S, p_V


@pytest.mark.parametrize('by', ['uid', 'position'])
def test_draws_follow_the_softmax(by, temperature=0.6):
  n, logits_V = 20_000, jnp.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0])
  count_S, same_S = jnp.arange(n), jnp.zeros(n, int)
  uid_S, position_S = (count_S, same_S) if by == 'uid' else (same_S, count_S)
  token_S, p_V = drawn(uid_S, position_S, logits_V, temperature)
  # Neighbours are independent: pairs follow the product. Bretagnolle-Huber-Carol:
  # P(TV >= e) <= 2^36 exp(-2 n/2 e^2); of temperatures 0.6 and 1.0 it is above 0.20.
  pair_VV = np.zeros((6, 6))
  np.add.at(pair_VV, (token_S[::2], token_S[1::2]), 2 / n)
  bound = math.sqrt((36 * math.log(2) - math.log(1e-9)) / n)  # 0.0479
  assert 0.5 * np.abs(pair_VV - np.outer(p_V, p_V)).sum() < bound


# Vocabularies of one token per block, of two per block, of few blocks of many.
@pytest.mark.parametrize(
  ('V', 'temperature'), [(25, 0.6), (50, 1.0), (48, 0.6), (512, 1.0)]
)
def test_chi_square(V, temperature):
  n = 40_000
  logits_V = 1.5 * jax.random.normal(jax.random.key(V), (V,))
  token_S, p_V = drawn(jnp.arange(n), jnp.full(n, 9), logits_V, temperature)
  # Cells below five expected draws are taken together.
  expected_V, found_V = n * p_V, np.bincount(token_S, minlength=V)
  rare_V = expected_V < 5
  expected = np.append(expected_V[~rare_V], expected_V[rare_V].sum() + 1e-9)
  found = np.append(found_V[~rare_V], found_V[rare_V].sum())
  assert (found - expected)[-1] ** 2 <= 40 * (expected[-1] + 1)
  chi = ((found - expected)[:-1] ** 2 / expected[:-1]).sum()
  # Laurent and Massart: P(chi >= k + 2 sqrt(k x) + 2 x) <= exp(-x), x = 20.
  k = (~rare_V).sum()
  assert chi < k + 2 * math.sqrt(20 * k) + 40


def test_a_gpu_sums_blocks_in_one_pass(monkeypatch):
  # Block 1 is truncated to one token, block 2 to none; differences exceed exp's range.
  logits_Sbn = 40 * jax.random.normal(KEY, (300, 16, 5))
  logits_Sbn = logits_Sbn.at[:, 1:, 1].set(-jnp.inf).at[:, :, 2].set(-jnp.inf)
  lse_Sn = np.asarray(jax.jit(sampling._lse_once)(logits_Sbn))
  exact_Sn = np.logaddexp.reduce(np.asarray(logits_Sbn, float), 1)
  some_n = np.asarray([0, 1, 3, 4])
  np.testing.assert_allclose(lse_Sn[:, some_n], exact_Sn[:, some_n], 1e-6)
  # With them the tokens are those of the other platforms, none from the empty block.
  args = KEY, jnp.arange(300), jnp.zeros(300, int), logits_Sbn.reshape(300, 80), 1.0
  token_S, logp_S = sampling.draw(*args)
  monkeypatch.setattr(sampling, '_lse', sampling._lse_once)
  found_S, found_logp_S = sampling.draw(*args)
  np.testing.assert_array_equal(found_S, token_S)
  np.testing.assert_allclose(found_logp_S, logp_S, rtol=1e-6, atol=1e-5)
  assert 2 not in np.unique(found_S % 5)


def test_the_coldest_temperature_records_log_probabilities_in_thousandths():
  # Nine logits from 31.999 to 32: 0 to 1 after division by 0.001.
  logits_V = jnp.float32(32) - jnp.arange(9, dtype=jnp.float32) / 8192
  S = jnp.arange(200)
  token_S, logp_S = sampling.draw(
    KEY, S, S, jnp.tile(logits_V, (200, 1)), knobs.COLDEST
  )
  exact_V = np.asarray(logits_V, float) / knobs.COLDEST
  exact_V -= np.logaddexp.reduce(exact_V)
  assert len(set(token_S.tolist())) == 9
  np.testing.assert_allclose(logp_S, exact_V[token_S], atol=2e-3, rtol=0)


def test_greedy_is_the_likeliest_and_certain():
  # Of several as likely the first, as argmax; among NaN at least a token.
  rows = [[1, 5, 5, 2], [3, 3, 3, 3], [-jnp.inf, 0, -1, 0], [0, jnp.nan, 1, 2]]
  logits_SV = jnp.concatenate([jax.random.normal(KEY, (3, 4)), jnp.asarray(rows)])
  token_S, logp_S = sampling.draw(
    KEY,
    jnp.arange(7),
    jnp.arange(7),
    logits_SV,
    1.0,
    sampling.SamplingParams(greedy=True),
  )
  np.testing.assert_array_equal(token_S[:6], logits_SV.argmax(-1)[:6])
  assert token_S[3:6].tolist() == [1, 0, 1] and 0 <= token_S[6] < 4
  assert not logp_S.any()


@pytest.mark.parametrize(
  ('params', 'nucleus'),
  [
    (sampling.SamplingParams(top_k=2), [0.4, 0.3]),
    (sampling.SamplingParams(top_k=99), [0.4, 0.3, 0.2, 0.1]),
    (sampling.SamplingParams(top_p=0.69), [0.4, 0.3]),
    (sampling.SamplingParams(top_p=0.71), [0.4, 0.3, 0.2]),
    (sampling.SamplingParams(top_p=0.01), [0.4]),
    (sampling.SamplingParams(top_k=3, top_p=0.5), [0.4, 0.3]),
  ],
)
def test_truncation_keeps_the_likeliest_and_records_its_distribution(params, nucleus):
  p_V, n = np.asarray([0.1, 0.3, 0.2, 0.4]), 4000
  logits_SV = jnp.tile(jnp.log(jnp.asarray(p_V, jnp.float32)), (n, 1))
  token_S, logp_S = jax.jit(sampling.draw, static_argnums=5)(
    KEY, jnp.arange(n), jnp.zeros(n, int), logits_SV, 1.0, params
  )
  nucleus = np.asarray(nucleus)
  np.testing.assert_allclose(np.exp(logp_S), p_V[token_S] / nucleus.sum(), rtol=1e-5)
  assert sorted(p_V[np.unique(token_S)], reverse=True) == nucleus.tolist()


GEMMA = 262144  # words of Gemma 3


def test_a_large_vocabulary_is_drawn_from_whole():
  # 1,024 blocks of 256 words. Of 64 draws each of three words is missing with a
  # probability of .7^64.
  logits_V = np.full(GEMMA, -1e9, np.float32)
  p = {0: 0.4, 1025: 0.3, GEMMA - 1: 0.3}
  logits_V[[*p]] = np.log([*p.values()])
  logits_SV = jnp.tile(logits_V, (64, 1))
  slot_S = jnp.arange(64)
  for params, likely in (
    (sampling.SOFTMAX, p),
    (sampling.SamplingParams(top_k=1), {0}),
  ):
    token_S, logp_S = jax.jit(sampling.draw, static_argnums=5)(
      KEY, slot_S, slot_S, logits_SV, 1.0, params
    )
    assert set(token_S.tolist()) == {*likely}
    exact = [math.log(p[v]) if len(likely) > 1 else 0 for v in token_S.tolist()]
    np.testing.assert_allclose(logp_S, exact, atol=1e-5)


@pytest.mark.parametrize(
  'params',
  [
    sampling.SOFTMAX,
    sampling.SamplingParams(greedy=True),
    sampling.SamplingParams(top_k=50),
    sampling.SamplingParams(top_p=0.95),
  ],
)
def test_a_draw_holds_the_logits_that_the_budget_counts(params):
  like = jax.ShapeDtypeStruct

  def draw(hidden_SD, head_VD, slot_S):
    logits_SV = hidden_SD @ head_VD.T
    return sampling.draw(KEY, slot_S, slot_S, logits_SV, 0.7, params)

  compiled = jax.jit(draw).lower(
    like((16, 8), jnp.float32), like((GEMMA, 8), jnp.float32), like((16,), jnp.int32)
  )
  size = compiled.compile().memory_analysis().temp_size_in_bytes
  assert size < 1.01 * budget.LOGITS * 4 * 16 * GEMMA
