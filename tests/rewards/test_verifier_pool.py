"""Workers that hang, grow, are killed or exit: no verdict is lost."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import is_alive, wait_until

from bapo_jax.rewards import verifier_pool
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample

HANGS = r'\boxed{10^9!}'  # for a lenient verdict, which evaluates it
ROOT = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def lenient(workers, **limits):
  """A pool of lenient workers."""
  knobs = Verification(strict=False, workers=workers, **limits)
  with contextlib.closing(verifier_pool.VerifierPool(knobs)) as pool:
    yield pool


def pids(pool):
  """Processes of the live workers."""
  return [worker.pid for worker in list(pool._workers.values()) if worker.pid]


@contextlib.contextmanager
def custom(folder, text, **limits):
  """A pool of one worker for the function `score` of a file with this text."""
  (folder / 'my.py').write_text(text)
  knobs = Verification(rule=f'{folder / "my.py"}:score', workers=1, **limits)
  with contextlib.closing(verifier_pool.VerifierPool(knobs)) as pool:
    yield pool


def submit(pool, answer, texts):
  """Futures of the verdicts of `math` on these texts."""
  return pool.submit([[Sample(text, answer, 'math')] for text in texts])


def halves(pool, n=1):
  """Submits n responses whose verdicts are known: right, wrong, right, ..."""
  fractions = [rf'\frac{{{i % 7 + 1}}}{{{2 * (i % 7 + 1) + i % 2}}}' for i in range(n)]
  return submit(pool, '1/2', [rf'\boxed{{{fraction}}}' for fraction in fractions])


def known(n):
  return [i % 2 == 0 for i in range(n)]


def verdicts(futures):
  return [verdict for future in futures for verdict in future.result()]


def rights(futures):
  return [verdict.right for verdict in verdicts(futures)]


def done(futures):
  return sum(future.done() for future in futures)


@contextlib.contextmanager
def throttled(pool, pause, run=0.02):
  """Stops the workers for `pause` seconds after every `run` seconds."""
  ended = threading.Event()

  def throttle():
    while not ended.wait(run):
      workers = pids(pool)
      for signal_, seconds in ((signal.SIGSTOP, pause), (signal.SIGCONT, 0)):
        for pid in workers:
          with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_)
        time.sleep(seconds)

  thread = threading.Thread(target=throttle)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def test_sigkill_in_mid_batch_loses_no_verdict():
  n = 300
  with lenient(2) as pool:
    futures = halves(pool, n)
    for share in (1 / 4, 3 / 4):
      wait_until(lambda share=share: done(futures) >= share * n)
      assert done(futures) < n
      killed = pids(pool)
      assert killed
      for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert rights(futures) == known(n)
    assert not set(killed) & set(pids(pool))


def test_an_answer_that_two_workers_died_of_is_undecided():
  with lenient(1, deadline=60.0) as pool:
    verdicts(halves(pool))
    futures = submit(pool, '3', [HANGS, r'\boxed{3.0}'])
    for _ in range(2):
      before = pids(pool)
      os.kill(before[0], signal.SIGKILL)
      wait_until(lambda before=before: pids(pool) not in (before, []) or done(futures))
      time.sleep(0.2)  # the worker has the request by now
    first, second = verdicts(futures)
    assert first == Verdict(None, '2 workers died of it', None)
    assert second.right


def test_an_answer_past_its_deadline_is_undecided_and_its_worker_dead():
  with lenient(1, deadline=0.3) as pool:
    verdicts(halves(pool))
    (old,) = pids(pool)
    late = verdicts(submit(pool, '3', [HANGS]))
    assert late == [Verdict(None, 'took over 0.3 s', None)]
    wait_until(lambda: not is_alive(old))
    assert rights(halves(pool)) == [True]


def test_the_fork_server_may_die_too():
  with lenient(2) as pool:
    verdicts(halves(pool, 4))
    pool._fork_server.process.kill()
    for pid in pids(pool):
      os.kill(pid, signal.SIGKILL)
    assert rights(halves(pool, 10)) == known(10)


def test_a_fork_server_that_cannot_start_says_why(monkeypatch, tmp_path):
  program = tmp_path / 'python'
  program.write_text('#!/bin/sh\necho "no module named sympy" >&2\nexit 1\n')
  program.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(program))
  with lenient(1) as pool, pytest.raises(RuntimeError, match='no module named sympy'):
    verdicts(halves(pool))


def test_where_memory_cannot_be_limited_answers_get_their_verdicts(
  monkeypatch, tmp_path
):
  (tmp_path / 'sitecustomize.py').write_text(
    'import resource\n'
    'def refuse(kind, limits): raise ValueError("limit exceeds maximum limit")\n'
    'resource.setrlimit = refuse\n'
  )
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  with lenient(1) as pool:
    assert rights(halves(pool, 2)) == known(2)


def test_nothing_is_left_when_it_closes():
  with lenient(2, deadline=60.0) as pool:
    verdicts(halves(pool, 4))
    futures = submit(pool, '3', [HANGS] * 9)
    processes = [*pids(pool), pool._fork_server.process.pid]
  wait_until(lambda: not any(map(is_alive, processes)))
  assert {v.reason for v in verdicts(futures)} == {'the pool was closed'}
  assert all(not thread.is_alive() for thread in pool._threads)
  pool.close()  # twice is once
  with pytest.raises(ValueError, match='closed'):
    halves(pool)


@pytest.mark.parametrize('end', [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_is_left_when_the_caller_ends(end):
  script = f"""
