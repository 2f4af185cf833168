"""Defines the objective of an update and computes the gradient of a minibatch.

1. `Objective` binds the rules: which tokens are computed and how bounds are searched;
2. `micro_batches` packs the computed tokens into bins of one shape;
3. `gradient` sums the gradients of the bins that the batch fills.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import loss, masks
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.learner import accumulation, pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.models import logprobs, lora
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Cells, Packed, Unit
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import (
  Batch,
  Bounds,
  ClipFunction,
  EmbeddedPictures,
  FindBounds,
  MaskFunction,
  TokenStats,
  Tree,
)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The objective of an update, and how to compute it.

  Args:
    loss_rule: also has the costs of the penalties, `loss.divergence` and
      `loss.from_reference`, the entropy bonus, and the average over rows,
      `loss.row_scale`. A clip rule that balances the policy gradient ignores penalties
      and bonus.
    schedule: trades memory for time, see `layers.Schedule`.
    temperature: sampling temperature; divides the logits of the policy.
    pack: True packs rows and, without a penalty or a bonus, skips rows without an
      advantage; False computes every token of every row.
    unit: rows of a group that share the cells of their prompt, if rows are packed.
    grad_accum_steps: maximum number of micro-batches whose gradients are summed.
    bounds_scope: 'minibatch' or 'micro_batch', see `gradient`.
    length: see `loss.row_scale`.

  Example: the gradient of one group with a right and a wrong response.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from bapo_jax.algorithms import advantage, clip, loss
    >>> from bapo_jax.learner import learner
    >>> from bapo_jax.models import transformer
    >>> from bapo_jax.types import empty_groups
    >>> spec = transformer.ModelSpec(
    ...   vocab=16, width=16, layers=1, heads=2, kv_heads=1, head_width=8, ffn=32
    ... )
    >>> sampled_PGT = jnp.broadcast_to(jnp.arange(6) > 2, (1, 2, 6))
    >>> groups = empty_groups(1, 2, 6)._replace(
    ...   id_P=jnp.zeros(1, jnp.int32),
    ...   tokens_PGT=jnp.asarray([[[3, 4, 5, 6, 7, 1], [3, 4, 5, 8, 9, 1]]]),
    ...   response_mask_PGT=sampled_PGT,
    ...   behavior_logp_PGT=-2.8 * sampled_PGT,
    ...   reward_PG=jnp.asarray([[1.0, 0.0]]),
    ... )
    >>> batch = learner.flatten(groups, jnp.zeros(1, int), advantage.GroupRelative())
    >>> objective = Objective(
    ...   clip_rule=clip.Balanced(),
    ...   loss_rule=loss.Clipped(),
    ...   spec=spec,
    ...   temperature=1.0,
    ... )
    >>> params = transformer.init(spec, jax.random.key(0))
    >>> value, gradients, (stats, bounds) = gradient(params, batch, objective)
    >>> jax.tree.structure(gradients) == jax.tree.structure(params)
    True
  """

  clip_rule: ClipFunction
  loss_rule: LossRule
  spec: ModelSpec
  temperature: float
  schedule: Schedule = Schedule()
  pack: bool = True
  unit: Unit = Unit()
  grad_accum_steps: int = 1
  bounds_scope: str = 'minibatch'
  length: int = 1
  mask_rule: MaskFunction = masks.NoMask()

  @property
  def together(self) -> bool:
    """Returns whether one search covers all tokens of the minibatch."""
    return self.bounds_scope == 'minibatch'

  def computed(self, batch: Batch) -> Batch:
    """Returns the batch with a mask of the tokens to compute.

    A response without a token with an advantage has no gradient unless there is a
    penalty or a bonus. Its tokens still count in the denominators, through
    `loss.row_scale` of the full mask.
    """
    if self.loss_rule.reads_all or not self.pack:
      return batch
    teaches_B1 = (batch.trained_BT & (batch.adv_BT != 0)).any(1, keepdims=True)
    return batch.only(teaches_B1)

  def scales(self, batch: Batch) -> 'Scales':
    """Returns the factors of each row's sum over sampled, and over given tokens.

    Each of the two objectives has its own denominator. The second is None if the batch
    has no given tokens.
    """

    # Before packing drops rows: rows that teach nothing still count in the average.
    def scale(mask_BT: Array) -> Array:
      scale_B = loss.row_scale(mask_BT, self.loss_rule.aggregate, self.length)
      return scale_B * filled_share(batch)

    given_B = None if batch.given_BT is None else scale(batch.given_BT)
    return scale(batch.loss_mask_BT), given_B

  def token_stats(
    self, params: Tree, cells: Cells, patch_XD: Array | None = None
  ) -> TokenStats:
    """Returns the statistics [R, T] of the targets of packed rows."""
    return logprobs.packed_stats(
      params,
      cells,
      self.spec,
      self.temperature,
      patch_XD=patch_XD,
      schedule=self.schedule,
    )

  def search(self, logp_BT: Array, batch: Batch, scale_B: Array) -> FindBounds:
    """Returns a function that searches bounds over the tokens of a batch.

    The bounds have no gradient. scale_B (`loss.row_scale`) weights rows as in the loss.
    """
    rules = self.loss_rule, self.clip_rule, self.mask_rule
    return loss.finder(rules, logp_BT, batch, scale_B)

  def loss(
    self,
    logp_BT: Array,
    part: Batch,
    scale_B: Array,
    find: FindBounds,
    entropy_BT: Array | None = None,
    given_B: Array | None = None,
  ) -> tuple[Array, Bounds]:
    """Returns (loss of a part of the batch, clip bounds used in it).

    scale_B and given_B are the `scales` of the whole batch. Only a bonus reads
    entropy_BT, the entropy of the policy at each token, nats.
    """
    rule = self.loss_rule
    gain_BT, bounds = loss.gain(rule, logp_BT, part, find)
    # Penalties and bonus come after the search: a balancing clip rule weighs the policy
    # gradient alone, so its bounds do not depend on their costs.
    if rule.kl:
      gain_BT -= rule.kl * loss.divergence(logp_BT, part, rule.kl_direction)
    if rule.reference and not rule.reference_in_reward:
      far_BT = loss.from_reference(logp_BT, part, rule.reference_estimator)
      gain_BT -= rule.reference * far_BT
    if rule.entropy:
      assert entropy_BT is not None
      gain_BT += rule.entropy * jnp.where(part.loss_mask_BT, entropy_BT, 0)
    value = -(gain_BT.sum(1) * scale_B).sum()
    if given_B is not None:
      value -= (loss.from_given(rule, logp_BT, part).sum(1) * given_B).sum()
    return value, bounds


