"""From groups to new weights: several optimiser updates on one batch.

1. `flatten` gives every response its advantage and masks out what must not teach;
2. `update` visits the batch `epochs` times, each time in `minibatches` disjoint parts;
3. `learn` is one optimiser update, jitted: bounds and `gradient`, step, diagnosis.

Staleness is epochs x minibatches: the number of updates made from one rollout batch.
The learner is blind to the method: it is handed a clip, a loss and an advantage rule.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.models import logprobs, transformer
from bapo_jax.types import Batch, Groups, take

# Where bounds are searched: over the minibatch, or (cheaper) over each of its slices.
BOUNDS_SCOPES = ('minibatch', 'slice')


def optimizer(
  *,
  lr: float,
  warmup: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  max_norm: float = 1.0,
  master: bool = False,
) -> optax.GradientTransformation:
  """AdamW after clipping by the global norm; `warmup` counts optimiser updates.

  `master` is for parameters below float32: see `mastered`.
  """
  schedule = optax.linear_schedule(lr / (warmup + 1), lr, warmup) if warmup else lr
  tx = optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay),
  )
  return mastered(tx) if master else tx


class Mastered(NamedTuple):
  """The state of `mastered`."""

  master: Any  # the weights in float32
  inner: Any  # the optimiser's own state


def mastered(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """The optimiser on float32 weights that it keeps; parameters are those, rounded.

  A step of 1e-6 is below the spacing of bfloat16 at most weights: added to the
  parameters themselves it would be lost, every time (Micikevicius et al., 2018).
  """

  def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def init(params):
    return Mastered(wide(params), tx.init(wide(params)))

  def update(grads, state, params):
    updates, inner = tx.update(wide(grads), state.inner, state.master)
    master = optax.apply_updates(state.master, updates)
    rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    moves = jax.tree.map(jnp.subtract, wide(rounded), wide(params))
    return moves, Mastered(master, inner)

  return optax.GradientTransformation(init, update)


def flatten(
  groups: Groups, source_P, advantage_rule, prox_PGT=None, weights=(1.0, 1.0, 1.0)
) -> Batch:
  """The flat batch [P*G, T]; a seat that is empty teaches nothing.

  Args:
    source_P: index into types.SOURCES, -1 for an empty seat.
    prox_PGT: log-probabilities of the proximal policy; None: those of the behaviour.
    weights: what a row of each of types.SOURCES counts for; it multiplies the
      advantage, so that clip rules see it too.
  """
  P, G, T = groups.tokens_PGT.shape
  mask_PGT = groups.chosen_PGT & (source_P >= 0)[:, None, None]
  prox_PGT = groups.logp_PGT if prox_PGT is None else prox_PGT
  weight_P = jnp.asarray(weights, jnp.float32)[source_P]
  return Batch(
    tokens_BT=groups.tokens_PGT.reshape(P * G, T),
    mask_BT=mask_PGT.reshape(P * G, T),
    logp_BT=groups.logp_PGT.reshape(P * G, T),
    prox_BT=prox_PGT.reshape(P * G, T),
    adv_B=(advantage_rule(groups.reward_PG) * weight_P[:, None]).reshape(P * G),
    source_B=jnp.repeat(source_P, G),
  )


def check(
  prompts: int, minibatches: int, slices: int, group: int, shards: int, replayed=0
) -> None:
  """Raises ValueError, with the numbers, unless a batch divides evenly.

  Args:
    replayed: groups in a batch beside those of the step's prompts.
  """
  seats = prompts + replayed
  beside = f' and {replayed} replayed' if replayed else ''
  if seats % minibatches:
    raise ValueError(
      f'prompts.count={prompts}{beside} groups do not divide into '
      f'learner.minibatches={minibatches} parts of whole groups'
    )
  rows = seats // minibatches * group
  if rows % (slices * shards):
    raise ValueError(
      f'a minibatch has {rows} responses ({prompts}{beside} prompts x {group} / '
      f'{minibatches}), which do not divide over learner.slices={slices} x {shards} '
      'device shards'
    )


def update(
  params,
  opt,
  groups: Groups,
  source_P,
  key,
  *,
  learn,
  advantage_rule,
  epochs: int,
  minibatches: int,
  proximal=None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  place=lambda batch: batch,
):
  """epochs x minibatches optimiser updates; returns (params, opt, list of metrics).

  Groups stay whole: a minibatch is a random set of prompts, so that what a group says
  about its own mean is never torn apart.

  Args:
    weights: of the sources, see `flatten`.
    proximal: (params, groups) -> log-probabilities [P, G, T] of the weights before the
      first update, for the loss rules that ask for them; None for those that do not.
  """
  P = groups.id_P.shape[0]
  prox_PGT = None if proximal is None else proximal(params, groups)
  metrics = []
  for epoch_key in jax.random.split(key, epochs):
    parts = np.asarray(jax.random.permutation(epoch_key, P)).reshape(minibatches, -1)
    for part in parts:
      batch = place(_part(groups, source_P, prox_PGT, part, advantage_rule, weights))
      params, opt, told = learn(params, opt, batch)
      metrics.append(told)
  return params, opt, metrics


@functools.partial(jax.jit, static_argnames=('advantage_rule', 'weights'))
def _part(groups, source_P, prox_PGT, part, advantage_rule, weights) -> Batch:
  groups, source_P, prox_PGT = take((groups, source_P, prox_PGT), part)
  return flatten(groups, source_P, advantage_rule, prox_PGT, weights)


def score(params, groups: Groups, *, parts: int, spec, temperature: float, chunk: int):
  """Log-probabilities [P, G, T] of whole groups, `parts` batches of rows one by one."""
  P, G, T = groups.tokens_PGT.shape

  def some(tokens_bT):
    return logprobs.sequence_logprobs(
      params, tokens_bT, spec, temperature, chunk=chunk
    )[0]

  rows = groups.tokens_PGT.reshape(parts, P * G // parts, T)
  return jax.lax.map(some, rows).reshape(P, G, T)


def gradient(
  params,
  batch: Batch,
  *,
  clip_rule,
  loss_rule,
  spec: transformer.ModelSpec,
  temperature: float,
  chunk: int = 256,
  slices: int = 1,
  search: str = 'minibatch',
  aggregate: str = 'token',
  length: int = 1,
  kl: float = 0.0,
):
  """The loss of one minibatch and its gradient, in `slices` that are added up.

  Bounds are found once, over all tokens of the minibatch: over every device, and over
  every slice. With one slice they come from the forward pass that the gradient needs
  anyway. With more, a forward pass without gradient comes first, which makes the update
  22 % longer (LOG.md); search='slice' saves it and gives every slice the bounds of
  its own tokens, a mixture of objectives. No gradient flows through bounds.

  Args:
    kl: what a nat of divergence from the policy that wrote the batch costs.

  Returns:
    (loss, gradients, (logp_BT, entropy_BT, bounds)).
  """
  rated = functools.partial(
    logprobs.sequence_logprobs, spec=spec, temperature=temperature, chunk=chunk
  )

  def searched_on(part: Batch):
    def find(ratio_BT):
      # The barrier keeps a rule's arithmetic out of the loss's: where no token is
      # clipped, every rule gives the same gradient to the last bit.
      bounds = clip_rule(jax.lax.stop_gradient(ratio_BT), part)
      return jax.lax.optimization_barrier(bounds)

    return find

  def objective(params, part: Batch, scale_B, bounds):
    logp_BT, entropy_BT = rated(params, part.tokens_BT)
    find = searched_on(part) if bounds is None else lambda _: bounds
    gain_BT, bounds = loss_rule(logp_BT, part, find)
    if kl:
      gain_BT -= kl * loss.divergence(logp_BT, part)
    return -(gain_BT.sum(1) * scale_B).sum(), (logp_BT, entropy_BT, bounds)

  differentiated = jax.value_and_grad(objective, has_aux=True)
  scale_B = loss.row_scale(batch.mask_BT, aggregate, length)
  if slices == 1:
    (value, told), grads = differentiated(params, batch, scale_B, None)
    return value, grads, told

  parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), (batch, scale_B))
  bounds = None
  if search == 'minibatch':
    logp_SbT = jax.lax.map(lambda part: rated(params, part[0].tokens_BT)[0], parts)
    _, bounds = loss_rule(
      logp_SbT.reshape(batch.mask_BT.shape), batch, searched_on(batch)
    )

  def add(total, part):
    (value, told), grads = differentiated(params, *part, bounds)
    return jax.tree.map(jnp.add, total, (value, grads)), told

  # Sums of bfloat16 gradients lose what is small: float32, whatever the parameters are.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  zeros = (jnp.float32(0), zeros)
  (value, grads), (logp, entropy, found) = jax.lax.scan(add, zeros, parts)
  if bounds is None:  # one of each slice, repeated for its rows
    rows = batch.adv_B.shape[0] // slices
    bounds = jax.tree.map(lambda x: jnp.repeat(x, rows)[:, None], found)
  shape = batch.mask_BT.shape
  return value, grads, (logp.reshape(shape), entropy.reshape(shape), bounds)


def learn(
  params, opt, batch: Batch, *, tx: optax.GradientTransformation, loss_rule, **knobs
):
  """One optimiser update on one minibatch; returns (params, opt, metrics).

  It is skipped, and told as learner/skipped, where loss or gradient is not finite.

  `knobs` are those of `gradient`.
  """
  value, grads, (logp_BT, entropy_BT, bounds) = gradient(
    params, batch, loss_rule=loss_rule, **knobs
  )
  mismatch_BT = jnp.where(batch.mask_BT, jnp.abs(logp_BT - batch.logp_BT), 0)
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(value) & jnp.isfinite(norm)
  metrics = diagnostics.diagnose(loss_rule, logp_BT, entropy_BT, batch, bounds) | {
    'loss/value': value,
    'learner/grad_norm': norm,
    'learner/skipped': ~finite,
    'sample/mismatch': mismatch_BT.sum() / jnp.maximum(batch.mask_BT.sum(), 1),
  }
  updates, moments = tx.update(grads, opt, params)
  # No seat earned, no update: moments alone would carry the weights on. And one number
  # that is not finite would spoil moments and weights for good.
  params, opt = jax.tree.map(
    lambda new, old: jnp.where(batch.mask_BT.any() & finite, new, old),
    (optax.apply_updates(params, updates), moments),
    (params, opt),
  )
  return params, opt, metrics
