"""The share that a clip rule balances and reports is that of the gradient applied.

The oracle differentiates the whole scalar loss by the log-probabilities and adds up
what comes out: P over tokens with A > 0, N over tokens with A < 0. Log-probabilities
stand in for the parameters, so that everything runs through `learner.learn`.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
from refusals import nested

from bapo_jax.algorithms import clip, loss
from bapo_jax.learner import learner
from bapo_jax.learner import objective as objective_lib
from bapo_jax.training.config import parse
from bapo_jax.types import TokenStats

CLIPS = clip.ClipRule.rules.at_defaults()
LOSSES = loss.LossRule.rules.at_defaults()

T = 8
# So long a step that where the parameters started is rounded away: it is the gradient.
LONG = optax.sgd(2.0**24)


class Direct(objective_lib.Objective):
  """The parameters are the log-probabilities themselves."""

  def token_stats(self, params, cells, patch_XD=None):
    logp_RT = params[cells.row_RT, jnp.minimum(cells.position_RT + 1, T)]
    logp_RT = jnp.where(cells.wanted_RT, logp_RT, 0)
    return TokenStats(logp_RT, jnp.ones_like(logp_RT), jnp.zeros_like(logp_RT))


def objective(**values) -> Direct:
  """The objective of these knobs, as a run has it."""
  config = parse(nested(values))
  return Direct(
    clip_rule=config.clip,
    loss_rule=config.loss,
    spec=making.SPEC,
    temperature=1.0,
    length=T,
    grad_accum_steps=config.learner.grad_accum_steps,
  )


def placed(logp_BT, batch):
  """(logp_BT, batch) as arrays of the device, behind a column that predicts them."""

  def behind(x):
    return np.pad(x, ((0, 0), (1, 0))) if np.ndim(x) == 2 else x

  logp_BT = behind(logp_BT)
  batch = jax.tree.map(behind, batch)
  return jnp.float32(logp_BT), jax.tree.map(jnp.asarray, batch)


def stale(seed, B=16, mean=-0.1):
  """(logp_BT, batch): ratios off by .5 nats, all sources and weights, ragged rows.

  Advantages have this mean.
  """
  rng = np.random.default_rng(seed)
  old_BT = -rng.exponential(1, (B, T)) - 2
  logp_BT, prox_BT = (old_BT + rng.normal(0, 0.5, (B, T)) for _ in range(2))
  source_B = np.arange(B) % 4 - 1
  adv_B = rng.normal(mean, 1, B) * np.asarray([1, 0.5, 0.25, 1])[source_B]
  mask_BT = np.arange(T) < rng.integers(1, T + 1, B)[:, None]
  mask_BT &= (source_B >= 0)[:, None]
  return placed(logp_BT, making.batch(adv_B, mask_BT, old_BT, prox_BT, source_B))


def sides(grads_BT, batch):
  """(P, N): what tokens with A > 0 and with A < 0 have in this gradient."""
  size_BT = jnp.abs(grads_BT)
  adv_BT = batch.adv_BT
  return tuple(jnp.where(on_BT, size_BT, 0).sum() for on_BT in (adv_BT > 0, adv_BT < 0))


@functools.cache
def compiled(chosen):
  """(logp_BT, batch) -> (P and N of the update, metrics), jitted."""

  def run(logp_BT, batch):
    opt = LONG.init(logp_BT)
    after_BT, _, metrics, _ = learner.learn(
      logp_BT, opt, batch, tx=LONG, objective=chosen
    )
    return sides(after_BT - logp_BT, batch), metrics

  return jax.jit(run)


def path_of(k):
  """The points of Algorithm 1's path, upper bound first."""
  lows = clip.points(k.low, k.low_step)
  highs = clip.points(k.high, k.high_step)
  return [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]


