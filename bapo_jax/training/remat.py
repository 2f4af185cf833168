"""What the backward pass keeps of the forward pass, counted by hand, and what fits.

1. `saved_bytes` counts the bytes per token of each kind of `model.remat`;
2. `needs` adds up the memory of an update on one device, `limit` says what there is;
3. `resolve` takes the kind that computes least again among those that fit.
"""

import dataclasses
import itertools

from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import attention, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import machine
from bapo_jax.training.config import Config

KINDS = ('none', 'dots', 'full')  # what is computed again: nothing to everything
BLOCK = 4096  # rows of the head projected at once, as in logprobs.token_stats
# The rest is for the allocator's gaps; a host's also for verifiers and other programs.
DEVICE_SHARE, HOST_SHARE = 0.9, 0.6


def numbers(dtype: str) -> int:
  """Bytes of a number."""
  return 2 if dtype in ('bfloat16', 'float16') else 4


def saved_bytes(spec: ModelSpec, length: int, tensor: int = 1, kind: str = '') -> float:
  """Bytes per token that one layer's forward pass leaves for the backward pass.

  With c bytes per number of a product, and D, F, H, K, C as in transformer.describe:

    full  the residual stream                              c D
    dots  that and the products q, k, v, o, gate, up       c (2 D + (H + 2K) C + 2F)
    none  two norms: input and quotient, float32; output   16 D + 2 c D
          q, k, v, attended                                c (2H + 2K) C
          with qk_norm: its inputs and quotients, float32  8 (H + K) C
          gate, up, sigmoid, silu and what they multiply   6 c F
          the plain kernel's exponentials and quotients    8 H T, bfloat16 10 H T
          another kernel's sum of exponentials, float32    4 H

  Heads and F are divided by `tensor`; D as well with spec.sequence_sharding.

  Args:
    length: T, which the plain kernel's scores grow with.
    tensor: devices along the mesh axis tensor.
    kind: of KINDS; '': spec.remat.
  """
  kind, c = kind or spec.remat, numbers(spec.compute)
  D = spec.width / (tensor if spec.sequence_sharding else 1)
  F, H = spec.ffn / tensor, spec.heads / tensor
  K, C = spec.kv_heads / (1 if spec.kv_heads % tensor else tensor), spec.head_width
  if kind == 'full':
    return c * D
  if kind == 'dots':
    return c * (2 * D + (H + 2 * K) * C + 2 * F)
  norms = (16 + 2 * c) * D + spec.qk_norm * 8 * (H + K) * C
  scores = (8 if c == 4 else 10) * H * length if spec.attention == 'plain' else 4 * H
  return norms + c * (2 * H + 2 * K) * C + 6 * c * F + scores


def needs(config: Config, spec: ModelSpec, mesh: Mesh) -> float:
  """Bytes of an update on one device, counted by hand; a compiler knows better.

  Weights, moments and gradients over fsdp and tensor; the actor, one layer's and the
  head's gathered weights and their gradients over tensor; per token of a micro-batch
  what all layers keep, one layer's own backward pass (all it computes, the gradient of
  that, and the queries' gradients by block of keys) and the hidden states with theirs;
  three blocks of logits. Within 17 % of twelve compiled TPU programs.
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
  weights, copy = transformer.count(spec), spec.dtype != 'float32'
  state = weights * (numbers(spec.dtype) + 8 + 4 * copy + 8) / split
  head = spec.vocab * spec.width
  layer = (weights - head * (2 - spec.tied)) / spec.layers
  gathered = (2 * c + 4) * layer / tensor + (c + 4) * head / tensor
  casts = c * layer * spec.layers / tensor
  casts *= spec.remat == 'none' and spec.compute != spec.dtype
  per_token = spec.layers * saved_bytes(spec, T, tensor) + 2 * saved_bytes(
    spec, T, tensor, 'none'
  )
  per_token += (c + 4) * spec.width
  if spec.attention == 'splash':
    # Its fused backward pass writes the queries' gradients once per block of keys.
    wide = T + -T % attention.LANES
    blocks = wide / attention.key_block(wide)
    per_token += blocks * c * spec.heads * spec.head_width / tensor
  logits = 3 * 4 * min(config.logprobs.chunk, rows * T) * min(BLOCK, spec.vocab)
  actor = c * weights / tensor
  return state + actor + gathered + casts + rows * T * per_token + logits


def kinds(platform: str) -> tuple[str, ...]:
  """What auto chooses from, least computed again first.

  A CPU writes what the backward pass would read more slowly than it computes all but
  products again.
  """
  return KINDS[1:] if platform == 'cpu' else KINDS


def limit(mesh: Mesh) -> float:
  """Bytes of memory that a device of the mesh may use."""
  device = mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'bytes_limit' in stats:
    return DEVICE_SHARE * stats['bytes_limit']
  return HOST_SHARE * machine.host_memory() / len(mesh.local_devices)


def resolve(
  config: Config, spec: ModelSpec, mesh: Mesh, memory: float = 0.0
) -> ModelSpec:
  """The spec with `model.remat` and `model.sequence_sharding` decided.

  Each stays what its knob says; where that is auto, the first of these that fits:
  little computed again before few collectives, whose bytes sequence sharding adds to.

  Args:
    memory: bytes that a device may use; 0: `limit` of the mesh.
  """
  auto, tensor = config.model.remat == 'auto', mesh.shape['tensor']
  able = kinds(mesh.devices.flat[0].platform)
  remats = able if auto else (config.model.remat,)
  shards = {'on': (True,), 'off': (False,), 'auto': (False, True)[: 1 + (tensor > 1)]}
  memory, found = memory or limit(mesh), spec
  for remat, split in itertools.product(remats, shards[config.model.sequence_sharding]):
    found = dataclasses.replace(spec, remat=remat, sequence_sharding=split)
    if needs(config, found, mesh) <= memory:
      break
  return found


def sentence(config: Config, spec: ModelSpec, mesh: Mesh, memory: float = 0.0) -> str:
  """What was decided, for the first screen.

  Args:
    spec, memory: of `resolve`.
  """
  again = {'none': 'nothing', 'dots': 'all but products', 'full': 'all layers'}
  room, needed = (memory or limit(mesh)) / 2**30, needs(config, spec, mesh) / 2**30
  columns = ', columns split over tensor' if spec.sequence_sharding else ''
  auto = ' (auto)' if config.model.remat == 'auto' else ''
  return (
    f'remat {spec.remat}{auto}: the backward pass computes {again[spec.remat]} again'
    f'{columns}; about {needed:.3g} of {room:.3g} GiB per device'
  )
