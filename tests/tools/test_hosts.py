"""What crosses between hosts is counted by hand, and what each of them remembers."""

import jax
import pytest

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.tools.plan import hosts
from bapo_jax.tools.plan.programs import Job
from bapo_jax.tools.plan.roofline import Traffic
from bapo_jax.training import config as config_lib
from configs import aime

# Devices 0 and 1 are on host 0, devices 2 and 3 on host 1. Three times: a gather of 32
# bytes, of which a host has half; a sum inside each host; a sum of 16 bytes over pairs
# of both hosts, two pairs, there and back; 8 bytes from device 1 to 2. Once: a scatter
# of 4 x 8 bytes, and 16 bytes for every device, half of them from the other host.
TEXT = """\
%body (t: (s32[])) -> (s32[]) {
  %g = f32[8]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %i = f32[4]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %s = f32[4]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %p = f32[2]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2}}
}

%cond (t: (s32[])) -> pred[] {
  %n = s32[] constant(3)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %r = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %a = f32[4]{0} all-to-all(%x), replica_groups={}, dimensions={0}
}
"""
INTO_HOST_1 = 3 * (32 / 2 + 0 + 2 * 16 * 2 / 2 + 8) + 32 / 2 + 2 * 16 / 2


def test_collectives_counted_by_hand():
  assert hosts.crossing(TEXT, [0, 0, 1, 1]) == INTO_HOST_1 == 200
  # Nothing comes to host 0 by the permute, so host 1 is the busiest.
  assert hosts.crossing(TEXT.replace('{1,2}', '{2,1}'), [0, 0, 1, 1]) == 200
  assert hosts.crossing(TEXT, [0, 0, 0, 0]) == 0


def test_traffic_into_a_device_by_hand():
  # Two hosts of four. fsdp has its halves on both: each gather of 8 bytes brings 4 into
  # a host for each of its two columns over tensor, 8 bytes for four devices.
  shape, of_four = {'data': 1, 'fsdp': 4, 'tensor': 2}, [0] * 4 + [1] * 4
  gather, inner = Traffic('all-gather', 'fsdp', 8), Traffic('all-reduce', 'tensor', 100)
  assert hosts.into_device([gather], shape, of_four) == 2
  assert hosts.into_device([gather, inner], shape, of_four) == 2
  # A sum over pairs of both hosts, there and back: four pairs, half of each from there.
  shape = {'data': 2, 'fsdp': 2, 'tensor': 2}
  assert hosts.into_device([Traffic('all-reduce', 'data', 8)], shape, of_four) == 8
  assert hosts.into_device([gather, inner], shape, of_four) == 0
  assert hosts.into_device([gather], {**shape, 'data': 1, 'fsdp': 4}, [0] * 8) == 0


@pytest.fixture
def spec():
  """Two layers, 4 heads of each kind."""
  sizes = dict(vocab=24, width=16, layers=2, heads=4, kv_heads=4, head_width=4, ffn=32)
  return transformer.ModelSpec(**sizes, compute='bfloat16')


@pytest.mark.parametrize(
  ('shape', 'process_of', 'share'),
  [
    ((1, 4, 2), [0] * 4 + [1] * 4, 1 / 2),  # half the columns, of both parts
    ((1, 8, 1), [0] * 4 + [1] * 4, 1 / 2),
    ((1, 2, 4), [0] * 4 + [1] * 4, 1 / 2),  # every part, of half the columns
    ((1, 4, 2), [0, 1] * 4, 0),  # one part each, with all its columns
    ((2, 2, 2), [0] * 4 + [1] * 4, 0),  # a whole copy on each host
    ((2, 2, 1), [0, 1, 0, 1], 1 / 2),  # the same columns twice
    ((1, 8, 1), list(range(8)), 7 / 8),
    ((1, 2, 4), list(range(8)), 1 / 8),  # a quarter of the rows, of half the columns
  ],
)
def test_a_new_actor_by_hand(spec, shape, process_of, share):
  params = transformer.flatten(transformer.abstract(spec))
  matrices = sum(
    x.size for name, x in params.items() if 'norm' not in name and 'bias' not in name
  )
  sizes = dict(zip(('data', 'fsdp', 'tensor'), shape, strict=True))
  found = hosts.weight_sync(spec, sizes, process_of)
  assert found == pytest.approx(2 * matrices * share)  # bfloat16


def test_axes_inside_a_host():
  of_four = [i // 4 for i in range(16)]
  assert hosts.inside({'data': 1, 'fsdp': 4, 'tensor': 4}, of_four) == ['tensor']
  inner = hosts.inside({'data': 4, 'fsdp': 2, 'tensor': 2}, of_four)
  assert inner == ['fsdp', 'tensor']
  assert hosts.inside({'data': 1, 'fsdp': 2, 'tensor': 8}, of_four) == []


def test_the_memory_of_a_process_by_hand(spec):
  config = aime.get_config()
  config.batch.rule = 'adapted'
  config = config_lib.parse(config.to_dict())
  job = Job(config, spec, Schedule(), sharding.make(devices=jax.devices()[:1]))
  found = hosts.memory(job, hosts=4)
  # Parameters and two moments, written by four hosts.
  count = transformer.count(spec)
  assert found['a checkpoint, while it is written'] == (4 + 4 + 4) * count / 4
  assert found['weights, while they are read'] == 9 * 2**21
  T, G = config.row_length, config.sampler.group_size
  assert found['slots'] == 12 * config.sampler.max_num_seqs * T
  assert found['responses of a step'] == 13 * config.prompts.count * G * T
  # The hard part holds no responses.
  assert found['replay buffer'] == 13 * config.buffer.capacity * G * T
