"""Compares a tiny mixture of experts with the same model in float64 on the CPU.

Samples and updates as parity.py does, with each kernel that multiplies by experts on
this platform. The update reads random recorded routes, and the oracle the routes that
were recorded: without them rounding would choose other experts.
"""

import dataclasses
from collections.abc import Iterator

import jax

from bapo_jax import sharding
from bapo_jax.models import experts
from benchmarks.first_contact import parity
from benchmarks.first_contact.figures import Context, Figure

SPEC = dataclasses.replace(parity.SPEC, ffn=64, experts=8, active=2)


def run(context: Context) -> Iterator[Figure]:
  """Yields the errors of every kernel in both dtypes, then of a mesh of all devices."""
  params = parity.weights(SPEC)
  batch = parity.example(SPEC, params)
  auto = experts.resolve(None, jax.default_backend())
  alone = sharding.make(1, 1, 1, jax.devices()[:1])
  meshes = {kernel: (kernel, alone) for kernel in sorted({'blocks', 'dense', auto})}
  for where, mesh in parity.places().items():
    if mesh.size > 1:
      meshes[f'{auto}, {where}'] = auto, mesh
  for name, (kernel, mesh) in meshes.items():
    for compute in list(parity.EPS)[: 1 if context.small else None]:
      spec = dataclasses.replace(SPEC, compute=compute, experts_kernel=kernel)
      found = parity.compute(spec, params, batch, mesh)
      for what, error, unit, limit in parity.compare(found, spec, params, batch):
        yield Figure(f'{what}, {name}, {compute}', error, unit, limit)
