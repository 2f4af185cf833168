"""Measures the share of bfloat16 weights that optimiser updates change.

  python -m benchmarks.training.changed_weights [--model=DIR] [--data=sums.jsonl]
      [--steps=2] [--rates=1e-6,2e-6] [--runs=embedded,stored,published]
      [--workdir=DIR] [overrides]

The learner's weights are float32, and an actor of `model.compute=bfloat16` has their
casts. A small update leaves most casts unchanged, so a sync could send the changed
weights alone. Nothing is sent here:

1. a process per run and learning rate trains with the step of `rl_step`, --steps steps
   and one more;
2. `watch` compares the casts, bit by bit, after 1, 2, 4 and 8 updates with those before
   the first, and begins again: the rows of the table;
3. `sizes` counts the bytes of three sparse formats as shares of the whole actor.

Runs: `embedded` is the embedded default after its warm start, at its own rate. The
other two are the model of --model on the problems of --data, at each of --rates, from
its weights as they are (`stored`), or rounded to bfloat16 first (`published`), as most
models are published: such weights start in the middle between two boundaries of
rounding. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bapo_jax.types import Tree
from benchmarks.training import rl_step

RUNS = {'embedded': 'embedded', 'stored': 'SmolLM2-135M', 'published': 'SmolLM2-135M'}
# At temperature 1 nearly all answers of the model are wrong, and a minibatch of two
# groups mostly has no gradient. configs/aime.py:7b has eight updates per step, too.
OF_MODEL = ('sampler.temperature=0.6', 'prompts.count=16', 'learner.epochs=2')
AFTER = (1, 2, 4, 8)  # updates between two compared casts
WEIGHT = 2  # bytes of a weight in bfloat16
# Format -> (bytes per changed weight, bytes per weight of the model).
FORMATS = {
  'index': (4 + WEIGHT, 0.0),  # in the whole model
  'offset': (2 + WEIGHT, 0.0),  # in a block of 2^16 weights; its counts are neglected
  'mask': (WEIGHT, 1 / 8),  # a bit per weight
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the arguments; `overrides` are the others."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='models/SmolLM2-135M-Instruct')
  parser.add_argument('--data', default='sums.jsonl')
  parser.add_argument('--steps', type=int, default=2)
  parser.add_argument('--rates', default='1e-6,2e-6')
  parser.add_argument('--runs', default=','.join(RUNS))
  parser.add_argument('--workdir', default='runs/changed_weights')
  parser.add_argument('--one', default='', help='measures this run in this process')
  args, args.overrides = parser.parse_known_args(argv)
  return args


def sizes(share: float) -> dict[str, float]:
  """Returns the bytes of each format as a share of the whole actor's.

  Args:
    share: share of the weights that changed.
  """
  return {name: (a * share + b) / WEIGHT for name, (a, b) in FORMATS.items()}


def break_even() -> dict[str, float]:
  """Returns the share of changed weights at which each format is as large as all."""
  return {name: (WEIGHT - b) / a for name, (a, b) in FORMATS.items()}


@jax.jit
def cast(params: Tree) -> Tree:
  """Casts the weights as for an actor; the result survives their donation."""
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


@jax.jit
def changed(before: Tree, params: Tree) -> jax.Array:
  """Returns the share of the weights whose cast differs in any bit from `before`."""

  def count(old: jax.Array, new: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
    return (bits != jax.lax.bitcast_convert_type(old, jnp.uint16)).sum()

  counts = jnp.stack(jax.tree.leaves(jax.tree.map(count, before, params)))
  total = sum(x.size for x in jax.tree.leaves(params))
  return counts.astype(jnp.float32).sum() / total


def watch(
  train_step: Callable[..., Any], params: Tree, windows: list[dict[str, float]]
) -> Callable[..., Any]:
  """Wraps a train step; appends to `windows` the shares after AFTER updates.

  Args:
    params: the weights before the first update.
  """
  before, updates = cast(params), 0

  def step(*args: Any, **kwargs: Any) -> Any:
    nonlocal before, updates
    done = train_step(*args, **kwargs)
    n = updates % AFTER[-1] + 1
    if n == 1:
      windows.append({'before': updates})
    updates += 1
    if n in AFTER:
      windows[-1][f'after {n}'] = float(changed(before, done[0]))
    if n == AFTER[-1]:
      before = cast(done[0])
    return done

  return step


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Measures one run in this process; returns its windows and the accuracy."""
  import dataclasses

  from bapo_jax import main as command_line
  from bapo_jax.run import experiment
  from bapo_jax.runtime.progress import PhaseTimer
  from bapo_jax.training import build
  from bapo_jax.training.trainer import train_loop

  os.makedirs(args.workdir, exist_ok=True)
  given = rl_step.overrides(RUNS[args.one], args)
  if args.one != 'embedded':
    given += [f'--config.{value}' for value in OF_MODEL]
  config = command_line.read_config('configs/aime.py', given + args.overrides)
  t, s = build.start(config, args.workdir, PhaseTimer())
  if args.one == 'published':
    s = s.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), cast(s.params)))
  windows: list[dict[str, float]] = []
  try:
    t = experiment.compiled(t, s)
    t = dataclasses.replace(t, train_step=watch(t.train_step, s.params, windows))
    rows = [row for _, row, _ in train_loop(t, s)]
  finally:
    t.verifier.close()
  return {
    'rate': config.optimizer.lr,
    'weights': sum(x.size for x in jax.tree.leaves(s.params)),
    'learnable': [row['batch/learnable'] for row in rows],
    'windows': [w for w in windows if len(w) == 1 + len(AFTER)],
  }


def run(name: str, rate: str, args: argparse.Namespace) -> dict[str, Any]:
  """Measures one run in a process that has ended when this returns.

  Raises:
    subprocess.CalledProcessError: the process failed.
  """
  command = [sys.executable, '-m', 'benchmarks.training.changed_weights']
  command += [f'--one={name}', f'--steps={args.steps}', f'--workdir={args.workdir}']
  command += [f'--model={args.model}', f'--data={args.data}', *args.overrides]
  command += [f'--config.optimizer.lr={rate}'] if rate else []
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
  return json.loads(done.stdout.splitlines()[-1])


def line(name: str, rate: float, window: dict[str, float]) -> str:
  """Formats a row of the table."""
  shares = ''.join(f'{window[f"after {n}"]:12.3%}' for n in AFTER)
  bytes_ = ''.join(f'{x:12.1%}' for x in sizes(window[f'after {AFTER[-1]}']).values())
  return f'{name:12}{rate:10.3g}{window["before"]:9.0f}{shares}{bytes_}'


def main() -> None:
  """Prints the table and the JSON line."""
  args = parse()
  if args.one:
    print(json.dumps(measure(args)))
    return
  heads = [f'{n} updates' for n in AFTER] + list(FORMATS)
  print(f'{"run":12}{"rate":>10}{"before":>9}' + ''.join(f'{x:>12}' for x in heads))
  result: dict[str, Any] = {'break_even': break_even(), 'runs': []}
  for name in args.runs.split(','):
    if reason := rl_step.lacking(RUNS[name], args):
      print(f'{name} is left out: {reason}')
      continue
    # The embedded default has the rate of `rl_step`, which is its own.
    for rate in [''] if name == 'embedded' else args.rates.split(','):
      found = run(name, rate, args)
      result['runs'].append({'run': name} | found)
      for window in found['windows']:
        print(line(name, found['rate'], window), flush=True)
  print(f'bytes are shares of the whole actor after {AFTER[-1]} updates')
  print(json.dumps(result))


if __name__ == '__main__':
  main()
