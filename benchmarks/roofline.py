"""Computes lower bounds on the time of a step from hand-counted FLOPs and bytes."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from bapo_jax.models import attention, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan.chips import Chip
from bapo_jax.training.budget import (
  active_matrices,
  itemsize,
  keys_read,
  matrix_bytes,
  outside,
)

MeshShape = Mapping[str, int]  # devices along data, fsdp, tensor


class Cost(NamedTuple):
  """Work of a program, or of one of its steps, on one device: FLOPs and bytes moved."""

  model_flops: float  # of the model, without rematerialisation
  flops: float  # of the program
  bytes: float  # to and from memory

  def seconds(
    self, chip: Chip, linked: float, crossed: float = 0.0
  ) -> dict[str, float]:
    """Returns lower bounds on the seconds that each resource needs.

    The resources are products, memory, links between devices, and the network.

    Args:
      linked: bytes that the device receives from collectives.
      crossed: the part of these bytes that comes from other hosts.
    """
    slow = math.isfinite(chip.network)  # else these bytes take the links, too
    return {
      'products': self.flops / chip.flops,
      'memory': self.bytes / chip.memory,
      'links': max(0.0, linked - slow * crossed) / chip.links,
      'network': crossed / chip.network,
    }


class Products(NamedTuple):
  """FLOPs of one token's forward pass."""

  layers: float
  attention: float
  head: float

  all = property(sum, doc='FLOPs of the whole pass.')


def forward(spec: ModelSpec, keys: float) -> Products:
  """Counts the FLOPs of a token that attends to `keys` tokens in all layers together.

  These are 2 per weight, and 4 x heads x head width per attended token.
  """
  return Products(
    layers=2 * active_matrices(spec),
    attention=4 * spec.heads * spec.head_width * keys,
    head=2 * spec.vocab * spec.width,
  )


def activations(spec: ModelSpec, tensor: int) -> float:
  """Counts the bytes per token that matrix products read and write in device memory.

  Counts the activations of one forward pass on one device, without the weights.
  `tensor` is the number of devices that share the heads and the feed-forward width, or
  the copies of a token for its experts.
  """
  half = spec.heads * spec.head_width + spec.kv_heads * spec.head_width
  split = (2 * half + 4 * spec.active_ffn) / tensor
  copies = spec.active / tensor if spec.experts else 1
  widths = (3 + 3 * copies) * spec.width
  return itemsize(spec.compute) * spec.layers * (widths + split)


def train(
  spec: ModelSpec,
  schedule: Schedule,
  shape: MeshShape,
  rows: int,
  length: int,
  grad_accum_steps: int,
  adapters: int = 0,
) -> Cost:
  """Counts the cost of one optimiser update on `rows` rows.

  The model's FLOPs are three forward passes, or two for frozen weights, which need no
  gradient. The program also recomputes the head in chunks, with remat='full' the layers
  (only attention with 'dots', unless the kernel saves its results), and the whole pass
  if several micro-batches share their bounds and bounds_pass is 'again'.

  [rows, length] is the minibatch over all devices; `adapters` counts adapter
  parameters, 0 if all weights are trained.
  """
  devices = math.prod(shape.values())
  tokens = rows * length
  once = forward(spec, keys_read(spec, length))
  trained = adapters or transformer.count(spec)
  model = 3 * once.all
  if adapters:
    model += 6 * adapters - once.layers - once.head
  several = grad_accum_steps > 1 and schedule.bounds_pass == 'again'
  recomputed = {
    'full': once.layers + once.attention,
    'dots': 0.0 if spec.attention in attention.FUSED else once.attention,
    'none': 0.0,
  }[schedule.remat]
  recomputed += once.head + (once.all if several else 0)
  weights = itemsize(spec.compute) * transformer.count(spec) / shape['tensor']
  # Each micro-batch writes and reads the gathered weights once per pass; the backward
  # pass reads them twice.
  passes = 3 + (schedule.remat == 'full') + several
  state = 4 * trained / (shape['fsdp'] * shape['tensor'])
  local = tokens / (devices / shape['tensor'])
  moved = (
    2 * weights * passes * grad_accum_steps
    # weights and two moments read and written; gradients accumulated
    + state * (6 + 3 * grad_accum_steps)
    + local * activations(spec, shape['tensor']) * passes
  )
  share = tokens / devices
  return Cost(model * share, (model + recomputed) * share, moved)


class Traffic(NamedTuple):
  """Collectives of one kind along one axis of the mesh, counted together."""

  kind: str  # 'all-gather', 'reduce-scatter' or 'all-reduce'
  axis: str
  bytes: float  # of the whole arrays on one device: gathered, scattered or summed

  def received(self, shape: MeshShape) -> float:
    """Returns the bytes that a device receives; the bytes of a sum count twice."""
    times = 2 if self.kind == 'all-reduce' else 1
    return times * self.bytes * (1 - 1 / shape[self.axis])


def train_traffic(
  spec: ModelSpec, schedule: Schedule, shape: MeshShape, rows: int, length: int, n: int
) -> list[Traffic]:
  """Counts the minimum traffic of an update of n micro-batches.

  Per micro-batch the weights are gathered over mesh axis fsdp for each forward pass and
  for the backward pass; gradients are scattered over fsdp, and summed in float32 over
  axis data. Each pass sums the hidden states over axis tensor twice per layer.
  """
  data = shape['data']
  fsdp = shape['fsdp']
  tensor = shape['tensor']
  several = n > 1
  weights = transformer.count(spec) / tensor
  gathered = gathers(spec, shape)
  size = gathered.bytes
  passes = 2 + several + (schedule.remat == 'full')
  hidden = hidden_sums(spec, passes * rows * length / (data * fsdp))
  return [
    gathered._replace(bytes=n * (2 + several) * size),
    Traffic('reduce-scatter', 'fsdp', n * size),
    Traffic('all-reduce', 'data', n * 4 * weights / fsdp),
    hidden,
  ]


