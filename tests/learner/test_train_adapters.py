"""Training adapters: their gradient, on one device and on eight, and what stays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip
from bapo_jax.learner import learner
from bapo_jax.models import knobs, lora, transformer
from bapo_jax.models.layers import Schedule

SPEC = transformer.ModelSpec(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_width=8, ffn=32, tied=False
)
P, G, T, TEMPERATURE = 4, 4, 12, 0.8
PLAIN = optax.sgd(1.0)  # the weights move by the gradient itself


def adapters(spec=SPEC):
  """Adapters in which neither A nor B is zero."""
  targets = knobs.LoraConfig().targets
  made = lora.init(spec, jax.random.key(0), rank=3, alpha=6.0, targets=targets)
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + jnp.float32(rng.normal(0, 0.1, x.shape)), made)


batch = functools.partial(
  making.off_policy, spec=SPEC, P=P, G=G, T=T, temperature=TEMPERATURE
)


def learn(spec, parts=1, **schedule):
  """One update by the gradient itself."""
  rule = clip.Balanced(target=0.4)
  knobs = {'schedule': Schedule(**schedule), 'grad_accum_steps': parts}
  objective = making.objective(rule, spec=spec, **knobs)
  return functools.partial(learner.learn, tx=PLAIN, objective=objective)


def gradients(before, after):
  """path -> gradient of each array."""
  moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
  leaves = jax.tree.leaves_with_path(moved)
  return {sharding.path_name(path): x for path, x in leaves}


def close(found, expected, name):
  assert np.abs(expected).max() > 0, name
  making.close(found, expected, count=P * G * T * SPEC.width * SPEC.layers, name=name)


@pytest.mark.parametrize(
  ('remat', 'parts', 'bounds_pass'),
  [('full', 1, 'again'), ('dots', 2, 'again'), ('none', 2, 'stored')],
)
def test_the_gradient_is_that_of_all_weights_projected(remat, parts, bounds_pass):
  """W' = W + s A B: dA = s dW' B^T and dB = s A^T dW', layer by layer."""
  base, params = making.params(SPEC), adapters(SPEC)
  merged = lora.merge(lora.attach(base, params))
  update = learn(SPEC, parts, remat=remat, bounds_pass=bounds_pass)
  rows, step = batch(merged), jax.jit(update)
  after, _, metrics, _ = step(params, PLAIN.init(params), rows, base)
  whole, _, expected, _ = step(merged, PLAIN.init(merged), rows)
  assert 0 < metrics['clip/fraction'] < 1
  # Advantages of both signs cancel in the loss: its error is that of terms of about 1.
  making.close(metrics['loss/value'], expected['loss/value'], count=P * G * T, terms=1)
  found, d_weights = gradients(params, after), gradients(merged, whole)
  for path, adapter in transformer.flatten(params).items():
    rank = adapter.a.shape[-1]
    for i in range(SPEC.layers):
      a = np.asarray(adapter.a[i]).reshape(-1, rank)
      b = np.asarray(adapter.b[i]).reshape(rank, -1)
      d_w = d_weights[path][i].reshape(len(a), -1)
      d_a, d_b = found[f'{path}/a'][i], found[f'{path}/b'][i]
      close(d_a.reshape(a.shape), adapter.scale * d_w @ b.T, f'{path}/a')
      close(d_b.reshape(b.shape), adapter.scale * a.T @ d_w, f'{path}/b')


def test_eight_devices_give_the_gradient_of_one():
  spec = dataclasses.replace(SPEC, tied=True)
  update = learn(spec, 2, sequence_sharding=True, remat='dots')
  base, params = making.params(spec), adapters(spec)
  rows, opt = batch(making.params(SPEC)), PLAIN.init(params)
  after, _, metrics, _ = jax.jit(update)(params, opt, rows, base)
  mesh = sharding.make(2, 2, 2)
  spread = jax.device_put((params, base), sharding.shardings((params, base), mesh))
  step = sharding.under(mesh, jax.jit(update))
  rows = jax.device_put(rows, sharding.over_rows(mesh))
  after_spread, _, found, _ = step(spread[0], opt, rows, spread[1])
  making.close(found['loss/value'], metrics['loss/value'], count=P * G * T, terms=1)
  expected = gradients(params, after)
  for name, gradient in gradients(params, after_spread).items():
    close(gradient, expected[name], name)
