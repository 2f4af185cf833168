"""What the backward pass keeps: the count against the compiler, and what auto takes."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import attention, layers, lora, transformer
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.layers import Schedule
from bapo_jax.runtime import machine
from bapo_jax.training import config as config_lib
from bapo_jax.training import remat, resolve
from configs import aime

SPEC = transformer.ModelSpec(
  vocab=32, width=48, layers=24, heads=4, kv_heads=2, head_width=16, ffn=160
)
B, T = 4, 64


def temporaries(spec, kind, T, rank=0):
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
  ('qk_norm', 'T', 'rank'),
  [(False, 64, 0), (True, 64, 0), (False, 256, 0), (False, 64, 4)],
)
def test_the_count_is_the_compilers(qk_norm, T, rank):
  # What does not depend on the depth is left out: a difference of two depths.
  spec = dataclasses.replace(SPEC, attention='plain', qk_norm=qk_norm)
  for kind in remat.KINDS:
    deep, shallow = (
      temporaries(dataclasses.replace(spec, layers=n), kind, T, rank) for n in (24, 8)
    )
    counted = remat.saved_bytes(spec, Schedule(kind), T)
    if rank and kind == 'none':
      counted -= 2 * 4 * 48  # a norm's frozen scale needs no array of its own
    if kind == 'dots':
      counted += 4 * 7 * rank  # x A of seven projections, too few to be in the count
    assert (deep - shallow) / 16 / (B * T) == pytest.approx(counted, rel=0.02), kind


def test_what_is_kept_by_hand():
  # D 48, H C 64, K C 32, F 160; bfloat16 and another kernel than the plain one.
  spec = dataclasses.replace(SPEC, compute='bfloat16', attention='splash')
  assert remat.saved_bytes(spec, Schedule('full'), T) == 2 * 48
  # The kernel's results: what was attended, and a float32 divisor of each head.
  attended = 2 * 64 + 4 * 4
  products = 2 * (2 * 48 + 64 + 2 * 32 + 2 * 160)
  assert remat.saved_bytes(spec, Schedule('dots'), T) == products + attended
  plain = dataclasses.replace(spec, attention='plain')
  assert remat.saved_bytes(plain, Schedule('dots'), T) == products
  everything = 20 * 48 + 2 * (2 * 64 + 2 * 32) + 12 * 160 + 4 * 4
  assert remat.saved_bytes(spec, Schedule('none'), T) == everything
  # Two devices share heads and feed-forward width, and the stream between the layers
  # where columns are split.
  shared = 2 * (64 + 2 * 32 + 2 * 160) / 2 + attended / 2
  assert remat.saved_bytes(spec, Schedule('dots'), T, 2) == 2 * 2 * 48 + shared
  assert remat.saved_bytes(spec, Schedule('dots', True), T, 2) == 2 * 48 + shared


def parsed(learner=(), **model):
  config = aime.tiny()
  config.model.update(**model)
  config.learner.update(dict(learner))
  return config_lib.parse(config.to_dict())


def on_tpu(monkeypatch):
  """As if the mesh were of TPUs: nothing that a CPU is bad at is left out."""
  mesh = sharding.make(2, 2, 2)
  device = types.SimpleNamespace(platform='tpu')
  fake = types.SimpleNamespace(
    devices=np.array([device] * 8), shape=dict(mesh.shape), axis_names=mesh.axis_names
  )
  monkeypatch.setattr(remat.sharding, 'row_shards', lambda mesh: 4)
  return fake


def test_auto_takes_the_least_that_must_be_computed_again(monkeypatch):
  mesh, config = on_tpu(monkeypatch), parsed()
  spec = resolve.open_model(config).spec
  order = [
    Schedule(kind, split, bounds)
    for kind, bounds in (
      ('none', 'stored'),
      ('dots', 'stored'),
      ('none', 'again'),
      ('full', 'stored'),
      ('dots', 'again'),
      ('full', 'again'),
    )
    for split in (False, True)
  ]
  needed = {schedule: remat.needs(config, spec, schedule, mesh) for schedule in order}
  memories = sorted(needed.values())
  assert len(set(memories)) == len(order)
  for memory in (*memories, 1e15):
    first = next(schedule for schedule in order if needed[schedule] <= memory)
    assert remat.resolve(config, spec, mesh, memory) == first
  # Nothing fits: what needs the least memory.
  assert remat.resolve(config, spec, mesh, 1.0) == Schedule('full', True, 'again')
  alone = sharding.make(devices=jax.devices()[:1])
  assert not remat.resolve(config, spec, alone, 1.0).sequence_sharding


@pytest.mark.parametrize(
  ('rule', 'learner', 'wait'),
  [
    ('balanced', {}, True),
    ('recipe', {}, True),
    ('fixed', {}, False),
    ('unclipped', {}, False),
    ('balanced', {'grad_accum_steps': 1}, False),
    ('balanced', {'bounds_scope': 'micro_batch'}, False),
  ],
)
def test_nothing_waits_that_needs_no_bounds_of_others(rule, learner, wait):
  config = parsed(learner)
  clip = config.clip.model_copy(update={'rule': rule})
  config = config.model_copy(update={'clip': clip})
  spec = resolve.open_model(config).spec
  found = remat.resolve(config, spec, sharding.make(), 1e15)
  assert found.bounds_pass == ('stored' if wait else 'again')
  said = remat.sentence(config, spec, found, sharding.make(), 1e15)
  assert ('no forward pass of their own' in said) == wait


def test_what_waits_is_counted_once_per_micro_batch():
  learner, mesh = {'grad_accum_steps': 4}, sharding.make(devices=jax.devices()[:1])
  config = parsed(learner)
  spec = resolve.open_model(config).spec
  again, stored = (
    remat.needs(config, spec, Schedule(bounds_pass=name), mesh)
    for name in ('again', 'stored')
  )
  rows = max(config.sft.batch, config.micro_batch_rows)
  layer = remat.saved_bytes(spec, Schedule(), config.row_length)
  hidden = (4 + 4) * spec.width
  tokens = rows * config.row_length
  assert stored - again == pytest.approx(3 * tokens * (spec.layers * layer + hidden))


@pytest.mark.parametrize('kind', remat.KINDS)
def test_a_knob_is_obeyed(kind):
  learner, mesh = {'bounds_pass': 'again'}, sharding.make(2, 2, 2)
  config = parsed(learner, remat=kind, sequence_sharding='on')
  spec = resolve.open_model(config).spec
  found = remat.resolve(config, spec, mesh, 1e15)
  assert found == Schedule(kind, True, 'again')
  assert f'remat {kind}:' in remat.sentence(config, spec, found, mesh, 1e15)


def test_the_kernels_gradients_of_queries_are_counted(monkeypatch):
  config, mesh = parsed(), sharding.make(devices=jax.devices()[:1])
  spec = resolve.open_model(config).spec
  spec = dataclasses.replace(spec, attention='splash')
  few = remat.needs(config, spec, Schedule(), mesh)
  columns = -(-config.row_length // 128) * 128
  monkeypatch.setattr(attention, 'key_block', lambda length: length / 3)
  more = remat.needs(config, spec, Schedule(), mesh) - few
  blocks = 3 - columns / max(n for n in (128, 256, 512) if columns % n == 0)
  rows = max(config.sft.batch, config.minibatch_rows)
  # Float32 queries, once per block.
  assert more == pytest.approx(blocks * rows * config.row_length * 4 * 4 * 16)


@pytest.mark.parametrize(
  ('platform', 'stats', 'expected'),
  [('gpu', {'bytes_limit': 1000}, 900), ('cpu', None, 1200), ('tpu', None, 1200)],
)
def test_the_limit_is_the_devices_or_its_part_of_the_host(
  monkeypatch, platform, stats, expected
):
  device = types.SimpleNamespace(platform=platform, memory_stats=lambda: stats)
  mesh = types.SimpleNamespace(
    devices=np.array([device] * 2), local_devices=[device] * 2
  )
  monkeypatch.setattr(machine, 'host_memory', lambda: 4000)
  assert remat.limit(mesh) == pytest.approx(expected)


def test_a_small_run_on_a_cpu_keeps_products_and_nothing_more():
  assert {choice.remat for choice in remat.choices(parsed(), sharding.make())} == {
    'dots',
    'full',
  }
  config, mesh = parsed(), sharding.make()
  spec = resolve.open_model(config).spec
  assert remat.resolve(config, spec, mesh).remat == 'dots'
  assert 'remat dots (auto)' in remat.sentence(
    config, spec, remat.resolve(config, spec, mesh), mesh
  )


@pytest.mark.parametrize(
  ('kind', 'tokens'), [(k, 16) for k in remat.KINDS] + [('dots', 17)]
)
def test_split_columns_change_no_gradient(kind, tokens):
  # 17 columns do not divide over two devices and stay whole.
  spec = dataclasses.replace(SPEC, layers=2)
  params = making.params(spec)
  tokens_BT = jax.random.randint(jax.random.key(1), (8, tokens), 0, spec.vocab)
  weight_D = jax.random.normal(jax.random.key(2), (spec.width,))

  def total(params, tokens_BT, split):
    schedule = Schedule(kind, sequence_sharding=split)
    hidden_BTD = layers.forward(params, tokens_BT, spec, schedule=schedule)
    return jnp.sin(hidden_BTD * weight_D[None, None]).sum()

  gradient = jax.jit(jax.grad(total), static_argnames='split')
  expected = gradient(params, tokens_BT, split=False)
  mesh = sharding.make(2, 2, 2)
  spread = jax.device_put(params, sharding.shardings(params, mesh))
  found = sharding.under(mesh, functools.partial(gradient, split=True))(
    spread, jax.device_put(tokens_BT, sharding.over_rows(mesh))
  )
  for path, g in jax.tree.leaves_with_path(expected):
    other = dict(jax.tree.leaves_with_path(found))[path]
    np.testing.assert_allclose(other, g, atol=1e-5 * np.abs(g).max(), err_msg=str(path))


@pytest.mark.parametrize(('tokens', 'columns'), [(16, 8), (17, 17)])
def test_columns_are_split_where_they_divide(tokens, columns):
  mesh = sharding.make(2, 2, 2)
  place = jax.jit(functools.partial(layers.split, schedule=Schedule('full', True)))
  x_BTD = sharding.under(mesh, place)(jnp.zeros((8, tokens, SPEC.width)))
  assert x_BTD.sharding.shard_shape(x_BTD.shape) == (2, columns, SPEC.width)
