"""The common look of the figures that matplotlib draws: colours, size and axes."""

from typing import TYPE_CHECKING

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
