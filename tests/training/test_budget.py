"""Counted memory against the compiler and by hand; the schedule that auto chooses."""

import dataclasses
import functools
import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from runs import tiny

from bapo_jax import sharding
from bapo_jax.models import (
  attention,
  decoder,
  layers,
  logprob_tiles,
  lora,
  transformer,
)
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import LayerKind
from bapo_jax.runtime import machine
from bapo_jax.tools.plan import plan, programs
from bapo_jax.training import budget
from bapo_jax.training import config as config_lib
from configs import aime

SPEC = transformer.ModelSpec(
  vocab=32, width=48, layers=24, heads=4, kv_heads=2, head_width=16, ffn=160
)
MIXTURE = dataclasses.replace(
  SPEC, ffn=24, experts=8, active=2, attention='plain', experts_kernel='blocks'
)
B, T = 4, 64
RESULTS = pathlib.Path(__file__).parents[2] / 'benchmarks/results'


def temporaries(spec, kind, rank=0):
  """Bytes that the compiler allocates for a gradient, beyond arguments and results."""

  def total(params, base, tokens_BT):
    weights = lora.attach(base, params)
    return layers.forward(weights, tokens_BT, spec, schedule=Schedule(kind)).sum()

  params, base = transformer.abstract(spec), None
  if rank:
    knobs = LoraConfig(rank=rank).model_dump()
    make = functools.partial(lora.init, spec, **knobs)
    params, base = jax.eval_shape(make, jax.random.key(0)), params
  tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
  lowered = jax.jit(jax.grad(total)).lower(params, base, tokens_BT)
  return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  ('qk_norm', 'rank', 'kinds'), [('head', 0, budget.REMATS), ('', 4, ['dots'])]
)
def test_saved_bytes_are_the_compilers(qk_norm, rank, kinds):
  # A difference of two depths leaves out what does not depend on the depth. Over eight
  # layers, the gaps between the compiler's buffers (5 % of one in jax 0.11) are few.
  spec = dataclasses.replace(SPEC, attention='plain', qk_norm=qk_norm)
  for kind in kinds:
    deep, shallow = (
      temporaries(dataclasses.replace(spec, layers=n), kind, rank) for n in (12, 4)
    )
    counted = budget.saved_bytes(spec, Schedule(kind), T)
    if kind == 'dots':
      counted += 4 * 7 * rank  # x A of seven projections, too few to be in the count
    assert (deep - shallow) / 8 / (B * T) == pytest.approx(counted, rel=0.02), kind


@pytest.mark.parametrize(
  'kind', ['dots', pytest.param('none', marks=pytest.mark.nightly)]
)
def test_saved_bytes_of_experts_are_the_compilers(kind):
  # 512 copies of 256 tokens; seven padding rows or more for each of eight experts.
  deep, shallow = (
    temporaries(dataclasses.replace(MIXTURE, layers=n), kind) for n in (12, 4)
  )
  counted = budget.saved_bytes(MIXTURE, Schedule(kind), T, 1, B)
  assert (deep - shallow) / 8 / (B * T) == pytest.approx(counted, rel=0.02)


def test_saved_bytes_by_hand():
  # D 48, H C 64, K C 32, F 160; bfloat16 and another kernel than the plain one.
  spec = dataclasses.replace(SPEC, compute='bfloat16', attention='splash')
  dots, none = (budget.saved_bytes(spec, Schedule(x), T) for x in ('dots', 'none'))
  # The kernel's results: attention's output, and a float32 divisor per head.
  attended = 2 * 64 + 4 * 4
  products = 2 * (2 * 48 + 64 + 2 * 32 + 2 * 160)
  assert dots == products + attended
  assert none == 20 * 48 + 2 * (2 * 64 + 2 * 32) + 12 * 160 + 4 * 4
  # Two devices share heads and feed-forward width; with sequence sharding also the
  # residual stream between the layers.
  shared = 2 * (64 + 2 * 32 + 2 * 160) / 2 + attended / 2
  whole, split = (
    budget.saved_bytes(spec, Schedule('dots', split), T, 2) for split in (False, True)
  )
  assert (whole, split) == (2 * 2 * 48 + shared, 2 * 48 + shared)


