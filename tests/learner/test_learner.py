"""Updates: which groups take part, what is skipped, and how the optimiser steps."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
import runs

from bapo_jax import sharding
from bapo_jax.algorithms import advantage, clip
from bapo_jax.learner import learner
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import logprobs, transformer
from bapo_jax.runtime import glossary

P = 4
G = 4
T = 12
TEMPERATURE = 0.8
B = P * G
# Summed in a gradient, through all layers.
PRODUCTS = B * T * making.SPEC.width * making.SPEC.layers
RULE = clip.Balanced(target=0.4)
ADAM = making.adamw(lr=1e-2)


@pytest.fixture(scope='module')
def params():
  return making.params()


learn = jax.jit(
  functools.partial(learner.learn, tx=ADAM, objective=making.objective(RULE))
)


@jax.jit
def score(params, tokens_BT):
  return logprobs.sequence_stats(params, tokens_BT, making.SPEC, TEMPERATURE).logp_BT


def rows(params, noise=0.0):
  """A batch that these weights sampled, save for `noise` nats per token."""
  groups = making.groups(range(P), [1, 2, 3, 2], [0] * P, G, T)
  batch = learner.flatten(
    groups, jnp.arange(P) % 3, advantage.GroupRelative(), version=0
  )
  off_BT = noise * jax.random.normal(jax.random.key(0), batch.loss_mask_BT.shape)
  # The first three tokens are the prompt.
  return batch._replace(
    loss_mask_BT=batch.loss_mask_BT & (jnp.arange(T) >= 3)[None],
    behavior_logp_BT=score(params, batch.tokens_BT) + off_BT,
  )


def test_flatten_golden():
  # Group 0 has 1 of 2 right (+1/2, -1/2), group 1 has both right (0, 0) and no seat.
  # A weight multiplies the advantages of its source.
  groups = making.groups([7, 8], [1, 2], [0, 0], G=2, T=3)
  batch = learner.flatten(
    groups, jnp.asarray([2, -1]), advantage.GroupCentred(), weights=(1.0, 1.0, 0.5)
  )
  np.testing.assert_array_equal(batch.adv_BT[:, 0], [0.25, -0.25, 0, 0])
  np.testing.assert_array_equal(batch.loss_mask_BT[:2], groups.response_mask_PGT[0])
  np.testing.assert_array_equal(batch.loss_mask_BT[2:], False)
  np.testing.assert_array_equal(batch.tokens_BT[3], groups.tokens_PGT[1, 1])
  old_T = groups.behavior_logp_PGT[0, 1]
  np.testing.assert_array_equal(batch.behavior_logp_BT[1], old_T)
  np.testing.assert_array_equal(batch.prox_BT, batch.behavior_logp_BT)
  assert batch.source_B.tolist() == [2, 2, -1, -1]


def test_a_cost_on_divergence_holds_the_policy_near_the_behaviour_policy(params):
  # Nothing to gain but nearness: the gradient is that of the mean of r - 1 - log r.
  batch = rows(params, noise=0.3)._replace(adv_BT=jnp.zeros((B, T)))

  def far(params):
    log_r_BT = score(params, batch.tokens_BT) - batch.behavior_logp_BT
    k3_BT = jnp.exp(log_r_BT) - 1 - log_r_BT
    return jnp.where(batch.loss_mask_BT, k3_BT, 0).sum() / batch.loss_mask_BT.sum()

  value, grads, _ = gradient(kl=0.5)(params, batch)
  expected, expected_grads = jax.value_and_grad(far)(params)
  making.close(value, 0.5 * expected, count=PRODUCTS)
  expected_grads = jax.tree.map(lambda g: 0.5 * g, expected_grads)
  making.close_trees(grads, expected_grads, count=PRODUCTS)
  assert expected > 0


@functools.cache
def gradient(**knobs):
  chosen = making.objective(RULE, **knobs)
  return jax.jit(functools.partial(objective_lib.gradient, objective=chosen))


def test_micro_batches_may_search_by_themselves(params):
  # One micro-batch has no negative token and idles; the other has nothing else.
  batch = rows(params, noise=0.4)
  knobs = dict(grad_accum_steps=2, bounds_scope='micro_batch')
  chosen = making.objective(RULE, **knobs)
  first_B = objective_lib.micro_batches(batch, chosen).packed.mine(0)[:, 0]
  adv_B = jnp.where(first_B, jnp.float32(0.2), -1)
  batch = batch._replace(adv_BT=jnp.broadcast_to(adv_B[:, None], batch.tokens_BT.shape))
  _, grads, (_, bounds) = gradient(**knobs)(params, batch)
  assert bounds.low.shape == (B, 1)
  assert 0 < first_B.sum() < B
  np.testing.assert_array_equal(bounds.search_steps[:, 0], jnp.where(first_B, 0, 51))
  # The gradient is the sum of the parts', each under the bounds it found.
  halves = []
  for half_B, search_steps in ((first_B, 0), (~first_B, 51)):
    loss_mask_BT = batch.loss_mask_BT & half_B[:, None]
    part = batch._replace(loss_mask_BT=loss_mask_BT)
    _, found, seen = gradient()(params, part)
    assert seen[1].search_steps == search_steps
    share = loss_mask_BT.sum() / batch.loss_mask_BT.sum()
    halves.append(jax.tree.map(lambda g, share=share: g * share, found))
  expected = jax.tree.map(jnp.add, *halves)
  making.close_trees(grads, expected, count=PRODUCTS)


def updated(groups, source_P, key, train_step, params=None, **knobs):
  """(counter, updates) of `update`; a call of train_step counts one up."""
  step = lambda params, opt, batch: (params, opt + 1, {}, train_step(batch))  # noqa: E731
  knobs = {'advantage_rule': advantage.GroupRelative()} | knobs
  rules = learner.Rules(step, **knobs)
  _, count, updates = learner.update(params, 0, groups, source_P, key, rules)
  return count, updates


def test_proximal_is_computed_once_and_reaches_every_minibatch(params):
  groups = making.groups(range(8), [i % 5 for i in range(8)], [0] * 8, G, T)
  scored = []
  seen = []

  def proximal(params, groups, pictures):
    scored.append(params)
    return groups.behavior_logp_PGT - 1

  source_P = jnp.zeros(8, jnp.int32)
  knobs = {'epochs': 2, 'minibatches': 4, 'proximal': proximal}
  updated(groups, source_P, jax.random.key(0), seen.append, params, **knobs)
  assert scored == [params] and len(seen) == 8
  for batch in seen:
    np.testing.assert_array_equal(batch.prox_BT, batch.behavior_logp_BT - 1)


def test_without_a_group_nothing_changes(params):
  # Adam's moments would carry the weights on: no seat earned means no update at all.
  batch = rows(params)
  params, opt, *_ = learn(params, ADAM.init(params), batch)
  nothing = batch._replace(loss_mask_BT=jnp.zeros_like(batch.loss_mask_BT))
  after, opt_after, metrics, _ = learn(params, opt, nothing)
  assert runs.same(after, params) and runs.same(opt_after, opt)
  measured = {
    name: metric
    for name, metric in glossary.OF_UPDATES.items()
    if not metric.of and not metric.optional
  }
  assert metrics.keys() == measured.keys()  # each has declared its reduction
  lost = {name for name, value in metrics.items() if not np.isfinite(value)}
  skip_nan = glossary.nanmean, glossary.largest, glossary.first
  assert lost == {name for name, x in measured.items() if x.reduce in skip_nan}
  assert metrics['loss/value'] == 0 and metrics['learner/grad_norm'] == 0


@pytest.mark.parametrize('field', ['adv_BT', 'behavior_logp_BT'])
def test_an_update_that_is_not_finite_is_skipped_and_counted(params, field):
  # One number is enough to spoil all weights; nothing of it may stay in the moments.
  batch = rows(params)
  opt = ADAM.init(params)
  params, opt, metrics, _ = learn(params, opt, batch)
  assert not metrics['learner/skipped']
  # Infinite advantage; or an importance ratio that overflows.
  bad = {'adv_BT': jnp.inf, 'behavior_logp_BT': -1e4}[field]
  spoilt = getattr(batch, field)
  where = 0 if field == 'adv_BT' else (0, int(batch.loss_mask_BT[0].argmax()))
  broken = batch._replace(**{field: spoilt.at[where].set(bad)})
  if field == 'behavior_logp_BT':  # clipping saves a positive token only
    broken = broken._replace(adv_BT=broken.adv_BT.at[0].set(-1))
  after, opt_after, metrics, _ = learn(params, opt, broken)
  assert metrics['learner/skipped']
  assert runs.same(after, params) and runs.same(opt_after, opt)


UNTIED = dataclasses.replace(making.QWEN2, tied=False, o_bias=True)
SPECS = (
  making.QWEN2,
  UNTIED,
  making.QWEN3,
  making.MIXTURE,
  making.SEEING,
  making.GEMMA3,
  making.OLMO3,
)


@pytest.mark.parametrize('master', [False, True])
def test_weight_decay_shrinks_matrices_and_neither_norms_nor_biases(master):
  # Without a gradient a step is the decay alone: 1 - lr * decay = .99 of the weight.
  trees = [*map(making.params, SPECS), making.adapters()]
  tx = making.adamw(lr=0.1, weight_decay=0.1, master=master)

  @jax.jit
  def step(trees):
    nothing = jax.tree.map(jnp.zeros_like, trees)
    moves, _ = tx.update(nothing, tx.init(trees), trees)
    return optax.apply_updates(trees, moves)

  # What begins as 1 or 0 is the scale of a norm or a bias; adapters have neither.
  kinds = {k: x[1] for spec in SPECS for k, x in transformer.describe(spec).items()}
  seen = set()
  after = jax.tree.leaves(step(trees))
  for (path, before), weight in zip(
    jax.tree.leaves_with_path(trees), after, strict=True
  ):
    name = sharding.path_name(path[1:])
    kept = kinds.get(name) in ('ones', 'zeros')
    wanted = np.asarray(before) * np.float32(1 if kept else 0.99)
    np.testing.assert_allclose(weight, wanted, rtol=1e-6, err_msg=name)
    seen.add((name.rpartition('/')[2], kept))
  assert {('embed', False), ('router', False), ('patch', False), ('a', False)} < seen
  assert {('q_norm', True), ('o_bias', True), ('merger_norm', True)} < seen
  assert ('attn_post_norm', True) in seen


def test_the_master_is_float32_adamw_and_the_parameters_are_it_rounded():
  rng = np.random.default_rng(0)
  kinds = {'embed': jnp.bfloat16, 'final_norm': jnp.float32}
  params = {n: jnp.asarray(rng.standard_normal(50), kind) for n, kind in kinds.items()}
  knobs = {'lr': 1e-3, 'warmup': 3, 'weight_decay': 0.1}
  ours = making.adamw(master=True, **knobs)
  plain = making.adamw(**knobs)
  state = ours.init(params)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  moments = plain.init(exact)

  @jax.jit
  def step(params, state, grads):
    moves, state = ours.update(grads, state, params)
    return optax.apply_updates(params, moves), state

  for _ in range(20):
    grads = {n: jnp.asarray(rng.uniform(1, 2, 50), k) for n, k in kinds.items()}
    params, state = step(params, state, grads)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    moves, moments = plain.update(wide, moments, exact)
    exact = optax.apply_updates(exact, moves)
  for name, kind in kinds.items():
    making.close(state.master[name], exact[name], count=16 * 20)
    assert params[name].dtype == kind and state.master[name].dtype == jnp.float32
    np.testing.assert_array_equal(params[name], state.master[name].astype(kind))


def test_micro_batches_of_bfloat16_parameters_are_summed_in_float32(params):
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  two = making.objective(RULE, grad_accum_steps=2)
  grads = jax.eval_shape(
    lambda params, batch: objective_lib.gradient(params, batch, two)[1],
    half,
    rows(params),
  )
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype('float32')}


def visits(filled, P, epochs=1, masked=()):
  """[(filled problems of one of four minibatches, its seats)] of each update."""
  groups = making.groups(range(P), [i % 3 for i in range(P)], [0] * P, 2, 1)
  empty_P11 = jnp.isin(jnp.arange(P), jnp.asarray(masked, jnp.int32))[:, None, None]
  groups = groups._replace(
    tokens_PGT=jnp.broadcast_to(jnp.arange(P)[:, None, None], (P, 2, 1)),
    response_mask_PGT=groups.response_mask_PGT & ~empty_P11,
  )
  seen = []

  def record(batch):
    problems, second_P = np.asarray(batch.tokens_BT)[:, 0].reshape(-1, 2).T
    np.testing.assert_array_equal(problems, second_P)  # groups stay whole
    filled_P = np.asarray(batch.loss_mask_BT).any(1)[::2]
    assert ((np.asarray(batch.source_B)[::2] >= 0) == filled_P).all()
    seen.append((problems[filled_P].tolist(), len(problems)))

  source_P = jnp.where(jnp.arange(P) < filled, 0, -1)
  knobs = {'epochs': epochs, 'minibatches': 4}
  count, updates = updated(groups, source_P, jax.random.key(3), record, **knobs)
  assert count == len(updates) == len(seen)
  return seen


def test_groups_without_a_token_to_train_on_take_no_update():
  # 4 of 8 seats are filled, 2 of them with groups whose responses are all masked out.
  seen = visits(4, P=8, masked=(0, 3))
  assert [sorted(problems) for problems, _ in seen] == [[1, 2]]
  assert visits(4, P=8, masked=range(4)) == []


@pytest.mark.parametrize('filled', [0, 1, 8, 12])
def test_an_underfilled_batch_takes_as_many_updates_as_its_groups_need(filled):
  # 12 seats in 4 minibatches of 3: n groups make ceil(n / 3) updates, sizes even.
  seen = visits(filled, P=12, epochs=2)
  updates = math.ceil(filled / 3)
  assert len(seen) == 2 * updates
  for epoch in (seen[:updates], seen[updates:]):
    sizes = [len(problems) for problems, _ in epoch]
    assert sum(sizes) == filled and max(sizes, default=0) - min(sizes, default=0) <= 1
    assert sorted(p for problems, _ in epoch for p in problems) == list(range(filled))
  assert {seats for _, seats in seen} <= {3}, 'one shape, one compile'
  if filled == 12:  # no seat is empty: the permutation alone decides
    keys = jax.random.split(jax.random.key(3), 2)
    orders = [np.asarray(jax.random.permutation(key, 12)).reshape(4, 3) for key in keys]
    assert [problems for problems, _ in seen] == np.concatenate(orders).tolist()


@pytest.mark.parametrize(
  ('aggregate', 'parts'), [('token', 1), ('sequence', 2), ('constant', 1)]
)
def test_the_gradient_of_a_partial_minibatch_is_scaled_as_its_share(
  params, aggregate, parts
):
  # Three of four groups have a seat: the gradient is 3/4 of that of these three alone.
  batch = rows(params, noise=0.1)
  half = B * 3 // 4
  partial = batch._replace(
    source_B=batch.source_B.at[half:].set(-1),
    loss_mask_BT=batch.loss_mask_BT.at[half:].set(False),
  )
  alone = jax.tree.map(lambda x: x[:half], batch)
  knobs = dict(aggregate=aggregate, length=T)
  value, grads, _ = gradient(grad_accum_steps=parts, **knobs)(params, partial)
  expected, wanted, _ = gradient(**knobs)(params, alone)
  making.close(value, 0.75 * expected, count=B * T, terms=1)
  wanted = jax.tree.map(lambda g: 0.75 * g, wanted)
  making.close_trees(grads, wanted, count=PRODUCTS)
