"""What a decode step must at least take on this machine, and what it takes.

1. `gemm_rate` and `copy_rate` measure the machine;
2. `step_seconds` times `decode.run` at half of a row's length;
3. `share` sets the step beside the larger of products / GEMM rate and bytes / copy
   rate, which holds even if the two overlap wholly, and beside their sum: a core that
   reads each weight once for a few rows overlaps them in part.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode
from bapo_jax.rollout.sampling import SamplingParams
from bapo_jax.tools.plan import roofline
from bapo_jax.types import Tree

ALONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


def seconds(call: Callable[[], Any], times: int = 10) -> float:
  """Median of the wall time of a call, the first left out."""
  jax.block_until_ready(call())
  took = []
  for _ in range(times):
    begun = time.perf_counter()
    jax.block_until_ready(call())
    took.append(time.perf_counter() - begun)
  return statistics.median(took)


def gemm_rate(n: int = 2048, dtype: str = 'float32') -> float:
  """FLOP/s of a product of two square matrices."""
  a = jnp.ones((n, n), dtype)
  return 2 * n**3 / seconds(functools.partial(jax.jit(jnp.matmul), a, a))


def copy_rate(size: int = 2**29) -> float:
  """Bytes per second that are read and written where `size` floats change in place."""
  held = [jnp.zeros(size, jnp.float32)]
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def again() -> jax.Array:
    held[0] = add(held[0])
    return held[0]

  return 2 * held[0].nbytes / seconds(again)


def step_seconds(
  actor: Tree, spec: ModelSpec, slots: int, length: int, *, greedy: bool, n: int = 8
) -> tuple[float, int]:
  """(seconds of one token in each of `slots` slots, bytes of the cache).

  Args:
    length: columns of a row; every slot stands in the middle.
    n: tokens of the dispatch.
  """
  s = decode.empty(spec, slots, length)
  key = jax.random.key(0)
  took = []
  for _ in range(8):
    s = s._replace(
      row_S=jnp.arange(slots),
      position_S=jnp.full(slots, length // 2),
      limit_S=jnp.full(slots, length),
      done_S=jnp.zeros(slots, bool),
    )
    jax.block_until_ready(s)
    begun = time.perf_counter()
    s, position_S = decode.run(
      actor, s, key, 1.0, n, 0, spec=spec, eos=(-1,), live=1,
      sampling=SamplingParams(greedy),
    )  # fmt: skip
    jax.block_until_ready(position_S)
    took.append((time.perf_counter() - begun) / n)
  return statistics.median(took[1:]), sum(x.nbytes for x in jax.tree.leaves(s.cache))


def share(
  actor: Tree, spec: ModelSpec, slots: int, length: int, *, greedy: bool
) -> dict[str, float]:
  """The step, its lower bound and the machine's rates, by name."""
  gemm, copy = gemm_rate(dtype=spec.compute), copy_rate()
  took, cache = step_seconds(actor, spec, slots, length, greedy=greedy)
  cost = roofline.decode(spec, ALONE, slots, length, cache, 0.0)
  products, memory = cost.flops / gemm, cost.bytes / copy
  return {
    'step_ms': round(1e3 * took, 2),
    'products_ms': round(1e3 * products, 2),
    'memory_ms': round(1e3 * memory, 2),
    'fraction': round(max(products, memory) / took, 4),
    'fraction_of_sum': round((products + memory) / took, 4),
    'gemm_gflops': round(gemm / 1e9, 1),
    'copy_gbps': round(copy / 1e9, 1),
  }
