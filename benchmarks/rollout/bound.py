"""Compares a decode step with its lower bound on this machine.

1. `step_seconds` times `decode.run` at half of a row's length;
2. `share` sets the step beside the larger of products / GEMM rate and bytes / copy
   rate, which holds even if the two overlap wholly, and beside their sum: a core that
   reads each weight once for a few rows overlaps them in part.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode
from bapo_jax.rollout.sampling import SamplingParams
from bapo_jax.types import Tree
from benchmarks import machine, roofline

ALONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


def step_seconds(
  actor: Tree, spec: ModelSpec, slots: int, length: int, *, greedy: bool, n: int = 8
) -> tuple[float, int]:
  """(seconds of one token in each of `slots` slots, bytes of the cache).

  Args:
    length: columns of a row; every slot is at its middle.
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
  """Returns the step, its lower bound and the machine's rates, by name."""
  gemm, copy = machine.gemm_rate(spec.compute), machine.copy_rate()
  took, cache = step_seconds(actor, spec, slots, length, greedy=greedy)
  cost = roofline.decode(spec, ALONE, slots, length, cache)
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
