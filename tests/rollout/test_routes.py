"""Routes that the sampler records, from decoding to groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import decoder, experts, layers
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts

SPEC = making.MIXTURE
NONE = 255
G, P, WIDTH, NEW = 2, 4, 5, 7
T = WIDTH + NEW
LENGTHS = np.asarray([5, 3, 4, 2], np.int32)
KNOBS = dict(
  max_prompt_tokens=WIDTH,
  max_new_tokens=NEW,
  group_size=G,
  temperature=1.0,
  eos=(1,),
  max_num_seqs=4,
  prefill_batch_size=2,
  tokens_per_dispatch=2,
)


@functools.cache
def actor(seed: int = 0):
  return decoder.actor(making.params(SPEC, seed), SPEC)


def submitted(spec: ModelSpec = SPEC, **knobs) -> PartialRollouts:
  """Returns rollouts of all prompts, of which nothing is decoded."""
  rollouts = PartialRollouts(RolloutEngine(spec, **KNOBS | knobs), P)
  given = making.prompts(LENGTHS, WIDTH, 24, least=2)
  rollouts.submit(given, np.arange(P * G, dtype=np.uint32))
  return rollouts


def sample(spec: ModelSpec = SPEC, **knobs) -> decode.Rows:
  """Samples all responses with one set of weights."""
  rollouts = submitted(spec, **knobs)
  rollouts.decode(actor(), jax.random.key(1))
  return jax.tree.map(np.asarray, rollouts.rows)


@functools.cache
def rows() -> decode.Rows:
  return sample()


def ends(rows: decode.Rows) -> np.ndarray:
  """Returns the column of the last sampled token of each row."""
  return np.asarray([np.flatnonzero(mask)[-1] for mask in rows.response_mask_BT])


def by_itself(seed: int, tokens_T: np.ndarray, n: int) -> np.ndarray:
  """Returns the routes of the first n tokens, layer by layer and one text alone."""
  params = making.params(SPEC, seed)
  x = layers.embed(params, jnp.asarray(tokens_T[None]), SPEC)
  turns = layers.rotations(jnp.arange(T)[None], SPEC)
  chosen = []
  for i in range(SPEC.layers):
    w = {name: value[i] for name, value in params['layers'].items()}
    q, k, v = layers.project(w, x, SPEC)
    q, k = (layers.turned(heads, turns, SPEC.layer_kinds[i]) for heads in (q, k))
    attended = layers.attention.attend(q, k, v, kind='plain')
    out = x + layers.product(attended, w['o'], 2)
    y = layers.rms_norm(out, w['mlp_norm'], SPEC.norm_eps)
    share = np.asarray(jax.nn.softmax(y @ w['router']))
    chosen.append(np.argsort(-share, axis=-1, kind='stable')[0, :n, : SPEC.active])
    x, _ = layers.add_out(w, x, attended, SPEC)
  return np.concatenate(chosen, -1)


def test_a_token_has_the_route_that_it_took_when_it_was_read():
  # The last token is never read, and padding has no route.
  found = rows()
  for b, end in enumerate(ends(found)):
    wanted = by_itself(0, found.tokens_BT[b], end)
    np.testing.assert_array_equal(found.routes_BTX[b, :end], wanted)
    assert (found.routes_BTX[b, end:] == NONE).all()


def test_a_mesh_slots_and_dispatches_change_no_route():
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  sizes = {'max_num_seqs': 8, 'prefill_batch_size': 4, 'tokens_per_dispatch': 5}
  rollouts = submitted(mesh=mesh, **sizes)
  params = making.params(SPEC)
  split = jax.device_put(params, sharding.shardings(params, mesh))
  rollouts.decode(decode.sync_actor(split, SPEC, mesh), jax.random.key(1))
  assert rollouts.rows.routes_BTX.sharding.spec[-1] == 'tensor'
  assert (np.asarray(rollouts.rows.tokens_BT) == rows().tokens_BT).all()
  assert (np.asarray(rollouts.rows.routes_BTX) == rows().routes_BTX).all()


def test_off_records_nothing_and_samples_the_same():
  found = sample(dataclasses.replace(SPEC, replay_routes='off'))
  assert found.routes_BTX is None
  assert (found.tokens_BT == rows().tokens_BT).all()


@pytest.mark.parametrize('mode', ['on', 'measure'])
@pytest.mark.parametrize('restart', [False, True])
def test_older_tokens_keep_their_routes_under_newer_weights(mode, restart):
  spec = dataclasses.replace(SPEC, replay_routes=mode)
  rollouts = submitted(spec)
  rollouts.decode(actor(), jax.random.key(1), max_tokens=4)
  if restart:
    saved = jax.tree.map(np.asarray, rollouts.state())
    rollouts = PartialRollouts(RolloutEngine(spec, **KNOBS), P)
    rollouts.restore(saved)
  rollouts.refresh(actor(9))
  rollouts.decode(actor(9), jax.random.key(1), policy_version=1)
  found = jax.tree.map(np.asarray, rollouts.rows)
  crossed = 0
  for b, end in enumerate(ends(found)):
    if not (found.policy_version_BT[b] == 0).any():
      continue  # its prompt too was read by the new weights
    new = np.flatnonzero(found.policy_version_BT[b] == 1)
    # The first token of new weights was sampled when the one before it was read.
    first = new[0] - 1 if len(new) else end
    old = by_itself(0, found.tokens_BT[b], first)
    np.testing.assert_array_equal(found.routes_BTX[b, :first], old)
    assert (found.routes_BTX[b, first:end] != NONE).all()
    crossed += bool(len(new)) and first > LENGTHS[b // G]
  assert crossed


def test_routes_are_replayed_when_a_cache_is_recomputed():
  """Keys of the second layer depend on the routes of the first."""
  tokens_RT = jnp.asarray(rows().tokens_BT[:2])
  routes_RTX = jnp.asarray(rows().routes_BTX[:2])
  live, replayed, other = (
    sequence.prefill(actor(9), tokens_RT, None, SPEC, routes)[0]
    for routes in (None, routes_RTX, 7 - jnp.minimum(routes_RTX, 7))
  )
  read = np.asarray(routes_RTX != NONE)
  assert (np.asarray(replayed.routes_RTX)[read] == np.asarray(routes_RTX)[read]).all()
  assert (np.asarray(replayed.routes_RTX)[~read] != NONE).all()
  keys = [each.cache[1][0] for each in (live, replayed, other)]
  assert not jnp.array_equal(keys[0], keys[1])
  assert not jnp.array_equal(keys[1], keys[2])


def test_groups_of_empty_seats_have_no_routes():
  rollouts = submitted()
  rollouts.decode(actor(), jax.random.key(1))
  read = rollouts.read(np.asarray([2]), 3)
  assert read.routes_BTX.shape == (3, G, T, 4)
  assert (np.asarray(read.routes_BTX[0]) == rows().routes_BTX[4:6]).all()
  assert (read.routes_BTX[1:] == NONE).all()


def test_load_is_that_of_the_busiest_expert():
  routes = jnp.asarray([[[0, 1, 2, 3], [0, 2, 2, 3], [NONE] * 4]], jnp.uint8)
  # Layer 0: expert 0 twice, 1 and 2 once; layer 1: experts 2 and 3 twice; mean 4 / 8.
  assert experts.load(routes, SPEC) == (2 / 0.5 + 2 / 0.5) / 2
