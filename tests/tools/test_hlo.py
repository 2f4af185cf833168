"""A collective in a loop is counted once per iteration."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.tools.plan import hlo

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
    ('replica_groups=[2,3]<=[3,2]T(1,0), x', 3),
    ("replica_groups=mesh['axis_0'=3,'b'=2] {'b'}, x", 2),
    ("replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}, x", 3),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a','c'}, x", 4),
    ('replica_groups={}, dimensions={0}', 1),
  ],
)
def test_groups_of_devices_in_every_spelling(text, count):
  assert hlo.members(f'  %g = f32[4] reduce-scatter(%x), {text}') == count


def test_a_scatter_over_an_axis_is_as_large_as_its_operand():
  line = "  %q = f32[4] reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=3] {'b'}, x"
  assert hlo.size('f32[4]', 'reduce-scatter', False, line) == 3 * 4 * 4


@pytest.mark.parametrize(
  ('shape', 'kind', 'size'),
  [
    ('(f32[2]{0}, f32[8]{0})', 'all-gather', 32),
    ('(f32[2]{0}, f32[8]{0}, u32[], u32[])', 'all-gather', 32),
    # Several operands at once, and their results.
    ('((s32[4]{0}, f32[2,1]{1,0}), (s32[8]{0}, f32[2,2]{1,0}))', 'all-gather', 32 + 16),
    ('((f32[6,8]{0,1}), f32[2,8]{0,1})', 'reduce-scatter', 3 * 64),
    ('((bf16[6]{0}, /*index=1*/bf16[3]{0}), (bf16[2]{0}, bf16[1]{0}))', *('x', 6)),
    ('((f32[6]{0}, f32[3]{0}), (f32[2]{0}, f32[1]{0}))', 'reduce-scatter', 3 * 12),
    ('(f32[4]{0}, f32[2]{0})', 'all-reduce', 16 + 8),
    ('f32[4]{0}', 'all-reduce', 16),
    ('(pred[2,4]{1,0}, pred[2,4]{1,0})', 'collective-permute', 8),
  ],
)
def test_the_started_collectives_of_a_gpu(shape, kind, size):
  line = f'  %c = {shape} {kind}-start(%x, %y), replica_groups={{{{0,1,2}},{{3,4,5}}}}'
  assert hlo.size(shape, kind, True, line) == size
