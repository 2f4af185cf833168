"""One update on eight devices is the update of one, to the last few bits."""

import dataclasses
import functools

import jax
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip, loss
from bapo_jax.learner import learner
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule

SPEC = transformer.ModelSpec(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_width=8, ffn=32, tied=False
)
P, G, T, TEMPERATURE = 4, 4, 12, 0.8
PLAIN = optax.sgd(1.0)  # the weights move by the gradient itself


def batch(params):
  return making.off_policy(params, SPEC, P, G, T, TEMPERATURE)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('tied', 'parts', 'split', 'remat'),
  [(False, 1, False, 'full'), (True, 2, False, 'none'), (True, 2, True, 'dots')],
)
def test_eight_devices_give_the_loss_and_the_gradient_of_one(tied, parts, split, remat):
  spec = dataclasses.replace(SPEC, tied=tied)
  params = making.params(spec)
  objective = objective_lib.Objective(
    clip_rule=making.bound(clip.balanced, target=0.4),
    loss_rule=loss.clipped,
    spec=spec,
    schedule=Schedule(remat, split),
    temperature=TEMPERATURE,
    chunk=4,
    grad_accum_steps=parts,
  )
  learn = functools.partial(learner.learn, tx=PLAIN, objective=objective)
  rows, opt = batch(making.params(SPEC)), PLAIN.init(params)
  after, _, metrics, _ = jax.jit(learn)(params, opt, rows)
  devices = sharding.make(2, 2, 2)
  spread = jax.device_put(params, sharding.shardings(params, devices))
  step = sharding.under(devices, jax.jit(learn))
  rows = jax.device_put(rows, sharding.over_rows(devices))
  after_spread, _, metrics_spread, _ = step(spread, opt, rows)
  assert 0 < metrics['clip/fraction'] < 1
  making.close(
    metrics_spread['loss/value'], metrics['loss/value'], count=P * G * T, terms=1
  )
  moved, moved_spread = (
    jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), tree, params)
    for tree in (after, after_spread)
  )
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(moved))
  # Weights of size 1 that moved: the difference has their rounding.
  making.close_trees(moved_spread, moved, count=P * G * T * SPEC.width * SPEC.layers)
