"""Tokens that no policy sampled: their own objective, with its own denominator."""

import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import advantage, clip, loss
from bapo_jax.learner import learner
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import layers, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.types import GIVEN

SPEC = making.SPEC
P, G, T = 4, 4, 9
HEAT = 0.8
PRODUCTS = P * G * T * SPEC.width * SPEC.layers
RULE = {'given': 0.7, 'given_gamma': 0.2, 'imitation': 0.3}


@functools.cache
def groups():
  """Four groups, whose last response is given and right; one is all right."""
  made = making.groups(range(P), [1, 0, 2, 3], [5] * P, G, T)
  version_PGT = np.array(made.policy_version_PGT)
  version_PGT[:, -1] = GIVEN
  correct_PG = np.array(made.correct_PG)
  correct_PG[:, -1] = True
  return made._replace(
    response_mask_PGT=jnp.asarray(
      np.array(made.response_mask_PGT) & (np.arange(T) > 1)
    ),
    policy_version_PGT=jnp.asarray(version_PGT),
    correct_PG=jnp.asarray(correct_PG),
    reward_PG=jnp.asarray(correct_PG, jnp.float32),
  )


def batch(made=None, unsampled='given'):
  made = groups() if made is None else made
  source_P = jnp.asarray([0, 0, -1, 0])
  rule = advantage.GroupRelative()
  return learner.flatten(made, source_P, rule, unsampled=unsampled)


def gradient(flat, mesh=None, **knobs):
  schedule = knobs.pop('schedule', Schedule())
  chosen = making.objective(
    clip.Balanced(target=0.45), schedule=schedule, length=T, **knobs
  )
  params = making.params(SPEC)
  if mesh is not None:
    params = jax.device_put(params, sharding.shardings(params, mesh))
    flat = jax.device_put(flat, sharding.over_rows(mesh))
  run = functools.partial(objective_lib.gradient, objective=chosen)
  return sharding.under(mesh, jax.jit(run))(params, flat)


def test_the_objective_of_a_given_token_is_that_of_the_paper():
  # LUFFY, Eq. 8: f(pi) = pi / (pi + .1), times A; the weight in the gradient of log pi
  # is A f'(pi) pi. f is differentiated numerically, in float64.
  pi_T = np.asarray([1e-30, 1e-4, 0.01, 0.1, 0.5, 1.0])
  adv_T = np.asarray([1.5, 1.5, -0.5, 2.0, 1.0, -1.0])
  flat = making.batch(np.ones(1), np.zeros((1, 6)))
  flat = flat._replace(adv_BT=np.float32(adv_T[None]), given_BT=np.ones((1, 6), bool))
  rule = loss.Clipped(given=3.0)

  def total(logp_BT):
    return loss.from_given(rule, logp_BT, flat).sum()

  def f(pi):
    return pi / (pi + 0.1)

  logp_BT = np.float32(np.log(pi_T))[None]
  value, slope_BT = jax.value_and_grad(total)(logp_BT)
  np.testing.assert_allclose(value, 3 * (adv_T * f(pi_T)).sum(), rtol=1e-5)
  step = 1e-6 * pi_T
  derivative_T = (f(pi_T + step) - f(pi_T - step)) / (2 * step)
  wanted_T = 3 * adv_T * derivative_T * pi_T
  np.testing.assert_allclose(slope_BT[0], wanted_T, rtol=2e-5, atol=1e-28)
  # gamma = .1 has the largest weight, A / 4, at pi = .1.
  assert slope_BT[0, 3] == pytest.approx(3 * 2.0 / 4, rel=1e-5)


def naive(flat, aggregate):
  """The given objective of whole distributions, in loops over rows and tokens."""
  given_BT, tokens_BT, adv_BT = map(
    np.asarray, (flat.given_BT, flat.tokens_BT, flat.adv_BT)
  )

  def value(params):
    hidden_BTD = layers.forward(params, jnp.asarray(tokens_BT), SPEC)
    logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(params)) / HEAT
    pi_BTV = jax.nn.softmax(logits_BTV)
    rows = []
    for b in range(P * G):
      tokens = []
      for t in np.flatnonzero(given_BT[b]):
        pi = pi_BTV[b, t - 1, tokens_BT[b, t]]
        shaped = pi / (pi + RULE['given_gamma']) * adv_BT[b, t]
        tokens.append(RULE['given'] * shaped + RULE['imitation'] * jnp.log(pi))
      if tokens:
        rows.append(tokens)
    filled = 0.75  # three of four seats
    if aggregate == 'token':
      return filled * sum(map(sum, rows)) / sum(map(len, rows))
    if aggregate == 'sequence':
      return filled * sum(sum(x) / len(x) for x in rows) / len(rows)
    return filled * sum(map(sum, rows)) / (len(rows) * T)

  return jax.jit(jax.value_and_grad(value))(making.params(SPEC))


