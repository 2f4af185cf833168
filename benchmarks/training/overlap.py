"""Times sampling beside training against the same schedule in turn, on two cores.

  python -m benchmarks.training.overlap [--steps=12] [--config.<knob>=value ...]

Both runs have rollout.depth=1 and compute the same numbers. `in turn` samples and
trains on one device, alone on one core: its seconds of sampling and of the rest are the
cost of each side. `beside` has two devices and both cores, and XLA computes every
program with one thread, so that each side has about one core. The first two steps are
not counted: they compile.

`ratio` is the time of a step of `beside` over the slower side of `in turn`: 1 is a
perfect overlap, 2 none at all if both sides cost the same. Idle cores are needed. The
last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from bapo_jax.runtime import machine, metrics
from bapo_jax.training.config import OVERRIDE

SKIPPED = 2
SAMPLING = ('time/sample', 'time/verify', 'time/score')
QUIET = ('evaluate.every=9999', 'checkpoint.every=9999', 'metrics.tensorboard=False')


def run(variant: str, steps: int, given: list[str]) -> list[metrics.Row]:
  """Trains in a process of its own; returns the metrics of the counted steps."""
  beside, cores = variant == 'beside', sorted(os.sched_getaffinity(0))
  flags = f'--xla_force_host_platform_device_count={1 + beside}'
  flags += ' --xla_cpu_multi_thread_eigen=false'
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, '-m', 'bapo_jax.main', f'--workdir={workdir}/run']
    command += ['--config=configs/async.py' + ':beside' * beside]
    command += [f'--config.{knob}' for knob in (f'steps={steps + SKIPPED}', *QUIET)]
    subprocess.run(
      command + given,
      check=True,
      stdout=subprocess.DEVNULL,
      env=os.environ | {'XLA_FLAGS': flags},
      preexec_fn=lambda: os.sched_setaffinity(0, cores[: 1 + beside]),
    )
    return [row for row in metrics.read(f'{workdir}/run') if row['step'] > SKIPPED]


def median(rows: list[metrics.Row], *names: str) -> float:
  """Returns the median over steps of the sum of some metrics."""
  return statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)


def measure(steps: int, given: list[str]) -> dict[str, Any]:
  """Runs both variants; returns the figures of the JSON object."""
  turn, beside = (run(variant, steps, given) for variant in ('in turn', 'beside'))
  step, sampling = median(turn, 'time/step'), median(turn, *SAMPLING)
  sides = {'sampling': sampling, 'training': step - sampling}
  together = median(beside, 'time/step')
  return {
    'in_turn': {'step': step} | sides,
    'beside': {
      'step': together,
      'sampler_idle': median(beside, 'overlap/sampler_idle'),
      'learner_idle': median(beside, 'overlap/learner_idle'),
      'send': median(beside, 'time/send'),
      'receive': median(beside, 'time/receive'),
    },
    'ratio': together / max(sides.values()),
    'speedup': step / together,
    'processor': machine.processor(),
  }


def main() -> None:
  """Prints a table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=12)
  given = [arg for arg in sys.argv[1:] if OVERRIDE.fullmatch(arg)]
  args = parser.parse_args([arg for arg in sys.argv[1:] if arg not in given])
  found = measure(args.steps, given)
  for name in ('in_turn', 'beside'):
    figures = '  '.join(f'{key} {value:.3f}' for key, value in found[name].items())
    print(f'{name.replace("_", " "):8} {figures}')
  print(json.dumps(found))


if __name__ == '__main__':
  main()
