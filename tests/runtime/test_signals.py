"""No Ctrl-C is lost."""

import gc
import signal
import sys
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
