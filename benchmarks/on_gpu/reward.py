"""Defines a reward that half of all responses earn, so that every group teaches."""

from bapo_jax.rewards.score import Sample


def score(sample: Sample) -> float:
  """Returns 1 if the sum of the response's tokens is even, else 0."""
  return float(sum(map(int, sample.tokens)) % 2 == 0)
