"""Measures cost and results of the main job over several seeds.

  python -m benchmarks.training.main_job --seeds=3 [--workdir=runs/benchmark]
      [overrides]

Runs `configs/aime.py` once a seed, each in a process of its own, prints a table and, as
the last line, one JSON object. There is no peer that runs on a CPU to compare with; the
figures are compared with those of earlier commits in log/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from bapo_jax.run import series
from bapo_jax.runtime import metrics


def run(seed: int, workdir: str, overrides: list[str]) -> dict:
  """Runs one seed and returns its report.json."""
  command = [sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py']
  # The whole job is measured, with a warm start of every seed.
  command += [f'--workdir={workdir}', '--config.cache=']
  subprocess.run(
    [*command, f'--config.seed={seed}', f'--config.sft.seed={seed}', *overrides],
    check=True,
    stdout=subprocess.DEVNULL,
  )
  with open(os.path.join(workdir, 'report.json')) as file:
    return json.load(file)


def host_share(workdir: str) -> float:
  """Returns the share of the steps' wall time without sampler or learner."""
  rows = [row for row in metrics.read(workdir) if 'time/step' in row]
  device = sum(row['time/sample'] + row['time/update'] for row in rows)
  steps = sum(row['time/step'] - row.get('time/eval', 0) for row in rows)
  return 1 - device / steps


def row(seed: int, report: dict, workdir: str) -> dict:
  """Returns the figures of one seed."""
  rows = metrics.read(workdir)
  _, last = series.fifths(rows)
  wrong, right = (series.mean(last, f'rollout/length_{x}') for x in ('wrong', 'right'))
  return {
    'seed': seed,
    'before': report['eval_before']['accuracy'],
    'after': report['eval_after']['accuracy'],
    'n': report['eval_after']['n'],
    'wall_s': report['wall_s'],
    'host_share': host_share(workdir),
    'peak_gib': report['peak_rss_bytes'] / 2**30,
    'clip_moved': series.mean(rows, 'clip/moved'),
    'length_ratio_last': wrong / right,
  }


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--workdir', default='runs/benchmark')
  known, overrides = parser.parse_known_args()
  rows = []
  for seed in range(known.seeds):
    path = os.path.join(known.workdir, f'seed{seed}')
    rows.append(row(seed, run(seed, path, overrides), path))
    if not seed:
      print('  '.join(f'{name:>19}' for name in rows[0]))
    print('  '.join(f'{value:>19.4g}' for value in rows[-1].values()), flush=True)
  medians = {k: statistics.median(r[k] for r in rows) for k in rows[0] if k != 'seed'}
  print(json.dumps({'median': medians, 'rows': rows}))


if __name__ == '__main__':
  main()
