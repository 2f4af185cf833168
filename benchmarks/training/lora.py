"""Compares adapters with training all weights: peak memory and seconds per update.

  python -m benchmarks.training.lora [--model=DIR] [--data=sums.jsonl] [--rank=16]
      [--steps=2] [--rounds=1] [--workdir=DIR]

The step of `rl_step` on SmolLM2-135M-Instruct: 8 x 8 responses of at most 20 tokens, 4
updates, products in float32. Each way is a process of its own, one after the other:

  full      float32 weights, AdamW on all of them
  float32   adapters of --rank on all projections, frozen weights in float32
  bfloat16  the same, frozen weights in bfloat16 (model.dtype)

A process makes --steps steps after one that compiles, no evaluation, no checkpoint.
`peak` is the largest resident size of the process, what Python, JAX and the compiler
need included; `steps` that of the steps alone, once all is compiled, where the system
tells (Linux); `before` the size once the packages are imported. `update_s` is the
median of an update of the counted steps. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.training import our_step, rl_step

CASE = 'SmolLM2-135M'
COLUMNS = ('before', 'peak', 'of full', 'steps', 'update_s', 'step_s')


def ways(rank: int) -> dict[str, list[str]]:
  """Returns the overrides of each way."""
  adapters = f'--config.lora.rank={rank}'
  return {
    'full': [],
    'float32': [adapters],
    'bfloat16': [adapters, '--config.model.dtype=bfloat16'],
  }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """The arguments."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='models/SmolLM2-135M-Instruct')
  parser.add_argument('--data', default='sums.jsonl')
  parser.add_argument('--rank', type=int, default=16)
  parser.add_argument('--steps', type=int, default=2)
  parser.add_argument('--rounds', type=int, default=1)
  parser.add_argument('--workdir', default='runs/lora')
  parser.add_argument('--way', default='', help='measures this way in this process')
  return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, float]:
  """Measures one way in this process."""
  from bapo_jax import main as command_line
  from bapo_jax.run import experiment
  from bapo_jax.runtime import machine
  from bapo_jax.runtime.progress import PhaseTimer
  from bapo_jax.training import build

  before = machine.peak_rss()
  given = rl_step.overrides(CASE, args) + ways(args.rank)[args.way]
  config = command_line.read_config('configs/aime.py', given)
  os.makedirs(args.workdir, exist_ok=True)
  t, s = build.start(config, PhaseTimer())
  try:
    t = experiment.compiled(t, s)
    most = machine.peak_rss()
    with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
      file.write('5')  # the peak is counted from now on
    steps, phases, *_ = our_step.steps_of(t, s)
  finally:
    t.verifier.close()
  updates = [phase.get('update', 0.0) for phase in phases]
  return {
    'before': before / 2**20,
    'peak': max(most, machine.peak_rss()) / 2**20,
    'steps': machine.peak_rss() / 2**20,
    'update_s': statistics.median(updates) / config.updates_per_step,
    'step_s': statistics.median(steps),
  }


def run(way: str, args: argparse.Namespace) -> dict[str, Any]:
  """Measures one way in a process that has ended when this returns.

  Raises:
    subprocess.CalledProcessError: the process failed.
  """
  command = [sys.executable, '-m', 'benchmarks.training.lora', f'--way={way}']
  command += [
    f'--{name}={value}' for name, value in vars(args).items() if name != 'way'
  ]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  """Prints the table and the JSON line."""
  args = parse()
  if args.way:
    print(json.dumps(measure(args)))
    return
  found: dict[str, list[dict]] = {way: [] for way in ways(args.rank)}
  for _ in range(args.rounds):
    for way, rows in found.items():
      rows.append(run(way, args))
  result: dict[str, dict[str, float]] = {}
  print(f'{"MiB, s":10}' + ''.join(f'{name:>11}' for name in COLUMNS))
  for way, rows in found.items():
    row = {name: statistics.median(r[name] for r in rows) for name in rows[0]}
    result[way] = row
    row['of full'] = row['peak'] / result['full']['peak']
    print(f'{way:10}' + ''.join(f'{row[name]:11.4g}' for name in COLUMNS))
  print(json.dumps(result))


if __name__ == '__main__':
  main()
