"""Programs compiled for an absent H100: limits on kernels, copies and loops."""

import pytest

from benchmarks.on_gpu import programs

HLO = """
HloModule example

%moves (p0: f32[4,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %cut = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
}

%writes (a: f32[4,8], b: f32[1,8], i: s32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = f32[4,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)
}

%computes (x: f32[1,8]) -> f32[1,8] {
  %x = f32[1,8]{1,0} parameter(0)
  ROOT %twice = f32[1,8]{1,0} add(%x, %x)
}

%inner (t: (f32[4,8], s32[])) -> (f32[4,8], s32[]) {
  %t = (f32[4,8], s32[]) parameter(0)
  %s = f32[4,8]{1,0} get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=1
  %m = f32[1,8]{1,0} fusion(%s, %n), kind=kLoop, calls=%moves
  %c = f32[1,8]{1,0} fusion(%m), kind=kLoop, calls=%computes
  %w = f32[4,8]{1,0} fusion(%s, %c, %n), kind=kLoop, calls=%writes
  ROOT %out = (f32[4,8], s32[]) tuple(%w, %n)
}

%ends (u: (f32[4,8], s32[])) -> pred[] {
  %u = (f32[4,8], s32[]) parameter(0)
  ROOT %yes = pred[] custom-call(%u), custom_call_target="unknown"
}

ENTRY %main (arg: f32[4,8], k: s32[]) -> f32[4,8] {
  %arg = f32[4,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %copied = f32[4,8]{1,0} copy(%arg)
  %start = (f32[4,8], s32[]) tuple(%copied, %k)
  %loop = (f32[4,8], s32[]) while(%start), condition=%ends, body=%inner
  ROOT %last = f32[4,8]{1,0} get-tuple-element(%loop), index=0
}
"""


def test_kernels_copies_and_turns_by_hand():
  # A copy of 128 bytes; per turn a slice and its write of 32 each, and a sum.
  found = programs.counts(HLO, (5,))
  assert found == {
    'kernels': 1 + 5 * 3,
    'copied_gib': (128 + 5 * (32 + 32)) / 2**30,
    'turns_of_unknown_loops': 5,
  }


@pytest.mark.nightly
def test_an_update_on_an_h100(topology):
  topology('h100:1')  # skips without its compiler
  found = programs.measure('h100:1')
  update, score, token = (found[x] for x in ('train step', 'log-prob pass', 'decode'))
  # With tiles of 512 x 2374 and the schedule that stores most: 78,049 kernels, 101.7
  # GiB copied, 6,152 turns and 28.8 GiB. At each turn the GPU waits for the host.
  assert update['turns_of_unknown_loops'] < 50
  assert update['copied_gib'] < 10
  assert update['kernels'] < 13_000
  assert update['temporaries_gib'] < 8
  assert score['turns_of_unknown_loops'] < 10 and score['kernels'] < 1_000
  assert token['kernels'] < 340