def test_saved_bytes_of_experts_by_hand():
  # Four tokens with two experts each: eight copies in blocks of 8 rows, so that each of
  # eight experts may need a block of its own: 64 rows, 16 per token.
  attended = 4 * (2 * 48 + 64 + 2 * 32)
  found = [
    budget.saved_bytes(dataclasses.replace(MIXTURE, **kind), Schedule('dots'), 4, n)
    for kind, n in [({}, 1), ({'experts_kernel': 'ragged'}, 1), ({}, 8)]
  ]
  chosen, logits = 4 * 2, 4 * 8
  # Without blocks there is a row per copy. Of eight devices, each has all copies, but
  # the block of a single expert.
  of_heads = 4 * 2 * 48 + 4 * 64 / 8 + 4 * 2 * 32
  assert found == [
    attended + 16 * 2 * 4 * 24 + chosen + logits,
    attended + 2 * 2 * 4 * 24 + chosen + logits,
    of_heads + 2 * 2 * 4 * 24 + chosen + logits,
  ]


@pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
@pytest.mark.parametrize('kind', ['compute', 'int8', 'float8_e4m3fn'])
@pytest.mark.parametrize('model', [SPEC, MIXTURE], ids=['dense', 'experts'])
def test_the_bytes_of_an_actor_are_those_of_its_arrays(model, kind, compute):
  spec = dataclasses.replace(model, compute=compute, actor_dtype=kind, o_bias=True)
  make = functools.partial(decoder.actor, spec=spec)
  arrays = jax.tree.leaves(jax.eval_shape(make, transformer.abstract(spec)))
  norms = (2 * spec.layers + 1) * spec.width  # float32 in any case
  counted = budget.actor_bytes(spec) + norms * (4 - budget.itemsize(compute))
  assert sum(x.size * x.dtype.itemsize for x in arrays) == counted


def update_bytes(remat, bounds_pass, pieces, shared=1):
  """Returns (counted, compiled) bytes of an update in `pieces` micro-batches."""
  config = config_lib.parse(aime.tiny().to_dict()).with_values(
    prompts={'count': 2 * pieces, 'max_prompt_tokens': 64},
    sampler={'group_size': 4, 'max_new_tokens': 192},
    learner={
      'minibatches': 1,
      'grad_accum_steps': pieces,
      'share_prompts': shared,
    },
    sft={'batch': 1},
  )
  spec = dataclasses.replace(SPEC, width=128, attention='plain')
  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  schedule = Schedule(remat, bounds_pass=bounds_pass)
  run = programs.resolved(config, spec, mesh, schedule)
  row = plan.compiled(programs.programs_of(run)['train step'])
  return run.budget.update, row.total


@pytest.mark.nightly
@pytest.mark.parametrize(('remat', 'pieces'), [('none', 2), ('dots', 3), ('full', 4)])
def test_stored_activations_are_the_compilers(remat, pieces):
  # A difference of two programs leaves out what both have: one micro-batch.
  stored, again = (update_bytes(remat, how, pieces) for how in ('stored', 'again'))
  counted, compiled = (a - b for a, b in zip(stored, again, strict=True))
  # What the head saves for its backward pass is not in the count.
  assert compiled == pytest.approx(counted, rel=0.05)


@pytest.mark.nightly
def test_shared_prompts_are_counted():
  # Fewer cells in wider bins: more scores, less of everything else.
  shared, alone = (update_bytes('none', 'again', 2, rows) for rows in (4, 1))
  counted, compiled = (a - b for a, b in zip(shared, alone, strict=True))
  assert compiled == pytest.approx(counted, rel=0.05) and counted > 2**26


def parsed(learner=(), rule='balanced', **model):
  """Returns the sizes of a tiny run, and its spec."""
  config = aime.tiny()
  config.clip.rule = rule
  config.model.update(**model)
  config.learner.update(dict(learner))
  config = config_lib.parse(config.to_dict())
  spec = programs.device_spec(config, 'cpu')
  return budget.sizes_of(config, spec), spec


def fake_mesh(platform, data, fsdp, tensor, stats=None):
  """A mesh of devices that are not attached."""
  device = types.SimpleNamespace(platform=platform, memory_stats=lambda: stats)
  devices = [device] * (data * fsdp * tensor)
  return types.SimpleNamespace(
    devices=np.array(devices),
    local_devices=devices,
    shape={'data': data, 'fsdp': fsdp, 'tensor': tensor},
  )


