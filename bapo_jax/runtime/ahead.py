"""Describes the programs of a run, and compiles them before their first call.

A `Call` is a compiled function with its arguments. Training makes it with arrays and
calls it; before, it is made with abstract arrays, and `compile_all` compiles it.
"""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from bapo_jax import sharding
from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log


class Call:
  """A compiled function with its arguments and its mesh."""

  def __init__(self, mesh: Mesh | None, function: Wrapped, *args: Any, **kwargs: Any):
    self.mesh = mesh
    self.function = function
    self.args = args
    self.kwargs = kwargs

  def __call__(self) -> Any:
    """Calls the function."""
    with sharding.current(self.mesh):
      return self.function(*self.args, **self.kwargs)

  def lower(self) -> Lowered:
    """Lowers the function for these arguments, which may be abstract."""
    with sharding.current(self.mesh):
      return self.function.lower(*self.args, **self.kwargs)


def compile_all(programs: Iterable[Call]) -> list[Lowered]:
  """Compiles programs in threads while the next are lowered; logs count and seconds.

  A jitted function finds its compiled program while the result exists. If processes
  compute together, they compile one program after another, all in the same order.
  """
  began = time.perf_counter()
  kept = dict[int, Lowered]()

  def different():
    for call in programs:
      program = call.lower()
      if kept.setdefault(id(program.compiler_ir()), program) is program:
        yield program  # equal programs have the same module

  with ThreadPoolExecutor(1 if len(hosts.side()) > 1 else os.cpu_count()) as pool:
    list(pool.map(Lowered.compile, different()))
  log(f'Compiled {len(kept)} programs in {time.perf_counter() - began:.1f} s.')
  return list(kept.values())
