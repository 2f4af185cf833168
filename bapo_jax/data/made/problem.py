"""The record of a generated problem, and a loop that draws distinct problems."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import numpy as np

from bapo_jax.data.row import Row

Item = TypeVar('Item')


class Problem(NamedTuple):
  """A generated problem with the values from which its solution is computed."""

  row: Row
  answer: int
  numbers: tuple[int, ...]
  terms: tuple[int, ...] = ()  # drawn problems: see made/drawn.py

  @property
  def text(self) -> str:
    """Returns the text of the problem, before it is put into the template."""
    return self.row.problem


# Writes a worked solution: (problem, rng, slip, repeat) -> text, or turns and messages
# of an environment in turn. Steps go wrong with chance `slip` and are written a second
# time with chance `repeat`.
Solver = Callable[[Problem, np.random.Generator, float, float], str | list[str]]


def draw_distinct(
  draw: Callable[[], tuple[Hashable, Item] | None], count: int, source: str, knob: str
) -> list[Item]:
  """Returns the first `count` items with distinct keys.

  `draw` returns (key, item), or None to reject a draw; errors name `source` and `knob`.

  Raises:
    ValueError: there are fewer than `count` distinct items.
  """
  items: dict[Hashable, Item] = {}
  for _ in range(20 * count + 1000):
    if drawn := draw():
      items.setdefault(*drawn)
    if len(items) == count:
      return list(items.values())
  raise ValueError(
    f'problems: {source} has about {len(items)} different problems, fewer than train + '
    f'test = {count}; lower problems.train or problems.test, or raise {knob}'
  )
