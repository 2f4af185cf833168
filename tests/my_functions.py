"""Own functions of a user, as files outside the package hold them."""

import asyncio
import itertools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np

import bapo_jax
from bapo_jax.algorithms import clip, loss
from bapo_jax.algorithms.batch_rules import FreshOnly


def score(sample, *, per_token: float = 0.0):
  """Graded, by what the row says; names its parts."""
  right = float(sample.row['answer'] in sample.response)
  return {'right': right, 'length': -per_token * len(sample.tokens)}


def brief(sample):
  return 1 / (1 + len(sample.tokens))


async def judge(sample):
  await asyncio.sleep(0.001)
  return sample.answer in sample.response


@bapo_jax.declare(steps='characters')
def halves(sample):
  """The right answer, and how many digits each half of the response has."""
  text = sample.response
  ends = sorted({max(1, len(text) // 2), len(text)} - {0})
  digits = [sum(x.isdigit() for x in text[:end]) for end in ends]
  counts = [b - a for a, b in itertools.pairwise([0, *digits])]
  steps = list(zip(ends, counts, strict=True))
  return {'right': float(sample.answer in text), 'steps': steps}


@bapo_jax.declare(batched=True)
def longest_first(samples):
  most = max(len(sample.tokens) for sample in samples) or 1
  return [len(sample.tokens) / most for sample in samples]


@bapo_jax.declare(bounds='ignored')
def sapo(logp_BT, batch, find, *, tau: float = 1.0):
  """The built-in rule with one temperature, written by hand."""
  ratio_BT = loss.ratio(logp_BT, batch)
  gate_BT = 4 / tau * jax.nn.sigmoid(tau * (ratio_BT - 1))
  gain_BT = jnp.where(batch.loss_mask_BT, gate_BT * batch.adv_BT, 0)
  return gain_BT, find(ratio_BT)


@bapo_jax.declare(gives='mask')
def dppo_tv(ratio_BT, batch, weigh, *, low: float = 0.2, high: float = 0.2):
  """The built-in mask rule of this name, as a clip rule."""
  moved_BT = (ratio_BT - 1) * jnp.exp(batch.behavior_logp_BT)
  inside_BT = jnp.where(batch.adv_BT > 0, moved_BT <= high, moved_BT >= -low)
  return clip.Unclipped()(ratio_BT, batch, weigh)._replace(keep_BT=inside_BT)


def likely(logp_BT, batch, *, least: float = 0.01):
  """A mask of its own: leaves out tokens that the policy finds unlikely."""
  return jnp.exp(logp_BT) >= least


def by_token(ratio_BT, batch, weigh):
  """Bounds that differ from token to token: wide where mu is small."""
  mu_BT = jnp.exp(batch.behavior_logp_BT)
  bounds = clip.Fixed()(ratio_BT, batch, weigh)
  return bounds._replace(high=1.2 + 0.2 * (1 - mu_BT))


@bapo_jax.declare(reads='groups')
def first_token(groups):
  """An advantage for the first token of a response alone."""
  first_PGT = groups.response_mask_PGT.cumsum(2) == 1
  return jnp.where(first_PGT, groups.reward_PG[..., None] - 0.5, 0)


def signs(reward_PG):
  return jnp.sign(reward_PG - reward_PG.mean(1, keepdims=True))


def all_fresh(fresh, reevaluated, buffer, now, key, seats):
  return FreshOnly()(fresh, reevaluated, buffer, now, key, seats)


def half_for_truncated(earned_PG, length_PG, truncated_PG, formatted_PG):
  return jnp.where(truncated_PG, earned_PG / 2, earned_PG), ~truncated_PG


def rows(*, count: int = 24, first: int = 0):
  return [{'problem': f'{i}+1=', 'next': i + 1} for i in range(first, first + count)]


def test_rows():
  return rows(count=8, first=50)


# A collector of tests should not run a function that is named like one.
test_rows.__test__ = False


def answer(turn):
  """Answers a turn with its number, sooner or later."""
  time.sleep(random.random() / 50)
  return f'{turn.number}+'


def unknown_first(history, key, count, *, noise: float = 0.0):
  """Problems of the least known pass rate, with noise; those in flight come last.

  The choices of processes differ, as those of a function that reads the clock.
  """
  rate_N = (history.right_N + 1) / (history.tries_N + 2)
  luck_N = np.random.default_rng(key).random(len(rate_N))
  spread_N = rate_N * (1 - rate_N) / (history.tries_N + 3)
  order_N = np.lexsort((-spread_N + noise * luck_N, history.waiting_N))
  return np.roll(order_N, jax.process_index())[:count]
