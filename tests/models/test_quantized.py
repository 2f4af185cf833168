"""Quantised projections: their error, and what is sampled with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
import runs
from making import OddVerifier
from runs import tiny

from bapo_jax import sharding
from bapo_jax.models import decoder, lora, quantized, transformer
from bapo_jax.models.knobs import PROJECTIONS

NARROW = ('int8', 'float8_e4m3fn')
both = pytest.mark.parametrize('dtype', NARROW)
SPEC = dataclasses.replace(making.QWEN2, o_bias=True)
PARAMS = making.params(SPEC)


def spec_of(dtype, **changed):
  return dataclasses.replace(SPEC, actor_dtype=dtype, **changed)


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def dequantized(weights):
  """The stacked parameters with float32 weights in place of quantised projections."""
  flat = transformer.flatten(weights)
  for path, axes in PROJECTIONS.items():
    q = jax.tree.map(np.float32, flat[path])
    shape = q.scale.shape[:1] + (1,) * axes + q.scale.shape[1:]
    flat[path] = jnp.asarray(q.values * q.scale.reshape(shape))
  return transformer.unflatten(flat)


@both
@pytest.mark.parametrize('axes', [1, 2])
def test_the_error_of_a_weight_is_at_most_half_a_step(dtype, axes):
  rng = np.random.default_rng(0)
  w = rng.normal(size=(24, 10, 6)) * np.exp(rng.normal(size=(1, 1, 6)))
  w[0, 0] = 9
  w[..., 4] = 0
  w[..., 5] = 1e-30  # an outlier, zeros, and tiny
  w = w.astype(np.float32)
  found = quantized.quantize(jnp.asarray(w), axes, dtype)
  assert found.values.dtype == dtype and found.scale.shape == w.shape[axes:]
  exact = np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)
  half = np.broadcast_to(np.asarray(found.scale) / 2, w.shape)
  if dtype != 'int8':
    half = np.maximum(np.abs(w) / 16, half / 512)
  assert (np.abs(exact - w) <= half * (1 + 1e-5)).all()
  assert not np.asarray(found.values, np.float32)[..., 4].any()


@pytest.mark.parametrize('dtype', ['compute', *NARROW])
@pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
@pytest.mark.parametrize('base', [SPEC, making.OLMO3], ids=['qwen2', 'olmo3'])
def test_an_actor_comes_back_bit_for_bit_and_only_projections_are_narrow(
  base, dtype, compute
):
  spec = dataclasses.replace(base, actor_dtype=dtype, compute=compute)
  params = making.params(base)
  joined, apart = (decoder.actor(params, spec, kind) for kind in (True, False))
  back = decoder.params_of(joined, spec)
  same(back, decoder.params_of(apart, spec))
  same(decoder.actor(back, spec), joined)
  same(decoder.actor(back, spec, False), apart)
  for path, w in transformer.flatten(back).items():
    original = transformer.flatten(params)[path]
    if path not in PROJECTIONS or dtype == 'compute':
      assert w.dtype == ('float32' if path.endswith('norm') else compute), path
      np.testing.assert_array_equal(w, original.astype(w.dtype), path)
      continue
    assert w.values.dtype == dtype and w.values.shape == original.shape
    for i in range(spec.layers):
      layer = jax.tree.map(lambda x, i=i: x[i], w)
      same(layer, quantized.quantize(original[i], PROJECTIONS[path], dtype))


def test_adapters_are_merged_before_the_weights_are_quantised():
  spec = spec_of('int8')
  make = functools.partial(lora.init, rank=2, alpha=8.0, targets='layers/(q|o|down)')
  made = jax.tree.map(lambda x: x + 0.1, make(spec, jax.random.key(0)))
  weights = lora.attach(PARAMS, made)
  found = decoder.actor(weights, spec)
  same(found, decoder.actor(making.merged(weights), spec))
  with pytest.raises(AssertionError):
    same(found, decoder.actor(PARAMS, spec))


PROMPTS = making.prompts(np.full(4, 5, np.int32), 5, SPEC.vocab, least=2)
KNOBS = {
  'group_size': 4,
  'max_new_tokens': 8,
  'temperature': 1.0,
  'eos': (1,),
  'max_num_seqs': 8,
  'prefill_batch_size': 8,
  'tokens_per_dispatch': 4,
}


def sampled(spec, params, mesh=None):
  uid_B = np.arange(16, dtype=np.uint32)
  key = jax.random.key(3)
  rows = making.generate(params, PROMPTS, uid_B, key, spec=spec, mesh=mesh, **KNOBS)
  return jax.tree.map(np.asarray, rows)


@both
def test_responses_and_their_log_probabilities_are_those_of_the_dequantised_weights(
  dtype,
):
  spec = spec_of(dtype)
  back = decoder.params_of(decoder.actor(PARAMS, spec), spec)
  expected = sampled(SPEC, dequantized(back))
  wide = sampled(SPEC, PARAMS)
  mesh = sharding.make(2, 2, 2)
  layout = sharding.shardings(PARAMS, mesh)
  spread = sampled(spec, jax.device_put(PARAMS, layout), mesh)
  for found in (sampled(spec, PARAMS), spread):
    np.testing.assert_array_equal(found.tokens_BT, expected.tokens_BT)
    np.testing.assert_allclose(found.logp_BT, expected.logp_BT, atol=2e-5)
  # The recorded log-probabilities are not those of the weights before quantisation.
  first_B = expected.tokens_BT[:, 5] == wide.tokens_BT[:, 5]
  assert first_B.any()
  assert np.abs(expected.logp_BT - wide.logp_BT)[first_B, 5].max() > 1e-3


# --------------------- runs with a quantised actor: they learn, and resume to the bit


RUN = runs.PARTIAL | {
  'steps': 2,
  'rollout.weight_sync_interval': 2,
  'checkpoint.keep': 99,
  'evaluate.every': 2,
}


@pytest.mark.parametrize('dtype', ['int8', 'float8_e4m3fn'])
def test_a_run_learns_and_resumes_to_the_bit(dtype, tmp_path):
  config = tiny(**RUN, **{'sampler.actor_dtype': dtype})
  whole = runs.Recorded(config, tmp_path / 'whole')
  assert runs.train(config, whole.workdir, OddVerifier) == 0
  first, last = (runs.last_run(whole.workdir, step) for step in (1, 2))
  # Step 1 saves the actor of step 0, which samples once more, as it is in memory.
  actor = {name: x for name, x in first.arrays.items() if name.startswith('actor')}
  narrow = [x.dtype for name, x in actor.items() if name.endswith('values')]
  assert narrow == [jnp.dtype(dtype)] * len(PROJECTIONS)
  assert last.scalars['updates'] > 0 and not last.scalars['consecutive_skips']
  broken = runs.truncated(whole, tmp_path / 'broken', 1)
  assert runs.train(config, broken, OddVerifier) == 0
  resumed = runs.last_run(broken)
  assert resumed.scalars == last.scalars and resumed.rows.keys() == last.rows.keys()
  assert runs.same(resumed.arrays, last.arrays)
