"""From the bytes of a picture to patches of pixels, as Qwen2.5-VL's processor has them.

1. `read` decodes a file into red, green and blue, within limits; `checked` does so
   once for each file, whoever asks, and holds its size;
2. `resized_size` gives both sides as multiples of a merged patch, with about the
   picture's own proportions and a number of pixels between two limits;
3. `patches` resizes and cuts: merged patches from left to right and from top to bottom,
   the patches of each in the same order, each as channels, rows and columns;
4. `grid` counts the patches without making them;
5. `check_placeholders` counts the places for pictures in a problem.

Pixels stay bytes, a quarter of the floats; the tower normalises them.
"""

import functools
import io
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageOps
from jaxtyping import UInt8

from bapo_jax.models.vision.spec import VisionSpec

PLACEHOLDER = '<image>'  # of a picture in the text of a problem
FORMATS = ('PNG', 'JPEG', 'WEBP', 'BMP', 'GIF')  # those of published data sets
MOST_BYTES = 50_000_000  # of a file
MOST_PIXELS = 1 << 26  # of a picture before it is resized: 200 MB once it is decoded
REMEMBERED = 1 << 17  # files that are decoded once; a run holds the bytes of its own
LONGEST_SIDE = 200  # times the shorter one, as in Qwen's processor


class Patches(NamedTuple):
  """A picture as the tower reads it."""

  pixels_ZE: UInt8[np.ndarray, 'Z E']  # patch by patch: channels, rows, columns
  grid: tuple[int, int]  # patches along height and width


class Checked(NamedTuple):
  """A file that could be decoded."""

  data: bytes  # equal files are one object
  size: tuple[int, int]  # height and width of the upright picture


@functools.lru_cache(maxsize=REMEMBERED)
def checked(data: bytes) -> Checked:
  """The file and the size of its picture, which is decoded once.

  Raises:
    ValueError: as `read`.
  """
  width, height = read(data).size
  return Checked(data, (height, width))


def read(data: bytes) -> PIL.Image.Image:
  """The picture in a file, upright, in RGB; what is transparent lies on white.

  Raises:
    ValueError: it cannot be read, is too large, or is an animation.
  """
  if len(data) > MOST_BYTES:
    raise ValueError(
      f'the picture has {len(data):,} bytes, more than {MOST_BYTES:,}; make it smaller'
    )
  with warnings.catch_warnings():
    # Of very large pictures, which are refused here by their size.
    warnings.simplefilter('ignore', PIL.Image.DecompressionBombWarning)
    try:
      picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
      _check(picture)  # before any pixel is decoded
      return _upright(picture)
    except PIL.UnidentifiedImageError:
      raise ValueError(
        f'{_start(data)} is no picture in {", ".join(FORMATS)}; convert it, or take it '
        'out'
      ) from None
    except PIL.Image.DecompressionBombError:
      raise ValueError(
        f'the picture has more than {MOST_PIXELS:,} pixels; make it smaller'
      ) from None
    except Refused as error:
      raise ValueError(str(error)) from None
    except Exception as error:  # readers raise whatever damaged bytes lead them to
      raise ValueError(
        f'the picture cannot be decoded ({_reason(error)}); write the file again, or '
        'take it out'
      ) from error


class Refused(Exception):
  """A picture that could be read, and is not; holds the sentence."""


def _check(picture: PIL.Image.Image) -> None:
  width, height = picture.size
  if width * height > MOST_PIXELS:
    raise Refused(
      f'the picture has {width} x {height} pixels, more than {MOST_PIXELS:,}; make it '
      'smaller'
    )
  if max(width, height) > LONGEST_SIDE * min(width, height):
    raise Refused(
      f'the picture has {width} x {height} pixels: one side is more than '
      f'{LONGEST_SIDE} times the other; cut or pad it'
    )
  # A photograph may carry a preview of itself (MPO): it is still one picture.
  if getattr(picture, 'is_animated', False) and picture.format != 'MPO':
    raise Refused(
      f'the picture has {getattr(picture, "n_frames", 2)} frames; take one of them'
    )


def _upright(picture: PIL.Image.Image) -> PIL.Image.Image:
  picture = PIL.ImageOps.exif_transpose(picture)
  if picture.mode == 'I' or picture.mode.startswith('I;16'):
    picture = _eight_bits(picture)
  if 'A' in picture.getbands() or picture.info.get('transparency') is not None:
    picture = picture.convert('RGBA')
    white = PIL.Image.new('RGBA', picture.size, (255, 255, 255, 255))
    picture = PIL.Image.alpha_composite(white, picture)
  return picture.convert('RGB')


def _eight_bits(picture: PIL.Image.Image) -> PIL.Image.Image:
  """A grey picture of 16 bits, which Pillow would cut off at 255, in eight."""
  grey_HW = np.asarray(picture).astype(np.int32)
  grey_HW = np.where(grey_HW == picture.info.get('transparency'), 65535, grey_HW)
  return PIL.Image.fromarray(((grey_HW + 128) // 257).clip(0, 255).astype(np.uint8))


def _start(data: bytes) -> str:
  return f'a file that begins with {data[:8]!r}' if data else 'an empty file'


def _reason(error: Exception) -> str:
  text = str(error).strip() or type(error).__name__
  return text.splitlines()[0].rstrip('.')[:100]


def png(pixels_HW3: UInt8[np.ndarray, 'H W 3']) -> bytes:
  """The file of a picture, without loss."""
  file = io.BytesIO()
  PIL.Image.fromarray(pixels_HW3).save(file, 'PNG')
  return file.getvalue()


def resized_size(height: int, width: int, v: VisionSpec) -> tuple[int, int]:
  """(height, width) in pixels after the resize, both multiples of a merged patch.

  Each side is rounded; a picture above v.most_pixels or below v.least_pixels is scaled
  to that number first, and rounded down or up (`smart_resize` of Qwen2-VL, Wang et al.,
  2024, arXiv:2409.12191).
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
  """The patches of a picture in RGB, resized by cubic interpolation."""
  width, height = picture.size
  height, width = resized_size(height, width, v)
  resized = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
  p, m = v.patch, v.merge
  # Rows and columns are cut into merged patches, patches and pixels; channels are last.
  cut = np.asarray(resized).reshape(
    height // (m * p), m, p, width // (m * p), m, p, len(resized.getbands())
  )
  pixels_ZE = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, v.numbers)
  return Patches(np.ascontiguousarray(pixels_ZE), (height // p, width // p))


def grid(data: bytes, v: VisionSpec) -> tuple[int, int]:
  """Patches along height and width of the picture in a file, as `patches` makes them.

  Raises:
    ValueError: as `read`.
  """
  height, width = resized_size(*checked(data).size, v)
  return height // v.patch, width // v.patch


def check_placeholders(problem: str, pictures: Sequence[object]) -> None:
  """Checks that a problem has a place for each of its pictures.

  Raises:
    ValueError: it has more or fewer.
  """
  places = problem.count(PLACEHOLDER)
  if places != len(pictures):
    raise ValueError(
      f'the problem has {places} {PLACEHOLDER} for {len(pictures)} '
      f'picture{"s" * (len(pictures) != 1)}; write one {PLACEHOLDER} where each belongs'
    )
