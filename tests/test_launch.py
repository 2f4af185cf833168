"""Launchers: what they run, and that shellcheck accepts them.

gcloud and srun are programs of these tests, not those of a cluster.
"""

import math
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys

import processes
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
SCRIPTS = sorted([*LAUNCH.rglob('*.sh'), *LAUNCH.rglob('*.sbatch')])
FLAGS = ['--config=configs/aime.py:7b', '--config.title=two words', "--workdir=it's"]

# Where its variables say, this is a worker: what it is sent runs in $WORKER, and Python
# is a program that leaves with the next status of $STATUSES.
GCLOUD = """\
#!/usr/bin/env bash
set -e
printf '%q ' "$@" >> "$WORKER/calls"; echo >> "$WORKER/calls"
cd "$WORKER"
case "$*" in
  *describe*state*) cat state ;;
  *describe*) echo '10.0.0.1;10.0.0.2' ;;
  *' create '*) echo READY > state ;;
  *' scp '*:bapo_jax.tar.gz*) cp "$5" bapo_jax.tar.gz ;;
  *' scp '*:bapo_jax/run.log*) cp bapo_jax/run.log "$6" ;;
  *--command=*'pip install'*)
    mkdir -p bapo_jax/.venv/bin; tar -xzf bapo_jax.tar.gz -C bapo_jax
    mkdir -p bapo_jax/launch; cp "$OLDPWD/launch/restarts.sh" bapo_jax/launch
    cp python bapo_jax/.venv/bin/python ;;
  *--command=*) for last; do :; done; bash -c "${last#--command=}" ;;
esac
"""
PYTHON = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" >> "$WORKER/given"
read -r status rest <<< "$(cat "$WORKER/statuses")"
echo "$rest" > "$WORKER/statuses"
echo "leaves with $status"
exit "$status"
"""


def run(*command, env=None, status=0):
  """stdout of a command of this repository; JAX's variables come from `env` alone."""
  variables = {'XLA_FLAGS': '', 'JAX_PLATFORMS': ''} | (env or {})
  return processes.call(*command, status=status, **variables).stdout


def words(line):
  """The words of a printed command, as bash reads them."""
  text = run('bash', '-c', f"printf '%s\\0' {line.removesuffix('&')}")
  return text.split('\0')[:-1]


def programs(directory, **texts):
  """A PATH on which these programs come first."""
  for name, text in texts.items():
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)
  return f'{directory}:{os.environ["PATH"]}'


def test_shellcheck_has_nothing_to_say():
  found = shutil.which('shellcheck', path=pathlib.Path(sys.executable).parent)
  assert found, 'requirements/dev.txt has it'
  others = [*ROOT.glob('.ci/*'), *ROOT.glob('benchmarks/on_gpu/*.sh')]
  run(found, '--external-sources', '--source-path', ROOT, *SCRIPTS, *others)


@pytest.mark.parametrize('script', sorted(ROOT.glob('.ci/*')), ids=lambda p: p.name)
@pytest.mark.parametrize(('argument', 'status'), [('--help', 0), ('--hlep', 2)])
def test_ci_with_an_argument_prints_its_help_and_deletes_nothing(
  script, argument, status, tmp_path
):
  copy = tmp_path / '.ci' / script.name
  for folder in ('.ci', 'launch'):
    shutil.copytree(ROOT / folder, tmp_path / folder)
  (tmp_path / '.venv').mkdir()
  path = programs(tmp_path, python3='#!/bin/sh\nexit 9\n')  # nothing is installed
  text = run('bash', copy, argument, env={'PATH': path}, status=status)
  assert 'Takes no arguments' in text
  assert (tmp_path / '.venv').exists()


def test_the_processes_of_a_dry_run():
  flags = ['--devices=6', *FLAGS]
  lines = run(LAUNCH / 'processes.sh', 3, '--dry-run', *flags).splitlines()
  assert len(lines) == 3 and all(line.endswith(' &') for line in lines)
  addresses = set()
  for i, line in enumerate(lines):
    parts = words(line)
    head = parts[:3]
    main = parts[3:10]
    address, *rest = parts[10:]
    devices = 'XLA_FLAGS=--xla_force_host_platform_device_count=2'
    assert head == ['env', 'JAX_PLATFORMS=cpu', devices]
    assert main == ['.venv/bin/python', '-u', '-m', 'bapo_jax.main', *FLAGS]
    assert rest == [f'--process={i}', '--processes=3']
    addresses.add(address)
  (address,) = addresses
  assert address.startswith('--coordinator=127.0.0.1:2')


def test_gpus_are_divided():
  flags = ['--dry-run', '--devices=4']
  text = run(LAUNCH / 'processes.sh', 2, *flags, env={'JAX_PLATFORMS': 'cuda'})
  found = [w for line in text.splitlines() for w in words(line) if 'CUDA' in w]
  assert found == ['CUDA_VISIBLE_DEVICES=0,1', 'CUDA_VISIBLE_DEVICES=2,3']
  # Weights are loaded on the CPU, which JAX would not start with `cuda` alone.
  assert [words(line)[1] for line in text.splitlines()] == [
    'JAX_PLATFORMS=cuda,cpu'
  ] * 2
  assert 'XLA_FLAGS' not in text


