"""Locates each patch in a row of pictures: picture, row and column, and window.

A row contains up to I consecutive pictures in Z patches; the remaining patches are
empty. The patches of a picture are in the order of Qwen2.5-VL's processor: merged
patches from left to right and from top to bottom, and the patches within a merged patch
likewise. Patches keep this order; attention within windows gathers them by window and
scatters them back. Letters beyond those of types.py:

  R rows of pictures   I pictures of a row   Z patches of a row   M merged patches
  W windows of a row   Y patches of a window   E numbers of a patch
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from bapo_jax.models.vision.spec import VisionSpec


class Layout(NamedTuple):
  picture_RZ: Int32[Array, 'R Z']  # the picture of each patch; -1 for an empty patch
  place_RZ2: Int32[Array, 'R Z 2']  # row and column in the picture, in patches
  slot_RZ: Int32[Array, 'R Z']  # place among all windows of the row; W * Y: none
  patch_RWY: Int32[Array, 'R W Y']  # the patch in each place of a window; -1: none


def layout(grid_RI2: Array, patches: int, windows: int, v: VisionSpec) -> Layout:
  """Computes the layout of rows of pictures.

  A window at the right or lower edge of a picture may be partly empty.

  Args:
    grid_RI2: patches of each picture along height and width, multiples of v.merge; 0
      for no picture. They must fit into `patches` (Z) and `windows` (W) of a row.
  """
  m = v.merge
  side = v.window_side
  Y = v.window_patches
  high_RI = grid_RI2[..., 0] // m
  wide_RI = grid_RI2[..., 1] // m  # in merged patches
  size_RI = grid_RI2[..., 0] * grid_RI2[..., 1]
  end_RI = jnp.cumsum(size_RI, 1)
  patch_Z = jnp.arange(patches, dtype=jnp.int32)
  # The index of a patch's picture is the number of pictures that end before the patch.
  picture_RZ = (patch_Z[None, None] >= end_RI[:, :, None]).sum(1, dtype=jnp.int32)
  live_RZ = picture_RZ < grid_RI2.shape[1]

  def per_patch(x_RI):
    return jnp.take_along_axis(x_RI, picture_RZ, 1, mode='clip')

  # Row and column of each patch, from its number within its picture.
  local_RZ = patch_Z[None] - per_patch(end_RI - size_RI)
  merged_RZ = local_RZ // m**2
  inside_RZ = local_RZ % m**2
  across_RZ = jnp.maximum(per_patch(wide_RI), 1)
  down_RZ = merged_RZ // across_RZ
  right_RZ = merged_RZ % across_RZ
  row_RZ = down_RZ * m + inside_RZ // m
  column_RZ = right_RZ * m + inside_RZ % m

  # The window of each patch among those of its row, and its slot in the window.
  count_RI = -(-high_RI // side) * -(-wide_RI // side)
  window_RZ = per_patch(jnp.cumsum(count_RI, 1) - count_RI)
  window_RZ += down_RZ // side * -(-across_RZ // side) + right_RZ // side
  in_window_RZ = (down_RZ % side * side + right_RZ % side) * m**2 + inside_RZ
  slot_RZ = jnp.where(live_RZ, window_RZ * Y + in_window_RZ, windows * Y)
  # The inverse: the patch of each slot.
  R = grid_RI2.shape[0]
  patch_RX = jnp.full((R, windows * Y), -1, jnp.int32)
  patch_RX = patch_RX.at[jnp.arange(R)[:, None], slot_RZ].set(
    jnp.broadcast_to(patch_Z[None], slot_RZ.shape), mode='drop'
  )
  return Layout(
    picture_RZ=jnp.where(live_RZ, picture_RZ, -1),
    place_RZ2=jnp.stack([row_RZ, column_RZ], -1),
    slot_RZ=slot_RZ,
    patch_RWY=patch_RX.reshape(R, windows, Y),
  )


def count_windows(grids: Sequence[tuple[int, int]] | np.ndarray, v: VisionSpec) -> int:
  """Counts the windows of pictures, given their patches along height and width."""
  edge = v.window_side * v.merge
  return sum(-(-int(high) // edge) * -(-int(wide) // edge) for high, wide in grids)
