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


# Writes a worked solution: (problem, rng, slip, repeat) -> text. Steps go wrong with
# chance `slip` and are written a second time with chance `repeat`.
Solver = Callable[[Problem, np.random.Generator, float, float], str]


def draw_distinct(
  draw: Callable[[], tuple[Hashable, Item] | None], count: int, source: str, knob: str
) -> list[Item]:
  """Returns the first `count` items with distinct keys.

  `draw` returns (key, item), or None to reject a draw; errors name `source` and `knob`.

  Gives up after D = 20 * count + 1000 draws, or earlier, if n r > 50 D: r items are
  missing, and the last n draws found none. This early stop almost never fails a call
  that would succeed. As n <= D, r > 50. Let x/D be the chance that a draw is new, which
  only falls. That n draws find nothing and D draws then find r items has a chance below
  exp(-n x/D) (e x/r)^r exp(-x) (Chernoff bound), less than 1e-15 for every x.

  Raises:
    ValueError: there are fewer than `count` distinct items.
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
    f'test = {count}; lower problems.train or problems.test, or raise {knob}'
  )
