"""Compiles the programs of a run before their first call, in parallel."""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from jax.stages import Lowered

from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log


def compile_all(programs: Iterable[Lowered]) -> list[Lowered]:
  """Compiles programs in threads while the next are lowered; logs count and seconds.

  A jitted function finds its compiled program while the result exists. If processes
  compute together, they compile one program after another, all in the same order.
  """
  began = time.perf_counter()
  kept = dict[int, Lowered]()

  def different():
    for program in programs:
      if kept.setdefault(id(program.compiler_ir()), program) is program:
        yield program  # equal programs have the same module

  with ThreadPoolExecutor(1 if len(hosts.side()) > 1 else os.cpu_count()) as pool:
    list(pool.map(Lowered.compile, different()))
  log(f'Compiled {len(kept)} programs in {time.perf_counter() - began:.1f} s.')
  return list(kept.values())
