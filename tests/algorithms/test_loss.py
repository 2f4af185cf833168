"""Loss rules: goldens by hand, gradients token by token, and sums that add up."""

import math

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.algorithms import loss
from bapo_jax.types import Bounds

LOSSES = loss.LossRule.rules.at_defaults()


def bounds(low=0.75, high=1.5, cap=math.inf, dual=math.inf) -> Bounds:
  values = (jnp.float32(x) for x in (low, high, cap, dual, low, high))
  met, no = jnp.asarray(True), jnp.asarray(False)
  return Bounds(*values, jnp.int32(0), met, no, no)


def one(ratio, adv, **fields):
  """(logp_BT, batch) of a single token."""
  batch = making.batch([adv], [[True]], logp_BT=[[-2.0]], **fields)
  return jnp.log(jnp.float32([[ratio]])) - 2, batch


def gain_and_slope(rule, logp_BT, batch, given):
  """The token's gain, and its derivative by the ratio pi / mu, at r = exp(logp + 2)."""

  def total(logp_BT):
    return rule(logp_BT, batch, lambda _: given)[0].sum()

  value, slope_BT = jax.value_and_grad(total)(logp_BT)
  return float(value), float(slope_BT[0, 0] / jnp.exp(logp_BT[0, 0] + 2))


@pytest.mark.parametrize(
  ('ratio', 'adv', 'gain', 'slope'),
  [
    # A > 0: the gain stops growing at 1.5; below 0.75 it is not clipped.
    (2.0, 1.0, 1.5, 0.0),
    (0.5, 1.0, 0.5, 1.0),
    # A < 0: the loss stops falling at 0.75; above 1.5 it is not clipped.
    (0.5, -1.0, -0.75, 0.0),
    (2.0, -1.0, -2.0, -1.0),
    # Between the bounds, r A for either sign.
    (1.25, 2.0, 2.5, 2.0),
    (1.25, -2.0, -2.5, -2.0),
    # Dual clip at 3: a negative token is worth -3 at most, and no gradient beyond.
    (4.0, -1.0, -3.0, 0.0),
    (4.0, 1.0, 1.5, 0.0),
    (1.0, 0.0, 0.0, 0.0),
  ],
)
def test_clipped_golden(ratio, adv, gain, slope):
  found = gain_and_slope(loss.Clipped(), *one(ratio, adv), bounds(dual=3.0))
  np.testing.assert_allclose(found, (gain, slope), rtol=making.RTOL)


@pytest.mark.parametrize(('ratio', 'adv'), [(1.5, 1.0), (0.75, -1.0), (3.0, -1.0)])
def test_a_token_at_its_bound_is_cut(ratio, adv):
  # As the search counts it: r >= high, r <= low. Half a gradient would be neither.
  logp_BT, batch = one(1.0, adv)
  batch = batch._replace(behavior_logp_BT=np.zeros((1, 1), np.float32))
  logp_BT = jnp.log(jnp.float32([[ratio]]))
  ratio = loss.ratio(logp_BT, batch)[0, 0]  # exp(log x) may miss x by a bit
  if adv > 0:
    given = bounds(high=ratio)
  else:
    given = bounds(low=ratio) if ratio < 1 else bounds(dual=ratio)
  slope_BT = loss.weights(loss.Clipped(), logp_BT, batch, given)
  assert slope_BT[0, 0] == 0


def test_nan_is_not_hidden():
  logp_BT, batch = one(1.0, 1.0)
  for rule in LOSSES.values():
    gain_BT, _ = rule(logp_BT * np.nan, batch, lambda _: bounds())
    assert np.isnan(gain_BT).all()


def test_reused_rows_may_have_a_cap_of_their_own():
  ratios = {}
  for source in range(3):
    data = one(1.4, 1.0, source_B=[source])
    ratios[source] = gain_and_slope(loss.Clipped(), *data, bounds(cap=1.1))
  np.testing.assert_allclose(ratios[0], (1.4, 1.0), rtol=making.RTOL)
  assert ratios[1] == ratios[0]
  np.testing.assert_allclose(ratios[2], (1.1, 0.0), rtol=making.RTOL)
  # The cap lowers a bound and never raises it.
  found = gain_and_slope(loss.Clipped(), *one(2.0, 1.0, source_B=[2]), bounds(cap=9.0))
  assert found == (1.5, 0.0)


