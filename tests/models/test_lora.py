"""Adapters: what they add, which weights have one, and that the rest stays frozen."""

import dataclasses
import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import making
import numpy as np
import optax
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip
from bapo_jax.learner import learner
from bapo_jax.models import decoder, knobs, layers, logprobs, lora, transformer
from bapo_jax.models.layers import Schedule

SPEC = dataclasses.replace(making.SPEC, heads=4, kv_heads=2, ffn=24, vocab=12)
ALL = knobs.LoraConfig().targets


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(spec, rank):
  """New adapters of all projections, with alpha / rank = 2."""
  key = jax.random.key(0)
  return lora.init(spec, key, rank=rank, alpha=2.0 * rank, targets=ALL)


@functools.partial(jax.jit, static_argnames='spec')
def logits(weights, tokens_BT, spec=SPEC):
  """[B, T, V] of whole rows."""
  hidden_BTD = layers.forward(weights, tokens_BT, spec)
  return jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(weights))


def test_a_product_with_an_adapter_by_hand():
  # W = 1, A = [1, 2], B = [3, 4], scale 1/2: 5 (1 + (1*3 + 2*4) / 2) = 32.5
  adapter = lora.Adapter(jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [4.0]]), 0.5)
  w = lora.Adapted(jnp.ones((1, 1)), adapter)
  assert layers.product(jnp.full((1, 1), 5.0), w) == 32.5
  stacked = jax.tree.map(lambda x: x[None], w)
  assert lora.layer(stacked, 0) == 6.5
  assert lora.merge({'w': stacked})['w'].shape == (1, 1, 1)


def test_new_adapters_add_nothing_and_a_has_the_variance_of_peft():
  spec = dataclasses.replace(SPEC, width=64, ffn=96)
  made = start(spec, 8)
  for path, adapter in transformer.flatten(made).items():
    inputs = math.prod(adapter.a.shape[1:-1])
    assert not adapter.b.any() and adapter.scale == 2
    # Uniform on +-1 / sqrt(n): variance 1 / 3n.
    assert np.abs(adapter.a).max() <= inputs**-0.5
    assert adapter.a.var() * 3 * inputs == pytest.approx(1, abs=0.15), path
  params = making.params(spec)
  tokens_BT = jnp.arange(10).reshape(2, 5)
  np.testing.assert_array_equal(
    logits(lora.attach(params, made), tokens_BT, spec), logits(params, tokens_BT, spec)
  )


def test_merged_weights_and_a_mesh_give_the_logits_of_unmerged_ones():
  params = making.params(SPEC)
  made = making.adapters(SPEC)
  weights = lora.attach(params, made)
  tokens_BT = jnp.arange(24).reshape(4, 6) % 12
  unmerged = logits(weights, tokens_BT)
  assert np.abs(unmerged - logits(params, tokens_BT)).max() > 0.1
  oracles.close(logits(lora.merge(weights), tokens_BT), unmerged, 128)
  mesh = sharding.make(2, 2, 2)
  spread = [jax.device_put(x, sharding.shardings(x, mesh)) for x in (params, made)]
  found = sharding.under(mesh, logits)(
    lora.attach(*spread), jax.device_put(tokens_BT, sharding.over_rows(mesh))
  )
  oracles.close(found, unmerged, 128)


def test_decoding_reads_merged_weights():
  weights = lora.attach(making.params(SPEC), making.adapters(SPEC))
  for joined in (False, True):
    merged = decoder.params_of(decoder.actor(weights, SPEC, joined), SPEC)
    for path, w in transformer.flatten(lora.merge(weights)).items():
      np.testing.assert_array_equal(transformer.flatten(merged)[path], w, path)


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once():
  spec = dataclasses.replace(SPEC, compute='bfloat16', dtype='bfloat16')
  base = transformer.cast(making.params(spec), 'bfloat16')
  made = making.adapters(spec)
  found = decoder.actor(lora.attach(base, made), spec, joined=False)['layers'][1]['up']
  up = transformer.flatten(made)['layers/up']
  wide = base['layers']['up'][1].astype('float32') + up.scale * up.a[1] @ up.b[1]
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_targets_choose_by_the_whole_path():
  chosen = lora.shapes(SPEC, 2, 'layers/(q|v)')
  assert sorted(chosen) == ['layers/q', 'layers/v']
  # [L, D, rank] and [L, rank, H, C]
  assert chosen['layers/q'] == ((2, 16, 2), (2, 2, 4, 8))
  # What is summed over has two axes: [L, H, C, rank] and [L, rank, D].
  assert lora.shapes(SPEC, 2, '.*o') == {'layers/o': ((2, 4, 8, 2), (2, 2, 16))}
  assert len(lora.shapes(SPEC, 2, '.*')) == len(knobs.PROJECTIONS)
  # L (in + out) rank of each: q 16, 32; k and v 16, 16; o 32, 16; three of 16, 24.
  assert lora.count(SPEC, 2, ALL) == 2 * 2 * (48 + 32 + 32 + 48 + 3 * 40)


