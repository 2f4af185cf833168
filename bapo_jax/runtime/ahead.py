"""Compiles the programs of a run before their first call, in parallel."""

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.stages import Lowered

from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log

HIT = '/jax/compilation_cache/cache_hits'


def compile_all(programs: Iterable[Lowered]) -> list[Lowered]:
  """Compiles programs in threads while the next are lowered; logs count and seconds.

  A jitted function finds its compiled program while the result exists. If processes
  compute together, they compile one program after another, all in the same order.
  """
  began = time.perf_counter()
  kept = dict[int, Lowered]()
  threads = set()
  hits = []

  def note(event, **_: object):
    if event == HIT and threading.get_ident() in threads:
      hits.append(event)

  def compile_one(program: Lowered):
    threads.add(threading.get_ident())
    program.compile()

  def different():
    for program in programs:
      if kept.setdefault(id(program.compiler_ir()), program) is program:
        yield program  # equal programs have the same module

  jax.monitoring.register_event_listener(note)
  try:
    with ThreadPoolExecutor(1 if hosts.processes() > 1 else os.cpu_count()) as pool:
      list(pool.map(compile_one, different()))
  finally:
    jax.monitoring.unregister_event_listener(note)
  seconds = time.perf_counter() - began
  log(f'Compiled {len(kept)} programs in {seconds:.1f} s ({len(hits)} from the cache).')
  return list(kept.values())