@pytest.mark.parametrize('direction', ['behavior_policy', 'policy_behavior'])
def test_the_divergence_has_the_value_and_the_gradient_of_an_exact_kl(direction):
  # Every word of a small softmax, weighted by mu, against sums over the distributions.
  rng = np.random.default_rng(0)
  logmu_V = jnp.log(jnp.float32(rng.dirichlet(np.ones(6))))
  z_V = jnp.float32(rng.normal(0, 1, 6))
  batch = making.batch([1], [[True] * 6], logp_BT=logmu_V[None])

  def exact(z_V):
    logp_V = jax.nn.log_softmax(z_V)
    first, second = (logmu_V, logp_V)[:: 1 if direction == 'behavior_policy' else -1]
    return (jnp.exp(first) * (first - second)).sum()

  def sampled(z_V):
    kl_BT = loss.divergence(jax.nn.log_softmax(z_V)[None], batch, direction)
    return (jnp.exp(logmu_V) * kl_BT[0]).sum()

  assert exact(z_V) > 0.1
  making.close(sampled(z_V), exact(z_V), count=64, terms=4)
  making.close(jax.grad(sampled)(z_V), jax.grad(exact)(z_V), count=64, terms=4)


def distributions(seed, same):
  """Returns (z, log mu, log p) of five words: z are the policy's logits, float64."""
  rng = np.random.default_rng(seed)
  z_V, other_V, p_V = (jnp.asarray(rng.normal(0, 1.5, 5)) for _ in range(3))
  return z_V, *map(jax.nn.log_softmax, (z_V if same else other_V, p_V))


@pytest.mark.parametrize(
  ('estimator', 'same', 'backward'),
  [
    ('weighted', True, False),
    ('weighted', False, False),
    ('k2', True, False),
    ('k3', True, True),
  ],
)
def test_the_reference_has_the_gradient_of_an_exact_kl(estimator, same, backward):
  # Every word weighted by the mu that samples it, against sums over the distributions:
  # KL(pi, p) or, backward, KL(p, pi).
  def exact(z_V, ref_V):
    pair = jax.nn.log_softmax(z_V), ref_V
    first, second = pair[::-1] if backward else pair
    return (jnp.exp(first) * (first - second)).sum()

  def sampled(z_V, logmu_V, ref_V):
    batch = making.batch([1], [[True] * 5])
    batch = batch._replace(behavior_logp_BT=logmu_V[None], reference_BT=ref_V[None])
    kl_BT = loss.from_reference(jax.nn.log_softmax(z_V)[None], batch, estimator)
    return (jnp.exp(logmu_V) * kl_BT[0]).sum()

  with jax.enable_x64(True):
    for seed in range(4):
      z_V, logmu_V, ref_V = distributions(seed, same)
      value, slope_V = jax.value_and_grad(sampled)(z_V, logmu_V, ref_V)
      wanted, wanted_V = jax.value_and_grad(exact)(z_V, ref_V)
      assert jnp.abs(wanted_V).max() > 0.05
      np.testing.assert_allclose(slope_V, wanted_V, rtol=0, atol=1e-12)
      if estimator == 'weighted':
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-12)


def test_a_token_whose_probability_has_vanished_has_a_finite_reference():
  # pi underflows to 0: r k3 would be 0 times inf. r k3 = p / mu - r (1 + log(p / pi)).
  batch = making.batch([1, 1], [[True], [False]], [[-1], [-1]])
  batch = batch._replace(reference_BT=jnp.full((2, 1), -2.0))

  def total(logp_BT):
    return loss.from_reference(logp_BT, batch).sum()

  value, slope_BT = jax.value_and_grad(total)(jnp.full((2, 1), -200.0))
  making.close(value, math.exp(-1), count=1)
  np.testing.assert_array_equal(slope_BT, 0)


def check_objective(rule, logp_BT, batch, given, paper):
  """Value and gradient are the paper's, as a mean over rows; returns the gradient."""

  def ours(logp_BT):
    gain_BT, _ = rule(logp_BT, batch, lambda _: given)
    return (gain_BT.sum(1) * loss.row_scale(batch.loss_mask_BT, 'sequence', 1)).sum()

  logp_BT = jnp.asarray(logp_BT)
  value, slope_BT = jax.value_and_grad(ours)(logp_BT)
  making.close(value, paper(logp_BT), count=logp_BT.size, terms=3)
  making.close(slope_BT, jax.grad(paper)(logp_BT), count=64)
  return slope_BT