def test_a_rank_above_the_smaller_side_of_a_weight_is_refused():
  with pytest.raises(ValueError, match=r'lora\.rank=17') as error:
    lora.shapes(SPEC, 17, ALL)
  assert '1 to 16' in str(error.value)


@pytest.mark.parametrize('targets', ['q_proj', 'layers/q_bias', 'layers/(q'])
def test_targets_that_match_nothing_are_refused(targets):
  with pytest.raises(ValueError, match='targets=') as error:
    knobs.LoraConfig(targets=targets)
  assert 'layers/(q|v)' in str(error.value) or 'layers/down' in str(error.value)


def products(function, argument):
  """The sorted shapes of all products in a program, those in its loops included."""
  found = set()

  def visit(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'dot_general':
        found.add(tuple(sorted(equation.outvars[0].aval.shape)))
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        visit(inner)

  visit(jax.make_jaxpr(function)(argument).jaxpr)
  return found


@pytest.mark.parametrize('tied', [False, True])
def test_no_product_of_the_gradient_is_as_large_as_a_frozen_weight(tied):
  spec = dataclasses.replace(SPEC, tied=tied, ffn=40, vocab=56)
  base = making.params(spec)
  tokens_BT = jnp.zeros((2, 6), jnp.int32)

  def loss(weights):
    return logprobs.sequence_stats(weights, tokens_BT, spec, 1.0).logp_BT.sum()

  shapes = {
    path: tuple(sorted(shape[1:] if path.startswith('layers') else shape))
    for path, (shape, _) in transformer.describe(spec).items()
    if path in knobs.PROJECTIONS or path in ('embed', 'head')
  }
  full = products(jax.grad(loss), base)
  unmerged = products(
    jax.grad(lambda made: loss(lora.attach(base, made))), making.adapters(spec)
  )
  if not tied:
    del shapes['embed']  # read by row: without a product
  for path, shape in shapes.items():
    assert shape in full, path
    assert shape not in unmerged, path


# ------- training adapters: their gradient, on one device and on eight, and what stays


NARROW = transformer.ModelSpec(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_width=8, ffn=32, tied=False
)
P = 4
G = 4
T = 12
TEMPERATURE = 0.8
PLAIN = optax.sgd(1.0)  # the weights move by the gradient itself


batch = functools.partial(
  making.off_policy, spec=NARROW, P=P, G=G, T=T, temperature=TEMPERATURE
)


def gradients(before, after):
  """path -> gradient of each array."""
  moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
  leaves = jax.tree.leaves_with_path(moved)
  return {sharding.path_name(path): x for path, x in leaves}


def close(found, expected, name):
  assert np.abs(expected).max() > 0, name
  making.close(
    found, expected, count=P * G * T * NARROW.width * NARROW.layers, name=name
  )


@pytest.mark.parametrize(
  ('schedule', 'parts', 'devices'),
  [
    (Schedule('full'), 1, 1),
    (Schedule('dots'), 2, 1),
    (Schedule('none', bounds_pass='stored'), 2, 1),
    (Schedule('dots', sequence_sharding=True), 2, 8),
  ],
)
def test_the_gradient_is_that_of_all_weights_projected(schedule, parts, devices):
  """W' = W + s A B: dA = s dW' B^T and dB = s A^T dW', layer by layer."""
  base = making.params(NARROW)
  params = making.adapters(NARROW, 0.1)
  merged = lora.merge(lora.attach(base, params))
  rule = clip.Balanced(target=0.4)
  knobs = {'schedule': schedule, 'grad_accum_steps': parts}
  objective = making.objective(rule, spec=NARROW, **knobs)
  step = jax.jit(functools.partial(learner.learn, tx=PLAIN, objective=objective))
  rows = batch(merged)
  whole, _, expected, _ = step(merged, PLAIN.init(merged), rows)
  mesh = sharding.make(2, 2, 2) if devices == 8 else None
  held = params, base
  if mesh:
    held = jax.device_put(held, sharding.shardings(held, mesh))
    rows = jax.device_put(rows, sharding.over_rows(mesh))
  step = sharding.under(mesh, step)
  after, _, metrics, _ = step(held[0], PLAIN.init(params), rows, held[1])
  assert 0 < metrics['clip/fraction'] < 1
  # Advantages of both signs cancel in the loss: its error is that of terms of about 1.
  making.close(metrics['loss/value'], expected['loss/value'], count=P * G * T, terms=1)
  found = gradients(params, after)
  d_weights = gradients(merged, whole)
  for path, adapter in transformer.flatten(params).items():
    rank = adapter.a.shape[-1]
    for i in range(NARROW.layers):
      a = np.asarray(adapter.a[i]).reshape(-1, rank)
      b = np.asarray(adapter.b[i]).reshape(rank, -1)
      d_w = d_weights[path][i].reshape(len(a), -1)
      d_a = found[f'{path}/a'][i]
      d_b = found[f'{path}/b'][i]
      close(d_a.reshape(a.shape), adapter.scale * d_w @ b.T, f'{path}/a')
      close(d_b.reshape(b.shape), adapter.scale * a.T @ d_w, f'{path}/b')
