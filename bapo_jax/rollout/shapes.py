"""Chooses the few shapes for which decoding is compiled at the start of a run.

1. prompts are prefilled at a handful of widths (`prefill_widths`);
2. the KV cache is split into segments (`cache_columns`), and attention reads only the
   segments that a slot has reached.
"""

import itertools
import math

from bapo_jax.models import decoder
from bapo_jax.models.transformer import ModelSpec

SHORTEST = 64  # columns of the smallest prefill width; the next widths double
ALIGN = 128  # tile of a TPU; segments of long rows are multiples


def prefill_widths(max_prompt_tokens: int) -> list[int]:
  """Returns the prefill widths: 64, 128, ... below the maximum, then the maximum."""
  n = max(0, math.ceil(math.log2(max(max_prompt_tokens, 1) / SHORTEST)))
  return [SHORTEST << i for i in range(n)] + [max_prompt_tokens]


def prefill_width(max_prompt_tokens: int, columns: int) -> int:
  """Returns the smallest prefill width that holds this number of columns."""
  return next(n for n in prefill_widths(max_prompt_tokens) if n >= columns)


def cache_columns(spec: ModelSpec, length: int, parts: int) -> list[int]:
  """Returns the columns of each segment of the KV cache, for rows of `length` tokens.

  There is a single segment if the kernel skips the free columns of each slot.
  """
  if decoder.is_ragged(spec):
    return [-(-length // ALIGN) * ALIGN]
  return segment_sizes(length, parts)


def segment_sizes(length: int, parts: int) -> list[int]:
  """Splits `length` cache columns into at most `parts` segments of similar size."""
  size = -(-length // parts)
  if length >= 8 * ALIGN:
    size = -(-size // ALIGN) * ALIGN
  sizes = [size] * (length // size)
  return sizes + [length % size] if length % size else sizes


def segments_reached(sizes: list[int], columns: int) -> int:
  """Returns the number of segments that contain the first `columns` columns."""
  ends = itertools.accumulate(sizes)
  return 1 + next((i for i, end in enumerate(ends) if end >= columns), len(sizes) - 1)
