"""The diagnosis of a minibatch: goldens, the loss's own gradient, the entropy rule."""

import math

import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.types import Bounds, TokenStats

LOSSES = loss.LossRule.rules.at_defaults()

BOUNDS = Bounds(
  *map(jnp.float32, (0.75, 1.5, 9, math.inf, 0.5, 1.25)),
  search_steps=jnp.int32(2),
  target_met=jnp.asarray(True),
  no_evidence=jnp.asarray(False),
  negatives_only=jnp.asarray(False),
)
COVARIANCE = 0.25  # of every token


def diagnose(
  logp_BT, entropy_BT, batch, bounds=BOUNDS, rule=loss.Clipped(), aggregate='token'
):
  logp_BT = jnp.asarray(logp_BT)
  stats = TokenStats(logp_BT, entropy_BT, jnp.full_like(logp_BT, COVARIANCE))
  scale_B = loss.row_scale(jnp.asarray(batch.loss_mask_BT), aggregate, 4)
  return diagnostics.diagnose(rule, stats, batch, bounds, scale_B)


def golden():
  # Row 0, A = +1, fresh: r = 2 (cut at 1.5), 1, and a token outside the mask.
  # Row 1, A = -1, reused: r = 1/2 (cut at 0.75), 1, 2.
  ratio_BT = np.asarray([[2, 1, 4], [0.5, 1, 2]], np.float32)
  batch = making.batch(
    [1, -1], [[1, 1, 0], [1, 1, 1]], logp_BT=np.full((2, 3), -3), source_B=[0, 2]
  )
  entropy_BT = np.asarray([[1, 2, 100], [3, 4, 5]], np.float32)
  return np.log(ratio_BT) - 3, entropy_BT, batch


def test_diagnose_golden():
  ln2, mu = np.log(2), np.exp(-3)
  expected = {
    'advantage/positive': 2 / 5,
    'clip/low': 0.75,
    'clip/high': 1.5,
    'clip/masked': 0.0,
    'clip/search_steps': 2,
    'clip/moved': 1,
    'clip/target_met': 1,
    'clip/no_evidence': 0,
    'clip/negatives_only': 0,
    # Between 0.75 and 1.5: P = 1, N = 1 + 2. At the start (0.5, 1.25) the same tokens
    # are cut, r = 1/2 being not above 1/2.
    'clip/share': 1 / 4,
    'clip/share_start': 1 / 4,
    'clip/fraction': 2 / 5,
    'clip/fraction_positive': 1 / 2,
    'clip/fraction_negative': 1 / 3,
    'clip/fraction_fresh': 1 / 2,
    'clip/fraction_reevaluated': np.nan,
    'clip/fraction_reused': 1 / 3,
    'clip/probability_positive': mu,
    'clip/probability_negative': mu,
    'loss/ratio_mean': 6.5 / 5,
    'loss/ratio_max': 2,
    'loss/ratio_mean_fresh': 3 / 2,
    'loss/tv_fresh': (1 + 0) / 2 / 2,
    'loss/ratio_mean_reused': 3.5 / 3,
    'loss/tv_reused': (0.5 + 0 + 1) / 3 / 2,
    'loss/ratio_mean_reevaluated': np.nan,
    'loss/tv_reevaluated': np.nan,
    # (2 + 1 + 1/2 + 1 + 2)^2 / (5 (4 + 1 + 1/4 + 1 + 4))
    'loss/ess': 6.5**2 / (5 * 10.25),
    'loss/entropy': 3,
    # -w (pi (log pi + H) - S): cut tokens give 0. Row 0, r = 1: (-3 + 2) mu 1. Row 1,
    # r = 1: (-3 + 4) mu (-1); r = 2: (ln 2 - 3 + 5) 2 mu (-2). Weights are 1 - 1 - 2.
    'loss/entropy_slope': -(-mu - mu - 4 * mu * (2 + ln2) + 2 * COVARIANCE) / 5,
    # k3 = r - 1 - ln r: 1 - ln 2 twice (r = 2), ln 2 - 1/2 (r = 1/2), 0 at r = 1.
    'loss/kl': (2 * (1 - ln2) + ln2 - 0.5) / 5,
  }
  metrics = diagnose(*golden())
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_bounds_of_their_own_for_some_rows():
  # Row 0 under (0.75, 1.5), row 1 under (0.25, 1.25): nothing of it is cut.
  column = [[0.75], [0.25]], [[1.5], [1.25]], [[9]] * 2, [[math.inf]] * 2
  start = [[0.5], [0.25]], [[1.25]] * 2
  bounds = Bounds(
    *map(jnp.float32, (*column, *start)),
    search_steps=jnp.int32([[2], [0]]),
    target_met=jnp.asarray([[True], [False]]),
    no_evidence=jnp.asarray([[False], [False]]),
    negatives_only=jnp.asarray([[False], [True]]),
  )
  metrics = diagnose(*golden(), bounds)
  for name in ('low', 'moved', 'target_met', 'negatives_only'):
    assert metrics[f'clip/{name}'] == 0.5, name
  assert metrics['clip/fraction_negative'] == 0
  # P = 1, N = 1/2 + 1 + 2
  np.testing.assert_allclose(metrics['clip/share'], 1 / 4.5, rtol=making.RTOL)