def test_auto_takes_the_fastest_schedule_that_fits():
  mesh = fake_mesh('tpu', 2, 2, 2)
  sizes, spec = parsed()
  sizes = sizes._replace(tile_mib=4)  # so that its memory is known
  order = budget.choices(sizes, spec, mesh, 1e9)
  assert len(order) == 12  # remat, bounds pass, columns split or not
  needed = {s: budget.count(sizes, spec, s, mesh).update for s in order}
  for memory in (*needed.values(), 1e15):
    first = next(s for s in order if needed[s] <= memory)
    assert budget.choose_schedule(sizes, spec, mesh, memory) == first
  # Nothing fits: the schedule that needs the least memory.
  least = min(needed, key=needed.get)
  assert budget.choose_schedule(sizes, spec, mesh, 1.0) == least
  alone = fake_mesh('tpu', 1, 1, 1)
  assert not budget.choose_schedule(sizes, spec, alone, 1.0).sequence_sharding


def measured(file):
  """Reads the milliseconds measured on an H100 from one of its files, by name."""
  rows = map(json.loads, (RESULTS / 'h100.jsonl').read_text().splitlines())
  parts = [row for row in rows if row['file'] == file]
  return {row['what']: row['ms'] for row in parts if {'what', 'ms'} <= {*row}}


def test_the_overhead_of_a_schedule_is_what_an_h100_measured():
  spec = dataclasses.replace(
    SPEC,
    **dict(vocab=151936, width=896, layers=24, heads=14, kv_heads=2, head_width=64),
    **dict(ffn=4864, compute='bfloat16', attention='flash'),
  )
  ms = measured('parts') | measured('second_parts')
  forward = ms['layers flash dots: forward']

  def estimated(one, other, pieces):
    a, b = (
      budget.overhead(spec, Schedule(x[0], False, x[1]), 512, 'gpu')
      for x in (one, other)
    )
    return (a - b) * forward * pieces

  def layers_ms(kind):
    return ms[f'layers flash {kind}: both']

  def update_ms(kind, bounds):
    return ms[f'update 2048/32768 {kind} {bounds} 4']

  def later_ms(kind, bounds, pieces):  # measured after the constants were fitted
    return ms[f'update, tile of 1300 MiB, {kind}, {bounds}, {pieces}']

  dots, again = ('dots', 'again'), update_ms('dots', 'again')
  full = ('full', 'stored')
  least = later_ms(*full, 2)
  pairs = [  # of layers in 16 rows, then of updates of 64
    (('full', 'again'), dots, 1, layers_ms('full') - layers_ms('dots')),
    (('none', 'again'), dots, 1, layers_ms('none') - layers_ms('dots')),
    (dots, ('dots', 'stored'), 4, again - update_ms('dots', 'stored')),
    (('none', 'again'), dots, 4, update_ms('none', 'again') - again),
    (('dots', 'stored'), full, 4, later_ms('dots', 'stored', 4) - later_ms(*full, 4)),
    (('dots', 'stored'), full, 4, later_ms('dots', 'stored', 2) - least),
    (('full', 'again'), full, 4, later_ms('full', 'again', 2) - least),
  ]
  for one, other, pieces, difference in pairs:
    assert estimated(one, other, pieces) == pytest.approx(difference, rel=0.3)


@pytest.mark.parametrize(('platform', 'mib'), [('cpu', 4), ('gpu', 1310)])
def test_a_tile_is_sized_by_platform_and_memory(platform, mib):
  sizes, spec = parsed()
  mesh = fake_mesh(platform, 1, 1, 1)
  found = budget.choose_schedule(sizes, spec, mesh, 64 * 2**30)
  assert found.tile_mib == mib  # 2 % of 65,536 MiB
  given = sizes._replace(tile_mib=32)
  assert budget.choose_schedule(given, spec, mesh, 1e12).tile_mib == 32


@pytest.mark.parametrize(
  ('rule', 'learner', 'wait'),
  [
    ('balanced', {}, True),
    ('fixed', {}, False),
    ('dcpo', {}, False),  # bounds by token
    ('balanced', {'grad_accum_steps': 1}, False),
    ('balanced', {'bounds_scope': 'micro_batch'}, False),
  ],
)
def test_only_bounds_over_several_micro_batches_wait(rule, learner, wait):
  sizes, spec = parsed(learner, rule)
  found = budget.choose_schedule(sizes, spec, sharding.make(), 1e15)
  assert found.bounds_pass == ('stored' if wait else 'again')


def test_given_knobs_are_obeyed():
  knobs = {'remat': 'full', 'sequence_sharding': 'on'}
  sizes, spec = parsed({'bounds_pass': 'again'}, **knobs)
  found = budget.choose_schedule(sizes, spec, sharding.make(2, 2, 2), 1e15)
  assert found == Schedule('full', True, 'again', budget.TILE_CPU)


