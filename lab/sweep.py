r"""Runs an experiment with several workers, and tabulates its arms over the seeds.

  python -m lab.sweep configs/countdown.py:cells --results=runs/countdown
  python -m lab.sweep papers/balanced_po/experiments.py:main \
    --results=papers/balanced_po/results --runs=runs/balanced_po --workers=2

Every run is a process on its own core. It trains in <runs>/<experiment>/<run> and then
writes <results>/<experiment>/<run>.json; when all runs are done, these files become
<results>/<experiment>.jsonl, a line per run. Of the runs that start from the same
policy wait for the first, which makes it in <runs>. Ctrl-C stops all runs
after their step; the same command resumes. Overrides such as --config.steps=3 change
the shared config; --table only prints the table. Results name a commit: uncommitted
changes, and stored results of another config or code version, raise an error.
"""

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bapo_jax.run import experiment
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import log
from bapo_jax.tools import sweep as runner
from bapo_jax.training import needs
from bapo_jax.training.config import OVERRIDE, merged, overrides
from lab import evidence, experiments
from lab.experiments import Experiment, RunSpec

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ('bapo_jax', 'lab', 'configs', 'papers/*.py')
# Compared with the first arm.
COMPARED = ('area', 'final', 'accuracy_of_failed', 'newly_solved')
TABLES = (('before', *COMPARED), ('responses', 'steps', 'updates', 'seconds'))


def commit(custom: Iterable[str] = ()) -> str:
  """Returns the commit of the source.

  Args:
    custom: files of custom functions; those in the repository must be committed too.

  Raises:
    ValueError: there is no commit, or the source has uncommitted changes.
  """
  paths = map(os.path.realpath, custom)
  inside = [path for path in paths if pathlib.Path(path).is_relative_to(ROOT)]
  command = ['git', 'status', '--porcelain=v2', '--branch', '--', *SOURCE, *inside]
  call = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  lines = call.stdout.splitlines()
  changed = [line for line in lines if not line.startswith('# ')]
  if call.returncode or changed:
    raise ValueError(f'commit the source first: {call.stderr or changed}')
  return lines[0].removeprefix('# branch.oid ')


def train(run: RunSpec, name: str, folder: str, results: str) -> int:
  """Trains one run and writes its result; returns an exit status.

  A run that diverges also writes a result and returns 0.
  """
  code, revision = machine.versions(), commit()
  workdir = os.path.join(folder, name)
  status = experiment.train(run.config, workdir)
  diverged = status == experiment.DIVERGED
  if status and not diverged:
    return status
  result = experiments.outcome(run, workdir, revision, code, diverged)
  experiments.write(results, name, result)
  return 0


def table(made: Experiment, results: str) -> str:
  """Returns a table of means over seeds, and tables of differences to the first arm."""
  stored = experiments.read(made, results)
  first, *others = made.arms
  parts = [evidence.means(stored, columns) for columns in TABLES]
  for outcome in COMPARED:
    pairs = {}
    for arm in others:
      pairs |= evidence.differences_of(stored, arm, [first], outcome)
    parts.append(evidence.difference_table(pairs, outcome, tested=True))
  return '\n\n'.join(filter(None, parts))


def train_all(
  command: list[str],
  specs: Mapping[str, RunSpec],
  folder: str,
  results: str,
  workers: int,
) -> int:
  """Trains all runs without a result and packs the results; returns an exit status.

  Run r is a process of the command with --only=r, and logs to <folder>/<r>.log.
  """
  commit({path for spec in specs.values() for path in experiments.sources(spec.config)})
  undone = experiments.undone(results, specs, machine.versions())
  # Not the user's cache: a policy in it may be of another version.
  os.environ['XDG_CACHE_HOME'] = os.path.abspath(pathlib.Path(folder).parent)
  log(f'{len(specs) - len(undone)} of {len(specs)} runs are done.')
  # Runs of equal shapes share compiled programs; even small programs are cached.
  os.environ['JAX_COMPILATION_CACHE_DIR'] = os.path.abspath(f'{folder}/compiled')
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  commands = {run: [*command, f'--only={run}'] for run in undone}
  failed, signal = runner.drive(commands, folder, [{}] * workers)
  if failed or signal:
    return 128 + signal if signal else 1
  experiments.pack(results)
  return 0


def parse(
  parser: argparse.ArgumentParser, argv: Sequence[str], runs: str
) -> tuple[argparse.Namespace, dict[str, Any]]:
  """Returns the options of a command that trains runs, and its overrides.

  `runs` is the default folder of the workdirs.
  """
  parser.add_argument('--runs', default=runs, help='folder of the workdirs')
  parser.add_argument('--workers', type=int, default=os.cpu_count())
  parser.add_argument('--only', default='', help='one run, in this process')
  settings = [arg for arg in argv if OVERRIDE.fullmatch(arg)]
  args = parser.parse_args([arg for arg in argv if arg not in settings])
  return args, overrides(settings)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs an experiment or prints its table.

  Returns:
    0 if everything is done, 1 if a run failed, 128 + signal number after a signal.

  Raises:
    ValueError: the source has uncommitted changes, or a stored result does not match.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    'experiment', help='path:name, a file with get_experiment(name), not a config'
  )
  parser.add_argument('--results', required=True, help='folder of the results')
  parser.add_argument('--table', action='store_true', help='only prints the table')
  args, knobs = parse(parser, argv, 'runs/lab')
  made = experiments.load(args.experiment)
  made = made._replace(values=merged(made.values, knobs))
  specs = experiments.runs(made)
  needs.refuse(knobs, [spec.config for spec in specs.values()])
  name = args.experiment.rpartition(':')[2]
  folder = f'{args.runs}/{name}'
  results = f'{args.results}/{name}'
  if args.workers < 1:
    raise ValueError(f'--workers={args.workers}: give at least 1')
  if args.only and args.only not in specs:
    raise ValueError(f'--only={args.only}: no such run; give one of {", ".join(specs)}')
  if args.only:
    return train(specs[args.only], args.only, folder, results)
  if not args.table:
    command = [sys.executable, '-m', 'lab.sweep', *argv]
    if status := train_all(command, specs, folder, results, args.workers):
      return status
  log(table(made, results))
  return 0


if __name__ == '__main__':
  experiments.command(main)
