"""The pictures of a data set, by the ids of its problems.

Groups, replay buffers and checkpoints store ids only: decoding and learning ask here
for the pictures of their rows. All problems of a run have one capacity, so that every
program is compiled once. Patches are made when a step needs them, because those of a
whole data set would take gigabytes.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from bapo_jax.data import pictures as pictures_lib
from bapo_jax.data.pictures import Grid
from bapo_jax.data.row import Row
from bapo_jax.models.vision.grids import count_windows
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import Pictures

CACHED = 1 << 30  # bytes of patches that stay decoded


class Capacity(NamedTuple):
  """The room of every prompt for pictures, the same for all prompts of a run."""

  patches: int  # Z
  pictures: int  # I
  windows: int  # W


def capacity(grids: Iterable[Sequence[Grid]], v: VisionSpec) -> Capacity:
  """Returns the room that the pictures of every problem fit into.

  Args:
    grids: patches of each picture, for each problem.
    v: the vision tower.
  """
  patches = pictures = windows = 0
  for grids_I in grids:
    patches = max(patches, sum(high * wide for high, wide in grids_I))
    pictures = max(pictures, len(grids_I))
    windows = max(windows, count_windows(grids_I, v))
  # Whole windows, within which most layers attend.
  patches = -(-patches // v.window_patches) * v.window_patches
  return Capacity(patches, pictures, windows)


class Gallery:
  """The pictures of N problems, decoded on demand.

  Args:
    rows: the problems, by id.
    v: the vision tower.
    room: the capacity of every prompt.
  """

  def __init__(self, rows: Sequence[Row], v: VisionSpec, room: Capacity):
    self.rows, self.vision, self.room = rows, v, room
    size = max(1, CACHED // max(1, room.patches * v.numbers))
    self._cached = functools.lru_cache(size)(self._decode)

  def of(self, id_P: ArrayLike) -> Pictures:
    """Returns the pictures of the problems with these ids; id -1 has none.

    Raises:
      ValueError: a picture cannot be read, or there is no room for it.
    """
    ids, empty = np.asarray(id_P).tolist(), self.empty(1)
    pictures = [
      self._cached(i) if i >= 0 and self.rows[i].pictures else empty for i in ids
    ]
    return jax.tree.map(
      lambda *rows: np.concatenate(rows), *(pictures or [self.empty(0)])
    )

  def empty(self, prompts: int) -> Pictures:
    """Returns room for so many prompts, without any picture."""
    return Pictures(*self._zeros(prompts))

  def _zeros(self, prompts: int) -> tuple[Any, Any, Any]:
    room = self.room
    return (
      np.zeros((prompts, room.patches, self.vision.numbers), np.uint8),
      np.zeros((prompts, room.pictures, 2), np.int32),
      np.zeros((prompts, room.windows), bool),
    )

  def _decode(self, problem: int) -> Pictures:
    row, room, v = self.rows[problem], self.room, self.vision
    decoded = [pictures_lib.patches(pictures_lib.read(x), v) for x in row.pictures]
    grids = [picture.grid for picture in decoded]
    count = sum(len(picture.pixels_ZE) for picture in decoded)
    windows = count_windows(grids, v)
    if count > room.patches or len(grids) > room.pictures or windows > room.windows:
      raise ValueError(
        f'the problem {row.problem[:60]!r} has {len(grids)} pictures of {count} '
        f'patches in {windows} windows, and there is room for {room.pictures} pictures '
        f'of {room.patches} patches in {room.windows} windows; make the pictures '
        'smaller or remove the problem'
      )
    pixels_PZE, grid_PI2, window_PW = self._zeros(1)
    pixels_PZE[0, :count] = np.concatenate([x.pixels_ZE for x in decoded])
    grid_PI2[0, : len(grids)] = grids
    window_PW[0, :windows] = True
    return Pictures(pixels_PZE, grid_PI2, window_PW)
