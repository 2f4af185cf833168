"""The directory of a run: which run it holds, and errors of writing in it.

1. `locked` makes the directory and keeps a second process out of it;
2. `open_workdir` refuses a directory that cannot be used or holds another run;
3. `writable` turns an error of the system into a sentence that names the file;
4. `check_shared` refuses processes of one run that see different directories;
5. `checkpoint_steps` lists the complete checkpoints.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_jax.runtime import exchange, files, hosts
from bapo_jax.runtime.progress import log

# Errors of writing only, whatever the file.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Something else stands in the place of a file, or nothing does: room would not help.
MISPLACED = (
  errno.ENOENT,
  errno.EEXIST,
  errno.EISDIR,
  errno.ENOTDIR,
  errno.ENOTEMPTY,
  errno.ELOOP,
)
LOCK = '.lock'
SHARED_S = 10.0  # a file system of several hosts shows a new file to all within seconds


@contextlib.contextmanager
def locked(workdir: str) -> Iterator[None]:
  """Makes the directory and holds its lock: one run at a time writes there.

  The kernel releases the lock when the process ends, however it ends; the file stays.
  On NFS the lock holds across machines, unless it is mounted with local_lock; a file
  system without locks is named, and the run goes on without one. Of several processes
  of a run the first one holds it.

  Raises:
    ValueError: another process holds it, or the directory cannot be written.
  """
  path = os.path.join(workdir, LOCK)
  if not hosts.is_first():
    yield
    return
  with contextlib.ExitStack() as stack:
    try:
      os.makedirs(workdir, exist_ok=True)
      # Not 'w': the name of the process that holds the lock stands in the file.
      file = stack.enter_context(open(path, 'a+', encoding='utf-8', errors='replace'))
    except OSError as error:
      raise _unusable(f'--workdir={workdir}', error) from error
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.readline(200).strip() or 'another process'
      raise ValueError(
        f'--workdir={workdir} is in use by {holder}; wait until that run ends, stop '
        'it, or give another --workdir'
      ) from None
    except OSError as error:
      log(
        f'{path} cannot be locked ({error.strerror}): nothing keeps a second process '
        'out of this directory.'
      )
    with writable(workdir), files.naming(path):
      file.truncate(0)
      file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
      file.write(f'{secrets.token_hex(8)}\n')  # of this run alone, for `check_shared`
      file.flush()
      os.fsync(file.fileno())  # other hosts read it while it is open here
    yield


def check_shared(workdir: str) -> None:
  """Returns when every process has seen the lock that process 0 holds in its directory.

  Raises:
    ValueError: this one does not see it, within SHARED_S.
  """
  if hosts.processes() == 1:
    return
  path = os.path.join(workdir, LOCK)
  held = exchange.merged({'lock': _text(path)} if hosts.is_first() else {})['lock']
  deadline = time.monotonic() + SHARED_S
  while _text(path) != held:
    if time.monotonic() > deadline:
      raise ValueError(
        f'--workdir={workdir} of process {hosts.process()} on {socket.gethostname()} '
        'is another directory than that of process 0; give one on a file system that '
        'all processes share'
      )
    time.sleep(0.2)
  hosts.together('shared')


def _text(path: str) -> str:
  """The content of a small file; '' where there is none that can be read."""
  try:
    with open(path, encoding='utf-8', errors='replace') as file:
      return file.read(400)
  except OSError:
    return ''


def check_writable(path: str, knob: str) -> None:
  """Makes the directory and writes a file there for a moment.

  Args:
    knob: names the directory in the sentence, as the user gave it.

  Raises:
    ValueError: the system refuses.
  """
  trial = os.path.join(path, f'.writable-{os.getpid()}')
  try:
    os.makedirs(path, exist_ok=True)
    with open(trial, 'w'):
      pass
    os.remove(trial)
  except OSError as error:
    raise _unusable(knob, error) from error


def _unusable(knob: str, error: OSError) -> ValueError:
  """The sentence for a directory that the system refuses."""
  return ValueError(
    f'{knob} cannot be used ({error.strerror}); give a directory that you may write to'
  )


def open_workdir(
  workdir: str, values: dict[str, Any], free: Sequence[str] = ()
) -> None:
  """Makes the directory and writes the config into its config.json.

  Args:
    values: the config, section -> knob -> value.
    free: sections and dotted knobs that may differ from those of the run in the
      directory.

  Raises:
    ValueError: it cannot be written, or holds a run with another config.
  """
  path = os.path.join(workdir, 'config.json')
  check_writable(workdir, f'--workdir={workdir}')
  begun = has_begun(workdir)
  if not os.path.lexists(path) and not begun:
    with writable(workdir):
      files.write_json(path, values)
  before = read_config(path)
  now = json.loads(json.dumps(values))
  changed = [
    f'{name}: {old!r} then, {new!r} now'
    for name, old, new in differences(before, now)
    if name not in free and name.split('.')[0] not in free
  ]
  # Nothing is measured yet where a run was refused before its first evaluation, say for
  # a tokenizer that is not there: the corrected command may then use the directory.
  if changed and begun:
    raise ValueError(
      f'--workdir={workdir} holds a run with another config '
      f'({"; ".join(changed[:4])}); give another --workdir, or the config it was '
      'started with'
    )
  with writable(workdir):
    files.write_json(path, now)


def has_begun(workdir: str) -> bool:
  """Whether a run has measured or saved anything here."""
  measured = os.path.lexists(os.path.join(workdir, 'metrics.jsonl'))
  return measured or bool(checkpoint_steps(workdir))


def read_config(path: str) -> dict[str, Any]:
  """The config of a run, section -> knob -> value, from its config.json.

  Raises:
    ValueError: the file is not there or holds none.
  """
  way_out = 'give another --workdir, or put the config of the run back'
  found = files.read_json(path, way_out)
  if not isinstance(found, dict):
    raise ValueError(f'{path} holds no config but {str(found)[:40]!r}; {way_out}')
  return found


def differences(
  before: Any, now: Any, name: str = ''
) -> Iterator[tuple[str, Any, Any]]:
  """(dotted name, old, new) of every value that differs; a missing one is None."""
  if isinstance(before, dict) and isinstance(now, dict):
    for key in sorted(set(before) | set(now)):
      dotted = f'{name}.{key}' if name else key
      yield from differences(before.get(key), now.get(key), dotted)
  elif before != now:
    yield name, before, now


@contextlib.contextmanager
def writable(workdir: str) -> Iterator[None]:
  """Names the file of the workdir that could not be written, and what is safe.

  Raises:
    ValueError: for an OSError about a file in the workdir, and for one of REFUSALS.
  """
  try:
    yield
  except OSError as error:
    path, home = (os.path.abspath(p) for p in (str(error.filename or ''), workdir))
    inside = error.filename and os.path.commonpath([path, home]) == home
    if not inside and error.errno not in REFUSALS:
      raise
    if error.errno in MISPLACED:
      raise ValueError(
        f'{error.filename} is not the file or directory that belongs there '
        f'({error.strerror}); move it away or put it back, and run the same command '
        'again'
      ) from error
    steps = checkpoint_steps(workdir)
    safe = f'the checkpoint of step {steps[-1]}' if steps else 'no checkpoint'
    raise ValueError(
      f'{error.filename or workdir} cannot be written ({error.strerror or error}); '
      f'{safe} is complete. Make room, or the directory writable, and the same command '
      f'with --workdir={workdir} goes on from there'
    ) from error


def log_mesh_change(before: dict[str, int] | None, now: dict[str, int]) -> None:
  """Logs that a run goes on over another mesh; each is axis -> devices."""
  if before and before != now:
    then, today = (' x '.join(f'{a} {n}' for a, n in m.items()) for m in (before, now))
    log(
      f'Another mesh ({then} then, {today} now): sums are rounded differently from here'
      ' on, so this run will not equal an unbroken one to the last bit.'
    )


def checkpoint_steps(workdir: str) -> list[int]:
  """Steps of the complete checkpoints, ascending; nothing is made or cleared.

  Raises:
    ValueError: <workdir>/checkpoints is there and is no directory that can be read.
  """
  path = os.path.join(workdir, 'checkpoints')
  try:
    names = os.listdir(path) if os.path.lexists(path) else []
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read as a directory ({error.strerror}); move it away and put '
      'the checkpoints back, or give another --workdir'
    ) from error
  # Not '007', which int() reads as well.
  return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
