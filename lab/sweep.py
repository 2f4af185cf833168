r"""Runs an experiment with several workers, and tabulates its arms over the seeds.

  python -m lab.sweep configs/countdown.py:cells --results=runs/countdown
  python -m lab.sweep papers/balanced_po/experiments.py:main \
    --results=papers/balanced_po/results --runs=runs/balanced_po --workers=2

Every run is a process on its own core. It trains in <runs>/<experiment>/<run> and then
writes <results>/<experiment>/<run>.json; when all runs are done, these files become
<results>/<experiment>.jsonl, a line per run. Of the runs with equal warm starts, the
first computes the warm start and the others wait and copy it. Ctrl-C stops all runs
after their step; the same command resumes. Overrides such as --config.steps=3 change
the shared config; --table only prints the table. Results name a commit: uncommitted
changes, and stored results of another config or code version, raise an error.
"""

import argparse
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from bapo_jax.run import experiment
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.signals import stoppable
from bapo_jax.runtime.workdir import locked, writable
from bapo_jax.training import needs, policy
from bapo_jax.training.config import OVERRIDE, merged, overrides
from lab import evidence, experiments
from lab.experiments import Experiment, RunSpec

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ('bapo_jax', 'lab', 'configs', 'papers/*.py')
POLL_S = 0.5
COMPARED = ('final', 'accuracy_of_failed', 'newly_solved')  # with the first arm
TABLES = (('before', *COMPARED), ('responses', 'steps', 'updates', 'seconds'))


def commit() -> str:
  """Returns the commit of the source.

  Raises:
    ValueError: there is no commit, or the source has uncommitted changes.
  """
  command = ['git', 'status', '--porcelain=v2', '--branch', '--', *SOURCE]
  call = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  lines = call.stdout.splitlines()
  changed = [line for line in lines if not line.startswith('# ')]
  if call.returncode or changed:
    raise ValueError(f'commit the source first: {call.stderr or changed}')
  return lines[0].removeprefix('# branch.oid ')


def warm_start(run: RunSpec) -> str:
  """Returns the name of a run's warm start; '' for a model read from files."""
  path = policy.warm_start_path(run.config, '')
  return '' if run.config.model.path else os.path.basename(path)


def share(folder: str, name: str, start: str) -> bool:
  """Copies a warm start from another run if needed, and returns whether it exists.

  `folder` has the workdirs of an experiment, beside those of other experiments.
  """
  path = pathlib.Path(folder, name, 'warmstart', start)
  if not start or path.is_dir():
    return True
  for source in pathlib.Path(folder).parent.glob(f'*/*/warmstart/{start}'):
    part = f'{path}.tmp'
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    os.replace(part, path)  # a kill leaves a complete copy or none
    return True
  return False


def drive(
  waiting: Mapping[str, str],
  start: Callable[[str, int], subprocess.Popen],
  ready: Callable[[str, str], bool],
  workers: int,
) -> tuple[dict[str, int], int]:
  """Runs processes, at most `workers` at once, until all end or a signal arrives.

  Args:
    waiting: run -> warm start, in the order of execution.
    start: (run, core) -> its process.
    ready: (run, warm start) -> whether the warm start exists.

  Returns:
    (failed run -> exit status, the signal or 0)
  """
  waiting, total, began = dict(waiting), len(waiting), time.monotonic()
  active: dict[str, tuple[subprocess.Popen, int, str]] = {}  # with core, warm start
  failed: dict[str, int] = {}
  over = passed_on = 0
  with stoppable() as stop:
    while active or (waiting and not stop.signal):
      # A free core gets the next run whose warm start exists or is not being computed.
      for core in set(range(workers)) - {core for _, core, _ in active.values()}:
        making = {warm for _, _, warm in active.values()}
        runs = (r for r, w in waiting.items() if ready(r, w) or w not in making)
        run = None if stop.signal else next(runs, None)
        if run is not None:
          active[run] = start(run, core), core, waiting.pop(run)
      # A signal is passed on once: a second signal would stop the runs without saving.
      if stop.signal and not passed_on:
        passed_on = stop.signal
        for process, *_ in active.values():
          process.send_signal(stop.signal)
      ended = [run for run, (p, *_) in active.items() if p.poll() is not None]
      for run in ended:
        status, over = active.pop(run)[0].returncode, over + 1
        if status and not stop.signal:
          failed[run] = status
        left = (total - over) * (time.monotonic() - began) / over / 60
        log(f'{run}: status {status}. {over} of {total} over, {left:.0f} min left.')
      time.sleep(0 if ended else POLL_S)
  return failed, stop.signal


def train(run: RunSpec, name: str, folder: str, results: str, core: int = 0) -> int:
  """Trains one run on one core and writes its result; returns an exit status.

  A run that diverges also writes a result and returns 0.
  """
  if hasattr(os, 'sched_setaffinity'):
    # Another number of threads would split sums, and so round, differently.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
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
    parts.append(evidence.difference_table(pairs, outcome))
  return '\n\n'.join(filter(None, parts))


def launch(command: list[str], folder: str, run: str, core: int) -> subprocess.Popen:
  """Starts a run that logs to a file, out of reach of the terminal's signals."""
  environment = os.environ | {
    # Runs of equal shapes share compiled programs; even small programs are cached.
    'JAX_COMPILATION_CACHE_DIR': os.path.abspath(os.path.join(folder, 'compiled')),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  with open(os.path.join(folder, f'{run}.log'), 'a', encoding='utf-8') as output:
    return subprocess.Popen(
      [*command, f'--only={run}', f'--core={core}'],
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


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
  parser.add_argument('--runs', default='runs/lab', help='folder of the workdirs')
  parser.add_argument('--workers', type=int, default=os.cpu_count())
  parser.add_argument('--only', default='', help='one run, in this process')
  parser.add_argument('--core', type=int, default=0, help='core of the --only run')
  parser.add_argument('--table', action='store_true', help='only prints the table')
  settings = [arg for arg in argv if OVERRIDE.fullmatch(arg)]
  args = parser.parse_args([arg for arg in argv if arg not in settings])
  made = experiments.load(args.experiment)
  knobs = overrides(settings)
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
    return train(specs[args.only], args.only, folder, results, args.core)
  if not args.table:
    commit()
    undone = experiments.undone(results, specs, machine.versions())
    waiting = {run: warm_start(spec) for run, spec in undone.items()}
    log(f'{len(specs) - len(waiting)} of {len(specs)} runs are done.')
    command = [sys.executable, '-m', 'lab.sweep', *argv]
    with locked(folder), writable(folder):
      failed, signal = drive(
        waiting,
        functools.partial(launch, command, folder),
        functools.partial(share, folder),
        args.workers,
      )
    for run, status in failed.items():
      log(f'{run} failed with status {status}; see {os.path.join(folder, run)}.log')
    if failed or signal:
      return 128 + signal if signal else 1
    experiments.pack(results)
  log(table(made, results))
  return 0


if __name__ == '__main__':
  experiments.command(main)
