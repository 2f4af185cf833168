"""Log-ratios from -200 to 200: every loss rule against its formula in float64.

float32 overflows at e^88.7. A token whose gain and weight are numbers of float32 gets
both, whatever overflows in a branch that the token does not take.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.algorithms import clip, loss, masks
from tests import making

LOSSES = loss.LossRule.rules.at_defaults()
MASKS = masks.MaskRule.rules.at_defaults()

# Multiples of 1/8, so that log-ratios are exact differences in float32.
LOG_R = np.asarray(
  [-200, -100, -88.875, -88, -50, -20.5, -1, -0.25, 0]
  + [0.125, 1, 19, 21, 50, 87, 88.875, 100, 200]
)
LARGEST = 1e38  # of float32, with a margin
B, T = 600, 4


@functools.cache
def made():
  """Returns (logp_BT, batch): rows of every advantage with random log-ratios.

  Half of the rows have one log-ratio, so that ratios of responses are extreme too.
  """
  rng = np.random.default_rng(0)
  log_r_BT, stale_BT = rng.choice(LOG_R, (2, B, T))
  log_r_BT[::2] = log_r_BT[::2, :1]
  above_BT = np.maximum(np.maximum(log_r_BT, stale_BT), 0)
  mu_BT = -0.125 - above_BT - rng.choice([0, 2, 30], (B, T))
  adv_B = rng.choice([-1, 0, 1], B)
  batch = making.batch(adv_B, np.ones((B, T)), mu_BT, mu_BT + stale_BT)
  return jnp.asarray(mu_BT + log_r_BT, jnp.float32), batch


class Tokens:
  """The tokens in float64, where nothing overflows, and bounds (low, high, dual)."""

  def __init__(self, bounds):
    logp_BT, batch = made()
    self.logp, self.low, self.high, self.dual = np.float64(logp_BT), *bounds
    self.log_r = self.logp - np.float64(batch.behavior_logp_BT)
    self.stale = np.float64(batch.prox_BT) - np.float64(batch.behavior_logp_BT)
    self.adv = np.float64(batch.adv_BT)

  def surrogate(self, log_r):
    """Returns (gain, weight) of PPO's clipped surrogate."""
    r, A = np.exp(log_r), self.adv
    floor = np.where(r >= self.dual, self.dual, self.low)
    edge = np.where(A > 0, self.high, floor)
    cut = np.where(A > 0, r >= self.high, (A < 0) & (r <= self.low) | (r >= self.dual))
    cut &= A != 0
    return np.where(cut, edge, r) * np.where(A == 0, 0, A), np.where(cut, 0, r * A)


# Each returns gain, weight, and factors that float32 must represent to get them.


def clipped(t, limit=math.inf):
  gain, weight = t.surrogate(np.clip(t.log_r, -limit, limit))
  return gain, np.where(np.abs(t.log_r) < limit, weight, 0)


def decoupled(t, cap=2.0, beyond_cap='truncate'):
  factor = np.exp(t.stale)
  factor = np.where(factor > cap, cap if beyond_cap == 'truncate' else 0, factor)
  gain, weight = t.surrogate(t.log_r - t.stale)
  # Neither factor overflows, and none underflows beside a large one.
  sizes = np.stack([factor, np.abs(gain)])
  lost = (sizes.min(0) > 0) & ((sizes > LARGEST) | (sizes < 1 / LARGEST)).any(0)
  return factor * gain, factor * weight, np.where(lost, np.inf, 0)


def sequence(t):
  return t.surrogate(np.repeat(t.log_r.mean(1, keepdims=True), T, 1))


def gmpo(t):
  with np.errstate(divide='ignore'):
    low, high = np.log([t.low, t.high])
  up = t.adv > 0
  clipped = np.where(up, np.minimum(t.log_r, high), np.maximum(t.log_r, low))
  gain = np.exp(clipped.mean(1, keepdims=True)) * t.adv
  return gain, np.where(clipped == t.log_r, gain, 0)


def weighted(t, weight):
  return weight * t.adv * t.logp, weight * t.adv


def cispo(t):
  return weighted(t, np.clip(np.exp(t.log_r), t.low, t.high))


def tis(t, cap=2.0):
  return weighted(t, np.minimum(np.exp(t.log_r), cap))


def reinforce(t):
  return weighted(t, 1.0)


def sapo(t):
  tau = np.where(t.adv > 0, 1.0, 1.05)
  decay = np.exp(-tau * np.expm1(np.minimum(t.log_r, 6)))
  gate = 1 / (1 + decay)
  weight = 4 * gate * gate * decay * np.exp(np.minimum(t.log_r, 6)) * t.adv
  return 4 / tau * gate * t.adv, np.where(t.log_r > 6, 0, weight)


def vespo(t):
  log_w = np.clip(t.log_r, -20, 20).sum(1, keepdims=True)
  log_w = np.clip(log_w, math.log(1e-8), 20)
  a, b = np.where(t.adv >= 0, 2, 3), np.where(t.adv >= 0, 3, 2)
  return weighted(t, np.exp(a * log_w + b * (1 - np.exp(log_w))))


