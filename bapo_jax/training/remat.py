"""What the backward pass keeps of the forward pass, counted by hand, and what fits.

1. `saved_bytes` counts the bytes per token of each kind of `model.remat`;
2. `needs` adds up the memory of an update on one device, `limit` says what there is;
3. `resolve` takes what computes least again among that which fits: in the backward
   pass, and before it for the bounds of several micro-batches.
"""

import dataclasses
import itertools

from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import attention, lora, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import machine
from bapo_jax.training import memory
from bapo_jax.training.config import Config

BOUNDS = {'stored': 'no forward pass of their own', 'again': 'one forward pass more'}
KINDS = ('none', 'dots', 'full')  # what is computed again: nothing to everything
BLOCK = 4096  # rows of the head projected at once, as in logprobs.token_stats
# The rest is for the allocator's gaps; a host's also for verifiers and other programs.
DEVICE_SHARE, HOST_SHARE = 0.9, 0.6


def numbers(dtype: str) -> int:
  """Bytes of a number."""
  return 2 if dtype in ('bfloat16', 'float16') else 4


def saved_bytes(
  spec: ModelSpec, schedule: Schedule, length: int, tensor: int = 1
) -> float:
  """Bytes per token that one layer's forward pass leaves for the backward pass.

  With c bytes per number of a product, and D, F, H, K, C as in transformer.describe:

    full  the residual stream                              c D
    dots  that and the products q, k, v, o, gate, up       c (2 D + (H + 2K) C + 2F)
          splash: what was attended and its divisors       c H C + 4 H
    none  two norms: input and quotient, float32; output   16 D + 2 c D
          q, k, v, attended                                c (2H + 2K) C
          with qk_norm: its inputs and quotients, float32  8 (H + K) C
          gate, up, sigmoid, silu and what they multiply   6 c F
          plain: exponentials of the live scores (L of T   4 H L, bfloat16 6 H L
          a query), their sums, and of the values;         12 H + 4 H C
          of n blocks, keys and values up to their ends    about c (n - 1) K C
          another kernel's sum of exponentials, float32    4 H

  Heads and F are divided by `tensor`; D as well with schedule.sequence_sharding.

  Args:
    length: T, which the plain kernel's scores grow with.
    tensor: devices along the mesh axis tensor.
  """
  kind, c = schedule.remat, numbers(spec.compute)
  D = spec.width / (tensor if schedule.sequence_sharding else 1)
  F, H = spec.ffn / tensor, spec.heads / tensor
  K, C = spec.kv_heads / (1 if spec.kv_heads % tensor else tensor), spec.head_width
  if kind == 'full':
    return c * D
  if kind == 'dots':
    attended = (c * C + 4) * H if spec.attention == 'splash' else 0
    return c * (2 * D + (H + 2 * K) * C + 2 * F) + attended
  norms = (16 + 2 * c) * D + spec.qk_norm * 8 * (H + K) * C
  scores, blocks = 4 * H, 1.0
  if spec.attention == 'plain':
    live, blocks = _blocks(length)
    scores = (4 if c == 4 else 6) * H * live + (12 + 4 * C) * H
  return norms + c * (2 * H + 2 * K * blocks) * C + 6 * c * F + scores


def _blocks(length: int) -> tuple[float, float]:
  """Of `attention.blockwise`: (keys that a query meets, on average; keys of all blocks
  of a row, a column of which several hold, over its columns)."""
  size = attention.query_block(length)
  ends = [min(start + size, length) for start in range(0, length, size)]
  sizes = [b - a for a, b in itertools.pairwise([0, *ends])]
  live = sum(n * end for n, end in zip(sizes, ends, strict=True))
  return live / length, sum(ends) / length


def adapters(config: Config, spec: ModelSpec) -> int:
  """Numbers of the adapters that are trained; 0 where all weights are."""
  if not config.lora.rank:
    return 0
  return lora.count(spec, config.lora.rank, config.lora.targets)


