"""Runs a grid of knobs and seeds, one process per GPU or core: `bapo sweep`.

1. `grid` lists the runs: every combination of the values of --set, with every seed;
2. `environments` gives the processes that run at the same time their GPUs, if any;
3. `drive` starts the processes. Runs that start from the same embedded policy wait for
   the first of them to make it;
4. `sweep` ends in the comparison of all runs, with paired intervals; `run` is called by
   `bapo sweep`.
"""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from bapo_jax.run import document
from bapo_jax.run.series import of_sets, series
from bapo_jax.runtime import files, machine, metrics
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.signals import stoppable
from bapo_jax.runtime.workdir import locked, writable
from bapo_jax.tools import compare
from bapo_jax.training.config import compose

POLL_S = 0.5
COMMA = re.compile(r',(?![^(\[]*[)\]])')  # not inside brackets


def run(
  config: str,
  knobs: Sequence[str],
  workdir: str = 'runs/sweep',
  set: Sequence[str] = (),
  seeds: str = '0:3',
  workers: int | None = None,
  per_device: int = 1,
) -> int:
  """Trains a grid of knobs and seeds; returns an exit status as `sweep` does.

  Args:
    config: a config file.
    knobs: arguments such as --config.steps=10, for all runs.
    workdir: directory of all runs
    set: KNOB=VALUE,VALUE: trains every value; several make a grid
    seeds: values of --config.seed: a range, or a list 0,7,9
    workers: processes at once (default: all GPUs, or all cores)
    per_device: processes per GPU, which divide its memory
  """
  shared = {override.partition('=')[0]: override for override in knobs}
  commands = {}
  for name, overrides in grid(set, seeds_of(seeds)).items():
    for override in overrides:
      fixed = shared.get(override.partition('=')[0])
      if fixed:
        raise ValueError(f'{fixed}: the sweep sets this knob; leave it out')
    compose(config, [*knobs, *overrides])  # or it is refused
    commands[name] = [f'--config={config}', *knobs, *overrides]
  return sweep(commands, workdir, environments(workers, per_device))


def seeds_of(text: str) -> list[int]:
  """Returns the seeds of '0:3' (0, 1, 2) or of '0,7,9'.

  Raises:
    ValueError: the text has another form, or names no seed or one of them twice.
  """
  if match := re.fullmatch(r'(\d+):(\d+)', text):
    seeds = list(range(int(match[1]), int(match[2])))
  elif re.fullmatch(r'\d+(,\d+)*', text):
    seeds = [int(seed) for seed in text.split(',')]
  else:
    seeds = []
  if not seeds or len(set(seeds)) < len(seeds):
    raise ValueError(
      f'--seeds={text}: give a range such as 0:3, which has 0, 1 and 2, or different '
      'seeds such as 0,7,9'
    )
  return seeds


def grid(sets: Sequence[str], seeds: Sequence[int]) -> dict[str, list[str]]:
  """Returns the name of each run -> its overrides, seed by seed.

  Args:
    sets: 'knob=value,value,...'; commas in brackets do not separate values.
    seeds: values of `seed`.

  Raises:
    ValueError: a text has another form, or a knob or a value is given twice.
  """
  axes = {}
  for text in sets:
    knob, _, values = text.partition('=')
    options = COMMA.split(values)
    if not knob or not all(options):
      raise ValueError(f'--set {text}: give knob=value,value')
    if knob == 'seed':
      raise ValueError(f'--set {text}: give the seeds as --seeds={values}')
    if knob in axes or len(set(options)) < len(options):
      raise ValueError(
        f'--set {text}: the knob or a value is given twice; give it once'
      )
    axes[knob] = options
  runs = {}
  for seed, values in itertools.product(seeds, itertools.product(*axes.values())):
    chosen = [f'{knob}={value}' for knob, value in zip(axes, values, strict=True)]
    arm = ','.join(chosen).replace('/', '_')
    name = os.path.join(arm, str(seed))
    runs[name] = [f'--config.{knob}' for knob in (*chosen, f'seed={seed}')]
  return runs


def environments(workers: int | None, per_device: int) -> list[dict[str, str]]:
  """Returns the additional environment of each process that runs at the same time.

  On a machine with GPUs, `per_device` processes divide a GPU, and `workers` lowers
  their number. Otherwise they need none, and `workers` is their number, by default that
  of the cores.

  Raises:
    ValueError: a number is below 1.
  """
  if min(per_device, workers or per_device) < 1 or workers == 0:
    raise ValueError(f'--per_device={per_device} --workers={workers}: give at least 1')
  gpus = machine.gpus()
  if not gpus:
    return [{}] * (workers or len(machine.cores()))
  name = next(filter(os.environ.get, machine.GPU_SHARES))  # `prepare_gpu` sets one
  share = {name: str(float(os.environ[name]) / per_device)}
  of_gpu = [share | {'CUDA_VISIBLE_DEVICES': gpu} for gpu in gpus]
  return (of_gpu * per_device)[:workers]


