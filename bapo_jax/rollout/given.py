"""Puts given responses, solutions of the data set, into seats of the groups of a round.

Given responses are verified and compared like sampled ones, and train by their own
objective (`loss.from_given`).
"""

from typing import NamedTuple

import numpy as np

from bapo_jax.data import conversation
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.conversation import Between
from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Solution
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.types import Prompts


class Given(NamedTuple):
  """A response that no policy sampled."""

  tokens: list[int]
  sampled: list[bool]  # False in messages
  turns: int


def encode(tokenizer: Tokenizer, b: Between, solution: Solution) -> Given:
  """Returns a solution as tokens; every turn ends with the end token."""
  parts = [solution] if isinstance(solution, str) else solution
  tokens = []
  sampled = []
  for i, text in enumerate(parts):
    if i % 2:
      ids = conversation.tokens_of(tokenizer, b, text, tokens[-1])
    else:
      (ids,) = tokenizer_lib.encode(tokenizer, [text])
      ids = [*ids, tokenizer.eos[0]]
    tokens += ids
    sampled += [i % 2 == 0] * len(ids)
  return Given(tokens, sampled, len(parts[::2]))


def responses(
  problems: Problems,
  prompts: Prompts,
  tokenizer: Tokenizer,
  b: Between,
  *,
  seats: int,
  longest: int,
  purpose: tuple[int, ...],
) -> list[Given | None]:
  """Returns `seats` solutions per prompt, drawn without repeats, prompt by prompt.

  None stands for a solution that is missing, or has more than `longest` tokens: the
  policy samples in its seat.

  Args:
    purpose: numbers that determine the draw, together with the problem.
  """
  given: list[Given | None] = []
  for problem in prompts.id_P.tolist():
    solutions = problems.rows[problem].solutions if problem >= 0 else ()
    rng = np.random.default_rng((*purpose, max(problem, 0)))
    if callable(solutions):
      drawn = [solutions(rng, 0.0, 0.0) for _ in range(seats)]
    else:
      drawn = [solutions[i] for i in rng.permutation(len(solutions))[:seats]]
    encoded = [encode(tokenizer, b, solution) for solution in drawn]
    fitting = [x for x in encoded if len(x.tokens) <= longest]
    given += [*fitting, *[None] * (seats - len(fitting))]
  return given
