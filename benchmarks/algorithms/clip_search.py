"""Times the bound search: the loop as published, the loop under jit, and ours.

  python -m benchmarks.algorithms.clip_search [--repeat=10] [--rows=1]
      [--shapes=64x57,64x4096,256x8192]

Reports the median milliseconds of a run for each minibatch shape [B, T]:

  host_loop         Algorithm 1 as published: one share at a time, without jit; the host
                    reads each share before the next
  host_loop_jitted  like host_loop, with one compiled program per share
  linear_scan       the same loop inside jit, without the host
  ours              bisection over the index of the path, inside jit, on the
                    weights that the loss's derivative gives
  loss              loss and gradient w.r.t. log-probabilities, given the bounds
  train_step        one update of the embedded default's policy, search included

The benchmark fails unless all searches find the same bounds. For long shapes, a train
step is measured on --rows rows (`train_rows`), one per micro-batch, and scaled to all
rows, because the time per micro-batch is constant.
Prints a table and, as the last line, one JSON object.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import bound_search, clip, loss
from bapo_jax.learner import learner, optimizer
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import transformer
from bapo_jax.training.config import Config
from bapo_jax.types import Batch

SHAPES = '64x57,64x4096,256x8192'
SIZES = ('width', 'layers', 'heads', 'kv_heads', 'head_width', 'ffn')
TARGET = 0.5
LOWS, HIGHS = clip.points((0.6, 0.9), 0.02), clip.points((1.2, 3.0), 0.05)
LAST = len(LOWS) + len(HIGHS) - 2  # index of the last point of the path
balanced = clip.Balanced(
  target=TARGET, low=(0.6, 0.9), high=(1.2, 3.0), low_step=0.02, high_step=0.05
)


def minibatch(B: int, T: int) -> tuple[Array, Batch]:
  """Returns (logp_BT, batch) of stale data whose search needs many steps."""
  rng = np.random.default_rng(0)
  old_BT = -rng.exponential(0.5, (B, T)).astype(np.float32)
  logp_BT = old_BT + rng.normal(0, 0.5, (B, T)).astype(np.float32)
  adv_B1 = rng.normal(-0.14, 1, (B, 1)).astype(np.float32)
  lengths_B = rng.integers(T // 4, T + 1, B)
  loss_mask_BT = np.arange(T) < lengths_B[:, None]
  adv_BT = np.broadcast_to(adv_B1, loss_mask_BT.shape)
  tokens_BT = rng.integers(0, 40, (B, T)).astype(np.int32)
  source_B, on_policy_BT = np.zeros(B, np.int32), np.zeros((B, T), bool)
  arrays = tokens_BT, loss_mask_BT, old_BT, old_BT, adv_BT, source_B, on_policy_BT
  fields: list[Any] = [jnp.asarray(x) for x in arrays]
  return jnp.asarray(logp_BT), Batch(*fields)


def path(index: int) -> tuple[float, float]:
  """Returns (low, high) after `index` steps; the upper bound moves first."""
  up = min(index, len(HIGHS) - 1)
  return float(LOWS[index - up]), float(HIGHS[up])


def meets(
  ratio_BT: Array, batch: Batch, low: Array | float, high: Array | float
) -> Array:
  """Returns whether these bounds meet the target."""
  parts = bound_search.contributions(ratio_BT, batch, bound_search.Share())
  P, N = bound_search.sums(ratio_BT, *parts, low, high, 'gradient')
  return bound_search.reaches(P, N, TARGET)


def host_loop(
  ratio_BT: Array, batch: Batch, meets: Callable[..., Array] = meets
) -> int:
  """Counts the steps of Algorithm 1; the host waits for every share."""
  index = 0
  while index < LAST and not bool(meets(ratio_BT, batch, *path(index))):
    index += 1
  return index


host_loop_jitted = functools.partial(host_loop, meets=jax.jit(meets))


@jax.jit
def linear_scan(ratio_BT: Array, batch: Batch) -> Array:
  """Counts the steps of Algorithm 1 without the host."""
  points = map(path, range(LAST + 1))
  lows, highs = (jnp.asarray(x) for x in zip(*points, strict=True))

  def missed(index: Array) -> Array:
    return (index < LAST) & ~meets(ratio_BT, batch, lows[index], highs[index])

  return jax.lax.while_loop(missed, lambda index: index + 1, jnp.int32(0))


@jax.jit
def ours(logp_BT: Array, batch: Batch) -> Array:
  """Counts the steps by bisection, with the weights of the loss."""
  scale_B = loss.row_scale(batch.loss_mask_BT, 'token', 1)
  weigh = loss.weigher(loss.Clipped(), logp_BT, batch, scale_B)
  return balanced(loss.ratio(logp_BT, batch), batch, weigh).search_steps


@jax.jit
def loss_alone(logp_BT: Array, batch: Batch) -> tuple[Array, Array]:
  """Computes loss and gradient w.r.t. the log-probabilities, given the bounds."""
  bounds = clip.constant(0.8, 1.2, math.inf)

  def total(logp_BT: Array) -> Array:
    gain_BT, _ = loss.Clipped()(logp_BT, batch, lambda _: bounds)
    return (gain_BT.sum(1) * loss.row_scale(batch.loss_mask_BT, 'token', 1)).sum()

  return jax.value_and_grad(total)(logp_BT)


def median_ms(function: Callable[..., Any], *args: Any, repeat: int) -> float:
  """Returns the median of `repeat` calls, after a call that compiles."""
  jax.block_until_ready(function(*args))
  taken = []
  for _ in range(repeat):
    began = time.perf_counter()
    jax.block_until_ready(function(*args))
    taken.append(1e3 * (time.perf_counter() - began))
  return statistics.median(taken)


def train_step_ms(batch: Batch, rows: int, repeat: int) -> float:
  """Times one update of the embedded policy on `rows` rows."""
  config = Config()
  sizes = {name: getattr(config.sft, name) for name in SIZES}
  spec = transformer.ModelSpec(vocab=40, **sizes)
  params = transformer.init(spec, jax.random.key(0))
  tx = optimizer.make(config.optimizer)
  objective = objective_lib.Objective(
    clip_rule=balanced,
    loss_rule=loss.Clipped(),
    spec=spec,
    temperature=1.0,
    grad_accum_steps=1 if rows == len(batch.adv_BT) else rows,
  )
  step = jax.jit(functools.partial(learner.learn, tx=tx, objective=objective))
  part = jax.tree.map(lambda x: x[:rows], batch)
  return median_ms(step, params, tx.init(params), part, repeat=repeat)


def measure(B: int, T: int, repeat: int, rows: int) -> dict[str, float]:
  """Measures one shape."""
  logp_BT, batch = minibatch(B, T)
  ratio_BT = loss.ratio(logp_BT, batch)
  steps = host_loop(ratio_BT, batch)
  found = [int(f(ratio_BT, batch)) for f in (host_loop_jitted, linear_scan)]
  found.append(int(ours(logp_BT, batch)))
  if found != [steps] * 3:
    raise SystemExit(f'[{B}, {T}]: the loop makes {steps} steps, not {found}')
  some = B if T < 1024 else rows
  step_ms = train_step_ms(batch, some, repeat if some == B else 3) * B / some
  figures = {
    'search_steps': steps,
    'host_loop_ms': median_ms(host_loop, ratio_BT, batch, repeat=repeat),
    'host_loop_jitted_ms': median_ms(host_loop_jitted, ratio_BT, batch, repeat=repeat),
    'linear_scan_ms': median_ms(linear_scan, ratio_BT, batch, repeat=repeat),
    'ours_ms': median_ms(ours, logp_BT, batch, repeat=repeat),
    'loss_ms': median_ms(loss_alone, logp_BT, batch, repeat=repeat),
    'train_step_ms': step_ms,
    'train_rows': some,
  }
  return figures | {
    'ours_of_loss': figures['ours_ms'] / figures['loss_ms'],
    'ours_of_train_step': figures['ours_ms'] / step_ms,
    'times_faster_than_host_loop': figures['host_loop_ms'] / figures['ours_ms'],
  }


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--repeat', type=int, default=10)
  parser.add_argument('--rows', type=int, default=1)
  parser.add_argument('--shapes', default=SHAPES, help='rows x tokens of a minibatch')
  args = parser.parse_args()
  table = {}
  for shape in args.shapes.split(','):
    B, T = map(int, shape.split('x'))
    table[f'{B}x{T}'] = figures = measure(B, T, args.repeat, args.rows)
    if len(table) == 1:
      print('     shape  ' + '  '.join(f'{name:>14}' for name in figures))
    row = '  '.join(f'{v:>{max(14, len(k))}.4g}' for k, v in figures.items())
    print(f'{f"{B}x{T}":>10}  {row}', flush=True)
  print(json.dumps(table))


if __name__ == '__main__':
  main()
