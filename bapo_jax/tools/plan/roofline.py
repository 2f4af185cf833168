"""Computes lower bounds on the time of a step from hand-counted FLOPs and bytes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bapo_jax.models import attention, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training.budget import itemsize

MeshShape = Mapping[str, int]  # devices along data, fsdp, tensor


class Chip(NamedTuple):
  """One device as JAX counts devices, which may be half of a chip."""

  hbm: float  # GiB that a program may use, by the compiler's count
  flops: float  # bfloat16, per second
  memory: float  # bytes per second
  links: float  # bytes per second into the device from all its neighbours
  options: Mapping[str, Any] = {}  # options of the topology


# Peaks of cloud.google.com/tpu/docs; a TPU7x chip is two devices.
CHIPS = {
  'v4': Chip(30.75, 275e12, 1.228e12, 300e9, {'chip_config_name': 'megacore'}),
  'v5e': Chip(15.75, 197e12, 0.819e12, 200e9),
  'v5p': Chip(95.74, 459e12, 2.765e12, 600e9),
  'v6e': Chip(31.25, 918e12, 1.638e12, 400e9),
  'tpu7x': Chip(94.75, 1153.5e12, 3.69e12, 300e9),
}


class Cost(NamedTuple):
  """Work of a program, or of one of its steps, on one device: FLOPs and bytes moved."""

  model_flops: float  # of the model, without rematerialisation
  flops: float  # of the program
  bytes: float  # to and from memory

  def seconds(self, chip: Chip, linked: float) -> dict[str, float]:
    """Returns lower bounds on the seconds that products, memory and links take.

    `linked` is the bytes that the device receives from collectives inside loops.
    """
    return {
      'products': self.flops / chip.flops,
      'memory': self.bytes / chip.memory,
      'links': linked / chip.links,
    }


class Products(NamedTuple):
  """FLOPs of one token's forward pass."""

  layers: float
  attention: float
  head: float

  all = property(sum, doc='FLOPs of the whole pass.')


def matrices(spec: ModelSpec) -> int:
  """Returns the number of weights in the matrix products of the layers."""
  H, K, C = spec.heads, spec.kv_heads, spec.head_width
  return spec.layers * spec.width * (2 * H * C + 2 * K * C + 3 * spec.ffn)


def forward(spec: ModelSpec, context: float) -> Products:
  """Counts the FLOPs of a token that attends to `context` tokens.

  These are 2 per weight, and 4 x heads x head width per layer and attended token.
  """
  return Products(
    layers=2 * matrices(spec),
    attention=4 * spec.heads * spec.head_width * context * spec.layers,
    head=2 * spec.vocab * spec.width,
  )


def activations(spec: ModelSpec, tensor: int) -> float:
  """Counts the bytes per token that matrix products read and write in device memory.

  Counts the activations of one forward pass on one device, without the weights.
  `tensor` is the number of devices that share the heads and the feed-forward width.
  """
  half = spec.heads * spec.head_width + spec.kv_heads * spec.head_width
  split = (2 * half + 4 * spec.ffn) / tensor
  return itemsize(spec.compute) * spec.layers * (6 * spec.width + split)


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
  devices, tokens = math.prod(shape.values()), rows * length
  once, trained = forward(spec, length / 2), adapters or transformer.count(spec)
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


def train_links(
  spec: ModelSpec, schedule: Schedule, shape: MeshShape, rows: int, length: int, n: int
) -> float:
  """Counts the minimum bytes that a device receives in an update of n micro-batches.

  Per micro-batch the weights are gathered over mesh axis fsdp for each forward pass and
  for the backward pass; gradients are scattered over fsdp, and summed in float32 over
  axis data. Each pass sums the hidden states over axis tensor twice per layer.
  """
  data, fsdp, tensor = shape['data'], shape['fsdp'], shape['tensor']
  several, c = n > 1, itemsize(spec.compute)
  weights = transformer.count(spec) / tensor
  gathered = c * weights * (1 - 1 / fsdp) * (3 + several)
  summed = 2 * 4 * weights / fsdp * (1 - 1 / data)
  passes = 2 + several + (schedule.remat == 'full')
  hidden = hidden_sums(spec, tensor, rows * length / (data * fsdp))
  return n * (gathered + summed) + passes * hidden


def hidden_sums(spec: ModelSpec, tensor: int, tokens: float) -> float:
  """Counts the minimum bytes that a device receives in a pass over `tokens` tokens.

  Each layer sums its hidden states over `tensor` devices twice; a sum is sent twice.
  """
  numbers = spec.width * spec.layers * tokens
  return 4 * itemsize(spec.compute) * numbers * (1 - 1 / tensor)


def score(spec: ModelSpec, shape: MeshShape, rows: int, length: int) -> Cost:
  """Counts the cost of the log-probabilities of `rows` rows of `length` tokens."""
  tensor, local = shape['tensor'], rows * length / math.prod(shape.values())
  flops = forward(spec, length / 2).all * local
  moved = 2 * itemsize(spec.compute) * transformer.count(spec) / tensor
  return Cost(flops, flops, moved + local * tensor * activations(spec, tensor))


def prefill(spec: ModelSpec, shape: MeshShape, rows: int, length: int) -> Cost:
  """Counts the cost of prefilling `rows` prompts of `length` tokens, without logits."""
  tensor, local = shape['tensor'], rows * length / math.prod(shape.values())
  once = forward(spec, length / 2)
  flops = (once.layers + once.attention) * local
  moved = itemsize(spec.compute) * matrices(spec) / tensor
  return Cost(flops, flops, moved + local * tensor * activations(spec, tensor))


def tower(spec: ModelSpec, shape: MeshShape, rows: int, patches: int) -> Cost:
  """Counts the cost of the vision tower on `rows` pictures of `patches` patches.

  A patch attends to its window, or in some layers to its picture; the merger joins four
  patches. Only the weights, read once, are counted as moved.
  """
  v = spec.vision
  assert v is not None, 'only called for vision models'
  devices, D, merged = math.prod(shape.values()), v.width, v.merge**2
  full = len(v.full_layers)
  seen = full * patches + (v.layers - full) * min(v.window_patches, patches)
  per_patch = v.numbers * D + v.layers * (4 * D**2 + 3 * D * v.ffn) + 2 * seen * D
  per_patch += merged * D**2 + D * v.out
  flops = 2 * per_patch * rows * patches / devices
  moved = itemsize(spec.compute) * transformer.count(spec, 'vision/') / shape['tensor']
  return Cost(flops, flops, moved)


def decode(
  spec: ModelSpec, shape: MeshShape, slots: int, length: int, cache: float
) -> Cost:
  """Counts the cost of decoding one token in each of `slots` slots.

  Each token attends to `length` tokens. The weights and the cache, `cache` bytes per
  device, are read once.
  """
  flops = forward(spec, length).all * slots / math.prod(shape.values())
  weights = matrices(spec) + spec.vocab * spec.width
  return Cost(flops, flops, itemsize(spec.compute) * weights / shape['tensor'] + cache)
