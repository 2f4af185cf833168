"""Guards the directory of a run: one writer, one config, errors that name the file."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_jax.runtime import files, hosts
from bapo_jax.runtime.progress import log

# Only a failed write raises these errors.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
LOCK = '.lock'
SECTIONS = {'steps', 'sampler', 'clip'}  # every config.json of a run has them
# What a run replaces in its workdir; without the config of a run, files of others.
RESULTS = ('config.json', 'resolved.json', 'metrics.jsonl', 'updates.jsonl')
RESULTS += ('report.html', 'report.json', 'groups', 'checkpoints')
SHARED_S = 10.0  # a shared file system shows a new file to all hosts within seconds


@contextlib.contextmanager
def locked(workdir: str) -> Iterator[None]:
  """Makes the directory and locks it, so that only one run at a time writes there.

  The kernel releases the lock when the process ends for any reason. On NFS the lock
  works across machines unless the mount has local_lock. On a file system without locks
  the run continues without a lock. Process 0 locks for all processes of a run.

  Raises:
    ValueError: another run holds the lock, or the directory cannot be written, or has
      files of another program.
  """
  with contextlib.ExitStack() as stack:
    with hosts.together():
      if hosts.is_first():
        _lock(workdir, stack)
    yield


def _lock(workdir, stack: contextlib.ExitStack):
  """Locks the directory until the stack closes; the lock file names the process."""
  check_ours(workdir)
  check_writable(workdir, f'--workdir={workdir}')
  path = os.path.join(workdir, LOCK)
  with writable(workdir), files.naming(path):
    # Not 'w', which would delete the name of the process that holds the lock.
    opened = open(path, 'a+', encoding='utf-8', errors='replace')  # noqa: SIM115
    file = stack.enter_context(opened)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.readline(200).strip() or 'another process'
      raise ValueError(
        f'--workdir={workdir} is in use by {holder}; stop it or give another --workdir'
      ) from None
    except OSError as error:
      log(
        f'{path} cannot be locked ({error.strerror}), so a second run in this '
        'directory would not be refused; do not start one.'
      )
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.write(f'{secrets.token_hex(8)}\n')  # differs in every run, for `check_shared`
    file.flush()
    os.fsync(file.fileno())  # other hosts read the file while it is open here


def check_shared(workdir: str) -> None:
  """Waits until every process can read the lock that process 0 holds in the directory.

  Raises:
    ValueError: a process cannot read the lock within SHARED_S seconds.
  """
  if len(hosts.side()) == 1:
    return
  path = os.path.join(workdir, LOCK)
  held = hosts.everyones(_text(path))[0]
  deadline = time.monotonic() + SHARED_S
  with hosts.together():
    while _text(path) != held:
      if time.monotonic() > deadline:
        raise ValueError(
          f'--workdir={workdir} of process {hosts.process()} on {socket.gethostname()} '
          'is not the directory of process 0; give a directory that all processes share'
        )
      time.sleep(0.2)


def _text(path):
  """Returns the content of a small file; '' if it cannot be read."""
  with contextlib.suppress(OSError):
    return pathlib.Path(path).read_text('utf-8', 'replace')
  return ''


def check_ours(workdir: str) -> None:
  """Raises a ValueError if a run would replace files of another program there."""
  for name in RESULTS:
    path = os.path.join(workdir, name)
    if os.path.lexists(path):
      read_config(workdir, f'has {path}, which a run would replace, and')


def check_writable(path: str, knob: str) -> None:
  """Makes the directory; raises ValueError, naming the flag `knob`, if not writable."""
  try:
    os.makedirs(path, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    reason = f'{knob} cannot be used ({error.strerror})'
    raise ValueError(f'{reason}; give a directory that you may write to') from error


def open_workdir(
  workdir: str, values: dict, found: dict, free: Sequence[str] = ()
) -> None:
  """Makes the directory, and writes config.json and resolved.json.

  Args:
    values: section -> knob -> value, as the user wrote them.
    found: what the program found: `config`, with every value that the run keeps;
      `decided`, dotted knob -> value of each knob that is None in `values`; `code`,
      dotted knob -> files of its functions, each with a digest.
    free: sections and dotted knobs that may differ from those of an earlier start.

  Raises:
    ValueError: the directory cannot be written, or has a run with another config.
  """
  values, found = json.loads(json.dumps([values, found]))
  # A run that failed before its first evaluation, for instance because a tokenizer was
  # missing, has no results yet: the corrected command may use the directory.
  if has_begun(workdir):
    before = read_config(workdir) | {'code': read_resolved(workdir)['code']}
    now = found['config'] | {'code': found['code']}
    changed = []
    for name, old, new in hosts.differences(before, now):
      knob = name.removeprefix('code.')  # a function's file belongs to its knob
      if knob not in free and knob.split('.')[0] not in free:
        changed.append(f'{name}: {old!r} then, {new!r} now')
    if changed:
      raise ValueError(
        f'--workdir={workdir} has a run with another config ({"; ".join(changed[:4])});'
        ' give another --workdir, or restore the config that the run was started with'
      )
  with writable(workdir):
    files.write_json(os.path.join(workdir, 'resolved.json'), found)
    files.write_json(os.path.join(workdir, 'config.json'), values)


def has_begun(workdir: str) -> bool:
  """Returns whether a run has measured or saved anything; '' is no directory."""
  if not workdir:
    return False
  measured = os.path.lexists(os.path.join(workdir, 'metrics.jsonl'))
  return measured or bool(checkpoint_steps(workdir))


def read_config(workdir: str, but: str = 'has') -> dict[str, Any]:
  """Reads the config of a run, section -> knob -> value.

  Knobs that are None in config.json have the values that the run keeps. `but` begins
  the error of a workdir without config.json.

  Raises:
    ValueError: the file is missing, is not a JSON object, or is of another program.
  """
  path = os.path.join(workdir, 'config.json')
  if not os.path.lexists(path):
    raise ValueError(
      f'--workdir={workdir} {but} no run with a config.json; train there first, or '
      'give another --workdir'
    )
  values = files.read_object(path, 'give another --workdir, or restore its config')
  if SECTIONS - values.keys():
    raise ValueError(f'{path} is not the config of a run; give another --workdir')
  return read_resolved(workdir).get('config', values)


def read_resolved(workdir: str) -> dict[str, Any]:
  """Reads what the program found out about a run; {} for a run of an older version."""
  path = os.path.join(workdir, 'resolved.json')
  if not os.path.lexists(path):
    return {}
  return files.read_object(path, 'give another --workdir, or restore the file')


def check_version(workdir: str) -> None:
  """Raises a ValueError if an older version of the program wrote the run."""
  if not read_resolved(workdir):
    raise ValueError(
      f'--workdir={workdir} has a run of an older version, without resolved.json: go '
      'on with the commit that began the run or 1f88cfb6, the last that reads such '
      'runs, or give another --workdir'
    )


@contextlib.contextmanager
def writable(workdir: str) -> Iterator[None]:
  """Turns a failed write into a ValueError that names the file and the last checkpoint.

  Converts an OSError about a file in the workdir, or about a full or read-only disk.
  """
  try:
    yield
  except OSError as error:
    path, home = (os.path.abspath(p) for p in (str(error.filename or ''), workdir))
    inside = error.filename and os.path.commonpath([path, home]) == home
    if not inside and error.errno not in REFUSALS:
      raise
    steps = checkpoint_steps(workdir)
    safe = f'the checkpoint of step {steps[-1]}' if steps else 'no checkpoint'
    raise ValueError(
      f'{error.filename or workdir} cannot be written ({error.strerror or error}); '
      f'{safe} was saved completely. Free disk space, make the directory writable, or '
      'remove whatever blocks this path; then run the same command with '
      f'--workdir={workdir} to resume from there'
    ) from error


def checkpoint_steps(workdir: str) -> list[int]:
  """Returns the steps of the complete checkpoints, ascending; changes nothing."""
  path = os.path.join(workdir, 'checkpoints')
  names = os.listdir(path) if os.path.isdir(path) else []
  # int() would also read '007'.
  return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
