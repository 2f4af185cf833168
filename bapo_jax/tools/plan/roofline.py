"""What a step must at least cost: FLOPs and bytes counted by hand, against the chip.

1. `CHIPS` says what a device of each kind can do;
2. `forward` counts one token's products; `train`, `prefill` and `decode` make programs
   of them;
3. `Cost.seconds` divides: each is a lower bound, reached only if nothing waits.
"""

import math
from typing import NamedTuple

from bapo_jax.models import transformer


class Chip(NamedTuple):
  """One device, as JAX counts them."""

  hbm: float  # GiB a program may use, as the compiler has it
  flops: float  # bfloat16, a second
  memory: float  # bytes a second
  links: float  # bytes a second into the device from all its neighbours
  options: dict = {}  # of the topology  # noqa: RUF012


# Peaks as cloud.google.com/tpu/docs gives them; a TPU7x chip is two devices.
CHIPS = {
  'v4': Chip(30.75, 275e12, 1.228e12, 300e9, {'chip_config_name': 'megacore'}),
  'v5e': Chip(15.75, 197e12, 0.819e12, 200e9),
  'v5p': Chip(95.74, 459e12, 2.765e12, 600e9),
  'v6e': Chip(31.25, 918e12, 1.638e12, 400e9),
  'tpu7x': Chip(94.75, 1153.5e12, 3.69e12, 300e9),
}


class Cost(NamedTuple):
  """Of one run of a program, on one device."""

  model_flops: float  # of the mathematics: nothing computed twice
  flops: float  # with what rematerialisation computes again
  bytes: float  # to and from memory
  linked: float  # bytes that collectives inside loops bring to the device

  def seconds(self, chip: Chip) -> dict[str, float]:
    """Bound by products, by memory, by links."""
    return {
      'products': self.flops / chip.flops,
      'memory': self.bytes / chip.memory,
      'links': self.linked / chip.links,
    }


class Products(NamedTuple):
  """FLOPs of one token's forward pass."""

  layers: float
  attention: float
  head: float

  @property
  def all(self) -> float:
    """Of the whole pass."""
    return sum(self)


def matrices(spec: transformer.ModelSpec) -> int:
  """Weights of the layers' products."""
  H, K, C = spec.heads, spec.kv_heads, spec.head_width
  return spec.layers * spec.width * (2 * H * C + 2 * K * C + 3 * spec.ffn)


def width(spec: transformer.ModelSpec) -> int:
  """Bytes of a number that products read."""
  return 2 if spec.compute in ('bfloat16', 'float16') else 4


def forward(spec: transformer.ModelSpec, context: float) -> Products:
  """FLOPs of a token that sees `context` others: 2 a weight, 4 H C a token seen."""
  return Products(
    layers=2 * matrices(spec),
    attention=4 * spec.heads * spec.head_width * context * spec.layers,
    head=2 * spec.vocab * spec.width,
  )


def activations(spec: transformer.ModelSpec, tensor: int) -> float:
  """Bytes a token of one forward pass moves: each product's operand and result once."""
  half = spec.heads * spec.head_width + spec.kv_heads * spec.head_width
  split = (2 * half + 4 * spec.ffn) / tensor
  return width(spec) * spec.layers * (6 * spec.width + split)


def train(
  spec, shape: dict, rows: int, length: int, slices: int, linked: float
) -> Cost:
  """One optimiser update on `rows` rows: 3 forward passes' worth of mathematics.

  Recomputed: the head once (chunks), the layers once with remat='full' (attention alone
  with 'dots'), and everything once more where slices ask for the bounds beforehand.
  """
  devices, tokens = math.prod(shape.values()), rows * length
  once = forward(spec, length / 2)
  again = {
    'full': once.layers + once.attention,
    'dots': once.attention,
    'none': 0.0,
  }[spec.remat]
  again += once.head + (once.all if slices > 1 else 0)
  weights = width(spec) * transformer.count(spec) / shape['tensor']
  # A slice writes and reads the gathered weights once a pass; backward reads twice.
  passes = 3 + (spec.remat == 'full') + (slices > 1)
  state = 4 * transformer.count(spec) / (shape['fsdp'] * shape['tensor'])
  local = tokens / (devices / shape['tensor'])
  moved = (
    2 * weights * passes * slices
    + state * (6 + 3 * slices)  # three arrays read and written; gradients added up
    + local * activations(spec, shape['tensor']) * passes
  )
  return Cost(
    model_flops=3 * once.all * tokens / devices,
    flops=(3 * once.all + again) * tokens / devices,
    bytes=moved,
    linked=linked,
  )


def score(spec, shape: dict, rows: int, length: int, linked: float) -> Cost:
  """The log-probabilities of `rows` rows."""
  devices, tokens = math.prod(shape.values()), rows * length
  flops = forward(spec, length / 2).all * tokens / devices
  moved = 2 * width(spec) * transformer.count(spec) / shape['tensor']
  moved += tokens / devices * shape['tensor'] * activations(spec, shape['tensor'])
  return Cost(flops, flops, moved, linked)


def prefill(spec, shape: dict, rows: int, length: int, linked: float) -> Cost:
  """`rows` prompts of `length` tokens; no logits."""
  once, devices = forward(spec, length / 2), math.prod(shape.values())
  flops = (once.layers + once.attention) * rows * length / devices
  moved = width(spec) * matrices(spec) / shape['tensor']
  local = rows * length / devices * shape['tensor']
  moved += local * activations(spec, shape['tensor'])
  return Cost(flops, flops, moved, linked)


def decode(spec, shape: dict, slots: int, length: int, cache: float, linked: float):
  """One token in each of `slots` slots: all weights and the whole cache are read."""
  devices = math.prod(shape.values())
  flops = forward(spec, length).all * slots / devices
  weights = width(spec) * (matrices(spec) + spec.vocab * spec.width) / shape['tensor']
  return Cost(flops, flops, weights + cache, linked)