def gathers(spec: ModelSpec, shape: MeshShape) -> Traffic:
  """Counts the gathering of all weights over fsdp, once."""
  size = itemsize(spec.compute) * transformer.count(spec)
  return Traffic('all-gather', 'fsdp', size / shape['tensor'])


def hidden_sums(spec: ModelSpec, tokens: float) -> Traffic:
  """Counts the sums of hidden states of `tokens` tokens over tensor, two per layer."""
  numbers = spec.width * spec.layers * tokens
  return Traffic('all-reduce', 'tensor', 2 * itemsize(spec.compute) * numbers)


def score(
  spec: ModelSpec, shape: MeshShape, rows: int, length: int, logits: bool = True
) -> Cost:
  """Counts the cost of the log-probabilities of `rows` rows of `length` tokens.

  Without `logits`, it is the cost of prefilling such prompts.
  """
  tensor = shape['tensor']
  local = rows * length / math.prod(shape.values())
  once = forward(spec, keys_read(spec, length))
  flops = local * (once.layers + once.attention)
  weights = matrix_bytes(spec)
  if logits:
    flops += local * once.head
    weights = 2 * itemsize(spec.compute) * transformer.count(spec)
  moved = weights / tensor + local * tensor * activations(spec, tensor)
  return Cost(flops, flops, moved)


def tower(spec: ModelSpec, shape: MeshShape, rows: int, patches: int) -> Cost:
  """Counts the cost of the vision tower on `rows` pictures of `patches` patches.

  A patch attends to its window, or in some layers to its picture; the merger joins four
  patches. Only the weights, read once, are counted as moved.
  """
  v = spec.vision
  assert v is not None, 'only called for vision models'
  devices = math.prod(shape.values())
  D = v.width
  merged = v.merge**2
  full = len(v.full_layers)
  seen = full * patches + (v.layers - full) * min(v.window_patches, patches)
  per_patch = v.numbers * D + v.layers * (4 * D**2 + 3 * D * v.ffn) + 2 * seen * D
  per_patch += merged * D**2 + D * v.out
  flops = 2 * per_patch * rows * patches / devices
  moved = itemsize(spec.compute) * transformer.count(spec, 'vision/') / shape['tensor']
  return Cost(flops, flops, moved)


def columns_read(columns: int, block: int, mean: float) -> float:
  """Counts the mean columns per slot that a step of ragged decoding reads.

  Whole blocks are read, which adds half a block if the lengths are spread evenly over
  a block.

  Args:
    columns: columns of a slot's cache, a multiple of block.
    block: columns that the kernel reads at once.
    mean: mean live columns of a slot.
  """
  return min(columns, mean + (block - 1) / 2)


def decode(
  spec: ModelSpec, shape: MeshShape, slots: int, length: float, cache: float
) -> Cost:
  """Counts the cost of decoding one token in each of `slots` slots.

  Each token attends to `length` tokens, or to those in a layer's window. The weights
  and the columns inside the windows of `cache` bytes of the cache, per device, are read
  once; of the experts as many as the tokens of a device may use.
  """
  devices = math.prod(shape.values())
  inside = 1 - outside(spec, length)
  flops = forward(spec, inside * length * spec.layers).all * slots / devices
  used = -(-slots * shape['tensor'] // devices) * spec.active
  weights = matrix_bytes(dataclasses.replace(spec, experts=min(spec.experts, used)))
  weights += itemsize(spec.compute) * spec.vocab * spec.width
  return Cost(flops, flops, weights / shape['tensor'] + inside * cache)


def into_device(
  traffic: Sequence[Traffic], shape: MeshShape, process_of: Sequence[int]
) -> float:
  """Counts the bytes that traffic brings from other hosts, per device of its host.

  The count is a lower bound for any implementation of the collectives: a host receives
  only once what its devices lack. If n devices gather an array and k of them are on one
  host, the host receives (n - k) / n of the array. A scatter counts as one gather, a
  sum as two. Returns the count of the host that receives most; `process_of` is the host
  of each device in mesh order.
  """
  total: dict[int, float] = defaultdict(float)
  ids = np.arange(len(process_of)).reshape(tuple(shape.values()))
  for kind, axis, size in traffic:
    along = np.moveaxis(ids, list(shape).index(axis), -1).reshape(-1, shape[axis])
    for group in along.tolist():
      for host, k in Counter(process_of[device] for device in group).items():
        share = 1 - k / len(group)
        total[host] += (2 if kind == 'all-reduce' else 1) * share * size
  return max(total.values(), default=0.0) / max(Counter(process_of).values())


def bounds(
  cost: Cost,
  chip: Chip,
  mesh: Mesh,
  traffic: Sequence[Traffic],
  linked: float | None = None,
) -> dict[str, float]:
  """Returns lower bounds on the seconds per resource, with the traffic of the mesh.

  `linked` is the number of bytes that a device receives; by default that of `traffic`.
  """
  shape = dict(mesh.shape)
  if linked is None:
    linked = sum(t.received(shape) for t in traffic)
  process_of = [device.process_index for device in mesh.devices.flat]
  return cost.seconds(chip, linked, into_device(traffic, shape, process_of))
