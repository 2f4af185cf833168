"""Times decoding and training on one device, beside the roofline, and their memory.

Each is a section, so a process, of its own: the peak of a device's memory counts from
the start of the process. The programs are those that a plan compiles, and their memory
is set beside the plan's: what the compiler counts, and what budget.py estimates.

The weights are random; a model given by its directory needs only a config.json.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan import programs
from bapo_jax.tools.plan.programs import Program
from bapo_jax.training import budget, inputs, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved
from benchmarks import machine, roofline, seconds
from benchmarks.first_contact.figures import Context, Figure, Skip
from benchmarks.first_contact.rates import GIB, chip_of
from benchmarks.rollout import bound
from benchmarks.training import learner, rates

EMBEDDED, GIVEN, LARGE = '0.1M', 'given model', '1.5B'
SLOTS, COLUMNS = 64, 1088  # of decoding; the embedded model has those of the main job
ROWS, LENGTH = 16, 1024  # of an update
ON_CPU = {'slots': 8, 'columns': 128, 'rows': 8, 'length': 64}


def spec_of(context: Context, model: str) -> ModelSpec:
  """Returns the sizes of a model, with products in the dtype of the platform.

  Raises:
    Skip: no directory is given, or the model is too large for a CPU.
  """
  on_cpu = jax.default_backend() == 'cpu'
  dtype = 'float32' if on_cpu else 'bfloat16'
  if model == EMBEDDED:
    return dataclasses.replace(inputs.open_model(Config()).spec, compute=dtype)
  if model == GIVEN:
    if not context.model:
      raise Skip('no model was given; --model=DIR adds a directory with config.json')
    return hf_config.read_spec(context.model, dtype)
  if on_cpu:
    raise Skip('a CPU is too slow for this model')
  return machine.QWEN2_1_5B


def run_of(spec: ModelSpec, config: Config) -> Resolved:
  """Returns the run of a config on the first device."""
  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  spec = resolve.with_kernels(spec, jax.default_backend())
  schedule = budget.choose_schedule(budget.sizes_of(config, spec), spec, mesh)
  return programs.resolved(config, spec, mesh, schedule)


def check_room(counted: float, r: Resolved) -> None:
  """Raises Skip if a program needs more memory than a run may use."""
  if counted > (room := budget.limit(r.mesh)):
    raise Skip(
      f'it needs about {counted / GIB:.3g} GiB and may use {room / GIB:.3g} of this '
      'device'
    )


def compiled_bytes(program: Program) -> float:
  """Returns the bytes of a program on its device, as the compiler counts them."""
  m = program.call.lower().compile().memory_analysis()
  if m is None:
    return float('nan')
  arguments = m.argument_size_in_bytes - m.alias_size_in_bytes
  return arguments + m.output_size_in_bytes + m.temp_size_in_bytes


def peak() -> float | None:
  """Returns the peak GiB of this process on the first device; None on a CPU."""
  device = jax.devices()[0]
  stats = (device.memory_stats() if device.platform != 'cpu' else None) or {}
  return stats['peak_bytes_in_use'] / GIB if 'peak_bytes_in_use' in stats else None


def memory(before: float | None, compiled: float, counted: float) -> Iterator[Figure]:
  """Yields the peak beside the compiler's count, and that beside the estimate."""
  yield Figure('peak memory before', before, 'GiB')
  compiled, counted = compiled / GIB, counted / GIB
  yield Figure('peak memory', peak(), 'GiB', None, compiled, 'compiled program')
  yield Figure('compiled program', compiled, 'GiB', None, counted, 'estimate')


def least_seconds(
  flops: float, moved: float, dtype: str, known: Mapping[str, float]
) -> tuple[float | None, str]:
  """Returns the lower bound on a program's seconds, and whose rates it is from.

  `known` are the figures of the section `rates`, for a device without a data sheet.
  """
  chip = chip_of(jax.devices()[0].device_kind)
  if chip and dtype == 'bfloat16':
    cost = roofline.Cost(flops, flops, moved)
    return max(cost.seconds(chip, 0).values()), 'roofline of the data sheet'
  product, copy = known.get(f'product {dtype}'), known.get('copy')
  if not product or not copy:
    return None, ''
  return max(flops / product / 1e12, moved / copy / 1e9), 'roofline of measured rates'


