r"""Runs an experiment: workers side by side, resumed anywhere, what is done left alone.

  python -m bapo_jax.tools.sweep_runner papers/2510.18927/experiments.py:main \
    --results=papers/2510.18927/results --runs=runs/claims --workers=2

1. every run is a process on a core of its own, which trains in <runs>/<run> and then
   writes <results>/<name of the experiment>/<run>.json;
2. runs that share a warm start wait until one of them has made it;
3. a run that another experiment under <results> has done is taken from there;
4. Ctrl-C ends all after their step; the same command goes on where they stopped.

A result names its commit, so changes that are not committed are refused; so is a result
of another config or another version of the code that lies where a run would write.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bapo_jax.run import experiment
from bapo_jax.runtime import files, versions
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.signals import stoppable
from bapo_jax.runtime.workdir import locked, writable
from bapo_jax.tools import sweep_grid
from bapo_jax.tools.sweep_grid import RunSpec
from bapo_jax.training import policy

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ('bapo_jax', 'configs', 'papers/*.py')
POLL_S = 0.5

Start = Callable[[str, int], subprocess.Popen]  # (run, core) -> its process
Ready = Callable[[str, str], bool]  # (run, warm start) -> whether it is there


class Worker(NamedTuple):
  """A run at work."""

  process: subprocess.Popen
  core: int


class Summary(NamedTuple):
  """What became of the runs of one call."""

  done: list[str]
  failed: dict[str, int]  # run -> exit status
  signal: int  # that ended the call; 0: none


def commit() -> str:
  """The commit of the source.

  Raises:
    ValueError: there is none, or the source differs from it.
  """

  def git(*args: str) -> str:
    call = subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True)
    if call.returncode:
      raise ValueError(f'results name a commit, and git gives none: {call.stderr}')
    return call.stdout.strip()

  if changed := git('status', '--porcelain', '--', *SOURCE):
    raise ValueError(f'results name a commit; commit this first: {changed}')
  return git('rev-parse', 'HEAD')


def warm_start(run: RunSpec) -> str:
  """Name of the warm start that a run begins from; '' where the model is read."""
  if run.config.model.path:
    return ''
  return os.path.basename(policy.warm_start_path(run.config, ''))


def share(folder: str, name: str, start: str) -> bool:
  """Copies a warm start that another run has made; returns whether it is there.

  Args:
    folder: of an experiment's runs; those of other experiments lie beside it.
  """
  own = pathlib.Path(folder, name, 'warmstart', start)
  if not start or own.is_dir():
    return True
  made = pathlib.Path(folder).parent.glob(f'*/*/warmstart/{start}')
  source = next((path for path in made if path.is_dir()), None)
  if source is None:
    return False
  files.copy_folder(source, own)
  return True


def choose(waiting: Mapping[str, str], making: set[str], ready: Ready) -> str | None:
  """The next run: one whose warm start is there, or is made by nobody yet.

  Args:
    waiting: run -> its warm start, in the order of work.
    making: the warm starts of the runs at work.
  """
  for name, start in waiting.items():
    if ready(name, start) or start not in making:
      return name
  return None


def drive(
  waiting: Mapping[str, str], start: Start, ready: Ready, workers: int
) -> Summary:
  """Keeps so many runs at work until none is left, or a signal comes.

  Args:
    waiting: run -> its warm start, in the order of work.
  """
  left, at_work, began = dict(waiting), dict[str, Worker](), time.monotonic()
  summary = Summary([], {}, 0)
  with stoppable() as stop:
    while at_work or (left and not stop.signal):
      free = sorted(set(range(workers)) - {w.core for w in at_work.values()})
      for core in free if not stop.signal else ():
        name = choose(left, {waiting[n] for n in at_work}, ready)
        if name is not None:
          del left[name]
          at_work[name] = Worker(start(name, core), core)
      if stop.signal and not summary.signal:
        summary = summary._replace(signal=stop.signal)
        for worker in at_work.values():
          worker.process.send_signal(stop.signal)
      over = [name for name, w in at_work.items() if w.process.poll() is not None]
      for name in over:
        status = at_work.pop(name).process.returncode
        if status == 0:
          summary.done.append(name)
        elif not stop.signal:
          summary.failed[name] = status
        log(progress(name, status, summary, len(waiting), time.monotonic() - began))
      time.sleep(0 if over else POLL_S)
  return summary


def progress(name: str, status: int, summary: Summary, total: int, s: float) -> str:
  """One line: what ended, how many are left, and for how long at the pace so far."""
  over = len(summary.done) + len(summary.failed)
  left = total - over
  pace = f', {left * s / over / 60:.0f} min left' if over and left else ''
  how = 'done' if status == 0 else f'ended with status {status}'
  return f'{name}: {how}. {over} of {total} over in {s / 60:.1f} min{pace}.'


def on_one_core() -> None:
  """Keeps this process to one core, if it has more.

  With another number of threads a product is summed in other parts, and rounds
  otherwise: a run would not be the one that its result is of.
  """
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def train(run: RunSpec, name: str, folder: str, results: str) -> int:
  """Trains one run and writes its result; returns an exit status.

  A run that diverges has a result too, and the status 0.
  """
  made_by, at = versions.all_of_them(), commit()
  workdir = os.path.join(folder, name)
  status = experiment.train(run.config, workdir)
  diverged = status == experiment.DIVERGED
  if status and not diverged:
    return status
  found = sweep_grid.outcome(run, workdir, at, made_by, diverged)
  sweep_grid.write(results, name, found)
  return 0


def main(argv: list[str] | None = None) -> int:
  """Runs what is not done; the exit status is 0 when all of it is."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('experiment', help='path/experiments.py:name')
  parser.add_argument('--results', required=True, help='folder of the results')
  parser.add_argument('--runs', default='runs/claims', help='folder of the workdirs')
  parser.add_argument('--workers', type=int, default=os.cpu_count())
  parser.add_argument('--only', default='', help='one run, in this process')
  flags = parser.parse_args(argv)
  name = flags.experiment.rpartition(':')[2]
  folder, results = (os.path.join(f, name) for f in (flags.runs, flags.results))
  runs = sweep_grid.runs(sweep_grid.load(flags.experiment))
  if flags.only:
    on_one_core()
    return train(runs[flags.only], flags.only, folder, results)
  commit()
  made_by = versions.all_of_them()
  undone = {
    run: spec
    for run, spec in runs.items()
    if not sweep_grid.is_done(results, run, spec, made_by)
  }
  borrowed = sweep_grid.borrow(results, undone, made_by)
  waiting = {
    run: warm_start(spec) for run, spec in undone.items() if run not in borrowed
  }
  log(
    f'{len(runs) - len(waiting)} of {len(runs)} runs are done, {len(borrowed)} of them '
    'by another experiment.'
  )
  command = [sys.executable, '-m', 'bapo_jax.tools.sweep_runner', flags.experiment]
  command += [f'--results={flags.results}', f'--runs={flags.runs}']
  with locked(folder), writable(folder):
    summary = drive(
      waiting,
      lambda run, core: _start([*command, f'--only={run}'], folder, run, core),
      lambda run, start: share(folder, run, start),
      flags.workers,
    )
  for run, status in summary.failed.items():
    log(f'{run} failed with status {status}: {os.path.join(folder, run)}.log')
  return 128 + summary.signal if summary.signal else int(bool(summary.failed))


def _start(command: list[str], folder: str, run: str, core: int) -> subprocess.Popen:
  """A run as a process on one core, its output in a file; signals do not reach it."""
  environment = os.environ | {
    # One program serves all runs of its shapes.
    'JAX_COMPILATION_CACHE_DIR': os.path.abspath(os.path.join(folder, 'compiled')),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',  # many small ones add up
  }
  with open(os.path.join(folder, f'{run}.log'), 'a', encoding='utf-8') as output:
    process = subprocess.Popen(
      command,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  if hasattr(os, 'sched_setaffinity'):
    own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process.pid, {own[core % len(own)]})
  return process


if __name__ == '__main__':
  try:
    sys.exit(main())
  except ValueError as error:
    sys.exit(f'bapo_jax: {error}')
