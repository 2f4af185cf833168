"""A graded reward to copy: parts for the answer, its form and its length.

  .venv/bin/python -m bapo_jax.main --config=examples/own_config.py

Keyword-only arguments are knobs: --config.rewards.custom.brief=0.2. The sum of the
parts is the reward; every part has a curve of its own (reward/answer, ...). A response
counts as right from `rewards.right_from` on.
"""

import re


def score(
  sample,
  *,
  answer: float = 0.8,
  boxed: float = 0.1,
  brief: float = 0.1,
  most_tokens: int = 28,
) -> dict[str, float]:
  """Returns the parts of the reward of a response."""
  boxes = re.findall(r'\\boxed\{([^}]*)\}', sample.response)
  return {
    'answer': answer * (boxes[-1:] == [sample.answer]),
    'boxed': boxed * (len(boxes) == 1),
    'brief': brief * (len(sample.tokens) <= most_tokens),
  }
