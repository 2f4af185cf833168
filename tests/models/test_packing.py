"""Packed rows: every wanted token once, in a bin with room, and the same numbers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_jax.models import logprobs, packing
from bapo_jax.models.logprob_tiles import Tile


def wanted_of(spans, T):
  """bool [B, T]: True in [first, last) of each row."""
  column_T = np.arange(T)
  return np.stack([(column_T >= a) & (column_T < b) for a, b in spans])


@st.composite
def batches(draw):
  """(wanted_BT, micro_batches); few shapes, each compiled once."""
  T, B = draw(st.sampled_from([(2, 3), (40, 16)]))
  span = st.tuples(st.integers(1, T), st.integers(1, T)).map(sorted)
  spans = draw(st.lists(span, min_size=B, max_size=B))
  return wanted_of(spans, T), draw(st.sampled_from([1, 3]))


@functools.partial(jax.jit, static_argnums=2)
def packed_of(tokens_BT, wanted_BT, micro_batches):
  """(used, rows, cells and what comes back) of every micro-batch."""
  packed = packing.pack(tokens_BT, wanted_BT, micro_batches, width=130)
  parts = []
  for n in range(packed.shape.micro_batches):
    cells = packed.cells(n)
    said_RT = jnp.where(cells.wanted_RT, cells.target_RT + 1, 0)
    parts.append((packed.mine(n)[:, 0], cells, packed.unpack(said_RT, n)))
  return packed.used, parts


@settings(deadline=None, max_examples=60)
@given(batches())
def test_every_wanted_token_is_predicted_once_from_all_before_it(drawn):
  wanted_BT, micro_batches = drawn
  # All tokens are different.
  tokens_BT = np.arange(wanted_BT.size, dtype=np.int32).reshape(wanted_BT.shape)
  found = packed_of(jnp.asarray(tokens_BT), jnp.asarray(wanted_BT), micro_batches)
  used, parts = jax.tree.map(np.asarray, found)
  assert used <= len(parts)
  seen = []
  for n, (mine_B, cells, back_BT) in enumerate(parts):
    assert not back_BT[~mine_B].any()
    filled_RT = cells.row_RT >= 0
    assert n < used or not filled_RT.any()
    for r in range(len(filled_RT)):
      for row in np.unique(cells.row_RT[r][filled_RT[r]]):
        (at,) = np.nonzero(cells.row_RT[r] == row)
        # In one piece, from the row's first token.
        np.testing.assert_array_equal(at, at[0] + np.arange(len(at)))
        np.testing.assert_array_equal(cells.position_RT[r, at], np.arange(len(at)))
        np.testing.assert_array_equal(cells.tokens_RT[r, at], tokens_BT[row, : len(at)])
    seen.extend(cells.target_RT[cells.wanted_RT].tolist())
    np.testing.assert_array_equal(
      cells.target_RT[filled_RT], cells.tokens_RT[filled_RT] + 1
    )
  assert sorted(seen) == tokens_BT[wanted_BT].tolist()
  # Values of cells come back to their targets.
  total_BT = sum(back_BT for *_, back_BT in parts)
  np.testing.assert_array_equal(total_BT, np.where(wanted_BT, tokens_BT + 1, 0))


def first_fit_decreasing(lengths, width):
  """Bin of each row and its start, one row after the other."""
  bins = []
  found = {}
  for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
    if lengths[row]:
      at = next((i for i, full in enumerate(bins) if full + lengths[row] <= width), -1)
      if at < 0:
        at = len(bins)
        bins.append(0)
      found[row] = at, bins[at]
      bins[at] += lengths[row]
  return found, len(bins)


@pytest.mark.parametrize('seed', range(2))
def test_rows_go_to_the_first_bin_with_room_the_longest_first(seed):
  rng = np.random.default_rng(seed)
  T = 200
  B = 24
  lengths = rng.integers(0, T, B)
  wanted_BT = wanted_of([(max(n, 1), n + 1) for n in lengths], T)
  packed = packing.pack(jnp.zeros((B, T), int), jnp.asarray(wanted_BT), 4, width=500)
  assert packed.shape == (4, 3, 400)
  found, count = first_fit_decreasing(lengths.tolist(), 400)
  for row in range(B):
    place = int(packed.bin_B[row]), int(packed.start_B[row])
    assert place == found[row] if row in found else place[0] == -1
  assert int(packed.used) == math.ceil(count / 3)


def test_bins_hold_the_worst_case_by_hand():
  # 57 tokens: five rows to a bin of 285 cells; 64 rows want 13 bins, 4 in each of 4.
  assert packing.shape_of(64, 57, 4, width=300) == (4, 4, 285)
  assert packing.shape_of(64, 57, 1, 4, width=300) == (1, 16, 285)
  assert packing.shape_of(64, 57, 4, width=300, packed=False) == (4, 16, 57)
  # Long rows have a bin each; few rows leave no device without one.
  assert packing.shape_of(64, 8192, 4, 16, width=300) == (4, 16, 8192)
  assert packing.shape_of(8, 12, 2, 4, width=300) == (2, 4, 12)
  assert packing.shape_of(3, 12, 8, width=300) == (3, 1, 12)


def test_the_widest_bin_by_hand():
  # 2 x 64 x 6 x 16 + 3 x 64 x 192 = 49152 weights and as many products per token;
  # scores and values take 2 x 64 per key: 2 % of the former are 7.7 of the latter.
  spec = dataclasses.replace(
    making.SPEC, width=64, heads=4, kv_heads=2, head_width=16, ffn=192
  )
  assert packing.widest(spec) == 7


def test_only_chunks_with_a_wanted_column_meet_the_vocabulary():
  rng = np.random.default_rng(2)
  hidden_BTD = rng.standard_normal((2, 12, 8), np.float32)
  head_VD = rng.standard_normal((20, 8), np.float32)
  token_BT = rng.integers(0, 20, (2, 12))

  def total(hidden_BTD, head_VD, columns, T):
    stats = logprobs.token_stats(
      hidden_BTD, head_VD, token_BT[:, :T], 0.7, tile=Tile(columns=4), columns=columns
    )
    return (stats.logp_BT**2).sum(), jnp.stack(stats[:3])

  gradient = jax.jit(jax.grad(total, (0, 1), has_aux=True), static_argnums=3)
  for columns, used in ((4, 4), (5, 8)):
    (d_hidden, d_head), found = gradient(hidden_BTD, head_VD, columns, 12)
    assert not found[:, :, used:].any() and not d_hidden[:, used:].any()
    # As of shorter rows.
    expected, stats = gradient(hidden_BTD[:, :used], head_VD, used, used)
    np.testing.assert_array_equal(found[:, :, :used], stats)
    making.close_trees((d_hidden[:, :used], d_head), expected, count=1024)
