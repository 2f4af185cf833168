"""Pictures by the ids of problems, in one capacity."""

import numpy as np
from pictured import SEEING, problems

from bapo_jax.data import gallery, pictures
from bapo_jax.data.gallery import Capacity

V = SEEING.vision


def test_every_problem_has_its_own_pictures_and_no_others():
  _, held = problems()
  ids = [4, -1, 1, 2, 1]
  found = held.of(ids)
  assert found.pixels_PZE.shape == (5, held.room.patches, V.numbers)
  assert found.grid_PI2.shape == (5, 2, 2) and held.room == Capacity(32, 2, 3)
  assert found.grid_PI2[:, :, 0].tolist() == [[2, 0], [0, 0], [2, 6], [0, 0], [2, 6]]
  for p, i in enumerate(ids):
    if i < 0:
      assert not found.pixels_PZE[p].any()
      continue
    patches_ZE = np.zeros((held.room.patches, V.numbers), np.uint8)
    if files := held.rows[i].pictures:
      decoded = [pictures.patches(pictures.read(x), V).pixels_ZE for x in files]
      patches_ZE[: sum(map(len, decoded))] = np.concatenate(decoded)
    np.testing.assert_array_equal(found.pixels_PZE[p], patches_ZE)
  assert held.of([]).pixels_PZE.shape == (0, 32, V.numbers)


def test_the_capacity_is_that_of_the_largest_in_whole_windows():
  # 2 x 4 + 3 x 4 = 20 patches are more than one window of 16 and take two; three small
  # pictures have three windows.
  assert gallery.capacity([[(2, 4), (3, 4)], [(2, 2)] * 3, []], V) == (32, 3, 3)
  assert gallery.capacity([[], []], V) == (0, 0, 0)
