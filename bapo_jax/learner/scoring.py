"""Computes log-probabilities of whole groups with the learner's program.

1. `score` packs responses and runs one micro-batch at a time, without a gradient
   (`packed_logprobs`);
2. `recompute` replaces the sampler's log-probabilities of the tokens that the same
   weights sampled, and measures the difference.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax import sharding
from bapo_jax.learner import pictured
from bapo_jax.learner.pictured import Seen
from bapo_jax.models import logprobs
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Unit
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.types import Groups, LogpDiff, Tree


def packed_logprobs(
  params: Tree,
  tokens_BT: Array,
  wanted_BT: Array,
  *,
  micro_batches: int,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
  temperature: float,
  pictures: Seen = None,
  unit: Unit = Unit(),
  routes_BTX: Array | None = None,
) -> Array:
  """Returns the log-probabilities [B, T] of the wanted tokens, nats; 0 elsewhere.

  Args:
    wanted_BT: bool, the tokens to score; column 0 must be False.
    micro_batches: maximum number of micro-batches, which run one after the other.
    temperature: see `logprobs.token_stats`.
    unit: see `packing.pack`.
    pictures: see `pictured.pack`; pixels are embedded with the tower of `params`.
    routes_BTX: recorded routes, see `types.Batch`.
  """
  seen = None
  if pictures is not None:
    seen = sequence.embedded(params, pictures, spec, schedule)
  packed = pictured.pack(
    tokens_BT, wanted_BT, micro_batches, spec, seen, unit=unit, routes_BTX=routes_BTX
  )
  patch_XD = pictured.Variables(params).patches(seen)

  # Computed like the forward pass of the gradient, so the first ratios of a step are 1.
  def add(n, logp_BT):
    stats = logprobs.packed_stats(
      params,
      packed.cells(n),
      spec,
      temperature,
      patch_XD=patch_XD,
      schedule=schedule,
    )
    return logp_BT + packed.unpack(stats.logp_BT, n)

  nothing_BT = jnp.zeros(tokens_BT.shape, jnp.float32)
  return sharding.constrain_rows(
    jax.lax.fori_loop(0, packed.used, add, sharding.constrain_rows(nothing_BT))
  )


def score(
  params: Tree,
  groups: Groups,
  pictures: Seen = None,
  *,
  rows: int,
  spec: ModelSpec,
  **knobs: Any,
) -> Array:
  """Returns the log-probabilities [P, G, T] of the responses, nats; 0 elsewhere.

  Args:
    pictures: pictures of the groups' problems; None for text only.
    rows: full-length responses per micro-batch; shorter responses are packed together.
    knobs: the other arguments of `packed_logprobs`.
  """
  P, G, T = groups.tokens_PGT.shape
  routes_BTX = None
  if groups.routes_PGTX is not None and spec.routes:
    routes_BTX = groups.routes_PGTX.reshape(P * G, T, -1)
  logp_BT = packed_logprobs(
    params,
    groups.tokens_PGT.reshape(-1, T),
    groups.response_mask_PGT.reshape(-1, T),
    micro_batches=-(-P * G // rows),
    spec=spec,
    pictures=pictures,
    routes_BTX=routes_BTX,
    **knobs,
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
  """Replaces the sampler's log-probabilities by the learner's.

  Sampler and learner round differently: in bfloat16 by more than narrow clip bounds
  allow. If the learner computes both sides of a ratio, the ratio starts at 1 (verl also
  recomputes `old_log_probs` with its actor). Tokens that older weights sampled (partial
  rollouts) keep the sampler's numbers, because those weights no longer exist.

  Args:
    params: the weights of learner step `version`; only their tokens get new numbers.
    score: (params, groups, pictures) -> log-probabilities [P, G, T], nats.

  Returns:
    (groups, difference between the log-probabilities of sampler and learner).
  """
  # Tokens of other weights keep the sampler's numbers: their policy is gone.
  same_PGT = groups.response_mask_PGT & (groups.policy_version_PGT == version)
  logp_PGT = score(params, groups, pictures)
  diff_PGT = jnp.where(same_PGT, jnp.abs(logp_PGT - groups.behavior_logp_PGT), 0)
  logp_PGT = jnp.where(same_PGT, logp_PGT, groups.behavior_logp_PGT)
  diff = LogpDiff(diff_PGT.sum(), diff_PGT.max(), same_PGT.sum())
  groups = groups._replace(behavior_logp_PGT=logp_PGT)
  return sharding.constrain_rows(groups), diff
