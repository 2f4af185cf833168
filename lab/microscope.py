"""Computes the exact expected update of rules where responses can be enumerated.

A task with a few thousand responses per prompt has an exact policy gradient: every
response is enumerated, so no sampling stands between a rule and its effect.

1. `Task` and `enumerate_task` list all responses with their verdicts;
2. `train` runs real updates and keeps the weights, so that mu is a policy of k updates
   ago and pi the current one;
3. `Tables` holds log pi and log mu of every token of every response, and `slopes` the
   gradient of log pi of every token after every prefix, so that `gradient` turns the
   weights of tokens into an update by one product;
4. `true_gradient` is the gradient of the accuracy J, and `moments` the exact mean and
   mean square of the update of one group;
5. `sampled` draws minibatches and computes the update of each of them, for rules whose
   bounds depend on the minibatch.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from scipy import stats

from bapo_jax.algorithms import advantage, clip, loss, masks
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.learner import learner, optimizer
from bapo_jax.learner.objective import Objective
from bapo_jax.models import layers, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import (
  AdvantageFunction,
  Batch,
  ClipFunction,
  MaskFunction,
  Tree,
)

SYMBOLS, POSITIONS, PROMPTS = 8, 4, 4
PLACES = PROMPTS * sum(SYMBOLS**n for n in range(1, POSITIONS + 1))  # K
GROUP = 8  # responses of a group
SPEC = ModelSpec(
  vocab=SYMBOLS,  # prompt p is symbol p in the first column
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_width=8,
  ffn=64,
)
CHUNK = 4096  # responses of one forward pass


class Task(NamedTuple):
  """Every response to every prompt: N = PROMPTS x SYMBOLS^POSITIONS rows."""

  tokens_NT: Array  # the prompt, then POSITIONS symbols
  prompt_N: Array
  right_N: Array  # the verdicts
  mask_NT: Array  # False for the prompt
  place_NT: Array  # number of the token after its prefix, below K; 0 for the prompt


class Rule(NamedTuple):
  """A method: the rules of the slots that change the gradient."""

  loss: LossRule = loss.Clipped()
  clip: ClipFunction = clip.Fixed()
  mask: MaskFunction = masks.NoMask()
  advantage: AdvantageFunction = advantage.GroupRelative()
  whole_batch: bool = False  # bounds or mask depend on the other responses


GRPO = Rule()


class Tables(NamedTuple):
  """Log-probabilities of every token of every response, nats."""

  logp_NT: Array  # under pi
  logq_NT: Array  # under mu

  def seen(self, task: Task) -> Array:
    """Returns mu(y), the probability [N] of each response given its prompt."""
    return probability(self.logq_NT, task)


def enumerate_task() -> Task:
  """Returns all responses: right if each symbol follows its predecessor closely.

  To prompt p, symbol b may follow a if (b - a) modulo SYMBOLS is in 1, ..., p + 1:
  0.2 % of all responses are right to prompt 0, and 12.5 % to prompt 3.
  """
  symbols = np.asarray(list(itertools.product(range(SYMBOLS), repeat=POSITIONS)))
  prompt_N = np.repeat(np.arange(PROMPTS), len(symbols))
  body = np.tile(symbols, (PROMPTS, 1))
  rise = np.diff(body, axis=1) % SYMBOLS
  right_N = ((rise >= 1) & (rise <= prompt_N[:, None] + 1)).all(1)
  tokens_NT = np.concatenate([prompt_N[:, None], body], 1)
  mask_NT = np.broadcast_to(np.arange(POSITIONS + 1) > 0, tokens_NT.shape)
  # The first n symbols of a response have a number below SYMBOLS^n. A prompt has its
  # own range of places, in which those of shorter prefixes come first.
  number_N = np.tile(np.arange(len(symbols)), PROMPTS)
  sizes = SYMBOLS ** np.arange(1, POSITIONS + 1)
  prefix_NT = number_N[:, None] // (len(symbols) // sizes)
  place_NT = prompt_N[:, None] * sizes.sum() + np.cumsum(sizes) - sizes + prefix_NT
  return Task(
    jnp.int32(tokens_NT),
    jnp.int32(prompt_N),
    jnp.asarray(right_N),
    jnp.asarray(mask_NT),
    jnp.int32(np.pad(place_NT, ((0, 0), (1, 0)))),
  )


def logp_of(params: Tree, tokens_BT: Array) -> Array:
  """Returns log pi of each token [B, T], nats; 0 for the prompt."""
  hidden_BTD = layers.forward(params, tokens_BT, SPEC)
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(params))
  logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
  logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], 2)[..., 0]
  return jnp.pad(logp_BT, ((0, 0), (1, 0)))


@jax.jit
def table(params: Tree, task: Task) -> Array:
  """Returns log pi [N, T] of every token of every response, nats."""
  parts = task.tokens_NT.reshape(-1, CHUNK, task.tokens_NT.shape[1])
  logp = jax.lax.map(functools.partial(logp_of, params), parts)
  return logp.reshape(task.tokens_NT.shape)


def slopes(params: Tree, task: Task) -> Array:
  """Returns grad log pi [K, P] of each token after each prefix; P weights, flat."""
  flat_P, unflatten = ravel_pytree(params)
  _, at_K = np.unique(np.asarray(task.place_NT)[:, 1:], return_index=True)
  row_K, column_K = np.divmod(at_K, POSITIONS)

  @jax.jit
  def compute(flat_P: Array, tokens_KT: Array, column_K: Array) -> Array:
    def logp(flat_P: Array, tokens_T: Array, column: Array) -> Array:
      return logp_of(unflatten(flat_P), tokens_T[None])[0, column]

    slope = functools.partial(jax.grad(logp), flat_P)
    return jax.lax.map(lambda x: slope(*x), (tokens_KT, column_K), batch_size=256)

  return compute(flat_P, task.tokens_NT[row_K], jnp.asarray(column_K + 1))


@jax.jit
def gradient(slopes_KP: Array, task: Task, weight_NT: Array) -> Array:
  """Returns the sum [P] over all tokens of weight x grad log pi(token)."""
  return _by_place(task, weight_NT) @ slopes_KP


def _by_place(task: Task, weight_NT: Array) -> Array:
  """Sums the weights of equal tokens after equal prefixes: [K]."""
  weight_NT = jnp.where(task.mask_NT, weight_NT, 0)
  return jnp.zeros(PLACES, weight_NT.dtype).at[task.place_NT].add(weight_NT)


def probability(logp_NT: Array, task: Task) -> Array:
  """Returns the probability [N] of each response given its prompt."""
  return jnp.exp(jnp.where(task.mask_NT, logp_NT, 0).sum(1))


def accuracy(logp_NT: Array, task: Task) -> Array:
  """Returns J: the probability of a right response, mean over the prompts."""
  return jnp.where(task.right_N, probability(logp_NT, task), 0).sum() / PROMPTS


def true_gradient(slopes_KP: Array, logp_NT: Array, task: Task) -> Array:
  """Returns the exact gradient of J: the sum of pi(y) R(y) grad log pi(y)."""
  seen_N = probability(logp_NT, task)
  return gradient(slopes_KP, task, (seen_N * task.right_N)[:, None] / PROMPTS)


def batch_of(task: Task, tables: Tables, index_B: Array, adv_B: Array) -> Batch:
  """Returns these responses as a minibatch with these advantages."""
  mask_BT = task.mask_NT[index_B]
  old_BT = jnp.where(mask_BT, tables.logq_NT[index_B], 0)
  zero_B = jnp.zeros(len(index_B), jnp.int32)
  tokens_BT = task.tokens_NT[index_B]
  adv_BT = jnp.broadcast_to(adv_B[:, None], mask_BT.shape)
  return Batch(tokens_BT, mask_BT, old_BT, old_BT, adv_BT, zero_B, mask_BT)


@functools.partial(jax.jit, static_argnames='rule')
def unscaled(rule: Rule, logp_BT: Array, batch: Batch) -> Array:
  """Returns the weight of grad log pi of each token, a sum over tokens of a row."""
  scale_B = jnp.ones(len(logp_BT), logp_BT.dtype)
  find = loss.finder((rule.loss, rule.clip, rule.mask), logp_BT, batch, scale_B)
  _, bounds = rule.loss(logp_BT, batch, find)
  return loss.weights(rule.loss, logp_BT, batch, bounds)


def weights_of(rule: Rule, logp_BT: Array, batch: Batch) -> Array:
  """Returns the weight of grad log pi of each token, a mean over tokens of a row."""
  return unscaled(rule, logp_BT, batch) / POSITIONS


def rates(task: Task, tables: Tables) -> np.ndarray:
  """Returns the probability [Q] of a right response to each prompt under mu."""
  seen_N = np.asarray(tables.seen(task), np.float64)
  return np.where(task.right_N, seen_N, 0).reshape(PROMPTS, -1).sum(1)


def moments(
  rules: Sequence[Rule], task: Task, tables: Tables, slopes_KP: Array
) -> tuple[Array, np.ndarray]:
  """Returns the exact moments of the update of one group under each of the rules.

  A group has GROUP responses to a random prompt.

  Returns:
    The mean update [R, P], which is that of any number of groups, and the mean of
    |update|^2 [R].

  Raises:
    ValueError: the bounds depend on the minibatch: use `sampled`.
  """
  if any(rule.whole_batch for rule in rules):
    raise ValueError('a rule reads the whole minibatch: use sampled()')
  inner_NTT = _inner(task, slopes_KP)
  pairs = [_moments(rule, task, tables, slopes_KP, inner_NTT) for rule in rules]
  mean_RP, square_R = zip(*pairs, strict=True)
  return jnp.stack(mean_RP), np.asarray(square_R)


def _moments(
  rule: Rule, task: Task, tables: Tables, slopes_KP: Array, inner_NTT: Array
) -> tuple[Array, float]:
  """Returns the mean update [P] and the mean of |update|^2.

  The weights of a token are those of an advantage of 1 or -1 times the size of the
  advantage, as in every rule here. With n_v responses of verdict v and advantages of
  size a_v, the update is sum_v a_v sum_i d_i / G. Of responses with equal verdicts, d_i
  are independent and have the mean `side`, so

    E |sum_i d_i|^2 = n_v (E |d|^2 - |side|^2) + n_v^2 |side|^2.
  """
  rate_Q = rates(task, tables)
  right_K = np.arange(GROUP + 1)  # right responses of a group
  chance_QK = stats.binom.pmf(right_K, GROUP, rate_Q[:, None])
  reward_KG = jnp.float32(right_K[:, None] > np.arange(GROUP))
  adv_KG = np.asarray(rule.advantage(reward_KG))
  number_VK = np.stack([right_K, GROUP - right_K])
  size_VK = np.stack([adv_KG[:, 0], -adv_KG[:, -1]])  # without effect if n_v is 0
  total_VK = number_VK * size_VK

  share_VQ = np.stack([rate_Q, 1 - rate_Q])
  side_VQP, square_VQ = _sides(rule, task, tables, slopes_KP, inner_NTT)
  side_VQP /= share_VQ[..., None]
  square_VQ = np.asarray(square_VQ, np.float64) / share_VQ
  inner_QVW = np.asarray(jnp.einsum('vqp,wqp->qvw', side_VQP, side_VQP), np.float64)
  spread_VQ = square_VQ - np.einsum('qvv->vq', inner_QVW)
  mean_VQ = np.einsum('qk,vk->vq', chance_QK, total_VK) / GROUP / PROMPTS
  square = np.einsum('qk,vk,wk,qvw->', chance_QK, total_VK, total_VK, inner_QVW)
  square += np.einsum('qk,vk,vq->', chance_QK, total_VK * size_VK, spread_VQ)
  mean_P = jnp.einsum('vq,vqp->p', jnp.asarray(mean_VQ, slopes_KP.dtype), side_VQP)
  return mean_P, square / GROUP**2 / PROMPTS


@functools.partial(jax.jit, static_argnames='rule')
def _sides(
  rule: Rule, task: Task, tables: Tables, slopes_KP: Array, inner_NTT: Array
) -> tuple[Array, Array]:
  """Returns the means [2, Q, P] of d and [2, Q] of |d|^2: right, wrong.

  d is the update of one response with an advantage of 1 if it is right, else -1; means
  over mu, where a response with the other verdict counts 0.
  """
  seen_N, index_N = tables.seen(task), jnp.arange(len(task.right_N))
  batch = batch_of(task, tables, index_N, jnp.where(task.right_N, 1.0, -1.0))
  weight_NT = weights_of(rule, tables.logp_NT, batch)
  seen_VN = jnp.stack([task.right_N, ~task.right_N]) * seen_N[None]
  place_VK = jax.vmap(functools.partial(_by_place, task))(
    seen_VN[..., None] * weight_NT[None]
  )
  place_VQK = place_VK.reshape(2, PROMPTS, -1)
  slopes_QKP = slopes_KP.reshape(PROMPTS, -1, slopes_KP.shape[1])
  side_VQP = jnp.einsum('vqk,qkp->vqp', place_VQK, slopes_QKP)
  square_N = jnp.einsum('nt,nts,ns->n', weight_NT, inner_NTT, weight_NT)
  return side_VQP, (seen_VN * square_N[None]).reshape(2, PROMPTS, -1).sum(2)


@jax.jit
def _inner(task: Task, slopes_KP: Array) -> Array:
  """Returns the inner products [N, T, T] of the slopes of the tokens of a response."""

  def one(row: tuple[Array, Array]) -> Array:
    slopes_TP = jnp.where(row[1][:, None], slopes_KP[row[0]], 0)
    return slopes_TP @ slopes_TP.T

  return jax.lax.map(one, (task.place_NT, task.mask_NT), batch_size=256)


class Sampled(NamedTuple):
  """Updates under one rule from minibatches drawn from mu."""

  weight_NT: Array  # mean weight of each token
  along_MV: np.ndarray  # update . direction, by minibatch and direction
  square_M: np.ndarray  # |update|^2


def sampled(
  rules: Sequence[Rule],
  task: Task,
  tables: Tables,
  slopes_KP: Array,
  directions_VP: Array,
  responses: int,
  minibatches: int,
  seed: int = 0,
) -> list[Sampled]:
  """Draws minibatches of whole groups; computes the update of each under each rule.

  Args:
    responses: responses per minibatch, a multiple of GROUP; prompts are drawn.
  """
  keys_M = jax.random.split(jax.random.key(seed), minibatches)
  weight_RNT, *others = _sampled(
    tuple(rules), task, tables, slopes_KP, directions_VP, keys_M, responses // GROUP
  )
  along_RMV, square_RM = map(np.asarray, others)
  return list(map(Sampled, weight_RNT, along_RMV, square_RM))


@functools.partial(jax.jit, static_argnames=('rules', 'groups'))
def _sampled(
  rules: tuple[Rule, ...],
  task: Task,
  tables: Tables,
  slopes_KP: Array,
  directions_VP: Array,
  keys_M: Array,
  groups: int,
) -> tuple[Array, Array, Array]:
  """Returns (mean weights, products with directions, squares), rule by rule."""
  up_to_QR = cumulative(task, tables)

  def one(key: Array) -> tuple[Array, Array, Array, Array]:
    weights = []
    for rule in rules:  # the same responses for every rule
      batch, index_B = drawn(task, tables, up_to_QR, rule.advantage, key, groups)
      found_BT = weights_of(rule, tables.logp_NT[index_B], batch)
      weights.append(found_BT / (groups * GROUP))
    weight_RBT = jnp.stack(weights)
    place_BT = task.place_NT[index_B][:, 1:]
    flat = weight_RBT[..., 1:].reshape(len(rules), -1)
    update_RP = flat @ slopes_KP[place_BT.reshape(-1)]
    along_RV = update_RP @ directions_VP.T
    return index_B, weight_RBT, along_RV, jnp.square(update_RP).sum(1)

  index_MB, weight_MRBT, along_MRV, square_MR = jax.lax.map(one, keys_M)
  zero_RNT = jnp.zeros((len(rules), *task.mask_NT.shape))
  mean_RNT = zero_RNT.at[:, index_MB].add(jnp.moveaxis(weight_MRBT, 1, 0))
  return mean_RNT / len(keys_M), jnp.moveaxis(along_MRV, 1, 0), square_MR.T


def cumulative(task: Task, tables: Tables) -> Array:
  """Returns the cumulative probabilities [Q, R] of each prompt's responses."""
  return jnp.cumsum(tables.seen(task).reshape(PROMPTS, -1), 1)


