"""FLOPs and bytes, counted on paper."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from making import QWEN2 as SPEC
from pictured import SEEING

from bapo_jax import sharding
from bapo_jax.models import ragged, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.tools.plan import chips
from benchmarks import hlo, roofline
from benchmarks.roofline import Traffic

ALONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


def test_a_token_by_hand():
  # A layer: q and o 16 x 16, k and v 16 x 8, three of 16 x 32: 2304 weights.
  assert roofline.active_matrices(SPEC) == 2 * 2304
  # Two per weight; scores and values of 5 columns, 4 heads of 4: 2 x 2 x 80 per layer.
  once = roofline.forward(SPEC, keys=2 * 5)
  assert once == (2 * 4608, 2 * 320, 2 * 20 * 16)


def test_a_token_pays_for_its_experts_and_a_step_reads_those_of_all_tokens():
  spec = dataclasses.replace(SPEC, ffn=8, experts=16, active=3, compute='bfloat16')
  # Attention 768 weights, the router 16 x 16, and three of sixteen experts of 3 x 128.
  once = roofline.forward(spec, keys=2 * 5)
  assert once.layers == 2 * 2 * (768 + 256 + 3 * 384)
  # Two devices share the heads and the experts, so that each has all four tokens.
  shape = {'data': 2, 'fsdp': 1, 'tensor': 2}
  for slots, used in ((2, 3), (8, 12), (64, 16)):
    cost = roofline.decode(spec, shape, slots, 8, cache=1000.0)
    assert cost.bytes == 2 * (2 * (768 + used * 384) + 320) / 2 + 1000
  spec = dataclasses.replace(spec, actor_dtype='int8')
  cost = roofline.decode(spec, shape, 2, 8, cache=1000.0)
  # Scales of q, k, v and o, then of gate, up and down of three experts.
  scales = 4 * 2 * (16 + 2 * 8 + 16 + 3 * (8 + 8 + 16))
  assert cost.bytes == (2 * (768 + 3 * 384) + scales + 2 * 320) / 2 + 1000


def test_the_flops_of_a_tower_are_those_of_its_products():
  v = SEEING.vision
  sizes = {path: math.prod(x) for path, (x, _) in vision_spec.describe(v).items()}
  kernels = {p: n for p, n in sizes.items() if not p.endswith(('bias', 'norm'))}
  kernels['patch'] //= v.frames  # both frames are one picture
  for path in ('merger_in', 'merger_out'):
    kernels[path] //= v.merge**2
  # Pictures of two windows. Scores and their products with values: two numbers of each
  # channel of a key.
  window = v.window_patches
  full = len(v.full_layers)
  attention = 2 * v.width * window * (2 * full + v.layers - full)
  cost = roofline.tower(SEEING, ALONE, 3, 2 * window)
  assert cost.flops == 3 * 2 * 2 * window * (sum(kernels.values()) + attention)
  assert cost.bytes == 4 * sum(sizes.values())


def test_an_update_by_hand():
  once = roofline.forward(SPEC, 2 * 4)  # half of 8: attention is causal
  tokens = 3 * 8
  for kernel, remat, grad_accum_steps, recomputed in (
    ('plain', 'none', 1, once.head),
    ('plain', 'dots', 1, once.head + once.attention),
    ('flash', 'dots', 1, once.head),  # the kernel's results are saved
    ('splash', 'dots', 1, once.head),
    ('flash', 'full', 1, once.all),
    ('plain', 'full', 2, 2 * once.all),
  ):
    spec = dataclasses.replace(SPEC, attention=kernel)
    cost = roofline.train(spec, Schedule(remat), ALONE, 3, 8, grad_accum_steps)
    assert cost.model_flops == 3 * once.all * tokens
    assert cost.flops == (3 * once.all + recomputed) * tokens


def test_decoding_reads_the_weights_and_the_cache_once():
  spec = dataclasses.replace(SPEC, compute='bfloat16')
  cost = roofline.decode(spec, {**ALONE, 'tensor': 2}, 4, 8, cache=1000.0)
  assert cost.bytes == 2 * (4608 + 320) / 2 + 1000  # bfloat16, the head among them
  # One byte per weight, and a float32 scale for each of 2 x (32 + 32 + 64) outputs.
  spec = dataclasses.replace(spec, actor_dtype='int8')
  cost = roofline.decode(spec, {**ALONE, 'tensor': 2}, 4, 8, cache=1000.0)
  assert cost.bytes == (4608 + 4 * 256 + 2 * 320) / 2 + 1000


@pytest.mark.parametrize('devices', [1, 4])
def test_a_quarter_of_the_cache_is_at_most_035_of_the_bytes(devices):
  # 7B: 4 key heads of 128 in bfloat16, rows of 9216 columns with T / 4 live on average.
  T, S = 9216, 4096
  n = ragged.block_columns(4 // devices, 128, T, 2)
  length_S = np.minimum(np.random.default_rng(0).geometric(4 / T, S), T)
  counted = roofline.columns_read(T, n, length_S.mean())
  # Slot by slot: all columns of every block that has a live column.
  live_SN = np.arange(T)[None, ::n] < length_S[:, None]
  read = n * live_SN.sum() / S
  # Half a block, within four standard errors, and how far a block's lengths are from
  # even: n^2 / (12 x mean), since short ones are more frequent.
  spread = 4 * n / (12 * S) ** 0.5 + n**2 / (12 * T / 4)
  assert abs(counted - read) < spread
  assert counted / T <= 0.35 and read / T <= 0.35


def links(spec, schedule, shape, *sizes):
  traffic = roofline.train_traffic(spec, schedule, shape, *sizes)
  return sum(t.received(shape) for t in traffic)


def test_links_by_hand():
  spec, dots = dataclasses.replace(SPEC, compute='bfloat16'), Schedule('dots')
  weights = transformer.count(spec)
  # Two micro-batches: three gathers and a scatter, each of three quarters, 2 bytes.
  shape = {**ALONE, 'fsdp': 4}
  assert links(spec, dots, shape, 8, 8, 2) == pytest.approx(2 * 4 * 2 * weights * 3 / 4)
  # One micro-batch has no pass for its bounds. 2 layers x 2 sums of 8 tokens of 16
  # columns, forwards and backwards, of which half comes twice.
  shape = {**ALONE, 'tensor': 2}
  sums = 2 * 2 * (8 * 16 * 2) * 2 * (2 / 2)
  assert links(spec, dots, shape, 1, 8, 1) == pytest.approx(sums)
  found = links(spec, Schedule('full'), shape, 1, 8, 1)
  assert found == pytest.approx(sums * 3 / 2)
  # Gradients in float32 of half the weights, half of them twice.
  shape = {'data': 2, 'fsdp': 2, 'tensor': 1}
  gathered = 3 * 2 * weights / 2
  found = links(spec, dots, shape, 4, 8, 1)
  assert found == pytest.approx(gathered + 2 * 4 * weights / 2 / 2)
  hidden = roofline.hidden_sums(spec, 3).received({**ALONE, 'tensor': 2})
  assert hidden == 2 * 2 * (3 * 16 * 2) * 2 / 2


def test_the_slowest_of_four_is_the_bound():
  chip = chips.Chip(hbm=1, flops=10.0, memory=5.0, links=2.0)
  cost = roofline.Cost(model_flops=10, flops=20, bytes=20)
  found = {'products': 2.0, 'memory': 4.0, 'links': 5.0, 'network': 0.0}
  # A TPU's links join hosts, too; bytes over the network of a GPU spare its links.
  assert cost.seconds(chip, linked=10, crossed=4) == found
  found |= {'links': 3.0, 'network': 8.0}
  assert cost.seconds(chip._replace(network=0.5), linked=10, crossed=4) == found


# --------------------------------------- what crosses between hosts is counted by hand


def test_traffic_into_a_device_by_hand():
  # Two hosts of four. fsdp has its halves on both: each gather of 8 bytes brings 4 into
  # a host for each of its two columns over tensor, 8 bytes for four devices.
  shape, of_four = {'data': 1, 'fsdp': 4, 'tensor': 2}, [0] * 4 + [1] * 4
  gather, inner = Traffic('all-gather', 'fsdp', 8), Traffic('all-reduce', 'tensor', 100)
  assert roofline.into_device([gather], shape, of_four) == 2
  assert roofline.into_device([gather, inner], shape, of_four) == 2
  # A sum over pairs of both hosts, there and back: four pairs, half of each from there.
  shape = {'data': 2, 'fsdp': 2, 'tensor': 2}
  assert roofline.into_device([Traffic('all-reduce', 'data', 8)], shape, of_four) == 8
  assert roofline.into_device([gather, inner], shape, of_four) == 0
  assert roofline.into_device([gather], {**shape, 'data': 1, 'fsdp': 4}, [0] * 8) == 0


# -------------------------------- a collective in a loop is counted once per iteration


# Twelve times the outer loop: a gather of [8, 4] bf16, a fusion that sums 16 floats and
# a gather of [2, 8] bytes in two halves; in it five times a scatter of 4 x [4] floats.
TEXT = """\
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%fused (p: f32[16]) -> f32[16] {
  ROOT %r = f32[16]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%inner_cond (t: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%inner (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = f32[4]{0:T(128)} reduce-scatter(%x), replica_groups=[2,4]<=[8], to_apply=%add
}

%outer_cond (t: (s32[])) -> pred[] {
  ROOT %lt.2 = pred[] compare(%i, %n), direction=LT
}

%outer (t: (s32[])) -> (s32[]) {
  %g = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%y), dimensions={0}
  %f = f32[16]{0} fusion(%z), kind=kLoop, calls=%fused
  %gs = (u8[8]{0}, u8[2,8]{1,0}) all-gather-start(%v), dimensions={0}
  %gd = u8[2,8]{1,0} all-gather-done(%gs)
  %w = (s32[], f32[4]) while(%t), condition=%inner_cond, body=%inner
}

ENTRY %main (p0: f32[4]) -> f32[4] {
  %once = f32[99]{0} all-gather(%p0), dimensions={0}
  %w2 = (s32[]) while(%t0), condition=%outer_cond, body=%outer, \
backend_config={"known_trip_count":{"n":"12"}}
}
"""


def test_a_text_counted_by_hand():
  found = {c.kind + str(c.bytes): c for c in hlo.in_loops(TEXT)}
  assert {key: c.times for key, c in found.items()} == {
    'all-gather64': 12,  # 8 * 4 * 2 bytes
    'all-gather16': 12,  # the result of the started one, its operand not
    'all-reduce64': 12,
    'reduce-scatter64': 60,  # 4 floats each of 4 devices
  }
  assert found['all-reduce64'].received == 2 * 12 * 64  # a sum goes round twice
  assert found['reduce-scatter64'].received == 60 * 64


def test_a_tpus_scatter_is_no_sum():
  # The TPU's compiler writes a scatter as a fusion that sums all and keeps a slice:
  # every byte arrives once.
  text = TEXT.replace('%fused', '%all-reduce-scatter.3')
  found = [c for c in hlo.in_loops(text) if c.kind != 'all-gather']
  assert {(c.kind, c.bytes) for c in found} == {('reduce-scatter', 64)}
  assert sum(c.received for c in found) == (12 + 60) * 64


def test_a_loop_that_ends_with_its_data_runs_as_often_as_it_may():
  # Of the outer loop the program says no number; of the inner one it does.
  text = TEXT.replace('{"known_trip_count":{"n":"12"}}', '{}')
  for most in (1, 7):
    found = {c.kind + str(c.bytes): c.times for c in hlo.in_loops(text, most)}
    assert found['all-gather64'] == most and found['reduce-scatter64'] == 5 * most


def test_a_compiled_program_is_counted():
  devices = sharding.make(2, 2, 2)

  def five_sums(x):
    def body(x, _):
      return jax.lax.psum(jnp.sin(x), 'tensor'), None

    return jax.lax.psum(jax.lax.scan(body, x, length=5)[0], 'fsdp')

  with sharding.current(devices):
    spread = jax.jit(
      jax.shard_map(five_sums, in_specs=P('data'), out_specs=P('data'), check_vma=False)
    )
    text = spread.lower(jnp.ones((4, 8))).compile().as_text()
  (found,) = hlo.in_loops(text)
  assert (found.kind, found.bytes, found.times) == ('all-reduce', 2 * 8 * 4, 5)
  (once,) = (run for run in hlo.runs(text) if not run.looped)
  assert once.times == 1


@pytest.mark.parametrize(
  ('text', 'count'),
  [
    ('replica_groups={{0,2,4},{1,3,5}}, dimensions={0}', 3),
    ('replica_groups=[2,3]<=[6], dimensions={0}', 3),
    ("replica_groups=mesh['axis_0'=3,'b'=2] {'b'}, x", 2),
    ("replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}, x", 3),
    ('replica_groups={}, dimensions={0}', 1),
  ],
)
def test_groups_of_devices_in_every_spelling(text, count):
  assert hlo.members(f'  %g = f32[4] reduce-scatter(%x), {text}') == count


@pytest.mark.parametrize(
  ('shape', 'kind', 'size'),
  [
    ('(f32[2]{0}, f32[8]{0})', 'all-gather', 32),
    # Several operands at once, and their results.
    ('((s32[4]{0}, f32[2,1]{1,0}), (s32[8]{0}, f32[2,2]{1,0}))', 'all-gather', 32 + 16),
    ('((f32[6,8]{0,1}), f32[2,8]{0,1})', 'reduce-scatter', 3 * 64),
    ('((bf16[6]{0}, /*index=1*/bf16[3]{0}), (bf16[2]{0}, bf16[1]{0}))', *('x', 6)),
    ('(f32[4]{0}, f32[2]{0})', 'all-reduce', 16 + 8),
    ('(pred[2,4]{1,0}, pred[2,4]{1,0})', 'collective-permute', 8),
  ],
)
def test_the_started_collectives_of_a_gpu(shape, kind, size):
  line = f'  %c = {shape} {kind}-start(%x, %y), replica_groups={{{{0,1,2}},{{3,4,5}}}}'
  assert hlo.size(shape, kind, True, line) == size
