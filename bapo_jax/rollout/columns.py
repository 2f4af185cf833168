"""Which columns of a row: buckets of prompts, segments of the cache, and what fits.

Shapes are few, so that all of them are compiled once, at the start.
"""

import itertools
import math

import numpy as np

from bapo_jax.models import transformer
from bapo_jax.types import Prompts, agree

SHORTEST = 64  # columns of the smallest prefill; buckets double from here
ALIGN = 128  # segments of long rows are whole tiles of a TPU


def buckets(width: int) -> list[int]:
  """Widths that prompts are prefilled at: powers of two from 64, and the widest."""
  n = max(0, math.ceil(math.log2(max(width, 1) / SHORTEST)))
  return [SHORTEST << i for i in range(n)] + [width]


def segments(length: int, parts: int) -> list[int]:
  """Columns of each segment of the cache: `parts` of them or fewer, about equal."""
  size = -(-length // parts)
  if length >= 8 * ALIGN:
    size = -(-size // ALIGN) * ALIGN
  sizes = [size] * (length // size)
  return sizes + [length % size] if length % size else sizes


def reach(sizes: list[int], columns: int) -> int:
  """How many segments hold the first `columns` columns."""
  ends = itertools.accumulate(sizes)
  return 1 + next((i for i, end in enumerate(ends) if end >= columns), len(sizes) - 1)


def check(spec: transformer.ModelSpec, width: int, new: int, eos) -> None:
  """Raises ValueError unless rows of these sizes can be written and can end."""
  check_length(spec.positions, width, new)
  if new < 1:
    raise ValueError(f'sampler.new={new} leaves no room for a response; give 1 or more')
  if not eos or not all(0 <= token < spec.vocab for token in eos):
    raise ValueError(
      f'end tokens {tuple(eos)}: give at least one, each below the vocabulary of '
      f'{spec.vocab}'
    )


def check_length(positions: int, width: int, new: int) -> None:
  """Raises ValueError where a row is longer than the model's positions."""
  if width + new > positions:
    raise ValueError(
      f"prompt {width} + response {new} tokens exceed the model's {positions} "
      'positions; lower sampler.new or prompts.width'
    )


def check_prompts(prompts: Prompts) -> None:
  """Raises ValueError unless every prompt fits its columns; names the row."""
  agree(id_P=prompts.id_P, tokens_PT=prompts.tokens_PT, length_P=prompts.length_P)
  width = prompts.tokens_PT.shape[1]
  long_P = np.flatnonzero(prompts.length_P > width)
  if len(long_P):
    raise ValueError(
      f'row {long_P[0]}: a prompt of {prompts.length_P[long_P[0]]} tokens stands in '
      f'{width} columns; raise prompts.width'
    )