def test_auto_on_a_cpu_saves_products_at_most():
  sizes, spec = parsed()
  mesh = sharding.make()
  assert {s.remat for s in budget.choices(sizes, spec, mesh, 1e9)} == {'dots', 'full'}
  assert budget.choose_schedule(sizes, spec, mesh, 1e15).remat == 'dots'


@pytest.mark.parametrize(
  ('platform', 'stats', 'expected'),
  [('gpu', {'bytes_limit': 1000}, 900), ('cpu', None, 1200)],
)
def test_the_limit_is_a_share_of_the_device_or_of_the_host(
  monkeypatch, platform, stats, expected
):
  monkeypatch.setattr(machine, 'host_memory', lambda: 4000)
  mesh = fake_mesh(platform, 2, 1, 1, stats)
  assert budget.limit(mesh) == pytest.approx(expected)


def counted(spec=None, mesh=(1, 1, 1), **knobs):
  """(config, spec, budget) of a tiny run."""
  config = tiny(**{'batch.rule': 'fresh_only'} | knobs)
  spec = spec or programs.device_spec(config, 'cpu')
  spec = dataclasses.replace(spec, dtype=config.model.dtype)
  sizes = budget.sizes_of(config, spec)
  return config, spec, budget.count(sizes, spec, Schedule(), fake_mesh('cpu', *mesh))


def test_the_state_by_hand():
  _, spec, found = counted()
  n = transformer.count(spec)
  # Weights of 4 bytes, two moments, a gradient and the sum over micro-batches.
  state = found.weights, found.moments, found.gradients, found.actor
  assert state == (4 * n, 8 * n, 8 * n, 4 * n)
  assert found.kept_actor == 0
  _, _, found = counted(**{'rollout.weight_sync_interval': 2})
  assert found.kept_actor == found.actor == 4 * n
  # Narrow weights have a float32 copy among the moments.
  narrow = {'model.dtype': 'bfloat16'}
  _, _, found = counted(**narrow)
  assert found[:3] == (2 * n, 12 * n, 8 * n)
  # Adapters count as trained numbers beside frozen weights.
  config, _, found = counted(**narrow, **{'lora.rank': 2})
  few = lora.count(spec, 2, config.lora.targets)
  assert found[:3] == (2 * n, 12 * few, 8 * few)
  # A frozen vision tower has weights alone.
  n, tower = (transformer.count(making.SEEING, below) for below in ('', 'vision/'))
  assert counted(making.SEEING)[2][:3] == (4 * n, 8 * (n - tower), 8 * (n - tower))


def test_devices_share_the_state_the_cache_and_the_rows():
  _, spec, found = counted(mesh=(2, 2, 2), **{'batch.rule': 'adapted'})
  config, _, alone = counted(**{'batch.rule': 'adapted'})
  for name in ('weights', 'moments', 'gradients'):
    assert getattr(found, name) == getattr(alone, name) / 4  # fsdp x tensor
  assert found.actor == alone.actor / 2
  assert found.responses == alone.responses / 4 and found.buffer == alone.buffer / 4
  # Keys and values of each layer and slot; two devices share the heads if they divide.
  slots, heads = config.sampler.max_num_seqs, spec.kv_heads
  numbers = 2 * spec.layers * heads * spec.head_width * config.row_length
  logits = budget.LOGITS * spec.vocab
  assert alone.cache == 4 * slots * (numbers + logits)
  numbers /= 1 if heads % 2 else 2
  assert found.cache == 4 * slots * (numbers + logits / 2) / 4


GEMMA = dataclasses.replace(  # Gemma 3 270M
  transformer.ModelSpec(262144, 640, 18, 4, 1, 256, 2048),
  qkv_bias=False,
  qk_norm='head',
  kinds=3 * (5 * (LayerKind(512, 'plain'),) + (LayerKind(),)),
  norms='sandwich',
  norm_offset=True,
  activation='gelu_tanh',
  embed_scale=640**0.5,
  compute='bfloat16',
)


def test_windows_by_hand():
  # 15 of 18 layers attend to 512 of 32,768 columns.
  assert budget.outside(GEMMA, 32768) == pytest.approx(15 / 18 * (1 - 512 / 32768))
  assert budget.outside(GEMMA, 512) == budget.outside(SPEC, 32768) == 0
  # Rows of four tokens. With a window of two they attend to .5, 1.5, 2 and 2 columns,
  # their own as a half, without a window to 2 in the mean.
  spec = dataclasses.replace(SPEC, layers=3, kinds=(LayerKind(2),) * 2 + (LayerKind(),))
  assert budget.keys_read(spec, 4) == 2 * 1.5 + 2
  assert budget.keys_read(SPEC, 4) == 24 * 2


