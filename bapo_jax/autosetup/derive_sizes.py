"""Derives mesh, step size, memory knobs and learning rate from model and devices.

A rule takes the config, with the knobs that earlier rules derived, and the facts. It
returns a value and the reason for it, which a run shows when it starts.
"""

import dataclasses
import math

from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.autosetup.facts import Facts, Name, Number
from bapo_jax.models import decoder, experts, packing
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import cache
from bapo_jax.training import budget, build, resolve
from bapo_jax.training.config import Config

GIB = 2**30
PROMPTS = 64
PROMPTS_CPU = 8
UPDATES = 4  # minibatches of a step: the public scripts of both papers
CACHE_SHARE = 0.8  # of the memory beside weights and optimiser, for keys and values
PREFILL = 16384  # prompt tokens at once, per device
SEGMENT = 1024  # smallest number of columns of a cache segment
LR, LR_SIZE = 1e-6, 1.5e9  # of the papers, and the weights of their smallest model
LR_MOST = 1e-4  # reached at 15 M weights; nothing was measured below that size
FASTEST = 'the fastest schedule that fits memory'
LORA_FACTOR = 10  # times the full rate; Schulman et al., LoRA Without Regret, 2025


def fsdp(config: Config, facts: Facts) -> Number:
  """Derives mesh.fsdp: all devices if training state exceeds half a device's memory."""
  n = len(facts.devices)
  spec = spec_of(config, facts)
  weights, moments, _, actor = budget.whole_state(
    spec,
    budget.adapters(config, spec),
    budget.frozen_tower(config, spec),
    budget.optimiser_bytes(config.optimizer, spec),
  )
  state = weights + moments + actor
  words = f'weights, optimiser and actor, {state / GIB:.3g} GiB'
  room = f'{facts.memory / GIB:.3g} GiB of a device'
  if n > 1 and state > facts.memory / 2:
    return -1, f'{words}, divided over {n} devices: more than half of {room}'
  return 1, f'{words}, copied to each device ({n}): {room}'


def data(config: Config, facts: Facts) -> Number:
  """Derives mesh.data: all devices that mesh.fsdp does not take."""
  if config.mesh.fsdp == -1:
    return 1, 'mesh.fsdp takes all devices'
  return -1, f'rows over {len(facts.devices)} {facts.devices[0].platform}'


def compute(config: Config, facts: Facts) -> Name:
  """Derives model.compute, the type of products, from the kind of device."""
  if facts.cpu:
    return 'float32', 'bfloat16 products are no faster on a CPU'
  return 'bfloat16', 'for products; weights and log-probabilities are float32'


