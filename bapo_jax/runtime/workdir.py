"""The directory of a run: which run it holds, and errors of writing in it.

1. `open_workdir` refuses a directory that cannot be used or holds another run;
2. `writable` turns an error of the system into a sentence that names the file;
3. `checkpoint_steps` lists the complete checkpoints.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_jax.runtime import files
from bapo_jax.runtime.progress import log

# Errors of writing only, whatever the file.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{path} is no JSON ({error}); give another --workdir, or put the config back'
    ) from error
  now = json.loads(json.dumps(values))
  changed = [
    f'{name}: {old!r} then, {new!r} now'
    for name, old, new in differences(before, now)
    if name not in free and name.split('.')[0] not in free
  ]
  # Nothing is measured yet where a run was refused before its first evaluation, say for
  # a tokenizer that is not there: the corrected command may then use the directory.
  if changed and os.path.exists(os.path.join(workdir, 'metrics.jsonl')):
    raise ValueError(
      f'--workdir={workdir} holds a run with another config '
      f'({"; ".join(changed[:4])}); give another --workdir, or the config it was '
      'started with'
    )
  with writable(workdir):
    files.write_json(path, now)


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
  """Steps of the complete checkpoints, ascending; nothing is made or cleared."""
  path = os.path.join(workdir, 'checkpoints')
  names = os.listdir(path) if os.path.isdir(path) else []
  return sorted(int(name) for name in names if name.isdecimal())
