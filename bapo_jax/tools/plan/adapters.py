"""Memory of training adapters by rank and model, counted by hand.

1. `MODELS` are the sizes of three published models;
2. `bytes_of` adds up one device's share of an update on a mesh;
3. `devices` searches the fewest that suffice;
4. `table` writes it down; docs/lora.md has it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bapo_jax.models import lora, transformer
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import tables
from bapo_jax.training import remat

GIB = 2**30
_BF16 = {'dtype': 'bfloat16', 'compute': 'bfloat16', 'attention': 'splash'}
MODELS = {  # config.json of Qwen2.5, of which DeepSeek-R1-Distill-Qwen has the sizes
  '1.5B': ModelSpec(151936, 1536, 28, 12, 2, 128, 8960, **_BF16),
  '7B': ModelSpec(152064, 3584, 28, 28, 4, 128, 18944, tied=False, **_BF16),
  '32B': ModelSpec(152064, 5120, 64, 40, 8, 128, 27648, tied=False, **_BF16),
}
MEMORY = {'v5e': 16, 'v5p': 95, 'H100': 80 * 1e9 / GIB}  # GiB of a device
RANKS = (8, 16, 64, 256)
TOKENS = 4096  # of a micro-batch on a device
MOST_TENSOR = 8  # devices that share heads: beyond, links between them are slow


class Bytes(NamedTuple):
  """Of one device."""

  frozen: float  # weights, or with all trained their own bytes
  trained: float  # what training adds, see remat.held_bytes
  actor: float  # while it decodes; freed before an update
  passes: float  # residual stream of all layers; one layer and the head, gathered

  @property
  def most(self) -> float:
    """Of decoding without its cache, and of an update."""
    return self.frozen + self.trained + max(self.actor, self.passes)


def bytes_of(spec: ModelSpec, rank: int, fsdp: int = 1, tensor: int = 1) -> Bytes:
  """An update on `TOKENS` tokens per device, all layers computed again.

  Args:
    rank: of adapters on all projections; 0: all weights are trained.
  """
  c, weights = remat.numbers(spec.compute), transformer.count(spec)
  few = lora.count(spec, rank, LoraConfig().targets) if rank else 0
  frozen, trained = (x / (fsdp * tensor) for x in remat.held_bytes(spec, few))
  head = spec.vocab * spec.width
  layer = (weights - head * (2 - spec.tied)) / spec.layers
  own = 0 if rank else 4
  gathered = ((2 * c + own) * layer + (c + own) * head) / tensor
  stream = spec.layers * remat.saved_bytes(spec, Schedule('full'), TOKENS, tensor)
  inside = 2 * remat.saved_bytes(spec, Schedule('none'), TOKENS, tensor)
  passes = gathered + TOKENS * (stream + inside + (c + 4) * spec.width)
  return Bytes(frozen, trained, c * weights / tensor, passes)


def devices(spec: ModelSpec, rank: int, memory: float) -> tuple[int, int] | None:
  """(fsdp, tensor) of the fewest devices of `memory` bytes that suffice, up to 512."""
  for count in (2**i for i in range(10)):
    for tensor in (1, 2, 4, MOST_TENSOR):
      whole = count % tensor == 0 and spec.heads % tensor == 0
      if whole and spec.kv_heads % tensor == 0:
        needed = bytes_of(spec, rank, count // tensor, tensor).most
        if needed <= remat.DEVICE_SHARE * memory:
          return count // tensor, tensor
  return None


def _rows(models: Mapping[str, ModelSpec]) -> Iterator[list[str]]:
  for name, spec in models.items():
    for rank in (0, *RANKS):
      few = lora.count(spec, rank, LoraConfig().targets) if rank else 0
      found = bytes_of(spec, rank)
      meshes = [devices(spec, rank, room * GIB) for room in MEMORY.values()]
      yield [
        name,
        str(rank or 'all'),
        f'{(few or transformer.count(spec)) / 1e6:,.0f}',
        *(f'{x / GIB:.1f}' for x in (*found, found.most)),
        *(f'{m[0] * m[1]} ({m[0]} x {m[1]})' if m else '-' for m in meshes),
      ]


def table(models: Mapping[str, ModelSpec] = MODELS) -> str:
  """Markdown: GiB of an update on one device, and the fewest devices that suffice."""
  header = ['model', 'rank', 'trained, 10^6', 'weights', 'training', 'actor', 'passes']
  header += ['most, GiB', *(f'{name}, {room:.0f} GiB' for name, room in MEMORY.items())]
  return tables.markdown(_rows(models), header, 'lr' + 'r' * (len(header) - 2))


def of_model(name: str, spec: ModelSpec) -> str:
  """`table` of one model in bfloat16, whatever the run has."""
  return table({name: dataclasses.replace(spec, **_BF16)})
