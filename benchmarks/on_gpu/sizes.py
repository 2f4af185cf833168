"""Defines the sizes of an RL step, the same for the project and for torch."""

import os
from typing import NamedTuple

PROMPT = 128  # tokens of every problem that models.py writes
IS_SMALL = bool(os.environ.get('SMALL'))  # a dry run


class Sizes(NamedTuple):
  """Holds the numbers of an RL step of on-policy batches of equal rows."""

  prompts: int  # problems of a step
  group: int  # responses to each
  prompt: int  # tokens of each problem
  new: int  # tokens of each response
  slots: int  # decoded at once
  updates: int  # of the optimiser per step
  pieces: int  # micro-batches of an update
  steps: int  # counted, after one that compiles

  @property
  def rows(self) -> int:
    """The responses of a step."""
    return self.prompts * self.group

  @property
  def length(self) -> int:
    """The tokens of a row."""
    return self.prompt + self.new


# 256 rows of 512 tokens, 4 updates of 64 rows, 16 rows (8,192 tokens) at a time.
FULL = Sizes(32, 8, PROMPT, 384, 256, 4, 4, 4)
SMALL = Sizes(4, 4, PROMPT, 16, 16, 2, 2, 1)
CHOSEN = SMALL if IS_SMALL else FULL
LR = 1e-6
