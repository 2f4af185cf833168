"""Saves and restores one run, atomically; an incomplete checkpoint is never used.

A checkpoint is a directory `checkpoints/<step>` with the arrays of the run, a `meta` of
plain values, and digests of the files. A background thread writes the directory under a
temporary name, and renames it when all files are complete. A failed write raises
OSError at the next save or at the end. A damaged checkpoint is renamed and logged, and
the run resumes from the previous checkpoint, on any mesh.
"""

import contextlib
import glob
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bapo_jax.runtime import digests, hosts
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.sharding import path_name
from bapo_jax.types import Tree

CheckpointManager = ocp.CheckpointManager
Meta = dict[str, Any]
Read = Callable[[str], np.ndarray]  # from a parameter's path to its array on the host

INCOMPLETE = ocp.utils.TMP_DIR_SUFFIX  # suffix of a checkpoint that is being written


def home(workdir: str) -> str:
  """Returns the directory of the checkpoints."""
  return os.path.join(os.path.abspath(workdir), 'checkpoints')


def manager(
  workdir: str, keep: int, best: int = 0, settings: float | None = None
) -> CheckpointManager:
  """Opens the checkpoints; removes incomplete checkpoints and renames damaged ones.

  The manager keeps the `keep` newest checkpoints and the `best` evaluated checkpoints
  with the highest accuracy; in a tie, the newest. Accuracies of evaluations with other
  `settings` than those of this start count less. Raises ValueError if all existing
  checkpoints are damaged.
  """

  def rank(measured: Meta) -> float:
    return measured['accuracy'] + 2 * (measured.get('settings') in (None, settings))

  # orbax calls `record` in process 0 after all files are written and before the
  # directory is renamed, so every checkpoint with a final name has digests.
  def record() -> None:
    for path in glob.glob(f'{glob.escape(home(workdir))}/*{INCOMPLETE}'):
      digests.write(path, os.path.basename(path).removesuffix(INCOMPLETE))

  with hosts.together():
    if hosts.is_first():
      _set_damaged_aside(workdir)
      os.makedirs(home(workdir), exist_ok=True)
  policies = ocp.checkpoint_managers
  ranked = policies.BestN(
    get_metric_fn=rank, n=best, keep_checkpoints_without_metrics=False
  )
  kept = policies.AnyPreservationPolicy([policies.LatestN(keep), ranked])
  options = ocp.CheckpointManagerOptions(
    preservation_policy=kept,
    best_fn=rank,  # or the accuracies are not written
    create=False,
    cleanup_tmp_directories=True,
    multiprocessing_options=_processes(),
    async_options=ocp.AsyncOptions(post_finalization_callback=record),
  )
  return CheckpointManager(home(workdir), options=options)


def _processes() -> ocp.options.MultiprocessingOptions:
  """Returns options with which the processes of this side save and restore together."""
  return ocp.options.MultiprocessingOptions(
    primary_host=hosts.side()[0],
    active_processes=set(hosts.side()),
    barrier_sync_key_prefix=f'side{hosts.side()[0]}',
  )


def save(
  checkpoints: CheckpointManager,
  step: int,
  arrays: Tree,
  meta: Meta,
  accuracy: float | None = None,
  settings: float | None = None,
) -> None:
  """Starts to write the checkpoint of `step`; `wait` waits until the write is complete.

  Waits for the previous write first. After the return, the arrays may be donated and
  `meta` (plain values) may change. `accuracy` is the accuracy on the held-out problems,
  or None if this step was not evaluated, and `settings` are those of the evaluation
  (see evaluate.settings). Raises OSError if this checkpoint or the previous one could
  not be written.
  """
  wait(checkpoints)
  # JAX keeps the arrays that the background thread reads: a donated buffer is copied.
  # The thread would serialize `meta` later, so `meta` is copied here.
  meta = json.loads(json.dumps(meta))
  leaves = _solid(arrays)
  if len(hosts.run()) > 1 and len(hosts.side()) == 1:
    # orbax cannot save a device array that belongs to only one of several processes.
    leaves = jax.device_get(leaves)
  content = ocp.args.Composite(
    arrays=ocp.args.StandardSave(leaves), meta=ocp.args.JsonSave(meta)
  )
  metrics = None if accuracy is None else {'accuracy': accuracy, 'settings': settings}
  with _refusing(checkpoints, step):
    checkpoints.save(step, args=content, metrics=metrics, force=True)


