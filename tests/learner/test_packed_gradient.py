"""What teaches, packed, gives the gradient and the bounds of all rows, padded."""

import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip, loss
from bapo_jax.algorithms.knobs import LossConfig
from bapo_jax.learner import learner, pictured
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import layers, logprobs, transformer
from bapo_jax.models.layers import Schedule

SPEC = transformer.ModelSpec(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_width=8, ffn=32, tied=True
)
B, T = 32, 30
PRODUCTS = B * T * SPEC.width * SPEC.layers  # summed in a gradient
FAST = {'xla_backend_optimization_level': 0}  # compiles in half the time
AGGREGATES = typing.get_args(LossConfig.model_fields['aggregate'].annotation)
CLIPS = {
  'clipped': making.bound(clip.balanced, target=0.45),
  'decoupled': making.bound(clip.balanced, target=0.45),
  'sequence': making.bound(
    clip.balanced, target=0.6, low=(0.8, 0.98), high=(1.02, 1.5)
  ),
  'cispo': making.bound(clip.fixed, low=0.0, high=1.3),
  **dict.fromkeys(('tis', 'dppo_tv', 'sapo'), clip.unclipped),
}


@functools.cache
def example():
  """(params, batch): rows of all lengths, half of them without an advantage."""
  params, rng = making.params(SPEC), np.random.default_rng(3)
  tokens_BT = jnp.asarray(rng.integers(1, 24, (B, T)), jnp.int32)
  first_B = rng.integers(2, 8, B)[:, None]
  last_B = rng.integers(4, T + 1, B)[:, None]
  mask_BT = (np.arange(T) >= first_B) & (np.arange(T) < last_B)
  logp_BT = logprobs.sequence_stats(params, tokens_BT, SPEC, 0.8).logp_BT
  old_BT, prox_BT = (logp_BT + 0.4 * rng.standard_normal((B, T)) for _ in range(2))
  adv_B = rng.normal(-0.1, 1, B) * (rng.random(B) < 0.5)
  source_B = np.where(np.arange(B) == 5, -1, np.arange(B) % 3)
  mask_BT &= (source_B >= 0)[:, None]
  batch = making.batch(adv_B, mask_BT, old_BT, prox_BT, source_B)
  return params, jax.tree.map(jnp.asarray, batch._replace(tokens_BT=tokens_BT))


def objective(loss_rule, aggregate, **knobs):
  return objective_lib.Objective(
    clip_rule=CLIPS[loss_rule],
    loss_rule=loss.RULES[loss_rule],
    spec=SPEC,
    temperature=0.8,
    chunk=16,
    aggregate=aggregate,
    length=T,
    **knobs,
  )


@functools.cache
def gradient(*rules, mesh=None, **knobs):
  params, batch = example()
  run = functools.partial(
    objective_lib.gradient, objective=objective(*rules, **dict(knobs))
  )
  if mesh is not None:
    params = jax.device_put(params, sharding.shardings(params, mesh))
    batch = jax.device_put(batch, sharding.over_rows(mesh))
  return sharding.under(mesh, jax.jit(run, compiler_options=FAST))(params, batch)


@functools.cache
def eight():
  return sharding.make(2, 2, 2)


def cases():
  """Rules, micro-batches and devices; every pair of them that differs in one way."""
  for loss_rule, how, parts, spread in itertools.product(
    loss.RULES, AGGREGATES, (1, 3), (False, True)
  ):
    usual = loss_rule == 'clipped' or how == 'token'
    marks = [pytest.mark.slow] if spread and parts == 3 and usual else []
    marks += [pytest.mark.nightly] if spread and not marks else []
    yield pytest.param(loss_rule, how, parts, spread, marks=marks)


@pytest.mark.parametrize(('loss_rule', 'aggregate', 'parts', 'spread'), list(cases()))
def test_pruned_and_packed_gradients_are_those_of_all_rows(
  loss_rule, aggregate, parts, spread
):
  mesh = eight() if spread else None
  check(loss_rule, aggregate, grad_accum_steps=parts, mesh=mesh)


def check(loss_rule, aggregate, **knobs):
  """Value, gradient and bounds under these knobs are those of all rows, padded."""
  value, wanted, (stats, bounds) = gradient(loss_rule, aggregate, pack=False)
  found_value, found, (found_stats, found_bounds) = gradient(
    loss_rule, aggregate, **knobs
  )
  making.close(found_value, value, count=B * T, terms=1)
  making.close_trees(found, wanted, count=PRODUCTS)
  assert float(optax.tree.norm(wanted)) > 1e-3
  for name, bound in bounds._asdict().items():
    np.testing.assert_array_equal(getattr(found_bounds, name), bound, err_msg=name)
  if CLIPS[loss_rule] in (clip.balanced, CLIPS['clipped']):
    assert bounds.search_steps > 0
  teaches_B1 = (example()[1].adv_B != 0)[:, None] & example()[1].loss_mask_BT
  for name, x_BT in stats._asdict().items():
    making.close(
      getattr(found_stats, name), np.where(teaches_B1, x_BT, 0), count=PRODUCTS
    )


