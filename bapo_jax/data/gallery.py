"""The pictures of a data set, by the ids of its problems.

Groups, replay buffers and checkpoints store ids only: decoding and learning ask here
for the pictures of their rows. All problems of a run have one capacity, so that every
program is compiled once. Patches are made when a step needs them, because those of a
whole data set would take gigabytes.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

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
  """Returns the room that the pictures of every problem fit into, given their grids."""
  patches = pictures = windows = 0
  for grids_I in grids:
    patches = max(patches, sum(high * wide for high, wide in grids_I))
    pictures = max(pictures, len(grids_I))
    windows = max(windows, count_windows(grids_I, v))
  # Whole windows, within which most layers attend.
  patches = -(-patches // v.window_patches) * v.window_patches
  return Capacity(patches, pictures, windows)


class Gallery:
  """The pictures of N problems, by id, decoded on demand.

  `room` is the capacity of every prompt, at least that of the rows.
  """

  def __init__(self, rows: Sequence[Row], v: VisionSpec, room: Capacity):
    self.rows, self.vision, self.room = rows, v, room
    size = max(1, CACHED // max(1, room.patches * v.numbers))
    self._cached = functools.lru_cache(size)(self._decode)

  def of(self, id_P: ArrayLike) -> Pictures:
    """Returns the pictures of the problems with these ids; id -1 has none."""
    ids, pictures = np.asarray(id_P).tolist(), [self.empty(0)]
    for i in ids:
      seen = i >= 0 and self.rows[i].pictures
      pictures.append(self._cached(i) if seen else self.empty(1))
    return jax.tree.map(lambda *rows: np.concatenate(rows), *pictures)

  def empty(self, prompts: int) -> Pictures:
    """Returns room for so many prompts, without any picture."""
    room, zeros = self.room, cast(Any, np.zeros)  # the record is one of jax.Array
    return Pictures(
      zeros((prompts, room.patches, self.vision.numbers), np.uint8),
      zeros((prompts, room.pictures, 2), np.int32),
      zeros((prompts, room.windows), bool),
    )

  def _decode(self, problem: int) -> Pictures:
    files, v = self.rows[problem].pictures, self.vision
    decoded = [pictures_lib.patches(pictures_lib.read(x), v) for x in files]
    grids = [picture.grid for picture in decoded]
    pixels_ZE = np.concatenate([picture.pixels_ZE for picture in decoded])
    found = cast(Any, self.empty(1))
    found.pixels_PZE[0, : len(pixels_ZE)] = pixels_ZE
    found.grid_PI2[0, : len(grids)] = grids
    found.window_PW[0, : count_windows(grids, v)] = True
    return found