def aspo(t, cap=3.0):
  inverse, (gain, weight) = t.adv > 0, t.surrogate(t.log_r)
  r = np.exp(np.where(inverse, -t.log_r, t.log_r))
  cut = (weight == 0) & (t.adv != 0)
  edge = np.where(inverse, 1 / np.abs(gain), np.abs(gain))
  value = np.where(cut, edge, np.where(r > cap, cap * t.logp, r))
  return value * t.adv, np.where(cut, 0, np.minimum(r, cap)) * t.adv


def fipo(t):
  gain, weight = t.surrogate(t.log_r)
  future = np.zeros_like(t.log_r)
  for s in range(T):
    for later in range(s, T):
      future[:, s] += t.log_r[:, later] * 2 ** (-(later - s) / 32)
  influence = np.clip(np.exp(future), 0.8, 1.2)
  risky = (t.adv < 0) & (np.exp(t.log_r) > 4)
  influence = np.where(risky, np.minimum(influence, 1), influence)
  return influence * gain, influence * weight


KNOBS = [
  (clipped, {}),
  (clipped, {'limit': 20.0}),
  (decoupled, {}),
  (decoupled, {'beyond_cap': 'mask'}),
  (decoupled, {'cap': math.inf}),
  (sequence, {}),
  (gmpo, {}),
  (cispo, {}),
  (tis, {}),
  (tis, {'cap': math.inf}),
  (reinforce, {}),
  (sapo, {}),
  (vespo, {}),
  (aspo, {}),
  (aspo, {'cap': math.inf}),
  (fipo, {}),
]
BOUNDS = [(0.8, 1.2, math.inf), (0.8, 1.2, 3.0), (0.0, math.inf, math.inf)]


def test_every_rule_is_here():
  assert {oracle.__name__ for oracle, _ in KNOBS} == set(LOSSES)


@pytest.mark.parametrize('bounds', BOUNDS, ids=str)
@pytest.mark.parametrize(
  ('oracle', 'knobs'), KNOBS, ids=lambda x: getattr(x, '__name__', str(x))
)
def test_what_float32_can_represent_is_right(oracle, knobs, bounds):
  logp_BT, batch = made()
  rule = loss.LossRule.rules.names[oracle.__name__](**knobs)
  low, high, dual = bounds
  limits = clip.constant(low, high, dual)
  gain_BT, _ = loss.gain(rule, logp_BT, batch, lambda _: limits)
  weight_BT = loss.weights(rule, logp_BT, batch, limits)

  with np.errstate(all='ignore'):
    gain, weight, *factors = oracle(Tokens(bounds), **knobs)
  sizes = np.abs([gain, weight, *factors])
  fits_BT = (np.nan_to_num(sizes, nan=np.inf) < LARGEST).all(0)
  assert fits_BT[np.asarray(batch.adv_BT) == 0].all() and fits_BT.mean() > 0.5
  for found_BT, wanted_BT in ((gain_BT, gain), (weight_BT, weight)):
    close(found_BT, wanted_BT, fits_BT)


def close(found_BT, wanted_BT, fits_BT, rounding=1e-35):
  """Asserts that tokens agree; a gain of e^-88 times log pi may be 0 in float32."""
  found, wanted = np.asarray(found_BT)[fits_BT], wanted_BT[fits_BT]
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize('direction', ['behavior_policy', 'policy_behavior', 'squared'])
def test_a_penalty_that_float32_can_represent_is_right(direction):
  logp_BT, batch = made()
  x = Tokens((0.0, math.inf, math.inf)).log_r
  value, slope = {
    'behavior_policy': (np.expm1(x) - x, np.expm1(x)),
    'policy_behavior': (x * np.exp(x) - np.expm1(x), x * np.exp(x)),
    'squared': (x**2 / 2, x),
  }[direction]

  def total(logp_BT):
    found_BT = loss.divergence(logp_BT, batch, direction)
    return found_BT.sum(), found_BT

  slope_BT, value_BT = jax.grad(total, has_aux=True)(logp_BT)
  fits_BT = np.maximum(np.abs(value), np.abs(slope)) < LARGEST
  close(value_BT, value, fits_BT)
  close(slope_BT, slope, fits_BT, rounding=1e-7)  # a difference of numbers near 1


SEARCHED = clip.Balanced(), clip.Recipe(), clip.Dcpo()
CASES = [(name, clip.Unclipped(), 'none') for name in LOSSES]
CASES += [('clipped', rule, 'none') for rule in SEARCHED]
CASES += [('clipped', clip.Fixed(), name) for name in MASKS]


@pytest.mark.parametrize(
  ('loss_rule', 'clip_rule', 'mask_rule'),
  CASES,
  ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_rows_without_an_advantage_move_no_other_row(loss_rule, clip_rule, mask_rule):
  rules = LOSSES[loss_rule], clip_rule, MASKS[mask_rule]
  logp_BT, batch = making.mixed_tokens()
  batch = batch._replace(adv_BT=np.where(np.arange(8)[:, None] < 2, 0, batch.adv_BT))
  far_BT = np.where(batch.adv_BT == 0, logp_BT - 200, batch.behavior_logp_BT)

  near = making.applied(rules, logp_BT, batch)
  far = making.applied(rules, logp_BT, batch._replace(behavior_logp_BT=far_BT))
  assert np.isfinite(near[0]) and np.abs(near[1]).max() > 0
  jax.tree.map(np.testing.assert_array_equal, far, near)