STORED = Schedule(bounds_pass='stored')


@pytest.mark.parametrize(
  ('loss_rule', 'aggregate'),
  [
    pytest.param(rule, how, marks=pytest.mark.nightly)
    if rule != 'clipped' and how != 'token'
    else (rule, how)
    for rule, how in itertools.product(loss.RULES, AGGREGATES)
  ],
)
def test_bounds_of_all_need_no_second_forward_pass(loss_rule, aggregate):
  check(loss_rule, aggregate, schedule=STORED, grad_accum_steps=3)


@pytest.mark.parametrize('remat', layers.REMAT)
def test_what_waits_for_the_bounds_may_be_any_part_of_a_layer(remat):
  schedule = STORED._replace(remat=remat)
  check('clipped', 'token', schedule=schedule, grad_accum_steps=2)


@pytest.mark.parametrize('remat', layers.REMAT)
def test_what_waits_saves_one_forward_pass(remat):
  params, batch = example()

  def products(function):  # the compiler counts the body of a loop once
    compiled = jax.jit(function).lower(params, batch).compile()
    return compiled.cost_analysis()['flops']

  def of(bounds_pass):
    schedule = Schedule(remat=remat, bounds_pass=bounds_pass)
    return objective('clipped', 'token', schedule=schedule, grad_accum_steps=3)

  def forward(params, batch):
    found = objective_lib.micro_batches(batch, of('again'))
    return found.stats(pictured.Variables(params), 0, of('again'))

  again, stored = (
    products(functools.partial(objective_lib.gradient, objective=of(name)))
    for name in ('again', 'stored')
  )
  assert (again - stored) / products(forward) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
def test_what_waits_for_the_bounds_lies_on_its_devices():
  check('clipped', 'token', schedule=STORED, grad_accum_steps=3, mesh=eight())


def test_a_row_without_an_advantage_is_computed_only_for_a_penalty():
  _, batch = example()
  plain, penalised = (objective('clipped', 'token', kl=kl) for kl in (0.0, 0.1))
  computed_B = objective_lib.micro_batches(batch, plain).packed.bin_B >= 0
  trained_B = batch.loss_mask_BT.any(1)
  np.testing.assert_array_equal(computed_B, trained_B & (batch.adv_B != 0))
  all_B = objective_lib.micro_batches(batch, penalised).packed.bin_B >= 0
  np.testing.assert_array_equal(all_B, trained_B)
  assert 0 < computed_B.sum() < trained_B.sum()


@pytest.mark.parametrize('parts', [1, 4])
def test_a_penalty_reaches_rows_without_an_advantage(parts):
  rules = 'clipped', 'token'
  _, wanted, _ = gradient(*rules, kl=0.3, pack=False)
  _, found, _ = gradient(*rules, kl=0.3, grad_accum_steps=parts)
  _, without, _ = gradient(*rules)
  making.close_trees(found, wanted, count=PRODUCTS)
  apart = jax.tree.map(jnp.subtract, without, wanted)
  assert float(optax.tree.norm(apart)) > 1e-2 * float(optax.tree.norm(wanted))


@pytest.mark.parametrize('scope', ['minibatch', 'micro_batch'])
def test_a_batch_without_an_advantage_costs_no_pass(scope):
  # And leaves the moments their say, as a gradient of zeros does.
  params, batch = example()
  batch = batch._replace(adv_B=jnp.zeros(B))
  chosen = objective('clipped', 'token', bounds_scope=scope, grad_accum_steps=2)
  assert objective_lib.micro_batches(batch, chosen).packed.used == 0
  value, grads, (_, bounds) = jax.jit(
    functools.partial(objective_lib.gradient, objective=chosen)
  )(params, batch)
  assert value == 0 and optax.tree.norm(grads) == 0
  assert bounds.no_evidence.all() and not bounds.search_steps.any()
  tx = optax.adam(1e-2)
  opt = tx.init(params)
  opt = jax.tree.map(lambda x: x + 0.1 if x.ndim else x, opt)
  step = jax.jit(functools.partial(learner.learn, tx=tx, objective=chosen))
  after, _, metrics, _ = step(params, opt, batch)
  assert metrics['learner/tokens'] > 0 and metrics['learner/tokens_computed'] == 0
  moved = jax.tree.map(jnp.subtract, after, params)
  assert float(optax.tree.norm(moved)) > 0
