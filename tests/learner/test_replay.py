"""Replay of the sampler's routes in every pass of a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest

from bapo_jax.algorithms import advantage, clip
from bapo_jax.learner import learner, scoring
from bapo_jax.models import decoder
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Unit
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.types import Groups, Routes

SIZES = {'vocab': 11, 'heads': 2, 'kv_heads': 1, 'head_width': 8}
SPEC = dataclasses.replace(making.MIXTURE, **SIZES)
P, G, T = 4, 4, 12
NONE = 255
PLAIN = optax.sgd(1.0)


def measured() -> ModelSpec:
  return dataclasses.replace(SPEC, replay_routes='measure')


@functools.cache
def sampled(compute: str = 'float32') -> Groups:
  """Groups that weights 0 sampled, as learner step 5."""
  spec = dataclasses.replace(SPEC, compute=compute)
  return making.sampled(making.params(SPEC), spec, P, G, T, [1, 2, 3, 2])


def score(groups: Groups, spec: ModelSpec = SPEC, unit: Unit = Unit()) -> np.ndarray:
  run = functools.partial(
    scoring.score, rows=P * G, spec=spec, temperature=1.0, unit=unit
  )
  return np.asarray(jax.jit(run)(making.params(SPEC), groups))


def shuffled() -> Groups:
  """Moves every expert to its neighbour."""
  groups = sampled()
  routes = groups.routes_PGTX
  other = jnp.where(routes == NONE, routes, (routes + 1) % SPEC.experts)
  return groups._replace(routes_PGTX=other)


def test_own_routes_are_the_live_ones_bit_for_bit():
  assert (score(sampled()) == score(sampled(), measured())).all()
  none = sampled()._replace(routes_PGTX=None)
  off = dataclasses.replace(SPEC, replay_routes='off')
  assert (score(sampled()) == score(none, off)).all()


def test_other_routes_give_other_values():
  mask = np.asarray(sampled().response_mask_PGT)
  moved = np.abs(score(shuffled()) - score(sampled()))[mask]
  assert np.median(moved) > 1e-3
  assert (score(shuffled(), measured()) == score(sampled())).all()


def test_a_token_without_a_route_takes_the_live_one():
  groups = shuffled()
  some = np.asarray(groups.routes_PGTX).copy()
  some[:, ::2] = NONE
  found = score(groups._replace(routes_PGTX=jnp.asarray(some)))
  assert (found[:, ::2] == score(sampled())[:, ::2]).all()
  assert (found[:, 1::2] == score(groups)[:, 1::2]).all()


@pytest.mark.parametrize('rows', [2, G])
def test_a_shared_prompt_takes_the_routes_of_a_row_that_has_some(rows):
  groups, unit = shuffled(), Unit(rows, T - 1)
  making.close(score(groups, unit=unit), score(groups), count=T * SPEC.width)
  some = np.asarray(groups.routes_PGTX).copy()
  some[:, ::2] = NONE  # as of given responses, which come first
  groups = groups._replace(routes_PGTX=jnp.asarray(some))
  found, wanted = score(groups, unit=unit), score(groups)
  making.close(found[:, 1::2], wanted[:, 1::2], count=T * SPEC.width)


def test_sampler_and_learner_agree_to_rounding():
  mask = np.asarray(sampled().response_mask_PGT)
  diff = np.abs(score(sampled()) - np.asarray(sampled().behavior_logp_PGT))[mask]
  assert diff.max() < 2e-5


def test_in_bfloat16_replay_is_closer_to_the_sampler():
  spec = dataclasses.replace(SPEC, compute='bfloat16')
  groups = sampled('bfloat16')
  mask = np.asarray(groups.response_mask_PGT)
  # A learner in float32 rounds otherwise than a sampler in bfloat16.
  behavior = np.asarray(groups.behavior_logp_PGT)
  replayed, live = (
    np.abs(score(groups, each) - behavior)[mask].mean() for each in (SPEC, measured())
  )
  print(f'{replayed:.2g} nats with replay, {live:.2g} without')
  assert replayed < live
  assert np.abs(score(groups, spec) - behavior)[mask].mean() < 0.1


@functools.cache
def compiled(spec, **knobs):
  """Returns a jitted update that moves weights by their gradient."""
  objective = making.objective(
    clip.Balanced(target=0.5), spec=spec, temperature=1.0, **knobs
  )
  return jax.jit(functools.partial(learner.learn, tx=PLAIN, objective=objective))


def learned(groups: Groups, spec: ModelSpec, **knobs):
  """Returns (new weights, metrics) of an update."""
  batch = learner.flatten(
    groups, jnp.zeros(P, jnp.int32), advantage.GroupRelative(), version=5
  )
  params = making.params(SPEC)
  step = compiled(spec, **knobs)
  new, _, metrics, _ = step(params, PLAIN.init(params), batch)
  return new, {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize('bounds_pass', ['again', 'stored'])
def test_every_pass_of_an_update_reads_the_recorded_routes(bounds_pass):
  # A pass with live routes would find other bounds, or another gradient, than the one
  # pass over all rows.
  schedule = Schedule(remat='full', bounds_pass=bounds_pass)
  groups = shuffled()
  found, metrics = learned(groups, SPEC, grad_accum_steps=2, schedule=schedule)
  wanted, expected = learned(groups, SPEC)
  making.close_trees(found, wanted, count=P * G * T * SPEC.width)
  for name in ('clip/low', 'clip/high', 'clip/search_steps'):
    assert metrics[name] == expected[name]
  assert metrics['clip/search_steps'] > 0
  _, live = learned(groups, measured())
  assert abs(live['learner/grad_norm'] / expected['learner/grad_norm'] - 1) > 0.01


def test_the_share_that_agrees_counts_tokens_and_layers():
  routes = np.asarray(sampled().routes_PGTX).copy()
  groups = sampled()
  teaches = np.asarray(groups.response_mask_PGT)[:, :, 1:]
  # One layer of the first response of every group disagrees.
  first = routes[:, 0, :, :2]
  routes[:, 0, :, :2] = np.where(first == NONE, NONE, (first + 1) % 8)
  _, metrics = learned(groups._replace(routes_PGTX=jnp.asarray(routes)), measured())
  recorded = np.asarray(sampled().routes_PGTX)
  same = np.sort(routes[..., :2], -1) == np.sort(recorded[..., :2], -1)
  share = np.where(same.all(-1), 1.0, 0.5)[:, :, :-1]
  wanted = share[teaches].mean()
  assert metrics['moe/agree'] == pytest.approx(wanted, abs=1e-6)


def test_routes_of_more_than_255_experts_are_wider():
  assert SPEC.routes == Routes(4, 'uint8')
  wide = dataclasses.replace(SPEC, experts=256)
  assert wide.routes == Routes(4, 'uint16')
  params = making.params(wide)
  prefilled, _ = sequence.prefill(
    decoder.actor(params, wide), jnp.ones((1, 3), jnp.int32), None, wide
  )
  assert prefilled.routes_RTX.dtype == jnp.uint16
  assert (prefilled.routes_RTX < 256).all()