def per_second(
  name: str, count: float, took: float, least: tuple[float | None, str], unit: str
) -> Figure:
  """Returns a rate beside the rate of the lower bound."""
  reference = count / least[0] if least[0] else None
  return Figure(name, count / took, unit, None, reference, least[1])


def decode(context: Context, model: str) -> Iterator[Figure | dict[str, Any]]:
  """Yields tokens/s of decoding with all slots busy, at the middle of their rows."""
  spec, config = spec_of(context, model), Config()
  n = 8 if context.small or context.platform == 'cpu' else 64
  if model != EMBEDDED:
    on_cpu = jax.default_backend() == 'cpu'
    columns = ON_CPU['columns'] if on_cpu else min(COLUMNS, spec.positions)
    config = config.with_values(
      prompts={'max_prompt_tokens': columns // 2},
      sampler={
        'max_num_seqs': ON_CPU['slots'] if on_cpu else SLOTS,
        'max_new_tokens': columns - columns // 2,
      },
    )
  config = config.with_values(sampler={'tokens_per_dispatch': n})
  r = run_of(spec, config)
  size = r.budget
  check_room(size.actor + size.cache, r)
  found = programs.programs_of(r)
  compiled = compiled_bytes(found['decode'])
  # Drawn in the narrow dtype: float32 weights would set the peak.
  narrow = dataclasses.replace(spec, dtype=spec.compute)
  make = jax.jit(lambda key: decoder.actor(transformer.init(narrow, key), spec))
  actor = jax.block_until_ready(make(jax.random.key(0)))
  before = peak()
  slots, length = config.sampler.max_num_seqs, config.row_length
  took, _ = bound.step_seconds(actor, spec, slots, length, greedy=False, n=n)
  cost = seconds.works(r, found)['decode'].cost
  least = least_seconds(*cost[1:], spec.compute, context.rates)
  yield Figure('step', 1e3 * took, 'ms')
  yield per_second(f'{slots} slots of {length}', slots, took, least, 'tokens/s')
  yield from memory(before, compiled, size.actor + size.cache)


def train(context: Context, model: str) -> Iterator[Figure | dict[str, Any]]:
  """Yields the seconds of an optimiser update on rows of full length."""
  spec, config = spec_of(context, model), Config()
  if model != EMBEDDED:
    rows, length = ROWS, min(LENGTH, spec.positions)
    if jax.default_backend() == 'cpu':
      rows, length = ON_CPU['rows'], ON_CPU['length']
    config = learner.config_of(rows, length, 'packed')
  config = config.with_values(sft={'batch': 1})  # the estimate counts a warm start, too
  r = run_of(spec, config)
  counted = r.budget.update
  check_room(counted, r)
  found = programs.programs_of(r)
  compiled = compiled_bytes(found['train step'])
  rows, length = config.minibatch_rows, config.row_length
  batch = learner.example(rows, length, '1:1', spec.vocab)
  update = learner.updater(config, spec, r.schedule)
  before = peak()
  times = 3 if context.small else 8
  took = statistics.median([update(batch) for _ in range(times)][1:])
  flops = rates.useful_flops(spec, [rates.teaching(batch)])
  moved = seconds.works(r, found)['train step'].cost.bytes
  least = least_seconds(flops, moved, spec.compute, context.rates)
  yield Figure('update', 1e3 * took, 'ms')
  yield per_second(f'{rows} rows of {length}', rows * length, took, least, 'tokens/s')
  best = least_seconds(flops, 0.0, spec.compute, context.rates)
  yield per_second('products of the model', flops / 1e12, took, best, 'TFLOP/s')
  yield from memory(before, compiled, counted)
