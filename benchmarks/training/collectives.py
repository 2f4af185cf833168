"""Times one collective between the devices of a run, and counts a run's collectives.

  MAIN=benchmarks.training.collectives launch/processes.sh 2 --devices=4 --restarts=0 \\
      [--length=100] [--times=10] [--count] [overrides]

1. `latency` times sums over all devices, one after another in a compiled loop, of one
   number and of vectors up to the size of the embedded policy;
2. `count` compiles the programs of the embedded default and counts their collectives.

The last line of process 0 is one JSON object; benchmarks.training.processes prints both
under its table.
"""

import argparse
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bapo_jax import main as main_lib
from bapo_jax import sharding
from bapo_jax.runtime import hosts
from bapo_jax.tools.plan import programs
from bapo_jax.training import budget
from bapo_jax.training.config import Config
from benchmarks import hlo, machine

SIZES = (1, 1000, 100_000)
COUNTED = ('train step', 'prefill', 'decode')


def loop(mesh: Mesh, length: int, summed: bool) -> Callable[[Array], Array]:
  """Takes x_n `length` times round a loop, with or without a sum over all devices."""

  def body(x_n: Array) -> Array:
    def once(_: Array, x_n: Array) -> Array:
      return (jax.lax.psum(x_n, mesh.axis_names) if summed else x_n) / mesh.size

    return jax.lax.fori_loop(0, length, once, x_n)

  # Sums make the loop's carry equal on every device, so that no check is needed.
  mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  return jax.jit(mapped)


def latency(mesh: Mesh, length: int, times: int) -> dict[int, float]:
  """Numbers on each device -> milliseconds of one sum, without the loop's own."""
  found = {}
  for size in SIZES:
    x_n = jax.device_put(jnp.ones(size), sharding.replicated(mesh))
    took, idle = (
      machine.seconds(functools.partial(loop(mesh, length, summed), x_n), times)
      for summed in (True, False)
    )
    found[size] = round(1e3 * (took - idle) / length, 4)
  return found


def count(config: Config, mesh: Mesh) -> dict[str, dict[str, int]]:
  """Program -> its collectives outside loops, and those of one way round every loop."""
  spec = programs.device_spec(config, mesh.devices.flat[0].platform)
  schedule = budget.choose_schedule(budget.sizes_of(config, spec), spec, mesh)
  found = {}
  made = programs.programs_of(programs.resolved(config, spec, mesh, schedule))
  for name in COUNTED:
    text = made[name].call.lower().compile().as_text() or ''
    looped = [run.looped for run in hlo.runs(text)]
    found[name] = {'in loops': sum(looped), 'outside': len(looped) - sum(looped)}
  return found


def main() -> None:
  """Prints the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, value in {'length': 100, 'times': 10, 'process': 0, 'processes': 1}.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--coordinator', default='')
  parser.add_argument('--count', action='store_true')
  args, given = parser.parse_known_args()
  if args.processes > 1:
    hosts.initialise(args.coordinator, args.process, args.processes)
  config = main_lib.read_config('configs/aime.py', given)
  mesh = sharding.make(**config.mesh.model_dump())
  result: dict[str, dict] = {'ms': latency(mesh, args.length, args.times)}
  if args.count:
    result['count'] = count(config, mesh)
  if hosts.is_first():
    print(json.dumps(result))
  hosts.finish(0)


if __name__ == '__main__':
  main()