@pytest.mark.parametrize('rule', LOSSES)
def test_cut_is_where_the_gradient_is_zero(rule):
  logp_BT, batch = making.mixed_tokens(seed=1)
  narrow = BOUNDS._replace(low=jnp.float32(0.95), high=jnp.float32(1.05))
  metrics = diagnose(logp_BT, 0 * logp_BT, batch, narrow, LOSSES[rule])
  weight_BT = loss.weights(LOSSES[rule], jnp.asarray(logp_BT), batch, narrow)
  weight_BT = np.asarray(weight_BT)
  teaches_BT = batch.loss_mask_BT & (batch.adv_BT != 0)
  cut = (teaches_BT & (weight_BT == 0)).sum() / batch.loss_mask_BT.sum()
  np.testing.assert_allclose(metrics['clip/fraction'], cut, rtol=making.RTOL)
  assert (cut == 0) == (rule in ('cispo', 'tis', 'reinforce', 'sapo', 'vespo'))


@pytest.mark.parametrize('rule', LOSSES)
def test_shares_of_a_minibatch_without_an_advantage_are_nan(rule):
  # 0 would be a share: that of a minibatch whose tokens are all pushed down.
  logp_BT, batch = making.mixed_tokens()
  for adv, expected in ((0.0, np.nan), (-1.0, 0.0)):
    flat = batch._replace(adv_BT=np.full_like(batch.adv_BT, adv))
    metrics = diagnose(logp_BT, -logp_BT, flat, rule=LOSSES[rule])
    for name in ('advantage/positive', 'clip/share', 'clip/share_start'):
      np.testing.assert_equal(float(metrics[name]), expected, err_msg=name)


def test_ratios_that_overflow_or_are_no_number():
  # r = e^60 squared is beyond float32; one token of 5 then carries everything.
  logp_BT, entropy_BT, batch = golden()
  logp_BT[1, 2] = 57
  ess = diagnose(logp_BT, entropy_BT, batch)['loss/ess']
  np.testing.assert_allclose(ess, 1 / 5, rtol=1e-5)
  logp_BT[0, 1] = np.nan  # is shown
  metrics = diagnose(logp_BT, entropy_BT, batch)
  names = ('loss/ratio_mean', 'loss/ratio_max', 'loss/kl')
  assert all(np.isnan(metrics[name]) for name in names)


# ------------------------------------------------------- the Entropy-Clip Rule (Eq. 7)


def entropy(pi_V):
  return -(pi_V * np.log(pi_V)).sum()


def true_slope(pi_V, adv_V, eta=1e-4):
  """Change of entropy per unit of step: an exact policy-gradient step, measured.

  The objective is sum over words of pi A, in logits; its gradient is written as the
  Jacobian of the softmax times A, and H is evaluated on both sides.
  """
  z_V, step_V = np.log(pi_V), (np.diag(pi_V) - np.outer(pi_V, pi_V)) @ adv_V
  ends = []
  for sign in (1, -1):
    p_V = np.exp(z_V + sign * eta * step_V)
    ends.append(entropy(p_V / p_V.sum()))
  return (ends[0] - ends[1]) / (2 * eta)


def predicted(pi_V, adv_V):
  """The metric on one state, all words tokens of weight pi A."""
  shape = 1, len(pi_V)
  covariance = (pi_V**2 * (np.log(pi_V) + entropy(pi_V))).sum()
  values = np.log(pi_V), entropy(pi_V), covariance
  stats = TokenStats(*(np.float32(np.broadcast_to(x, shape)) for x in values))
  batch = making.batch([1], np.ones(shape))
  weight_1V = np.float32(pi_V * adv_V)[None]
  return float(diagnostics.entropy_slope(stats, weight_1V, batch))


@pytest.mark.parametrize('mean', [0, 1, -1])
def test_the_entropy_rule_agrees_with_an_exact_step(mean):
  # Of 300 states; advantages of one sign are where centring decides the sign.
  slopes, true = [], []
  for seed in range(300):
    rng = np.random.default_rng(seed)
    z_V = rng.normal(0, rng.uniform(0.3, 2), (3, 12, 39)[seed % 3])
    pi_V = np.exp(z_V) / np.exp(z_V).sum()
    # Some are cut, where advantages have both signs.
    uncut_V = rng.random(len(z_V)) < 0.6 if mean == 0 and seed % 2 else 1
    adv_V = rng.normal(mean, 0.3, len(z_V)) * uncut_V
    true.append(true_slope(pi_V, adv_V))
    slopes.append(predicted(pi_V, adv_V))
  agree = (np.sign(slopes) == np.sign(true)).mean()
  slope = np.dot(slopes, true) / np.dot(slopes, slopes)
  assert agree >= 0.95
  assert slope == pytest.approx(1, abs=1e-3) and np.std(true) > 0.001
  assert np.corrcoef(slopes, true)[0, 1] > 0.9999


@pytest.mark.parametrize('aggregate', ['token', 'sequence', 'constant'])
def test_the_slope_counts_tokens_as_the_gradient_does(aggregate):
  # Rows of 2 and 3 tokens, two of them cut; a token weighs w times its row's scale.
  logp_BT, entropy_BT, batch = golden()
  found = diagnose(logp_BT, entropy_BT, batch, aggregate=aggregate)
  scale_B = {
    'token': [1 / 5, 1 / 5],
    'sequence': [1 / 4, 1 / 6],
    'constant': [1 / 8] * 2,
  }
  mu, ln2 = np.exp(-3), np.log(2)
  rows_B = [mu + COVARIANCE, mu + 4 * mu * (2 + ln2) - 3 * COVARIANCE]
  expected = np.dot(rows_B, scale_B[aggregate])
  np.testing.assert_allclose(found['loss/entropy_slope'], expected, rtol=1e-5)
