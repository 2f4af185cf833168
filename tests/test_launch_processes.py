"""launch/processes.sh and restarts.sh with a program in place of main: what they print,
how they end, what they run again, and what a signal does.
"""

import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
WAIT_S = 120

# --p1=hang,-9,3 is what process 1 does in its first, second and third attempt: it
# waits, kills itself, or leaves with a status. Files say what has happened.
FAKE = """\
import os, pathlib, signal, subprocess, sys, time
flags = dict(arg[2:].partition('=')[::2] for arg in sys.argv[1:])
number, home = flags['process'], pathlib.Path(flags['home'])
attempt = len(list(home.glob(f'begun{number}.*')))
def stop(signal_number, frame):
  print('asked by', signal_number, flush=True)
  time.sleep(0.5 + int(number))
  print('saved', flush=True)
  sys.exit(128 + signal_number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
tries = flags.get('p' + number, '0').split(',')
what = tries[min(attempt, len(tries) - 1)]
print('attempt', attempt, flush=True)
print('an error', file=sys.stderr, flush=True)
child = subprocess.Popen(['sleep', '600']) if what in ('hang', '7') else None
(home / f'begun{number}.{attempt}').write_text(str(child and child.pid))
(home / f'coordinator{number}').write_text(flags['coordinator'])
if what == 'hang':
  time.sleep(600)
if what.startswith('-'):
  os.kill(os.getpid(), -int(what))
print('without an end', end='', flush=True)
sys.exit(int(what))
"""


class Launcher:
  """processes.sh with the program above in place of main."""

  def __init__(self, home):
    (home / 'fake_main.py').write_text(FAKE)
    self.home = home
    env = {'PYTHON': sys.executable, 'MAIN': 'fake_main', 'PYTHONPATH': str(home)}
    self.env = os.environ | env

  def start(self, *flags):
    """A launch, with its output in a pipe."""
    return subprocess.Popen(
      ['launch/processes.sh', *map(str, flags), f'--home={self.home}'],
      cwd=ROOT,
      env=self.env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def run(self, *flags):
    """(status, lines of output) of a launch that ends by itself."""
    with self.start(*flags) as process:
      text, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, text.splitlines()

  def begun(self, number):
    """How often the process of this number was started."""
    return len(list(self.home.glob(f'begun{number}.*')))

  def wait_for_two(self):
    """Returns once both processes have begun."""
    deadline = time.monotonic() + WAIT_S
    while not all((self.home / f'coordinator{i}').exists() for i in range(2)):
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def writers(self):
    """The processes that number the lines."""
    listed = subprocess.run(['ps', '-eo', 'pid=,ppid=,args='], capture_output=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.decode().splitlines()]
    shells = {
      int(pid): int(parent)
      for pid, parent, args in rows
      if str(self.home) in args and '--once' in args
    }
    return [pid for pid, parent in shells.items() if parent in shells]


def alive(process):
  """Whether it runs; one that ended and that nobody has asked for does not."""
  state = subprocess.run(['ps', '-o', 'stat=', '-p', str(process)], capture_output=True)
  return state.stdout.strip()[:1] not in (b'', b'Z')


@pytest.fixture
def launcher(tmp_path):
  return Launcher(tmp_path)


def test_each_line_has_its_process_in_front(launcher):
  status, lines = launcher.run(3, '--devices=6')
  assert status == 0
  texts = ('attempt 0', 'an error', 'without an end')
  assert sorted(lines) == sorted(f'[{i}] {text}' for i in range(3) for text in texts)
  met = {path.read_text() for path in launcher.home.glob('coordinator*')}
  assert len(met) == 1, 'all meet at one port'


def test_the_first_failure_ends_all_with_its_status(launcher):
  flags = ['--p0=hang', '--p1=hang', '--p2=7', '--restarts=0', '--grace=1']
  status, _ = launcher.run(3, *flags)
  assert status == 7
  assert [launcher.begun(i) for i in range(3)] == [1, 1, 1]
  for i in range(3):  # and what they had started
    assert not alive(int((launcher.home / f'begun{i}.0').read_text()))


def test_all_processes_run_again_where_one_failed(launcher):
  status, lines = launcher.run(2, '--p1=-9,3', '--restarts=2')
  assert status == 3, lines
  assert launcher.begun(0) == launcher.begun(1) == 2
  said = [line for line in lines if line.startswith('launch: ')]
  assert said == ['launch: status 137; restart 1 of 2']


@pytest.mark.parametrize(
  ('tries', 'status', 'count'),
  [
    ('2 0', 2, 1),  # a wrong knob stays wrong
    ('3 0', 3, 1),  # what diverged would diverge again
    ('4 0', 0, 2),
    ('1 137 143 0', 0, 4),
    ('9 9 9 9 9', 9, 4),
  ],
)
def test_which_statuses_run_again(tmp_path, tries, status, count):
  source = 'echo >> tries; n=$(wc -l < tries); exit "${!n}"'
  done = subprocess.run(
    [ROOT / 'launch/restarts.sh', '3', 'bash', '-c', source, '-', *tries.split()],
    cwd=tmp_path,
    env=os.environ | {'RESTART_AFTER': '0'},
    capture_output=True,
    timeout=WAIT_S,
  )
  assert (done.returncode, (tmp_path / 'tries').stat().st_size) == (status, count)
  assert done.stderr.count(b'launch: status ') == count - 1


def test_a_signal_is_passed_on_and_nothing_runs_again(launcher):
  with launcher.start(2, '--p0=hang', '--p1=hang', '--grace=0') as process:
    launcher.wait_for_two()
    for writer in launcher.writers():
      os.kill(writer, signal.SIGTERM)  # as where a whole control group is asked to end
    process.terminate()
    text, _ = process.communicate(timeout=WAIT_S)
  # Without a grace they may still save: they were asked to stop.
  for i in range(2):
    assert text.count(f'[{i}] asked by 15\n') == 1 == text.count(f'[{i}] saved\n')
    assert launcher.begun(i) == 1
  assert process.returncode == 143


def test_ctrl_c_reaches_each_process_once(launcher):
  child, terminal = pty.fork()
  if child == 0:
    os.chdir(ROOT)
    # A shell cannot trap what was ignored before it, as under nohup and in background.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    flags = ['2', '--p0=hang', '--p1=hang', f'--home={launcher.home}']
    os.execve('launch/processes.sh', ['launch/processes.sh', *flags], launcher.env)
  launcher.wait_for_two()
  os.write(terminal, b'\x03')
  text = b''
  while True:
    try:
      text += (part := os.read(terminal, 4096))
    except OSError:  # the end, on Linux
      break
    if not part:
      break
  os.close(terminal)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
  for i in range(2):
    assert text.decode().count(f'[{i}] asked by 2\r\n') == 1
    assert f'[{i}] saved' in text.decode()


def test_a_signal_between_two_attempts_ends_it(tmp_path):
  command = ['bash', '-c', f'echo x >> {tmp_path}/tries; exit 1']
  with subprocess.Popen(
    ['launch/restarts.sh', '5', *command],
    cwd=ROOT,
    env=os.environ | {'RESTART_AFTER': '600'},
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stderr
    assert process.stderr.readline() == 'launch: status 1; restart 1 of 5\n'
    process.terminate()
    assert process.wait(timeout=WAIT_S) == 1
  assert (tmp_path / 'tries').read_text() == 'x\n'
