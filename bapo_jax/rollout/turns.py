"""Keeps the rows of a rollout that are in no slot and have not ended.

1. a row waits to be admitted to a slot, oldest first;
2. when a turn of the row has ended, an environment is asked for a message;
3. with the message, the row waits for a slot again, before rows that have not begun.

A turn also ends with the token that completes a stop string: `stopped` finds it.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Turn(NamedTuple):
  """A turn that has ended, with its row; a device of this process has the row."""

  row: int
  problem: int  # id
  number: int  # turns of the row that have ended
  left: int  # tokens that may follow
  tokens_T: np.ndarray  # prompt, turns and messages
  mask_T: np.ndarray  # what the policy sampled


# Returns the text of each row of tokens.
Read = Callable[[Sequence[Sequence[int]]], Sequence[str]]


def longest(stop: Sequence[str]) -> int:
  """Returns the most tokens that a stop string spans: a token is a byte or more."""
  return max(len(text.encode()) for text in stop)


def stopped(
  read: Read, stop: Sequence[str], turns: Sequence[tuple[Sequence[int], int]]
) -> list[int]:
  """Returns the tokens of each turn up to the first stop string; 0 without one.

  Whether a token completes a stop string depends on the `longest(stop)` tokens before
  it alone, so nothing depends on how many tokens are searched at once.

  Args:
    turns: tokens, at least the `longest(stop)` before those to be searched unless the
      turn is shorter, and how many of them were searched before.
  """
  before = longest(stop)

  def found(text: str) -> bool:
    return any(x in text for x in stop)

  texts = read([tokens for tokens, _ in turns])
  ends = [0] * len(turns)
  for i, (tokens, searched) in enumerate(turns):
    # Most turns have no stop string, and their tokens are read once.
    for end in range(searched + 1, len(tokens) + 1) if found(texts[i]) else ():
      if found(read([tokens[max(0, end - 1 - before) : end]])[0]):
        ends[i] = end
        break
  return ends


class Environment(Protocol):
  """Answers turns, see `rollout.Conversations`."""

  max_turns: int

  def ask(self, turns: Sequence[Turn]) -> None:
    """Asks about turns that have ended."""

  def answers(self, at_least: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields (row, tokens of the message); no tokens end the response.

    Waits for `at_least` answers, and yields all that have arrived.
    """
    ...


class Queue:
  """The rows without a slot; all processes have the same."""

  def __init__(self, waiting: Iterable[int] = (), asked: Iterable[int] = ()):
    self.waiting = collections.deque(waiting)  # oldest first
    self.asked = set(asked)  # rows whose last turn has no answer
    self.answered: dict[int, Sequence[int]] = {}  # row -> message, oldest first

  def hear(self, environment: Environment, at_least: int) -> list[int]:
    """Takes the answers that have arrived; returns the rows that end without one.

    Waits for `at_least` of them.
    """
    ended = []
    for row, tokens in environment.answers(at_least) if self.asked else ():
      self.asked.remove(row)
      if tokens:
        self.answered[row] = tokens
      else:
        ended.append(row)
    return ended

  def block(
    self, size: int, width: Callable[[int], int], idle: bool
  ) -> dict[int, Sequence[int]]:
    """Returns the first `size` answered rows of one width, with their messages.

    Returns an incomplete block only if slots are `idle` or no row is left that could
    complete it; otherwise {}. A row's width depends on its own tokens alone, so that
    other rows change no bit of its result.
    """
    blocks = collections.defaultdict(dict)
    for row, tokens in self.answered.items():
      block = blocks[width(row)]
      block[row] = tokens
      if len(block) == size:
        return block
    if not idle and (self.asked or self.waiting):
      return {}
    return next(iter(blocks.values()), {})