def launch(
  command: Sequence[str],
  output: str,
  core: int,
  environment: Mapping[str, str],
) -> subprocess.Popen:
  """Starts a process on one core, or with an `environment`, and logs to a file.

  Signals of the terminal do not reach it. With another number of cores, XLA would
  split sums, and so round, differently.
  """
  os.makedirs(os.path.dirname(output), exist_ok=True)
  with open(output, 'a', encoding='utf-8') as file:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      env={**os.environ, **environment},
    )
  if hasattr(os, 'sched_setaffinity') and not environment:
    allowed = machine.cores()
    os.sched_setaffinity(process.pid, {allowed[core % len(allowed)]})
  return process


def drive(
  commands: Mapping[str, Sequence[str]],
  folder: str,
  places: Sequence[Mapping[str, str]],
  outcome: Callable[[str], str] = lambda run: '',
) -> tuple[dict[str, int], int]:
  """Runs processes, one per place at once, until all end or a signal arrives.

  Args:
    commands: run -> its command, in the order of execution.
    folder: run r logs to <folder>/<r>.log.
    places: the environments of the processes that run at the same time.
    outcome: run -> what to print of it once it has ended with status 0.

  Returns:
    (failed run -> exit status, the signal or 0)

  Raises:
    ValueError: another process uses the folder, or it cannot be written.
  """
  waiting = list(commands)
  began = time.monotonic()
  active: dict[int, tuple[str, subprocess.Popen]] = {}  # number of the place -> run
  failed: dict[str, int] = {}
  over = passed_on = 0
  with locked(folder), writable(folder), stoppable() as stop:
    while active or (waiting and not stop.signal):
      for i, environment in enumerate(places):
        if i not in active and waiting and not stop.signal:
          run = waiting.pop(0)
          output = os.path.join(folder, f'{run}.log')
          active[i] = run, launch(commands[run], output, i, environment)
      # A signal is passed on once: a second signal would stop the runs without saving.
      if stop.signal and not passed_on:
        passed_on = stop.signal
        for _, process in active.values():
          process.send_signal(stop.signal)
      ended = [i for i, (_, process) in active.items() if process.poll() is not None]
      for i in ended:
        run, process = active.pop(i)
        status = process.returncode
        over += 1
        if status and not stop.signal:
          failed[run] = status
        text = f'status {status}' if status else outcome(run) or 'done'
        text = f'{run}: {"stopped" if status and stop.signal else text}.'
        if not stop.signal:
          minutes = (time.monotonic() - began) / over / 60
          still = minutes * (len(commands) - over)
          text += f' {over} of {len(commands)} over, {still:.1f} min left.'
        log(text)
      time.sleep(0 if ended else POLL_S)
  for run, status in failed.items():
    log(f'{run} failed with status {status}; see {os.path.join(folder, run)}.log')
  return failed, stop.signal


def accuracy(workdir: str, rows_before: int) -> str:
  """Returns the first and the last held-out accuracy of a run; '' without them.

  `rows_before` is the number of metrics rows at the start of the sweep: a run without
  another was done before.
  """
  rows = metrics.read(workdir)
  texts = []
  for name in ('eval/accuracy', *of_sets(rows)):
    _, value_N = series(rows, name)
    if len(value_N):
      metric = name.removeprefix('eval/')
      texts.append(f'{metric} {value_N[0]:.3f} -> {value_N[-1]:.3f}')
  before = 'done before, ' * (len(rows) == rows_before)
  return f'{before}held-out {", ".join(texts)}' if texts else ''


def sweep(
  commands: Mapping[str, Sequence[str]],
  folder: str,
  places: Sequence[Mapping[str, str]],
) -> int:
  """Trains all runs and compares them in <folder>/compare.html.

  Args:
    commands: run -> the arguments of `bapo train`, without the workdir.
    folder: run r trains in <folder>/<r> and logs to <folder>/<r>.log.
    places: the environments of the processes that run at the same time.

  Returns:
    0 if everything is done, 1 if a run failed, 128 + signal number after a signal.

  Raises:
    ValueError: another sweep uses the folder, or another program its compare.html.
  """
  page = os.path.join(folder, 'compare.html')
  files.check_ours(page, document.MARK)
  paths = {run: os.path.join(folder, run) for run in commands}
  program = [sys.executable, '-m', 'bapo_jax.main']
  log(f'{len(commands)} runs, {len(places)} at once, in {folder}')
  rows = {run: len(metrics.read(path)) for run, path in paths.items()}
  failed, signal = drive(
    {run: [*program, f'--workdir={paths[run]}', *commands[run]] for run in commands},
    folder,
    places,
    outcome=lambda run: accuracy(paths[run], rows[run]),
  )
  if signal:
    log('The same command resumes.')
    return 128 + signal
  done = [path for run, path in paths.items() if run not in failed]
  if len(done) > 1:
    compare.write(done, page)
  return int(bool(failed))
