"""Estimates the memory and disk of a run from formulas, before anything is compiled.

For text models, the estimate of an update is within 17 % of what XLA reports for twelve
TPU programs. On GPUs it was up to 44 % too high where activations are most of the
memory, as for adapters with rows of 33k tokens, and 22 % too low for one row of 3k per
micro-batch and all weights of a 1.5B (docs/system/scaling.md). For a 30B with experts
it was from 21 % too low to 58 % too high (docs/system/experts.md). Of a vision tower,
only weights are counted. On a host, Python and compiled programs take about half a GiB
more. --mode=plan compiles instead.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.learner.optimizer import OptimizerRule
from bapo_jax.models import (
  attention,
  experts,
  logprob_tiles,
  lora,
  packing,
  transformer,
)
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import machine
from bapo_jax.training import inputs
from bapo_jax.training.config import Config

GIB = 2**30
REMATS = ('none', 'dots', 'full')  # values of model.remat; later ones recompute more
RECOMPUTED = {'none': 'nothing', 'dots': 'all but products', 'full': 'all layers'}
BOUNDS = {'stored': 'no extra forward pass', 'again': 'one extra forward pass'}
DECODED = 12  # bytes per token of a decode slot: token, log-probability, version
RECORDED = 13  # bytes per token of Groups: as DECODED, and the response mask
# The remaining memory is for fragmentation and, on a host, for other programs.
DEVICE_SHARE, HOST_SHARE = 0.9, 0.6
# Tiles of logits: MiB on a CPU; elsewhere a share of the memory, or MiB if it is short.
TILE_CPU, TILE_SHARE, TILE_SHORT = 4, 0.02, 64
# Constants of `overhead`, fitted to layers of a 0.5B on an H100
# (docs/notes/performance.md, "One H100"): the share of a forward pass that 'dots'
# recomputes, and the FLOPs of products in the time of writing and reading a saved byte.
# TPUs: from the roofline of a v5p. CPUs: 0, because only 'none' saves too much there,
# see `choices`.
DOTS = 0.3
FLOPS_PER_BYTE = {'cpu': 0, 'tpu': 330, 'gpu': 620}
SLACK = 1.2  # an estimate above SLACK times the memory is too large despite its error


class Budget(NamedTuple):
  """Bytes per device of one run; `checkpoint` and `disk` are bytes on the disk."""

  weights: float  # in model.dtype, frozen ones and a teacher's included
  moments: float  # of the optimiser, and a float32 copy of narrower weights
  gradients: float  # one per trained number, and the sum over micro-batches
  actor: float  # the copy of the weights that decodes
  kept_actor: float  # part of `actor` that stays during an update
  gathered: float  # weights of one layer and the head during an update, and casts
  saved: float  # activations of an update, for its backward pass
  cache: float  # keys, values and recorded routes of all decode slots
  responses: float  # recorded tokens of the responses of a step or an evaluation
  sampling: float  # all bytes of a device that only samples; 0 without such devices
  buffer: float  # recorded tokens of the replay buffer
  checkpoint: dict[str, float]  # by content; with the actor if it may be older
  disk: float  # all checkpoints at once, including the one being written

  @property
  def update(self) -> float:
    """Bytes of an optimiser update, without the replay buffer."""
    state = self.weights + self.moments + self.gradients
    return state + self.kept_actor + self.gathered + self.saved


# Parts of the memory with the knobs that determine their size, for the error message.
KNOBS = {
  'weights': 'weights and optimiser state (model.*, teacher.path, mesh.fsdp)',
  'actor': 'the decoding copy of the weights (sampler.actor_dtype, mesh.tensor)',
  'gathered': 'the weights of a layer and the head (model.*, mesh.tensor)',
  'saved': 'a micro-batch (learner.minibatches, learner.grad_accum_steps, sft.batch)',
  'cache': 'the KV cache of the decode slots (sampler.max_num_seqs)',
  'responses': 'responses (prompts.count x sampler.group_size, evaluate.group_size)',
  'buffer': 'the replay buffer (buffer.capacity x sampler.group_size)',
  'sampling': 'a device that only samples (sampler.max_num_seqs, rollout.depth)',
}


class Sizes(NamedTuple):
  """The numbers of a run, beside those of its model, from which its memory follows."""

  row_length: int  # T: tokens of prompt and response
  group_size: int
  count: int  # prompts of a step
  seats: int  # groups of a batch
  places: int  # groups submitted and not yet trained on
  minibatch_rows: int
  grad_accum_steps: int
  unit: packing.Unit  # rows of a group that share a prompt
  slots: int  # of decoding
  depth: int
  lags: bool  # whether an actor stays for several steps
  capacity: int  # groups in the replay buffer; 0 without a buffer
  adapters: int  # trained numbers of adapters; 0 without adapters
  frozen: int  # weights of a vision tower that is not trained
  copied: bool  # whether the first weights stay, beside those that are trained
  teacher: ModelSpec | None
  optimiser: float  # bytes of the optimiser's state per trained number
  kept: int  # checkpoints, including the one being written
  searched: bool  # whether bounds of a minibatch are searched
  remat: str | None  # of the user; None: any
  bounds_pass: str | None  # the same
  sequence_sharding: str | None  # the same
  tile_mib: int  # the same; 0: any

  @property
  def bounds_wait(self) -> bool:
    """Whether one bound search needs the ratios of several micro-batches."""
    return self.searched and self.grad_accum_steps > 1


def sizes_of(config: Config, spec: ModelSpec) -> Sizes:
  """Returns the sizes of a run; a knob of None stays None."""
  c = config
  learner = c.learner
  return Sizes(
    row_length=c.row_length,
    group_size=c.sampler.group_size,
    count=c.prompts.count,
    seats=c.seats,
    places=c.places,
    minibatch_rows=c.minibatch_rows,
    grad_accum_steps=learner.grad_accum_steps,
    unit=packing.Unit(learner.share_prompts or 1, c.sampler.max_new_tokens or 0),
    slots=c.sampler.max_num_seqs,
    depth=c.rollout.depth,
    lags=c.rollout.weight_sync_interval > 1,
    capacity=c.batch.uses_buffer * c.buffer.capacity,
    adapters=adapters(c, spec),
    frozen=frozen_tower(c, spec),
    copied=c.loss.reference > 0 and not c.lora.rank,
    teacher=inputs.teacher_spec(c),
    optimiser=optimiser_bytes(c.optimizer, spec),
    kept=c.checkpoint.keep + c.checkpoint.best + 1,
    searched=c.clip.whole_minibatch and learner.bounds_scope == 'minibatch',
    remat=c.model.remat,
    bounds_pass=learner.bounds_pass,
    sequence_sharding=c.model.sequence_sharding,
    tile_mib=c.logprobs.tile_mib,
  )


def count(
  sizes: Sizes,
  spec: ModelSpec,
  schedule: Schedule,
  mesh: Mesh,
  rollout_mesh: Mesh | None = None,
) -> Budget:
  """Counts the bytes that a run needs: memory per device, and disk for checkpoints.

  Weights, moments and gradients are divided over the mesh axes fsdp and tensor, the
  actor over tensor, rows over data and fsdp. Reads only the mesh's shape and platform.
  `rollout_mesh` has the devices that only sample, if any.
  """
  tensor = mesh.shape['tensor']
  shards = sharding.row_shards(mesh)
  split = mesh.shape['fsdp'] * tensor
  weights, moments, gradients, actor = whole_state(
    spec, sizes.adapters, sizes.frozen, sizes.optimiser
  )
  group = sizes.group_size * sizes.row_length  # tokens
  # Bytes per token, of all devices and of one.
  recorded = RECORDED + route_bytes(spec)
  recorded_here = RECORDED + route_bytes(spec, tensor)
  buffered = sizes.capacity * group
  # Without unfinished responses, but with groups in flight.
  stored = _checkpoint(sizes, spec, moments, actor)
  stored['buffer'] = recorded * buffered
  stored['groups in flight'] = recorded * sizes.depth * sizes.count * group
  stored = {name: float(size) for name, size in stored.items() if size}
  cache = sizes.slots * slot_bytes(spec, sizes.row_length, tensor)
  submitted = recorded_here * sizes.places * group
  sampling = 0.0
  if rollout_mesh is not None:
    # A queued submission keeps its weights; the learner's own actor only evaluates.
    ahead = sizes.depth + 1
    rows_each = (cache + ahead * submitted) / sharding.row_shards(rollout_mesh)
    sampling = ahead * actor / tensor + rows_each
  gathered, saved = _passes(sizes, spec, schedule, mesh)
  if teacher := sizes.teacher:  # its pass keeps less than an update
    scoring = _passes(sizes, teacher, schedule._replace(remat='full'), mesh)
    gathered = max(gathered, scoring[0])
    saved = max(saved, scoring[1])
  responses = max(sizes.places, sizes.seats) * group
  return Budget(
    weights=(weights + teacher_bytes(sizes, spec)) / split,
    moments=moments / split,
    gradients=gradients / split,
    actor=actor / tensor,
    kept_actor=sizes.lags * actor / tensor,
    gathered=gathered,
    saved=saved,
    cache=cache / shards,
    sampling=sampling,
    responses=recorded_here * responses / shards,
    buffer=recorded_here * buffered / (1 if sizes.capacity % shards else shards),
    checkpoint=stored,
    disk=sizes.kept * sum(stored.values()),
  )


def _checkpoint(
  sizes: Sizes, spec: ModelSpec, moments: float, actor: float
) -> dict[str, float]:
  """Returns the bytes of the state in a checkpoint, without frozen weights."""
  n = trained(spec, sizes.adapters, sizes.frozen)
  size = 4 * n
  if sizes.adapters:  # which `moments` contain
    return {'adapters': size, 'optimiser': moments - size, 'actor': sizes.lags * size}
  actor -= itemsize(spec.compute) * sizes.frozen
  size = itemsize(spec.dtype) * n
  return {'weights': size, 'optimiser': moments, 'actor': sizes.lags * actor}


def optimiser_bytes(k: OptimizerRule, spec: ModelSpec) -> float:
  """Returns the bytes of an optimiser's state per weight: 8 of AdamW, its two moments.

  Counted on all weights of the model, also if only adapters are trained.
  """
  weights = jax.tree.map(
    lambda x: x.update(dtype='float32'), transformer.abstract(spec)
  )
  state = jax.tree.leaves(jax.eval_shape(k(1.0).init, weights))
  size = sum(x.size * x.dtype.itemsize for x in state if x.ndim)
  return size / transformer.count(spec)


def whole_state(
  spec: ModelSpec, adapters: int, frozen: int, optimiser: float
) -> tuple[float, float, float, float]:
  """Returns the bytes of (weights, moments, gradients, actor) on a mesh of 1 device."""
  n = trained(spec, adapters, frozen)
  # The 4 bytes of an adapter weight count as moments, like a copy of narrow weights.
  copy = 4 * (adapters > 0 or spec.dtype != 'float32')
  weights = itemsize(spec.dtype) * transformer.count(spec)
  return weights, (optimiser + copy) * n, 8 * n, actor_bytes(spec)


def teacher_bytes(sizes: Sizes, spec: ModelSpec) -> int:
  """Counts the frozen weights that the loss refers to, beside those of the policy."""
  if teacher := sizes.teacher:
    return itemsize(teacher.dtype) * transformer.count(teacher)
  trained_ = trained(spec, sizes.adapters, sizes.frozen)
  return sizes.copied * itemsize(spec.dtype) * trained_


def matrices(spec: ModelSpec) -> int:
  """Returns the number of weights in the matrix products of the layers, no router's."""
  H, K, C = spec.heads, spec.kv_heads, spec.head_width
  ffn = (spec.experts or 1) * spec.ffn
  return spec.layers * spec.width * (2 * H * C + 2 * K * C + 3 * ffn)


