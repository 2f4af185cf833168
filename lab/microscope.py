"""Computes the exact expected update of rules where responses can be enumerated.

A task with a few thousand responses per prompt has an exact policy gradient: every
response is enumerated, so no sampling stands between a rule and its effect.

1. `Task` and `enumerate_task` list all responses with their verdicts;
2. `train` runs real updates and keeps the weights, so that mu is a policy of k updates
   ago and pi the current one;
3. `Tables` holds log pi and log mu of every token of every response;
4. `expected` gives the expected weight of each token under a rule, and `gradient` turns
   weights into an update; `true_gradient` is the gradient of the accuracy J;
5. `sampled` draws minibatches and computes the update of each of them, for rules whose
   bounds depend on the minibatch, and for the noise of one minibatch.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax.algorithms import advantage, clip, loss, masks
from bapo_jax.learner import learner, optimizer
from bapo_jax.learner.objective import Objective
from bapo_jax.models import layers, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import AdvantageRule, Batch, ClipRule, LossRule, MaskRule, Tree

SYMBOLS, POSITIONS, PROMPTS = 8, 4, 4
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

  @property
  def responses(self) -> int:
    """The number of responses per prompt."""
    return SYMBOLS**POSITIONS


class Rule(NamedTuple):
  """A method: the rules of the slots that change the gradient."""

  loss: LossRule = loss.clipped
  clip: ClipRule = clip.fixed
  mask: MaskRule = masks.nothing
  advantage: AdvantageRule = advantage.group_relative
  whole_batch: bool = False  # bounds or mask depend on the other responses


GRPO = Rule()


class Tables(NamedTuple):
  """Log-probabilities of every token of every response, nats."""

  logp_NT: Array  # under pi
  logq_NT: Array  # under mu

  def seen(self, task: Task) -> Array:
    """Returns mu(y), the probability [N] of each response given its prompt."""
    return jnp.exp(jnp.where(task.mask_NT, self.logq_NT, 0).sum(1))


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
  return Task(
    jnp.asarray(tokens_NT, jnp.int32),
    jnp.asarray(prompt_N, jnp.int32),
    jnp.asarray(right_N),
    jnp.asarray(mask_NT),
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


@jax.jit
def gradient(params: Tree, task: Task, weight_NT: Array) -> Tree:
  """Returns the sum over all tokens of weight x grad log pi(token)."""

  def add(total: Tree, part: tuple[Array, Array]) -> tuple[Tree, None]:
    tokens_BT, weight_BT = part

    def weighted(params: Tree) -> Array:
      return (weight_BT * logp_of(params, tokens_BT)).sum()

    return jax.tree.map(jnp.add, total, jax.grad(weighted)(params)), None

  def of_rows(x_NT: Array) -> Array:
    return x_NT.reshape(-1, CHUNK, x_NT.shape[1])

  zero = jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(add, zero, (of_rows(task.tokens_NT), of_rows(weight_NT)))[0]


def accuracy(logp_NT: Array, task: Task) -> Array:
  """Returns J: the probability of a right response, mean over the prompts."""
  seen_N = jnp.exp(jnp.where(task.mask_NT, logp_NT, 0).sum(1))
  return jnp.where(task.right_N, seen_N, 0).sum() / PROMPTS


def entropy(logp_NT: Array, task: Task) -> Array:
  """Returns the entropy of a response, nats, mean over the prompts."""
  total_N = jnp.where(task.mask_NT, logp_NT, 0).sum(1)
  return -(jnp.exp(total_N) * total_N).sum() / PROMPTS


def true_gradient(params: Tree, task: Task) -> Tree:
  """Returns the exact gradient of J: the sum of pi(y) R(y) grad log pi(y)."""
  return gradient(params, task, _score(table(params, task), task, task.right_N))


def entropy_gradient(params: Tree, task: Task) -> Tree:
  """Returns the exact gradient of the entropy of a response."""
  logp_NT = table(params, task)
  total_N = jnp.where(task.mask_NT, logp_NT, 0).sum(1)
  return gradient(params, task, _score(logp_NT, task, -total_N))


def _score(logp_NT: Array, task: Task, value_N: Array) -> Array:
  """Returns the weights of the gradient of the sum of pi(y) value(y), per prompt."""
  total_N = jnp.where(task.mask_NT, logp_NT, 0).sum(1)
  return jnp.where(task.mask_NT, (jnp.exp(total_N) * value_N)[:, None], 0) / PROMPTS


def advantages(rule: AdvantageRule) -> tuple[np.ndarray, np.ndarray]:
  """Returns the advantage [G] of a right and of a wrong response.

  Entry k is for k right responses among the G - 1 others.
  """
  others = np.arange(GROUP)
  right, wrong = [], []
  for k in others:
    reward = np.zeros((2, GROUP), np.float32)
    reward[0, : k + 1] = 1  # the first response is right, and k others
    reward[1, 1 : k + 1] = 1  # the first response is wrong
    adv = np.asarray(rule(jnp.asarray(reward)))[:, 0]
    right.append(adv[0])
    wrong.append(adv[1])
  return np.asarray(right), np.asarray(wrong)


def binomial(rate_Q: np.ndarray) -> np.ndarray:
  """Returns the probability [Q, G] of k right responses among G - 1 others."""
  n = GROUP - 1
  ways = np.asarray([math.comb(n, k) for k in range(GROUP)])
  k, rate = np.arange(GROUP), np.asarray(rate_Q, np.float64)[:, None]
  return ways * rate**k * (1 - rate) ** (n - k)


def batch_of(task: Task, tables: Tables, index_B: Array, adv_B: Array) -> Batch:
  """Returns these responses as a minibatch with these advantages."""
  mask_BT = task.mask_NT[index_B]
  old_BT = jnp.where(mask_BT, tables.logq_NT[index_B], 0)
  zero_B = jnp.zeros(len(index_B), jnp.int32)
  tokens_BT = task.tokens_NT[index_B]
  return Batch(tokens_BT, mask_BT, old_BT, old_BT, adv_B, zero_B, mask_BT)


def weights_of(rule: Rule, logp_BT: Array, batch: Batch) -> Array:
  """Returns the weight of grad log pi of each token, a mean over tokens of a row."""
  scale_B = jnp.ones(len(batch.adv_B), logp_BT.dtype)
  find = loss.finder((rule.loss, rule.clip, rule.mask), logp_BT, batch, scale_B)
  _, bounds = rule.loss(logp_BT, batch, find)
  return loss.weights(rule.loss, logp_BT, batch, bounds) / POSITIONS


def expected(rule: Rule, task: Task, tables: Tables) -> Array:
  """Returns the expected weight of each token [N, T] in an update on data of mu.

  The sum over responses y of mu(y) E[w | y], a mean over prompts and over tokens. A
  group has GROUP responses; the advantage of y depends on how many of the others are
  right, which is binomial.

  Raises:
    ValueError: the bounds depend on the minibatch: use `sampled`.
  """
  if rule.whole_batch:
    raise ValueError('the rule reads the whole minibatch: use sampled()')
  seen_N = tables.seen(task)
  rate_Q = jax.ops.segment_sum(
    jnp.where(task.right_N, seen_N, 0), task.prompt_N, PROMPTS
  )
  chance_QG = jnp.asarray(binomial(np.asarray(rate_Q)), seen_N.dtype)
  adv = jnp.asarray(np.stack(advantages(rule.advantage)))  # right, wrong

  return _expected(rule, task, tables, chance_QG, adv)


@functools.partial(jax.jit, static_argnames='rule')
def _expected(
  rule: Rule, task: Task, tables: Tables, chance_QG: Array, adv: Array
) -> Array:
  """Sums the weights over the number of right responses among the others."""
  index_N = jnp.arange(len(task.right_N))

  def add(k: Array, total_NT: Array) -> Array:
    adv_N = jnp.where(task.right_N, adv[0, k], adv[1, k])
    batch = batch_of(task, tables, index_N, adv_N)
    weight_NT = weights_of(rule, tables.logp_NT, batch)
    return total_NT + chance_QG[task.prompt_N, k][:, None] * weight_NT

  zero_NT = jnp.zeros(task.mask_NT.shape, adv.dtype)
  total_NT = jax.lax.fori_loop(0, GROUP, add, zero_NT)
  return tables.seen(task)[:, None] * total_NT / PROMPTS


class Sampled(NamedTuple):
  """Updates from minibatches drawn from mu."""

  weight_NT: Array  # mean weight of each token, as in `expected`
  along_MV: np.ndarray  # update . direction, by minibatch and direction
  square_M: np.ndarray  # |update|^2


def sampled(
  rule: Rule,
  task: Task,
  tables: Tables,
  params: Tree,
  directions: Tree,
  responses: int,
  minibatches: int,
  seed: int = 0,
) -> Sampled:
  """Draws minibatches of whole groups and computes the update of each of them.

  Args:
    params: the weights of pi.
    directions: V directions in the space of the weights: a tree like `params` with one
      more axis in front.
    responses: responses per minibatch, a multiple of GROUP; prompts are drawn.
  """
  block = max(1, min(minibatches, CHUNK // responses))
  total_NT, along, square = jnp.zeros(task.mask_NT.shape), [], []
  for key in jax.random.split(jax.random.key(seed), -(-minibatches // block)):
    sizes = {'groups': responses // GROUP, 'block': block}
    total_NT, *found = _some(
      rule, task, tables, params, directions, total_NT, key, **sizes
    )
    along.append(np.asarray(found[0]))
    square.append(np.asarray(found[1]))
  along_MV = np.concatenate(along)
  return Sampled(total_NT / len(along_MV), along_MV, np.concatenate(square))


@functools.partial(jax.jit, static_argnames=('rule', 'groups', 'block'))
def _some(
  rule: Rule,
  task: Task,
  tables: Tables,
  params: Tree,
  directions: Tree,
  total_NT: Array,
  key: Array,
  *,
  groups: int,
  block: int,
) -> tuple[Array, Array, Array]:
  """Draws `block` minibatches; returns (sum of token weights, slopes, squares)."""
  up_to_QR = cumulative(task, tables)

  def one(key: Array) -> tuple[Array, Array, Array, Array]:
    batch, index_B = drawn(task, tables, up_to_QR, rule.advantage, key, groups)
    weight_BT = weights_of(rule, tables.logp_NT[index_B], batch) / len(index_B)

    def weighted(params: Tree) -> Array:
      return (weight_BT * logp_of(params, batch.tokens_BT)).sum()

    update = jax.grad(weighted)(params)
    along_V = jax.vmap(optax.tree.vdot, (None, 0))(update, directions)
    square = jnp.asarray(optax.tree.vdot(update, update))
    return index_B, weight_BT, jnp.asarray(along_V), square

  index, weight, along, square = jax.vmap(one)(jax.random.split(key, block))
  rows = weight.reshape(-1, weight.shape[-1])
  return total_NT.at[index.reshape(-1)].add(rows), along, square


def cumulative(task: Task, tables: Tables) -> Array:
  """Returns the cumulative probabilities [Q, R] of each prompt's responses."""
  return jnp.cumsum(tables.seen(task).reshape(PROMPTS, -1), 1)