def drawn(
  task: Task,
  tables: Tables,
  up_to_QR: Array,
  rule: AdvantageFunction,
  key: Array,
  groups: int,
) -> tuple[Batch, Array]:
  """Draws whole groups by `cumulative`; returns (minibatch, its rows [B])."""
  of_prompt, of_rows = jax.random.split(key)
  prompt_P = jax.random.randint(of_prompt, (groups,), 0, PROMPTS)
  up_to_PR = up_to_QR[prompt_P]
  point_PG = jax.random.uniform(of_rows, (groups, GROUP)) * up_to_PR[:, -1:]
  row_PG = jax.vmap(functools.partial(jnp.searchsorted, side='right'))(
    up_to_PR, point_PG
  )
  index_B = (prompt_P[:, None] * SYMBOLS**POSITIONS + row_PG).reshape(-1)
  reward_PG = task.right_N[index_B].astype(jnp.float32).reshape(groups, GROUP)
  return batch_of(task, tables, index_B, rule(reward_PG).reshape(-1)), index_B


def warm_start(task: Task, steps: int, seed: int = 0) -> Tree:
  """Trains fresh weights on responses; returns the weights.

  Half of the responses are right and half are random, so that the policy is sometimes
  right.
  """
  key = jax.random.key(seed)
  params = transformer.init(SPEC, key)
  tx = optimizer.make(optimizer.AdamW(lr=3e-3, warmup=0, b2=0.999))
  opt = tx.init(params)
  right = np.flatnonzero(np.asarray(task.right_N))
  rng = np.random.default_rng(seed)

  @jax.jit
  def step(params: Tree, opt: Tree, tokens_BT: Array) -> tuple[Tree, Tree]:
    def nll(params: Tree) -> Array:
      return -logp_of(params, tokens_BT)[:, 1:].mean()

    updates, opt = tx.update(jax.grad(nll)(params), opt, params)
    return jax.tree.map(jnp.add, params, updates), opt

  for _ in range(steps):
    rows = rng.choice(right, 256)
    other = rng.integers(0, len(task.right_N), 256)
    rows = np.where(rng.random(256) < 0.5, other, rows)
    params, opt = step(params, opt, task.tokens_NT[rows])
  return params