def active_matrices(spec: ModelSpec) -> int:
  """Returns the number of weights that a token is multiplied by in the layers."""
  chosen = dataclasses.replace(spec, experts=min(spec.experts, spec.active))
  return matrices(chosen) + spec.layers * spec.width * spec.experts


def matrix_bytes(spec: ModelSpec) -> int:
  """Counts the bytes of an actor's weights in `matrices`.

  A quantised weight takes 1 byte, and the scale of an output 4.
  """
  if spec.actor_dtype == 'compute':
    return itemsize(spec.compute) * matrices(spec)
  heads = spec.heads + 2 * spec.kv_heads
  outputs = heads * spec.head_width + spec.width
  outputs += (spec.experts or 1) * (spec.width + 2 * spec.ffn)
  return matrices(spec) + 4 * outputs * spec.layers


def actor_bytes(spec: ModelSpec) -> int:
  """Counts the bytes of an actor, whose layers may be quantised."""
  rest = transformer.count(spec) - matrices(spec)
  return itemsize(spec.compute) * rest + matrix_bytes(spec)


def _passes(
  sizes: Sizes, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> tuple[float, float]:
  """Returns the bytes per device of (gathered weights, activations) in one update.

  Gathered are the weights and gradients of one layer and the head, divided over tensor.
  Activations are the saved values of all layers and the hidden states with gradients
  (of one micro-batch, or with bounds_pass='stored' of all and one more); the backward
  pass of one layer, with the queries' gradients by block of keys, or three tiles of
  logits if they are larger.
  """
  tensor = mesh.shape['tensor']
  shards = sharding.row_shards(mesh)
  # Bins of one unit of rows, which are whole rows unless they share a prompt.
  unit = sizes.unit
  pieces, bins, T = packing.shape_of(
    -(-sizes.minibatch_rows // unit.rows),
    unit.cells(sizes.row_length),
    sizes.grad_accum_steps,
    shards,
  )
  rows = bins // shards
  c = itemsize(spec.compute)
  head = spec.vocab * spec.width
  tower = transformer.count(spec, 'vision/')
  layer = (transformer.count(spec) - tower - head * (2 - spec.tied)) / spec.layers
  gradient = 0 if sizes.adapters else 4  # bytes per gathered weight
  gathered = ((2 * c + gradient) * layer + (c + gradient) * head) / tensor
  pieces = pieces if schedule.bounds_pass == 'stored' else 1
  # One micro-batch is computed before its activations are copied to those of all.
  at_once = pieces + (pieces > 1)
  if schedule.remat == 'none' and spec.compute != spec.dtype:
    # Nothing is recomputed, so the casts of all layers stay for the backward pass.
    gathered += at_once * c * layer * spec.layers / tensor
  by_layer = saved_bytes(spec, schedule, T, tensor, rows)
  saved = spec.layers * by_layer + (c + 4) * spec.width
  inside = saved_bytes(spec, schedule._replace(remat='none'), T, tensor, rows)
  per_token = saved * at_once
  if spec.attention == 'splash':
    # The fused backward pass writes the queries' gradients once per block of keys.
    wide = T + -T % attention.LANES
    blocks = wide / attention.key_block(wide)
    per_token += blocks * c * spec.heads * spec.head_width / tensor
  if spec.attention == 'flash':
    # Keys and values have gradients per query head, which are summed afterwards.
    per_token += 2 * c * spec.heads * spec.head_width / tensor
  tile = logprob_tiles.largest(schedule.tile_mib, -(-spec.vocab // tensor))
  logits = 3 * 4 * min(tile.columns, rows * T) * tile.rows
  # The routes of a minibatch. The tiles of logits are gone before the backward pass of
  # the layers begins.
  recorded = sizes.minibatch_rows / shards * sizes.row_length
  routes = route_bytes(spec, tensor) * recorded
  per_token += route_bytes(spec)
  return gathered, routes + rows * T * per_token + max(2 * inside * rows * T, logits)


def itemsize(dtype: str) -> int:
  """Returns the bytes that one number of this dtype takes."""
  return 2 if dtype in ('bfloat16', 'float16') else 4


def adapters(config: Config, spec: ModelSpec) -> int:
  """Returns the number of trained adapter weights; 0 without adapters."""
  return lora.count(spec, config.lora.rank, config.lora.targets)


def frozen_tower(config: Config, spec: ModelSpec) -> int:
  """Returns the number of weights of a vision tower that is not trained."""
  return 0 if config.model.train_tower else transformer.count(spec, 'vision/')


def trained(spec: ModelSpec, adapters: int, frozen: int) -> int:
  """Returns the number of trained weights."""
  return adapters or transformer.count(spec) - frozen


def cache_bytes(spec: ModelSpec, length: int, tensor: int) -> float:
  """Returns the bytes per device of the KV cache of a slot of `length` tokens.

  The heads are divided over `tensor` devices if that leaves no remainder.
  """
  heads = spec.kv_heads / (1 if spec.kv_heads % tensor else tensor)
  return 2 * spec.layers * heads * spec.head_width * itemsize(spec.compute) * length


def slot_bytes(spec: ModelSpec, length: int, tensor: int) -> float:
  """Returns the bytes per device of a slot's cache and recorded routes."""
  return cache_bytes(spec, length, tensor) + route_bytes(spec, tensor) * length


def route_bytes(spec: ModelSpec, tensor: int = 1) -> float:
  """Returns the bytes per token and device of recorded routes; 0 without any.

  The numbers are divided over `tensor` devices if that leaves no remainder.
  """
  if spec.routes is None:
    return 0
  numbers, dtype = spec.routes
  return numbers * np.dtype(dtype).itemsize / (1 if numbers % tensor else tensor)


def saved_bytes(
  spec: ModelSpec, schedule: Schedule, length: int, tensor: int = 1, rows: int = 1
) -> float:
  """Counts the bytes per token that one layer saves for the backward pass.

  c is the bytes of a number in matrix products; D, F, H, K, C are as in types.py:

    full  the residual stream                              c D
    dots  the residual stream, q, k, v, o, gate, up        c (2 D + (H + 2K) C + 2F)
          not plain: attention's output and its divisors   c H C + 4 H
    none  two norms: input and quotient, float32; output   16 D + 2 c D
          q, k, v, attention's output                      c (2H + 2K) C
          with qk_norm: its inputs and quotients, float32  8 (H + K) C
          gate, up, sigmoid, silu and their products       6 c F
          plain: exponentials of scores (L keys a query),  4 H L, bfloat16 6 H L
          their sums, and weighted sums of the values;     12 H + 4 H C
          keys and values again for n blocks of queries    about c (n - 1) K C
          another kernel's sum of exponentials, float32    4 H

  With experts, F is replaced as in `_experts_bytes`. Heads and F are divided over
  `tensor` devices; with sequence sharding, D too. L, the mean number of keys that a
  query attends to, grows with `length`.
  """
  kind = schedule.remat
  c = itemsize(spec.compute)
  D = spec.width / (tensor if schedule.sequence_sharding else 1)
  H = spec.heads / tensor
  ffn = (2 if kind == 'dots' else 6) * c * spec.ffn / tensor
  if spec.experts:
    ffn = _experts_bytes(spec, kind, rows * length, tensor)
  K = spec.kv_heads / (1 if spec.kv_heads % tensor else tensor)
  C = spec.head_width
  if kind == 'full':
    return c * D
  if kind == 'dots':
    attended = (c * C + 4) * H if spec.attention in attention.FUSED else 0
    return c * (2 * D + (H + 2 * K) * C) + ffn + attended
  norms = (16 + 2 * c) * D + bool(spec.qk_norm) * 8 * (H + K) * C
  scores = 4 * H
  blocks = 1.0
  if spec.attention == 'plain':
    # A query sees the keys up to the end of its block: `live` keys on average, and
    # `blocks` copies of a key over all blocks, see attention.blockwise.
    size = attention.query_block(length)
    end_T = np.minimum(np.arange(length) // size * size + size, length)
    live = float(end_T.mean())
    blocks = float(np.unique(end_T).sum() / length)
    scores = (4 if c == 4 else 6) * H * live + (12 + 4 * C) * H
  return norms + c * (2 * H + 2 * K * blocks) * C + ffn + scores


def _experts_bytes(spec: ModelSpec, kind: str, tokens: int, tensor: int) -> float:
  """Counts the bytes per token that a layer of experts saves, of `tokens` tokens.

  A token has K copies, padded by the kernel 'blocks': n rows. Each of the `tensor`
  devices has room for all of them, because all might be of its experts.

    dots  gate, up; the router's product, the chosen     n 2 c F + c E + 4 K
    none  inputs, gate, up, sigmoid, silu, products      n c (D + 7 F)
          each row's copy and weight; logits, softmax    8 n + 8 E + 16 K
  """
  c = itemsize(spec.compute)
  F, E, K = spec.ffn, spec.experts, spec.active
  block = experts.block_size(tokens * K, E, spec.experts_kernel)
  n = experts.row_count(tokens * K, E // tensor, block) / tokens
  if kind == 'dots':
    return n * 2 * c * F + c * E + 4 * K
  return n * (c * (spec.width + 7 * F) + 8) + 8 * E + 16 * K


def choices(sizes: Sizes, spec: ModelSpec, mesh: Mesh, memory: float) -> list[Schedule]:
  """Lists the schedules that the knobs allow, fastest first by `overhead`.

  By itself, a CPU never has remat 'none': reading all values back is slower than
  recomputing all but the products. Among equals, sequence sharding, which sends more
  bytes, and small tiles come last. `memory` is in bytes per device.
  """
  platform = mesh.devices.flat[0].platform
  remats = REMATS[1:] if platform == 'cpu' else REMATS
  if sizes.remat is not None:
    remats = (sizes.remat,)
  passes = ('stored', 'again') if sizes.bounds_wait else ('again',)
  if sizes.bounds_pass is not None:
    passes = (sizes.bounds_pass,)
  columns = (False, True) if mesh.shape['tensor'] > 1 else (False,)
  if sizes.sequence_sharding is not None:
    columns = (sizes.sequence_sharding == 'on',)
  tiles = [sizes.tile_mib or TILE_CPU]
  if platform != 'cpu' and not sizes.tile_mib:
    tiles = sorted({int(TILE_SHARE * memory / 2**20), TILE_SHORT}, reverse=True)
  options = itertools.product(remats, columns, passes, tiles)
  return sorted(
    itertools.starmap(Schedule, options),
    key=lambda s: (overhead(spec, s, sizes.row_length, platform), s.sequence_sharding),
  )


def overhead(spec: ModelSpec, schedule: Schedule, length: int, platform: str) -> float:
  """Estimates the time that a schedule adds to an update, in its forward passes.

  A schedule recomputes layers, runs a forward pass for the bounds unless residuals are
  stored, and writes and reads the saved values: once for the layers of a micro-batch,
  and once more if micro-batches wait. Without a search over micro-batches, that forward
  pass is counted for every schedule alike.
  """
  forward = 2 * active_matrices(spec) / spec.layers
  forward += 2 * length * spec.heads * spec.head_width  # attention to half the row
  head = spec.vocab * spec.width / active_matrices(spec)
  saved = saved_bytes(spec, schedule._replace(sequence_sharding=False), length)
  stored = schedule.bounds_pass == 'stored'
  recomputed = {'none': 0.0, 'dots': DOTS, 'full': 1.0}[schedule.remat]
  recomputed += 0 if stored else 1 + head
  read_back = FLOPS_PER_BYTE.get(platform, FLOPS_PER_BYTE['gpu']) * saved / forward
  return recomputed + (1 + stored) * read_back


def choose_schedule(
  sizes: Sizes, spec: ModelSpec, mesh: Mesh, memory: float = 0.0
) -> Schedule:
  """Returns the fastest of `choices` that fits the memory; if none fits, the smallest.

  `memory` is in bytes per device; 0 stands for `limit(mesh)`.
  """
  memory = memory or limit(mesh)

  def needed(schedule: Schedule) -> float:
    return count(sizes, spec, schedule, mesh).update

  options = choices(sizes, spec, mesh, memory)
  fitting = (s for s in options if needed(s) <= memory)
  return next(fitting, None) or min(options, key=needed)


def capacity(mesh: Mesh, device_share: float = 1.0, host_share: float = 1.0) -> float:
  """Returns a share of the memory of a device of the mesh, in bytes.

  A device that reports no limit, such as a CPU, has an equal part of the host's memory.
  """
  local = mesh.local_devices or jax.local_devices()  # a process may only sample
  stats = local[0].memory_stats() or {}  # None on a CPU
  if 'bytes_limit' in stats:
    return device_share * stats['bytes_limit']
  return host_share * machine.host_memory() / len(local)


def limit(mesh: Mesh) -> float:
  """Returns the bytes that a run may use on a device of the mesh."""
  return capacity(mesh, DEVICE_SHARE, HOST_SHARE)


def check(budget: Budget, room: float) -> None:
  """Raises ValueError if a phase needs more than SLACK times `room` bytes."""
  b = budget
  state = b.weights + b.moments
  rows = {'responses': b.responses, 'buffer': b.buffer}
  decoding = {'weights': state, 'actor': b.actor, 'cache': b.cache} | rows
  update = {'weights': state + b.gradients, 'actor': b.kept_actor} | rows
  update |= {'gathered': b.gathered, 'saved': b.saved}
  sampling = {'sampling': b.sampling}
  phase = max(decoding, update, sampling, key=lambda phase: sum(phase.values()))
  total = sum(phase.values())
  if total > SLACK * room:
    raise ValueError(
      f'this config needs about {total / GIB:.3g} GiB per device, most of it for '
      f'{KNOBS[max(phase, key=phase.__getitem__)]}, but a device has only '
      f'{room / GIB:.3g} GiB; change one of these knobs'
    )


def sentence(sizes: Sizes, schedule: Schedule, needed: float, room: float) -> str:
  """Describes the schedule, the bytes of an update, and the memory of a device."""
  columns = ', columns split over tensor' if schedule.sequence_sharding else ''
  bounds = f'; bounds: {BOUNDS[schedule.bounds_pass]}' if sizes.bounds_wait else ''
  return (
    f'remat {schedule.remat}: the backward pass recomputes '
    f'{RECOMPUTED[schedule.remat]}{bounds}{columns}; about {needed / GIB:.3g} of '
    f'{room / GIB:.3g} GiB per device'
  )
