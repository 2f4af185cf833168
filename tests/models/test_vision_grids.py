"""Each patch has its picture, its place and its window, and each picture is alone."""

import jax
import numpy as np
import pytest

from bapo_jax.models.vision import grids
from bapo_jax.models.vision import spec as vision_spec

V = vision_spec.VisionSpec(
  width=16, layers=2, heads=2, ffn=24, out=16, full_layers=(1,), image_token=5
)


def by_hand(pictures, v):
  """(picture, row, column, window, place in it) of each patch, counted in loops."""
  found = []
  window_of = {}
  for i, (high, wide) in enumerate(pictures):
    for down in range(0, high, v.merge):
      for right in range(0, wide, v.merge):
        for row in range(down, down + v.merge):
          for column in range(right, right + v.merge):
            edge = v.window_side * v.merge
            window = (i, row // edge, column // edge)
            found.append((i, row, column, window))
    for down in range(-(-high // edge)):
      for right in range(-(-wide // edge)):
        window_of[i, down, right] = len(window_of)
  return [(i, r, c, window_of[w]) for i, r, c, w in found]


@pytest.mark.parametrize('sizes', [{}, {'merge': 3, 'window': 84}], ids=['2', '3'])
def test_the_layout_equals_the_count_by_hand(sizes):
  v = vision_spec.VisionSpec(**vars(V) | sizes)
  rng = np.random.default_rng(0)
  Z = 400
  I = 4
  R = 5
  rows = []
  for count in (0, 1, 2, 3, 4):
    most = max(1, int((Z / max(count, 1)) ** 0.5) // v.merge)
    rows.append(rng.integers(1, most + 1, (count, 2)) * v.merge)
  grid_RI2 = np.zeros((R, I, 2), np.int32)
  for r, pictures in enumerate(rows):
    grid_RI2[r, : len(pictures)] = pictures
  W = max(grids.count_windows(pictures, v) for pictures in rows)
  at = jax.jit(grids.layout, static_argnums=(1, 2, 3))(grid_RI2, Z, W, v)
  for r, pictures in enumerate(rows):
    wanted = by_hand(pictures, v)
    n = len(wanted)
    assert n <= Z
    assert np.asarray(at.picture_RZ[r, n:]).max(initial=-1) == -1
    assert np.asarray(at.slot_RZ[r, n:]).min(initial=W * v.window_patches) == (
      W * v.window_patches
    )
    places = np.concatenate([at.picture_RZ[r, :n, None], at.place_RZ2[r, :n]], -1)
    assert places.tolist() == [[i, row, column] for i, row, column, _ in wanted]
    slots = np.asarray(at.slot_RZ[r, :n])
    assert (slots // v.window_patches).tolist() == [w for *_, w in wanted]
    assert len(set(slots.tolist())) == n
    patch_X = np.asarray(at.patch_RWY[r]).ravel()
    assert patch_X[slots].tolist() == list(range(n))
    assert (patch_X >= 0).sum() == n
