"""The pictures of a data set, found by the ids of its problems.

Groups, replay buffers and checkpoints hold ids alone: what decodes or learns asks here
for the pictures of the rows at hand, in one capacity for all problems of a run, so that
every program is compiled once.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from bapo_jax.data import pictured_prompts
from bapo_jax.data.pictured_files import PicturedRow
from bapo_jax.data.pictured_prompts import Grid
from bapo_jax.data.row import Row
from bapo_jax.models.vision.grids import count_windows
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import Pictures

HELD = 1 << 30  # bytes of patches that stay decoded
NOTHING = PicturedRow(Row('', ''), ())


class Capacity(NamedTuple):
  """What every prompt has room for; one value for a run."""

  patches: int  # Z
  pictures: int  # I
  windows: int  # W


def capacity(grids: Iterable[Sequence[Grid]], v: VisionSpec) -> Capacity:
  """Room for the pictures of any of these problems; zeros where there is none.

  Args:
    grids: of the pictures of each problem.
  """
  patches, most, windows = 0, 0, 0
  for each in grids:
    patches = max(patches, sum(high * wide for high, wide in each))
    most = max(most, len(each))
    windows = max(windows, count_windows(each, v))
  # Whole windows, in which most layers attend.
  patches = -(-patches // v.window_patches) * v.window_patches
  return Capacity(patches, most, windows)


class Gallery:
  """The files of the pictures of N problems, decoded when they are asked for.

  Args:
    rows: the problems by their ids.
    room: what every prompt has room for.
  """

  def __init__(self, rows: Sequence[PicturedRow], v: VisionSpec, room: Capacity):
    self.rows, self.vision, self.room = rows, v, room
    most = max(1, HELD // max(1, room.patches * v.numbers))
    self._one = functools.lru_cache(most)(self._decode)

  def _decode(self, problem: int) -> Pictures:
    return pictured_prompts.pixels([self.rows[problem]], self.vision, *self.room)

  def empty(self, prompts: int) -> Pictures:
    """Room for so many prompts, none of which has a picture."""
    return pictured_prompts.pixels([NOTHING] * prompts, self.vision, *self.room)

  def of(self, id_P: ArrayLike) -> Pictures:
    """The pictures of the problems with these ids; id -1 has none.

    Raises:
      ValueError: a picture cannot be read any more, or there is no room for it.
    """
    ids = np.asarray(id_P).tolist()
    seen = [i for i in ids if i >= 0 and self.rows[i].pictures]
    found: dict[int, Pictures] = {i: self._one(i) for i in seen}
    nothing = self.empty(1)
    each = [found.get(i, nothing) for i in ids] or [self.empty(0)]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *each)