def test_the_arrays_of_two_windows_are_saved_by_every_layer():
  # Blocks of 64 queries. Without a window they see 64, 128, 192 and 256 keys, with 65
  # their 64 and the 64 before: the first and the second block are equal.
  kinds = LayerKind(), LayerKind(65, 'plain')
  spec = dataclasses.replace(SPEC, attention='plain', kinds=12 * kinds)
  seen = [64, 128, 192, 256] + 2 * [128]
  assert budget._stored_keys(spec, 256) == (sum(seen) / 4, sum(seen) / 256)
  for kernel in attention.FUSED:  # a GPU's layers with windows recompute their scores
    other = dataclasses.replace(spec, attention=kernel)
    assert budget._stored_keys(other, 256) == (0, 1)


def test_a_large_vocabulary_is_cut_into_tiles_and_counted():
  # Two thirds of the weights are the head. The tile of a CPU has 4 MiB of logits, that
  # of an H100 1,490 MiB: 2,048 columns of 190,720 tokens.
  head = GEMMA.vocab * GEMMA.width
  assert head / transformer.count(GEMMA) == pytest.approx(0.626, abs=1e-3)
  for mib, columns, rows in ((4, 256, 4096), (1490, 2048, 190720), (64, 2048, 8192)):
    tile = logprob_tiles.largest(mib, GEMMA.vocab)
    assert tile == (columns, rows)
    blocks, size = logprob_tiles.split(GEMMA.vocab, tile.rows, logprob_tiles.ROW_STEP)
    assert blocks * size == GEMMA.vocab
    assert 4 * tile.columns * size <= mib << 20
  # A slot of a short row: a fifth of its bytes are logits, five arrays of a MiB.
  cache = budget.cache_bytes(GEMMA, 1024, 1)
  assert cache == 2 * 18 * 256 * 2 * 1024
  assert budget.slot_bytes(GEMMA, 1024, 1) == cache + 5 * 2**20


def test_routes_by_hand():
  # Two experts in each of two layers are four bytes per token of a row.
  knobs = {'batch.rule': 'adapted', 'sft.layers': 2, 'sft.experts': 4}
  config, _, with_routes = counted(mesh=(2, 2, 2), **knobs)
  knobs['model.replay_routes'] = 'off'
  _, _, without = counted(mesh=(2, 2, 2), **knobs)
  T, group = config.row_length, config.sampler.group_size

  def more(name):
    return getattr(with_routes, name) - getattr(without, name)

  capacity, slots = config.buffer.capacity, config.sampler.max_num_seqs
  # Four devices divide the rows, two the experts of a row.
  assert more('buffer') == 4 * capacity * group * T / 8
  assert more('cache') == 4 * slots * T / 8
  assert more('responses') * 13 == without.responses * 4 / 2
  whole = with_routes.checkpoint['buffer'] - without.checkpoint['buffer']
  assert whole == 4 * capacity * group * T


def test_a_checkpoint_by_hand():
  _, spec, found = counted()
  n = transformer.count(spec)
  assert found.checkpoint == {'weights': 4 * n, 'optimiser': 8 * n}
  narrow = {'model.dtype': 'bfloat16'}
  assert counted(**narrow)[2].checkpoint == {'weights': 2 * n, 'optimiser': 12 * n}
  lag = {'rollout.weight_sync_interval': 2}
  config, _, found = counted(**narrow, **lag, **{'lora.rank': 2})
  few = lora.count(spec, 2, config.lora.targets)
  adapted = {'adapters': 4 * few, 'optimiser': 8 * few, 'actor': 4 * few}
  assert found.checkpoint == adapted
  # Newest, best, and one being written.
  assert found.disk == (config.checkpoint.keep + 2) * sum(adapted.values())
  config, _, found = counted(**{'batch.rule': 'adapted'})
  # 8 groups of 4 rows; 13 bytes per token of a row.
  assert found.checkpoint['buffer'] == found.buffer == 8 * 4 * config.row_length * 13


@pytest.mark.parametrize('part', budget.KNOBS)
def test_what_cannot_fit_is_refused_by_the_knobs_of_its_largest_part(part):
  _, _, found = counted()
  decoding = found.weights + found.moments + found.actor + found.cache
  total = max(found.update, decoding + found.responses) + found.buffer
  budget.check(found, total)
  large, message = found._replace(**{part: 1e12}), re.escape(budget.KNOBS[part])
  with pytest.raises(ValueError, match=f'most of it for {message}'):
    budget.check(large, 1e11)