@pytest.mark.parametrize(
  ('aggregate', 'knobs'),
  [
    ('token', {'pack': False}),
    ('token', {'grad_accum_steps': 3}),
    ('sequence', {'schedule': Schedule('full', bounds_pass='stored')}),
    ('constant', {'grad_accum_steps': 2}),
    ('token', {'mesh': sharding.make(4, 2, 1)}),
  ],
)
def test_given_tokens_add_their_own_mean_and_move_no_bound(aggregate, knobs):
  flat = batch()
  assert flat.given_BT.sum(1).astype(bool).sum() == 3  # not that of the empty seat
  assert not (flat.given_BT & flat.loss_mask_BT).any()
  # The same rows without their given tokens; all their tokens are computed.
  alone = flat._replace(given_BT=None)
  rule = {'aggregate': aggregate}
  value, grads, (_, bounds) = gradient(alone, **rule)
  wanted_value, slope = naive(flat, aggregate)
  found_value, found, (_, found_bounds) = gradient(flat, **rule, **RULE, **knobs)
  making.close(found_value, value - wanted_value, count=P * G * T, terms=1)
  making.close_trees(found, jax.tree.map(jnp.subtract, grads, slope), count=PRODUCTS)
  assert (found_bounds.high, found_bounds.low) == (bounds.high, bounds.low)
  assert abs(wanted_value) > 1e-2


def test_rows_without_an_advantage_are_computed_only_to_be_imitated():
  flat = batch()
  for knobs, rows in (({}, 2), ({'imitation': 0.1}, 3)):
    made = making.objective(clip.Balanced(), **knobs)
    computed = made.computed(flat)
    # The responses of the last group are all right.
    assert computed.given_BT.any(1).sum() == rows
    packed = objective_lib.micro_batches(flat, made).packed
    taught_B = computed.trained_BT.any(1)
    np.testing.assert_array_equal(packed.bin_B >= 0, taught_B)


def test_a_teacher_gives_no_advantage_to_a_token_that_nobody_sampled():
  made = groups()
  reference_PGT = made.behavior_logp_PGT + 1
  source_P = jnp.zeros(P, int)
  adv_PGT = learner.advantages(
    made, source_P, None, reference_PGT=reference_PGT, teacher=2.0
  )
  mask_PGT = made.response_mask_PGT
  np.testing.assert_allclose(adv_PGT[:, :-1][mask_PGT[:, :-1]], 2, rtol=1e-5)
  assert not adv_PGT[:, -1].any()


def test_messages_are_imitated_and_nothing_else():
  # Two turns, and a message of two tokens between them.
  mask_T = np.asarray([0, 0, 1, 1, 0, 0, 1, 0, 0], bool)
  made = groups()._replace(
    response_mask_PGT=jnp.broadcast_to(mask_T, (P, G, T)),
    policy_version_PGT=jnp.zeros((P, G, T), jnp.int32),
  )
  flat = batch(made, 'messages')
  wanted_T = np.asarray([0, 0, 0, 0, 1, 1, 0, 0, 0], bool)
  assert (np.asarray(flat.given_BT)[:8] == wanted_T).all()
  assert not flat.given_BT[8:12].any()  # of an empty seat
  assert (flat.loss_mask_BT == batch(made, '').loss_mask_BT).all()
  value, grads, _ = gradient(flat, imitation=0.3)
  alone, without, _ = gradient(flat._replace(given_BT=None))
  made = flat._replace(adv_BT=jnp.zeros_like(flat.adv_BT))
  wanted, slope = naive(made, 'token')
  making.close(value, alone - wanted, count=P * G * T, terms=1)
  making.close_trees(grads, jax.tree.map(jnp.subtract, without, slope), count=PRODUCTS)


def test_an_update_of_given_tokens_alone_moves_the_weights():
  flat = batch()
  flat = flat._replace(loss_mask_BT=jnp.zeros_like(flat.loss_mask_BT))
  tx = making.adamw(lr=1e-2)
  chosen = making.objective(clip.Balanced(), imitation=1.0)
  step = functools.partial(learner.learn, tx=tx, objective=chosen)
  params = making.params(SPEC)
  opt = tx.init(params)
  before = None
  for _ in range(5):
    params, opt, metrics, _ = jax.jit(step)(params, opt, flat)
    assert metrics['learner/tokens'] == flat.given_BT.sum()
    assert before is None or metrics['given/logp'] > before
    before = metrics['given/logp']
