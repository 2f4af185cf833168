"""Clip rules: the share, its premise, and the search against Algorithm 1 as printed."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bapo_jax import clip

PAPER = dict(target=0.4, low=(0.6, 0.9), high=(1.2, 3.0), low_step=0.02, high_step=0.05)


def tokens(seed, B=8, T=6, negative=0.5):
  """Random (ratio, adv, mask) on a grid so coarse that every float32 sum is exact."""
  rng = np.random.default_rng(seed)
  ratio_BT = np.round(64 * np.exp(rng.normal(0, 0.5, (B, T)))).astype(np.float32) / 64
  sign_BT = np.where(rng.random((B, T)) < negative, -1, 1)
  adv_BT = (sign_BT * rng.integers(0, 9, (B, T)) / 4).astype(np.float32)
  return ratio_BT, adv_BT, rng.random((B, T)) < 0.9


@functools.cache
def compiled(**changed):
  return jax.jit(functools.partial(clip.balanced, **PAPER | changed))


def balanced(data, **changed):
  """(low, high, moves, met) under the paper's knobs, some of them changed."""
  low, high, moves, met = compiled(**changed)(*data)
  return np.float32(low), np.float32(high), int(moves), bool(met)


def pair(positive, negative):
  """One token with A = 1 and one with A = -1, of these ratios."""
  ratio_BT = np.asarray([[positive, negative]], np.float32)
  return ratio_BT, np.asarray([[1, -1]], np.float32), np.ones((1, 2), bool)


def test_share_golden(variant):
  # A = +2: ratios 0.5, 1.0, 1.5 (cut: not below 1.25)      P = 2 * (0.5 + 1.0) = 3
  # A = -1: ratios 0.75 (cut: not above 0.75), 1.0, 2.0     N = 1.0 + 2.0 = 3
  # A =  0 and a masked token count for nothing             3 / (3 + 3) = 1/2
  ratio_BT = np.asarray([[0.5, 1.0, 1.5, 9.0], [0.75, 1.0, 2.0, 9.0]], np.float32)
  adv_BT = np.asarray([[2, 2, 2, 0], [-1, -1, -1, -1]], np.float32)
  mask_BT = np.asarray([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
  pad = [np.pad(x, ((0, 6), (0, 0))) for x in (ratio_BT, adv_BT, mask_BT)]
  assert variant(lambda *xs: clip.share(*xs, 0.75, 1.25), *pad) == 0.5
  # Cutting nothing: 6 / (6 + 3.75); cutting every positive token: 0.
  assert variant(lambda *xs: clip.share(*xs, 0.5, 2.0), *pad) == np.float32(6 / 9.75)
  assert variant(lambda *xs: clip.share(*xs, 0.75, 0.5), *pad) == 0


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 10**6),
  lows=st.tuples(st.floats(0.3, 1), st.floats(0.3, 1)).map(sorted),
  highs=st.tuples(st.floats(1, 4), st.floats(1, 4)).map(sorted),
)
def test_share_grows_with_both_bounds(seed, lows, highs):
  # Without this, bisection means nothing.
  data = tokens(seed)
  share = jax.jit(clip.share)
  least = share(*data, lows[0], highs[0])
  assert 0 <= least <= share(*data, lows[0], highs[1]) <= 1
  assert least <= share(*data, lows[1], highs[0]) <= share(*data, lows[1], highs[1])


@pytest.mark.parametrize('knobs', range(6))
def test_balanced_is_algorithm_1_to_the_last_bit(variant, knobs):
  rng = np.random.default_rng(knobs)
  low_step, high_step = (float(rng.choice([0.01, 0.02, 0.05])) for _ in range(2))
  low, high = float(rng.choice([0.3, 0.4, 0.5])), float(rng.choice([1.0, 1.2, 1.5]))
  knobs = PAPER | dict(
    target=float(rng.choice([0.3, 0.4, 0.45, 0.6])),
    low=(low, low + int(rng.integers(1, 11)) * low_step),
    high=(high, high + int(rng.integers(0, 30)) * high_step),
    low_step=low_step,
    high_step=high_step,
  )
  minibatches = [tokens(s, negative=rng.uniform(0.4, 0.7)) for s in range(50)]
  rule = jax.vmap(functools.partial(clip.balanced, **knobs), in_axes=1)
  found = variant(rule, *(np.stack(xs, 1) for xs in zip(*minibatches, strict=True)))
  expected = [oracles.algorithm_1(*data, **knobs) for data in minibatches]
  assert list(zip(*map(np.asarray, found), strict=True)) == expected