import time
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.verifier_pool import VerifierPool
pool = VerifierPool(Verification(strict=False, deadline=60.0))
submit = lambda text: pool.submit([[Sample(text, '3', 'math')]])[0]
submit(r'\\boxed{{3.0}}').result(), submit(r'\\boxed{{4.0}}').result()
for _ in range(2): future = submit(r'{HANGS}')
time.sleep(0.3)
workers = [worker.pid for worker in pool._workers.values()]
print(*workers, pool._fork_server.process.pid, flush=True)
{'future.result()' if end else ''}
"""
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  caller = subprocess.Popen([sys.executable, '-c', script], cwd=ROOT, **pipes)
  processes = [int(pid) for pid in caller.stdout.readline().split()]
  assert len(processes) >= 2, caller.communicate()
  if end:
    assert all(map(is_alive, processes))
    caller.send_signal(end)
  _, errors = caller.communicate(timeout=60)
  wait_until(lambda: not any(map(is_alive, processes)))
  assert ('KeyboardInterrupt' in errors) == (end == signal.SIGINT)
  if end is None:
    assert caller.returncode == 0 and not errors


def test_neither_pool_nor_worker_loads_jax():
  script = 'import sys, bapo_jax.rewards.verifier_pool; print(*sys.modules)'
  modules = subprocess.check_output([sys.executable, '-c', script], cwd=ROOT, text=True)
  assert 'bapo_jax.rewards.verifier_worker' in modules.split()
  assert not {'jax', 'numpy', 'transformers'} & set(modules.split())


def test_on_a_loaded_machine_honest_answers_get_their_verdicts():
  # About 70 ms of work each, so several slices of 20 ms: by wall time all are late.
  # Not slices of a few ms: on some machines a stopped process loses its caches and gets
  # nothing done in them.
  texts = [f'\\boxed{{(x+{i})^{{72}}}}' for i in range(1, 13)]
  golds = [f'(x+{i})^{{24}}(x^2+{2 * i}x+{i * i})^{{24}}' for i in range(1, 13)]
  pairs = zip(texts, golds, strict=True)
  requests = [[Sample(*pair, 'math')] for pair in pairs]
  deadline = 0.5
  with lenient(2, deadline=deadline, batch_deadline=60.0) as pool:
    # The first such answer of a worker takes 0.3 s of work on some machines. Others
    # than below, because sympy keeps its results.
    rights(pool.submit(requests[4:]))
    began = time.monotonic()
    with throttled(pool, 0.6):
      assert rights(pool.submit(requests[:4])) == [True] * 4
    # The premise: the answers of a worker took longer than a deadline each.
    assert time.monotonic() - began > 2 * deadline


def test_a_worker_that_stands_still_is_replaced_and_no_verdict_lost():
  with lenient(1) as pool:
    verdicts(halves(pool))
    pool._stalled = 0.5
    os.kill(pids(pool)[0], signal.SIGSTOP)
    assert rights(halves(pool, 3)) == known(3)


def test_a_batch_has_a_budget_of_processor_time_per_worker():
  with lenient(2, deadline=60.0, batch_deadline=0.5) as pool:
    spent = [v.reason for v in verdicts(submit(pool, '3', [HANGS] * 6))]
    assert spent == ['its batch was due'] * 6
    assert rights(halves(pool, 2)) == known(2)  # the next batch has its own budget


# --------------------------------------------------------------- custom functions


# Starts a process that writes its pid, and does what the response says.
CHILD = """
import os, subprocess, time
def score(sample):
  child = subprocess.Popen(['sleep', '600'])
  with open(os.path.join(os.path.dirname(__file__), 'child'), 'w') as file:
    file.write(str(child.pid))
  if sample.response == 'dies':
    os._exit(1)
  time.sleep(600 * (sample.response == 'hangs'))
  return 1.0
