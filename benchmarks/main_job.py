"""The main job over several seeds: what it takes and what it gives.

  python -m benchmarks.main_job --seeds=3 [--workdir=runs/benchmark] [overrides]

Runs `configs/aime.py` once a seed, each in a process of its own, prints a table and, as
the last line, one JSON object. There is no peer that runs on a CPU to compare with; the
figures are compared with those of earlier commits in LOG.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


def run(seed: int, workdir: str, overrides: list[str]) -> dict:
  """report.json of one seed."""
  path = os.path.join(workdir, f'seed{seed}')
  command = [sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py']
  subprocess.run(
    [*command, f'--workdir={path}', f'--config.seed={seed}', *overrides],
    check=True,
    stdout=subprocess.DEVNULL,
  )
  with open(os.path.join(path, 'report.json')) as file:
    return json.load(file)


def row(seed: int, report: dict) -> dict:
  """The figures of one seed."""
  device = sum(report['phases'].get(p, 0) for p in ('sample', 'update', 'warm start'))
  host = ('score', 'batch', 'shelve', 'log', 'save')
  busy = sum(report['phases'].get(p, 0) for p in ('sample', 'update', *host))
  return {
    'seed': seed,
    'before': report['eval_before']['accuracy'],
    'after': report['eval_after']['accuracy'],
    'n': report['eval_after']['n'],
    'wall_s': report['wall_s'],
    'device_share': device / report['wall_s'],
    'host_share_of_steps': sum(report['phases'].get(p, 0) for p in host) / busy,
    'peak_gib': report['peak_rss_bytes'] / 2**30,
    'clip_moved': report['clip_moved_fraction'],
    'length_ratio_last': report['length_ratio']['last_fifth'],
  }


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--workdir', default='runs/benchmark')
  known, overrides = parser.parse_known_args()
  rows = []
  for seed in range(known.seeds):
    rows.append(row(seed, run(seed, known.workdir, overrides)))
    if not seed:
      print('  '.join(f'{name:>19}' for name in rows[0]))
    print('  '.join(f'{value:>19.4g}' for value in rows[-1].values()), flush=True)
  medians = {k: statistics.median(r[k] for r in rows) for k in rows[0] if k != 'seed'}
  print(json.dumps({'median': medians, 'rows': rows}))


if __name__ == '__main__':
  main()