def frozen_tower(config: Config, spec: ModelSpec) -> int:
  """Numbers of a vision tower that is not trained."""
  return 0 if config.model.train_tower else transformer.count(spec, 'vision/')


def trained(config: Config, spec: ModelSpec) -> int:
  """Numbers that are trained: adapters, or all weights but a tower that is not."""
  return adapters(config, spec) or transformer.count(spec) - frozen_tower(config, spec)


def held_bytes(spec: ModelSpec, adapters: int, tower: int = 0) -> tuple[float, float]:
  """Bytes of (weights, what training adds): moments, gradients and their sums.

  Two moments of 4 bytes, a gradient and its sum of 4, a float32 copy of weights below
  it; adapters are float32 themselves, 20 bytes per number.

  Args:
    adapters, tower: numbers of adapters, and of a tower that is not trained.
  """
  weights, copy = transformer.count(spec), spec.dtype != 'float32'
  own, trained = numbers(spec.dtype) * weights, weights - tower
  return (own, 20 * adapters) if adapters else (own, (16 + 4 * copy) * trained)


def needs(config: Config, spec: ModelSpec, schedule: Schedule, mesh: Mesh) -> float:
  """Bytes of an update on one device, counted by hand; a compiler knows better.

  `held_bytes` over fsdp and tensor; an actor that is not freed, one layer's and the
  head's gathered weights and their gradients over tensor; per token of a micro-batch
  (of all where bounds_pass is 'stored') what all layers keep and the hidden states
  with their gradients; per token of one, a layer's own backward pass (all it computes,
  the gradient of that, and the queries' gradients by block of keys); three blocks of
  logits. Within 17 % of twelve compiled TPU programs of texts; of a vision tower the
  weights are counted alone.
  """
  if spec.attention == 'auto':
    platform = mesh.devices.flat[0].platform
    kernel = attention.resolve('auto', platform, spec.compute)
    spec = dataclasses.replace(spec, attention=kernel)
  tensor, T = mesh.shape['tensor'], config.row_length
  split, c = mesh.shape['fsdp'] * tensor, numbers(spec.compute)
  rows = config.micro_batch_rows
  if not config.model.path:
    rows = max(rows, config.sft.batch)
  rows = rows if rows % sharding.row_shards(mesh) else rows // sharding.row_shards(mesh)
  weights, few = transformer.count(spec), adapters(config, spec)
  state = sum(held_bytes(spec, few, frozen_tower(config, spec))) / split
  head = spec.vocab * spec.width
  tower = transformer.count(spec, 'vision/')
  layer = (weights - tower - head * (2 - spec.tied)) / spec.layers
  own = 0 if few else 4  # bytes of the gradient of a gathered weight
  gathered = (2 * c + own) * layer / tensor + (c + own) * head / tensor
  casts = c * layer * spec.layers / tensor
  casts *= schedule.remat == 'none' and spec.compute != spec.dtype
  at_once = config.learner.grad_accum_steps if schedule.bounds_pass == 'stored' else 1
  held = spec.layers * saved_bytes(spec, schedule, T, tensor) + (c + 4) * spec.width
  inside = saved_bytes(spec, schedule._replace(remat='none'), T, tensor)
  per_token = held * at_once + 2 * inside
  if spec.attention == 'splash':
    # Its fused backward pass writes the queries' gradients once per block of keys.
    wide = T + -T % attention.LANES
    blocks = wide / attention.key_block(wide)
    per_token += blocks * c * spec.heads * spec.head_width / tensor
  logits = 3 * 4 * min(config.logprobs.chunk, rows * T) * min(BLOCK, spec.vocab)
  lags = config.rollout.weight_sync_interval > 1
  actor = lags * c * weights / tensor
  return state + actor + gathered + casts * at_once + rows * T * per_token + logits