def drawn(
  task: Task,
  tables: Tables,
  up_to_QR: Array,
  rule: AdvantageRule,
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
  index_B = (prompt_P[:, None] * task.responses + row_PG).reshape(-1)
  reward_PG = task.right_N[index_B].astype(jnp.float32).reshape(groups, GROUP)
  return batch_of(task, tables, index_B, rule(reward_PG).reshape(-1)), index_B


def warm_start(task: Task, steps: int, seed: int = 0, wrong: float = 0.5) -> Tree:
  """Trains fresh weights on responses of which a share is right; returns the weights.

  `wrong` is the share of random responses, so that the policy is sometimes right.
  """
  key = jax.random.key(seed)
  params = transformer.init(SPEC, key)
  tx = optimizer.adamw(lr=3e-3)
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
    rows = np.where(rng.random(256) < wrong, other, rows)
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
) -> list[Tree]:
  """Trains by reinforcement on fresh samples; returns the weights after each update.

  Entry 0 holds the weights before the first update. An update is `learner.learn`, with
  the objective of the package, on `groups` groups of GROUP responses.
  """
  objective = Objective(
    clip_rule=rule.clip,
    loss_rule=rule.loss,
    mask_rule=rule.mask,
    spec=SPEC,
    temperature=1.0,
    chunk=8,
    pack=False,
  )
  tx = optimizer.adamw(lr=lr)
  opt, kept = tx.init(params), [params]
  learn = jax.jit(functools.partial(learner.learn, tx=tx, objective=objective))
  for key in jax.random.split(jax.random.key(seed), updates):
    logp_NT = table(params, task)
    tables = Tables(logp_NT, logp_NT)
    up_to_QR = cumulative(task, tables)
    batch, _ = drawn(task, tables, up_to_QR, rule.advantage, key, groups)
    params, opt, _, _ = learn(params, opt, batch)
    kept.append(params)
  return kept


def dot(a: Tree, b: Tree) -> float:
  """Returns the inner product of two trees."""
  return float(jnp.asarray(optax.tree.vdot(a, b)))


def cosine(a: Tree, b: Tree) -> float:
  """Returns the cosine of the angle between two trees; nan if one is 0."""
  size = math.sqrt(dot(a, a) * dot(b, b))
  return dot(a, b) / size if size else math.nan
