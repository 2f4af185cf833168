r"""Runs the processes behind verifier_pool.py: a fork server and its workers.

1. `main` loads math-verify once, then forks a warm worker for every socket it receives;
2. a worker first sends {"pid": number}, loads the files of custom functions and sends
   {}. A user's file may start threads, open connections or use JAX, which a fork would
   break, so the server never loads it;
3. then it reads requests from its socket, lines of JSON [seconds, samples], and replies
   {"verdicts": [...], "exits": bool, "seconds": processor time}. If the verdicts take
   more than `seconds` of processor time, the worker sends the byte OVERDUE instead and
   waits to be killed.

A worker and all processes that its functions start are a process group, which is killed
as a whole.

Started as `python -m bapo_jax.rewards.verifier_worker MEMORY_MB KIND KNOBS` with a
Unix socket as standard input; KNOBS are those of a class KIND of knobs.py, as JSON.
Does not import JAX or NumPy; a file of custom reward functions may.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback

from bapo_jax.custom_code import is_path
from bapo_jax.knobs import restore
from bapo_jax.rewards import knobs, score
from bapo_jax.rewards.latex import symbolic
from bapo_jax.rewards.score import Sample

OVERDUE = bytes([signal.SIGPROF])  # no JSON begins with this byte
PEAK_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes per unit of ru_maxrss


def main(memory_mb: int, kind: str, values: str) -> None:
  """Forks a worker for every socket received; ends together with the caller.

  A worker may take memory_mb MiB of address space more than this process, and exits
  after it has used half of that. `values` is a section of class `kind` as JSON.
  """
  control = socket.socket(fileno=os.dup(0))
  # A copy in a worker would hide the server's end. A function that reads its standard
  # input finds it empty.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  # It warns that its own alarms are off.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  if not all(map(is_path, json.loads(values)['rule'].split(','))):
    symbolic.equivalent(r'\frac{1}{2}', '0.5')
  workers = set()
  while True:
    try:
      request, sockets, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
      request = b''
      sockets = []
    # No other process gets the pid of a worker before this.
    workers = {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0] == 0}
    if not request:  # the caller has closed the socket, or has ended
      for group in (*workers, 0):  # even hanging workers; then this process
        with contextlib.suppress(OSError):
          os.killpg(group, signal.SIGKILL)
    if (pid := os.fork()) == 0:
      os.setpgid(0, 0)
      control.close()
      try:
        _work(socket.socket(fileno=sockets[0]), memory_mb, kind, values)
      except BaseException:
        traceback.print_exc()
      finally:
        os.killpg(0, signal.SIGKILL)
    workers.add(pid)
    os.close(sockets[0])


def _work(requests: socket.socket, memory_mb, kind, values):
  """Replies to requests with verdicts until half of the memory is used."""
  requests.sendall(json.dumps({'pid': os.getpid()}).encode() + b'\n')
  sys.stdout = sys.stderr  # written line by line: a killed process flushes nothing
  k = restore(getattr(knobs, kind), json.loads(values))
  scorer = score.make(k)
  space = memory_mb << 20
  if os.path.exists('/proc/self/statm'):  # on Linux: the pages that are mapped already
    with open('/proc/self/statm', encoding='ascii') as file:
      space += int(file.read().split()[0]) * resource.getpagesize()
  with contextlib.suppress(ValueError, OSError):  # macOS refuses every limit
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
  before = _peak()  # with the modules of custom functions
  # The interpreter's C code writes the number of a signal to this socket at once, even
  # while Python waits for a C function such as a product of huge integers. Python
  # accepts only a non-blocking socket here; the worker needs a blocking one.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  signal.signal(signal.SIGPROF, lambda *_: None)
  requests.setblocking(False)
  signal.set_wakeup_fd(requests.fileno())
  requests.setblocking(True)
  requests.sendall(b'{}\n')
  for line in requests.makefile('rb'):
    exits = False
    start = time.process_time()
    limit, request = json.loads(line)
    samples = [Sample(*fields) for fields in request]
    try:
      signal.setitimer(signal.ITIMER_PROF, limit)
      verdicts = scorer(samples)
    except MemoryError:
      verdicts = [k.result.failed(f'took over {memory_mb} MiB')] * len(samples)
      exits = True
    signal.setitimer(signal.ITIMER_PROF, 0)
    # Half of the limit: sympy's caches do not shrink.
    exits |= _peak() - before > memory_mb << 19
    seconds = time.process_time() - start
    reply = {'verdicts': verdicts, 'exits': exits, 'seconds': seconds}
    requests.sendall(json.dumps(reply).encode() + b'\n')
    if exits:
      return


def _peak():
  """Returns the largest resident memory of this process so far, bytes."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT


if __name__ == '__main__':
  main(int(sys.argv[1]), *sys.argv[2:])
