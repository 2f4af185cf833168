"""The language model over texts with pictures in them.

1. `place` finds the tokens in whose place a picture's merged patches stand, one token
   for each, and gives every token a position of three parts, time, row and column:
   equal in a text, and within a picture its patch's place (mrope of Qwen2-VL, Wang et
   al., 2024, arXiv:2409.12191);
2. `embed` puts the patches in their places;
3. `forward` and `prefill` are those of layers.py and decoder.py with both;
4. `embedded` and `place_responses` are for packed rows, several to a prompt.

Letters beyond those of types.py: I pictures of a row, Z patches and M merged patches of
a row, E numbers of a patch.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from bapo_jax.models import decoder, layers
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import tower
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import EmbeddedPictures, Pictures, Tree


class Placed(NamedTuple):
  """Where the tokens of some rows lie."""

  position_BT3: Int32[Array, 'B T 3']  # time, row and column of each token
  merged_BT: Int32[Array, 'B T']  # the merged patch in its place; -1 for a text's token
  shift_B: Int32[Array, ' B']  # position of a token after all pictures, less its column


def place(tokens_BT: Array, grid_BI2: Array, v: VisionSpec) -> Placed:
  """The positions of all tokens of rows, and which of them stand for patches.

  A picture is as many tokens `v.image_token` as it has merged patches. It begins at the
  position that a text would have there, and the text after it continues beyond its
  longer side. More of these tokens than patches are text: a policy may sample them.
  """
  high_BI, wide_BI = grid_BI2[..., 0] // v.merge, grid_BI2[..., 1] // v.merge
  end_BI = jnp.cumsum(high_BI * wide_BI, 1)
  start_BI = end_BI - high_BI * wide_BI
  marked_BT = tokens_BT == v.image_token
  count_BT = jnp.cumsum(marked_BT, 1, dtype=jnp.int32)
  patch_BT = marked_BT & (count_BT <= end_BI[:, -1:])
  # Of each token: patches strictly before it, and pictures that end before it.
  before_BT = jnp.minimum(count_BT, end_BI[:, -1:]) - patch_BT
  past_BTI = before_BT[..., None] >= end_BI[:, None]
  span_BI = jnp.maximum(high_BI, wide_BI)
  column_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
  text_BT = column_T[None] - before_BT + jnp.where(past_BTI, span_BI[:, None], 0).sum(2)

  picture_BT = past_BTI.sum(2)

  def own(x_BI: Array) -> Array:
    """Of each patch the value of its picture."""
    return jnp.take_along_axis(x_BI, picture_BT, 1, mode='clip')

  local_BT, across_BT = before_BT - own(start_BI), jnp.maximum(own(wide_BI), 1)
  # Of a patch as many tokens precede it as of the first one of its picture.
  place_BT3 = jnp.stack(
    [jnp.zeros_like(local_BT), local_BT // across_BT, local_BT % across_BT], -1
  )
  place_BT3 = jnp.where(patch_BT[..., None], place_BT3, 0)
  return Placed(
    position_BT3=(text_BT[..., None] + place_BT3).astype(jnp.int32),
    merged_BT=jnp.where(patch_BT, before_BT, -1),
    shift_B=span_BI.sum(1) - end_BI[:, -1],
  )


def embed(
  params: Tree, tokens_BT: Array, merged_BMD: Array, at: Placed, spec: ModelSpec
) -> Array:
  """The embedding [B, T, D] of tokens, that of a merged patch where one stands.

  Args:
    merged_BMD: of the pictures of each row, from `tower.forward`.
  """
  x_BTD = layers.embed_rows(params, tokens_BT, spec)
  patch_BTD = jnp.take_along_axis(
    merged_BMD, jnp.maximum(at.merged_BT, 0)[..., None], 1, mode='clip'
  )
  return jnp.where(at.merged_BT[..., None] >= 0, patch_BTD.astype(x_BTD.dtype), x_BTD)


def embedded(
  params: Tree,
  pictures: EmbeddedPictures | Pictures,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
) -> EmbeddedPictures:
  """The pictures as the tower of these weights embeds them, if they are not yet."""
  if isinstance(pictures, EmbeddedPictures):
    return pictures
  merged_PMD = _merged(params, pictures, spec, schedule)
  return EmbeddedPictures(merged_PMD, pictures.grid_PI2)


def _merged(
  params: Tree, pictures: Pictures, spec: ModelSpec, schedule: Schedule
) -> Array:
  """The merged patches [P, M, D] of pictures, in windows that are counted."""
  pixels_PZE, grid_PI2, window_PW = pictures
  windows = None if window_PW is None else window_PW.shape[1]
  return tower.forward(
    params['vision'], pixels_PZE, grid_PI2, spec, windows, schedule=schedule
  )


def place_responses(
  tokens_BT: Array, pictures: EmbeddedPictures, v: VisionSpec
) -> Placed:
  """`place` of rows that share pictures: B / P of them, one after the other, to each.

  `merged_BT` counts through the merged patches of all prompts, [P * M].
  """
  P, M, _ = pictures.merged_PMD.shape
  rows = tokens_BT.shape[0] // P
  at = place(tokens_BT, jnp.repeat(pictures.grid_PI2, rows, axis=0), v)
  first_B1 = jnp.repeat(M * jnp.arange(P, dtype=jnp.int32), rows)[:, None]
  merged_BT = jnp.where(at.merged_BT < 0, -1, at.merged_BT + first_B1)
  return at._replace(merged_BT=merged_BT)


def forward(
  params: Tree, tokens_BT: Array, pictures: Pictures, spec: ModelSpec
) -> Array:
  """Final hidden states [B, T, D] of rows with pictures, as `layers.forward`."""
  x_BTD, turn, _ = _embedded(params, tokens_BT, pictures, spec)
  return layers.through(params, x_BTD, turn, spec)


def prefill(
  actor: Tree, tokens_RT: Array, pictures: Pictures, spec: ModelSpec
) -> tuple[list[decoder.KeysValues], Array]:
  """(keys and values, shift_R) of prompts with pictures, as `decoder.prefill`.

  Every token decoded after them is turned by its column plus shift_R.
  """
  x_RTD, turn, at = _embedded(actor, tokens_RT, pictures, spec)
  return decoder.prefill_embedded(actor, x_RTD, turn, spec), at.shift_B


def _embedded(
  params: Tree, tokens_BT: Array, pictures: Pictures, spec: ModelSpec
) -> tuple[Array, tuple[Array, Array], Placed]:
  """(embeddings, rotations, places) of rows with pictures."""
  at = place(tokens_BT, pictures.grid_PI2, tower.vision_of(spec))
  merged_BMD = _merged(params, pictures, spec, Schedule(remat='none'))
  x_BTD = embed(params, tokens_BT, merged_BMD, at, spec)
  return x_BTD, layers.rotations_by_parts(at.position_BT3, spec), at
