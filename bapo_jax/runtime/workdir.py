"""The directory of a run: whose it is, and what is said when it cannot be written.

1. `open_workdir` refuses one that cannot be used or belongs to another run;
2. `writable` says in one sentence which file the system refused while the run went on.
"""

import contextlib
import errno
import json
import os
from collections.abc import Sequence

from bapo_jax.runtime import files
from bapo_jax.runtime.progress import log

# Whatever the file, the system says these of writing only.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def open_workdir(workdir: str, values: dict, free: Sequence[str] = ()) -> None:
  """Makes the directory and writes the config into it.

  Args:
    values: the config. free: sections and knobs that may differ from those of the run
      that is there.

  Raises:
    ValueError: it cannot be written, or holds a run with another config.
  """
  path = os.path.join(workdir, 'config.json')
  try:
    os.makedirs(workdir, exist_ok=True)
    with open(os.path.join(workdir, '.writable'), 'w'):
      pass
    os.remove(os.path.join(workdir, '.writable'))
    if not os.path.exists(path):
      files.write_json(path, values)
    with open(path) as file:
      before = json.load(file)
  except OSError as error:
    raise ValueError(
      f'--workdir={workdir} cannot be used ({error.strerror}); give a directory that '
      'you may write to'
    ) from error
  now = json.loads(json.dumps(values))
  changed = [
    f'{name}: {old!r} then, {new!r} now'
    for name, old, new in differences(before, now)
    if name.split('.')[0] not in free and name not in free
  ]
  if changed:
    raise ValueError(
      f'--workdir={workdir} holds a run with another config '
      f'({"; ".join(changed[:4])}); give another '
      '--workdir, or the config it was started with'
    )
  with writable(workdir):
    files.write_json(path, now)


def differences(before, now, name=''):
  """(dotted name, old, new) of every value that differs."""
  if isinstance(before, dict) and isinstance(now, dict):
    for key in sorted(set(before) | set(now)):
      dotted = f'{name}.{key}' if name else key
      yield from differences(before.get(key), now.get(key), dotted)
  elif before != now:
    yield name, before, now


@contextlib.contextmanager
def writable(workdir: str):
  """Tells what of the workdir could not be written, and what is safe.

  Raises:
    ValueError: for an OSError about a file in it, or one that speaks of writing only.
  """
  try:
    yield
  except OSError as error:
    path, home = (os.path.abspath(p) for p in (str(error.filename or ''), workdir))
    inside = error.filename and os.path.commonpath([path, home]) == home
    if not inside and error.errno not in REFUSALS:
      raise
    step = max(checkpoint_steps(workdir), default=None)
    safe = 'no checkpoint' if step is None else f'the checkpoint of step {step}'
    raise ValueError(
      f'{error.filename or workdir} cannot be written ({error.strerror or error}); '
      f'{safe} is complete. Make room, or the directory writable, and the same command '
      f'with --workdir={workdir} goes on from there'
    ) from error


def log_mesh_change(before: dict | None, now: dict) -> None:
  """Says so where a run goes on over another mesh: axis -> devices, then and now."""
  if before and before != now:
    then, today = (' x '.join(f'{a} {n}' for a, n in m.items()) for m in (before, now))
    log(
      f'Another mesh ({then} then, {today} now): sums are rounded differently from here'
      ' on, so this run will not equal an unbroken one to the last bit.'
    )


def checkpoint_steps(workdir: str) -> list[int]:
  """Steps of the complete checkpoints, ascending; nothing is made or cleared."""
  path = os.path.join(workdir, 'checkpoints')
  names = os.listdir(path) if os.path.isdir(path) else []
  return sorted(int(name) for name in names if name.isdecimal())