def test_balanced_moves_the_upper_bound_first_and_only_as_far_as_needed():
  # At the start the positive token (r = 1.32) is cut: share 0. Moves to 1.25, 1.3, 1.35
  # bring it back: 1.32 / (1.32 + 1) > 0.4 with the lower bound untouched.
  low, high, moves, met = balanced(pair(1.32, 1.0))
  assert (low, high, moves, met) == (np.float32(0.6), np.float32(1.35), 3, True)
  # A share of 1 needs the negative token cut: 36 moves up do nothing, 2 below reach it.
  low, high, moves, met = balanced(pair(1.0, 0.63), target=1.0)
  assert (low, high, moves, met) == (np.float32(0.64), np.float32(3.0), 38, True)


def test_target_already_met_moves_nothing():
  low, high, moves, met = balanced(pair(1.0, 1.0))
  assert (low, high, moves, met) == (np.float32(0.6), np.float32(1.2), 0, True)


def test_unreachable_target_ends_at_the_caps_and_says_so():
  # 16 floating-point additions of 0.02 would have stopped at 0.88.
  low, high, moves, met = balanced(pair(4.0, 2.0))
  assert (low, high, moves, met) == (np.float32(0.9), np.float32(3.0), 36 + 15, False)


def test_no_room_below_means_no_move_at_all():
  # The loop's guard asks for c_low + d2 <= b- even while c_high could still rise.
  for low in ((0.6, 0.6), (0.6, 0.61)):
    found = balanced(pair(1.32, 1.0), low=low)
    assert found == (np.float32(0.6), np.float32(1.2), 0, False)


def test_ratio_one_everywhere_idles_or_runs_to_the_caps():
  # Nothing is cut at r = 1, so the share is 1/2 wherever the bounds are.
  data = pair(1.0, 1.0)
  assert balanced(data, target=0.5)[2:] == (0, True)
  assert balanced(data, target=0.6)[2:] == (51, False)


@pytest.mark.parametrize('adv', [(1, 1), (-1, -1), (0, 0)])
@pytest.mark.parametrize('counted', [True, False])
def test_one_sided_and_empty_minibatches_have_bounds(adv, counted):
  ratio_BT, _, mask_BT = pair(1.0, 0.95)
  adv_BT = np.asarray([adv], np.float32)
  low, high, moves, met = balanced((ratio_BT, adv_BT, mask_BT & counted))
  assert np.isfinite(low) and np.isfinite(high)
  # Positive tokens alone meet any target; without any, none is met.
  alone = counted and adv == (1, 1)
  assert (moves, met) == ((0, True) if alone else (51, False))


def test_balanced_evaluates_the_share_seven_times(monkeypatch):
  # 52 points of the path: 6 halvings, and once more to say whether the target was met.
  calls, share = [], clip.share

  def counted(*args):
    jax.debug.callback(lambda: calls.append(1))
    return share(*args)

  monkeypatch.setattr(clip, 'share', counted)
  for data in (pair(4.0, 2.0), pair(1.0, 1.0)):
    calls.clear()
    jax.block_until_ready(jax.jit(functools.partial(clip.balanced, **PAPER))(*data))
    jax.effects_barrier()
    assert len(calls) == 7


def test_fixed_is_what_it_is_given():
  assert clip.fixed(*pair(4.0, 2.0), low=0.8, high=1.28) == (
    np.float32(0.8),
    np.float32(1.28),
    0,
    True,
  )


@pytest.mark.parametrize(
  ('rule', 'knobs', 'message'),
  [
    ('balanced', {'target': 1.5}, r'clip\.balanced\.target=1\.5: .* \[0, 1\]'),
    ('balanced', {'target': -0.1}, r'clip\.balanced\.target=-0\.1'),
    ('balanced', {'low': (0.9, 0.6)}, r'clip\.balanced\.low=\(0\.9, 0\.6\): must rise'),
    ('balanced', {'low': (0.0, 0.6)}, r'clip\.balanced\.low=\(0\.0, 0\.6\)'),
    ('balanced', {'low': (0.6, 1.1)}, r'clip\.balanced\.low'),
    ('balanced', {'high': (3.0, 1.2)}, r'clip\.balanced\.high=\(3\.0, 1\.2\): must'),
    ('balanced', {'high': (0.9, 1.2)}, r'clip\.balanced\.high'),
    ('balanced', {'low_step': 0.0}, r'clip\.balanced\.low_step=0\.0'),
    ('balanced', {'high_step': -0.05}, r'clip\.balanced\.high_step=-0\.05'),
    ('fixed', {'low': 0.0}, r'clip\.fixed\.low=.*0\.0'),
    ('fixed', {'high': 0.9}, r'clip\.fixed\.high=.*0\.9'),
  ],
)
def test_errors_name_the_knob_and_its_value(rule, knobs, message):
  with pytest.raises(ValueError, match=message):
    clip.RULES[rule](*pair(1.0, 1.0), **knobs)


def test_arrays_that_disagree_are_refused():
  ratio_BT, adv_BT, mask_BT = tokens(0)
  with pytest.raises(ValueError, match='adv_BT has B=7, but B=8 elsewhere'):
    clip.balanced(ratio_BT, jnp.asarray(adv_BT[:7]), mask_BT)
