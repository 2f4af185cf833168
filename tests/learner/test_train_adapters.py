"""Training adapters: their gradient, on one device and on eight, and what stays."""

import functools

import jax
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip
from bapo_jax.learner import learner
from bapo_jax.models import lora, transformer
from bapo_jax.models.layers import Schedule

SPEC = transformer.ModelSpec(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_width=8, ffn=32, tied=False
)
P = 4
G = 4
T = 12
TEMPERATURE = 0.8
PLAIN = optax.sgd(1.0)  # the weights move by the gradient itself


batch = functools.partial(
  making.off_policy, spec=SPEC, P=P, G=G, T=T, temperature=TEMPERATURE
)


def gradients(before, after):
  """path -> gradient of each array."""
  moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
  leaves = jax.tree.leaves_with_path(moved)
  return {sharding.path_name(path): x for path, x in leaves}


def close(found, expected, name):
  assert np.abs(expected).max() > 0, name
  making.close(found, expected, count=P * G * T * SPEC.width * SPEC.layers, name=name)


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
  base = making.params(SPEC)
  params = making.adapters(SPEC, 0.1)
  merged = lora.merge(lora.attach(base, params))
  rule = making.bound(clip.balanced, target=0.4)
  knobs = {'schedule': schedule, 'grad_accum_steps': parts}
  objective = making.objective(rule, spec=SPEC, **knobs)
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
    for i in range(SPEC.layers):
      a = np.asarray(adapter.a[i]).reshape(-1, rank)
      b = np.asarray(adapter.b[i]).reshape(rank, -1)
      d_w = d_weights[path][i].reshape(len(a), -1)
      d_a = found[f'{path}/a'][i]
      d_b = found[f'{path}/b'][i]
      close(d_a.reshape(a.shape), adapter.scale * d_w @ b.T, f'{path}/a')
      close(d_b.reshape(b.shape), adapter.scale * a.T @ d_w, f'{path}/b')