def wait(checkpoints: CheckpointManager) -> None:
  """Waits for the write in progress; raises OSError if the write failed."""
  step = checkpoints.latest_step()  # the checkpoint being written counts
  with _refusing(checkpoints, step):
    checkpoints.wait_until_finished()


@contextlib.contextmanager
def closing(checkpoints: CheckpointManager) -> Iterator[None]:
  """Waits for the write, then closes the manager; on an interrupt, does neither.

  The next start removes what an interrupt leaves incomplete. Raises OSError if the last
  checkpoint could not be written.
  """
  try:
    yield
  except KeyboardInterrupt:
    raise
  except BaseException:
    with contextlib.suppress(OSError):  # the first error matters
      wait(checkpoints)
    checkpoints.close()
    raise
  wait(checkpoints)
  checkpoints.close()


@contextlib.contextmanager
def _refusing(checkpoints: CheckpointManager, step: int | None) -> Iterator[None]:
  """Raises OSError if a write fails, and deletes the incomplete checkpoint.

  Of tensorstore, a failed write is a ValueError whose message has the errno.
  """
  directory = os.fspath(checkpoints.directory)
  try:
    yield
  except (OSError, ValueError) as error:
    if isinstance(error, OSError):
      number = error.errno
      reason = error.strerror or str(error)
    elif code := re.search(r"os_error_code='(\d+)'", str(error)):
      number = int(code[1])
      reason = os.strerror(number)
    else:
      raise
    for incomplete in glob.glob(f'{glob.escape(directory)}/*{INCOMPLETE}'):
      shutil.rmtree(incomplete, ignore_errors=True)
    raise OSError(number, reason, os.path.join(directory, str(step))) from error


