"""The optimisers: schedules worked by hand, Muon against an SVD, a user's own."""

import dataclasses

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
from refusals import refusal

from bapo_jax import sharding
from bapo_jax.learner import optimizer
from bapo_jax.training import budget
from bapo_jax.training.config import parse

SPEC = dataclasses.replace(making.QWEN3, kv_heads=4)


@pytest.mark.parametrize(
  ('schedule', 'rates'),
  [
    # Two updates of warm-up, then four from .6 to a quarter of it: .45 / 4 each.
    ('linear', [0.2, 0.4, 0.6, 0.4875, 0.375, 0.2625, 0.15]),
    # .15 + .45 (1 + cos(pi n / 4)) / 2: cosines of 1, 1 / sqrt(2), 0, -1 / sqrt(2), -1.
    ('cosine', [0.2, 0.4, 0.6, 0.5340990, 0.375, 0.2159010, 0.15]),
    ('constant', [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6]),
  ],
)
def test_a_schedule_falls_to_its_floor_at_the_last_update(schedule, rates):
  knobs = {'lr': 0.6, 'warmup': 2, 'schedule': schedule, 'floor': 0.25}
  tx = optimizer.make(optimizer.AdamW(b1=0.0, b2=0.0, **knobs), updates=6)
  weights = {'w': jnp.ones(1)}
  opt = tx.init(weights)
  sizes = []
  for _ in rates:
    # Adam without memory moves by the rate, whatever the gradient's size.
    step, opt = tx.update({'w': jnp.ones(1)}, opt, weights)
    sizes.append(-float(step['w'][0]))
  np.testing.assert_allclose(sizes, rates, rtol=1e-6)


def test_a_schedule_needs_the_number_of_updates():
  said = refusal(**{'optimizer.schedule': 'cosine', 'responses': 4096.0})
  assert 'optimizer.schedule=cosine' in said and 'responses=4096' in said


def test_muon_moves_each_matrix_along_its_singular_vectors():
  # Newton and Schulz bring each singular value to about 1 and keep the vectors; the
  # scale of arXiv:2502.16982 is .2 times the root of the larger side.
  params = making.params(SPEC)
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
  k = optimizer.Muon(lr=1.0, warmup=0, momentum=0.0, max_norm=np.inf)
  tx = optimizer.make(k)
  moves, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  sides = {'q': (16, 32), 'k': (16, 32), 'v': (16, 32), 'o': (32, 16)}
  sides |= {'gate': (16, 32), 'up': (16, 32), 'down': (32, 16)}
  for name, shape in sides.items():
    for layer in range(SPEC.layers):
      grad = np.float64(grads['layers'][name][layer]).reshape(shape)
      move = np.float64(moves['layers'][name][layer]).reshape(shape)
      left, _, right = np.linalg.svd(grad, full_matrices=False)
      inside = left.T @ move @ right.T / (-0.2 * max(shape) ** 0.5)
      assert np.diag(inside).min() > 0.6 and np.diag(inside).max() < 1.3
      np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-3)
  adam = optimizer.make(optimizer.AdamW(lr=1.0, warmup=0, max_norm=np.inf))
  plain, _ = jax.jit(adam.update)(grads, adam.init(params), params)
  for name in ('embed', 'final_norm'):
    cosine = (plain[name] * moves[name]).sum()
    cosine /= jnp.linalg.norm(plain[name]) * jnp.linalg.norm(moves[name])
    assert cosine > 0.99
  assert budget.optimiser_bytes(optimizer.AdamW(), SPEC) == 8
  assert 4 < budget.optimiser_bytes(k, SPEC) < 6


@pytest.mark.parametrize('rule', ['adamw', 'muon'])
def test_an_update_on_eight_devices_is_that_of_one(rule):
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  params = making.params(SPEC)
  grads = jax.tree.map(lambda x: jnp.sin(jnp.arange(1.0, x.size + 1)), params)
  grads = jax.tree.map(lambda g, x: g.reshape(x.shape), grads, params)
  tx = optimizer.make(optimizer.OptimizerRule.rules.at_defaults()[rule])

  def step(params, opt, grads):
    moves, opt = tx.update(grads, opt, params)
    return sharding.constrain_state(optax.apply_updates(params, moves), opt)

  after, opt = jax.jit(step)(params, tx.init(params), grads)
  layout = sharding.shardings(params, mesh)
  placed, placed_grads = (jax.device_put(x, layout) for x in (params, grads))
  state = jax.eval_shape(tx.init, params)
  start = jax.jit(tx.init, out_shardings=sharding.like(params, state, mesh))(placed)
  step = sharding.under(mesh, jax.jit(step))
  found, found_opt = step(placed, start, placed_grads)
  making.close_trees(found, after, count=512)
  making.close_trees(found_opt, opt, count=512)
  for path, x in jax.tree.leaves_with_path(found_opt):
    if sharding.path_name(path).endswith('mu/layers/q'):
      assert x.sharding == layout['layers']['q']
    if not x.ndim or x.shape == (3,):
      assert x.sharding.is_fully_replicated


WRONG = {
  'no_transformation': ('return 0.1', 'returns float; return an optax.GradientTransf'),
  'uphill': ('return optax.scale(1.0)', 'moves along the gradient'),
  'nan': ('return optax.scale(float("nan"))', 'are not finite'),
  'raises': ('return optax.sgd(missing)', "raises NameError: name 'missing'"),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_custom_optimiser_is_tried(tmp_path, name):
  body, said = WRONG[name]
  file = tmp_path / 'mine.py'
  file.write_text(f'import optax\ndef tx(learning_rate):\n  {body}\n')
  text = refusal(**{'optimizer.rule': f'{file}:tx'})
  assert said in text and text.startswith(f'optimizer.rule={file}:tx ')


def test_a_custom_optimiser_may_not_move_at_first(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(
    'import optax\ndef tx(learning_rate):\n'
    '  return optax.MultiSteps(optax.sgd(learning_rate), 2).gradient_transformation()\n'
  )
  assert parse({'optimizer': {'rule': f'{file}:tx'}}).optimizer.custom


def test_a_custom_optimiser_has_knobs_and_the_rate_of_the_schedule(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(
    'import optax\ndef tx(learning_rate, *, decay=0.5):\n'
    '  return optax.sgd(learning_rate, momentum=decay)\n'
  )
  values = {'rule': f'{file}:tx', 'decay': 0.25, 'lr': 0.5, 'warmup': 1}
  config = parse({'optimizer': values})
  tx = optimizer.make(config.optimizer)
  weights = {'w': jnp.ones(1)}
  opt = tx.init(weights)
  moved = []
  for _ in range(3):
    step, opt = tx.update({'w': jnp.ones(1)}, opt, weights)
    moved.append(-float(step['w'][0]))
  # Rates .25, .5, .5; momenta 1, 1.25, 1.3125.
  np.testing.assert_allclose(moved, [0.25, 0.625, 0.65625])
