"""Log-probabilities of whole groups under given weights, by the learner's program.

1. `score` computes them, packed, a micro-batch at a time, without a gradient, by
   `packed_logprobs`;
2. `recompute` puts them in place of the sampler's, where the weights are those that
   sampled, and measures how far the two were apart.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.learner import pictured
from bapo_jax.learner.pictured import Seen
from bapo_jax.models import logprobs
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.types import Groups, LogpDiff, Tree


class Recompute(Protocol):
  """The learner's log-probabilities in place of the sampler's, jitted."""

  def __call__(
    self, params: Tree, groups: Groups, version: int, pictures: Seen, /
  ) -> tuple[Groups, LogpDiff]:
    """See `recompute`."""


def packed_logprobs(
  params: Tree,
  tokens_BT: Array,
  wanted_BT: Array,
  *,
  micro_batches: int,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
  temperature: float,
  chunk: int,
  pictures: Seen = None,
) -> Array:
  """Log-probabilities [B, T] of the wanted tokens of rows, 0 elsewhere.

  Args:
    wanted_BT: bool, none in column 0.
    micro_batches: the most of them, one after the other.
    temperature, chunk: see `logprobs.packed_stats`.
    pictures: see `pictured.pack`; pixels are embedded by the tower of these weights.
  """
  seen = (
    None if pictures is None else sequence.embedded(params, pictures, spec, schedule)
  )
  packed = pictured.pack(tokens_BT, wanted_BT, micro_batches, spec, seen)
  patch_XD = pictured.Variables(params).patches(seen)

  def add(n: Array, logp_BT: Array) -> Array:
    cells = packed.cells(n)
    stats = logprobs.packed_stats(
      params,
      cells,
      spec,
      temperature,
      chunk=chunk,
      patch_XD=patch_XD,
      schedule=schedule,
    )
    return logp_BT + packed.unpack(stats.logp_BT, n)

  nothing_BT = jnp.zeros(tokens_BT.shape, jnp.float32)
  return jax.lax.fori_loop(0, packed.used, add, nothing_BT)


def score(
  params: Tree,
  groups: Groups,
  pictures: Seen = None,
  *,
  rows: int,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
  temperature: float,
  chunk: int,
) -> Array:
  """Log-probabilities [P, G, T] of the responses of groups, 0 elsewhere.

  Args:
    pictures: of the groups' problems.
    rows: responses of a micro-batch, if all are of full length; packed, it takes more.
  """
  P, G, T = groups.tokens_PGT.shape
  logp_BT = packed_logprobs(
    params,
    groups.tokens_PGT.reshape(-1, T),
    groups.response_mask_PGT.reshape(-1, T),
    micro_batches=-(-P * G // rows),
    spec=spec,
    schedule=schedule,
    temperature=temperature,
    chunk=chunk,
    pictures=pictures,
  )
  return logp_BT.reshape(P, G, T)


def recompute(
  params: Tree,
  groups: Groups,
  version: int | Array,
  pictures: Seen = None,
  *,
  score: Callable[[Tree, Groups, Seen], Array],
) -> tuple[Groups, LogpDiff]:
  """The groups with the learner's log-probabilities in place of the sampler's.

  Two programs round differently: in bfloat16 by more than narrow clip bounds allow.
  Ratios of one program alone start at 1 (as verl recomputes `old_log_probs` with its
  actor). Tokens that other weights sampled, a partial rollout's older ones, retain the
  sampler's numbers: the weights that could score them are gone.

  Args:
    params: the weights that sampled, of learner step `version`.
    pictures: of the groups' problems.

  Returns:
    (groups, how far the two were apart before).
  """
  own_PGT = groups.response_mask_PGT & (groups.policy_version_PGT == version)
  logp_PGT = score(params, groups, pictures)
  diff_PGT = jnp.where(own_PGT, jnp.abs(logp_PGT - groups.behavior_logp_PGT), 0)
  logp_PGT = jnp.where(own_PGT, logp_PGT, groups.behavior_logp_PGT)
  diff = LogpDiff(diff_PGT.sum(), diff_PGT.max(), own_PGT.sum())
  return groups._replace(behavior_logp_PGT=logp_PGT), diff
