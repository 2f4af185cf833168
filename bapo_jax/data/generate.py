"""Helpers of functions that generate problems from a seed."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar('Item')


def draw_distinct(
  draw: Callable[[], tuple[Hashable, Item] | None], count: int, knob: str
) -> list[Item]:
  """Returns the first `count` items with distinct keys.

  `draw` returns (key, item), or None to reject a draw. The error advises to raise
  `knob`.

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
    f'there are about {len(items)} different problems, fewer than train + test = '
    f'{count}; lower train or test, or raise {knob}'
  )


def of_split(split: str, items: Sequence[Item], train: int) -> list[tuple[int, Item]]:
  """Returns (number, item) of a split; the first `train` items are for training.

  Items come in the order in which tensorflow-datasets served them, by the MD5 sum of
  split and number: recorded runs number their problems so.
  """
  numbers = range(train) if split == 'train' else range(train, len(items))
  order = sorted(numbers, key=lambda i: hashlib.md5(f'{split}{i}'.encode()).digest())
  return [(i, items[i]) for i in order]
