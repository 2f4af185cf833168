"""What teaches, packed, gives the gradient and the bounds of all rows, padded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip, loss, masks
from bapo_jax.learner import learner, pictured
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import layers, logprobs, transformer
from bapo_jax.models.layers import Schedule

LOSSES = loss.LossRule.rules.at_defaults()

SPEC = dataclasses.replace(making.QWEN2, vocab=24, head_width=8)
WINDOWS = dataclasses.replace(making.GEMMA3, vocab=24)
B = 32
T = 30
PRODUCTS = B * T * SPEC.width * SPEC.layers  # summed in a gradient
CLIPS = {
  'clipped': clip.Balanced(target=0.45),
  'decoupled': clip.Balanced(target=0.45),
  'sequence': clip.Balanced(target=0.6, low=(0.8, 0.98), high=(1.02, 1.5)),
  'cispo': clip.Fixed(low=0.0, high=1.3),
  'aspo': clip.Dcpo(),
  'fipo': clip.Balanced(target=0.45),
  **dict.fromkeys(('tis', 'sapo', 'vespo'), clip.Unclipped()),
}


@functools.cache
def example(spec=SPEC):
  """(params, batch): rows of all lengths, half of them without an advantage."""
  params = making.params(spec)
  rng = np.random.default_rng(3)
  tokens_BT = jnp.asarray(rng.integers(1, 24, (B, T)), jnp.int32)
  first_B = rng.integers(2, 8, B)[:, None]
  last_B = rng.integers(4, T + 1, B)[:, None]
  mask_BT = (np.arange(T) >= first_B) & (np.arange(T) < last_B)
  stats = jax.jit(logprobs.sequence_stats, static_argnums=(2, 3))
  logp_BT = stats(params, tokens_BT, spec, 0.8).logp_BT
  old_BT, prox_BT = (logp_BT + 0.4 * rng.standard_normal((B, T)) for _ in range(2))
  adv_B = rng.normal(-0.1, 1, B) * (rng.random(B) < 0.5)
  source_B = np.where(np.arange(B) == 5, -1, np.arange(B) % 3)
  mask_BT &= (source_B >= 0)[:, None]
  batch = making.batch(adv_B, mask_BT, old_BT, prox_BT, source_B)
  return params, jax.tree.map(jnp.asarray, batch._replace(tokens_BT=tokens_BT))


def objective(loss_rule, aggregate, tied=True, **knobs):
  spec = dataclasses.replace(SPEC, tied=tied)
  knobs = {'spec': spec, 'aggregate': aggregate, 'length': T} | knobs
  return making.objective(CLIPS[loss_rule], loss_rule, **knobs)


@functools.cache
def gradient(*rules, mesh=None, **knobs):
  chosen = objective(*rules, **knobs)
  params, batch = example(dataclasses.replace(chosen.spec, tied=True))
  if not chosen.spec.tied:
    params = params | {'head': params['embed'][::-1]}
  run = functools.partial(objective_lib.gradient, objective=chosen)
  if mesh is not None:
    params = jax.device_put(params, sharding.shardings(params, mesh))
    batch = jax.device_put(batch, sharding.over_rows(mesh))
  return sharding.under(mesh, jax.jit(run))(params, batch)


def check(loss_rule, aggregate, tied=True, **knobs):
  """Value, gradient and bounds under these knobs are those of all rows, padded."""
  rules = (loss_rule, aggregate, tied)
  batch = example(knobs.get('spec', SPEC))[1]
  kept = {name: x for name, x in knobs.items() if name in ('mask_rule', 'spec')}
  value, wanted, (stats, bounds) = gradient(*rules, pack=False, **kept)
  found_value, found, (found_stats, found_bounds) = gradient(*rules, **knobs)
  making.close(found_value, value, count=B * T, terms=1)
  making.close_trees(found, wanted, count=PRODUCTS)
  assert float(optax.tree.norm(wanted)) > 1e-3
  for name, bound in bounds._asdict().items():
    np.testing.assert_array_equal(getattr(found_bounds, name), bound, err_msg=name)
  if 'mask_rule' in kept:
    assert not bounds.keep_BT.all()
  if loss_rule in ('clipped', 'decoupled', 'sequence'):
    assert bounds.search_steps > 0
  teaches_BT = (batch.adv_BT != 0) & batch.loss_mask_BT
  assert stats.agree_BT is None
  for name, x_BT in zip(stats._fields[:3], stats[:3], strict=True):
    wanted_BT = np.where(teaches_BT, x_BT, 0)
    making.close(getattr(found_stats, name), wanted_BT, count=PRODUCTS)
  # The loss is the sum of all gains, scaled for the whole batch at once.
  rule = LOSSES[loss_rule]
  gain_BT, _ = loss.gain(rule, stats.logp_BT, batch, lambda _: bounds)
  scale_B = loss.row_scale(batch.loss_mask_BT, aggregate, T)
  scale_B *= objective_lib.filled_share(batch)
  making.close(value, -(gain_BT.sum(1) * scale_B).sum(), count=B * T, terms=1)


def waiting(remat):
  schedule = Schedule(remat, bounds_pass='stored')
  return {'schedule': schedule, 'grad_accum_steps': 3}


SPLIT = Schedule('dots', sequence_sharding=True)


@pytest.mark.parametrize(
  ('loss_rule', 'aggregate', 'knobs'),
  [
    # A row's scale is known before packing: any aggregate serves with any rule.
    ('clipped', 'token', {}),
    ('clipped', 'token', {'grad_accum_steps': 3}),
    ('decoupled', 'sequence', {'grad_accum_steps': 3}),
    ('cispo', 'token', {'grad_accum_steps': 3}),
    ('tis', 'sequence', {'grad_accum_steps': 3}),
    ('vespo', 'constant', {'grad_accum_steps': 3}),
    ('aspo', 'token', {'grad_accum_steps': 3}),
    ('fipo', 'token', {'grad_accum_steps': 3}),
    # A mask over the minibatch, found in an extra pass.
    ('clipped', 'token', {'mask_rule': masks.M2po(), 'grad_accum_steps': 3}),
    ('tis', 'token', {'mask_rule': masks.Opsm()}),
    ('sapo', 'token', {'grad_accum_steps': 3}),
    # All forward passes wait for the bounds: any part of a layer, any ratio.
    *(('clipped', 'token', waiting(remat)) for remat in layers.REMAT),
    ('sequence', 'constant', waiting('full')),
    # Layers of several kinds: a window ends with its text.
    ('clipped', 'token', {'spec': WINDOWS, 'grad_accum_steps': 3}),
    ('clipped', 'token', waiting('dots') | {'spec': WINDOWS}),
  ],
)
def test_pruned_and_packed_gradients_are_those_of_all_rows(loss_rule, aggregate, knobs):
  check(loss_rule, aggregate, **knobs)


@pytest.mark.parametrize(
  ('loss_rule', 'aggregate', 'tied', 'knobs'),
  [
    ('clipped', 'token', True, waiting('full')),
    ('sequence', 'constant', True, {'grad_accum_steps': 3}),
    ('clipped', 'token', False, {'schedule': SPLIT}),
    ('clipped', 'token', True, {'schedule': SPLIT, 'spec': WINDOWS}),
  ],
)
def test_eight_devices_give_the_gradient_of_one(loss_rule, aggregate, tied, knobs):
  check(loss_rule, aggregate, tied, mesh=sharding.make(2, 2, 2), **knobs)


def test_what_waits_saves_one_forward_pass():
  params, batch = example()

  def products(function):  # the compiler counts the body of a loop once
    compiled = jax.jit(function).lower(params, batch).compile()
    return compiled.cost_analysis()['flops']

  def of(bounds_pass):
    schedule = Schedule(bounds_pass=bounds_pass)
    return objective('clipped', 'token', schedule=schedule, grad_accum_steps=3)

  def forward(params, batch):
    found = objective_lib.micro_batches(batch, of('again'))
    return found.stats(pictured.Variables(params), 0)

  again, stored = (
    products(functools.partial(objective_lib.gradient, objective=of(name)))
    for name in ('again', 'stored')
  )
  assert (again - stored) / products(forward) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize('knobs', [{'pack': False}, {'grad_accum_steps': 3}])
def test_an_entropy_bonus_adds_the_mean_entropy_of_whole_distributions(knobs):
  params, batch = example()
  cost = 0.3

  def mean_entropy(params):
    hidden_BTD = layers.forward(params, batch.tokens_BT, SPEC)
    logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(params)) / 0.8
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
    entropy_BT = jnp.where(batch.loss_mask_BT[:, 1:], entropy_BT[:, :-1], 0)
    filled = objective_lib.filled_share(batch)
    return cost * filled * entropy_BT.sum() / batch.loss_mask_BT.sum()

  bonus, slope = jax.jit(jax.value_and_grad(mean_entropy))(params)
  rules = 'clipped', 'token', True
  value, grads, (_, bounds) = gradient(*rules, pack=False)
  found_value, found, (_, found_bounds) = gradient(*rules, entropy=cost, **knobs)
  making.close(found_value, value - bonus, count=B * T, terms=1)
  wanted = jax.tree.map(jnp.subtract, grads, slope)
  making.close_trees(found, wanted, count=PRODUCTS)
  assert float(optax.tree.norm(slope)) > 1e-2 * float(optax.tree.norm(grads))
  assert found_bounds.high == bounds.high and found_bounds.low == bounds.low


def test_a_batch_without_an_advantage_costs_no_pass():
  # And leaves the moments their say, as a gradient of zeros does.
  params, batch = example()
  batch = batch._replace(adv_BT=jnp.zeros_like(batch.adv_BT))
  chosen = objective('clipped', 'token', grad_accum_steps=2)
  assert objective_lib.micro_batches(batch, chosen).packed.used == 0
  tx = optax.adam(1e-2)
  opt = jax.tree.map(lambda x: x + 0.1 if x.ndim else x, tx.init(params))
  step = functools.partial(learner.learn, tx=tx, objective=chosen)
  after, _, metrics, _ = jax.jit(step)(params, opt, batch)
  assert metrics['loss/value'] == metrics['learner/grad_norm'] == 0
  assert metrics['clip/no_evidence'] == 1 and metrics['clip/search_steps'] == 0
  assert metrics['learner/tokens'] > 0 and metrics['learner/tokens_computed'] == 0
  moved = jax.tree.map(jnp.subtract, after, params)
  assert float(optax.tree.norm(moved)) > 0
