"""Converts image files to patches of pixels, as the processor of Qwen2.5-VL does.

A merged patch is a block of patches that takes one token. Pictures are decoded, resized
to whole merged patches and cut. Merged patches, and the patches in each, are in reading
order; a patch is channels, rows, columns. Pixels are uint8 until the tower scales them.
"""

import functools
import hashlib
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageOps
from jaxtyping import UInt8

from bapo_jax.data.row import Row
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime.files import first_line

Grid = tuple[int, int]  # patches along height and width
PLACEHOLDER = '<image>'  # stands for a picture in the text of a problem
# Formats of published data sets. Pillow runs external programs for some others.
FORMATS = ('PNG', 'JPEG', 'WEBP', 'BMP', 'GIF')
REMEMBERED = 1 << 17  # files whose sizes are cached


class Patches(NamedTuple):
  pixels_ZE: UInt8[np.ndarray, 'Z E']  # patch by patch: channels, rows, columns
  grid: Grid


class Checked(NamedTuple):
  data: bytes  # shared between equal files
  size: tuple[int, int]  # height and width of the upright picture


@functools.lru_cache(maxsize=REMEMBERED)
def checked(data: bytes) -> Checked:
  """Checks a picture file by `read`, once for equal files; returns it and its size."""
  return Checked(data, read(data).size[::-1])


def read(data: bytes) -> PIL.Image.Image:
  """Decodes a file to an upright RGB picture; transparent areas become white.

  Raises:
    ValueError: the picture cannot be decoded.
  """
  try:
    return _upright(PIL.Image.open(io.BytesIO(data), formats=FORMATS))
  except PIL.UnidentifiedImageError:
    raise ValueError(
      f'a file that starts with {data[:8]!r} is not a picture in {", ".join(FORMATS)}; '
      'convert or remove it'
    ) from None
  except Exception as error:  # Pillow raises many types on damaged bytes
    raise ValueError(
      f'the picture cannot be decoded ({first_line(error)}); write the file '
      'again or remove it'
    ) from error


def _upright(picture: PIL.Image.Image):
  picture = PIL.ImageOps.exif_transpose(picture)
  if picture.mode.startswith('I;16'):
    # Scales 16 bits to 8; Pillow would clip values at 255.
    grey_HW = np.asarray(picture).astype(np.int32)
    grey_HW = np.where(grey_HW == picture.info.get('transparency'), 65535, grey_HW)
    grey_HW = ((grey_HW + 128) // 257).clip(0, 255)
    picture = PIL.Image.fromarray(grey_HW.astype(np.uint8))
  if 'A' in picture.getbands() or picture.info.get('transparency') is not None:
    picture = picture.convert('RGBA')
    white = PIL.Image.new('RGBA', picture.size, (255, 255, 255, 255))
    picture = PIL.Image.alpha_composite(white, picture)
  return picture.convert('RGB')


def png(pixels_HW3: UInt8[np.ndarray, 'H W 3']) -> bytes:
  """Encodes pixels as a PNG file."""
  file = io.BytesIO()
  PIL.Image.fromarray(pixels_HW3).save(file, 'PNG')
  return file.getvalue()


def resized_size(height: int, width: int, v: VisionSpec) -> tuple[int, int]:
  """Returns the resized (height, width) in pixels, multiples of a merged patch.

  Each side is rounded to the nearest multiple. If the result has more pixels than
  v.most_pixels or fewer than v.least_pixels, the picture is scaled to that limit
  instead, with sides rounded down or up, respectively (`smart_resize` of Qwen2-VL, Wang
  et al., 2024, arXiv:2409.12191).
  """
  unit = v.patch * v.merge
  sides = height, width
  rounded = [round(side / unit) * unit for side in sides]
  pixels = math.prod(rounded)
  if pixels > v.most_pixels:
    scale = math.sqrt(height * width / v.most_pixels)
    rounded = [max(unit, math.floor(side / scale / unit) * unit) for side in sides]
  elif pixels < v.least_pixels:
    scale = math.sqrt(v.least_pixels / (height * width))
    rounded = [math.ceil(side * scale / unit) * unit for side in sides]
  return rounded[0], rounded[1]


def patches(picture: PIL.Image.Image, v: VisionSpec) -> Patches:
  """Returns the patches of an RGB picture after bicubic resizing."""
  width, height = picture.size
  height, width = resized_size(height, width, v)
  resized = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
  p = v.patch
  m = v.merge
  # Rows and columns are cut into merged patches, patches and pixels; channels are last.
  cut = np.asarray(resized).reshape(
    height // (m * p), m, p, width // (m * p), m, p, len(resized.getbands())
  )
  pixels_ZE = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, v.numbers)
  return Patches(np.ascontiguousarray(pixels_ZE), (height // p, width // p))


def grid(data: bytes, v: VisionSpec) -> Grid:
  """Returns a picture's height and width in patches; raises the errors of `read`."""
  height, width = resized_size(*checked(data).size, v)
  return height // v.patch, width // v.patch


def digests(files: Sequence[bytes]) -> list[str]:
  """Returns a digest of each picture file, 16 hexadecimal digits long."""
  return [hashlib.sha256(data).hexdigest()[:16] for data in files]


def check_row(row: Row, *, has_vision: bool) -> None:
  """Checks that the model can read a problem; `has_vision`: it has a vision tower.

  Raises:
    ValueError: there are pictures but no tower, or not one `<image>` for each picture.
  """
  if not has_vision and row.pictures:
    raise ValueError(
      f'the problem {row.problem[:60]!r} has pictures, which need a vision model, but '
      'this model is text-only; choose other problems or a model with a vision tower '
      '(the embedded policy has one with --config.sft.tower.layers=2)'
    )
  marks = sum(text.count(PLACEHOLDER) for text in row.texts[1:])
  count = len(row.pictures)
  if has_vision and marks != count:
    raise ValueError(
      f'the problem {row.problem[:60]!r} has {marks} {PLACEHOLDER} for {count} '
      f'pictures; write one {PLACEHOLDER} for each picture'
    )