def filled_share(batch: Batch) -> Array:
  """Returns the share of filled seats, exactly 1 for a full minibatch.

  The loss is scaled by this share, so that a mean over few rows does not move the
  weights as far as a mean over a full minibatch.
  """
  filled_B = batch.source_B >= 0
  return jnp.where(filled_B.all(), 1.0, filled_B.mean(dtype=jnp.float32))


class MicroBatches(NamedTuple):
  """A batch in micro-batches of packed rows, numbered from 0."""

  batch: Batch  # its mask contains the tokens to compute
  packed: Packed
  objective: Objective
  base: Tree = None  # frozen weights, see `lora.attach`
  pictures: EmbeddedPictures | None = None  # pictures of the batch

  def stats(self, trained: Variables, n: Array | int) -> TokenStats:
    """Returns the statistics of micro-batch n, scattered to [B, T]; 0 elsewhere."""
    weights = lora.attach(self.base, trained.params)
    patch_XD = trained.patches(self.pictures)
    stats_RT = self.objective.token_stats(weights, self.packed.cells(n), patch_XD)
    return jax.tree.map(lambda x_RT: self.packed.unpack(x_RT, n), stats_RT)


def micro_batches(
  batch: Batch,
  objective: Objective,
  base: Tree = None,
  pictures: EmbeddedPictures | None = None,
) -> MicroBatches:
  """Packs the tokens of a batch that the objective computes."""
  batch = objective.computed(batch)
  packed = pictured.pack(
    batch.tokens_BT,
    batch.trained_BT,
    objective.grad_accum_steps,
    objective.spec,
    pictures,
    packed=objective.pack,
    unit=objective.unit,
    routes_BTX=batch.routes_BTX,
  )
  return MicroBatches(batch, packed, objective, base, pictures)


Result = tuple[Array, Variables, tuple[TokenStats, Bounds]]
Scales = tuple[Array, Array | None]  # see `Objective.scales`


def gradient(
  params: Tree, batch: Batch, objective: Objective, base: Tree = None
) -> tuple[Array, Tree, tuple[TokenStats, Bounds]]:
  """Computes the loss of one minibatch and its gradient.

  Only tokens with a gradient are computed (`Objective.computed`). They are packed, and
  only filled micro-batches run; all batches use the same program.

  By default one bound search covers the tokens of all devices and all micro-batches. If
  all tokens fit into one micro-batch, the search uses the forward pass of the gradient.
  Otherwise schedule.bounds_pass decides: 'again' runs a forward pass without gradient
  first, 'stored' keeps the residuals of all forward passes until the bounds are known.
  With bounds_scope='micro_batch' every micro-batch has its own search. This needs
  no extra pass and no stored residuals, but sums gradients of different objectives.

  Args:
    base: frozen weights if `params` are adapters; else None.

  Returns:
    (loss, gradients, (statistics, bounds)); statistics are 0 for tokens not computed.
  """
  o = objective
  scales = o.scales(batch)
  # The vision tower runs once per picture, outside of the micro-batches.
  trained, seen, of_params = pictured.variables(
    params, batch.pictures, o.spec, o.schedule
  )
  parts = micro_batches(batch, o, base, seen)
  # The number of micro-batches is static, so a run that never needs several compiles
  # neither the extra forward pass nor the stored residuals.
  stored = o.together and o.schedule.bounds_pass == 'stored'
  several = parts.packed.shape.micro_batches > 1
  run = _of_all if stored and several else _one_by_one
  value, grads, aux = run(trained, parts, scales)
  return value, of_params(grads), aux


