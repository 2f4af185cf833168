r"""Compares all meshes of a topology by hand counts, without compiling anything.

  python -m benchmarks.meshes --config=configs/aime.py:7b --topology=v5p:4x4x4 \
    --config.model.path=models/DeepSeek-R1-Distill-Qwen-7B

Takes the flags of `bapo plan`. Memory comes from training/budget.py, time from the
roofline: no time was compared with a machine of several chips. Bytes on links come from
formulas, which count 47 to 81 % of the bytes of three compiled train steps.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from bapo_jax import main as command
from bapo_jax import sharding
from bapo_jax.autosetup import derive
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan import devices as devices_lib
from bapo_jax.tools.plan import plan, programs
from bapo_jax.tools.plan.chips import GIB, Chip
from bapo_jax.training import budget
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved
from benchmarks import roofline

BEST = 5
TPU_HOST = 4  # chips per host of a slice; v5e and v6e hosts may have 1 or 8
Seconds = dict[str, float]  # resource -> lower bound


@dataclasses.dataclass(frozen=True)
class Device:
  """Stands in for a device of a mesh on which nothing is compiled."""

  id: int
  process_index: int  # the number of its host
  platform: str  # 'gpu' or 'tpu'


class Choice(NamedTuple):
  """The fastest setting that fits a mesh, with memory and lower bounds on times."""

  shape: roofline.MeshShape
  grad_accum_steps: int
  schedule: Schedule
  slots: int
  update_bytes: float  # per device
  decode_bytes: float  # per device
  update: Seconds  # of an update
  token: Seconds  # the same for one token in every slot
  seconds: float  # of a step: all its updates and its rollout

  @property
  def flags(self) -> str:
    """The flags of a run with this setting."""
    sizes = ' '.join(f'--config.mesh.{axis}={n}' for axis, n in self.shape.items())
    return (
      f'{sizes} --config.learner.grad_accum_steps={self.grad_accum_steps} '
      f'--config.sampler.max_num_seqs={self.slots}'
    )


class TooLarge(ValueError):
  """Reports a part of a run that does not fit a mesh, even with its smallest batch."""

  def __init__(self, part: str, least: str, needed: float, memory: float) -> None:
    """Words the error; `needed` and `memory` are bytes per device."""
    self.excess = needed - memory
    super().__init__(
      f'{part} needs {needed / GIB:.0f} GiB per device, even with {least}, but only '
      f'{memory / GIB:.0f} GiB are available'
    )


def count(topology: str) -> tuple[Chip, list[Device]]:
  """Returns (chip, stand-ins for the devices) of a topology, without its compiler.

  A TPU host has four chips; whether the arrangement exists is not checked. Raises
  ValueError if the chip or the form of the shape is unknown.
  """
  chip, sizes = devices_lib.parse(topology)
  per_host = sizes[-1] if chip.gpu else TPU_HOST
  platform = 'gpu' if chip.gpu else 'tpu'
  return chip, [Device(i, i // per_host, platform) for i in range(math.prod(sizes))]


def divisors(n: int) -> list[int]:
  """Returns the divisors of n, ascending."""
  return [k for k in range(1, n + 1) if n % k == 0]


def shapes(n: int) -> Iterator[dict[str, int]]:
  """Yields every (data, fsdp, tensor) whose product is n."""
  for tensor in divisors(n):
    for data in divisors(n // tensor):
      yield {'data': data, 'fsdp': n // tensor // data, 'tensor': tensor}


def name(shape: roofline.MeshShape) -> str:
  """Formats the shape of a mesh as '1x64x4'."""
  return 'x'.join(map(str, shape.values()))


def search(
  config: Config, spec: ModelSpec, chip: Chip, devices: Sequence[Any], memory: float
) -> tuple[list[Choice], dict[str, ValueError]]:
  """Returns the choices that fit, fastest first, and the error per rejected mesh."""
  found = []
  refused = {}
  for shape in shapes(len(devices)):
    mesh = Mesh(np.asarray(devices).reshape(tuple(shape.values())), sharding.AXES)
    try:
      found.append(judge(programs.resolved(config, spec, mesh), chip, memory))
    except ValueError as error:
      refused[name(shape)] = error
  # Among meshes with equal bounds, the mesh with the least traffic comes first.
  return sorted(found, key=lambda c: (c.seconds, c.update['links'])), refused


def judge(r: Resolved, chip: Chip, memory: float) -> Choice:
  """Finds the number of micro-batches and of slots that is fastest on this mesh.

  Raises TooLarge if nothing fits, with the larger excess of update and decoding, and
  ValueError if model or rows do not divide over the mesh.
  """
  config = r.config
  extra = r.budget.buffer
  parts: list[Any] = []
  errors = []
  for find in (_update, _decoding):
    try:
      parts.append(find(r, chip, memory - extra))
    except TooLarge as error:
      errors.append(error)
  if errors:
    raise max(errors, key=lambda error: error.excess)
  (steps, schedule, update_bytes, update), (slots, decode_bytes, token) = parts
  responses = config.prompts.count * config.sampler.group_size
  tokens = responses / slots * config.sampler.max_new_tokens
  seconds = config.updates_per_step * max(update.values())
  seconds += tokens * max(token.values())
  return Choice(
    dict(r.mesh.shape),
    steps,
    schedule,
    slots,
    update_bytes + extra,
    decode_bytes + extra,
    update,
    token,
    seconds,
  )


def _update(r: Resolved, chip: Chip, memory):
  """Finds the fastest update that fits: (micro-batches, schedule, bytes, seconds)."""
  config = r.config
  spec = r.spec
  mesh = r.mesh
  sharding.shardings(transformer.abstract(spec), mesh)
  shards = sharding.row_shards(mesh)
  rows = config.minibatch_rows
  if rows % shards:
    raise ValueError(f'the {rows} rows of a minibatch do not divide over data x fsdp')
  sizes = budget.sizes_of(config, spec)
  least = math.inf
  updates = []
  for steps in divisors(rows // shards):
    sizes = sizes._replace(grad_accum_steps=steps)
    schedule = budget.choose_schedule(sizes, spec, mesh, memory)
    needed = budget.count(sizes, spec, schedule, mesh).update
    least = min(least, needed)
    if needed <= memory:
      batch = mesh.shape, rows, config.row_length, steps
      traffic = roofline.train_traffic(spec, schedule, *batch)
      cost = roofline.train(spec, schedule, *batch, sizes.adapters)
      seconds = roofline.bounds(cost, chip, mesh, traffic)
      updates.append((steps, schedule, needed, seconds))
  if not updates:
    raise TooLarge('an update', 'one row per device in a micro-batch', least, memory)
  return min(updates, key=lambda update: (max(update[3].values()), update[0]))


def _decoding(r: Resolved, chip: Chip, memory):
  """Finds the most slots that fit; returns (slots, bytes, {resource: s per token})."""
  config = r.config
  spec = r.spec
  mesh = r.mesh
  shards = sharding.row_shards(mesh)
  T = config.row_length
  responses = config.prompts.count * config.sampler.group_size
  b = r.budget
  tensor = mesh.shape['tensor']
  per_slot = budget.slot_bytes(spec, T, tensor)
  read = budget.cache_bytes(spec, T, tensor)
  needed = math.inf
  for power in itertools.count(6, -1):  # the configured number, doubled or halved
    slots = int(config.sampler.max_num_seqs * 2.0**power)
    if slots < shards or slots % shards:
      break
    if slots > responses:
      continue
    each = slots / shards
    needed = b.weights + b.moments + b.actor + each * per_slot
    if needed <= memory:
      traffic = [roofline.hidden_sums(spec, each)]
      cost = roofline.decode(spec, mesh.shape, slots, T, each * read)
      return slots, needed, roofline.bounds(cost, chip, mesh, traffic)
  if needed < math.inf:
    few = f'the fewest slots that divide over {shards} shards'
    raise TooLarge('decoding', few, needed, memory)
  raise ValueError(
    f'sampler.max_num_seqs must be a multiple of the {shards} device shards'
  )


def table(found: Sequence[Choice], refused: dict[str, ValueError]) -> str:
  """Formats the best meshes, the flags for the fastest, and the rejected meshes."""
  lines = [
    f'{"data x fsdp x tensor":21}{"micro-batches":>14}{"remat":>14}{"GiB":>7}'
    f'{"update, s":>18}{"slots":>8}{"GiB":>7}{"token, ms":>18}{"step, h":>9}'
  ]
  for c in found[:BEST]:
    again = c.schedule.remat + (' split' if c.schedule.sequence_sharding else '')
    lines.append(
      f'{name(c.shape):21}{c.grad_accum_steps:14}{again:>14}'
      f'{c.update_bytes / GIB:7.1f}{_bound(c.update, 1):>18}{c.slots:8}'
      f'{c.decode_bytes / GIB:7.1f}{_bound(c.token, 1e3):>18}{c.seconds / 3600:9.3g}'
    )
  if found:
    lines.append(
      'times are lower bounds with their resource; GiB per device, counted by hand\n'
      f'flags for the fastest: {found[0].flags}'
    )
  slower = [name(c.shape) for c in found[BEST:]]
  reasons: dict[str, list[str]] = {'it fits and is slower': slower} if slower else {}
  for mesh, error in refused.items():
    reasons.setdefault(str(error), []).append(mesh)
  lines += [f'not {", ".join(meshes)}: {why}' for why, meshes in reasons.items()]
  return '\n'.join(lines)


def _bound(seconds: Seconds, scale):
  """Formats the largest of several lower bounds, with the name of its resource."""
  what = max(seconds, key=lambda key: seconds[key])
  return f'{scale * seconds[what]:.4g} {what}'


def run(config: Config, topology: str) -> bool:
  """Prints the meshes of the topology, fastest first; returns whether one fits."""
  chip, devices = count(topology)
  print(plan.heading(config, topology, chip, devices))
  config = derive.decide(config, '')
  spec = programs.device_spec(config, devices[0].platform)
  found, refused = search(config, spec, chip, devices, plan.room(chip))
  print(table(found, refused))
  flags = found[0].flags if found else ''
  print(json.dumps({'topology': topology, 'fits': len(found), 'flags': flags}))
  return bool(found)


def to_plan(arguments: Sequence[str]) -> tuple[Config, str]:
  """Returns the config and the topology of the flags of `bapo plan`."""
  os.environ.update(command.PLANNING)
  args = command.parse(['bapo', 'plan', *arguments])
  return command.config_of(args), args.topology


def main() -> int:
  """Runs the command; returns 1 if no mesh fits, else 0."""
  return int(not run(*to_plan(sys.argv[1:])))


if __name__ == '__main__':
  try:
    sys.exit(main())
  except ValueError as error:
    command.fail(error)
