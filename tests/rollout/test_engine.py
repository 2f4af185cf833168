"""A response depends on (key, uid, position) alone, however it is decoded."""

import dataclasses
import functools

import jax
import making
import numpy as np
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime import ahead
from bapo_jax.types import Prompts
from benchmarks import hlo

# One layer: each way of dispatching compiles anew, and test_model.py has two.
SPEC = transformer.ModelSpec(
  vocab=12, width=16, layers=1, heads=4, kv_heads=2, head_width=4, ffn=16, positions=32
)
PARAMS = making.params(SPEC)
ACTOR = decoder.actor(PARAMS, SPEC)
EOS = (3, 7)
LENGTH_P = np.asarray([3, 6, 1, 0, 4, 5], np.int32)
P, WIDTH, GROUP, NEW, TEMPERATURE = 6, 6, 2, 9, 0.7
B = P * GROUP
OF_B = np.repeat(LENGTH_P, GROUP)
UID_B = np.arange(B, dtype=np.uint32) + 100
KEY = jax.random.key(10)


prompts = functools.partial(making.prompts, LENGTH_P, WIDTH, SPEC.vocab)
KNOBS = {
  'group_size': GROUP,
  'max_new_tokens': NEW,
  'temperature': TEMPERATURE,
  'eos': EOS,
  'max_num_seqs': 4,
  'prefill_batch_size': 2,
  'tokens_per_dispatch': 4,
}
WIDE = {'max_num_seqs': 16, 'prefill_batch_size': 16}


def generate(given=None, uid_B=UID_B, params=PARAMS, **changes):
  given = prompts() if given is None else given
  return making.generate(params, given, uid_B, KEY, spec=SPEC, **KNOBS | changes)


def partial_rollouts(places=P, **changes) -> PartialRollouts:
  engine = RolloutEngine(SPEC, max_prompt_tokens=WIDTH, **KNOBS | changes)
  return PartialRollouts(engine, places)


@pytest.fixture(scope='module')
def rows():
  return jax.tree.map(np.asarray, generate())


