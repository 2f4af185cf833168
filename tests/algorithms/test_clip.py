"""Clip rules: Algorithm 1 as printed, the public recipe, and edges."""

import functools

import jax
import making
import numpy as np
import oracles
import pytest

from bapo_jax.algorithms import clip

PAPER = dict(target=0.4, low=(0.6, 0.9), high=(1.2, 3.0), low_step=0.02, high_step=0.05)
MINIBATCHES = 150  # of each search


def bound(rule):
  """(ratio_BT, batch) -> Bounds, for the clipped loss."""
  return lambda ratio_BT, batch: rule(ratio_BT, batch, making.weigh(ratio_BT, batch))


@functools.cache
def compiled(**changed):
  return jax.jit(bound(clip.Balanced(**PAPER | changed)))


def outcome(bounds):
  return (
    np.float32(bounds.low),
    np.float32(bounds.high),
    int(bounds.search_steps),
    bool(bounds.target_met),
  )


def balanced(data, **changed):
  """(low, high, steps, met) under the paper's knobs, some of them changed."""
  return outcome(compiled(**changed)(*data))


def pair(positive, negative, **fields):
  """One token with A = 1 and one with A = -1, of these ratios."""
  ratio_BT = np.asarray([[positive], [negative]], np.float32)
  return ratio_BT, making.batch([1, -1], np.ones((2, 1)), **fields)


def random_knobs(rng, exact: bool):
  """Ranges and a target; `exact`: of sixteenths, so that clipped sums are exact too."""
  steps = [1 / 32, 1 / 16] if exact else [0.01, 0.02, 0.05]
  low_step, high_step = float(rng.choice(steps)), float(rng.choice(steps))
  low = float(rng.choice([0.25, 0.375, 0.5] if exact else [0.3, 0.4, 0.5]))
  high = float(rng.choice([1.0, 1.25, 1.5] if exact else [1.0, 1.2, 1.5]))
  return dict(
    target=float(rng.choice([0.3, 0.4, 0.45, 0.5, 0.6])),
    low=(low, low + int(rng.integers(1, 9)) * low_step),
    high=(high, high + int(rng.integers(1, 30)) * high_step),
    low_step=low_step,
    high_step=high_step,
  )


def jitted(function, *arrays):
  return jax.jit(function)(*arrays)


def searched(variant, rule, data):
  """[(low, high, steps, met)] of the rule for each minibatch."""
  stacked = jax.tree.map(lambda *xs: np.stack(xs, 1), *data)
  found = variant(jax.vmap(bound(rule), in_axes=1), *stacked)
  assert rule.rule == 'balanced' or (found.dual == 3).all()
  fields = (found.low, found.high, found.search_steps, found.target_met)
  return list(zip(*map(np.asarray, fields), strict=True))


@pytest.mark.parametrize('order', ['upper', 'lower'])
@pytest.mark.parametrize(('contribution', 'weight'), making.KINDS)
def test_balanced_is_algorithm_1_to_the_last_bit(contribution, weight, order):
  rng, seen = np.random.default_rng(0), set()
  for _ in range(2):
    knobs = random_knobs(rng, exact=contribution == 'surrogate')
    knobs |= dict(contribution=contribution, weight=weight, order=order)
    data = [
      making.exact_tokens(i, negative=rng.uniform(0.4, 0.7)) for i in range(MINIBATCHES)
    ]
    loop = [oracles.algorithm_1(*minibatch, **knobs) for minibatch in data]
    assert searched(jitted, clip.Balanced(**knobs), data) == loop
    seen |= {(steps > 0, met) for _, _, steps, met in loop}
  # The minibatches cover every outcome: idle, moved and met, exhausted.
  assert seen == {(False, True), (True, True), (True, False)}


def test_recipe_is_the_public_loop(variant):
  knobs = dict(low=(0.8, 0.95), high=(1.2, 2.0), low_step=0.04, high_step=0.15)
  for t in (0.5, 0.8, 1.0):
    data = [making.exact_tokens(seed, negative=0.4 + seed / 500) for seed in range(150)]
    data = [(r, b) for r, b in data if (b.adv_BT != 0).any()]
    loop = [oracles.public_recipe(*minibatch, t=t, **knobs) for minibatch in data]
    settings = clip.PublicCode(positive_to_negative=t, **knobs)
    rule = type('Recipe', (clip.Recipe,), {'settings': settings})()
    found = searched(variant, rule, data)
    assert found == loop and len({steps for _, _, steps, _ in loop}) > 3


