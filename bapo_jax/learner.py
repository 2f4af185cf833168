"""From groups to new weights: several optimiser updates on one batch.

1. `flatten` gives every response its advantage and masks out what must not teach;
2. `update` visits the batch `epochs` times, each time in `minibatches` disjoint parts;
3. `learn` is one optimiser update, jitted: bounds, gradient, step.

Staleness is epochs x minibatches: the number of updates made from one rollout batch.
The learner is blind to the method: it is handed a clip rule and an advantage rule.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bapo_jax import logprob, loss, model
from bapo_jax.types import Batch, Bounds, Groups, take


def optimizer(
  *,
  lr: float,
  warmup: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  max_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW after clipping by the global norm; `warmup` counts optimiser updates."""
  schedule = optax.linear_schedule(lr / (warmup + 1), lr, warmup) if warmup else lr
  return optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay),
  )


def flatten(groups: Groups, keep_P, advantage_rule) -> Batch:
  """The flat batch [P*G, T]; a seat that is not kept teaches nothing."""
  P, G, T = groups.tokens_PGT.shape
  mask_PGT = groups.chosen_PGT & keep_P[:, None, None]
  return Batch(
    tokens_BT=groups.tokens_PGT.reshape(P * G, T),
    mask_BT=mask_PGT.reshape(P * G, T),
    logp_BT=groups.logp_PGT.reshape(P * G, T),
    adv_B=advantage_rule(groups.reward_PG).reshape(P * G),
  )


def check(prompts: int, minibatches: int, slices: int, group: int, shards: int) -> None:
  """Raises ValueError, with the numbers, unless a batch divides evenly."""
  if prompts % minibatches:
    raise ValueError(
      f'prompts.count={prompts} groups do not divide into '
      f'learner.minibatches={minibatches} parts of whole groups'
    )
  rows = prompts // minibatches * group
  if rows % (slices * shards):
    raise ValueError(
      f'a minibatch has {rows} responses ({prompts} prompts x {group} / '
      f'{minibatches}), which do not divide over learner.slices={slices} x {shards} '
      'device shards'
    )


def update(
  params,
  opt,
  groups: Groups,
  keep_P,
  key,
  *,
  learn,
  advantage_rule,
  epochs: int,
  minibatches: int,
  place=lambda batch: batch,
):
  """epochs x minibatches optimiser updates; returns (params, opt, list of metrics).

  Groups stay whole: a minibatch is a random set of prompts, so that what a group says
  about its own mean is never torn apart.
  """
  P = groups.id_P.shape[0]
  metrics = []
  for epoch_key in jax.random.split(key, epochs):
    parts = np.asarray(jax.random.permutation(epoch_key, P)).reshape(minibatches, -1)
    for part in parts:
      batch = place(_part(groups, keep_P, part, advantage_rule))
      params, opt, told = learn(params, opt, batch)
      metrics.append(told)
  return params, opt, metrics


@functools.partial(jax.jit, static_argnames='advantage_rule')
def _part(groups, keep_P, part, advantage_rule) -> Batch:
  return flatten(take(groups, part), keep_P[part], advantage_rule)


def learn(
  params,
  opt,
  batch: Batch,
  *,
  tx: optax.GradientTransformation,
  clip_rule,
  spec: model.ModelSpec,
  temperature: float,
  chunk: int = 256,
  slices: int = 1,
):
  """One optimiser update on one minibatch; returns (params, opt, metrics).

  With one slice the bounds come from the forward pass that the gradient needs anyway.
  With more, a forward pass without gradient comes first: the bounds are those of the
  whole minibatch, and the slices are differentiated under them.
  """
  scored = functools.partial(
    logprob.of_rows, spec=spec, temperature=temperature, chunk=chunk
  )
  adv_BT = jnp.broadcast_to(batch.adv_B[:, None], batch.mask_BT.shape)
  tokens = jnp.maximum(batch.mask_BT.sum(), 1)

  def bounds_of(logp_BT) -> Bounds:
    ratio_BT = loss.ratio(jax.lax.stop_gradient(logp_BT), batch)
    # The barrier keeps a rule's arithmetic out of the loss's: where no token is
    # clipped, every rule gives the same gradient to the last bit.
    return jax.lax.optimization_barrier(clip_rule(ratio_BT, adv_BT, batch.mask_BT))

  def objective(params, part: Batch, bounds=None):
    logp_BT, entropy_BT = scored(params, part.tokens_BT)
    bounds = bounds_of(logp_BT) if bounds is None else bounds
    part_adv_BT = jnp.broadcast_to(part.adv_B[:, None], part.mask_BT.shape)
    total = loss.surrogate(loss.ratio(logp_BT, part), part_adv_BT, part.mask_BT, bounds)
    return total / tokens, (logp_BT, entropy_BT, bounds)

  gradient = jax.value_and_grad(objective, has_aux=True)
  if slices == 1:
    (value, (logp_BT, entropy_BT, bounds)), grads = gradient(params, batch)
  else:
    parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
    logp_BT, entropy_BT = jax.tree.map(
      lambda x: x.reshape(batch.mask_BT.shape),
      jax.lax.map(lambda tokens_BT: scored(params, tokens_BT), parts.tokens_BT),
    )
    bounds = bounds_of(logp_BT)

    def add(total, part):
      (value, _), grads = gradient(params, part, bounds)
      return jax.tree.map(jnp.add, total, (value, grads)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (value, grads), _ = jax.lax.scan(add, zeros, parts)

  # Positive tokens alone meet any target: the search stays where it starts.
  ones_BT = jnp.ones_like(adv_BT)
  start = clip_rule(ones_BT, ones_BT, ones_BT > 0)
  metrics = loss.diagnose(logp_BT, entropy_BT, batch, start, bounds)
  mismatch = jnp.abs(logp_BT - batch.logp_BT)
  metrics |= {
    'loss/value': value,
    'learner/grad_norm': optax.global_norm(grads),
    'sample/mismatch': (jnp.where(batch.mask_BT, mismatch, 0)).sum() / tokens,
  }
  updates, moments = tx.update(grads, opt, params)
  # No seat earned, no update: moments alone would carry the weights on.
  params, opt = jax.tree.map(
    lambda new, old: jnp.where(batch.mask_BT.any(), new, old),
    (optax.apply_updates(params, updates), moments),
    (params, opt),
  )
  return params, opt, metrics
