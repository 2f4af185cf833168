"""Stops a run on SIGINT or SIGTERM: after the step, or at once on a second signal.

Outside the steps `explained` ends it on the first SIGTERM, with a sentence.
"""

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
  """Re-raises a KeyboardInterrupt that Python dropped.

  Python prints and drops an exception raised inside a finaliser or a garbage-collector
  callback (JAX registers one), and the program continues.
  """
  before = sys.unraisablehook

  def hook(lost: 'sys.UnraisableHookArgs'):
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      return before(lost)
    # Python would also drop an interrupt that this hook raises.
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before


@contextlib.contextmanager
def explained(sentence: Callable[[], str]) -> Iterator[None]:
  """Ends the process on SIGTERM with status 143, after it logs `sentence()`.

  Acts at once, also while XLA compiles: a Python signal handler would wait for the end
  of the call into XLA, and a scheduler might kill the process before. Python's handler
  in C writes the number of the signal to a socket, which a thread reads.
  """
  inbox, outbox = socket.socketpair()
  outbox.setblocking(False)

  def watch():
    with inbox:
      while number := inbox.recv(1):
        if number[0] == signal.SIGTERM:
          log(sentence())
          hosts.leave(128 + signal.SIGTERM)
          os._exit(128 + signal.SIGTERM)

  threading.Thread(target=watch, daemon=True).start()
  before = signal.signal(signal.SIGTERM, lambda *_: None)
  wakeup = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, before)
    outbox.close()  # ends the thread


class Stop:
  """Remembers the first SIGINT or SIGTERM; raises KeyboardInterrupt on the second."""

  signal = 0
  current = 'this step'  # what the process finishes before it stops

  def __call__(self, number: int, frame: object) -> None:
    """Remembers the first signal and logs it; interrupts on the second."""
    if self.signal:
      raise KeyboardInterrupt
    self.signal = number
    log(f'Finishing {self.current}. Send the signal again to stop now.')


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
  """Yields a `Stop` that handles SIGINT and SIGTERM during the `with` block."""
  stop = Stop()
  wakeup = signal.set_wakeup_fd(-1)  # `explained` pauses
  before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(wakeup)
