"""Stops a run on a signal: after the step, or at once on a second Ctrl-C or SIGTERM.

SIGHUP (a lost terminal) and SIGUSR1 (SLURM's --signal) stop it as SIGTERM does. Outside
the steps `explained` ends it on the first of the three, with a sentence. Python handles
signals in the main thread only: a run in another thread leaves them to its program.
"""

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log

ENDING = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
# Twice stops at once. A closed terminal sends SIGHUP twice: from the kernel and the
# shell; and SLURM sends SIGTERM some time after SIGUSR1.
URGENT = signal.SIGINT, signal.SIGTERM


@contextlib.contextmanager
def _handling(numbers: Any, handler: Any, wakeup: int) -> Iterator[None]:
  """Sets a handler, and the file that wakes another thread; restores both at the end.

  A signal that is ignored from the start stays so: nohup ignores SIGHUP.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {}
  for number in numbers:
    if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):
      before[number] = signal.signal(number, handler)
  woken = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(woken)
    for number, handler in before.items():
      signal.signal(number, handler)


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
  """Ends the process on a signal of ENDING, after it logs `sentence()`.

  The exit status is 128 + signal number, 143 for SIGTERM.

  Acts at once, also while XLA compiles: a Python signal handler would wait for the end
  of the call into XLA, and a scheduler might kill the process before. Python's handler
  in C writes the number of the signal to a socket, which a thread reads.
  """
  inbox, outbox = socket.socketpair()
  outbox.setblocking(False)

  def watch():
    with inbox:
      while number := inbox.recv(1):
        if number[0] in ENDING:
          log(sentence())
          hosts.leave(128 + number[0])
          os._exit(128 + number[0])

  threading.Thread(target=watch, daemon=True).start()
  with outbox, _handling(ENDING, lambda *_: None, outbox.fileno()):
    yield  # closing the outbox ends the thread


class Stop:
  """Remembers a signal; raises KeyboardInterrupt on the second of URGENT."""

  signal = 0
  current = 'this step'  # what the process finishes before it stops

  def __call__(self, number: int, frame: object) -> None:
    """Logs the first signal; interrupts on the second of URGENT."""
    if self.signal in URGENT and number in URGENT:
      raise KeyboardInterrupt
    if not self.signal:
      log(f'Finishing {self.current}. A second Ctrl-C or SIGTERM stops now.')
    self.signal = number


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
  """Yields a `Stop` that handles SIGINT and ENDING during the `with` block."""
  stop = Stop()
  with _handling((signal.SIGINT, *ENDING), stop, -1):  # `explained` pauses
    yield stop
