"""From groups to new weights: several optimiser updates on one batch.

1. `flatten` gives every response its advantage and masks out what must not teach;
2. `update` visits the batch `epochs` times, each time in disjoint minibatches of one
   size, as many as its filled seats need;
3. `learn` is one optimiser update, jitted: bounds and `gradient`, step, diagnosis.

Staleness is epochs x minibatches: the number of updates made from one full batch.
The learner is blind to the method: it is handed a clip, a loss and an advantage rule.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.algorithms.knobs import Aggregate, KlDirection, LossConfig
from bapo_jax.models import logprobs
from bapo_jax.models.knobs import LogprobsConfig
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import (
  AdvantageRule,
  Batch,
  Bounds,
  ClipRule,
  FindBounds,
  Groups,
  LossRule,
  TokenStats,
  Tree,
  take,
  trained_on,
)


class TrainStep(Protocol):
  """One optimiser update, jitted."""

  def __call__(
    self, params: Tree, opt: Tree, batch: Batch
  ) -> tuple[Tree, Tree, dict[str, Array]]:
    """(params, opt, metrics); params and opt are donated."""


def flatten(
  groups: Groups,
  source_P: Array,
  advantage_rule: AdvantageRule,
  prox_PGT: Array | None = None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  version: int | Array = -1,
) -> Batch:
  """The flat batch [P*G, T]; an empty seat and a masked response teach nothing.

  Args:
    source_P: index into types.SOURCES, -1 for an empty seat.
    prox_PGT: log-probabilities of the proximal policy; None: those of the behaviour.
    weights: what a row of each of types.SOURCES counts for; it multiplies the
      advantage, so that clip rules see it too.
    version: learner step of the weights that the first update starts from; -1 where
      none of the tokens is theirs.
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
  proximal: Callable[[Tree, Groups], Array] | None = None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  place: Callable[[Batch], Batch] = lambda batch: batch,
  version: int = -1,
) -> tuple[Tree, Tree, list[dict[str, Array]]]:
  """epochs x minibatches optimiser updates; returns (params, opt, list of metrics).

  Groups stay whole: a minibatch is a random set of prompts, so that what a group says
  about its own mean is never torn apart. An underfilled batch gets fewer updates, see
  `_minibatches`; one without a token to train on gets none: the list is empty.

  Args:
    weights, version: see `flatten`.
    proximal: (params, groups) -> log-probabilities [P, G, T] of the weights before the
      first update, for the loss rules that ask for them; None for those that do not.
    place: puts a batch onto the mesh.
  """
  source_P = jnp.where(trained_on(groups).any(1), source_P, -1)
  filled_P = np.asarray(source_P >= 0)
  if not filled_P.any():
    return params, opt, []
  prox_PGT = None if proximal is None else proximal(params, groups)
  metrics = []
  for epoch_key in jax.random.split(key, epochs):
    order_P = np.asarray(jax.random.permutation(epoch_key, len(filled_P)))
    for part in _minibatches(order_P, filled_P, minibatches):
      batch = place(
        _part(groups, source_P, prox_PGT, part, version, advantage_rule, weights)
      )
      params, opt, found = train_step(params, opt, batch)
      metrics.append(found)
  return params, opt, metrics


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
def _part(groups, source_P, prox_PGT, part, version, advantage_rule, weights) -> Batch:
  groups, source_P, prox_PGT = take((groups, source_P, prox_PGT), part)
  return flatten(groups, source_P, advantage_rule, prox_PGT, weights, version)


@dataclasses.dataclass(frozen=True)
class Objective:
  """What an update maximises, and how it is computed.

  Args:
    temperature: of sampling: the policy is the distribution that was sampled from.
    chunk: see `logprobs.token_logprobs`.
    grad_accum_steps: micro-batches of a minibatch, their gradients summed.
    bounds_scope: 'minibatch' or 'micro_batch', see `gradient`.
    aggregate, length: see `loss.row_scale`.
    kl, kl_direction: cost per nat of `loss.divergence`, and its direction. A penalty
      is no part of the policy gradient whose share a clip rule balances.
  """

  clip_rule: ClipRule
  loss_rule: LossRule
  spec: ModelSpec
  temperature: float
  chunk: int = LogprobsConfig().chunk
  grad_accum_steps: int = 1
  bounds_scope: str = 'minibatch'
  aggregate: Aggregate = 'token'
  length: int = 1
  kl: float = 0.0
  kl_direction: KlDirection = LossConfig().kl_direction

  def token_stats(self, params: Tree, tokens_BT: Array) -> TokenStats:
    """Statistics of each token under these parameters."""
    return logprobs.sequence_stats(
      params, tokens_BT, self.spec, self.temperature, chunk=self.chunk
    )

  def search(self, logp_BT: Array, batch: Batch, scale_B: Array) -> FindBounds:
    """The bound search over the tokens of this batch; no gradient flows through it.

    Args:
      scale_B: of `loss.row_scale`, so that rows count as they do in the gradient.
    """
    logp_BT = jax.lax.stop_gradient(logp_BT)
    weigh = loss.weigher(self.loss_rule, logp_BT, batch, scale_B)

    def find(ratio_BT: Array) -> Bounds:
      # The barrier keeps a rule's arithmetic out of the loss's: where no token is
      # clipped, every rule gives the same gradient to the last bit.
      bounds = self.clip_rule(jax.lax.stop_gradient(ratio_BT), batch, weigh)
      return jax.lax.optimization_barrier(bounds)

    return find

  def loss(
    self, params: Tree, part: Batch, scale_B: Array, bounds: Bounds | None
  ) -> tuple[Array, tuple[TokenStats, Bounds]]:
    """(loss, (statistics, bounds)); searches bounds where none are given."""
    stats = self.token_stats(params, part.tokens_BT)
    logp_BT = stats.logp_BT
    find = self.search(logp_BT, part, scale_B) if bounds is None else given(bounds)
    gain_BT, bounds = self.loss_rule(logp_BT, part, find)
    if self.kl:
      gain_BT -= self.kl * loss.divergence(logp_BT, part, self.kl_direction)
    return -(gain_BT.sum(1) * scale_B).sum(), (stats, bounds)


