"""Counts the teaching rows of a batch and their FLOPs, for training benchmarks.

1. `teaching` says which rows of a batch teach, and how long they are;
2. `useful_flops` counts what their gradient must at least take.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training import budget
from bapo_jax.types import Batch
from benchmarks import roofline

PASSES = 3  # forward, and twice as much backward


class Teaching(NamedTuple):
  """Tokens of a batch."""

  trained: int  # sampled by the policy, in a filled seat
  response_R: np.ndarray  # i64, tokens of the responses that teach
  length_R: np.ndarray  # i64, prompt and response of each


def teaching(batch: Batch) -> Teaching:
  """Returns the rows of one optimiser update whose advantage is not zero.

  A row of advantage 0 has no gradient where loss.kl is 0. Rows start at column 0, and
  nothing that is trained on follows their last token.
  """
  mask_BT = np.asarray(batch.loss_mask_BT)
  mask_RT = mask_BT[(mask_BT & (np.asarray(batch.adv_BT) != 0)).any(1)]
  length_R = mask_RT.shape[1] - mask_RT[:, ::-1].argmax(1)
  return Teaching(int(mask_BT.sum()), mask_RT.sum(1), length_R)


def useful_flops(spec: ModelSpec, seen: Iterable[Teaching]) -> float:
  """Counts the FLOPs of the gradients of teaching rows, without recomputation.

  Every token of such a row goes through the layers, and attends to half the row on
  average, in a layer with a window to fewer; the head processes only the tokens of its
  response.
  """
  total = 0.0
  for update in seen:
    for response, length in zip(update.response_R, update.length_R, strict=True):
      once = roofline.forward(spec, budget.keys_read(spec, int(length)))
      total += PASSES * (length * (once.layers + once.attention) + response * once.head)
  return total