def test_sequence_is_the_gradient_of_the_papers_objective():
  # Eq. 5: mean over responses of min(s A, clip(s) A), s the geometric mean.
  logp_BT, batch = making.mixed_tokens()

  def paper(logp_BT):
    n_B = batch.loss_mask_BT.sum(1)
    log_s_B = (
      jnp.where(batch.loss_mask_BT, logp_BT - batch.behavior_logp_BT, 0).sum(1) / n_B
    )
    s_B = jnp.exp(log_s_B)
    adv_B = batch.adv_BT[:, 0]
    gain_B = jnp.minimum(s_B * adv_B, jnp.clip(s_B, 0.75, 1.5) * adv_B)
    return gain_B.mean()

  check_objective(loss.SequenceRatio(), logp_BT, batch, bounds(), paper)


def test_sequence_is_gspo_token_where_advantages_differ_by_token():
  # Eq. 13 and 14: min(s A, clip(s) A) with s = sg(s of the response) pi / sg(pi).
  logp_BT, batch = making.mixed_tokens()
  adv_BT = np.random.default_rng(1).normal(0, 1, logp_BT.shape).astype(np.float32)
  adv_BT[:, 0] = -np.sign(adv_BT[:, 1])
  batch = batch._replace(adv_BT=adv_BT)
  sg = jax.lax.stop_gradient

  def paper(logp_BT):
    mask_BT, n_B1 = batch.loss_mask_BT, batch.loss_mask_BT.sum(1, keepdims=True)
    r_BT = jnp.where(mask_BT, logp_BT - batch.behavior_logp_BT, 0)
    s_BT = sg(jnp.exp(r_BT.sum(1, keepdims=True) / n_B1)) * jnp.exp(
      logp_BT - sg(logp_BT)
    )
    least_BT = jnp.minimum(s_BT * adv_BT, jnp.clip(s_BT, 0.75, 1.5) * adv_BT)
    return (jnp.where(mask_BT, least_BT, 0) / n_B1).sum(1).mean()

  slope_BT = check_objective(loss.SequenceRatio(), logp_BT, batch, bounds(), paper)
  cut_BT = batch.loss_mask_BT & (np.asarray(slope_BT) == 0)
  assert (cut_BT.any(1) & (cut_BT < batch.loss_mask_BT).any(1)).any()  # parts of a row


def test_gmpo_is_the_gradient_of_the_papers_objective():
  # (prod over tokens of |min(r A, clip(r) A)|)^(1 / length) sgn(A), mean over rows.
  logp_BT, batch = making.mixed_tokens()
  low, high = np.exp([-0.4, 0.4])

  def paper(logp_BT):
    mask_BT, adv_BT = batch.loss_mask_BT, batch.adv_BT
    r_BT = jnp.exp(logp_BT - batch.behavior_logp_BT)
    least_BT = jnp.minimum(r_BT * adv_BT, jnp.clip(r_BT, low, high) * adv_BT)
    least_BT = jnp.where(mask_BT & (adv_BT != 0), jnp.abs(least_BT), 1)
    mean_B = jnp.prod(least_BT, 1) ** (1 / mask_BT.sum(1))
    return (jnp.sign(batch.adv_BT[:, 0]) * mean_B).mean()

  slope_BT = check_objective(loss.Gmpo(), logp_BT, batch, bounds(low, high), paper)
  teaches_BT = batch.loss_mask_BT & (batch.adv_BT != 0)
  assert 0.1 < (np.asarray(slope_BT)[teaches_BT] == 0).mean() < 0.9


def test_row_scale_golden(variant):
  # Rows of 2, 1 and 0 tokens (and five more of 0). Token: 1/3 for each token. Sequence:
  # two rows, 1/2 * 1/2 and 1/2. Constant, length 4: 1 / (2 * 4).
  loss_mask_BT = np.zeros((8, 3), bool)
  loss_mask_BT[0, :2] = loss_mask_BT[1, 0] = True
  for how, first, second in (
    ('token', 1 / 3, 1 / 3),
    ('sequence', 1 / 4, 1 / 2),
    ('constant', 1 / 8, 1 / 8),
  ):
    scale_B = variant(lambda m, how=how: loss.row_scale(m, how, 4), loss_mask_BT)
    np.testing.assert_allclose(
      scale_B[:2], [first, second], rtol=making.RTOL, err_msg=how
    )
    assert np.isfinite(loss.row_scale(np.zeros((2, 3), bool), how, 4)).all()
