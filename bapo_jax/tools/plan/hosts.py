"""Plans for several hosts: the traffic between hosts and the memory of each host.

The traffic is a lower bound for any implementation of the collectives: a host receives
only once what its devices lack. Sizes come from formulas or from HLO text.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan import hlo
from bapo_jax.tools.plan.programs import Job
from bapo_jax.tools.plan.roofline import MeshShape, Traffic
from bapo_jax.training import budget

GIB = 2**30
LOADING = 9  # blocks of hf_weights.BLOCK in memory during loading, measured


def crossing(text: str, process_of: Sequence[int], most: int = 1) -> float:
  """Counts the bytes that collectives bring into one host, per run of the program.

  If n devices gather an array and k of them are on one host, the host receives
  (n - k) / n of the array. A scatter counts as one gather, a sum as two. Returns the
  count of the host that receives most. `process_of` is the host of each device in mesh
  order; `most` limits iterations as in `hlo.runs`.
  """
  total: dict[int, float] = defaultdict(float)
  shares = functools.cache(
    lambda kind, line: _shares(kind, hlo.groups(line), process_of)
  )
  for run in hlo.runs(text, most):
    for host, share in shares(run.kind, run.line).items():
      total[host] += share * run.bytes * run.times
  return max(total.values(), default=0)


def into_device(
  traffic: Sequence[Traffic], shape: MeshShape, process_of: Sequence[int]
) -> float:
  """Counts the bytes that traffic brings from other hosts, per device of its host.

  Returns the count of the host that receives most.
  """
  total: dict[int, float] = defaultdict(float)
  ids = np.arange(len(process_of)).reshape(tuple(shape.values()))
  for kind, axis, size in traffic:
    along = np.moveaxis(ids, list(shape).index(axis), -1).reshape(-1, shape[axis])
    for host, share in _shares(kind, along.tolist(), process_of).items():
      total[host] += share * size
  return max(total.values(), default=0.0) / max(Counter(process_of).values())


def _shares(
  kind: str, groups: list[list[int]], process_of: Sequence[int]
) -> dict[int, float]:
  """Maps each host to the bytes that it receives per byte of the collective's array."""
  found: dict[int, float] = defaultdict(float)
  if kind == 'collective-permute':
    for source, target in groups:
      found[process_of[target]] += process_of[source] != process_of[target]
    return found
  for group in groups or [list(range(len(process_of)))]:
    for host, k in Counter(process_of[device] for device in group).items():
      share = 1 - k / len(group)
      if kind == 'all-reduce':
        share *= 2
      elif kind.endswith('all-to-all'):  # every device receives different parts
        share *= k
      found[host] += share
  return found


def weight_sync(spec: ModelSpec, shape: MeshShape, process_of: Sequence[int]) -> float:
  """Counts the bytes that a host receives when the actor gathers weights over fsdp."""
  F, tensor = shape['fsdp'], shape['tensor']
  layout = jax.sharding.AbstractMesh(tuple(shape.values()), sharding.AXES)
  gathered = 0
  for name, x in transformer.flatten(transformer.abstract(spec)).items():
    axes = sharding.spec_of(name, x.shape, layout)
    if 'fsdp' in axes:
      gathered += x.size // (tensor if 'tensor' in axes else 1)
  held: dict[tuple[int, int], set[int]] = {}  # (host, part over tensor) -> columns
  for i, host in enumerate(process_of):
    held.setdefault((host, i % tensor), set()).add(i // tensor % F)
  parts: dict[int, float] = defaultdict(float)
  for (host, _), columns in held.items():
    parts[host] += 1 - len(columns) / F
  return budget.itemsize(spec.compute) * gathered * max(parts.values())


def memory(job: Job, hosts: int) -> dict[str, float]:
  """Returns upper limits on the host memory of a process: use -> bytes.

  Each process counts all rows, also those of other processes. Python, the compiler
  (2 GiB), problems and verifiers are not included.
  """
  T, sampler = job.config.row_length, job.config.sampler
  stored = dict(budget.count(*job).checkpoint)
  buffer = stored.pop('buffer', 0.0)
  rows = job.config.prompts.count * sampler.group_size
  return {
    'weights, while they are read': LOADING * hf_weights.BLOCK,
    'a checkpoint, while it is written': sum(stored.values()) / hosts,
    'replay buffer': buffer,
    'slots': budget.DECODED * sampler.max_num_seqs * T,
    'responses of a step': budget.RECORDED * rows * T,
  }


def inside(shape: MeshShape, process_of: Sequence[int]) -> list[str]:
  """Lists the axes of the mesh along which all neighbours are on one host."""
  placed = np.reshape(process_of, tuple(shape.values()))
  return [
    axis
    for i, (axis, n) in enumerate(shape.items())
    if n > 1 and (placed == placed.take([0], axis=i)).all()
  ]


def table(job: Job, between: Mapping[str, float]) -> str:
  """Formats the hosts, the bytes into one host per step, and the memory of a process.

  `between` maps a program to the bytes into one host per run, from `crossing`.
  """
  process_of = [device.process_index for device in job.mesh.devices.flat]
  shape, sampler = job.shape, job.config.sampler
  hosts = len(set(process_of))
  lines = [
    f'{hosts} {"hosts" if hosts > 1 else "host"} of {job.mesh.size // hosts} devices; '
    f'inside a host: {", ".join(inside(shape, process_of)) or "no axis of the mesh"}'
  ]
  if hosts > 1:
    rows = job.config.prompts.count * sampler.group_size
    tokens = rows / sampler.max_num_seqs * sampler.max_new_tokens
    runs = {
      'train step': job.config.updates_per_step,
      'decode': tokens / sampler.tokens_per_dispatch,
      'prefill': rows / sampler.prefill_batch_size,
      'weight sync': 1 / job.config.rollout.weight_sync_interval,
    }
    into = {**between, 'weight sync': weight_sync(job.spec, shape, process_of)}
    lines.append(f'{"into a host":16}{"GiB":>12}{"runs a step":>14}{"GiB a step":>12}')
    lines += [
      f'{name:16}{into[name] / GIB:12.4g}{n:14.4g}{into[name] * n / GIB:12.4g}'
      for name, n in runs.items()
      if name in into
    ]
  held = memory(job, hosts)
  lines.append(f'{"host memory":36}{"GiB a process, at most":>22}')
  held['together'] = sum(held.values())
  lines += [f'{name:36}{size / GIB:22.2f}' for name, size in held.items()]
  return '\n'.join(lines)