def given(bounds: Bounds) -> FindBounds:
  """These bounds, whatever the ratios."""

  def find(ratio_BT: Array) -> Bounds:
    del ratio_BT
    return bounds

  return find


def filled_share(batch: Batch) -> Array:
  """Part of the seats that are filled, exactly 1 for a full minibatch.

  A mean over a few rows must not move the weights as far as one over all.
  """
  filled_B = batch.source_B >= 0
  return jnp.where(filled_B.all(), 1.0, filled_B.mean(dtype=jnp.float32))


def gradient(
  params: Tree, batch: Batch, objective: Objective
) -> tuple[Array, Tree, tuple[TokenStats, Bounds]]:
  """The loss of one minibatch and its gradient.

  Bounds are found once, over all tokens of the minibatch: over every device, and over
  every micro-batch. With one micro-batch they come from the forward pass that the
  gradient needs anyway. With more, a forward pass without gradient comes first, which
  makes the update 22 % longer (LOG.md); bounds_scope='micro_batch' saves it and gives
  every micro-batch the bounds of its own tokens, a mixture of objectives.

  Returns:
    (loss, gradients, (statistics of the tokens, bounds)).
  """
  o = objective
  scale_B = loss.row_scale(batch.loss_mask_BT, o.aggregate, o.length)
  scale_B *= filled_share(batch)
  value_and_grad = jax.value_and_grad(o.loss, has_aux=True)
  if o.grad_accum_steps == 1:
    (value, seen), grads = value_and_grad(params, batch, scale_B, None)
    return value, grads, seen
  parts = jax.tree.map(
    lambda x: x.reshape(o.grad_accum_steps, -1, *x.shape[1:]), (batch, scale_B)
  )
  bounds = None
  if o.bounds_scope == 'minibatch':
    logp = jax.lax.map(
      lambda part: o.token_stats(params, part[0].tokens_BT).logp_BT, parts
    )
    logp_BT = logp.reshape(batch.loss_mask_BT.shape)
    _, bounds = o.loss_rule(logp_BT, batch, o.search(logp_BT, batch, scale_B))

  def add(total, part):
    (value, seen), grads = value_and_grad(params, *part, bounds)
    return jax.tree.map(jnp.add, total, (value, grads)), seen

  # Sums of bfloat16 gradients lose what is small: float32, whatever the parameters are.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  (value, grads), seen = jax.lax.scan(add, (jnp.float32(0), zeros), parts)
  stats, found = seen
  return value, grads, _as_minibatch(stats, found, bounds, batch)


def _as_minibatch(
  stats: TokenStats, found: Bounds, bounds: Bounds | None, batch: Batch
) -> tuple[TokenStats, Bounds]:
  """What the micro-batches saw, as one minibatch saw it."""
  if bounds is None:  # one of each micro-batch, repeated for its rows
    rows = batch.adv_B.shape[0] // stats.logp_BT.shape[0]
    bounds = jax.tree.map(lambda x: jnp.repeat(x, rows)[:, None], found)
  shape = batch.loss_mask_BT.shape
  return jax.tree.map(lambda x: x.reshape(shape), stats), bounds


def learn(
  params: Tree,
  opt: Tree,
  batch: Batch,
  *,
  tx: optax.GradientTransformation,
  objective: Objective,
) -> tuple[Tree, Tree, dict[str, Array]]:
  """One optimiser update on one minibatch; returns (params, opt, metrics).

  It is skipped, and counted in learner/skipped, where loss or gradient is not finite.
  """
  value, grads, (stats, bounds) = gradient(params, batch, objective)
  own_BT = batch.loss_mask_BT & batch.on_policy_BT
  diff_BT = jnp.where(own_BT, jnp.abs(stats.logp_BT - batch.behavior_logp_BT), 0)
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(value) & jnp.isfinite(norm)
  scale_B = loss.row_scale(batch.loss_mask_BT, objective.aggregate, objective.length)
  metrics = diagnostics.diagnose(objective.loss_rule, stats, batch, bounds, scale_B) | {
    'loss/value': value,
    'learner/grad_norm': norm,
    'learner/skipped': ~finite,
    'learner/tokens': batch.loss_mask_BT.sum(),
    'rollout/logp_diff': diff_BT.sum() / own_BT.sum(),
    'rollout/logp_diff_max': jnp.where(own_BT.any(), diff_BT.max(), jnp.nan),
  }
  updates, moments = tx.update(grads, opt, params)
  # No seat earned, no update: moments alone would carry the weights on. And one number
  # that is not finite would spoil moments and weights for good.
  params, opt = jax.tree.map(
    lambda new, old: jnp.where(batch.loss_mask_BT.any() & finite, new, old),
    (optax.apply_updates(params, updates), moments),
    (params, opt),
  )
  return params, opt, metrics
