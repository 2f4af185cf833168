"""No Ctrl-C is lost."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bapo_jax.runtime import signals


def test_an_interrupt_inside_a_callback_of_the_garbage_collector_is_not_lost():
  def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)

  gc.callbacks.append(interrupt)
  with signals.none_lost(), pytest.raises(KeyboardInterrupt):
    gc.collect()
    for _ in range(500):  # interrupt_main does not end a sleep
      time.sleep(0.01)


def test_other_errors_in_callbacks_are_printed_as_ever(capsys):
  class Raises:
    def __del__(self):
      raise ValueError('from a finaliser')

  before = sys.unraisablehook
  sys.unraisablehook = sys.__unraisablehook__  # the test runner has one of its own
  try:
    with signals.none_lost():
      Raises()
  finally:
    sys.unraisablehook = before
  assert 'from a finaliser' in capsys.readouterr().err


BUSY = """
import hashlib
from bapo_jax.runtime import signals
def outside():
  print('outside', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # minutes inside of one C function
with signals.explained(lambda: 'Stopped: nothing is saved.'):
  with signals.stoppable() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print('went on', flush=True)
  outside()
"""


def test_a_run_inside_of_a_library_ends_at_once_with_a_sentence():
  """SIGTERM is remembered in `stoppable`, and ends the process outside."""
  process = subprocess.Popen(
    [sys.executable, '-c', 'import os, signal' + BUSY],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': os.getcwd()},
  )
  assert process.stdout is not None
  try:
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0].startswith('Finishing this step') and lines[1] == 'went on\n'
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == 'Stopped: nothing is saved.\n'
    assert process.returncode == 128 + signal.SIGTERM
  finally:
    process.kill()


def test_a_block_that_ends_restores_the_handlers():
  before, others = signal.getsignal(signal.SIGTERM), {*threading.enumerate()}
  with signals.explained(lambda: ''):
    (thread,) = {*threading.enumerate()} - others
    assert signal.getsignal(signal.SIGTERM) != before
  thread.join(5)
  assert not thread.is_alive() and signal.getsignal(signal.SIGTERM) == before
  assert signal.set_wakeup_fd(-1) == -1
