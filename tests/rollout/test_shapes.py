"""Widths of prefills, segments of the cache, and the columns that they hold."""

import pytest

from bapo_jax.rollout import shapes


@pytest.mark.parametrize(
  ('width', 'expected'),
  [(1, [1]), (64, [64]), (65, [64, 65]), (128, [64, 128]), (300, [64, 128, 256, 300])],
)
def test_prefill_widths_double_up_to_the_width(width, expected):
  assert shapes.prefill_widths(width) == expected


@pytest.mark.parametrize(
  ('length', 'parts', 'expected'),
  [
    (10, 1, [10]),
    (10, 3, [4, 4, 2]),
    (10, 20, [1] * 10),
    (9216, 8, [1152] * 8),
    (9217, 8, [1280] * 7 + [257]),  # whole tiles, but for the end
    (1100, 4, [384, 384, 332]),
  ],
)
def test_segments_are_about_equal_and_fill_the_row(length, parts, expected):
  assert shapes.segment_sizes(length, parts) == expected
  assert sum(expected) == length


def test_reach_counts_the_segments_that_hold_the_columns():
  sizes = [4, 4, 2]
  found = [shapes.segments_reached(sizes, n) for n in range(1, 11)]
  assert found == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
