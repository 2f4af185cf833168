"""Compares useful tokens/s of the learner's update on padded, packed and shared rows.

  python -m benchmarks.training.learner [--rows=32] [--length=256] [--prompt=.25]
      [--rounds=3] [--cases=1:1,1:2,1:4,1:1-quarter,1:2-quarter,1:4-quarter]

A random Qwen2 of about 25 M parameters (hidden 384, 8 layers, vocabulary 32 000),
float32, AdamW, GRPO's loss. One update on `rows` rows in groups of 8, whose prompt
is a share, `prompt`, of their shortest row. The longest row has `length` tokens; case
1:4 has a mean row of a quarter of `length`. In the -quarter cases only one in four
groups has an advantage. Useful tokens are the tokens of responses with an advantage.
`shared` computes the prompt once for as many responses as learner.share_prompts=None
chooses.

All take turns in one process, `rounds` times, with float32 products of 2048 cubed in
between, because the speed of a machine varies; figures are medians without the first
update. `fraction` is the rate of the FLOPs that the useful rows by themselves
need (see rates.py) beside that of the products. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import packing, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.training import build, resolve
from bapo_jax.training.config import Config
from bapo_jax.types import Batch
from benchmarks import machine
from benchmarks.training import rates

SPEC = machine.QWEN2_25M
GROUP = 8
LEAST = 4  # tokens of the shortest row
CASES = ('1:1', '1:2', '1:4', '1:1-quarter', '1:2-quarter', '1:4-quarter')
SIDES = ('padded', 'packed', 'shared')


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the arguments.

  Raises:
    SystemExit: an argument is unknown.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, value in {'rows': 32, 'length': 256, 'rounds': 3}.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--prompt', type=float, default=0.25)
  parser.add_argument('--cases', default=','.join(CASES))
  return parser.parse_args(argv)


def lengths(rows: int, longest: int, times: int) -> np.ndarray:
  """Returns the tokens of each row, i64 [rows]: maximum longest, mean longest / times.

  A power of an even spread: all equal for 1, about uniform for 2. Groups of GROUP rows,
  one after the other, have lengths alike.
  """
  u_B = np.arange(1, rows + 1) / rows
  # Near times - 1, which is exact of infinitely many rows.
  power = min(np.arange(0, 20, 0.01), key=lambda p: abs((u_B**p).mean() - 1 / times))
  length_B = np.maximum(np.round(longest * u_B**power), LEAST).astype(int)
  return length_B.reshape(GROUP, rows // GROUP).T.reshape(rows)


def factor(case: str) -> int:
  """Returns longest / mean row of a case: 2 for '1:2'."""
  return int(case.partition('-')[0].partition(':')[2])


def example(
  rows: int, longest: int, case: str, vocab: int = SPEC.vocab, prompt: float = 0.25
) -> Batch:
  """Returns a synthetic batch of a case such as '1:2' or '1:2-quarter'."""
  length_B = lengths(rows, longest, factor(case))
  column_T = np.arange(longest)
  shortest_P = length_B.reshape(-1, GROUP).min(1)
  prompt_B = np.repeat(np.maximum((prompt * shortest_P).astype(int), 1), GROUP)
  loss_mask_BT = (column_T >= prompt_B[:, None]) & (column_T < length_B[:, None])
  tokens_BT = np.random.default_rng(0).integers(0, vocab, (rows, longest))
  first_BT = np.repeat(tokens_BT[::GROUP], GROUP, axis=0)
  tokens_BT = np.where(column_T < prompt_B[:, None], first_BT, tokens_BT)
  adv_B = np.where(np.arange(rows) % 2, -1.0, 1.0)
  if case.endswith('-quarter'):
    adv_B *= np.arange(rows) // GROUP % 4 == 0
  # Those of random weights: ratios close to one.
  logp_BT = np.where(loss_mask_BT, -np.log(vocab), 0)
  return Batch(
    tokens_BT=jnp.asarray(
      np.where(column_T < length_B[:, None], tokens_BT, 0), jnp.int32
    ),
    loss_mask_BT=jnp.asarray(loss_mask_BT),
    behavior_logp_BT=jnp.asarray(logp_BT, jnp.float32),
    prox_BT=jnp.asarray(logp_BT, jnp.float32),
    adv_BT=jnp.broadcast_to(jnp.float32(adv_B)[:, None], loss_mask_BT.shape),
    source_B=jnp.zeros(rows, jnp.int32),
    on_policy_BT=jnp.asarray(loss_mask_BT),
  )


def config_of(rows: int, longest: int, side: str, prompt: float = 0.25) -> Config:
  """One update on all rows, GRPO's loss."""
  pack = side != 'padded'
  prompts = int(prompt * longest)
  pieces = 8 if pack else 1
  unit = packing.Unit()
  if side == 'shared':
    unit, _ = packing.fastest_unit(
      SPEC, rows, longest, pieces, 1, group_size=GROUP, response=longest - prompts
    )
  return Config().with_values(
    prompts={'count': rows // GROUP, 'max_prompt_tokens': prompts},
    sampler={'group_size': GROUP, 'max_new_tokens': longest - prompts},
    clip={'rule': 'fixed'},
    # The best of each: padded in one piece, packed in pieces, few of them part empty.
    learner={
      'minibatches': 1,
      'pack': pack,
      'grad_accum_steps': pieces,
      'share_prompts': unit.rows,
    },
    optimizer={'lr': 1e-6, 'warmup': 0},
  )


def updater(
  config: Config, spec: transformer.ModelSpec, schedule: Schedule
) -> Callable[[Batch], float]:
  """Returns a function that runs one update to its end and returns the seconds."""
  train_step = build.make_train_step(config, spec, schedule)
  params = transformer.init(spec, jax.random.key(0))
  opt = jax.jit(build.optimizer(config).init)(params)

  def update(batch: Batch) -> float:
    nonlocal params, opt
    begun = time.perf_counter()
    params, opt, *_ = jax.block_until_ready(train_step(params, opt, batch))
    return time.perf_counter() - begun

  return update


def main() -> None:
  """Prints the table and the JSON line."""
  args = parse()
  spec = resolve.with_kernels(SPEC, jax.default_backend())
  updates = {
    side: updater(
      config_of(args.rows, args.length, side, args.prompt), spec, Schedule(remat='dots')
    )
    for side in SIDES
  }
  print(
    f'{"case":13}{"GFLOP/s":>8}{"mean:longest":>13}{"padded tokens/s":>17}'
    f'{"packed":>9}{"times":>7}{"shared":>9}{"times packed":>14}'
    f'{"fraction padded":>17}{"packed":>8}'
  )
  result = {}
  for case in args.cases.split(','):
    batch = example(args.rows, args.length, case, prompt=args.prompt)
    seconds, products = {side: [] for side in SIDES}, []
    for i in range(args.rounds + 1):
      for side, update in updates.items():
        products.append(machine.gemm_rate(times=3))
        took = update(batch)
        if i:  # the first compiles
          seconds[side].append(took)
    useful = rates.teaching(batch)
    tokens, flops = int(useful.response_R.sum()), rates.useful_flops(SPEC, [useful])
    gemm = statistics.median(products)
    row = {'gemm_gflops': round(gemm / 1e9, 1)}
    for side, each in seconds.items():
      row[f'{side}_tps'] = round(tokens / statistics.median(each), 1)
      if side != 'shared':  # which does not repeat the prompts that `flops` counts
        row[f'{side}_fraction'] = round(flops / statistics.median(each) / gemm, 4)
    result[case] = row
    mean = float(lengths(args.rows, args.length, factor(case)).mean())
    print(
      f'{case:13}{gemm / 1e9:8.0f}{f"1:{args.length / mean:.2f}":>13}'
      f'{row["padded_tps"]:17.1f}{row["packed_tps"]:9.1f}'
      f'{row["packed_tps"] / row["padded_tps"]:7.2f}{row["shared_tps"]:9.1f}'
      f'{row["shared_tps"] / row["packed_tps"]:14.2f}'
      f'{row["padded_fraction"]:17.3f}{row["packed_fraction"]:8.3f}',
      flush=True,
    )
  print(json.dumps(result))


if __name__ == '__main__':
  main()
