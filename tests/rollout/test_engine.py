"""What is written depends on (key, uid, position), and nothing written is lost."""

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.models import logprobs, transformer
from bapo_jax.rollout import decode, engine
from bapo_jax.types import Prompts

# One layer: each way of dispatching compiles anew, and test_model.py has two.
SPEC = transformer.ModelSpec(
  vocab=12, width=16, layers=1, heads=4, kv_heads=2, head_width=4, ffn=16, positions=32
)
PARAMS = oracles.noisy(SPEC, 0)
EOS = (3, 7)
LENGTH_P = np.asarray([3, 6, 1, 0, 4, 5], np.int32)
P, WIDTH, GROUP, NEW, TEMPERATURE = 6, 6, 2, 9, 0.7
B = P * GROUP
OF_B = np.repeat(LENGTH_P, GROUP)
UID_B = np.arange(B, dtype=np.uint32) + 100
KEY = jax.random.key(10)


def prompts(seed: int = 0) -> Prompts:
  rng = np.random.default_rng(seed)
  tokens_PT = rng.integers(0, SPEC.vocab, (P, WIDTH), np.int32)
  tokens_PT[np.arange(WIDTH) >= LENGTH_P[:, None]] = 0
  return Prompts(np.arange(P, dtype=np.int32), tokens_PT, LENGTH_P)


def generate(asked=None, uid_B=UID_B, params=PARAMS, **changes):
  knobs = {
    'group_size': GROUP,
    'max_new_tokens': NEW,
    'temperature': TEMPERATURE,
    'eos': EOS,
  }
  knobs |= {
    'max_num_seqs': 4,
    'prefill_batch_size': 2,
    'tokens_per_dispatch': 4,
    'spec': SPEC,
  }
  asked = prompts() if asked is None else asked
  return making.generate(params, asked, uid_B, KEY, **knobs | changes)


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
    said = row[n : n + k]
    # The end token is the last and is chosen; without one the row is cut at NEW.
    assert not np.isin(said[:-1], EOS).any()
    assert said[-1] in EOS or k == NEW
    assert not row[n + k :].any()
    ends += said[-1] in EOS
  assert 0 < ends < np.count_nonzero(OF_B)  # both kinds did occur
  assert len({tuple(row[n:]) for row, n in zip(rows.tokens_BT, OF_B, strict=True)}) > 8


def test_recorded_logp_is_the_learners(rows):
  logp_BT, _ = logprobs.sequence_logprobs(PARAMS, rows.tokens_BT, SPEC, TEMPERATURE)
  found_BT, response_mask_BT = rows.logp_BT, rows.response_mask_BT
  np.testing.assert_allclose(
    found_BT[response_mask_BT], logp_BT[response_mask_BT], atol=1e-5
  )
  assert not found_BT[~response_mask_BT].any()
  assert (found_BT[response_mask_BT] < 0).all()


@pytest.mark.parametrize(
  ('slots', 'refill', 'chunk'), [(2, 1, 1), (5, 3, 4), (16, 16, 50)]
)
def test_the_text_does_not_depend_on_how_it_is_dispatched(rows, slots, refill, chunk):
  told = []
  again = generate(
    max_num_seqs=slots,
    prefill_batch_size=refill,
    tokens_per_dispatch=chunk,
    tell=lambda rows: told.append(len(rows)),
  )
  np.testing.assert_array_equal(again.tokens_BT, rows.tokens_BT)
  np.testing.assert_array_equal(again.response_mask_BT, rows.response_mask_BT)
  np.testing.assert_allclose(again.logp_BT, rows.logp_BT, atol=1e-5)
  assert sum(told) == np.count_nonzero(OF_B) and min(told) >= 0


def test_the_text_belongs_to_the_uid_and_not_to_the_row(rows):
  asked = Prompts(*(x[::-1] for x in prompts()))
  turned = generate(asked, UID_B[::-1])
  np.testing.assert_array_equal(turned.tokens_BT[::-1], rows.tokens_BT)
  other = generate(uid_B=UID_B + np.uint32(B))
  differ_B = (np.asarray(other.tokens_BT) != rows.tokens_BT).any(1)
  assert differ_B[OF_B > 0].sum() >= 8  # 10 asked; one short answer may coincide


