"""A lane runs functions in order, beside the caller."""

import threading

import pytest

from bapo_jax.runtime.lane import Lane, at_once


def test_functions_run_one_after_another_beside_the_caller():
  lane, order, go = Lane(), [], threading.Event()

  def slow():
    go.wait(60)
    order.append('slow')
    return threading.current_thread()

  first, second = lane.submit(slow), lane.submit(lambda: order.append('quick'))
  assert not first.done() and not second.done(), 'the caller does not wait'
  go.set()
  second.result(60)
  assert order == ['slow', 'quick']
  assert first.result() is not threading.current_thread()
  lane.close()


def test_a_failure_reaches_the_caller_and_the_lane_goes_on():
  lane = Lane()
  failed, fine = lane.submit(lambda: 1 // 0), lane.submit(lambda: 2)
  with pytest.raises(ZeroDivisionError):
    failed.result(60)
  assert fine.result(60) == 2
  lane.close()


def test_busy_seconds_include_those_of_the_running_function():
  # The clock stands still but for the functions, which set it.
  clock = [0.0]
  lane, started, go = Lane(lambda: clock[0]), threading.Event(), threading.Event()
  assert lane.busy() == 0

  def set_clock(seconds):
    clock[0] = seconds

  lane.submit(lambda: set_clock(3.0)).result(60)
  lane.submit(lambda: None).result(60)  # the first has ended
  assert lane.busy() == 3
  clock[0] = 10.0  # 7 seconds without a function
  running = lane.submit(lambda: (started.set(), go.wait(60)))
  started.wait(60)
  clock[0] = 14.0
  assert lane.busy() == 3 + 4
  go.set()
  running.result(60)
  lane.close()


def test_closing_does_not_wait_for_a_running_function():
  lane, go = Lane(), threading.Event()
  running = lane.submit(lambda: go.wait(60))
  lane.close()
  assert not running.done()
  go.set()
  assert running.result(60)


def test_without_a_lane_a_function_runs_at_once():
  assert at_once(threading.current_thread).result(0) is threading.current_thread()
