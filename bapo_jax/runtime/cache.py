"""Keeps embedded policies and compiled programs in one folder for all runs of a user.

1. `home` turns the knob `cache` into the folder, and `share_programs` points JAX to it;
2. `prune` removes the entries that were used longest ago.

The folder may be emptied at any time: a run then repeats the work, with equal results.
"""

import contextlib
import os
import pathlib
import shutil

from bapo_jax.runtime import files, hosts, machine
from bapo_jax.runtime.workdir import check_writable

LIMIT = 2 * 2**30  # bytes of all entries
# Options of JAX, which environment variables set too.
DIRECTORY = 'jax_compilation_cache_dir'
MIN_COMPILE = 'jax_persistent_cache_min_compile_time_secs'


def home(knob: str | None) -> str:
  """Returns the folder that the knob `cache` names, created if missing; '' for none.

  Raises:
    ValueError: the folder is not writable, and the knob is not None.
  """
  user = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  path = os.path.join(user, 'bapo_jax') if knob is None else knob
  if not path:
    return ''
  try:
    path = os.path.abspath(files.local(path))
    check_writable(path, f'--config.cache={knob}')
  except ValueError:
    if knob is not None:
      raise
    return ''
  return path


def share_programs(knob: str | None) -> None:
  """Makes JAX store compiled programs in the cache, after removing its oldest entries.

  Does nothing if the cache is off, or if JAX already has a directory, for instance from
  JAX_COMPILATION_CACHE_DIR; so the first run of a process decides.
  """
  import jax  # late: bad knobs fail before this import

  if jax.config.values[DIRECTORY] or not (folder := home(knob)):
    return
  # Stored programs for several devices of a CPU hang or abort now and then when they
  # are loaded (jax 0.10.2; two of four runs of one test).
  if len(jax.devices()) > 1 and jax.devices()[0].platform == 'cpu':
    return
  if hosts.is_first():
    prune(folder)
  # XLA divides a program among the threads of a CPU, but JAX's keys lack their number.
  path = os.path.join(folder, 'xla', machine.processor())
  jax.config.update(DIRECTORY, path)
  if MIN_COMPILE.upper() not in os.environ:
    jax.config.update(MIN_COMPILE, 0.1)  # faster programs are not worth a file


def prune(folder: str) -> None:
  """Removes entries of the cache, least recently used first, down to LIMIT bytes.

  An entry is the directory of a policy or the file of a program. Another run may
  remove it meanwhile, and a run whose entry is gone repeats the work.
  """
  by_use = []
  # policies/<fingerprint>/model and xla/<processor>/<program>; the middle name
  # is a digest, because a folder that the user names may have other files.
  for entry in pathlib.Path(folder).glob(f'*/{"[0-9a-f]" * 12}/*'):
    paths = entry.rglob('*') if entry.is_dir() else [entry]
    with contextlib.suppress(OSError):
      stats = [path.stat() for path in paths if path.is_file()]
      # Most systems renew the time of the last access once a day, which suffices.
      used = max((max(x.st_atime, x.st_mtime) for x in stats), default=0.0)
      by_use.append((used, sum(x.st_size for x in stats), entry))
  excess = sum(size for _, size, _ in by_use) - LIMIT
  for _, size, entry in sorted(by_use):
    if excess > 0:
      remove = shutil.rmtree if entry.is_dir() else os.remove
      with contextlib.suppress(OSError):
        remove(entry)
    excess -= size


def described(knob: str) -> str:
  """Describes the cache for the first screen."""
  import jax

  if not (folder := home(knob)):
    return 'off'
  programs = pathlib.Path(jax.config.values[DIRECTORY] or '')
  if programs == pathlib.Path():
    state = 'programs are not stored for several devices of a CPU'
  elif pathlib.Path(folder) in programs.parents:
    count = sum(path.is_file() for path in programs.rglob('*'))
    state = f'{count} compiled programs'
  else:
    state = f'compiled programs in {programs}'
  return f'{folder}: {state}'
