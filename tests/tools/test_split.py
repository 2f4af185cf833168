"""A split is counted by hand, and its schedule and its slots by slow simulations."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from making import QWEN2 as SPEC
from refusals import refused as refused_flags
from test_plan import small

from bapo_jax import main, sharding
from bapo_jax.models.layers import Schedule
from bapo_jax.tools.plan import devices, plan, programs, roofline, search, split
from bapo_jax.training import budget

CHIP = roofline.CHIPS['v5p']


def test_lengths_by_hand():
  # With x = ln 2 half of the responses are cut, and the mean is (1 - 1/2) / ln 2 of the
  # longest. 7/8, 5/8, 3/8 and 1/8 are longer: -log2 of these is .1926, .6781, > 1, > 1.
  found = split.lengths(1000, 0.5 / math.log(2), 4)
  assert sorted(found) == [193, 678, 1000, 1000]
  assert split.lengths(7, 1.0, 3) == (7, 7, 7)


@pytest.mark.parametrize('share', [0.1, 0.25, 0.6])
def test_lengths_have_their_mean_and_no_memory(share):
  length_N = np.asarray(split.lengths(8192, share, 4096))
  assert length_N.mean() == pytest.approx(share * 8192, rel=1e-3)
  assert length_N.min() >= 1 and length_N.max() <= 8192
  # Of the responses longer than 1000, as many go beyond 2000 as of all beyond 1000.
  longer = [(length_N > n).mean() for n in (1000, 2000)]
  assert longer[1] / longer[0] == pytest.approx(longer[0], abs=2e-3)


def test_slots_by_hand():
  # Two slots: 0-3 and 0-1, 1-3, 3-5. Each response reads 10 columns per token, and its
  # own earlier tokens: 33 + 10 + 21 + 21 = 85 in ten turns of a slot.
  assert split.fill((3, 1, 2, 2), 2, 10) == (5, 8.5)
  # A check every two tokens: 0-3 and 0-1, 2-4, 4-6.
  assert split.fill((3, 1, 2, 2), 2, 10, dispatch=2).steps == 6
  # Seen one dispatch late: 0-3 and 0-1, 4-6, 6-8.
  assert split.fill((3, 1, 2, 2), 2, 10, dispatch=2, lag=1).steps == 8
  assert split.fill((3, 1), 4, 0) == (3, 3 / 12)  # two slots stay idle


def simulated(length_N, slots, prompt, dispatch, lag):
  """(steps, columns read) of slots, token by token, as the loop of the sampler runs."""
  waiting, left_S, age_S = list(length_N), [0] * slots, [0] * slots
  free_S = [0] * slots  # the first dispatch that may begin with another response
  token = last = read = number = 0
  while waiting or any(left_S):
    for s in range(slots):
      if not left_S[s] and free_S[s] <= number and waiting:
        left_S[s], age_S[s] = waiting.pop(0), 0
    for _ in range(dispatch):
      token += 1
      for s in range(slots):
        if left_S[s]:
          read, last = read + prompt + age_S[s], token
          left_S[s], age_S[s], free_S[s] = left_S[s] - 1, age_S[s] + 1, number + 1 + lag
    number += 1
  return last, read


@pytest.mark.parametrize(('dispatch', 'lag'), [(1, 0), (4, 0), (4, 1), (3, 2)])
@pytest.mark.parametrize('slots', [1, 5, 16, 64])
def test_slots_are_those_of_a_slow_simulation(slots, dispatch, lag):
  length_N = tuple(np.random.default_rng(slots).geometric(0.1, 60).tolist())
  steps, read = simulated(length_N, slots, 7, dispatch, lag)
  found = split.fill(length_N, slots, 7, dispatch, lag)
  assert found.steps == steps
  assert found.columns * slots * steps == pytest.approx(read)


def test_quantiles_stand_for_drawn_lengths():
  # Mean of 20 draws, whose standard error is 0.3 % of the steps.
  rng, (longest, n, slots) = np.random.default_rng(0), (1024, 2048, 256)
  length_N = split.lengths(longest, 0.25, n)
  drawn = [
    split.fill(tuple(rng.choice(length_N, n)), slots, 0).steps for _ in range(20)
  ]
  assert split.fill(length_N, slots, 0).steps == pytest.approx(np.mean(drawn), rel=0.02)


UPDATE = search.Update({'data': 1}, 1, Schedule(), 0.0, {'products': 1.0})


def made(sample, learn, weights, groups, depth):
  """A split whose sides and transfers take these seconds."""
  rollout = split.Rollout({'data': 1}, 1, 0.0, split.Load(2, 0), {'memory': sample / 2})
  crossing = [split.Transfer(0, 0, seconds) for seconds in (weights, groups)]
  return split.Split(UPDATE, rollout, learn, *crossing, depth)


@pytest.mark.parametrize('depth', [0, 1, 2, 5])
@pytest.mark.parametrize(
  'seconds', [(3, 5, 1, 2), (5, 3, 1, 2), (4, 4, 0, 0), (1, 1, 9, 4)]
)
def test_a_step_takes_as_long_as_its_schedule(depth, seconds):
  sample, learn, weights, groups = seconds
  sampled, learned = [], []  # when each step of a side ends
  for s in range(300):
    ready = learned[s - 1 - depth] + weights if s > depth else 0
    sampled.append(max(ready, sampled[-1] if s else 0) + sample)
    ready = sampled[s] + groups
    learned.append(max(ready, learned[-1] if s else 0) + learn)
  # The schedule repeats after every depth + 1 steps, which divide 120.
  period = (learned[-1] - learned[-121]) / 120
  assert made(*seconds, depth).seconds == pytest.approx(period)


def cut(shape, process_of, first=0):
  """A mesh of devices, numbered from `first`, on these hosts."""
  found = [devices.Device(first + i, host, 'gpu') for i, host in enumerate(process_of)]
  return Mesh(np.asarray(found).reshape(shape), sharding.AXES)


SLOW = roofline.Chip(hbm=1, flops=1, memory=1, links=100.0, network=1.0)


@pytest.mark.parametrize(
  ('shape', 'process_of', 'share'),
  [
    ((1, 4, 2), [0] * 4 + [1] * 4, 1 / 2),  # half the columns, of both parts
    ((1, 4, 2), [0, 1] * 4, 0),  # one part each, with all its columns
    ((2, 2, 2), [0] * 4 + [1] * 4, 0),  # a whole copy on each host
    ((1, 8, 1), list(range(8)), 7 / 8),
    ((1, 2, 4), list(range(8)), 1 / 8),  # a quarter of the rows, of half the columns
  ],
)
def test_weights_of_all_devices_in_turn_by_hand(shape, process_of, share):
  mesh = cut(shape, process_of)
  per_host, actor = 8 // (max(process_of) + 1), budget.actor_bytes(SPEC)
  found = split.weights(SPEC, SLOW, mesh, mesh)
  assert found.bytes == actor
  assert found.into_device == pytest.approx(
    actor * (1 / shape[2] - 1 / shape[1] / shape[2])
  )
  network = actor * share / per_host
  links = (found.into_device - network) / 100
  assert found.seconds == pytest.approx(max(links, network))


def test_what_crosses_by_hand(config):
  actor = budget.actor_bytes(SPEC)
  # From one host to another: both halves of the actor, over the adapters of four GPUs.
  learner, rollout = cut((1, 2, 2), [0] * 4), cut((2, 1, 2), [1] * 4, 4)
  found = split.weights(SPEC, SLOW, learner, rollout)
  assert found == (actor, actor / 2, pytest.approx(actor / 4))
  # Within a host nothing crosses the network.
  found = split.weights(SPEC, SLOW, learner, cut((2, 1, 2), [0] * 4, 4))
  assert found == (actor, actor / 2, pytest.approx(actor / 2 / 100))
  # Two hosts of four GPUs, two of them sample: their host has 2 of the 6 parts.
  learner, rollout = cut((1, 6, 1), [0] * 4 + [1] * 2), cut((2, 1, 1), [1] * 2, 6)
  found = split.weights(SPEC, SLOW, learner, rollout)
  assert found == (actor, actor, pytest.approx(actor * 4 / 6 / 2))
  # 13 bytes per token of 32 x 16 rows of 2048, a sixth for each device, all from the
  # other host for the first four.
  rows = 13 * 32 * 16 * 2048
  assert split.groups(config, SLOW, learner, rollout) == (rows, rows / 6, rows / 6)
  near = cut((2, 1, 1), [0] * 2, 6)
  found = split.groups(config, SLOW, cut((1, 2, 2), [0] * 4), near)
  assert found == (rows, rows / 2, pytest.approx(rows / 2 / 100))
  assert split.groups(config, SLOW, learner, learner) == (rows, 0, 0)


@pytest.fixture
def config(tmp_path):
  return small(tmp_path)


@pytest.fixture
def case(config):
  """512 responses of a 1.5B with two layers, a quarter as long as the longest."""
  return split.Case(config, programs.device_spec(config, 'tpu'), CHIP, 2.0**60, 0.25)


def mesh_of(*shape):
  grid = np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape)
  return Mesh(grid, sharding.AXES)


def test_a_rollout_by_hand(case):
  # 512 slots of 2 x 2 key heads of 128, all responses at once.
  mesh, longest = mesh_of(2, 1, 2), case.config.sampler.max_new_tokens
  found = split.fastest_rollout(case, mesh, 100.0)
  length_N = np.asarray(split.lengths(longest, 0.25, 512))
  assert (found.slots, found.load.steps) == (512, length_N.max()) == (512, longest)
  T = case.config.row_length
  assert found.bytes == 100 + 256 * T * (2 * 2 * 128 * 2)  # 256 slots and one head each
  read = (length_N * 32 + length_N * (length_N - 1) / 2).sum() / 512 / longest
  assert found.load.columns == pytest.approx(read)
  # Blocks of 1024 columns, of keys and values of one head in two layers.
  cache = 256 * (read + 1023 / 2) * (2 * 2 * 128 * 2)
  weights = 2 * (2 * 1536 * (1536 * 2 + 2 * 256 + 3 * 8960) + 151936 * 1536) / 2
  assert found.token['memory'] == pytest.approx((cache + weights) / CHIP.memory)
  assert found.seconds == pytest.approx(longest * max(found.token.values()))


def test_slots_fill_the_memory_and_no_more(case):
  mesh = mesh_of(2, 1, 2)
  each = budget.cache_bytes(case.spec, case.config.row_length, 2)
  for room, slots in ((1.0, 2), (3.0, 6), (3.99, 6), (4.0, 8)):
    given = case._replace(memory=100 + room * each)
    found = split.fastest_rollout(given, mesh, 100.0)
    assert found.slots == slots
    # 32 tokens of a prompt, checks every 128 tokens, seen one dispatch late.
    length_N = split.lengths(case.config.sampler.max_new_tokens, 0.25, 512)
    assert found.load == split.fill(length_N, slots, 32, 128, 1)
  with pytest.raises(search.TooLarge, match=r'decoding needs .* one slot per shard'):
    split.fastest_rollout(case._replace(memory=99 + each), mesh, 100.0)


def test_the_splits_are_those_of_both_sides(case):
  found, refused = split.compare(case, jax.devices())
  assert [s.seconds for s in found] == sorted(s.seconds for s in found)
  sides = {s.devices for s in found}
  # 128 rows of a minibatch divide over 1, 2, 4 and 8 learners.
  assert sides == {(8, 8), (4, 4), (2, 6), (1, 7)}
  assert set(refused) == {1, 2, 3, 5}
  assert {str(e) for e in refused.values()} == {
    'the 128 rows of a minibatch do not divide over data x fsdp'
  }
  for s in found:
    tensor, update = s.update.shape['tensor'], s.update
    assert tensor == s.rollout.shape['tensor'] and s.depth == (s.devices != (8, 8))
    mesh = mesh_of(*update.shape.values())
    best = search.fastest_update(case.config, case.spec, CHIP, mesh, 2.0**60)
    assert update == best
    # Eight updates of packed rows, which a quarter of the tokens fill.
    assert s.learning == pytest.approx(8 * max(best.seconds.values()) / 4)
    if s.depth:
      b = budget.count(
        case.config, case.spec, Schedule(), mesh_of(*s.rollout.shape.values())
      )
      held = 2 * (b.actor + b.responses)
    else:
      b = budget.count(case.config, case.spec, Schedule(), mesh)
      held = b.weights + b.moments + b.actor
    rows = s.rollout.slots / (math.prod(s.rollout.shape.values()) / tensor)
    each = budget.cache_bytes(case.spec, case.config.row_length, tensor)
    assert s.rollout.bytes == pytest.approx(held + rows * each)


def test_short_responses_and_one_update_gain_from_a_split(case):
  # A rollout that reads the weights for its longest response takes hardly longer on
  # half of the devices.
  config = case.config.with_values(learner={'epochs': 1, 'minibatches': 1})
  found, _ = split.compare(case._replace(config=config, mean_share=0.05), jax.devices())
  order = [s.devices for s in found]
  assert order[0] == (4, 4) and order.index((8, 8)) < order.index((1, 7))
  assert [s.seconds for s in found] == sorted(s.seconds for s in found)


def test_in_turn_takes_the_fastest_mesh(case):
  seconds = []
  for shape in ((8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2)):
    mesh = mesh_of(*shape)
    b = budget.count(case.config, case.spec, Schedule(), mesh)
    rollout = split.fastest_rollout(case, mesh, b.decoding - b.cache)
    update = search.fastest_update(case.config, case.spec, CHIP, mesh, 2.0**60)
    weights = split.weights(case.spec, CHIP, mesh, mesh).seconds
    seconds.append(2 * max(update.seconds.values()) + rollout.seconds + weights)
  found = split.in_turn(case, jax.devices())
  assert found.seconds < max(seconds)
  assert found.seconds <= min(seconds) * (1 + 1e-9)


def test_an_actor_must_fit_beside_the_learner_before_it_is_sent(case):
  # Of a hundred layers over fsdp 8 an actor, of which every device has all, is larger
  # than gradients and activations. Seven devices that sample allow no tensor.
  spec = dataclasses.replace(case.spec, layers=100)
  b = budget.count(case.config, spec, Schedule('full'), mesh_of(1, 8, 1))
  copying, (_, found) = b.weights + b.moments + b.actor, devices.count('v5p:2x2x4')
  for memory, refusal in ((copying - 1, 'a copy of the actor'), (copying, 'decoding')):
    given = case._replace(spec=spec, memory=memory)
    with pytest.raises(search.TooLarge, match=f'^{refusal} needs'):
      split.divided(given, found[:15], 7, 1)


def test_the_table_names_the_best_and_the_refused(case, monkeypatch):
  monkeypatch.setattr(plan.devices_lib, 'attach', None)
  monkeypatch.setattr(plan, 'compiled', None)
  said = []
  assert plan.run_split(case.config, 'h100:2x4', 0.25, said.append)
  heading, text = said
  assert heading.endswith('on h100:2x4: 8 devices of 72.78 GiB')
  assert '512 responses of 480 tokens on average (--mean_share=0.25)' in text
  lines = text.splitlines()
  assert [line.split()[0] for line in lines[2:6]] == ['4', '2', '1', '8']
  assert 'staleness: 1 step, 8 to 15 updates (in turn: 0 to 7)' in lines
  reason = 'the 128 rows of a minibatch do not divide over data x fsdp'
  assert lines[-1] == f'not 1, 2, 3, 5 for rollouts: {reason}'
  monkeypatch.setattr(plan, 'room', lambda _: 1.0)
  assert not plan.run_split(case.config, 'h100:2x4', 0.25, said.append)


def test_two_kinds_of_search_are_refused(monkeypatch):
  monkeypatch.setattr(main, 'PLANNING', {})
  flags = ['--config=configs/aime.py', '--mode=plan', '--search', '--split']
  assert '--search and --split are two plans' in refused_flags(flags)
