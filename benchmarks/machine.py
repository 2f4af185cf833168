"""Measures the rates of this machine, and defines the models that benchmarks share.

1. `gemm_rate`, `copy_rate`, `host_rate` and `gather_rate` measure the machine;
2. `QWEN2_25M` and `QWEN2_1_5B` are models of random weights, and `with_windows` adds
   windows to one.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.transformer import LayerKind, ModelSpec

GEMM_SIZE = 2048

QWEN2_25M = transformer.ModelSpec(
  vocab=32000,
  width=384,
  layers=8,
  heads=6,
  kv_heads=2,
  head_width=64,
  ffn=1024,
  positions=4096,
)
QWEN2_1_5B = transformer.ModelSpec(  # the sizes of Qwen2.5-1.5B
  vocab=151936,
  width=1536,
  layers=28,
  heads=12,
  kv_heads=2,
  head_width=128,
  ffn=8960,
  positions=2048,
  compute='bfloat16',
)


def with_windows(spec: ModelSpec, window: int) -> ModelSpec:
  """Returns the spec with a window in five of six layers, as in Gemma 3."""
  kinds = [LayerKind(window if i % 6 < 5 else 0) for i in range(spec.layers)]
  return dataclasses.replace(spec, kinds=tuple(kinds))


def seconds(call: Callable[[], Any], times: int = 10) -> float:
  """Returns the median wall time of a call, after a first call."""
  jax.block_until_ready(call())
  took = []
  for _ in range(times):
    begun = time.perf_counter()
    jax.block_until_ready(call())
    took.append(time.perf_counter() - begun)
  return statistics.median(took)


def gemm_rate(
  dtype: str = 'float32',
  times: int = 10,
  size: int = GEMM_SIZE,
  precision: str | None = None,
) -> float:
  """Returns the median FLOP/s of a product of two size x size matrices.

  The numbers are random: on constant ones a GPU draws less power and runs faster.
  """
  a = jax.random.normal(jax.random.key(0), (size, size), dtype)
  product = jax.jit(functools.partial(jnp.matmul, precision=precision))
  return 2 * size**3 / seconds(functools.partial(product, a, a), times)


def copy_rate(size: int = 2**29, times: int = 10) -> float:
  """Returns bytes/s read and written by an in-place update of `size` floats."""
  held = [jnp.zeros(size, jnp.float32)]
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def again() -> jax.Array:
    held[0] = add(held[0])
    return held[0]

  return 2 * held[0].nbytes / seconds(again, times)


def host_rate(size: int = 2**28, times: int = 10) -> float:
  """Returns bytes/s from host memory to the device, for `size` floats."""
  x = np.ones(size, np.float32)
  return x.nbytes / seconds(lambda: jax.device_put(x, jax.devices()[0]), times)


def gather_rate(mesh: Mesh, size: int = 2**26, times: int = 10) -> float:
  """Returns bytes/s that each device receives in an all-gather over the mesh.

  `size` is the number of floats that each device has before the all-gather.
  """
  split = NamedSharding(mesh, P(mesh.axis_names))
  x = jax.device_put(jnp.zeros(mesh.size * size, jnp.float32), split)
  gather = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
  received = x.nbytes * (mesh.size - 1) / mesh.size
  return received / seconds(functools.partial(gather, x), times)
