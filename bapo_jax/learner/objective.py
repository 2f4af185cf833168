"""What an update maximises, and the gradient of one minibatch.

1. `Objective` binds the rules: which tokens are computed, how their bounds are found;
2. `micro_batches` packs what is computed into bins of one shape;
3. `gradient` runs over those that the batch fills.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import loss
from bapo_jax.algorithms.knobs import Aggregate, KlDirection, LossConfig
from bapo_jax.learner import accumulation, pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.models import logprobs, lora
from bapo_jax.models.knobs import LogprobsConfig
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Cells, Packed
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import (
  Batch,
  Bounds,
  ClipRule,
  EmbeddedPictures,
  FindBounds,
  LossRule,
  TokenStats,
  Tree,
)


@dataclasses.dataclass(frozen=True)
class Objective:
  """What an update maximises, and how it is computed.

  Args:
    schedule: trades memory for time, see `layers.Schedule`.
    temperature: of sampling: the policy is the distribution that was sampled from.
    chunk: see `logprobs.packed_stats`.
    pack: rows are packed, and those without an advantage are not computed where
      nothing but the advantage has a gradient; False: every token of every row.
    grad_accum_steps: the most micro-batches of a minibatch, their gradients summed.
    bounds_scope: 'minibatch' or 'micro_batch', see `gradient`.
    aggregate, length: see `loss.row_scale`.
    kl, kl_direction: cost per nat of `loss.divergence`, and its direction. A penalty
      is no part of the policy gradient whose share a clip rule balances.
  """

  clip_rule: ClipRule
  loss_rule: LossRule
  spec: ModelSpec
  temperature: float
  schedule: Schedule = Schedule()
  chunk: int = LogprobsConfig().chunk
  pack: bool = True
  grad_accum_steps: int = 1
  bounds_scope: str = 'minibatch'
  aggregate: Aggregate = 'token'
  length: int = 1
  kl: float = 0.0
  kl_direction: KlDirection = LossConfig().kl_direction

  @property
  def together(self) -> bool:
    """Whether bounds are those of all tokens of the minibatch."""
    return self.bounds_scope == 'minibatch'

  @property
  def stores(self) -> bool:
    """Whether all forward passes come before the bounds, and those before the rest."""
    return self.together and self.schedule.bounds_pass == 'stored'

  def computed(self, batch: Batch) -> Batch:
    """The batch whose mask holds the tokens that are computed.

    A response without an advantage has no gradient unless there is a penalty. What its
    tokens count for in the denominators is in `loss.row_scale` of the whole batch.
    """
    if self.kl or not self.pack:
      return batch
    teaches_B1 = (batch.adv_B != 0)[:, None]
    return batch._replace(loss_mask_BT=batch.loss_mask_BT & teaches_B1)

  def token_stats(
    self, params: Tree, cells: Cells, patch_XD: Array | None = None
  ) -> TokenStats:
    """Statistics [R, T] of the targets of packed rows under these parameters."""
    return logprobs.packed_stats(
      params,
      cells,
      self.spec,
      self.temperature,
      chunk=self.chunk,
      patch_XD=patch_XD,
      schedule=self.schedule,
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
    self, logp_BT: Array, part: Batch, scale_B: Array, find: FindBounds
  ) -> tuple[Array, Bounds]:
    """(loss, the bounds that it was clipped with)."""
    gain_BT, bounds = self.loss_rule(logp_BT, part, find)
    if self.kl:
      gain_BT -= self.kl * loss.divergence(logp_BT, part, self.kl_direction)
    return -(gain_BT.sum(1) * scale_B).sum(), bounds


def filled_share(batch: Batch) -> Array:
  """Part of the seats that are filled, exactly 1 for a full minibatch.

  A mean over a few rows must not move the weights as far as one over all.
  """
  filled_B = batch.source_B >= 0
  return jnp.where(filled_B.all(), 1.0, filled_B.mean(dtype=jnp.float32))


class MicroBatches(NamedTuple):
  """A batch in micro-batches of packed rows, numbered from 0."""

  batch: Batch  # its mask holds the tokens that are computed
  packed: Packed
  base: Tree  # of `lora.attach`
  pictures: EmbeddedPictures | None = None  # of the batch

  def stats(
    self, trained: Variables, n: Array | int, objective: Objective
  ) -> TokenStats:
    """Statistics of the tokens of micro-batch n at their places [B, T]; 0 elsewhere."""
    weights = lora.attach(self.base, trained.params)
    patch_XD = trained.patches(self.pictures)
    found = objective.token_stats(weights, self.packed.cells(n), patch_XD)
    return jax.tree.map(lambda x_RT: self.packed.unpack(x_RT, n), found)

  def mine(self, n: Array | int) -> Array:
    """bool [B, 1]: the rows of micro-batch n."""
    return self.packed.mine(n)[:, None]

  def rows(self, n: Array | int) -> Batch:
    """The batch with the mask of micro-batch n's rows alone."""
    return self.batch._replace(loss_mask_BT=self.batch.loss_mask_BT & self.mine(n))


