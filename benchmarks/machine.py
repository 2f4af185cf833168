"""Measures the rates of this machine, and defines a model that benchmarks share.

1. `gemm_rate` and `copy_rate` measure the machine;
2. `QWEN2_25M` is a random Qwen2 of about 25 M parameters.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bapo_jax.models import transformer

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


def seconds(call: Callable[[], Any], times: int = 10) -> float:
  """Returns the median wall time of a call, after a first call."""
  jax.block_until_ready(call())
  took = []
  for _ in range(times):
    begun = time.perf_counter()
    jax.block_until_ready(call())
    took.append(time.perf_counter() - begun)
  return statistics.median(took)


def gemm_rate(dtype: str = 'float32', times: int = 10) -> float:
  """Returns the median FLOP/s of a product of two GEMM_SIZE x GEMM_SIZE matrices."""
  a = jnp.ones((GEMM_SIZE, GEMM_SIZE), dtype)
  took = seconds(functools.partial(jax.jit(jnp.matmul), a, a), times)
  return 2 * GEMM_SIZE**3 / took


def copy_rate(size: int = 2**29) -> float:
  """Returns bytes/s read and written by an in-place update of `size` floats."""
  held = [jnp.zeros(size, jnp.float32)]
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def again() -> jax.Array:
    held[0] = add(held[0])
    return held[0]

  return 2 * held[0].nbytes / seconds(again)
