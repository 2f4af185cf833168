"""Looks up the pictures of a data set by problem id.

Groups, replay buffers and checkpoints store only ids; the sampler and the learner look
up the pictures here. Arrays have room for the pictures of any problem of the run, so
every program is compiled once. To save gigabytes, patches are computed when needed.
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

CACHED = 1 << 30  # bytes of decoded patches in the cache


class Capacity(NamedTuple):
  patches: int  # Z
  pictures: int  # I
  windows: int  # W


def capacity(grids: Iterable[Sequence[Grid]], v: VisionSpec) -> Capacity:
  """Returns numbers of patches, pictures and windows that suffice for any problem."""
  sizes = [
    (sum(high * wide for high, wide in x), len(x), count_windows(x, v)) for x in grids
  ]
  patches, pictures, windows = map(max, zip((0, 0, 0), *sizes, strict=True))
  # Rounds up to whole windows, because most layers attend within windows.
  patches = -(-patches // v.window_patches) * v.window_patches
  return Capacity(patches, pictures, windows)


class Gallery:
  """The pictures of N problems, arrays by problem id and decoded when needed.

  The arrays of each prompt are padded to `room`, which must fit every row.
  """

  def __init__(self, rows: Sequence[Row], v: VisionSpec, room: Capacity):
    self.rows = rows
    self.vision = v
    self.room = room
    size = max(1, CACHED // max(1, room.patches * v.numbers))
    self._cached = functools.lru_cache(size)(self._decode)

  def of(self, id_P: ArrayLike) -> Pictures:
    """Returns the pictures of the problems with these ids; id -1 has none."""
    pictures = [
      self._cached(i) if i >= 0 and self.rows[i].pictures else self.empty(1)
      for i in np.asarray(id_P).tolist()
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), self.empty(0), *pictures)

  def empty(self, prompts: int) -> Pictures:
    """Returns the arrays for this many prompts without pictures, all zero."""
    room = self.room
    zeros = cast(Any, np.zeros)  # Pictures is typed with jax.Array
    return Pictures(
      zeros((prompts, room.patches, self.vision.numbers), np.uint8),
      zeros((prompts, room.pictures, 2), np.int32),
      zeros((prompts, room.windows), bool),
    )

  def _decode(self, problem):
    files = self.rows[problem].pictures
    v = self.vision
    decoded = [pictures_lib.patches(pictures_lib.read(x), v) for x in files]
    grids = [picture.grid for picture in decoded]
    pixels_ZE = np.concatenate([picture.pixels_ZE for picture in decoded])
    arrays = cast(Any, self.empty(1))
    arrays.pixels_PZE[0, : len(pixels_ZE)] = pixels_ZE
    arrays.grid_PI2[0, : len(grids)] = grids
    arrays.window_PW[0, : count_windows(grids, v)] = True
    return arrays
