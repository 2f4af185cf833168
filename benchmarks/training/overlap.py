"""Times sampling beside training against the same schedule in turn, on two cores.

  python -m benchmarks.training.overlap [--steps=12] [--config.<knob>=value ...]

All runs have rollout.depth=1 and compute the same numbers. `in turn` samples and trains
on one device, alone on one core: its seconds of sampling and of the rest are the cost
of each side. `beside` has two devices of one process and both cores, and XLA computes
every program with one thread, so that each side has about one core. `remote` has two
processes, each with one device and its own core. The first two steps are not counted:
they compile.

`ratio` is the time of a step over the slower side of `in turn`: 1 is a perfect overlap,
2 none at all if both sides cost the same. Idle cores are needed. The last line is one
JSON object.
"""

import argparse
import glob
import json
import os
import shutil
import socket
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


def run(variant: str, folder: str, steps: int, given: list[str]) -> list[metrics.Row]:
  """Trains in processes of their own; returns the metrics of the counted steps.

  Takes the warm start from another variant in `folder`, if there is one.
  """
  cores, workdir = sorted(os.sched_getaffinity(0))[:2], os.path.join(folder, variant)
  apart = [[core] for core in cores]
  places = {'in_turn': apart[:1], 'beside': [cores], 'remote': apart}[variant]
  devices = 1 + (variant == 'beside')
  flags = f'--xla_force_host_platform_device_count={devices}'
  flags += ' --xla_cpu_multi_thread_eigen=false'
  for source in glob.glob(f'{glob.escape(folder)}/*/warmstart'):
    shutil.copytree(source, os.path.join(workdir, 'warmstart'), dirs_exist_ok=True)
  command = [sys.executable, '-m', 'bapo_jax.main', f'--workdir={workdir}']
  command += ['--config=configs/async.py' + ':beside' * (variant != 'in_turn')]
  command += [f'--config.{knob}' for knob in (f'steps={steps + SKIPPED}', *QUIET)]
  started = [
    subprocess.Popen(
      ['taskset', '-c', ','.join(map(str, place)), *command, *joined, *given],
      stdout=subprocess.DEVNULL,
      env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    )
    for place, joined in zip(places, addresses(len(places)), strict=True)
  ]
  if any([process.wait() for process in started]):
    raise RuntimeError(f'the run `{variant}` failed')
  return [row for row in metrics.read(workdir) if row['step'] > SKIPPED]


def addresses(count: int) -> list[list[str]]:
  """Returns the flags by which so many processes of this machine join each other."""
  if count == 1:
    return [[]]
  with socket.create_server(('127.0.0.1', 0)) as server:
    at = f'--coordinator=127.0.0.1:{server.getsockname()[1]}'
  return [[at, f'--process={i}', f'--processes={count}'] for i in range(count)]


def median(rows: list[metrics.Row], *names: str) -> float:
  """Returns the median over steps of the sum of some metrics."""
  return statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)


def measure(folder: str, steps: int, given: list[str]) -> dict[str, Any]:
  """Runs all variants; returns the figures of the JSON object."""
  turn = run('in_turn', folder, steps, given)
  step, sampling = median(turn, 'time/step'), median(turn, *SAMPLING)
  sides = {'sampling': sampling, 'training': step - sampling}
  found: dict[str, Any] = {'in_turn': {'step': step} | sides}
  for variant in ('beside', 'remote'):
    rows = run(variant, folder, steps, given)
    together = median(rows, 'time/step')
    found[variant] = {
      'step': together,
      'ratio': together / max(sides.values()),
      'speedup': step / together,
      'sampler_idle': median(rows, 'overlap/sampler_idle'),
      'learner_idle': median(rows, 'overlap/learner_idle'),
      'send': median(rows, 'time/send'),
      'receive': median(rows, 'time/receive'),
    }
  return found | {'processor': machine.processor()}


def main() -> None:
  """Prints a table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=12)
  given = [arg for arg in sys.argv[1:] if OVERRIDE.fullmatch(arg)]
  args = parser.parse_args([arg for arg in sys.argv[1:] if arg not in given])
  with tempfile.TemporaryDirectory() as folder:
    found = measure(folder, args.steps, given)
  for name in ('in_turn', 'beside', 'remote'):
    figures = '  '.join(f'{key} {value:.3f}' for key, value in found[name].items())
    print(f'{name.replace("_", " "):10} {figures}')
  print(json.dumps(found))


if __name__ == '__main__':
  main()