def micro_batches(
  batch: Batch,
  objective: Objective,
  base: Tree = None,
  pictures: EmbeddedPictures | None = None,
) -> MicroBatches:
  """What an objective computes of a batch, packed."""
  o, batch = objective, objective.computed(batch)
  packed = pictured.pack(
    batch.tokens_BT,
    batch.loss_mask_BT,
    o.grad_accum_steps,
    o.spec,
    pictures,
    packed=o.pack,
  )
  return MicroBatches(batch, packed, base, pictures)


def gradient(
  params: Tree, batch: Batch, objective: Objective, base: Tree = None
) -> tuple[Array, Tree, tuple[TokenStats, Bounds]]:
  """The loss of one minibatch and its gradient.

  Only what teaches is computed (`Objective.computed`), packed, in as many micro-batches
  as it fills: the loops are one program, whatever the batch.

  Bounds are found once, over all tokens of the minibatch: over every device, and over
  every micro-batch. What fits into one micro-batch has them from the forward pass that
  the gradient needs anyway. With more, schedule.bounds_pass decides: 'again' runs a
  forward pass without a gradient first; 'stored' keeps the arrays of all forward passes
  in memory until the bounds are known. bounds_scope='micro_batch' needs neither and
  gives every micro-batch the bounds of its own tokens, a mixture of objectives.

  Args:
    base: frozen weights where `params` are adapters; None: there are none.

  Returns:
    (loss, gradients, (statistics of the computed tokens, 0 elsewhere, bounds)).
  """
  o = objective
  scale_B = loss.row_scale(batch.loss_mask_BT, o.aggregate, o.length)
  scale_B *= filled_share(batch)
  trained, seen, of_params = pictured.variables(
    params, batch.pictures, o.spec, o.schedule
  )
  parts = micro_batches(batch, o, base, seen)
  stored = o.stores and parts.packed.shape.micro_batches > 1
  run = _of_all if stored else _one_by_one
  value, grads, found = run(trained, parts, scale_B, o)
  return value, of_params(grads), found


def _of_all(
  trained: Variables, parts: MicroBatches, scale_B: Array, objective: Objective
) -> tuple[Array, Variables, tuple[TokenStats, Bounds]]:
  """`gradient`, every forward pass before the bounds, and those before the rest."""
  o, batch = objective, parts.batch
  stats, backward = accumulation.forward_all(
    lambda trained, n: parts.stats(trained, n, o),
    trained,
    parts.packed.shape.micro_batches,
    parts.packed.used,
    (parts.base, parts.pictures),
  )

  def value_of(stats: TokenStats) -> tuple[Array, Bounds]:
    search = o.search(stats.logp_BT, batch, scale_B)
    return o.loss(stats.logp_BT, batch, scale_B, search)

  (value, bounds), d_stats = jax.value_and_grad(value_of, has_aux=True)(stats)
  return value, backward(d_stats), (stats, bounds)


def _one_by_one(
  trained: Variables, parts: MicroBatches, scale_B: Array, objective: Objective
) -> tuple[Array, Variables, tuple[TokenStats, Bounds]]:
  """`gradient` with the backward pass of each micro-batch right after its forward."""
  o, together = objective, objective.together
  bounds = _bounds_of_all(trained, parts, scale_B, o)

  def value_of(trained: Variables, n: Array) -> tuple[Array, tuple[TokenStats, Bounds]]:
    stats, part = parts.stats(trained, n, o), parts.rows(n)
    search = o.search(stats.logp_BT, part, scale_B)

    def find(ratio_BT: Array) -> Bounds:
      own = search(ratio_BT)
      if not together:
        return own
      several = parts.packed.used > 1
      return jax.tree.map(lambda a, b: jnp.where(several, a, b), bounds, own)

    value, found = o.loss(stats.logp_BT, part, scale_B, find)
    return value, (stats, found)

  def merge(
    n: Array, so_far: tuple[TokenStats, Bounds], found: tuple[TokenStats, Bounds]
  ) -> tuple[TokenStats, Bounds]:
    of_rows = True if together else parts.mine(n)
    bounds = jax.tree.map(
      lambda old, new: jnp.where(of_rows, new, old), so_far[1], found[1]
    )
    return jax.tree.map(jnp.add, so_far[0], found[0]), bounds

  nothing_BT = jnp.zeros(parts.batch.tokens_BT.shape, jnp.float32)
  if not together:
    bounds = jax.tree.map(lambda x: jnp.full((len(scale_B), 1), x), bounds)
  nothing = TokenStats(nothing_BT, nothing_BT, nothing_BT), bounds
  return accumulation.summed(value_of, trained, parts.packed.used, nothing, merge)


def _bounds_of_all(
  trained: Variables, parts: MicroBatches, scale_B: Array, objective: Objective
) -> Bounds:
  """The bounds of several micro-batches together; for one or none those of no token."""
  o, shape = objective, parts.batch.tokens_BT.shape

  def add(n: Array, logp_BT: Array) -> Array:
    return logp_BT + parts.stats(trained, n, o).logp_BT

  together = o.together and parts.packed.shape.micro_batches > 1
  several = jnp.where(parts.packed.used > 1, parts.packed.used, 0) if together else 0
  logp_BT = jax.lax.fori_loop(0, several, add, jnp.zeros(shape, jnp.float32))
  batch = parts.batch
  batch = batch._replace(loss_mask_BT=batch.loss_mask_BT & (several > 0))
  return o.loss_rule(logp_BT, batch, o.search(logp_BT, batch, scale_B))[1]
