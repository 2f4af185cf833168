"""What the sampler writes depends on (key, uid, position) and on nothing else."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bapo_jax import logprob, mesh, model, sampler
from bapo_jax.types import Prompts

# One layer: each way of dispatching compiles anew, and test_model.py has two.
SPEC = model.ModelSpec(
  vocab=12, width=16, layers=1, heads=4, kv_heads=2, head_width=4, ffn=16, positions=32
)
PARAMS = oracles.noisy(SPEC, 0)
EOS = (3, 7)
LENGTH_P = np.asarray([3, 6, 1, 0, 4, 5], np.int32)
P, WIDTH, GROUP, NEW, TEMPERATURE = 6, 6, 2, 9, 0.7
B = P * GROUP
OF_B = np.repeat(LENGTH_P, GROUP)
UID_B = np.arange(B, dtype=np.uint32) + 100
KEY = jax.random.key(5)


def prompts(seed: int = 0) -> Prompts:
  rng = np.random.default_rng(seed)
  tokens_PT = rng.integers(0, SPEC.vocab, (P, WIDTH), np.int32)
  tokens_PT[np.arange(WIDTH) >= LENGTH_P[:, None]] = 0
  return Prompts(np.arange(P, dtype=np.int32), tokens_PT, LENGTH_P)


def generate(asked=None, uid_B=UID_B, params=PARAMS, **changes):
  knobs = {'group': GROUP, 'new': NEW, 'temperature': TEMPERATURE, 'eos': EOS}
  knobs |= {'slots': 4, 'refill': 2, 'chunk': 4, 'spec': SPEC}
  asked = prompts() if asked is None else asked
  return sampler.generate(params, asked, uid_B, KEY, **knobs | changes)


@pytest.fixture(scope='module')
def rows():
  return jax.tree.map(np.asarray, generate())


def test_the_rows_are_prompt_response_and_nothing(rows):
  column_T = np.arange(WIDTH + NEW)
  lengths, ends = rows.chosen_BT.sum(1), 0
  for b, n in enumerate(OF_B):
    if not n:  # an empty seat stays empty
      assert not rows.chosen_BT[b].any() and not rows.tokens_BT[b].any()
      continue
    row, k = rows.tokens_BT[b], lengths[b]
    np.testing.assert_array_equal(row[:n], prompts().tokens_PT[b // GROUP, :n])
    np.testing.assert_array_equal(
      rows.chosen_BT[b], (column_T >= n) & (column_T < n + k)
    )
    said = row[n : n + k]
    # The end token is the last and is chosen; without one the row is cut at NEW.
    assert not np.isin(said[:-1], EOS).any()
    assert said[-1] in EOS or k == NEW
    assert not row[n + k :].any()
    ends += said[-1] in EOS
  assert 0 < ends < np.count_nonzero(OF_B)  # both kinds did occur
  assert len({tuple(row[n:]) for row, n in zip(rows.tokens_BT, OF_B, strict=True)}) > 8


def test_recorded_logp_is_the_learners(rows):
  logp_BT, _ = logprob.of_rows(PARAMS, rows.tokens_BT, SPEC, TEMPERATURE)
  found_BT, chosen_BT = rows.logp_BT, rows.chosen_BT
  np.testing.assert_allclose(found_BT[chosen_BT], logp_BT[chosen_BT], atol=1e-5)
  assert not found_BT[~chosen_BT].any()
  assert (found_BT[chosen_BT] < 0).all()


@pytest.mark.parametrize(
  ('slots', 'refill', 'chunk'), [(2, 1, 1), (5, 3, 4), (16, 16, 50)]
)
def test_the_text_does_not_depend_on_how_it_is_dispatched(rows, slots, refill, chunk):
  told = []
  again = generate(slots=slots, refill=refill, chunk=chunk, advance=told.append)
  np.testing.assert_array_equal(again.tokens_BT, rows.tokens_BT)
  np.testing.assert_array_equal(again.chosen_BT, rows.chosen_BT)
  np.testing.assert_allclose(again.logp_BT, rows.logp_BT, atol=1e-5)
  assert sum(told) == np.count_nonzero(OF_B) and min(told) >= 0


def test_the_text_belongs_to_the_uid_and_not_to_the_row(rows):
  asked = Prompts(*(x[::-1] for x in prompts()))
  turned = generate(asked, UID_B[::-1])
  np.testing.assert_array_equal(turned.tokens_BT[::-1], rows.tokens_BT)
  other = generate(uid_B=UID_B + np.uint32(B))
  differ_B = (np.asarray(other.tokens_BT) != rows.tokens_BT).any(1)
  assert differ_B[OF_B > 0].sum() >= 8  # 10 asked; one short answer may coincide


def test_a_mesh_samples_the_same_text(rows):
  devices = mesh.make(data=4, fsdp=1, tensor=2)
  params = jax.device_put(PARAMS, mesh.shardings(PARAMS, devices, 'decode'))
  spread = generate(params=params, mesh=devices)
  assert len(spread.tokens_BT.sharding.device_set) == 8
  np.testing.assert_array_equal(spread.tokens_BT, rows.tokens_BT)
  np.testing.assert_allclose(spread.logp_BT, rows.logp_BT, atol=1e-5)


def test_nothing_compiles_after_the_first_call(rows):
  del rows  # the first call
  jitted = (sampler.run, sampler.admit, sampler.harvest)
  before = [f._cache_size() for f in jitted]
  generate(prompts(seed=1), UID_B + np.uint32(7), temperature=TEMPERATURE)
  assert [f._cache_size() for f in jitted] == before


def test_a_cold_policy_says_the_likeliest():
  # At 1e-4 the noise is worth a few 1e-4 of a logit.
  asked = prompts()
  cold = generate(asked, temperature=1e-4)
  for b in np.flatnonzero(OF_B):
    prompt = asked.tokens_PT[b // GROUP, : OF_B[b]].tolist()
    expected = oracles.decode_oracle(PARAMS, prompt, SPEC, NEW, EOS)
    assert cold.tokens_BT[b][cold.chosen_BT[b]].tolist() == expected
  np.testing.assert_allclose(cold.logp_BT, 0, atol=1e-3)


@pytest.mark.parametrize('temperature', [0.6, 1.0])
@pytest.mark.parametrize('by', ['uid', 'position'])
def test_draws_follow_the_softmax(temperature, by):
  n, logits_V = 20_000, jnp.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0])
  count_S, same_S = jnp.arange(n), jnp.zeros(n, int)
  uid_S, position_S = (count_S, same_S) if by == 'uid' else (same_S, count_S)
  token_S, logp_S = jax.jit(sampler.draw)(
    KEY, uid_S, position_S, jnp.tile(logits_V, (n, 1)), temperature
  )
  p_V = np.exp(np.asarray(logits_V, float) / temperature)
  p_V /= p_V.sum()
  np.testing.assert_allclose(logp_S, np.log(p_V)[token_S], atol=1e-5)
  # Bretagnolle-Huber-Carol: P(TV >= e) <= 2^V exp(-2 n e^2), so e = 0.025 is crossed
  # with probability 64 exp(-25) < 1e-9; between 0.6 and 1.0 the distance is 0.20.
  found_V = np.bincount(token_S, minlength=len(p_V)) / n
  assert 0.5 * np.abs(found_V - p_V).sum() < 0.025
  # And neighbours are independent: pairs follow the product, 2^36 exp(-2 n/2 e^2).
  pair_VV = np.zeros((6, 6))
  np.add.at(pair_VV, (token_S[::2], token_S[1::2]), 2 / n)
  bound = math.sqrt((36 * math.log(2) - math.log(1e-9)) / n)  # 0.0479
  assert 0.5 * np.abs(pair_VV - np.outer(p_V, p_V)).sum() < bound


def test_rows_that_cannot_fit_are_refused():
  with pytest.raises(ValueError) as error:
    generate(new=27)
  assert str(error.value) == (
    "prompt 6 + response 27 tokens exceed the model's 32 positions; lower sampler.new "
    'or prompts.width'
  )
  with pytest.raises(ValueError) as error:
    generate(prompts()._replace(length_P=LENGTH_P + 1))
  assert str(error.value) == 'a prompt of 7 tokens stands in 6 columns'
  with pytest.raises(ValueError, match='length_P has P=5, but P=6 elsewhere'):
    generate(prompts()._replace(length_P=LENGTH_P[:5]))


def test_nobody_asked():
  nothing = generate(prompts()._replace(length_P=0 * LENGTH_P))
  assert not any(np.asarray(x).any() for x in nothing)
