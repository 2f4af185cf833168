"""From groups to new weights: several optimiser updates on one batch.

1. `flatten` gives every response its advantage and masks out what must not teach;
2. `update` visits the batch `epochs` times, each time in disjoint minibatches of one
   size, as many as its filled seats need;
3. `learn` is one optimiser update, jitted: bounds and `gradient`, step, diagnosis.

Staleness is epochs x minibatches: the number of updates made from one full batch.
The learner is blind to the method: it is handed a clip, a loss and an advantage rule.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.learner import objective as objective_lib
from bapo_jax.learner.objective import Objective
from bapo_jax.learner.pictured import Seen
from bapo_jax.runtime import exchange
from bapo_jax.types import (
  AdvantageRule,
  Batch,
  Groups,
  Tree,
  UpdatedTokens,
  take,
  trained_on,
)

TOKENS = 'tokens'  # beside the metrics of an update: its UpdatedTokens


class TrainStep(Protocol):
  """One optimiser update, jitted."""

  def __call__(
    self, params: Tree, opt: Tree, batch: Batch
  ) -> tuple[Tree, Tree, dict[str, Any]]:
    """(params, opt, metrics); params and opt are donated.

    Beside the metrics TOKENS may stand: what the update made of each token.
    """


class Updated(NamedTuple):
  """One optimiser update, for the record of its step."""

  seats_P: np.ndarray  # of the batch: its groups, in the order of the rows of `tokens`
  metrics: dict[str, Array]
  tokens: UpdatedTokens | None = None  # None if the train step does not record them


def flatten(
  groups: Groups,
  source_P: Array,
  advantage_rule: AdvantageRule,
  prox_PGT: Array | None = None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  version: int | Array = -1,
  pictures: Seen = None,
) -> Batch:
  """The flat batch [P*G, T]; an empty seat and a masked response teach nothing.

  Args:
    source_P: index into types.SOURCES, -1 for an empty seat.
    prox_PGT: log-probabilities of the proximal policy; None: those of the behaviour.
    weights: what a row of each of types.SOURCES counts for; it multiplies the
      advantage, so that clip rules see it too.
    version: learner step of the weights that the first update starts from; -1 where
      none of the tokens is theirs.
    pictures: of the groups' problems.
  """
  P, G, T = groups.tokens_PGT.shape
  teaches_PG = groups.teaches_PG & (source_P >= 0)[:, None]
  loss_mask_PGT = groups.response_mask_PGT & teaches_PG[..., None]
  on_policy_PGT = groups.response_mask_PGT & (groups.policy_version_PGT == version)
  prox_PGT = groups.behavior_logp_PGT if prox_PGT is None else prox_PGT
  weight_P = jnp.asarray(weights, jnp.float32)[source_P]
  return Batch(
    tokens_BT=groups.tokens_PGT.reshape(P * G, T),
    loss_mask_BT=loss_mask_PGT.reshape(P * G, T),
    behavior_logp_BT=groups.behavior_logp_PGT.reshape(P * G, T),
    prox_BT=prox_PGT.reshape(P * G, T),
    adv_B=(advantage_rule(groups.reward_PG) * weight_P[:, None]).reshape(P * G),
    source_B=jnp.repeat(source_P, G),
    on_policy_BT=on_policy_PGT.reshape(P * G, T),
    pictures=pictures,
  )


def update(
  params: Tree,
  opt: Tree,
  groups: Groups,
  source_P: Array,
  key: Array,
  *,
  train_step: TrainStep,
  advantage_rule: AdvantageRule,
  epochs: int,
  minibatches: int,
  proximal: Callable[[Tree, Groups, Seen], Array] | None = None,
  pictures: Seen = None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  place: Callable[[Batch], Batch] = lambda batch: batch,
  version: int = -1,
) -> tuple[Tree, Tree, list[Updated]]:
  """Runs epochs x minibatches optimiser updates; returns (params, opt, updates).

  Groups stay whole: a minibatch is a random set of prompts, so that what a group says
  about its own mean is never torn apart. An underfilled batch gets fewer updates, see
  `_minibatches`; one without a token to train on gets none: the list is empty.

  Args:
    weights, version, pictures: see `flatten`.
    proximal: (params, groups, pictures) -> log-probabilities [P, G, T] of the weights
      before the first update, for the loss rules that ask; None for those that do not.
    place: puts a batch onto the mesh.
  """
  source_P = jnp.where(trained_on(groups).any(1), source_P, -1)
  filled_P = exchange.whole(source_P >= 0)
  if not filled_P.any():
    return params, opt, []
  prox_PGT = None if proximal is None else proximal(params, groups, pictures)
  updates = []
  for epoch_key in jax.random.split(key, epochs):
    order_P = np.asarray(jax.random.permutation(epoch_key, len(filled_P)))
    for part in _minibatches(order_P, filled_P, minibatches):
      batch = place(
        _part(
          (groups, source_P, prox_PGT, pictures), part, version, advantage_rule, weights
        )
      )
      params, opt, found = train_step(params, opt, batch)
      metrics = {k: v for k, v in found.items() if k != TOKENS}
      updates.append(Updated(part, metrics, found.get(TOKENS)))
  return params, opt, updates


def _minibatches(
  order_P: np.ndarray, filled_P: np.ndarray, minibatches: int
) -> list[np.ndarray]:
  """Seats of each minibatch, all of P / `minibatches` seats: what is compiled once.

  n filled seats make ceil(n / size) minibatches, their filled seats as even in number
  as can be; empty seats fill them up. (The public code of Batch Adaptation PO splits
  by size as well: a batch that is half empty does not take as many steps.)

  Args:
    order_P: a permutation of the seats.
  """
  size = len(order_P) // minibatches
  filled, empty = order_P[filled_P[order_P]], order_P[~filled_P[order_P]]
  parts = []
  for part in np.array_split(filled, -(-len(filled) // size)):
    pad, empty = np.split(empty, [size - len(part)])
    parts.append(np.concatenate([part, pad]))
  return parts


@functools.partial(jax.jit, static_argnames=('advantage_rule', 'weights'))
def _part(whole, part, version, advantage_rule, weights) -> Batch:
  groups, source_P, prox_PGT, pictures = take(whole, part)
  return flatten(groups, source_P, advantage_rule, prox_PGT, weights, version, pictures)


def learn(
  params: Tree,
  opt: Tree,
  batch: Batch,
  base: Tree = None,
  *,
  tx: optax.GradientTransformation,
  objective: Objective,
  record: bool = False,
) -> tuple[Tree, Tree, dict[str, Any]]:
  """One optimiser update on one minibatch; returns (params, opt, metrics).

  It is skipped, and counted in learner/skipped, where loss or gradient is not finite,
  or what the sampler recorded: rows without an advantage are not computed, and would
  not tell that the weights are lost.

  Args:
    base: see `objective.gradient`.
    record: TOKENS stands beside the metrics.
  """
  value, grads, (stats, bounds) = objective_lib.gradient(params, batch, objective, base)
  scale_B = loss.row_scale(batch.loss_mask_BT, objective.aggregate, objective.length)
  computed = objective.computed(batch)
  own_BT = computed.loss_mask_BT & batch.on_policy_BT
  diff_BT = jnp.where(own_BT, jnp.abs(stats.logp_BT - batch.behavior_logp_BT), 0)
  norm = optax.tree.norm(grads)
  sampled_BT = jnp.where(batch.loss_mask_BT, batch.behavior_logp_BT, 0)
  finite = jnp.isfinite(value) & jnp.isfinite(norm) & jnp.isfinite(sampled_BT).all()
  rule = objective.loss_rule
  metrics: dict[str, Any] = diagnostics.diagnose(
    rule, stats, computed, bounds, scale_B
  ) | {
    'loss/value': value,
    'learner/grad_norm': norm,
    'learner/skipped': ~finite,
    'learner/tokens': batch.loss_mask_BT.sum(),
    'learner/tokens_computed': computed.loss_mask_BT.sum(),
    'rollout/logp_diff': diff_BT.sum() / own_BT.sum(),
    'rollout/logp_diff_max': jnp.where(own_BT.any(), diff_BT.max(), jnp.nan),
  }

  if record:
    metrics[TOKENS] = diagnostics.updated_tokens(rule, stats.logp_BT, computed, bounds)

  def apply(state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    params, opt = state
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt

  # No seat earned, no update: moments alone would carry the weights on. And one number
  # that is not finite would spoil moments and weights for good. A `where` between old
  # and new would take as long again as the update: it is memory alone.
  sound = batch.loss_mask_BT.any() & finite
  params, opt = jax.lax.cond(sound, apply, lambda state: state, (params, opt))
  return params, opt, metrics
