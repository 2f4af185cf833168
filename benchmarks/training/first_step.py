"""Measures the time from the command to the first step of the main job.

  python -m benchmarks.training.first_step [overrides]

Runs `configs/aime.py` twice in new workdirs with a new cache, both up to the line of
the first step: first with the default knobs, then with the overrides. Prints the wall
time and the processor time of both, and the load of the machine, which slows both; the
last line is JSON.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

STEP = re.compile(r' *1/\d+ ')  # the start of the line of the first step


def measure(overrides: list[str], workdir: str) -> dict[str, float]:
  """Runs up to the first step; returns its seconds of wall and processor time.

  Raises:
    RuntimeError: the run ended before its first step.
  """
  command = [sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py']
  command += [f'--workdir={workdir}', *overrides]
  environment = {k: x for k, x in os.environ.items() if 'COMPILATION_CACHE' not in k}
  pipes: dict[str, Any] = {'stdout': subprocess.PIPE, 'text': True, 'env': environment}
  began, before = time.perf_counter(), os.times()
  with subprocess.Popen(command, **pipes) as process:
    assert process.stdout
    found = any(STEP.match(line) for line in process.stdout)
    wall = time.perf_counter() - began
    process.send_signal(signal.SIGKILL)
  if not found:
    raise RuntimeError(f'{" ".join(command)} ended before its first step')
  after = os.times()  # of children that have ended
  spent = (after.children_user, after.children_system)
  earlier = (before.children_user, before.children_system)
  return {'wall_s': wall, 'processor_s': sum(spent) - sum(earlier)}


def main() -> None:
  """Prints a line per run, and all of them as JSON."""
  runs = {}
  with tempfile.TemporaryDirectory() as scratch:
    shared = f'--config.cache={scratch}/cache'
    for name, overrides in (('first', []), ('second', sys.argv[1:])):
      found = measure([shared, *overrides], f'{scratch}/{name}')
      found['load'] = os.getloadavg()[0]
      runs[name] = {key: round(value, 1) for key, value in found.items()}
      print(f'{name:6}', *(f'{k} {x}' for k, x in runs[name].items()), flush=True)
  print(json.dumps(runs))


if __name__ == '__main__':
  main()
