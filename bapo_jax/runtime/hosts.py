"""The processes of one run, one per host: who they are, and what they do together.

1. `initialise` joins this process to the others, from flags or from what the machine
   says; a single process needs nothing, and every function below is then free;
2. process 0 writes the console and the files (`is_first`), and goes ahead where several
   would make the same files (`first_ahead`);
3. `same_everywhere` refuses a process whose config, code or data differ;
4. `finish`, `leave` and `failed` end all processes, with one status.

All processes run the same program on the same seed; what they compute together is in
exchange.py.
"""

import contextlib
import json
import os
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from bapo_jax.runtime import cluster, watch
from bapo_jax.runtime.cluster import Place
from bapo_jax.runtime.watch import Watch

START_S = 300.0  # hosts of one job start minutes apart
TOGETHER_MS = 3_600_000  # the longest wait for process 0 to prepare files
_watch: list[Watch] = []  # of this process, once it has joined others


def process() -> int:
  """The number of this process, from 0."""
  return _watch[0].process if _watch else 0


def processes() -> int:
  """How many processes this run has."""
  return _watch[0].processes if _watch else 1


def is_first() -> bool:
  """Whether this process writes the console and the files of the run."""
  return process() == 0


def initialise(
  coordinator: str = '',
  process: int | None = None,
  processes: int | None = None,
  start_s: float = START_S,
) -> None:
  """Joins this process to the others; returns when all are there.

  Call it before anything else of JAX. Without flags JAX finds SLURM, GKE and the TPU's
  metadata by itself; where there is nothing, or one process, nothing happens.

  Args:
    coordinator: host:port of process 0, the same for all.
    start_s: seconds to wait for the coordinator and for the others.

  Raises:
    ValueError: one sentence: flags that do not fit, no coordinator, its port taken.
  """
  given = (coordinator or None, process, processes)
  if None in given and given != (None, None, None):
    named = zip(('coordinator', 'process', 'processes'), given, strict=True)
    found = ' '.join(f'--{name}={x}' for name, x in named if x is not None)
    raise ValueError(
      f'{found}: give --coordinator, --process and --processes, or none of them'
    )
  if coordinator and process is not None and processes is not None:
    place = Place(coordinator, process, processes)
  else:
    found = cluster.detect(start_s)
    if found is None:
      return
    place = found
  cluster.check(place)
  if place.processes == 1:
    return
  if place.process == 0:
    cluster.check_port(place)
  else:
    cluster.reach(place, start_s)
  _join(place, start_s)


def _join(place: Place, start_s: float) -> None:
  """Starts the distributed runtime, and the watch."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # it warns of recoverability
  joined = False

  def aborted() -> str:
    name = f'process {place.process} of {place.processes}'
    if not joined:
      return (
        f'{name}: not all {place.processes} processes came to {place.coordinator} '
        f'within {start_s:.0f} s'
      )
    if place.process and not cluster.reachable(place.coordinator):
      return _watch[0].silent(0)
    return f'{name}: the runtime of JAX aborted; its own words stand above'

  watch.on_abort(aborted, lambda: _watch[0].status if _watch else None)
  import jax

  # A survivor gets an exception, not SIGABRT; signals are ours (runtime/signals.py).
  jax.config.update('jax_enable_recoverability', True)
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    place.coordinator,
    place.processes,
    place.process,
    place.device_ids,
    cluster_detection_method='deactivate',
    initialization_timeout=int(start_s),
    heartbeat_timeout_seconds=watch.BACKSTOP_S,
  )
  joined = True
  _watch.append(Watch(place.process, place.processes, _store()))
  _watch[0].start()


def _store() -> Any:
  from jax._src import distributed  # orbax takes it from there as well

  return distributed.global_state.client


def leave(status: int, sentence: str) -> None:
  """Ends all processes with this status and sentence; alone, returns."""
  if _watch:
    _watch[0].leave(status, sentence)


def finish(status: int) -> None:
  """Ends this process when all have come here; alone, returns."""
  if _watch:
    _watch[0].finish(status)


def failed(error: BaseException) -> NoReturn:
  """Ends all processes after an error that nobody foresaw, its traceback printed."""
  if type(error).__name__ == 'JaxRuntimeError':
    _watch[0].explain()
  traceback.print_exception(error)
  sentence = f'{type(error).__name__}: {error}'
  watch.console(f'{_watch[0].name}: {sentence}')
  _watch[0].leave(1, sentence[:500])


_rounds: dict[str, int] = {}  # names of the store are used once


def _name(purpose: str) -> str:
  _rounds[purpose] = _rounds.get(purpose, 0) + 1
  return f'bapo/{purpose}/{_rounds[purpose]}'


def together(purpose: str) -> None:
  """Waits until every process is here."""
  if _watch:
    _store().wait_at_barrier(_name(purpose), TOGETHER_MS)


@contextlib.contextmanager
def first_ahead(purpose: str) -> Iterator[None]:
  """Process 0 runs the body first; where it fails, the others end with it."""
  if not is_first():
    together(purpose)
  yield
  if is_first():
    together(purpose)


def same_everywhere(values: dict[str, Any]) -> None:
  """Compares what must be equal in all processes; returns when all have compared.

  Args:
    values: name -> what JSON can hold, nested or not.

  Raises:
    ValueError: this process differs from process 0: which, and in what.
  """
  if not _watch:
    return
  name = _name('same')
  mine = json.loads(json.dumps(values, default=str))
  if is_first():
    _store().key_value_set(name, json.dumps(mine))
  theirs = json.loads(_store().blocking_key_value_get(name, TOGETHER_MS))
  differ = [
    f'{what} {here!r:.60} here and {there!r:.60} there'
    for what, here, there in _differences(mine, theirs)
  ]
  if differ:
    raise ValueError(
      f'{_watch[0].name} differs from process 0: {"; ".join(differ[:3])}; start all of '
      'them with the same command, code, packages and data'
    )
  together('compared')


def _differences(mine: Any, theirs: Any, name: str = '') -> Iterator[tuple]:
  """(dotted name, mine, theirs) of every value that differs."""
  if isinstance(mine, dict) and isinstance(theirs, dict):
    for key in sorted(mine.keys() | theirs.keys()):
      dotted = f'{name}.{key}' if name else key
      yield from _differences(mine.get(key), theirs.get(key), dotted)
  elif mine != theirs:
    yield name, mine, theirs