def test_a_mesh_samples_the_same_text(rows):
  devices = sharding.make(data=4, fsdp=1, tensor=2)
  params = jax.device_put(PARAMS, sharding.shardings(PARAMS, devices, 'decode'))
  spread = generate(params=params, mesh=devices)
  assert len(spread.tokens_BT.sharding.device_set) == 8
  np.testing.assert_array_equal(spread.tokens_BT, rows.tokens_BT)
  np.testing.assert_allclose(spread.logp_BT, rows.logp_BT, atol=1e-5)


def test_a_cold_policy_says_the_likeliest():
  asked = prompts()
  cold = generate(asked, temperature=0)
  for b in np.flatnonzero(OF_B):
    prompt = asked.tokens_PT[b // GROUP, : OF_B[b]].tolist()
    expected = oracles.decode_oracle(PARAMS, prompt, SPEC, NEW, EOS)
    assert cold.tokens_BT[b][cold.response_mask_BT[b]].tolist() == expected
  assert not np.asarray(cold.logp_BT).any()


@pytest.mark.parametrize(
  'knobs',
  [
    {'cache_segments': 3, 'tokens_per_dispatch': 3},
    {'done_check_lag': 1, 'tokens_per_dispatch': 2},
    {
      'done_check_lag': 2,
      'tokens_per_dispatch': 2,
      'max_num_seqs': 3,
      'prefill_batch_size': 1,
      'cache_segments': 2,
    },
    {'prefill_batch_size': 4},  # more than one prompt is prefilled at once
  ],
  ids=str,
)
def test_nor_on_how_the_cache_is_cut_or_when_it_is_looked_at(rows, knobs):
  again = generate(**knobs)
  np.testing.assert_array_equal(again.tokens_BT, rows.tokens_BT)
  np.testing.assert_array_equal(again.policy_version_BT, rows.policy_version_BT)
  np.testing.assert_allclose(again.logp_BT, rows.logp_BT, atol=1e-5)


def in_flight(places=P, **changes) -> engine.RolloutEngine:
  knobs = {
    'group_size': GROUP,
    'max_new_tokens': NEW,
    'temperature': TEMPERATURE,
    'eos': EOS,
  }
  knobs |= {'max_num_seqs': 4, 'prefill_batch_size': 2, 'tokens_per_dispatch': 4}
  return engine.RolloutEngine(
    SPEC, places=places, max_prompt_tokens=WIDTH, **knobs | changes
  )


def test_pauses_leave_every_bit_as_it_is(rows):
  # A quarter of the longest response in each step, the weights and the cache kept.
  paused, steps = in_flight(max_num_seqs=16, prefill_batch_size=16), 0
  paused.ask(prompts(), UID_B)
  while paused.unfinished:
    paused.advance(PARAMS, KEY, max_tokens_per_step=-(-NEW // 4))
    steps += 1
  assert steps == 3  # the longest one here has 8 tokens or 9
  whole = generate(max_num_seqs=16, prefill_batch_size=16)
  for found, expected in zip(paused.rows, whole, strict=True):
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(whole.tokens_BT, rows.tokens_BT)


@pytest.mark.parametrize('refreshed', [False, True])
def test_what_is_saved_without_its_cache_goes_on_to_the_same_text(rows, refreshed):
  before = in_flight()
  before.ask(prompts(), UID_B)
  before.advance(PARAMS, KEY, max_tokens_per_step=5)
  assert 0 < before.unfinished < np.count_nonzero(OF_B)
  state = jax.tree.map(np.asarray, before.state())
  after = in_flight()
  after.restore(state)
  assert after.cold
  assert list(after.waiting) == list(before.waiting) != []
  if refreshed:
    after.refresh(PARAMS)
    assert not after.cold
  after.advance(PARAMS, KEY)
  same = np.array_equal(after.rows.tokens_BT, rows.tokens_BT)
  assert same == refreshed  # without its cache a response goes astray
  if refreshed:
    np.testing.assert_allclose(after.rows.logp_BT, rows.logp_BT, atol=1e-5)


def test_tokens_are_dated_by_the_weights_that_chose_them():
  other = oracles.noisy(SPEC, 1)
  carried = in_flight(max_num_seqs=16, prefill_batch_size=16)
  carried.ask(prompts(), UID_B)
  carried.advance(PARAMS, KEY, policy_version=3, max_tokens_per_step=4)
  carried.refresh(other)
  carried.advance(other, KEY, policy_version=5)
  policy_version_BT, response_mask_BT = (
    np.asarray(carried.rows.policy_version_BT),
    carried.rows.response_mask_BT,
  )
  logp_BT = {
    policy_version: logprobs.sequence_logprobs(
      params, carried.rows.tokens_BT, SPEC, TEMPERATURE
    )[0]
    for policy_version, params in ((3, PARAMS), (5, other))
  }
  for b in np.flatnonzero(OF_B):
    dates = policy_version_BT[b][response_mask_BT[b]].tolist()
    assert dates == ([3] * 4 + [5] * NEW)[: len(dates)]
  assert (policy_version_BT == 5).any()
  # Each under the weights of its date, the prefix read by those same weights.
  for policy_version, logp in logp_BT.items():
    of = policy_version_BT == born
    np.testing.assert_allclose(carried.rows.logp_BT[of], logp[of], atol=1e-5)


def test_what_is_due_is_written_to_its_end_whatever_the_budget():
  carried = in_flight(places=2 * P, max_num_seqs=2, prefill_batch_size=1)
  carried.ask(prompts(), UID_B, step=0)
  carried.ask(prompts(1), UID_B + np.uint32(B), step=1)
  carried.advance(PARAMS, KEY, max_tokens_per_step=1, due_W=carried.asked_W == 0)
  assert carried.finished()[:P].tolist() == list(range(P))
  assert carried.unfinished and carried.busy


def test_the_oldest_finished_groups_come_first_and_free_their_places():
  carried = in_flight(places=2 * P, max_num_seqs=16, prefill_batch_size=16)
  carried.ask(prompts(), UID_B, step=4)
  carried.advance(PARAMS, KEY)
  carried.free([1, 2])
  late = prompts(1)
  late = Prompts(*(x[:2] for x in late))
  carried.ask(late, UID_B[:4] + np.uint32(50), step=5)
  assert carried.asked_W[[1, 2]].tolist() == [5, 5]
  with pytest.raises(ValueError, match='prompts for 6 free places'):
    carried.ask(Prompts(*(np.concatenate([x, x]) for x in prompts())), UID_B.repeat(2))
  assert carried.finished().tolist() == [0, 3, 4, 5]
  carried.advance(PARAMS, KEY)
  assert carried.finished().tolist() == [0, 3, 4, 5, 1, 2]
  read = carried.read(carried.finished()[-2:], 4)
  np.testing.assert_array_equal(
    read.tokens_BT[:2].reshape(4, -1), carried.rows.tokens_BT[2:6]
  )
  assert not read.tokens_BT[2:].any() and (read.policy_version_BT[2:] == -1).all()


def test_a_failing_listener_or_harvest_loses_nothing(rows, monkeypatch):
  carried, heard, fails = in_flight(), [], iter([True, False, True, True])

  def listen(done):
    if next(fails, False):
      raise OSError('disk full')
    heard.extend(done)

  harvest = decode.harvest

  def broken(*args):
    if next(fails, False):
      raise RuntimeError('no memory')
    return harvest(*args)

  monkeypatch.setattr(decode, 'harvest', broken)
  carried.ask(prompts(), UID_B)
  failures = 0
  while carried.unfinished or carried.untold:
    try:
      carried.advance(PARAMS, KEY, tell=listen)
    except (OSError, RuntimeError):
      failures += 1
  assert failures == 3
  assert sorted(heard) == np.flatnonzero(OF_B).tolist()
  np.testing.assert_array_equal(carried.rows.tokens_BT, rows.tokens_BT)


def test_a_prompt_is_prefilled_once_for_its_group(monkeypatch):
  seen, prefill = [], transformer.prefill

  def count(params, tokens_RT, spec):
    seen.append(tokens_RT.shape)
    return prefill(params, tokens_RT, spec)

  monkeypatch.setattr(transformer, 'prefill', count)
  jax.clear_caches()
  generate(max_num_seqs=12, prefill_batch_size=12)
  assert seen == [(7, WIDTH)]  # six groups of two, and one that a block may cut


def test_nothing_compiles_after_the_warm_up():
  jitted = (decode.run, decode.admit, decode.harvest, decode.refresh)
  # Prompts of 3 and of 70 tokens: two buckets; a cache of four segments.
  knobs = {
    'group_size': 1,
    'max_new_tokens': 26,
    'temperature': 1.0,
    'eos': (3,),
    'cache_segments': 4,
  }
  spec = dataclasses.replace(SPEC, positions=128)
  warm = engine.RolloutEngine(
    spec,
    places=4,
    max_prompt_tokens=70,
    max_num_seqs=2,
    prefill_batch_size=1,
    tokens_per_dispatch=8,
    **knobs,
  )
  warm.warm_up(PARAMS, KEY)
  warm.rows = jax.tree.map(jnp.copy, warm.rows)
  before = [f._cache_size() for f in jitted]
  tokens_PT = np.full((4, 70), 5, np.int32)
  lengths = np.asarray([3, 70, 20, 64], np.int32)
  warm.ask(Prompts(np.arange(4, dtype=np.int32), tokens_PT, lengths), np.arange(4))
  while warm.unfinished:
    warm.advance(PARAMS, KEY, max_tokens_per_step=9)
    warm.refresh(PARAMS)
  after = [f._cache_size() for f in jitted]
  assert after[2] - before[2] <= 1  # harvest is not in the warm-up: it costs nothing
  assert [n for i, n in enumerate(after) if i != 2] == [
    n for i, n in enumerate(before) if i != 2
  ]


PROCESS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
import test_engine as t
from bapo_jax import mesh
devices = mesh.make(data=2, tensor=2)
params = jax.device_put(
  jax.tree.map(np.asarray, t.PARAMS), mesh.shardings(t.PARAMS, devices, 'decode')
)
flying = t.in_flight(mesh=devices)
flying.ask(t.prompts(), t.UID_B)
flying.advance(params, t.KEY, max_tokens_per_step=5)
flying.refresh(params)
flying.advance(params, t.KEY)
rows = flying.read(flying.finished(), t.P)
np.savez(sys.argv[3], tokens=np.asarray(rows.tokens_BT), policy_version=np.asarray(rows.policy_version_BT))
"""


@pytest.mark.slow
def test_two_processes_write_what_one_writes(rows, tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  paths = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
  flags = '--xla_force_host_platform_device_count=2'
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags, 'PYTHONPATH': paths}
  both = [
    subprocess.Popen(
      [sys.executable, '-c', PROCESS, address, str(i), str(tmp_path / f'{i}.npz')],
      env=env,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  for one in both:
    _, error = one.communicate(timeout=300)
    assert one.returncode == 0, error[-2000:]
  for i in range(2):
    found = np.load(tmp_path / f'{i}.npz')
    shape = rows.tokens_BT.shape
    np.testing.assert_array_equal(found['tokens'].reshape(shape), rows.tokens_BT)
    np.testing.assert_array_equal(found['born'].reshape(shape), rows.policy_version_BT)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'max_new_tokens': 27},
      "prompt 6 + response 27 tokens exceed the model's 32 positions; lower "
      'sampler.max_new_tokens or prompts.max_prompt_tokens',
    ),
    (
      {'max_new_tokens': 0},
      'sampler.max_new_tokens=0 leaves no room for a response; give 1 or more',
    ),
    (
      {'eos': ()},
      'end tokens (): give at least one, each below the vocabulary of 12',
    ),
    (
      {'eos': (3, 12)},
      'end tokens (3, 12): give at least one, each below the vocabulary of 12',
    ),
    (
      {'asked': prompts()._replace(length_P=LENGTH_P + 1)},
      'row 1: a prompt of 7 tokens stands in 6 columns; raise prompts.max_prompt_tokens',
    ),
  ],
)
def test_what_cannot_be_written_is_refused(changes, message):
  with pytest.raises(ValueError) as error:
    generate(**changes)
  assert str(error.value) == message


def test_lengths_that_do_not_belong_to_the_prompts():
  with pytest.raises(ValueError, match='length_P has P=5, but P=6 elsewhere'):
    generate(prompts()._replace(length_P=LENGTH_P[:5]))


def test_nobody_asked():
  nothing = generate(prompts()._replace(length_P=0 * LENGTH_P))
  assert not np.asarray(nothing.tokens_BT).any()
  assert (np.asarray(nothing.policy_version_BT) == -1).all()
