"""Turns groups into new weights: several optimiser updates on one batch.

1. `flatten` gives every token its advantage, and masks responses left out of the loss;
2. `update` passes over the batch `epochs` times; every pass splits the groups into
   disjoint minibatches of equal size, and a partly filled batch into fewer minibatches;
3. `learn` is one jitted optimiser update: clip bounds and gradient, step, metrics.

Staleness is epochs x minibatches, the number of updates on one full batch. The learner
does not know the algorithm: it receives a clip, a loss and an advantage rule.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax import sharding
from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.learner import objective as objective_lib
from bapo_jax.learner.objective import Objective
from bapo_jax.learner.pictured import Seen
from bapo_jax.runtime import exchange
from bapo_jax.types import (
  GIVEN,
  AdvantageFunction,
  Batch,
  Groups,
  Tree,
  Unsampled,
  UpdatedTokens,
  take,
  trained_on,
)


class TrainStep(Protocol):
  """The signature of a jitted function that runs one optimiser update."""

  def __call__(
    self, params: Tree, opt: Tree, batch: Batch
  ) -> tuple[Tree, Tree, dict[str, Array], UpdatedTokens]:
    """Returns (params, opt, metrics, tokens); donates the arguments params and opt."""


class Rules(NamedTuple):
  """Holds the parts of an update that are the same in all steps of a run.

  Fields:
    advantage_rule, weights, teacher, unsampled: see `flatten`.
    minibatches: updates per epoch of a full batch.
    proximal: (params, groups, pictures) -> log-probabilities [P, G, T] of the weights
      before the first update, for loss rules that need them; else None.
    place: puts a batch onto the mesh.
  """

  train_step: TrainStep
  advantage_rule: AdvantageFunction | None
  epochs: int
  minibatches: int
  weights: tuple[float, ...] = (1.0, 1.0, 1.0)
  teacher: float = 0.0
  unsampled: Unsampled = ''
  proximal: Callable[[Tree, Groups, Seen], Array] | None = None
  place: Callable[[Batch], Batch] = lambda batch: batch


class Updated(NamedTuple):
  """The results of one optimiser update, for the record of its step."""

  seats_P: np.ndarray  # seats of the groups in `tokens`, in order of rows
  metrics: Mapping[str, Any]  # on the host, once all updates of the step are done
  tokens: UpdatedTokens
  number: int = 0  # Batch.update_B


def settled(groups: Groups) -> Groups:
  """Returns the groups without decided_PG if all responses are decided.

  The programs are then those of groups that cannot be undecided, to the bit: a mean
  over a mask is rounded differently. Every process must call it.
  """
  # Decided on the host: a static None, and not a mask of ones, selects the program.
  all_decided = exchange.whole(groups.decided_PG).all()
  return groups._replace(decided_PG=None) if all_decided else groups


def advantages(
  groups: Groups,
  source_P: Array,
  advantage_rule: AdvantageFunction | None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  reference_PGT: Array | None = None,
  teacher: float = 0.0,
) -> Array:
  """Returns the advantages [P, G, T] of tokens, times `weights`; see `flatten`.

  With step rewards it is process supervision (arXiv:2402.03300, section 4.1.3): the
  rule also compares the rewards of all steps of a group with each other, and a token
  gets the sum over the steps that end at the token or later.

  No response is compared with an undecided one, which is not in the loss.

  Args:
    advantage_rule: None leaves out the rewards.
    reference_PGT, teacher: log p(teacher), and the factor on log p(teacher) - log mu,
      which is the advantage of a token in on-policy distillation. If mu samples the
      tokens and is the policy, its gradient is that of -KL(pi || p(teacher)). For
      another policy pi it is that of KL(pi || mu) - KL(pi || p(teacher)).
  """
  P, G, T = groups.tokens_PGT.shape
  reward_PGT, end_PGT = groups.step_reward_PGT, groups.step_end_PGT
  # 1. One number per response, by the rule; or per token, if the rule reads groups.
  if advantage_rule is None:
    adv_PGT = jnp.zeros((P, G, T), jnp.float32)
  elif advantage_rule.reads == 'groups':
    all_PG = jnp.ones_like(groups.correct_PG)
    decided_PG = all_PG if groups.decided_PG is None else groups.decided_PG
    adv_PGT = advantage_rule(groups._replace(decided_PG=decided_PG))
    adv_PGT = jnp.where(decided_PG[..., None], adv_PGT, 0)
  else:
    adv_PG = compared(advantage_rule, groups.reward_PG, groups.decided_PG)
    adv_PGT = jnp.broadcast_to(adv_PG[..., None], (P, G, T))
    # 2. Step rewards are credited to all tokens up to the end of their step.
    if reward_PGT is not None and end_PGT is not None:
      steps = (x.reshape(P, G * T) for x in (reward_PGT, end_PGT))
      step_PGT = compared(advantage_rule, *steps).reshape(P, G, T)
      adv_PGT += jax.lax.cumsum(step_PGT, axis=2, reverse=True)
  # A rule of rewards compares responses, so its number spreads over the tokens.
  # 3. A teacher speaks to every sampled token, also where the rule gives 0.
  if reference_PGT is not None and teacher:
    # A given token has no mu to compare the teacher with.
    closer_PGT = reference_PGT - groups.behavior_logp_PGT
    sampled_PGT = groups.policy_version_PGT != GIVEN
    adv_PGT += teacher * jnp.where(sampled_PGT, closer_PGT, 0)
  weight_P = jnp.asarray(weights, jnp.float32)[source_P]
  # A user's rule may return anything, such as nan, outside responses.
  return jnp.where(groups.response_mask_PGT, adv_PGT * weight_P[:, None, None], 0)


def compared(
  rule: AdvantageFunction, reward_PG: Array, decided_PG: Array | None
) -> Array:
  """Returns adv_PG by a rule of rewards; rewards outside decided_PG are not compared.

  A custom rule takes no mask: a group with an undecided response has no advantages.
  """
  if decided_PG is None:
    return rule(reward_PG)
  if rule.custom:
    return jnp.where(decided_PG.all(1, keepdims=True), rule(reward_PG), 0)
  # In a group without any reward to compare, all zeros are equal.
  return rule(reward_PG, decided_PG | ~decided_PG.any(1, keepdims=True))


def flatten(
  groups: Groups,
  source_P: Array,
  advantage_rule: AdvantageFunction | None,
  prox_PGT: Array | None = None,
  weights: tuple[float, ...] = (1.0, 1.0, 1.0),
  version: int | Array = -1,
  pictures: Seen = None,
  number: int | Array = 0,
  reference_PGT: Array | None = None,
  teacher: float = 0.0,
  unsampled: Unsampled = '',
) -> Batch:
  """Returns the flat batch [P*G, T]; empty seats and masked responses have no loss.

  Args:
    source_P: index into types.SOURCES, -1 for an empty seat.
    prox_PGT: log-probabilities of the proximal policy, nats; None: behaviour policy.
    weights: factor on the advantage per source, in the order of types.SOURCES; clip
      rules use the weighted advantages.
    version: learner step of the weights before the first update; -1 if these weights
      sampled none of the tokens.
    number: see Batch.update_B.
    reference_PGT, teacher: see `advantages`.
    unsampled: 'given' trains on given responses by `loss.from_given`, 'messages' on
      what an environment wrote between two turns; '' if groups have neither.
  """
  P, G, _ = groups.tokens_PGT.shape
  # An empty seat of a fixed-size batch has rows like any other, without a loss.
  teaches_PG = groups.teaches_PG & (source_P >= 0)[:, None]
  trained_PGT = groups.response_mask_PGT & teaches_PG[..., None]
  loss_mask_PGT, given_PGT = _divided(trained_PGT, groups, unsampled)
  on_policy_PGT = groups.response_mask_PGT & (groups.policy_version_PGT == version)
  prox_PGT = groups.behavior_logp_PGT if prox_PGT is None else prox_PGT
  adv_PGT = advantages(
    groups,
    source_P,
    advantage_rule,
    weights=weights,
    reference_PGT=reference_PGT,
    teacher=teacher,
  )

  def rows(x_PGT: Array | None) -> Any:
    return None if x_PGT is None else x_PGT.reshape(P * G, *x_PGT.shape[2:])

  return Batch(
    tokens_BT=rows(groups.tokens_PGT),
    loss_mask_BT=rows(loss_mask_PGT),
    behavior_logp_BT=rows(groups.behavior_logp_PGT),
    prox_BT=rows(prox_PGT),
    adv_BT=rows(adv_PGT),
    source_B=jnp.repeat(source_P, G),
    on_policy_BT=rows(on_policy_PGT),
    reference_BT=rows(reference_PGT),
    update_B=jnp.full(P * G, number, jnp.int32),
    pictures=pictures,
    routes_BTX=rows(groups.routes_PGTX),
    given_BT=rows(given_PGT),
  )


def _divided(
  trained_PGT: Array, groups: Groups, unsampled: Unsampled
) -> tuple[Array, Array | None]:
  """Returns the masks of the sampled and of the other tokens to train on."""
  # Empty seats and masked responses are in neither mask.
  if unsampled == 'given':
    given_PGT = groups.policy_version_PGT == GIVEN
    return trained_PGT & ~given_PGT, trained_PGT & given_PGT
  if unsampled == 'messages':
    # What is not sampled, between the first and the last sampled token.
    so_far_PGT = trained_PGT.cumsum(-1)
    inside_PGT = (so_far_PGT > 0) & (so_far_PGT < so_far_PGT[..., -1:])
    return trained_PGT, inside_PGT & ~trained_PGT
  return trained_PGT, None


def update(
  params: Tree,
  opt: Tree,
  groups: Groups,
  source_P: Array,
  key: Array,
  rules: Rules,
  *,
  pictures: Seen = None,
  version: int = -1,
  number: int = 0,
  reference_PGT: Array | None = None,
) -> tuple[Tree, Tree, list[Updated]]:
  """Runs epochs x minibatches optimiser updates on one batch.

  A minibatch is a random set of whole groups. An underfilled batch takes fewer updates
  (`_minibatches`); a batch without tokens to train on takes no update.

  Args:
    groups, source_P, pictures, version, reference_PGT: see `flatten`.
    key: determines the minibatches of every epoch.
    number: Batch.update_B of the first update.

  Returns:
    (params, opt, updates in order).
  """
  # All randomness of the step in one program, before the first update.
  source_P, order_EP = _seats(groups, source_P, key, rules.epochs)
  filled_P = exchange.whole(source_P) >= 0
  if not filled_P.any():
    return params, opt, []
  # Before the first update, and once: all updates of the step share this policy.
  prox_PGT = None
  if rules.proximal is not None:
    prox_PGT = rules.proximal(params, groups, pictures)
  arrays = settled(groups), source_P, prox_PGT, pictures, reference_PGT
  # Nothing in this loop waits for the device: metrics are fetched when all updates are
  # dispatched, so the host prepares the next minibatch while the device computes.
  updates = []
  for order_P in exchange.whole(order_EP):
    # Whole groups: a response is never compared with others than those in its update,
    # which a batch rule may count on.
    for seats_P in _minibatches(order_P, filled_P, rules.minibatches):
      batch = _part(
        arrays,
        seats_P,
        version,
        number + len(updates),
        advantage_rule=rules.advantage_rule,
        weights=rules.weights,
        teacher=rules.teacher,
        unsampled=rules.unsampled,
      )
      params, opt, metrics, tokens = rules.train_step(params, opt, rules.place(batch))
      updates.append(Updated(seats_P, metrics, tokens, number + len(updates)))
  on_host = exchange.fetched([update.metrics for update in updates])
  updates = [u._replace(metrics=x) for u, x in zip(updates, on_host, strict=True)]
  return params, opt, updates


@functools.partial(jax.jit, static_argnames='epochs')
def _seats(
  groups: Groups, source_P: Array, key: Array, epochs: int
) -> tuple[Array, Array]:
  """Returns source_P, -1 for groups without a loss, and a seat order per epoch."""
  keys = jax.random.split(key, epochs)
  order_EP = [jax.random.permutation(key, len(source_P)) for key in keys]
  return jnp.where(trained_on(groups).any(1), source_P, -1), jnp.stack(order_EP)


def _minibatches(
  order_P: np.ndarray, filled_P: np.ndarray, minibatches: int
) -> list[np.ndarray]:
  """Splits the P seats of a batch, in this order, into minibatches of equal size.

  Equal sizes need only one compiled program. The size is P / `minibatches`. n filled
  seats are spread evenly over ceil(n / size) minibatches, and empty seats pad each of
  them to the size. So a half-empty batch takes fewer steps than a full batch, as in the
  public code of Batch Adaptation PO.
  """
  # On the host: which seats are filled decides how many updates there are.
  size = len(order_P) // minibatches
  filled = order_P[filled_P[order_P]]
  empty = order_P[~filled_P[order_P]]
  parts = []
  for part in np.array_split(filled, -(-len(filled) // size)):
    pad, empty = np.split(empty, [size - len(part)])
    parts.append(np.concatenate([part, pad]))
  return parts


@functools.partial(
  jax.jit, static_argnames=('advantage_rule', 'weights', 'teacher', 'unsampled')
)
def _part(arrays, seats_P, version, number, **credit) -> Batch:
  # Seats are an argument: all minibatches of a run share this program.
  groups, source_P, prox_PGT, pictures, reference_PGT = take(arrays, seats_P)
  return flatten(
    groups,
    source_P,
    prox_PGT=prox_PGT,
    version=version,
    pictures=pictures,
    number=number,
    reference_PGT=reference_PGT,
    **credit,
  )


def learn(
  params: Tree,
  opt: Tree,
  batch: Batch,
  base: Tree = None,
  *,
  tx: optax.GradientTransformation,
  objective: Objective,
) -> tuple[Tree, Tree, dict[str, Array], UpdatedTokens]:
  """Runs one optimiser update on one minibatch.

  Skips an update, counted in learner/skipped, whose loss or gradient is not finite, or,
  since rows that teach nothing are not computed, a recorded log-probability is not.

  Args:
    base: frozen weights, see `objective.gradient`.

  Returns:
    (params, opt, metrics, log-probability, ratio and cut of each token).
  """
  value, grads, (stats, bounds) = objective_lib.gradient(params, batch, objective, base)
  rule = objective.loss_rule
  scale_B = loss.row_scale(batch.loss_mask_BT, rule.aggregate, objective.length)
  computed = objective.computed(batch)
  # Compares sampler and learner on the tokens that these weights sampled.
  same_BT = computed.loss_mask_BT & batch.on_policy_BT
  diff_BT = jnp.where(same_BT, jnp.abs(stats.logp_BT - batch.behavior_logp_BT), 0)
  norm = optax.tree.norm(grads)
  sampled_BT = jnp.where(batch.loss_mask_BT, batch.behavior_logp_BT, 0)
  finite = jnp.isfinite(value) & jnp.isfinite(norm) & jnp.isfinite(sampled_BT).all()
  metrics = diagnostics.diagnose(rule, stats, computed, bounds, scale_B) | {
    'loss/value': value,
    'learner/grad_norm': norm,
    'learner/skipped': ~finite,
    'learner/tokens': batch.trained_BT.sum(),
    'learner/tokens_computed': computed.trained_BT.sum(),
    'rollout/logp_diff': diff_BT.sum() / same_BT.sum(),
    'rollout/logp_diff_max': jnp.where(same_BT.any(), diff_BT.max(), jnp.nan),
  }
  if computed.given_BT is not None:
    metrics['given/logp'] = diagnostics.mean_or_nan(stats.logp_BT, computed.given_BT)
  if stats.agree_BT is not None:
    mask_BT = computed.loss_mask_BT
    metrics['moe/agree'] = (stats.agree_BT * mask_BT).sum() / mask_BT.sum()
  tokens = diagnostics.updated_tokens(rule, stats.logp_BT, computed, bounds)

  def apply(state):
    params, opt = state
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt

  # An update without a token is skipped: the moments alone would move the weights. So
  # is a non-finite update: it would ruin moments and weights for good. `cond`, because
  # a `where` between old and new state costs as much memory traffic as the update.
  sound = batch.trained_BT.any() & finite
  state = jax.lax.cond(sound, apply, lambda state: state, (params, opt))
  # Placed explicitly: a program that returns arrays elsewhere would compile again at
  # the next update, and could not reuse the donated ones.
  params, opt = sharding.constrain_state(*state)
  return params, opt, metrics, sharding.constrain_rows(tokens)