def test_the_rows_are_prompt_response_and_nothing(rows):
  column_T = np.arange(WIDTH + NEW)
  lengths, ends = rows.response_mask_BT.sum(1), 0
  for b, n in enumerate(OF_B):
    if not n:  # an empty seat stays empty
      assert not rows.response_mask_BT[b].any() and not rows.tokens_BT[b].any()
      continue
    row, k = rows.tokens_BT[b], lengths[b]
    np.testing.assert_array_equal(row[:n], prompts().tokens_PT[b // GROUP, :n])
    np.testing.assert_array_equal(
      rows.response_mask_BT[b], (column_T >= n) & (column_T < n + k)
    )
    response = row[n : n + k]
    # The end token is the last of the response; without one the row is cut at NEW.
    assert not np.isin(response[:-1], EOS).any()
    assert response[-1] in EOS or k == NEW
    assert not row[n + k :].any()
    ends += response[-1] in EOS
  assert 0 < ends < np.count_nonzero(OF_B)  # both kinds did occur
  assert len({tuple(row[n:]) for row, n in zip(rows.tokens_BT, OF_B, strict=True)}) > 8


@pytest.mark.parametrize(
  'knobs',
  [
    {'max_num_seqs': 2, 'prefill_batch_size': 1, 'tokens_per_dispatch': 1},
    {'max_num_seqs': 16, 'prefill_batch_size': 16, 'tokens_per_dispatch': 50},
    {'max_num_seqs': 5, 'prefill_batch_size': 4, 'cache_segments': 3},
    # The host reads flags late, and several blocks of prompts are in flight.
    {'done_check_lag': 2, 'tokens_per_dispatch': 2, 'cache_segments': 2},
  ],
  ids=str,
)
def test_the_text_does_not_depend_on_slots_dispatches_or_segments(rows, knobs):
  finished = []
  other = generate(on_finished=lambda rows: finished.append(len(rows)), **knobs)
  np.testing.assert_array_equal(other.tokens_BT, rows.tokens_BT)
  np.testing.assert_array_equal(other.policy_version_BT, rows.policy_version_BT)
  np.testing.assert_allclose(other.logp_BT, rows.logp_BT, atol=1e-5)
  assert sum(finished) == np.count_nonzero(OF_B)


def test_the_text_belongs_to_the_uid_and_not_to_the_row(rows):
  backwards = Prompts(*(x[::-1] for x in prompts()))
  turned = generate(backwards, UID_B[::-1])
  np.testing.assert_array_equal(turned.tokens_BT[::-1], rows.tokens_BT)
  other = generate(uid_B=UID_B + np.uint32(B))
  differ_B = (np.asarray(other.tokens_BT) != rows.tokens_BT).any(1)
  assert differ_B[OF_B > 0].sum() >= 8  # of 10; short answers may coincide


@pytest.mark.parametrize('tensor', [1, 2])
def test_a_mesh_samples_the_same_text(rows, tensor):
  devices = sharding.make(4, 1, tensor, jax.devices()[: 4 * tensor])
  assert decoder.joins(devices) == (tensor == 1)
  params = jax.device_put(PARAMS, sharding.shardings(PARAMS, devices, 'decode'))
  spread = generate(params=params, mesh=devices)
  assert len(spread.tokens_BT.sharding.device_set) == 4 * tensor
  np.testing.assert_array_equal(spread.tokens_BT, rows.tokens_BT)
  np.testing.assert_allclose(spread.logp_BT, rows.logp_BT, atol=1e-5)


def test_a_temperature_of_0_decodes_the_likeliest_tokens():
  given = prompts()
  cold = generate(given, temperature=0)
  for b in np.flatnonzero(OF_B):
    prompt = given.tokens_PT[b // GROUP, : OF_B[b]].tolist()
    expected = oracles.decode_oracle(PARAMS, prompt, SPEC, NEW, EOS)
    assert cold.tokens_BT[b][cold.response_mask_BT[b]].tolist() == expected
  assert not np.asarray(cold.logp_BT).any()


def test_pauses_leave_every_bit_as_it_is(rows):
  # A quarter of the longest response per step, the same weights and cache.
  paused, steps = partial_rollouts(**WIDE), 0
  paused.submit(prompts(), UID_B)
  while paused.unfinished:
    paused.decode(ACTOR, KEY, max_tokens=-(-NEW // 4))
    steps += 1
  assert steps == 3  # the longest one here has 8 tokens or 9
  whole = generate(**WIDE)
  for found, expected in zip(paused.rows, whole, strict=True):
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(whole.tokens_BT, rows.tokens_BT)


@pytest.mark.parametrize('refreshed', [False, True])
def test_a_state_without_its_cache_goes_on_to_the_same_text(rows, refreshed):
  before = partial_rollouts()
  before.submit(prompts(), UID_B)
  before.decode(ACTOR, KEY, max_tokens=5)
  assert 0 < before.unfinished < np.count_nonzero(OF_B)
  state = jax.tree.map(np.asarray, before.state())
  after = partial_rollouts()
  after.restore(state)
  assert after.cache_lost
  assert list(after.queue.waiting) == list(before.queue.waiting) != []
  if refreshed:
    after.refresh(ACTOR)
    assert not after.cache_lost
  after.decode(ACTOR, KEY)
  same = np.array_equal(after.rows.tokens_BT, rows.tokens_BT)
  assert same == refreshed  # without its cache a response goes astray
  if refreshed:
    np.testing.assert_allclose(after.rows.logp_BT, rows.logp_BT, atol=1e-5)
  # Under newer weights the prefix is read again: test_conversations.py scores each
  # token by the weights of its version.


@pytest.mark.parametrize('devices', [None, 1, 2])
def test_calls_find_the_programs_that_were_compiled_ahead(compiled, devices):
  mesh = devices and sharding.make(devices=jax.devices()[:devices])
  # Prompts of 3 and of 70 tokens: two buckets; a cache of two segments.
  knobs = KNOBS | {'group_size': 1, 'max_new_tokens': 26, 'cache_segments': 2}
  knobs |= {'max_num_seqs': 2, 'prefill_batch_size': 1, 'tokens_per_dispatch': 8}
  spec = dataclasses.replace(SPEC, positions=128)
  engine = RolloutEngine(spec, max_prompt_tokens=70, mesh=mesh, **knobs)
  actor = decode.sync_actor(PARAMS, spec, mesh) if mesh else ACTOR
  jax.clear_caches()
  kept = ahead.compile_all(engine.programs(actor, places=4))
  # Two widths to prefill; for one segment and for two, `refresh` and `run`; the empty
  # slots and `harvest`.
  assert len(kept) == 2 + 2 * 2 + 2
  compiled.clear()
  rollouts = PartialRollouts(engine, 4)
  tokens_PT = np.full((4, 70), 5, np.int32)
  lengths = np.asarray([3, 70, 20, 64], np.int32)
  ids = np.arange(4, dtype=np.int32)
  rollouts.submit(Prompts(ids, tokens_PT, lengths), np.arange(4))
  while rollouts.unfinished:
    rollouts.decode(actor, KEY, max_tokens=9)
    rollouts.refresh(actor)
  assert compiled == []


def test_a_token_in_every_slot_needs_nothing_of_another_device():
  mesh, spec = sharding.make(data=4, fsdp=2), SPEC
  slots = jax.eval_shape(lambda: decode.empty(spec, 16, 16, 2))
  place = lambda tree, layout: jax.tree.map(  # noqa: E731
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout
  )
  slots = place(slots, decode.slot_shardings(slots, mesh))
  actor = place(ACTOR, sharding.shardings(ACTOR, mesh, 'decode'))
  with sharding.current(mesh):
    lowered = decode.run.lower(actor, slots, KEY, 1.0, 4, 0, spec=spec, eos=EOS, live=2)
  text = lowered.compile().as_text()
  assert hlo.in_loops(text) == []
  assert ' while(' in text
