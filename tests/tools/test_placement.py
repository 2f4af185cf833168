"""No compiled program keeps an array whole on a device that should hold a shard of it.

The same checks run on eight virtual devices here, and for eight H100s and a v5e slice
where their compilers are installed (requirements/plan.txt).
"""

import functools
import itertools
import json
import math
import re

import jax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import replay_buffer
from bapo_jax.run import experiment
from bapo_jax.runtime.ahead import Call
from bapo_jax.tools.plan import programs
from bapo_jax.tools.plan.chips import CHIPS
from bapo_jax.training import build
from bapo_jax.types import empty_groups
from benchmarks import hlo, meshes
from tests.tools.test_plan import SEEING, run_of, small

LARGE = 2**19  # bytes; smaller arrays may be replicated
LOOP = re.compile(r' = \((.*?)\) while\(')


def config_of(path, **knobs):
  config = small(path).with_values(
    sampler={'max_new_tokens': 384, 'max_num_seqs': 32},
    batch={'rule': 'adapted'},
    learner={'grad_accum_steps': 2},
    rollout={'max_off_policy_steps': 1},
  )
  return config.with_values(**knobs)


def seeing(path):
  """A config whose model has a vision tower."""
  config = config_of(path, prompts={'max_prompt_tokens': 256 + programs.TEXT})
  (path / 'config.json').write_text(json.dumps(SEEING))
  return config


def insert(run):
  """The program that puts groups into the replay buffer."""
  config = run.config
  mesh = run.mesh
  P, G, T = config.prompts.count, config.sampler.group_size, config.row_length
  fresh, again, batch = (
    jax.eval_shape(functools.partial(empty_groups, n, G, T))
    for n in (P, config.buffer.reevaluate, config.seats)
  )
  source_P = jax.ShapeDtypeStruct((config.seats,), 'int32')
  buffer = jax.eval_shape(lambda: build.empty_buffer(config, run.spec))
  rows = buffer, fresh, again, batch, source_P
  rows = sharding.abstract(rows, sharding.layout_of_rows(rows, mesh))
  static = {
    'thresholds': config.buffer.thresholds,
    'max_off_policy_steps': config.buffer.max_off_policy_steps,
    'max_reuse': config.buffer.max_reuse,
    'hard_order': config.buffer.hard_order,
  }
  return Call(mesh, replay_buffer.insert, *rows, 0, **static)


def large(tree):
  """Returns the large arrays of a placed tree that are sharded."""
  found = []
  for x in jax.tree.leaves(tree):
    layout = getattr(x, 'sharding', None)
    if layout is None or layout.shard_shape(x.shape) == x.shape:
      continue
    if math.prod(x.shape) * x.dtype.itemsize > LARGE:
      found.append(x)
  return found


def check(call):
  """Compiles a program and checks its outputs, its donated arguments and its loops."""
  lowered = call.lower()
  compiled = lowered.compile()
  results = lowered.out_info
  sharded = large(call.args)
  assert sharded, 'nothing to check'
  # An output with the shape of a sharded argument has the size of its shard.
  shard = {(x.shape, x.dtype): x.sharding.shard_shape(x.shape) for x in sharded}
  outputs = jax.tree.leaves(compiled.output_shardings)
  for x, layout in zip(jax.tree.leaves(results), outputs, strict=True):
    if (x.shape, x.dtype) in shard:
      found = math.prod(layout.shard_shape(x.shape))
      assert found <= math.prod(shard[x.shape, x.dtype]), (x.shape, layout)
    elif math.prod(x.shape) * x.dtype.itemsize > LARGE:
      assert not layout.is_fully_replicated, (x.shape, layout)
  # Donated arguments are reused: no output beside them but small arrays.
  m, beside = compiled.memory_analysis(), 0
  for x, layout in zip(jax.tree.leaves(results), outputs, strict=True):
    if (x.shape, x.dtype) not in shard:
      beside += math.prod(layout.shard_shape(x.shape)) * x.dtype.itemsize
  donated = any(x.donated for x in jax.tree.leaves(compiled.args_info))
  if donated:
    assert m.output_size_in_bytes - m.alias_size_in_bytes <= beside + LARGE
  # No loop carries the whole of a sharded array.
  whole = {x.shape for x in sharded}
  for carry in LOOP.findall(compiled.as_text()):
    for _, dims in hlo.ARRAY.findall(carry):
      shape = tuple(int(n) for n in dims.split(',') if n)
      assert shape not in whole, f'a loop carries {shape} whole'


# Functions of the programs of a run, and one that it compiles at its first call.
KINDS = ('learn', 'recompute', 'copy', 'admit', 'refresh', 'run', 'harvest')
KINDS += ('embedded', 'insert')


def checked(kind, path, devices, **knobs):
  """Checks the programs of a kind on a mesh of 1 x 4 x 2 of these devices."""
  config = (seeing if kind == 'embedded' else config_of)(path, **knobs)
  mesh = sharding.make(1, 4, 2, devices=devices)
  run = run_of(config, mesh, devices[0].platform)
  if kind == 'insert':
    return check(insert(run))
  trainer, params, opt = programs.trainer_of(run)
  calls = experiment.programs(trainer, params, opt)
  # Of several shapes the last, which is a program of training.
  check([call for call in calls if call.function.__name__ == kind][-1])


@pytest.mark.parametrize('kind', KINDS)
def test_every_program_keeps_its_shards(kind, tmp_path):
  checked(kind, tmp_path, jax.devices())


@pytest.mark.nightly
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('where', ['h100:8', 'v5e:2x4'])
def test_every_program_keeps_its_shards_on_accelerators(
  topology, where, kind, tmp_path
):
  checked(kind, tmp_path, topology(where))


@pytest.mark.nightly
@pytest.mark.parametrize('where', ['h100:8', 'v5e:2x4'])
def test_adapters_keep_their_shards(topology, where, tmp_path):
  checked('learn', tmp_path, topology(where), lora={'rank': 64})


# ----------- devices that are not attached are described as their makers describe them


GPUS = [name for name, chip in CHIPS.items() if chip.gpu]


@pytest.mark.parametrize(
  ('topology', 'hosts'),
  [
    ('h100:1', [0]),
    ('h200:8', [0] * 8),
    ('b200:2x4', [0] * 4 + [1] * 4),
    ('v5p:2x2x2', [0] * 4 + [1] * 4),
  ],
)
def test_devices_are_counted_without_a_compiler(topology, hosts):
  chip, found = meshes.count(topology)
  assert [d.process_index for d in found] == hosts
  assert {d.platform for d in found} == {'gpu' if chip.gpu else 'tpu'}
  assert [d.id for d in found] == list(range(len(found)))


@pytest.mark.parametrize(('name', 'shape'), [*itertools.product(GPUS, ['1', '2x4'])])
def test_the_compiler_has_the_devices_that_are_counted(topology, name, shape):
  found = topology(f'{name}:{shape}')
  chip, counted = meshes.count(f'{name}:{shape}')
  assert found[0].device_kind == chip.gpu.name
  assert {d.platform for d in found} == {d.platform for d in counted}
  assert [d.process_index for d in found] == [d.process_index for d in counted]


def test_the_peak_of_a_gpu_is_that_of_its_cores():
  # Dense bfloat16 products per core and clock, from the architectures' white papers.
  for name, per_clock in {'a100-80': 2048, 'rtx6000': 1024, 'rtx4090': 512}.items():
    chip = CHIPS[name]
    peak = per_clock * chip.gpu.cores * chip.gpu.clock * 1e9
    assert chip.flops == pytest.approx(peak, rel=0.005)
