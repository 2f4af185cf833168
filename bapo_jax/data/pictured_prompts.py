"""Prompts with pictures: tokens with places for patches, and the patches.

1. `encode` renders each problem by the model's own chat template, a picture where
   `<image>` stands, and repeats the token of a picture once for each merged patch;
2. `pixels` decodes the pictures of some prompts into patches, in a fixed capacity.

Patches are made when a step needs them: those of a whole data set would take gigabytes.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.data import pictures, tokenizer
from bapo_jax.data.pictured_files import PicturedRow
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models.vision import grids
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import Pictures

Grid = tuple[int, int]  # patches along height and width


class PicturedPrompt(NamedTuple):
  """The tokens of a prompt and the grids of its pictures."""

  tokens: list[int]
  grids: tuple[Grid, ...]


def encode(
  reader: Tokenizer, rows: Sequence[PicturedRow], v: VisionSpec
) -> list[PicturedPrompt]:
  """Token ids of each problem in its template, however many, and its grids.

  Raises:
    ValueError: a picture cannot be read, or the template makes another number of
      places than there are pictures.
  """
  image = reader.backend.convert_ids_to_tokens(v.image_token)
  if image is None:
    raise ValueError(
      f'tokenizer.path: no token {v.image_token}, which stands for a picture in its '
      "config.json; give the model's own tokenizer"
    )
  chat = reader.template.startswith('chat:')
  problems = [
    row.problem if chat else row.problem.replace(pictures.PLACEHOLDER, image)
    for row, _ in rows
  ]
  encoded = tokenizer.encode_prompts(
    reader, problems, [row.system for row, _ in rows], parts
  )
  prompts = []
  for (row, files), ids in zip(rows, encoded, strict=True):
    if ids.count(v.image_token) != len(files):
      raise ValueError(
        f'the prompt of {row.problem[:60]!r} has {ids.count(v.image_token)} {image} '
        f'for {len(files)} pictures; take {image} out of the problem, or choose '
        'another chat template'
      )
    grid_of = tuple(pictures.grid(data, v) for data in files)
    each = iter(grid_of)
    tokens = [
      token
      for i in ids
      for token in ([i] * _tokens(next(each), v) if i == v.image_token else [i])
    ]
    prompts.append(PicturedPrompt(tokens, grid_of))
  return prompts


def parts(message: str) -> str | list[dict[str, str]]:
  """A user's message as a chat template reads it: texts, and pictures between them."""
  if pictures.PLACEHOLDER not in message:
    return message
  found: list[dict[str, str]] = []
  for text in re.split(f'({re.escape(pictures.PLACEHOLDER)})', message):
    if text == pictures.PLACEHOLDER:
      found.append({'type': 'image'})
    elif text:
      found.append({'type': 'text', 'text': text})
  return found


def pixels(
  rows: Sequence[PicturedRow],
  v: VisionSpec,
  patches: int,
  most_pictures: int,
  windows: int,
) -> Pictures:
  """The pictures of these prompts, in a fixed capacity.

  Args:
    patches: Z of a prompt.
    most_pictures: I of a prompt.
    windows: W of a prompt.

  Raises:
    ValueError: a prompt has more patches, pictures or windows.
  """
  pixels_PZE: Any = np.zeros((len(rows), patches, v.numbers), np.uint8)
  grid_PI2: Any = np.zeros((len(rows), most_pictures, 2), np.int32)
  window_PW: Any = np.zeros((len(rows), windows), bool)
  for p, (row, files) in enumerate(rows):
    found = [_patches(data, v) for data in files]
    count = sum(len(each.pixels_ZE) for each in found)
    needed = grids.count_windows([each.grid for each in found], v)
    if count > patches or len(found) > most_pictures or needed > windows:
      raise ValueError(
        f'the problem {row.problem[:60]!r} has {len(found)} pictures of {count} '
        f'patches in {needed} windows, more than {most_pictures} of {patches} in '
        f'{windows}; make them smaller or take it out'
      )
    window_PW[p, :needed] = True
    if found:
      pixels_PZE[p, :count] = np.concatenate([each.pixels_ZE for each in found])
      grid_PI2[p, : len(found)] = [each.grid for each in found]
  return Pictures(pixels_PZE, grid_PI2, window_PW)


def _patches(data: bytes, v: VisionSpec) -> pictures.Patches:
  return pictures.patches(pictures.read(data), v)


def _tokens(grid: Grid, v: VisionSpec) -> int:
  """Tokens that a picture takes in a prompt: its merged patches."""
  return grid[0] * grid[1] // v.merge**2