def prompts(config: Config, facts: Facts) -> Number:
  """Derives prompts.count, so that a batch divides over updates and devices."""
  G = config.sampler.group_size
  shards = _shards(config, facts)
  most = left(config, facts)
  wanted = min(PROMPTS_CPU if facts.cpu else PROMPTS, most)
  whole = shards // math.gcd(shards, G)  # prompts of the smallest minibatch
  unit = whole * UPDATES
  found = max(wanted // unit, 1) * unit
  if found > most:
    found = max(most // whole, 1) * whole
  where = 'a CPU' if facts.cpu else f'{shards} devices'
  return found, f'{found} x {G} responses a step on {where}; {most} problems'


def left(config: Config, facts: Facts) -> int:
  """Returns the number of training problems with prompts within the limit, at least 1.

  A run drops longer prompts, or refuses to start.
  """
  training, _ = facts.lengths(config.tokenizer.template)
  return max(sum(n <= config.prompts.max_prompt_tokens for n in training), 1)


def minibatches(config: Config, facts: Facts) -> Number:
  """Derives learner.minibatches: at most UPDATES, so that the batch divides evenly."""
  seats = config.seats
  G = config.sampler.group_size
  shards = _shards(config, facts)
  counts = range(1, UPDATES + 1)
  fitting = (n for n in counts if not seats % n and not seats // n * G % shards)
  n = max(fitting, default=1)
  return n, f'{config.seats // n} groups an update; {UPDATES} in both public scripts'


def steps(config: Config, facts: Facts) -> Number:
  """Derives steps: one pass over the problems, within 10 to 400 steps."""
  n = left(config, facts)
  count = config.prompts.count
  found = min(max(n // count, 10), 400)
  return found, f'{found * count / n:.3g} passes over {n} problems, {count} a step'


def slots(config: Config, facts: Facts) -> Number:
  """Derives sampler.max_num_seqs: as many responses as the cache has memory for."""
  mesh = mesh_of(config, facts)
  spec = spec_of(config, facts)
  T = config.row_length
  shards = sharding.row_shards(mesh)
  each = budget.slot_bytes(spec, T, mesh.shape['tensor']) + budget.DECODED * T
  # Neither slots nor micro-batches are decided yet; the state does not depend on them.
  sizes = budget.sizes_of(config, spec)._replace(slots=0, grad_accum_steps=1)
  b = budget.count(sizes, spec, Schedule(), mesh)
  room = CACHE_SHARE * (facts.memory - b.weights - b.moments - b.actor)
  wanted = -(-config.places * config.sampler.group_size // shards) * shards
  fitting = max(int(room / each), 1) * shards
  fits = shards << int(math.log2(fitting / shards))
  found = wanted if fitting >= wanted else fits
  whose = 'all responses of a step' if found == wanted else 'as many as fit'
  return found, (
    f'{whose}: {each / 2**20:.3g} MiB of cache each, {max(room, 0) / GIB:.3g} GiB '
    'beside weights and optimiser'
  )


def prefill(config: Config, facts: Facts) -> Number:
  """Derives sampler.prefill_batch_size: at most PREFILL prompt tokens per device."""
  width = config.prompts.max_prompt_tokens
  G = config.sampler.group_size
  rows = max(1, PREFILL // width) * G * _shards(config, facts)
  rows = min(config.sampler.max_num_seqs, rows)
  return rows, f'at most {PREFILL} prompt tokens per device, in prompts of {width}'


def dispatch(config: Config, facts: Facts) -> Number:
  """Derives sampler.tokens_per_dispatch from the kind of device."""
  n = 64
  reason = 'long, so that devices do not wait for the host'
  if facts.cpu:
    n = 8
    reason = 'short, so that free slots are refilled soon'
  return min(n, config.sampler.max_new_tokens), reason


def segments(config: Config, facts: Facts) -> Number:
  """Derives sampler.cache_segments from the length of a row: prompt and response."""
  if decoder.is_ragged(spec_of(config, facts)):
    return 1, 'attention reads only the live columns of each slot'
  found = min(8, max(1, config.row_length // SEGMENT))
  return found, f'rows of {config.row_length} tokens, segments of {SEGMENT} or more'


def lag(config: Config, facts: Facts) -> Number:
  """Derives sampler.done_check_lag from the kind of device."""
  if config.sampler.stop:
    return 0, 'sampler.stop is searched after each dispatch'
  return (0, 'a CPU') if facts.cpu else (1, 'an accelerator decodes during the check')


def micro_batches(config: Config, facts: Facts) -> Number:
  """Derives learner.grad_accum_steps: the fewest with which the fastest remat fits."""
  mesh = mesh_of(config, facts)
  spec = spec_of(config, facts)
  # Several micro-batches, of which the bounds may be searched together.
  sizes = budget.sizes_of(config, spec)._replace(grad_accum_steps=2)
  fastest = budget.choices(sizes, spec, mesh, facts.memory)[0].remat
  fitting = []
  n = 1
  most = config.minibatch_rows // sharding.row_shards(mesh)
  while n <= most:
    sizes = sizes._replace(grad_accum_steps=n)
    found = budget.choose_schedule(sizes, spec, mesh, facts.memory)
    needed = budget.count(sizes, spec, found, mesh).update
    if needed <= facts.memory:
      fitting.append((n, needed))
      if found.remat == fastest:  # before fewer micro-batches that recompute more
        fitting = [(n, needed)]
        break
    n *= 2
  rows = config.minibatch_rows
  room = f'{facts.memory / GIB:.3g} GiB'
  if not fitting:
    return max(most, 1), f'NOTHING FITS: a single row at a time needs more than {room}'
  n, needed = fitting[0]
  return n, f'{-(-rows // n)} rows at once: about {needed / GIB:.3g} of {room}'


def share_prompts(config: Config, facts: Facts) -> Number:
  """Derives learner.share_prompts: the responses per prompt of the shortest pass."""
  spec = spec_of(config, facts)
  if not config.learner.pack or spec.widest_window:
    reason = 'layers with windows' if config.learner.pack else 'no packing'
    return 1, f'{reason}: each response has its own prompt'
  mesh = mesh_of(config, facts)

  # A wide bin has more scores: a unit may need more than the micro-batches without it.
  def fits(unit: packing.Unit) -> bool:
    sizes = budget.sizes_of(config, spec)._replace(unit=unit)
    schedule = budget.choose_schedule(sizes, spec, mesh, facts.memory)
    return budget.count(sizes, spec, schedule, mesh).update <= facts.memory

  unit, share = packing.fastest_unit(
    spec,
    config.minibatch_rows,
    config.row_length,
    config.learner.grad_accum_steps,
    _shards(config, facts),
    group_size=config.sampler.group_size,
    response=config.sampler.max_new_tokens,
    fits=fits,
  )
  prompt = config.prompts.max_prompt_tokens
  return unit.rows, (
    f'{share:.2f} of the time of a pass in which each response of '
    f'{unit.response} has its own prompt of {prompt}'
  )


def schedule_of(config: Config, facts: Facts) -> Schedule:
  """Returns the fastest `Schedule` that fits in device memory."""
  mesh = mesh_of(config, facts)
  spec = spec_of(config, facts)
  sizes = budget.sizes_of(config, spec)
  return budget.choose_schedule(sizes, spec, mesh, facts.memory)


def attention_kernel(config: Config, facts: Facts) -> Name:
  """Derives model.attention from the kind of device and the type of products."""
  platform = facts.devices[0].platform
  spec = resolve.with_kernels(spec_of(config, facts), platform)
  return str(spec.attention), f'the fastest for {spec.compute} on {platform}'


def experts_kernel(config: Config, facts: Facts) -> Name:
  """Derives model.experts_kernel from the kind of device."""
  platform = facts.devices[0].platform
  return experts.resolve(None, platform), f'the fastest on {platform}'


def backward(config: Config, facts: Facts) -> Name:
  """Derives model.remat, what the backward pass recomputes, from `schedule_of`."""
  return schedule_of(config, facts).remat, FASTEST


def bounds_pass(config: Config, facts: Facts) -> Name:
  """Derives learner.bounds_pass from `schedule_of`."""
  return schedule_of(config, facts).bounds_pass, FASTEST


def columns(config: Config, facts: Facts) -> Name:
  """Derives model.sequence_sharding from `schedule_of`."""
  return 'on' if schedule_of(config, facts).sequence_sharding else 'off', FASTEST


def logprobs(config: Config, facts: Facts) -> Name:
  """Derives learner.recompute_logprobs from the precision of the products."""
  again = 'on' if build.recomputes(config) else 'off'
  if config.rollout.records:
    return again, 'those of rollout.records'
  return again, f'products in {config.model.compute}, loss.rule={config.loss.rule}'


def cache_folder(config: Config, facts: Facts) -> Name:
  """Derives cache: a folder of the user, if it can be written."""
  return cache.home(None), 'shared by the runs of this user'


def learning_rate(config: Config, facts: Facts) -> tuple[float, str]:
  """Derives optimizer.lr: the papers' value, raised for small models and adapters."""
  scale = min(max(1.0, LR_SIZE / facts.parameters), LR_MOST / LR)
  found = LR * scale
  words = f'{LR:g} in both papers at {LR_SIZE / 1e9:g} B and more'
  if scale > 1:
    words += f'; scaled inversely to the size below that (here {facts.size})'
  if config.lora.rank:
    found *= LORA_FACTOR
    words += f'; {LORA_FACTOR} times that for LoRA (LoRA Without Regret, 2025)'
  return float(f'{found:.1e}'), words


def mesh_of(config: Config, facts: Facts) -> Mesh:
  """Returns the mesh of the config."""
  return sharding.make(**config.mesh.model_dump(), devices=facts.devices)


def _shards(config: Config, facts: Facts):
  return sharding.row_shards(mesh_of(config, facts))


def spec_of(config: Config, facts: Facts) -> ModelSpec:
  """Returns the model's spec with the config's dtypes and attention kernel."""
  return dataclasses.replace(facts.spec, **config.model.types)
