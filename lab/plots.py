"""The common look of the figures that matplotlib draws: colours, size, axes, file."""

import io
import os
from typing import TYPE_CHECKING

from bapo_jax.runtime import files

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#777777'  # colour-blind readers see three


def new_figure(width: float, height: float, dpi: int) -> 'Figure':
  """Makes an empty figure of this size in inches, which arranges its axes."""
  # Imported here because matplotlib is slow to import.
  from matplotlib.figure import Figure
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
  return Figure(figsize=(width, height), dpi=dpi, layout=layout)


def dress(ax: 'Axes', title: str) -> None:
  """Sets the title and the style of the axes."""
  ax.set_title(title, loc='left', fontsize=11, fontweight='bold')
  ax.spines[['top', 'right']].set_visible(False)
  ax.tick_params(labelsize=9)


def save(figure: 'Figure', path: str | os.PathLike[str], dpi: int) -> None:
  """Writes a small PNG file; equal numbers give equal files."""
  picture = io.BytesIO()
  # Without the version of matplotlib.
  figure.savefig(picture, format='png', dpi=dpi, metadata={'Software': None})
  files.write(path, with_256_colours(picture.getvalue()))


def with_256_colours(png: bytes) -> bytes:
  """Returns a picture as a PNG of 256 colours, which has a third of the usual size."""
  from PIL import Image  # matplotlib needs it

  picture = io.BytesIO()
  image = Image.open(io.BytesIO(png)).convert('RGB')
  image.quantize(dither=Image.Dither.NONE).save(picture, 'PNG', optimize=True)
  return picture.getvalue()
