r"""The processes behind verifier_pool.py: a fork server and the workers that it forks.

1. `main` loads math-verify once, then forks a warm worker for every socket sent to it;
2. `work` reads requests from that socket, [rule, answer, text] as a line of JSON, and
   replies {"verdict": [...], "exits": bool, "seconds": processor time}; its first
   line is {"pid": number}.

Run by `python -m bapo_jax.rewards.verifier_worker MEMORY_MB RECYCLE STRICT` with a
Unix socket as standard input. Neither JAX nor NumPy is loaded here.
"""

import json
import logging
import os
import resource
import signal
import socket
import sys
import time

from bapo_jax.rewards import symbolic, verifiers
from bapo_jax.rewards.verdict import Verdict

PEAK_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes of ru_maxrss


def main(memory_mb: int, recycle: int, strict: bool) -> None:
  """Forks a worker for every socket received; ends when the caller does.

  Args:
    memory_mb: address space of a worker, 2^20 bytes.
    recycle: answers after which a worker exits.
    strict: of verifiers.verify.
  """
  control = socket.socket(fileno=os.dup(0))
  os.close(0)  # a worker must not hold it: the caller would not see this process die
  logging.disable()  # math-verify warns that its own alarms are off
  symbolic.equivalent(r'\frac{1}{2}', '0.5')
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
  while True:
    try:
      request, sockets, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
      request, sockets = b'', []
    if not request:
      os.killpg(0, signal.SIGKILL)  # workers that hang included, and itself
    if os.fork() == 0:
      control.close()
      try:
        work(socket.socket(fileno=sockets[0]), memory_mb, recycle, strict)
      finally:
        os._exit(0)
    os.close(sockets[0])


def work(requests: socket.socket, memory_mb: int, recycle: int, strict: bool) -> None:
  """Verifies line by line; returns after `recycle` answers, or where memory ran out."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
  requests.sendall(json.dumps({'pid': os.getpid()}).encode() + b'\n')
  for count, line in enumerate(requests.makefile('rb'), 1):
    exits, began = count == recycle, time.process_time()
    try:
      rule, answer, text = json.loads(line)
      verdict = verifiers.verify(rule, answer, text, strict=strict)
    except MemoryError:
      verdict, exits = Verdict(None, f'took over {memory_mb} MiB', None), True
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
    exits |= peak > memory_mb << 19  # half: sympy's caches do not shrink
    seconds = time.process_time() - began
    reply = {'verdict': verdict, 'exits': exits, 'seconds': seconds}
    requests.sendall(json.dumps(reply).encode() + b'\n')
    if exits:
      return


def processor_time(pid: int) -> float:
  """Seconds of processor time that a process has used.

  Wall time where the system does not say (macOS), so that a limit still holds there.

  Raises:
    OSError: there is no such process.
  """
  if sys.platform != 'linux':
    return time.monotonic()
  return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


if __name__ == '__main__':
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == 'True')
