"""Watches the processes of a run: when one of them ends, all end, in one sentence.

1. every process beats once a second in the store of the coordinator, process 0;
   process 0 watches all the others, and each of them process 0;
2. `leave` announces why a process ends, and the others end with its sentence and its
   status; whoever misses one that falls silent announces it, with the status LOST;
3. a signal handler in C turns the runtime's abort, which Python cannot catch, into the
   same sentence: it comes at once where the coordinator is gone.

JAX's own heartbeats stand behind these, with BACKSTOP_S: they count by the clock, and
would end a run whose processes were all suspended for a while.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

LOST = 4  # exit status: another process fell silent
BEAT_S = 1.0
MISSED = 8  # beats of another process that do not come, counted by one's own
BACKSTOP_S = 300  # of JAX's heartbeats: where no Python thread runs any more
GRACE_S = 3.0  # process 0 holds the store open for the others to read why it ends
ENDS, BEATS = 'bapo/end', 'bapo/beat'

Store = Any  # the client of JAX's distributed runtime


def console(text: str) -> None:
  """Writes a line to stderr, whatever state Python is in."""
  with contextlib.suppress(OSError):
    os.write(2, f'bapo_jax: {" ".join(text.split())}\n'.encode())


class Watch:
  """The watch of one process over the others, and its own end.

  Args:
    process, processes: this one, and how many there are.
    store: of the coordinator; its calls may block for minutes where that host is gone.
    beat_s: seconds between two beats.
  """

  def __init__(
    self, process: int, processes: int, store: Store, beat_s: float = BEAT_S
  ):
    self.process, self.processes, self._store = process, processes, store
    self._beat_s = beat_s
    self._leaving = threading.Lock()
    self.status: int | None = None  # with which this process is about to exit
    self._beats: dict[int, str] = {}  # of those watched: the newest seen
    self._ends: dict[int, tuple[int, str]] = {}  # process -> its status and sentence
    self._lost: set[int] = set()  # nobody waits for these
    self._broken = False
    self._rounds = 0  # exchanges with the store

  def start(self) -> None:
    """Begins to beat and to watch, in threads of their own."""
    for target in (self._exchange, self._decide):
      threading.Thread(target=target, name=target.__name__, daemon=True).start()

  @property
  def name(self) -> str:
    """This process, for a sentence."""
    return f'process {self.process} of {self.processes}'

  def _exchange(self) -> None:
    """Beats, and reads beats and ends; the store may hang, and nothing else waits."""
    mine = f'{BEATS}/{self.process}/n'
    watched = BEATS if self.process == 0 else f'{BEATS}/0'
    while not self._broken:
      try:
        self._store.key_value_set(mine, str(self._rounds), allow_overwrite=True)
        beats = self._store.key_value_dir_get(watched)
        self._read_ends()
      except Exception:  # of whatever class: the coordinator does not answer
        self._broken = True
        return
      self._beats = {int(key.split('/')[-2]): value for key, value in beats}
      self._rounds += 1
      time.sleep(self._beat_s)

  def _read_ends(self) -> None:
    for key, value in self._store.key_value_dir_get(ENDS):
      status, sentence = json.loads(value)
      self._ends[int(key.rsplit('/', 1)[-1])] = status, sentence

  def _decide(self) -> None:
    """Ends this process when another has ended, or has missed its beats."""
    others = range(1, self.processes) if self.process == 0 else [0]
    seen: dict[int, Any] = {}
    missed = dict.fromkeys(others, 0)
    while True:
      time.sleep(self._beat_s)
      others_ends = {i: end for i, end in self._ends.items() if i != self.process}
      if ended := {i: end for i, end in others_ends.items() if end[1]}:
        i = min(ended)
        status, sentence = ended[i]
        self._end(status, f'{self.name} ends with process {i}: {sentence}')
      if self._broken:
        self._end(LOST, self.silent(0))
      for i in others:
        # Where the exchange hangs, nothing is seen of process 0 either.
        now = self._beats.get(i), self._rounds if self.process else 0
        missed[i] = missed[i] + 1 if seen.get(i) == now else 0
        seen[i] = now
        if missed[i] >= MISSED:
          self._lost.add(i)
          self._end(LOST, self.silent(i))

  def silent(self, i: int) -> str:
    """The sentence for a process that is gone."""
    return (
      f'{self.name}: process {i} is gone (it was killed, or its host is); the same '
      'command on all of them goes on from the newest checkpoint'
    )

  def _end(self, status: int, sentence: str) -> NoReturn:
    """Prints the sentence, announces it, and ends the process."""
    if not self._leaving.acquire(blocking=False):
      time.sleep(10 * GRACE_S)  # the main thread is leaving, with a sentence of its own
    console(sentence)
    self._announce(status, sentence)
    os._exit(status)

  def _announce(self, status: int, sentence: str) -> None:
    """Tells the others; process 0 waits until they have read it, or GRACE_S.

    Args:
      sentence: why; '' where all come to their end together.
    """
    self.status = status

    def tell() -> None:
      with contextlib.suppress(Exception):
        mine = f'{ENDS}/{self.process}'
        self._store.key_value_set(mine, json.dumps([status, sentence]))
        while self.process == 0 and len({*self._ends} | self._lost) < self.processes:
          self._read_ends()
          time.sleep(self._beat_s / 10)

    teller = threading.Thread(target=tell, daemon=True)  # the store may hang
    teller.start()
    teller.join(GRACE_S)

  def leave(self, status: int, sentence: str) -> NoReturn:
    """Ends this process, and the others with its sentence."""
    if not self._leaving.acquire(blocking=False):
      time.sleep(10 * GRACE_S)  # the watch is ending this process
    sys.stdout.flush()
    sys.stderr.flush()
    self._announce(status, sentence)
    os._exit(status)

  def finish(self, status: int) -> NoReturn:
    """Ends this process when all have come here; all give the same status."""
    sys.stdout.flush()
    sys.stderr.flush()
    a_week = 7 * 24 * 3600 * 1000
    try:
      self._store.wait_at_barrier('bapo/finish', a_week)
    except Exception:  # another is gone: the watch says so
      self.explain()
      os._exit(LOST)
    if not self._leaving.acquire(blocking=False):
      time.sleep(10 * GRACE_S)
    self._announce(status, '')
    os._exit(status)

  def explain(self) -> None:
    """Waits until a lost process is noticed: an error of the runtime says it first."""
    time.sleep((MISSED + 3) * self._beat_s)


HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []  # C holds no reference


def on_abort(
  sentence: Callable[[], str], status: Callable[[], int | None] = lambda: None
) -> None:
  """When the runtime aborts, prints the sentence and exits with the status LOST.

  By C's `signal`: a handler of Python's runs in the main thread, and abort() does not
  wait for it.

  Args:
    status: of a process that is leaving in any case; None: it was to go on.
  """

  def handle(number: int) -> None:
    del number
    leaving = status()
    if leaving is not None:
      os._exit(leaving)
    console(sentence())
    os._exit(LOST)

  handler = HANDLER(handle)
  _handlers.append(handler)
  libc = ctypes.CDLL(None)
  libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, HANDLER], ctypes.c_void_p
  libc.signal(signal.SIGABRT, handler)