def _of_all(trained: Variables, parts: MicroBatches, scales: Scales) -> Result:
  """Runs all forward passes, then the bound search, then all backward passes."""
  o = parts.objective
  batch = parts.batch
  scale_B, given_B = scales
  stats, backward = accumulation.forward_all(
    parts.stats,
    trained,
    parts.packed.shape.micro_batches,
    parts.packed.used,
    (parts.base, parts.pictures),
  )

  def value_of(stats):
    search = o.search(stats.logp_BT, batch, scale_B)
    return o.loss(stats.logp_BT, batch, scale_B, search, stats.entropy_BT, given_B)

  # One search over everything; the backward passes begin when the bounds are known.
  # The loss needs only three numbers per token, so its own gradient is cheap; the
  # backward passes of the model start from d_stats.
  (value, bounds), d_stats = jax.value_and_grad(value_of, has_aux=True)(stats)
  return value, backward(d_stats), (stats, bounds)


def _one_by_one(trained: Variables, parts: MicroBatches, scales: Scales) -> Result:
  """Runs the backward pass of each micro-batch right after its forward pass."""
  o = parts.objective
  scale_B, given_B = scales
  bounds = _bounds_of_all(trained, parts, scale_B)

  def value_of(trained, n):
    stats = parts.stats(trained, n)
    # Masked, not sliced: all micro-batches then run one program on arrays [B, T].
    part = parts.batch.only(parts.packed.mine(n))
    search = o.search(stats.logp_BT, part, scale_B)

    # If only one micro-batch is filled, its search covers the whole minibatch. With
    # several, the bounds of the extra forward pass apply.
    def find(ratio_BT):
      of_part = search(ratio_BT)
      if not o.together:
        return of_part
      several = parts.packed.used > 1
      return jax.tree.map(lambda a, b: jnp.where(several, a, b), bounds, of_part)

    entropy_BT = stats.entropy_BT
    value, applied = o.loss(stats.logp_BT, part, scale_B, find, entropy_BT, given_B)
    return value, (stats, applied)

  # Statistics of micro-batches are disjoint, so they add up. Bounds of one search are
  # equal in all of them; with a search each, the rows of the micro-batch take its own.
  def merge(n, so_far, new):
    of_rows = True if o.together else parts.packed.mine(n)
    bounds = jax.tree.map(lambda a, b: jnp.where(of_rows, b, a), so_far[1], new[1])
    return jax.tree.map(jnp.add, so_far[0], new[0]), bounds

  nothing_BT = jnp.zeros(parts.batch.tokens_BT.shape, jnp.float32)
  if not o.together:
    # One bound per row, since each micro-batch finds other ones.
    column = len(nothing_BT), 1
    bounds = jax.tree.map(lambda x: jnp.broadcast_to(x, x.shape or column), bounds)
  agree_BT = None if parts.batch.routes_BTX is None else nothing_BT
  nothing = TokenStats(nothing_BT, nothing_BT, nothing_BT, agree_BT), bounds
  return accumulation.summed(value_of, trained, parts.packed.used, nothing, merge)


def _bounds_of_all(trained: Variables, parts: MicroBatches, scale_B: Array) -> Bounds:
  """Returns bounds searched over all micro-batches, or a placeholder if not needed."""
  o = parts.objective
  batch = parts.batch
  packed = parts.packed

  # One more forward pass, about a third of the products of an update; 'stored' needs
  # memory in its place. Only log-probabilities leave the loop: it keeps no activation.
  def add(n, logp_BT):
    return logp_BT + parts.stats(trained, n).logp_BT

  # Without several micro-batches, the loop and the search cover no token.
  together = o.together and packed.shape.micro_batches > 1
  several = jnp.where(packed.used > 1, packed.used, 0) if together else 0
  nothing_BT = jnp.zeros(batch.tokens_BT.shape, jnp.float32)
  logp_BT = jax.lax.fori_loop(0, several, add, nothing_BT)
  batch = batch._replace(loss_mask_BT=batch.loss_mask_BT & (several > 0))
  return o.loss_rule(logp_BT, batch, o.search(logp_BT, batch, scale_B))[1]