def train(
  params: Tree,
  task: Task,
  updates: int,
  rule: Rule = GRPO,
  lr: float = 1e-3,
  groups: int = 16,
  seed: int = 0,
  block: int = 1,
) -> list[Tree]:
  """Trains by reinforcement; returns the weights after each update.

  Entry 0 holds the weights before the first update. An update is `learner.learn`, with
  the objective of the package, on `groups` groups of GROUP responses, which the weights
  at the start of its block of updates sample.
  """
  tx, learn = learner_of(rule, lr)
  opt, kept = tx.init(params), [params]
  keys = jax.random.split(jax.random.key(seed), updates)
  for start in range(0, updates, block):
    logp_NT = table(params, task)
    tables = Tables(logp_NT, logp_NT)
    up_to_QR = cumulative(task, tables)
    for key in keys[start : start + block]:
      batch, _ = drawn(task, tables, up_to_QR, rule.advantage, key, groups)
      params, opt, _, _ = learn(params, opt, batch)
      kept.append(params)
  return kept


@functools.cache
def learner_of(rule: Rule, lr: float) -> tuple[optax.GradientTransformation, Any]:
  """Returns AdamW and the jitted update of a rule."""
  objective = Objective(
    clip_rule=rule.clip,
    loss_rule=rule.loss,
    mask_rule=rule.mask,
    spec=SPEC,
    temperature=1.0,
    pack=False,
  )
  tx = optimizer.make(optimizer.AdamW(lr=lr, warmup=0, b2=0.999))
  return tx, jax.jit(functools.partial(learner.learn, tx=tx, objective=objective))


def dot(a: Array, b: Array) -> float:
  """Returns the inner product of two updates."""
  return float(a @ b)


def cosine(a: Array, b: Array) -> float:
  """Returns the cosine of the angle between two updates; nan if one is 0."""
  size = math.sqrt(dot(a, a) * dot(b, b))
  return dot(a, b) / size if size else math.nan