def _read(
  path: str, like: Mapping[str, Any], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
  """Restores only the arrays named in `like` from a directory that orbax wrote.

  `like` has an array or jax.ShapeDtypeStruct with the sharding to restore, or None for
  a NumPy array. Names with a prefix in `optional` may be missing.
  """
  together = {'multiprocessing_options': _processes()}
  handler = ocp.PyTreeCheckpointHandler(**together)
  with ocp.Checkpointer(handler, **together) as checkpointer:
    stored = set(checkpointer.metadata(path).item_metadata.tree)
    lacks = sorted(n for n in set(like) - stored if not n.startswith(optional))
    like = {name: x for name, x in like.items() if name in stored}
    if lacks:
      raise ValueError(
        f'{path} lacks {", ".join(lacks[:3])}: it was written by another version of '
        'this program or with another config; use that version and config, or give '
        'another --workdir'
      )
    target = {
      name: np.zeros(()) if x is None else ocp.utils.to_shape_dtype_struct(x)
      for name, x in like.items()
    }
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    on_host = ocp.RestoreArgs(restore_type=np.ndarray)
    arguments |= {name: on_host for name, x in like.items() if x is None}
    request = ocp.args.PyTreeRestore(
      item=target, restore_args=arguments, partial_restore=True
    )
    return checkpointer.restore(path, args=request)


def restore(checkpoints: CheckpointManager, step: int, like: Tree) -> tuple[Tree, Meta]:
  """Returns (arrays, meta) of `step`, laid out as the arrays of `like`.

  If the checkpoint has only weights, the optimiser's arrays are taken from `like`.
  Raises ValueError if the checkpoint lacks an array.
  """
  path = os.path.join(checkpoints.directory, str(step), 'arrays')
  meta = read_meta(os.fspath(checkpoints.directory), step)
  optional = ('opt/',) if meta.get('weights_only') else ()
  restored = _read(path, _solid(like), optional)
  leaves, treedef = jax.tree.flatten_with_path(like)
  tree = treedef.unflatten(restored.get(path_name(key), leaf) for key, leaf in leaves)
  return tree, meta


def read_meta(directory: str, step: int) -> Meta:
  """Reads the meta of the complete checkpoint `directory`/`step`."""
  path = os.path.join(directory, str(step), 'meta', 'metadata')
  with open(path, encoding='utf-8') as file:
    return json.load(file)


def choose(workdir: str, which: str = 'newest') -> int | None:
  """Returns the step of the requested checkpoint, or None if there are no checkpoints.

  `which` is 'newest', a step, or 'best' (the highest accuracy on the held-out problems
  with the settings of the last evaluation; in a tie, the newest). Raises ValueError if
  there are only other checkpoints.
  """
  steps = checkpoint_steps(workdir)
  accuracies = {}
  settings = None  # of the last evaluation
  for step in reversed(steps):
    path = os.path.join(home(workdir), str(step), 'metrics', 'metrics')
    refusals = contextlib.suppress(OSError, ValueError, TypeError, KeyError)
    with refusals, open(path, encoding='utf-8') as file:
      measured = json.load(file)
      settings = settings or measured.get('settings')
      if measured.get('settings') in (None, settings):
        accuracies[step] = float(measured['accuracy'])
  if not steps or which == 'newest':
    return max(steps, default=None)
  if which == 'best' and accuracies:
    return max(accuracies, key=lambda step: (accuracies[step], step))
  if which.isdecimal() and int(which) in steps:
    return int(which)
  raise ValueError(
    f'--checkpoint={which} does not exist: {workdir} has the checkpoints {steps} '
    f'(evaluated: {sorted(accuracies) or "none"}); give newest, best or a step'
  )


def _solid(tree: Tree) -> dict[str, Any]:
  """Returns a dict from path to leaf, without empty arrays: orbax cannot save them."""
  leaves = jax.tree.leaves_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves if leaf.size}


def _set_damaged_aside(workdir: str) -> None:
  """Renames damaged checkpoints, so that nothing uses or deletes them.

  Checks all files down to the newest undamaged checkpoint; of older ones, small files.
  """
  damaged = dict[str, str]()
  whole = False
  for step in reversed(checkpoint_steps(workdir)):
    path = os.path.join(home(workdir), str(step))
    if why := digests.damage(path, str(step), 'arrays' if whole else ''):
      damaged[path] = why
    whole = whole or not why
  if damaged and not whole:
    steps = (f'{os.path.basename(path)}: {why}' for path, why in damaged.items())
    raise ValueError(
      f'{home(workdir)} has no complete checkpoint ({"; ".join(steps)}); restore one '
      'from a copy, or delete this directory to start from step 0'
    )
  for path, why in damaged.items():
    names = (f'{path}.damaged{f"-{n}" if n > 1 else ""}' for n in itertools.count(1))
    to = next(name for name in names if not os.path.lexists(name))
    os.rename(path, to)
    log(f'The checkpoint {path} is damaged ({why}); renamed to {to} and not used.')


def read_params(workdir: str, step: int, part: str = 'params') -> Read:
  """Returns a function that reads an array of a checkpoint to the host.

  `part` is a part of the saved state, such as 'buffer/reusable'. Raises ValueError if
  the checkpoint is damaged.
  """
  path = os.path.join(home(workdir), str(step))
  if why := digests.damage(path, str(step)):
    raise ValueError(
      f'{path} is damaged ({why}); restore it from a copy, or give another checkpoint '
      f'of {checkpoint_steps(workdir)} as --checkpoint=<step>'
    )
  path = os.path.abspath(os.path.join(path, 'arrays'))
  return lambda name: _read(path, {f'{part}/{name}': None})[f'{part}/{name}']