def test_balanced_moves_the_upper_bound_first_and_only_as_far_as_needed():
  # At the start the positive token (r = 1.32) is cut: share 0. Steps to 1.25, 1.3, 1.35
  # bring it back: 1.32 / (1.32 + 1) > 0.4 with the lower bound untouched.
  low, high, steps, met = balanced(pair(1.32, 1.0))
  assert (low, high, steps, met) == (np.float32(0.6), np.float32(1.35), 3, True)
  # A share of .99 needs the negative token cut: 36 steps up do nothing, 2 below do.
  low, high, steps, met = balanced(pair(1.0, 0.63), target=0.99)
  assert (low, high, steps, met) == (np.float32(0.64), np.float32(3.0), 38, True)
  # The other way round the lower bound alone does it.
  found = balanced(pair(1.0, 0.63), target=0.99, order='lower')
  assert found == (np.float32(0.64), np.float32(1.2), 2, True)


@pytest.mark.parametrize('seed', [0, 13, 26, 39])
def test_continuous_is_the_crossing_found_by_sorting(seed, variant):
  rng = np.random.default_rng(seed)
  ratio_BT = np.exp(rng.normal(0, 0.6, (16, 8))).astype(np.float32)
  ratio_BT[::2] *= 1.2
  batch = making.batch(rng.normal(-0.2, 1, 16), rng.random((16, 8)) < 0.9)
  knobs = dict(target=0.42 + 0.004 * seed, low=(0.5, 0.95), high=(1.1, 3.0))
  low, high = oracles.crossing(ratio_BT, batch, **knobs)
  rule = bound(clip.Balanced(resolution='continuous', **knobs))
  found = variant(rule, ratio_BT, batch)
  assert bool(found.target_met) == (low is not None)
  expected = (low, high) if found.target_met else (0.95, 3.0)
  np.testing.assert_allclose((found.low, found.high), expected, atol=1e-4)


def test_the_search_may_leave_reused_rows_out():
  # With the reused row (A = -1) the share is 1/2; without it there is nothing negative.
  data = pair(1.0, 1.0, source_B=[0, 2])
  assert balanced(data, target=0.6)[2:] == (51, False)
  some = dict(sources=('fresh', 'reevaluated'), reused_high=1.1)
  bounds = compiled(target=0.6, **some)(*data)
  assert outcome(bounds)[2:] == (0, True)
  assert bounds.cap == np.float32(1.1) and bounds.high == np.float32(1.2)
  assert compiled(sources=('reevaluated',))(*data).no_evidence


@pytest.mark.parametrize('contribution', ['gradient', 'surrogate'])
@pytest.mark.parametrize('resolution', ['step', 'continuous'])
@pytest.mark.parametrize('adv', [(1, 1), (-1, -1), (0, 0)])
@pytest.mark.parametrize('counted', [True, False])
def test_one_sided_and_empty_minibatches_have_bounds(
  adv, counted, contribution, resolution
):
  ratio_BT, batch = pair(1.0, 0.95)
  batch = batch._replace(
    adv_BT=np.float32(adv)[:, None], loss_mask_BT=batch.loss_mask_BT & counted
  )
  search = compiled(contribution=contribution, resolution=resolution)
  bounds = search(ratio_BT, batch)
  low, high, steps, met = outcome(bounds)
  known = counted and adv != (0, 0)
  assert bounds.no_evidence == (not known)
  assert bounds.negatives_only == (known and adv == (-1, -1))
  # Positive tokens alone meet any target; negative ones alone none. Without either
  # nothing is known, and nothing moves.
  if adv == (0, 0) or not counted or adv == (1, 1):
    assert (low, high, steps) == (np.float32(0.6), np.float32(1.2), 0)
    assert met == (counted and adv == (1, 1))
  else:
    assert (low, high, met) == (np.float32(0.9), np.float32(3.0), False)


@pytest.mark.parametrize('weight', ['one', 'behaviour'])
@pytest.mark.parametrize('contribution', ['gradient', 'surrogate'])
@pytest.mark.parametrize('odd', [np.nan, np.inf, 0.0])
@pytest.mark.parametrize('where', [0, 1])
def test_odd_ratios_leave_bounds_that_are_numbers(odd, where, contribution, weight):
  ratio_BT = np.ones((4, 2), np.float32)
  ratio_BT[where, 0] = odd
  logp_BT = np.full((4, 2), -2.0)
  logp_BT[where, 0] = -np.inf  # mu = 0: with r = inf a product that is not a number
  batch = making.batch([1, -1, 1, -1], np.ones((4, 2)), logp_BT=logp_BT)
  for resolution in ('step', 'continuous'):
    knobs = dict(contribution=contribution, weight=weight, resolution=resolution)
    low, high, _, _ = balanced((ratio_BT, batch), **knobs)
    assert 0.6 <= low <= 0.9001 and 1.1999 <= high <= 3
    # A ratio that is no number counts for nothing, nor does a weight of 0: as if the
    # token were masked.
    if np.isnan(odd) or weight == 'behaviour':
      masked = batch._replace(loss_mask_BT=batch.loss_mask_BT & (logp_BT > -np.inf))
      assert balanced((ratio_BT, batch), **knobs) == balanced(
        (ratio_BT, masked), **knobs
      )
