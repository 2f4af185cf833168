"""The record of a made problem, and a loop that draws distinct problems."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import numpy as np

from bapo_jax.data.row import Row

Item = TypeVar('Item')


class Problem(NamedTuple):
  """A made problem with the values that its worked solution is computed from."""

  row: Row
  answer: int
  numbers: tuple[int, ...]
  terms: tuple[int, ...] = ()  # drawn problems: see made/drawn.py

  @property
  def text(self) -> str:
    """The text of the problem."""
    return self.row.problem


# Writes a worked solution: (problem, rng, slip, repeat) -> text. Steps go wrong with
# chance `slip` and are written a second time with chance `repeat`.
Solver = Callable[[Problem, np.random.Generator, float, float], str]


def draw_distinct(
  draw: Callable[[], tuple[Hashable, Item] | None], count: int, source: str, knob: str
) -> list[Item]:
  """Returns the first `count` items with distinct keys.

  Stops after D = 20 * count + 1000 draws, or earlier after n draws in a row without a
  new item while r items are missing, if n r > 50 D. The early stop refuses no call that
  would succeed: n <= D, so r > 50. If a draw is new with chance x/D, which only falls,
  then n draws bring nothing and D bring r with chance < exp(-n x/D) (e x/r)^r exp(-x)
  (Chernoff), which is below 1e-15 for every x.

  Args:
    draw: returns (key, item), or None for a rejected draw.
    count: number of items to return.
    source: what draws, for the error.
    knob: the knob that makes more items distinct, for the error.

  Raises:
    ValueError: there are fewer items.
  """
  draws = 20 * count + 1000  # D
  items: dict[Hashable, Item] = {}
  fruitless = 0  # n
  for _ in range(draws):
    drawn, before = draw(), len(items)
    if drawn:
      items.setdefault(*drawn)
    fruitless = 0 if len(items) > before else fruitless + 1
    missing = count - len(items)  # r
    if not missing:
      return list(items.values())
    if fruitless * missing > 50 * draws:
      break
  raise ValueError(
    f'problems: {source} has about {len(items)} different problems, fewer than train + '
    f'test = {count}; ask for fewer or raise {knob}'
  )