@pytest.mark.parametrize(
  ('wrong', 'platform'),
  [
    ([], 'cpu'),
    (['two'], 'cpu'),
    (['3', '--devices=4'], 'cpu'),
    (['2', '--restarts=x'], 'cpu'),
    (['2'], 'tpu'),  # a TPU is not divided
  ],
)
def test_wrong_numbers_of_processes_are_refused(wrong, platform):
  env = {'JAX_PLATFORMS': platform}
  run(LAUNCH / 'processes.sh', *wrong, '--dry-run', env=env, status=2)


def test_slurm_runs_one_process_per_task():
  text = run(LAUNCH / 'slurm.sbatch', '--dry-run', *FLAGS, env={'RESTARTS': '5'})
  command = words(text.strip())
  assert command[:3] == ['launch/restarts.sh', '5', 'srun']
  assert command[-len(FLAGS) :] == FLAGS
  text = (LAUNCH / 'slurm.sbatch').read_text()
  given = dict(re.findall('^#SBATCH --(.*?)=(.*)$', text, re.MULTILINE))
  # JAX gives a task the one GPU of its number on the node.
  assert given['ntasks-per-node'] == given['gpus-per-node']
  assert given['signal'].startswith('B:TERM@')


@pytest.mark.parametrize(
  ('status', 'requeue', 'calls'),
  [(0, '1', ''), (3, '1', ''), (143, '', ''), (143, '1', 'requeue 77')],
)
def test_slurm_enters_the_queue_again_only_when_asked_to(
  tmp_path, status, requeue, calls
):
  path = programs(
    tmp_path,
    srun=f'#!/bin/sh\nexit {status}\n',
    scontrol=f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n',
  )
  env = {'PATH': path, 'REQUEUE': requeue, 'SLURM_JOB_ID': '77', 'RESTARTS': '0'}
  env['PYTHON'] = sys.executable
  run(LAUNCH / 'slurm.sbatch', *FLAGS, env=env, status=status)
  called = tmp_path / 'calls'
  assert (called.read_text().strip() if called.exists() else '') == calls


@pytest.mark.parametrize('state', ['', 'READY', 'PREEMPTED'])
def test_a_run_on_a_pod_from_its_creation_to_its_status(tmp_path, state):
  worker = tmp_path / 'worker'
  worker.mkdir()
  (worker / 'state').write_text(state)
  (worker / 'statuses').write_text('1 3')
  (worker / 'bapo_jax').mkdir()
  (worker / 'bapo_jax' / 'run.status').write_text('0')  # of an earlier run
  path = programs(worker, gcloud=GCLOUD, python=PYTHON)
  env = {'PATH': path, 'WORKER': str(worker), 'LOGS': f'{tmp_path}/logs'}
  env['RESTART_AFTER'] = '0'
  # Restarted after 1, and 3 is final.
  text = run(LAUNCH / 'tpu_pod.sh', 'run', *FLAGS, env=env, status=3)
  assert sorted(os.listdir(tmp_path / 'logs')) == ['0.log', '1.log']
  log = (tmp_path / 'logs' / '0.log').read_text().splitlines()
  left = [line for line in log if line.startswith('leaves')]
  assert left == ['leaves with 1', 'leaves with 3']
  assert 'leaves with 3' in text
  asked = ['-u', '-m', 'bapo_jax.main', *FLAGS]
  assert (worker / 'given').read_text().splitlines() == 2 * asked
  calls = [line.split() for line in (worker / 'calls').read_text().splitlines()]
  made = [c[3] for c in calls if c[3] in ('create', 'delete')]
  assert made == {'': ['create'], 'READY': [], 'PREEMPTED': ['delete', 'create']}[state]


def test_the_jobset_has_one_pod_per_host_and_the_rule_of_restarts():
  jobset = yaml.safe_load((LAUNCH / 'gke' / 'jobset.yaml').read_text())
  job = jobset['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  (container,) = pod['containers']
  sides = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  chips = container['resources']['limits']['google.com/tpu']
  assert job['parallelism'] == job['completions'] == math.prod(map(int, sides)) // chips
  assert job['backoffLimit'] == 0 and pod['restartPolicy'] == 'Never'
  (rule,) = job['podFailurePolicy']['rules']
  final = {0, *rule['onExitCodes']['values']}
  text = (LAUNCH / 'restarts.sh').read_text()
  assert f'case $status in {" | ".join(map(str, sorted(final)))})' in text


# --- launch/processes.sh and restarts.sh with a program in place of main


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
    files = [self.home / f'coordinator{i}' for i in range(2)]
    processes.wait_until(lambda: all(file.exists() for file in files))

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
    assert not processes.is_alive(int((launcher.home / f'begun{i}.0').read_text()))


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
  words = ROOT / 'launch/restarts.sh', 3, 'bash', '-c', source, '-', *tries.split()
  done = processes.call(*words, status=status, cwd=tmp_path, RESTART_AFTER='0')
  assert (tmp_path / 'tries').stat().st_size == count
  assert done.stderr.count('launch: status ') == count - 1


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
