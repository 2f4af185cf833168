"""Times sampling beside training against the same schedule in turn, on two cores.

  python -m benchmarks.training.overlap [--rounds=12] [--config.<knob>=value ...]

All runs have rollout.depth=1 and compute the same numbers. `in turn` samples and trains
on one device, alone on one core: its seconds of sampling and of the rest are the cost
of each side. `beside` has two devices of one process and both cores, and XLA computes
every program with one thread, so that each side has about one core. `remote` has two
processes, each with one device and its own core.

The speed of a shared machine drifts by a third within minutes, so the three runs take
turns of a few steps, while the others are stopped. `ratio` is the time of a step over
the slower side of `in turn`, both medians of one round; the figures are medians over
the rounds, with the quartiles of the ratio. 1 is a perfect overlap, 2 none at all if
both sides cost the same. Idle cores are needed. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from bapo_jax.runtime import machine, metrics
from bapo_jax.training.config import OVERRIDE

VARIANTS = ('in_turn', 'beside', 'remote')
COMPILING = 3  # steps before the first round
TURN = 3  # steps of a turn; the first is not counted: it contains the stop
# Of a round. `remote` stops for one turn at a time: its processes lose each other after
# 10 s without a heartbeat.
TURNS = ('in_turn', 'remote', 'beside', 'remote')
SAMPLING = ('time/sample', 'time/verify', 'time/score')
QUIET = ('evaluate.every=9999', 'checkpoint.every=9999', 'metrics.tensorboard=False')


class Run:
  """A run in processes of their own, of which it can stop and continue all."""

  def __init__(self, variant: str, folder: str, given: list[str]):
    """Starts it."""
    cores, self.workdir = sorted(os.sched_getaffinity(0))[:2], f'{folder}/{variant}'
    apart = [[core] for core in cores]
    places = {'in_turn': apart[:1], 'beside': [cores], 'remote': apart}[variant]
    flags = f'--xla_force_host_platform_device_count={1 + (variant == "beside")}'
    flags += ' --xla_cpu_multi_thread_eigen=false'
    command = [sys.executable, '-m', 'bapo_jax.main', f'--workdir={self.workdir}']
    command += ['--config=configs/async.py' + ':beside' * (variant != 'in_turn')]
    command += [f'--config.{knob}' for knob in ('steps=9999', *QUIET)]
    self.processes = [
      subprocess.Popen(
        ['taskset', '-c', ','.join(map(str, place)), *command, *joined, *given],
        stdout=subprocess.DEVNULL,
        env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
      )
      for place, joined in zip(places, addresses(len(places)), strict=True)
    ]
    self.seen = 0

  def send(self, number: signal.Signals) -> None:
    """Sends a signal to every process."""
    for process in self.processes:
      process.send_signal(number)

  def take(self, count: int) -> list[metrics.Row]:
    """Continues until `count` more steps are recorded; returns their metrics."""
    self.send(signal.SIGCONT)
    while len(rows := metrics.read(self.workdir)) < self.seen + count:
      if any(process.poll() is not None for process in self.processes):
        raise RuntimeError(f'the run in {self.workdir} failed')
      time.sleep(0.05)
    self.send(signal.SIGSTOP)
    new = rows[self.seen : self.seen + count]
    self.seen = len(metrics.read(self.workdir))  # one may have come since
    return new


@contextlib.contextmanager
def started(folder: str, given: list[str]) -> Iterator[dict[str, Run]]:
  """Yields the run of each variant, stopped after its first steps."""
  runs: dict[str, Run] = {}
  try:
    for variant in VARIANTS:
      runs[variant] = Run(variant, folder, given)
      runs[variant].take(COMPILING)
    yield runs
  finally:
    for process in [process for run in runs.values() for process in run.processes]:
      process.kill()
      process.wait()


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


def turns(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
  """Gives every run its turn; returns the figures of this round."""
  rows: dict[str, list[metrics.Row]] = {variant: [] for variant in VARIANTS}
  for variant in TURNS:
    rows[variant] += runs[variant].take(TURN)[1:]
  step = {variant: median(rows[variant], 'time/step') for variant in rows}
  sampling = median(rows['in_turn'], *SAMPLING)
  sides = {'sampling': sampling, 'training': step['in_turn'] - sampling}
  found = {'in_turn': {'step': step['in_turn']} | sides}
  for variant in VARIANTS[1:]:
    found[variant] = {
      'step': step[variant],
      'ratio': step[variant] / max(sides.values()),
      'speedup': step['in_turn'] / step[variant],
      'sampler_idle': median(rows[variant], 'overlap/sampler_idle'),
      'learner_idle': median(rows[variant], 'overlap/learner_idle'),
      'send': median(rows[variant], 'time/send'),
      'receive': median(rows[variant], 'time/receive'),
    }
  return found


def measure(folder: str, rounds: int, given: list[str]) -> dict[str, Any]:
  """Runs all variants in turn; returns the figures of the JSON object."""
  with started(folder, given) as runs:
    found = [turns(runs) for _ in range(rounds)]
  figures: dict[str, Any] = {
    variant: {
      name: statistics.median(round_[variant][name] for round_ in found)
      for name in found[0][variant]
    }
    for variant in VARIANTS
  }
  for variant in VARIANTS[1:]:
    ratios = [round_[variant]['ratio'] for round_ in found]
    figures[variant]['quartiles'] = statistics.quantiles(ratios)[::2]
  return figures | {'rounds': rounds, 'processor': machine.processor()}


def main() -> None:
  """Prints a table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=12)
  given = [arg for arg in sys.argv[1:] if OVERRIDE.fullmatch(arg)]
  args = parser.parse_args([arg for arg in sys.argv[1:] if arg not in given])
  with tempfile.TemporaryDirectory() as folder:
    found = measure(folder, args.rounds, given)
  for name in VARIANTS:
    low, high = found[name].get('quartiles', (0.0, 0.0))
    figures = {key: x for key, x in found[name].items() if key != 'quartiles'}
    words = '  '.join(f'{key} {value:.3f}' for key, value in figures.items())
    spread = f'  ratio from {low:.3f} to {high:.3f}' if high else ''
    print(f'{name.replace("_", " "):10} {words}{spread}')
  print(json.dumps(found))


if __name__ == '__main__':
  main()