@functools.cache
def on_the_path(chosen):
  """(points, logp_BT, batch) -> P and N of the gradient at each point."""

  def at(point, logp_BT, batch):
    scale_B = loss.row_scale(
      batch.loss_mask_BT, chosen.loss_rule.aggregate, chosen.length
    )
    k = chosen.clip_rule
    given = clip.Unclipped()(logp_BT, batch, None)._replace(
      low=point[0], high=point[1], cap=k.reused_high, dual=k.dual
    )

    def value(logp_BT):
      return chosen.loss(logp_BT, batch, scale_B, lambda _: given)[0]

    return sides(jax.grad(value)(logp_BT), batch)

  return jax.jit(jax.vmap(at, (0, None, None)))


def pairs():
  """Every pair of clip and loss rule that fits, with all aggregates in turn."""
  dual = {'clip.dual': 1.8}
  balanced = dual | {'clip.reused_high': 1.3, 'clip.target': 0.55}
  masked = {'loss.beyond_cap': 'mask', 'loss.cap': 1.2}
  aggregates = itertools.cycle(('sequence', 'constant', 'token'))
  for clip_rule, loss_rule in itertools.product(CLIPS, LOSSES):
    how = 'token' if clip_rule == 'recipe' else next(aggregates)
    values = {'fixed': dual, 'balanced': balanced}.get(clip_rule, {})
    values |= {'clip.rule': clip_rule, 'loss.rule': loss_rule, 'loss.aggregate': how}
    with contextlib.suppress(ValueError):  # see test_knobs_of_rules.py
      parse(nested(values))
      yield values
      if loss_rule == 'decoupled':
        yield masked | values


@pytest.mark.parametrize(
  'values', list(pairs()), ids=lambda values: '-'.join(map(str, values.values()))
)
def test_the_share_reported_is_that_of_the_gradient(values):
  chosen = objective(**values)
  for seed in range(4):
    data = stale(seed)
    (P, N), metrics = compiled(chosen)(*data)
    # The gradient is read off a step of 2^24: every number of it is rounded twice.
    making.close(metrics['clip/share'], P / (P + N), count=data[0].size, terms=1)
    assert 0.02 < metrics['clip/share'] < 0.98


@pytest.mark.parametrize(
  ('loss_rule', 'aggregate'),
  [
    ('clipped', 'token'),
    ('clipped', 'constant'),
    ('decoupled', 'token'),
    ('masked', 'sequence'),
    ('sequence', 'sequence'),
  ],
)
def test_the_search_ends_at_the_first_bounds_whose_gradient_has_the_share(
  loss_rule, aggregate
):
  values = {
    'loss.rule': loss_rule.replace('masked', 'decoupled'),
    'loss.aggregate': aggregate,
    'clip.target': 0.5,
    'clip.reused_high': 1.25,
    'clip.dual': 1.8,
  }
  values |= {
    'clipped': {'loss.limit': 0.9},
    'decoupled': {'loss.cap': 1.2},
    'masked': {'loss.cap': 1.2, 'loss.beyond_cap': 'mask'},
  }.get(loss_rule, {})
  if loss_rule == 'sequence':  # the mean over a response hardly leaves 1
    values |= {'clip.low': (0.7, 1.0), 'clip.high': (1.0, 1.5)}
  chosen = objective(**values)
  outcomes = set()
  path = path_of(chosen.clip_rule)
  for seed in range(12):
    data = stale(seed, mean=0.1 * (seed - 8))
    _, metrics = compiled(chosen)(*data)
    P, N = on_the_path(chosen)(jnp.float32(path), *data)
    share = np.asarray(P / (P + N))
    enough = np.flatnonzero(share >= 0.5)
    # Rounding would decide a tie.
    assert np.abs(share - 0.5).min() > 1e-6
    last = len(path) - 1
    first = int(enough[0]) if len(enough) else last
    found = [metrics[f'clip/{name}'] for name in ('search_steps', 'target_met')]
    assert found == [first, len(enough) > 0]
    assert (metrics['clip/low'], metrics['clip/high']) == path[first]
    outcomes.add((first > 0, len(enough) > 0))
  assert outcomes == {(False, True), (True, True), (True, False)}
