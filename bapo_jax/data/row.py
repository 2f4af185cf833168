"""The record of one problem and its answer, whatever its source."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# A worked solution: a text, or turns and messages of an environment in turn.
Solution = str | tuple[str, ...] | list[str]
# Writes a new solution: (rng, slip, repeat) -> solution. A step goes wrong with chance
# `slip`, and is written a second time with chance `repeat`.
Solver = Callable[[np.random.Generator, float, float], Solution]


class Row(NamedTuple):
  problem: str  # as the data set states it; the template is applied later
  answer: str  # as the verifier reads it
  verifier: str = ''  # rule that verifies the answer; '': rewards.rule
  system: str = ''  # system message before the problem; '': none
  pictures: tuple[bytes, ...] = ()  # image files (PNG, JPEG, ...), in order; (): none
  fields: str = ''  # all fields of the data set's row as JSON; '': not kept
  # Solutions that a warm start imitates, or a function that writes them; (): none.
  solutions: tuple[Solution, ...] | Solver = ()
  rank: int = 0  # the warm start numbers the rows by rank, then as they come
  # (role, text) of the turns between the system message and the problem.
  history: tuple[tuple[str, str], ...] = ()
  set: str = ''  # name of its held-out set; '': sets have no names

  @property
  def texts(self) -> list[str]:
    """Returns the texts of the prompt, in order."""
    return [self.system, *(text for _, text in self.history), self.problem]

  def solution(self, rng: np.random.Generator, slip: float, repeat: float) -> Solution:
    """Returns one of the solutions at random, or a new one."""
    if callable(self.solutions):
      return self.solutions(rng, slip, repeat)
    return self.solutions[rng.integers(len(self.solutions))]
