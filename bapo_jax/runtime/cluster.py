"""Where a process stands among those of a run, and whether it can reach them.

1. `detect` asks the environment: SLURM, GKE, the metadata of TPUs, a JobSet;
2. `check`, `check_port` and `reach` say in a sentence what is wrong, before the runtime
   of JAX is started: it aborts, or shares a port, without one.
"""

import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
  """Where this process stands among the others."""

  coordinator: str  # host:port of process 0
  process: int
  processes: int
  device_ids: Sequence[int] | None = None  # local devices; None: all of them


def detect(start_s: float) -> Place | None:
  """The place that the environment says, None for a single process.

  JOB_COMPLETION_INDEX with JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES is a JobSet
  without TPUs, which JAX knows only with the rights to ask Kubernetes.
  """
  names = ('JAX_COORDINATOR_ADDRESS', 'JOB_COMPLETION_INDEX', 'JAX_NUM_PROCESSES')
  values = [os.environ.get(name) for name in names]
  if all(values):
    address, process, processes = map(str, values)
    if not (process.isdecimal() and processes.isdecimal()):
      raise ValueError(f'{names[1]}={process} and {names[2]}={processes}: give numbers')
    return Place(address, int(process), int(processes))
  from jax._src.clusters import ClusterEnv

  try:
    found = ClusterEnv.auto_detect_unset_distributed_params(
      None, None, None, None, None, int(start_s)
    )
  except Exception as error:  # of metadata servers, host names, Kubernetes
    raise ValueError(
      'this machine belongs to a cluster whose other processes cannot be found '
      f'({type(error).__name__}: {error}); give --coordinator, --process, --processes'
    ) from error
  coordinator, processes, process, device_ids = found
  if coordinator is None or process is None or processes is None:
    return None
  if os.environ.get('SLURM_STEP_NUM_NODES') == os.environ.get('SLURM_NTASKS'):
    device_ids = None  # a task per node has all its devices; JAX expects one per device
  return Place(coordinator, process, processes, device_ids)


def check(place: Place) -> None:
  """Raises ValueError unless the numbers and the address are well formed."""
  host, _, port = place.coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise ValueError(f'--coordinator={place.coordinator}: give host:port')
  if not 0 <= place.process < place.processes:
    raise ValueError(
      f'--process={place.process}: give 0 to {place.processes - 1}, for '
      f'--processes={place.processes}'
    )


def check_port(place: Place) -> None:
  """Raises ValueError where the coordinator's port is taken: gRPC would share it."""
  port = int(place.coordinator.rpartition(':')[2])
  try:
    with socket.create_server(('', port)):
      pass
  except OSError as error:
    raise ValueError(
      f'--coordinator={place.coordinator}: port {port} cannot be used '
      f'({error.strerror}); give one that is free'
    ) from None


def reach(place: Place, start_s: float) -> None:
  """Waits for the coordinator; the runtime would abort instead of raising."""
  deadline = time.monotonic() + start_s
  while not reachable(place.coordinator):
    if time.monotonic() > deadline:
      raise ValueError(
        f'process {place.process} of {place.processes}: no coordinator answers at '
        f'{place.coordinator} within {start_s:.0f} s; start process 0, or correct '
        '--coordinator'
      )
    time.sleep(0.2)


def reachable(address: str, timeout_s: float = 1.0) -> bool:
  """Whether something listens at host:port."""
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), timeout_s).close()
  except OSError:
    return False
  return True
