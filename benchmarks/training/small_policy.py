"""Times runs of the embedded policy on one core, with and without small micro-batches.

  python -m benchmarks.training.small_policy [--seeds=100,101,102]
      [--arm=balanced] [--steps=5] [--config.<knob>=value ...]

The setting is the bench's S1: 128 prompts x 8 responses, at most 60 tokens, 4
minibatches x 4 epochs. `whole` computes a minibatch at once, as the experiments of both
papers do; `split` adds SPLIT. Every run is a process on one core, with its own warm
start; the variants take turns. Seconds are processor time of all threads, so other
processes disturb them less than wall time. The first step and the warm start are not
counted, and nothing is evaluated.

`difference` compares a seed's two runs after the first step, of 16 updates on the same
responses: the largest difference of a weight beside the largest weight of its array.
Sums in another order round differently, so that later steps sample other tokens;
`accuracy` is the mean of the counted steps. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from bapo_jax.run import experiment
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build
from bapo_jax.training.config import OVERRIDE, Config, merged, overrides
from bapo_jax.training.trainer import train_loop
from lab import experiments

S1 = {
  'prompts.count': 128,
  'sampler.max_new_tokens': 60,
  'learner.minibatches': 4,
  'learner.epochs': 4,
  'optimizer.lr': 6e-4,
}
# The arrays of a micro-batch of 8 rows fit a core's cache, and to compute its layers
# again costs less than to read them back from memory.
SPLIT = {
  'learner.grad_accum_steps': 32,
  'learner.bounds_pass': 'stored',
  'model.remat': 'full',
}
VARIANTS: dict[str, dict[str, Any]] = {'whole': {}, 'split': SPLIT}
SKIPPED = 1  # steps at the start that are not counted: they compile


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
  """Returns (arguments, overrides).

  Raises:
    SystemExit: an argument is unknown.
  """
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', default='100,101,102')
  parser.add_argument('--arm', default='balanced', help='of papers/balanced_po')
  parser.add_argument('--steps', type=int, default=5)
  parser.add_argument('--only', default='', help='VARIANT:FOLDER, in this process')
  given = [arg for arg in argv if OVERRIDE.fullmatch(arg)]
  return parser.parse_args([arg for arg in argv if arg not in given]), given


def config_of(variant: str, args: argparse.Namespace, given: list[str]) -> Config:
  """Returns the config of a run; overrides take precedence over S1 and the variant."""
  main = experiments.load('papers/balanced_po/experiments.py:main')
  values = merged(main.values, S1 | {'steps': SKIPPED + args.steps})
  values = merged(merged(values, VARIANTS[variant]), overrides(given))
  arms = {variant: main.arms[args.arm]}
  made = experiments.Experiment(values, arms, (int(args.seeds),))
  (run,) = experiments.runs(made).values()
  return run.config


def measure(config: Config, folder: str) -> dict[str, Any]:
  """Runs a config in this process, and writes the weights after the first step.

  Returns:
    medians over the counted steps of the processor seconds of a step and of its phases;
    responses per processor second; the mean accuracy.
  """
  machine.hold_freed_memory()  # as a run does
  timer = PhaseTimer(time.process_time)
  t, s = build.start(config, timer)
  seconds, accuracy = list[dict[str, float]](), []
  try:
    t = experiment.compiled(t, s)
    timer.since()
    for state, row, _ in train_loop(t, s):
      seconds.append(timer.since())
      accuracy.append(row['rollout/accuracy'])
      if state.step == 1:
        np.savez(f'{folder}/weights.npz', *jax.tree.leaves(state.params))
  finally:
    t.verifier.close()
  counted = seconds[SKIPPED:]
  medians = {
    name: statistics.median(phases.get(name, 0.0) for phases in counted)
    for name in ('sample', 'update')
  }
  step = statistics.median(sum(phases.values()) for phases in counted)
  responses = config.prompts.count * config.sampler.group_size
  figures = {'step': step, 'responses_per_s': responses / step}
  return figures | medians | {'accuracy': statistics.mean(accuracy[SKIPPED:])}


def difference(folders: list[str]) -> float:
  """Returns the largest relative difference of the weights of two runs."""

  def weights(folder: str) -> list[np.ndarray]:
    with np.load(f'{folder}/weights.npz') as file:
      return [file[name] for name in file.files]

  pairs = zip(*map(weights, folders), strict=True)
  return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def main() -> None:
  """Prints a row per run and the JSON line."""
  args, given = parse()
  if args.only:
    variant, _, folder = args.only.partition(':')
    if hasattr(os, 'sched_setaffinity'):
      os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(measure(config_of(variant, args, given), folder)))
    return
  table: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
  with tempfile.TemporaryDirectory() as scratch:
    for i, seed in enumerate(args.seeds.split(',')):
      folders = {variant: f'{scratch}/{seed}-{variant}' for variant in VARIANTS}
      for variant in [*VARIANTS][:: -1 if i % 2 else 1]:
        os.makedirs(folders[variant])
        command = [sys.executable, '-m', 'benchmarks.training.small_policy', *given]
        command += [f'--only={variant}:{folders[variant]}', f'--seeds={seed}']
        command += [f'--arm={args.arm}', f'--steps={args.steps}']
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        row = json.loads(done.stdout.splitlines()[-1])
        table[variant].append(row)
        figures = ' '.join(f'{name} {value:.4g}' for name, value in row.items())
        print(f'seed {seed} {variant:5} {figures}', flush=True)
      table['split'][-1]['difference'] = difference([*folders.values()])
      print(f'seed {seed} difference {table["split"][-1]["difference"]:.2g}')
  rates = [statistics.median(x['responses_per_s'] for x in table[v]) for v in VARIANTS]
  print(json.dumps(table | {'times': round(rates[1] / rates[0], 3)}))


if __name__ == '__main__':
  main()
