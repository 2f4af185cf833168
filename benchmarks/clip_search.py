"""The bound search: the loop as published, the loop under jit, and ours.

  python -m benchmarks.clip_search [--repeat=10] [--rows=1]

Per shape [B, T] of a minibatch, medians in milliseconds of one run:

  host_loop         Algorithm 1 as it is published: one share at a time, operation by
                    operation, each read by the host before the next is asked for
  host_loop_jitted  the same with each share one compiled program
  linear_scan       the same loop inside jit, no host
  ours              bisection over the index of the path, inside jit
  loss              loss and gradient by the log-probabilities, bounds given, no search
  train_step        one update of the embedded default's policy, search included

All searches find the same bounds; the benchmark fails if they do not. For the long
shapes a train step is measured on --rows rows, one slice each, and multiplied up (a
slice takes the same time however many there are); `train_rows` says so. Prints a table
and, as the last line, one JSON object.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import bound_search, clip, loss
from bapo_jax.models import transformer
from bapo_jax.training import learner
from bapo_jax.types import SOURCES, Batch
from configs import base

SHAPES = ((64, 57), (64, 4096), (256, 8192))
KNOBS = dict(target=0.5, low=(0.6, 0.9), high=(1.2, 3.0), low_step=0.02, high_step=0.05)


def minibatch(B: int, T: int):
  """(logp_BT, batch) of stale data whose search goes far down its path."""
  rng = np.random.default_rng(0)
  old_BT = -rng.exponential(0.5, (B, T)).astype(np.float32)
  logp_BT = old_BT + rng.normal(0, 0.5, (B, T)).astype(np.float32)
  adv_B = rng.normal(-0.14, 1, B).astype(np.float32)
  lengths_B = rng.integers(T // 4, T + 1, B)
  loss_mask_BT = np.arange(T) < lengths_B[:, None]
  tokens_BT = rng.integers(0, 40, (B, T)).astype(np.int32)
  batch = Batch(tokens_BT, loss_mask_BT, old_BT, old_BT, adv_B, np.zeros(B, np.int32))
  return jnp.asarray(logp_BT), jax.tree.map(jnp.asarray, batch)


def path(index: int) -> tuple[float, float]:
  """(low, high) after so many moves: the upper bound first."""
  lows = clip.points(KNOBS['low'], KNOBS['low_step'])
  highs = clip.points(KNOBS['high'], KNOBS['high_step'])
  up = min(index, len(highs) - 1)
  return lows[index - up], highs[up]


def meets(ratio_BT, batch, low, high):
  """Is the target met between these bounds?"""
  said = bound_search.evidence(ratio_BT, batch, 'gradient', 'one', SOURCES)
  return bound_search.reaches(
    *bound_search.sums(said, low, high, 'gradient'), KNOBS['target']
  )


def host_loop(ratio_BT, batch, meets=meets) -> int:
  """Moves of Algorithm 1, the host waiting for every share."""
  index = 0
  while index < 51 and not bool(meets(ratio_BT, batch, *path(index))):
    index += 1
  return index


host_loop_jitted = functools.partial(host_loop, meets=jax.jit(meets))


@jax.jit
def linear_scan(ratio_BT, batch):
  """Moves of Algorithm 1 without the host."""
  lows, highs = (jnp.asarray(x) for x in zip(*map(path, range(52)), strict=True))

  def missed(index):
    return (index < 51) & ~meets(ratio_BT, batch, lows[index], highs[index])

  return jax.lax.while_loop(missed, lambda index: index + 1, jnp.int32(0))


@jax.jit
def ours(ratio_BT, batch):
  """Moves found by bisection."""
  return clip.balanced(ratio_BT, batch, **KNOBS).moves


@jax.jit
def loss_alone(logp_BT, batch):
  """Loss and gradient by the log-probabilities, bounds given."""
  bounds = clip.fixed(None, None)

  def total(logp_BT):
    gain_BT, _ = loss.clipped(logp_BT, batch, lambda _: bounds)
    return (gain_BT.sum(1) * loss.row_scale(batch.loss_mask_BT, 'token', 1)).sum()

  return jax.value_and_grad(total)(logp_BT)


def median_ms(function, *args, repeat: int) -> float:
  """Median over `repeat` calls, after one that compiles."""
  jax.block_until_ready(function(*args))
  taken = []
  for _ in range(repeat):
    began = time.perf_counter()
    jax.block_until_ready(function(*args))
    taken.append(1e3 * (time.perf_counter() - began))
  return statistics.median(taken)


def train_step_ms(batch: Batch, rows: int, repeat: int) -> float:
  """One update of the embedded default's policy on `rows` rows, a slice each if few."""
  config = base.get_config()
  knobs = {k: v for k, v in config.model.items() if k != 'path'}
  spec = transformer.ModelSpec(vocab=40, **knobs)
  params = transformer.init(spec, jax.random.key(0))
  tx = learner.optimizer(**config.optimizer)
  B = batch.adv_B.shape[0]
  step = jax.jit(
    functools.partial(
      learner.learn,
      tx=tx,
      clip_rule=functools.partial(clip.balanced, **KNOBS),
      loss_rule=loss.clipped,
      spec=spec,
      temperature=1.0,
      chunk=config.logprobs.chunk,
      slices=1 if rows == B else rows,
    )
  )
  part = jax.tree.map(lambda x: x[:rows], batch)
  return median_ms(step, params, tx.init(params), part, repeat=repeat)


def measure(B: int, T: int, repeat: int, rows: int) -> dict:
  """The figures of one shape."""
  logp_BT, batch = minibatch(B, T)
  ratio_BT = loss.ratio(logp_BT, batch)
  moves = host_loop(ratio_BT, batch)
  found = [int(f(ratio_BT, batch)) for f in (host_loop_jitted, linear_scan, ours)]
  if found != [moves] * 3:
    raise SystemExit(f'[{B}, {T}]: the loop makes {moves} moves, the others {found}')
  some = B if T < 1024 else rows
  step_ms = train_step_ms(batch, some, repeat if some == B else 3) * B / some
  figures = {
    'moves': moves,
    'host_loop_ms': median_ms(host_loop, ratio_BT, batch, repeat=repeat),
    'host_loop_jitted_ms': median_ms(host_loop_jitted, ratio_BT, batch, repeat=repeat),
    'linear_scan_ms': median_ms(linear_scan, ratio_BT, batch, repeat=repeat),
    'ours_ms': median_ms(ours, ratio_BT, batch, repeat=repeat),
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
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeat', type=int, default=10)
  parser.add_argument('--rows', type=int, default=1)
  known = parser.parse_args()
  table = {}
  for B, T in SHAPES:
    table[f'{B}x{T}'] = figures = measure(B, T, known.repeat, known.rows)
    if len(table) == 1:
      print('     shape  ' + '  '.join(f'{name:>14}' for name in figures))
    row = '  '.join(f'{v:>{max(14, len(k))}.4g}' for k, v in figures.items())
    print(f'{f"{B}x{T}":>10}  {row}', flush=True)
  print(json.dumps(table))


if __name__ == '__main__':
  main()