def checkpoint_sizes(config: Config, spec: ModelSpec) -> dict[str, float]:
  """Bytes of what a checkpoint holds, by hand; unfinished responses come besides.

  The actor is counted where some checkpoints hold one.
  """
  few, number = adapters(config, spec), numbers
  count, own = trained(config, spec), 4 if few else number(spec.dtype)
  lags = config.rollout.weight_sync_interval > 1
  rows = 2 * config.buffer.capacity * config.sampler.group_size
  found = {
    'adapters' if few else 'weights': own * count,
    'optimiser': (8 + 4 * (own < 4)) * count,
    'actor': lags * (4 if few else number(spec.compute)) * count,
    'buffer': config.batch.uses_buffer * rows * config.row_length * memory.RECORDED,
  }
  return {name: float(size) for name, size in found.items() if size}


def choices(config: Config, mesh: Mesh) -> list[Schedule]:
  """What auto chooses from: the least computed again first.

  A CPU writes what the backward pass would read more slowly than it computes all but
  products again. Forward passes computed again, `remat` and 'again' for bounds: dots
  about 0.2, full 1, again 1. Each comes with whole columns first, where sequence
  sharding is auto as well: split ones send more bytes over links.
  """
  c, cpu = config, mesh.devices.flat[0].platform == 'cpu'
  remats = (KINDS[1:] if cpu else KINDS) if c.model.remat == 'auto' else [c.model.remat]
  passes = ('stored', 'again') if bounds_wait(c) else ('again',)
  if c.learner.bounds_pass != 'auto':
    passes = (c.learner.bounds_pass,)
  again = {'none': 0.0, 'dots': 0.2, 'full': 1.0, 'stored': 0.0, 'again': 1.0}
  both = sorted(
    itertools.product(remats, passes), key=lambda x: again[x[0]] + again[x[1]]
  )
  auto = (False, True) if mesh.shape['tensor'] > 1 else (False,)
  shards = {'on': (True,), 'off': (False,), 'auto': auto}[c.model.sequence_sharding]
  return [
    Schedule(kind, split, bounds_pass)
    for (kind, bounds_pass), split in itertools.product(both, shards)
  ]


def bounds_wait(config: Config) -> bool:
  """Whether the bounds of several micro-batches wait for all their ratios."""
  learner, constant = config.learner, config.clip.rule in ('fixed', 'unclipped')
  several = learner.grad_accum_steps > 1 and learner.bounds_scope == 'minibatch'
  return several and not constant


def limit(mesh: Mesh) -> float:
  """Bytes of memory that a device of the mesh may use."""
  device = mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'bytes_limit' in stats:
    return DEVICE_SHARE * stats['bytes_limit']
  return HOST_SHARE * machine.host_memory() / len(mesh.local_devices)


def resolve(
  config: Config, spec: ModelSpec, mesh: Mesh, memory: float = 0.0
) -> Schedule:
  """Chooses what an update computes again and how it is sharded.

  Each stays what its knob says; where that is auto, the first of `choices` that fits,
  or the last.

  Args:
    memory: bytes that a device may use; 0: `limit` of the mesh.
  """
  memory, options = memory or limit(mesh), choices(config, mesh)
  fitting = (x for x in options if needs(config, spec, x, mesh) <= memory)
  return next(fitting, options[-1])


def sentence(
  config: Config, spec: ModelSpec, schedule: Schedule, mesh: Mesh, memory: float = 0.0
) -> str:
  """What was decided, for the first screen.

  Args:
    schedule, memory: of `resolve`.
  """
  again = {'none': 'nothing', 'dots': 'all but products', 'full': 'all layers'}
  room = (memory or limit(mesh)) / 2**30
  needed = needs(config, spec, schedule, mesh) / 2**30
  columns = ', columns split over tensor' if schedule.sequence_sharding else ''
  bounds = ''
  if bounds_wait(config):
    bounds = f', the bounds {BOUNDS[schedule.bounds_pass]}'
  auto = ' (auto)' if config.model.remat == 'auto' else ''
  return (
    f'remat {schedule.remat}{auto}: the backward pass computes '
    f'{again[schedule.remat]} again{bounds}{columns}; about {needed:.3g} of '
    f'{room:.3g} GiB per device'
  )
