"""The surrogate and its diagnosis: goldens by hand, gradients token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax import loss
from bapo_jax.types import Batch, Bounds

BOUNDS = Bounds(jnp.float32(0.75), jnp.float32(1.5), jnp.int32(2), jnp.asarray(True))
START = Bounds(jnp.float32(0.5), jnp.float32(1.25), jnp.int32(0), jnp.asarray(False))


def example(B=8, T=5, seed=0):
  """(logp_BT, batch): every combination of sign, side and mask is likely in it."""
  rng = np.random.default_rng(seed)
  logp_BT, old_BT = (-rng.random((B, T)).astype(np.float32) * 2 for _ in range(2))
  return logp_BT, Batch(
    tokens_BT=np.zeros((B, T), np.int32),
    mask_BT=rng.random((B, T)) < 0.8,
    logp_BT=old_BT,
    adv_B=np.asarray([1, -1, 2, -2, 0, 0.5, -0.5, 1], np.float32)[:B],
  )


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
  ],
)
def test_surrogate_golden(ratio, adv, gain, slope):
  def gain_of(ratio):
    ratio_BT, adv_BT = jnp.full((1, 1), ratio), jnp.full((1, 1), adv)
    return -loss.surrogate(ratio_BT, adv_BT, jnp.ones((1, 1), bool), BOUNDS)

  assert gain_of(jnp.float32(ratio)) == gain
  assert jax.grad(gain_of)(jnp.float32(ratio)) == slope


def test_surrogate_is_a_sum_over_the_mask(variant):
  logp_BT, batch = example()
  ratio_BT = np.exp(logp_BT - batch.logp_BT)
  adv_BT = np.broadcast_to(batch.adv_B[:, None], ratio_BT.shape)
  total = 0.0
  for r, a, counts in zip(ratio_BT.flat, adv_BT.flat, batch.mask_BT.flat, strict=True):
    if counts:
      total -= min(r * a, min(max(r, 0.75), 1.5) * a)
  found = variant(
    lambda *xs: loss.surrogate(*xs, BOUNDS), ratio_BT, adv_BT, batch.mask_BT
  )
  np.testing.assert_allclose(found, total, rtol=1e-5)


@pytest.mark.parametrize('seed', range(5))
def test_gradient_is_zero_exactly_where_diagnose_counts_a_cut(seed):
  logp_BT, batch = example(seed=seed)
  adv_BT = np.broadcast_to(batch.adv_B[:, None], logp_BT.shape)

  def objective(logp_BT):
    return loss.surrogate(loss.ratio(logp_BT, batch), adv_BT, batch.mask_BT, BOUNDS)

  teaches_BT = batch.mask_BT & (adv_BT != 0)
  still_BT = teaches_BT & (np.asarray(jax.grad(objective)(jnp.asarray(logp_BT))) == 0)
  told = loss.diagnose(logp_BT, np.zeros_like(logp_BT), batch, START, BOUNDS)
  assert 0 < still_BT.sum() < teaches_BT.sum()
  for name, mask_BT in (
    ('clip/fraction', batch.mask_BT),
    ('clip/fraction_positive', batch.mask_BT & (adv_BT > 0)),
    ('clip/fraction_negative', batch.mask_BT & (adv_BT < 0)),
  ):
    expected = (still_BT & mask_BT).sum() / mask_BT.sum()
    np.testing.assert_allclose(told[name], expected, rtol=1e-6, err_msg=name)
  # And a token that is not cut moves by r A (Eq. 5).
  gradient_BT = jax.grad(objective)(jnp.asarray(logp_BT))
  expected_BT = -np.exp(logp_BT - batch.logp_BT) * adv_BT * (teaches_BT & ~still_BT)
  np.testing.assert_allclose(gradient_BT, expected_BT, rtol=1e-5)


@pytest.mark.parametrize('junk', [-np.inf, np.inf, np.nan])
def test_ratio_is_one_outside_the_mask_whatever_is_there(junk, variant):
  logp_BT, batch = example()
  logp_BT = np.where(batch.mask_BT, logp_BT, np.float32(junk))

  def ratio(logp_BT, mask_BT, old_BT, adv_B):
    return loss.ratio(logp_BT, Batch(None, mask_BT, old_BT, adv_B))

  arrays = logp_BT, batch.mask_BT, batch.logp_BT, batch.adv_B
  ratio_BT = variant(ratio, *arrays)
  np.testing.assert_array_equal(np.asarray(ratio_BT)[~batch.mask_BT], 1)
  gradient_BT = jax.grad(lambda x: ratio(x, *arrays[1:]).sum())(jnp.asarray(logp_BT))
  assert np.isfinite(gradient_BT).all()
  np.testing.assert_array_equal(np.asarray(gradient_BT)[~batch.mask_BT], 0)


def test_diagnose_golden():
  # Row 0, A = +1: r = 2 (cut at 1.5), 1, and a token outside the mask.
  # Row 1, A = -1: r = 1/2 (cut at 0.75), 1, 2.
  ratio_BT = np.asarray([[2, 1, 4], [0.5, 1, 2]], np.float32)
  batch = Batch(
    tokens_BT=np.zeros((2, 3), np.int32),
    mask_BT=np.asarray([[1, 1, 0], [1, 1, 1]], bool),
    logp_BT=np.full((2, 3), -3, np.float32),
    adv_B=np.asarray([1, -1], np.float32),
  )
  entropy_BT = np.asarray([[1, 2, 100], [3, 4, 5]], np.float32)
  told = loss.diagnose(np.log(ratio_BT) - 3, entropy_BT, batch, START, BOUNDS)
  ln2 = np.log(2)
  expected = {
    'advantage/positive': 2 / 5,
    'clip/low': 0.75,
    'clip/high': 1.5,
    'clip/moves': 2,
    'clip/moved': True,
    'clip/met': True,
    # Between 0.75 and 1.5: P = 1, N = 1 + 2. At the start (0.5, 1.25) the same tokens
    # are cut, r = 1/2 being not above 1/2.
    'clip/share': 1 / 4,
    'clip/share_start': 1 / 4,
    # Clamped instead of cut: P = 1.5 + 1, N = 0.75 + 1 + 2.
    'clip/surrogate_share': 2.5 / 6.25,
    'clip/fraction': 2 / 5,
    'clip/fraction_positive': 1 / 2,
    'clip/fraction_negative': 1 / 3,
    'loss/ratio_mean': 6.5 / 5,
    'loss/ratio_max': 2,
    'loss/entropy': 3,
    # k3 = r - 1 - ln r: 1 - ln 2 twice (r = 2), ln 2 - 1/2 (r = 1/2), 0 at r = 1.
    'loss/kl': (2 * (1 - ln2) + ln2 - 0.5) / 5,
  }
  assert told.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(told[name], value, rtol=1e-5, err_msg=name)


def test_diagnose_of_nothing_is_finite():
  logp_BT, batch = example()
  nothing = batch._replace(mask_BT=np.zeros_like(batch.mask_BT))
  told = loss.diagnose(logp_BT, -logp_BT, nothing, START, BOUNDS)
  assert all(np.isfinite(value) for value in told.values())
