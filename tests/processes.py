"""Several processes of one run on this machine, with four virtual devices in all."""

import contextlib
import os
import pathlib
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import runs

DEVICES = 4
PATIENCE_S = 7200  # the machine may be busy with something else


def free_port(least: int = 0) -> int:
  """Returns a port, at least `least`, that was free a moment ago."""
  while True:
    port = random.randrange(least, 65536) if least else 0
    with contextlib.suppress(OSError), socket.create_server(('', port)) as server:
      return server.getsockname()[1]


def environment(processes: int) -> dict[str, str]:
  """Of a process that has its share of the devices."""
  flag = f'--xla_force_host_platform_device_count={DEVICES // processes}'
  return os.environ | {
    'XLA_FLAGS': f'{runs.FLAGS} {flag}',
    'PYTHONUNBUFFERED': '1',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': f'{runs.ROOT}{os.pathsep}{runs.ROOT / "tests"}',
  }


@contextlib.contextmanager
def small_files(most: int) -> Iterator[None]:
  """Limits the files that this process writes to so many bytes, as a full disk does."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def call(
  *args: object, status: int = 0, cwd: os.PathLike | str = runs.ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
  """Runs a command to its end with more variables; asserts its exit status."""
  command = [str(arg) for arg in args]
  done = subprocess.run(
    command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=1800
  )
  assert done.returncode == status, done.stdout + done.stderr
  return done


def start(commands: Sequence[dict[str, Any]], folder: pathlib.Path) -> list:
  """Starts the commands, (process i)'s output in folder/<i>.txt."""
  started = []
  for i, command in enumerate(commands):
    with open(folder / f'{i}.txt', 'w') as file:
      started.append(subprocess.Popen(**command, stdout=file, stderr=subprocess.STDOUT))
  return started


def ended(started: list, folder: pathlib.Path) -> tuple[list[int], list[str]]:
  """(exit statuses, outputs) of the processes, once all have ended."""
  try:
    statuses = [process.wait(PATIENCE_S) for process in started]
  finally:
    for process in started:
      process.kill()
  return statuses, [(folder / f'{i}.txt').read_text() for i in range(len(started))]


def outputs(started: list, folder: pathlib.Path, status: int = 0) -> list[str]:
  """Returns the outputs of processes that all end with this status."""
  statuses, texts = ended(started, folder)
  assert statuses == [status] * len(started), texts
  return texts


def scripts(
  source: str,
  count: int,
  folder: pathlib.Path,
  join: str = '',
  env: Sequence[dict[str, str]] = (),
) -> list:
  """Starts processes that join each other and run the source, with `hosts` in it.

  Their outputs go to the folder. `join` is the call that joins them, by default on
  this machine; `env` adds to the environment of each.
  """
  address = f'127.0.0.1:{free_port()}'
  join = join or f'hosts.initialise("{address}", int(sys.argv[1]), {count}, 900)'
  head = f'import os, sys, time\nfrom bapo_jax.runtime import exchange, hosts\n{join}\n'
  commands = []
  for i in range(count):
    args = [sys.executable, '-c', head + source, str(i)]
    own = environment(count) | (env[i] if env else {})
    commands.append({'args': args, 'cwd': runs.ROOT, 'env': own})
  return start(commands, folder)


def wait_until(
  happened: Callable[[], object],
  started: Sequence[subprocess.Popen] = (),
  every_s: float = 0.02,
) -> None:
  """Returns once it has happened; all processes are alive until then."""
  deadline = time.monotonic() + 600
  while not happened():
    assert [process.poll() for process in started] == [None] * len(started)
    assert time.monotonic() < deadline
    time.sleep(every_s)


def wait_for(folder: pathlib.Path, words: str, started: list) -> None:
  """Returns when the words are in every output; all processes are alive until then."""
  files = [folder / f'{i}.txt' for i in range(len(started))]
  wait_until(lambda: all(words in file.read_text() for file in files), started)


def is_alive(pid: int) -> bool:
  """Returns whether the process exists and is no zombie (Linux)."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def trainings(
  workdir: pathlib.Path,
  processes: int,
  each: Sequence[dict[str, Any]] = (),
  apart: Sequence[dict[str, Any]] = (),
  **overrides: Any,
) -> list:
  """Starts a tiny run in so many processes.

  Each has more overrides in `each` and arguments of subprocess.Popen in `apart`.
  """
  address = f'127.0.0.1:{free_port()}'
  knobs = {'mesh.data': 2, 'mesh.fsdp': 2} | overrides
  commands = []
  for i in range(processes):
    command = runs.command(workdir, **knobs | (each[i] if each else {}))
    flags = [f'--coordinator={address}', f'--process={i}', f'--processes={processes}']
    command['args'] += flags if processes > 1 else []
    command |= {'env': environment(processes)} | dict(apart[i] if apart else {})
    commands.append(command)
  folder = workdir.parent / f'{workdir.name}.output'
  folder.mkdir(exist_ok=True)
  return start(commands, folder)


def trained(workdir: pathlib.Path, processes: int, **overrides: Any) -> list[str]:
  """Runs to the end; the outputs."""
  started = trainings(workdir, processes, **overrides)
  statuses, outputs = ended(started, workdir.parent / f'{workdir.name}.output')
  assert statuses == [0] * processes, outputs
  return outputs