"""


@pytest.mark.parametrize('response', ['hangs', 'dies', 'returns'])
def test_what_a_function_started_ends_with_its_worker(tmp_path, response, monkeypatch):
  monkeypatch.setattr(verifier_pool, 'GRACE_S', 0.5)
  with custom(tmp_path, CHILD, timeout=0.5) as pool:
    verdicts(submit(pool, '', [response]))
    child = int((tmp_path / 'child').read_text())
    if response != 'returns':
      wait_until(lambda: not is_alive(child))
  wait_until(lambda: not is_alive(child))


def test_what_a_function_started_ends_when_its_caller_is_killed(tmp_path):
  (tmp_path / 'my.py').write_text(CHILD)
  script = f"""
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.verifier_pool import VerifierPool
pool = VerifierPool(Verification(rule='{tmp_path}/my.py:score'))
pool.submit([[Sample('hangs')]])[0].result()
"""
  caller = subprocess.Popen([sys.executable, '-c', script], cwd=ROOT)
  child = tmp_path / 'child'
  wait_until(lambda: child.exists() and child.read_text())
  pid = int(child.read_text())
  assert is_alive(pid)
  caller.kill()
  caller.wait()
  wait_until(lambda: not is_alive(pid))


TALKS = """
import logging, os, subprocess, sys
def score(sample):
  print('a number', sample.answer)
  logging.getLogger('judge').warning('a warning')
  print('an error', file=sys.stderr)
  subprocess.run(['echo', 'a child'])
  print('x' * 3_000_000)
  return float(sys.stdin.read() == '')
"""


def test_what_a_function_prints_appears_once_and_does_not_disturb(tmp_path, capfd):
  with custom(tmp_path, TALKS) as pool:
    for _ in range(2):
      assert rights(submit(pool, '7', ['a', 'b'])) == [True, True]
  out, err = capfd.readouterr()
  name = f'{tmp_path}/my.py:score: '
  shown = [line.removeprefix(name) for line in err.splitlines()]
  long = [line for line in shown if line.startswith('x')]
  assert sorted(set(shown) - set(long)) == [
    'a child',
    'a number 7',
    'a warning',
    'an error',
  ]
  assert len(shown) == 4 + len(long) < 20 and max(map(len, long)) <= 1000
  assert not out and err.count(name) == len(shown)


def test_a_file_may_use_jax_and_threads_when_it_is_loaded(tmp_path):
  # A fork has none of the threads of its parent.
  text = (
    'import queue, threading, jax.numpy as jnp\n'
    'ones, tasks = jnp.ones(4), queue.Queue()\n'
    'def serve():\n'
    '  while True:\n'
    '    tasks.get().put(1.0)\n'
    'threading.Thread(target=serve, daemon=True).start()\n'
    'def score(sample):\n'
    '  answer = queue.Queue()\n'
    '  tasks.put(answer)\n'
    '  return float(ones @ ones) / 4 * answer.get(timeout=2)\n'
  )
  with custom(tmp_path, text, deadline=60.0) as pool:
    assert rights(submit(pool, '', ['a', 'b'])) == [True, True]


def test_a_file_that_a_worker_cannot_load_is_an_error_with_its_reason(tmp_path, capfd):
  text = 'import sys\nassert "pytest" in sys.modules, "no tests"\ndef score(x): ...'
  with custom(tmp_path, text) as pool, pytest.raises(RuntimeError) as error:
    verdicts(submit(pool, '', ['a']))
  assert 'AssertionError: no tests (my.py, line 2)' in str(error.value)
