"""Where the wall time goes, by a clock that the tests move by hand."""

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import processes
import pytest

from bapo_jax.runtime import progress, signals
from bapo_jax.runtime.lane import Lane


class Hand:
  """A clock's hand: call it for the time, add to `t` to let time pass."""

  t = 100.0

  def __call__(self):
    return self.t


def test_inner_phase_is_not_counted_in_the_outer():
  hand = Hand()
  timer = progress.PhaseTimer(hand)
  hand.t += 1  # in no phase
  with timer('sample'):
    hand.t += 2
    with timer('verify'):
      hand.t += 4
    hand.t += 8
    with pytest.raises(KeyError), timer('sample'):  # inside itself: charged once
      hand.t += 16
      raise KeyError
  # sample 2 + 8 + 16, verify 4; the second outside is of no phase
  assert timer.seconds == {'sample': 26.0, 'verify': 4.0}
  # 1 + 2 + 4 + 8 + 16 = 31 seconds have passed
  assert timer.since() == {'sample': 26.0, 'verify': 4.0, 'other': 1.0}


def test_since_counts_what_is_new_even_in_an_open_phase():
  hand = Hand()
  timer = progress.PhaseTimer(hand)
  with timer('update'):
    hand.t += 3
    assert timer.since() == {'update': 3.0, 'other': 0.0}
    hand.t += 5
  hand.t += 0.5
  assert timer.since() == {'update': 5.0, 'other': 0.5}
  assert timer.since() == {'other': 0.0}
  assert timer.seconds == {'update': 8.0}


@pytest.mark.parametrize('terminal', [False, True])
def test_only_a_terminal_gets_a_bar(monkeypatch, terminal):
  stream = io.StringIO()
  stream.isatty = lambda: terminal
  monkeypatch.setattr(sys, 'stderr', stream)
  monkeypatch.setattr(progress, 'UPDATE_S', 0)
  with progress.progress_bar(302, 'training', 'step', initial=300) as bar:
    for _ in range(2):
      bar.update(1)
  assert ('302/302' in stream.getvalue()) == terminal
  assert terminal or not stream.getvalue()


# ------------------------------------------------- a console that cannot be written

CONSOLE = """
from bapo_jax.runtime import progress
progress.open_console()
for _ in range(2000):
  progress.log('accuracy 0.500 \u00b1 0.021')
print('printed \u00b1')
import os
file = os.open(os.devnull, os.O_WRONLY)
assert file > 2, file
"""


@pytest.mark.parametrize('console', ['>&-', '> /dev/full', '| head -1', '2>&- >&-'])
def test_a_console_that_cannot_be_written_ends_nothing(console, tmp_path):
  command = f'{{ "$0" -c "$1"; echo $? > "$2"; }} {console}'
  status = tmp_path / 'status'
  done = subprocess.run(
    ['bash', '-c', command, sys.executable, CONSOLE, status],
    env=os.environ | {'PYTHONPATH': os.getcwd()},
    stderr=subprocess.PIPE,
    text=True,
  )
  assert status.read_text() == '0\n' and not done.stderr, done.stderr


def test_a_character_that_the_console_cannot_encode_is_escaped():
  done = processes.call(sys.executable, '-c', CONSOLE, PYTHONIOENCODING='ascii')
  assert done.stdout.splitlines()[0] == 'accuracy 0.500 \\xb1 0.021'


@pytest.mark.parametrize('error', [OSError, ValueError])
def test_a_console_of_a_python_program_that_fails_ends_nothing(monkeypatch, error):
  class Broken(io.StringIO):
    def write(self, text):
      raise error(text)

  for stream in (Broken(), None):
    monkeypatch.setattr(sys, 'stdout', stream)
    progress.log('a line')


# ----------------------------------- a lane runs functions in order, beside the caller


def test_busy_seconds_include_those_of_the_running_function():
  lane, go = Lane(), threading.Event()
  assert lane.busy() == 0
  lane.submit(lambda: time.sleep(0.05)).result(60)
  running = lane.submit(lambda: go.wait(60))
  before = lane.busy()
  time.sleep(0.05)
  assert lane.busy() >= before + 0.05 >= 0.1
  go.set()
  running.result(60)
  lane.submit(lambda: None).result(60)  # those before it have ended
  idle = lane.busy()
  time.sleep(0.05)
  assert lane.busy() < idle + 0.05
  lane.close()


# ------------------------------------------------------------------- no Ctrl-C is lost


def test_an_interrupt_inside_a_callback_of_the_garbage_collector_is_not_lost():
  def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)

  gc.callbacks.append(interrupt)
  with signals.none_lost(), pytest.raises(KeyboardInterrupt):
    gc.collect()
    for _ in range(500):  # interrupt_main does not end a sleep
      time.sleep(0.01)


@contextlib.contextmanager
def started(*code):
  """A Python process with its output in a pipe, killed at the end."""
  with subprocess.Popen(
    [sys.executable, '-c', *code],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': os.getcwd()},
  ) as process:
    try:
      yield process
    finally:
      process.kill()


ENDED = """
import os, signal, sys, time
from bapo_jax.runtime import signals
if sys.argv[1] == 'inside':
  with signals.stoppable() as stop:
    print('began', flush=True)
    while not stop.signal:
      time.sleep(0.01)
    os.kill(os.getpid(), stop.signal)  # the shell repeats what the kernel sent
    time.sleep(0.1)
  sys.exit(128 + stop.signal)
with signals.explained(lambda: 'Stopped.'):
  print('began', flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize('where', ['inside', 'outside'])
@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGUSR1])
def test_a_lost_terminal_and_slurm_end_a_run_as_sigterm_does(number, where):
  with started(ENDED, where) as process:
    assert process.stdout.readline() == 'began\n'
    process.send_signal(number)
    line = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + number
    assert line.startswith('Finishing' if where == 'inside' else 'Stopped.')


def test_what_nohup_ignores_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with signals.explained(lambda: ''), signals.stoppable() as stop:
      os.kill(os.getpid(), signal.SIGHUP)
      assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not stop.signal
  finally:
    signal.signal(signal.SIGHUP, before)


def test_only_ctrl_c_and_sigterm_stop_at_once():
  first, slurm = signal.SIGTERM, signal.SIGUSR1
  stop = signals.Stop()
  for number in (signal.SIGHUP, signal.SIGHUP, slurm, first):
    stop(number, None)
    assert stop.signal == number
  with pytest.raises(KeyboardInterrupt):
    stop(signal.SIGINT, None)


def test_another_thread_leaves_the_signals_to_the_program():
  def run():
    with signals.explained(lambda: ''), signals.stoppable() as stop:
      handlers.append(signal.getsignal(signal.SIGTERM))
    assert not stop.signal

  handlers = [signal.getsignal(signal.SIGTERM)]
  with futures.ThreadPoolExecutor(1) as threads:
    threads.submit(run).result()
  assert handlers[0] == handlers[1]


def test_a_block_that_ends_restores_the_handlers():
  before, others = signal.getsignal(signal.SIGTERM), {*threading.enumerate()}
  with signals.explained(lambda: ''):
    (thread,) = {*threading.enumerate()} - others
    assert signal.getsignal(signal.SIGTERM) != before
  thread.join(5)
  assert not thread.is_alive() and signal.getsignal(signal.SIGTERM) == before
  assert signal.set_wakeup_fd(-1) == -1
