"""The share, its premise, and what a search exchanges on a mesh."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import bound_search, clip


def balanced(**knobs):
  """(ratio_BT, batch) -> Bounds, for the clipped loss."""
  rule = clip.Balanced(**knobs)
  return lambda ratio_BT, batch: rule(ratio_BT, batch, making.weigh(ratio_BT, batch))


def test_share_golden(variant):
  # A = +2: ratios 0.5, 1.0, 1.5 (cut: not below 1.25)      P = 2 * (0.5 + 1.0) = 3
  # A = -1: ratios 0.75 (cut: not above 0.75), 1.0, 2.0     N = 1.0 + 2.0 = 3
  # a masked token and a row of A = 0 count for nothing     3 / (3 + 3) = 1/2
  ratio_BT = np.ones((8, 4), np.float32)
  ratio_BT[:2] = [[0.5, 1.0, 1.5, 9.0], [0.75, 1.0, 2.0, 9.0]]
  loss_mask_BT = np.arange(4) < [[3]] * 8
  batch = making.batch([2, -1, 0, 0, 0, 0, 0, 0], loss_mask_BT)

  def share(low, high, **knobs):
    return variant(
      lambda *xs: bound_search.share(*xs, low, high, bound_search.Share(**knobs)),
      ratio_BT,
      batch,
    )

  assert share(0.75, 1.25) == 0.5
  # Cutting nothing: 6 / (6 + 3.75); cutting every positive token: 0.
  assert share(0.5, 2.0) == np.float32(6 / 9.75)
  assert share(0.75, 0.5) == 0
  # Surrogate: P = 2 (0.5 + 1 + 1.25) = 5.5, N = 0.75 + 1 + 2 = 3.75.
  assert share(0.75, 1.25, contribution='surrogate') == np.float32(5.5 / 9.25)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 10**6),
  lows=st.tuples(st.floats(0.3, 1), st.floats(0.3, 1)).map(sorted),
  highs=st.tuples(st.floats(1, 4), st.floats(1, 4)).map(sorted),
  target=st.floats(0, 1),
  kind=st.sampled_from(making.KINDS),
)
def test_each_bound_moves_the_outcome_one_way(seed, lows, highs, target, kind):
  # Without this, bisection means nothing; on numbers whose sums are not exact.
  rng = np.random.default_rng(seed)
  ratio_BT = np.exp(rng.normal(0, 0.6, (8, 6))).astype(np.float32)
  batch = making.exact_tokens(seed)[1]._replace(
    adv_BT=rng.normal(0, 1, ratio_BT.shape).astype(np.float32)
  )
  k = bound_search.Share(
    contribution=kind[0], weight=kind[1], sources=('fresh', 'reused')
  )
  parts = bound_search.contributions(ratio_BT, batch, k)

  def meets(low, high):
    bounds = np.float32(low), np.float32(high)
    P, N = bound_search.sums(ratio_BT, *parts, *bounds, kind[0])
    return bool(bound_search.reaches(P, N, target))

  assert meets(lows[0], highs[0]) <= meets(lows[0], highs[1])
  ends = meets(lows[0], highs[0]), meets(lows[1], highs[0])
  assert ends == tuple(sorted(ends, reverse=kind[0] == 'surrogate'))


@pytest.mark.parametrize('contribution', ['gradient', 'surrogate'])
def test_tokens_are_on_the_side_of_their_own_advantage(contribution):
  # As if every token were a response of its own.
  ratio_BT, batch = making.exact_tokens(0)
  signs_BT = np.random.default_rng(1).choice([-1, 1], ratio_BT.shape)
  batch = batch._replace(adv_BT=batch.adv_BT * signs_BT)
  alone = jax.tree.map(lambda x: np.asarray(x).reshape(-1, 1), batch)
  alone = alone._replace(source_B=np.repeat(batch.source_B, ratio_BT.shape[1]))
  rule = balanced(contribution=contribution, target=0.55)
  together, apart = rule(ratio_BT, batch), rule(ratio_BT.reshape(-1, 1), alone)
  assert together.search_steps > 0
  np.testing.assert_array_equal([together.low, together.high], [apart.low, apart.high])


@pytest.mark.parametrize('resolution', ['step', 'continuous'])
@pytest.mark.parametrize('contribution', ['gradient', 'surrogate'])
def test_on_a_mesh_only_scalars_are_exchanged(contribution, resolution):
  rule = balanced(contribution=contribution, resolution=resolution, weight='behaviour')
  rows = sharding.over_rows(sharding.make(data=4, fsdp=2))
  data = jax.device_put(making.exact_tokens(0, B=64, T=128), rows)
  text = jax.jit(rule).lower(*data).compile().as_text()
  exchanged = re.findall(
    r'= (\S.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)'
    r'(?:-start)?\(',
    text,
  )
  assert exchanged and {kind for _, kind in exchanged} == {'all-reduce'}
  for shape, _ in exchanged:
    sizes = re.findall(r'\[([\d,]*)\]', shape)
    assert sizes and all(size in ('', '1', '2') for size in sizes), shape
