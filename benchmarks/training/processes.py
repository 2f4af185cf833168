"""Times a learner step in one process and in several, with the same devices.

  python -m benchmarks.training.processes [--devices=4] [--of=1,2] [--rounds=2]
      [--steps=8] [--workdir=runs/processes] [overrides]

The embedded default after a short warm start, on `devices` virtual devices of this
machine, in as many processes as --of says, by launch/processes.sh; they take turns,
`rounds` times. The first step, which waits for what others compile, and evaluations are
left out; a figure is the median of the steps of all rounds. All ways must end with the
same responses and verdicts. Under the table stand the milliseconds of one collective in
each way, and how many collectives the compiled programs have: their product is at least
what a step in several processes takes longer. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from bapo_jax.runtime import metrics

COLLECTIVES = 'benchmarks.training.collectives'
SHORT = [
  '--config.sft.clean=60',
  '--config.sft.noisy=5',
  '--config.evaluate.every=1000',
]


def launched(processes: int, devices: int, main: str, flags: list[str]) -> str:
  """The output of so many processes of a program, each line with its process."""
  command = ['launch/processes.sh', str(processes), f'--devices={devices}']
  return subprocess.run(
    [*command, '--restarts=0', *flags],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHON': sys.executable, 'JAX_PLATFORMS': 'cpu', 'MAIN': main},
  ).stdout


def collectives(processes: int, devices: int, given: list[str]) -> dict:
  """What benchmarks.training.collectives finds; counts are those of one process."""
  flags = given if processes > 1 else [*given, '--count']
  lines = launched(processes, devices, COLLECTIVES, flags).splitlines()
  return json.loads(
    next(s for s in lines if s.startswith('[0] {')).removeprefix('[0] ')
  )


def run(processes: int, args: argparse.Namespace, workdir: str, given: list) -> list:
  """Returns the metric rows of one run, by step."""
  flags = ['--config=configs/aime.py', f'--workdir={workdir}']
  flags += [f'--config.steps={args.steps}', *SHORT, *given]
  launched(processes, args.devices, 'bapo_jax.main', flags)
  return [row for row in metrics.read(workdir) if 'time/step' in row]


def seconds(rows: list) -> list[float]:
  """Returns the seconds of each step but the first, without evaluations."""
  return [row['time/step'] - row.get('time/eval', 0.0) for row in rows[1:]]


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, value in {'devices': 4, 'rounds': 2, 'steps': 8}.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--of', default='1,2')
  parser.add_argument('--workdir', default='runs/processes')
  args, given = parser.parse_known_args()
  ways = [int(n) for n in args.of.split(',')]
  steps, phases, ends = {n: [] for n in ways}, {n: {} for n in ways}, set()
  for i in range(args.rounds):
    for n in ways:
      rows = run(n, args, os.path.join(args.workdir, f'{n}-{i}'), given)
      steps[n] += seconds(rows)
      for name in rows[-1]:
        if name.startswith('time/'):
          phases[n].setdefault(name, []).extend(row.get(name, 0.0) for row in rows[1:])
      ends.add((rows[-1]['rollout/responses'], rows[-1]['rollout/tokens']))
  result = {}
  print(f'{"processes":>10}{"s/step":>9}{"times":>7}  phases, s')
  for n in ways:
    median = statistics.median(steps[n])
    result[n] = {'step_s': round(median, 4)}
    result[n]['over_one'] = round(median / statistics.median(steps[ways[0]]), 4)
    parts = {k[5:]: statistics.median(v) for k, v in phases[n].items()}
    named = '  '.join(f'{k} {v:.3f}' for k, v in sorted(parts.items()) if v > 5e-4)
    print(f'{n:10}{median:9.3f}{result[n]["over_one"]:7.2f}  {named}')
  print('responses and tokens of the last step are equal' if len(ends) == 1 else ends)
  for n in ways:
    found = collectives(n, args.devices, given)
    result[n] |= found
    sums = ', '.join(f'{size} numbers {ms} ms' for size, ms in found['ms'].items())
    print(f'a sum over {args.devices} devices of {n} processes: {sums}')
    for name, parts in found.get('count', {}).items():
      print(f'  collectives of {name}:', *(f'{k} {v}' for k, v in parts.items()))
  print(json.dumps(result))


if __name__ == '__main__':
  main()
