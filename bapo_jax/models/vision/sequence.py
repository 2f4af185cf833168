"""Runs the language model over tokens, with or without pictures.

Every token has three positions: time, row and column. The three are equal for text and
locate the patch within a picture (mrope of Qwen2-VL, Wang et al., 2024,
arXiv:2409.12191). Axis letters are those of grids.py.
"""

import jax.numpy as jnp
from jax import Array

from bapo_jax import sharding
from bapo_jax.models import decoder, layers
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Places
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import tower
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import EmbeddedPictures, Pictures, Tree


def place(tokens_BT: Array, grid_BI2: Array, v: VisionSpec) -> tuple[Places, Array]:
  """Returns (positions and patches of all tokens, shift_B).

  A picture has one token `v.image_token` per merged patch. It starts at the position
  that a text token would have; the text after it continues after the picture's longer
  side. shift_B is position minus column of the tokens after all pictures. A policy may
  sample image tokens: those beyond the number of patches count as text. grid_BI2 counts
  the patches of each picture along height and width; 0: no picture.
  """
  high_BI = grid_BI2[..., 0] // v.merge
  wide_BI = grid_BI2[..., 1] // v.merge
  end_BI = jnp.cumsum(high_BI * wide_BI, 1)
  start_BI = end_BI - high_BI * wide_BI
  marked_BT = tokens_BT == v.image_token
  count_BT = jnp.cumsum(marked_BT, 1, dtype=jnp.int32)
  patch_BT = marked_BT & (count_BT <= end_BI[:, -1:])
  # For each token: the patches before it, and the pictures that end before it.
  before_BT = jnp.minimum(count_BT, end_BI[:, -1:]) - patch_BT
  past_BTI = before_BT[..., None] >= end_BI[:, None]
  span_BI = jnp.maximum(high_BI, wide_BI)
  # A finished picture adds its longer side to the position instead of its patches.
  column_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
  text_BT = column_T[None] - before_BT + jnp.where(past_BTI, span_BI[:, None], 0).sum(2)

  picture_BT = past_BTI.sum(2)

  def per_token(x_BI):
    return jnp.take_along_axis(x_BI, picture_BT, 1, mode='clip')

  # Row and column within the picture. text_BT is equal for all patches of a picture,
  # because `before_BT` grows with the column.
  local_BT = before_BT - per_token(start_BI)
  across_BT = jnp.maximum(per_token(wide_BI), 1)
  place_BT3 = jnp.stack(
    [jnp.zeros_like(local_BT), local_BT // across_BT, local_BT % across_BT], -1
  )
  place_BT3 = jnp.where(patch_BT[..., None], place_BT3, 0)
  places = Places(
    parts_BT3=(text_BT[..., None] + place_BT3).astype(jnp.int32),
    merged_BT=jnp.where(patch_BT, before_BT, -1),
  )
  return places, span_BI.sum(1) - end_BI[:, -1]


def embedded(
  params: Tree,
  pictures: EmbeddedPictures | Pictures,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
) -> EmbeddedPictures:
  """Embeds pictures with the vision tower; returns embedded pictures unchanged."""
  if isinstance(pictures, EmbeddedPictures):
    return pictures
  pixels_PZE, grid_PI2, window_PW = pictures
  windows = window_PW.shape[1]
  merged_PMD = tower.forward(
    params['vision'], pixels_PZE, grid_PI2, spec, windows, schedule=schedule
  )
  return EmbeddedPictures(sharding.constrain_rows(merged_PMD), grid_PI2)


def place_responses(
  tokens_BT: Array, pictures: EmbeddedPictures, v: VisionSpec
) -> Places:
  """Computes `Places` of rows; B / P consecutive rows share the pictures of a prompt.

  `merged_BT` indexes the merged patches of all prompts, [P * M].
  """
  P, M, _ = pictures.merged_PMD.shape
  rows = tokens_BT.shape[0] // P
  at, _ = place(tokens_BT, jnp.repeat(pictures.grid_PI2, rows, axis=0), v)
  first_B1 = jnp.repeat(M * jnp.arange(P, dtype=jnp.int32), rows)[:, None]
  merged_BT = jnp.where(at.merged_BT < 0, -1, at.merged_BT + first_B1)
  return at._replace(merged_BT=merged_BT)


def prefill(
  actor: Tree,
  tokens_RT: Array,
  pictures: Pictures | None,
  spec: ModelSpec,
  routes_RTX: Array | None = None,
) -> tuple[decoder.Prefilled, Array]:
  """Prefills prompts; returns (`decoder.prefill`'s result, shift_R).

  The position of a token decoded after a prompt is its column plus shift_R.
  """
  x_RTD, turns, shift_R = embed(actor, tokens_RT, pictures, spec)
  return decoder.prefill(actor, x_RTD, turns, spec, routes_RTX), shift_R


def embed(
  params: Tree, tokens_BT: Array, pictures: Pictures | None, spec: ModelSpec
) -> tuple[Array, layers.Turns, Array]:
  """Embeds rows; returns (x_BTD, rotations of the positions, shift_B)."""
  if pictures is None:
    shift_B = jnp.zeros(tokens_BT.shape[0], jnp.int32)
    column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    turns = layers.rotations(column_BT, spec)
    return layers.embed_rows(params, tokens_BT, spec), turns, shift_B
  at, shift_B = place(tokens_BT, pictures.grid_PI2, tower.vision_of(spec))
  # Nothing is differentiated here, so nothing is recomputed.
  merged_BMD, _ = embedded(params, pictures, spec, Schedule(remat='none'))
  x_BTD = layers.embed_rows(params, tokens_BT, spec)
  patch_BTD = jnp.take_along_axis(
    merged_BMD, jnp.maximum(at.merged_BT, 0)[..., None], 1, mode='clip'
  )
  is_patch_BT1 = at.merged_BT[..., None] >= 0
  x_BTD = jnp.where(is_patch_BT1, patch_BTD.astype(x_BTD.dtype), x_BTD)
  return x_BTD, layers.rotations(at.parts_BT3, spec, by_parts=True), shift_B
