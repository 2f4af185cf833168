"""Saves and restores one run, atomically; half a checkpoint is never seen.

1. a checkpoint is a directory `checkpoints/<step>`: the arrays of the run, and a meta
   of plain values, such as the seconds by phase, from which the report counts on;
2. it is written in the background and appears under its name when it is whole; an error
   of the system is an OSError, at the next save or at the end;
3. digests of its files are part of it: a damaged one is set aside, never restored;
4. the newest stay, from which a run goes on, and the best by evaluation;
5. restored arrays lie as the new mesh wants them, whatever mesh saved them.
6. arrays that a run does not ask for, as an older version stored them, are not read.
"""

import contextlib
import glob
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import quiet_absl
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.sharding import path_name
from bapo_jax.training import damage
from bapo_jax.types import Tree

CheckpointManager = ocp.CheckpointManager
HALF = ocp.utils.TMP_DIR_SUFFIX  # ends the name of what is not whole


def manager(workdir: str, keep: int, best: int = 0) -> CheckpointManager:
  """Makes the directory, clears what a kill left half written, sets damage aside.

  Args:
    keep: how many of the newest checkpoints stay.
    best: how many stay besides: those saved with the highest accuracy, the newest of
      equals first; those saved without one are not among them.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  if hosts.is_first():
    damage.set_damaged_aside(workdir)
  hosts.together('checkpoints')
  policies = ocp.checkpoint_managers
  ranked = policies.BestN(
    get_metric_fn=operator.itemgetter('accuracy'),
    n=best,
    keep_checkpoints_without_metrics=False,
  )
  options = ocp.CheckpointManagerOptions(
    preservation_policy=policies.AnyPreservationPolicy(
      [policies.LatestN(keep), ranked]
    ),
    best_fn=operator.itemgetter('accuracy'),  # or the accuracies are not written
    cleanup_tmp_directories=True,
    enable_async_checkpointing=True,
    create=True,
    temporary_path_class=damage.Digested,
  )
  return CheckpointManager(damage.home(workdir), options=options)


def save(
  checkpoints: CheckpointManager,
  step: int,
  arrays: Tree,
  meta: dict[str, Any],
  accuracy: float | None = None,
) -> None:
  """Begins to write the checkpoint of `step`; `wait` returns once it is whole.

  It holds the values of now: the arrays may be donated, and `meta` changed, as soon as
  this returns. A write that is still going on is waited for first.

  Args:
    accuracy: on the held-out problems; None where this step was not evaluated.

  Raises:
    OSError: the system refused to write this checkpoint, or the one before.
  """
  wait(checkpoints)
  # JAX holds what the background reads: a donated buffer is then copied, not reused.
  # The meta would be turned into text in the background too.
  meta = json.loads(json.dumps(meta))
  # Without an accuracy orbax warns; most checkpoints have none.
  with _refusing(checkpoints, step), quiet_absl():
    checkpoints.save(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardSave(_solid(arrays)), meta=ocp.args.JsonSave(meta)
      ),
      metrics=None if accuracy is None else {'accuracy': accuracy},
      force=True,
    )


def wait(checkpoints: CheckpointManager) -> None:
  """Waits until nothing is being written.

  Raises:
    OSError: the system refused to write the last checkpoint.
  """
  step = checkpoints.latest_step()  # the one being written counts
  with _refusing(checkpoints, step):
    checkpoints.wait_until_finished()


@contextlib.contextmanager
def closing(checkpoints: CheckpointManager) -> Iterator[None]:
  """Waits for the last write at the end, save at an interrupt, which means at once.

  The next start clears what an interrupt leaves half written.

  Raises:
    OSError: the system refused to write the last checkpoint.
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
  """Turns the system's refusal into an OSError and gives its space back."""
  path = os.path.join(checkpoints.directory, str(step))
  try:
    with as_oserror(path):
      yield
  except OSError:
    for half in glob.glob(glob.escape(str(checkpoints.directory)) + f'/*{HALF}'):
      shutil.rmtree(half, ignore_errors=True)
    raise


@contextlib.contextmanager
def as_oserror(path: str) -> Iterator[None]:
  """Tensorstore raises a ValueError; the system's number stands in its text."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), path) from error
  except ValueError as error:
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
      raise OSError(int(number[1]), os.strerror(int(number[1])), path) from error
    raise


def restore(
  checkpoints: CheckpointManager, step: int, like: Tree
) -> tuple[Tree, dict[str, Any]]:
  """(arrays, meta) of `step`, laid out as the arrays of `like` are.

  Of weights alone the numbers of the optimiser are those of `like`.

  Raises:
    ValueError: an array is not in the checkpoint.
  """
  meta, stored = read_meta(checkpoints, step), _stored(checkpoints, step)
  leaves, treedef = jax.tree.flatten_with_path(like)
  wanted = _solid(like)
  lacks = sorted(set(wanted) - stored)
  if meta.get('weights_only'):
    lacks = [name for name in lacks if not name.startswith('opt/')]
  if lacks:
    raise ValueError(
      f'the checkpoint of step {step} has no {", ".join(lacks[:3])}: another version '
      'of this program, or another config, has written it'
    )
  wanted = {name: leaf for name, leaf in wanted.items() if name in stored}
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
  if stored - set(wanted):
    found = _part(checkpoints, step, target)
  else:
    found = checkpoints.restore(
      step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target))
    )['arrays']
  arrays = [
    found[name] if (name := path_name(path)) in wanted else leaf
    for path, leaf in leaves
  ]
  return treedef.unflatten(arrays), meta


def _stored(checkpoints: CheckpointManager, step: int) -> set[str]:
  """Paths of the arrays in the checkpoint of `step`."""
  path = os.path.join(checkpoints.directory, str(step), 'arrays')
  with quiet_absl(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    return set(checkpointer.metadata(path).item_metadata.tree)


def _part(checkpoints: CheckpointManager, step: int, target: Tree) -> dict[str, Any]:
  """Some of the arrays in the checkpoint of `step`: StandardRestore refuses others."""
  path = os.path.join(checkpoints.directory, str(step), 'arrays')
  with quiet_absl(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    return checkpointer.restore(
      path,
      args=ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
      ),
    )


def restore_newest(
  checkpoints: CheckpointManager, like: Callable[[int], Tree]
) -> tuple[int, Tree, dict[str, Any]] | None:
  """(step, arrays, meta) of the newest whole checkpoint; None where there is none.

  One with a weight, or a number of the optimiser, that is not finite is damaged, too.

  Args:
    like: from a step to the arrays of a run after it.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  workdir = os.path.dirname(checkpoints.directory)
  damaged: dict[int, str] = {}
  for step in sorted(checkpoints.all_steps(), reverse=True):
    # The manager has read every file of the newest.
    if damaged and (why := damage.of_checkpoint(workdir, step)):
      damaged[step] = why
      continue
    arrays, meta = restore(checkpoints, step, like(step))
    if why := damage.not_finite(arrays):
      damaged[step] = why
      continue
    for other, reason in damaged.items() if hosts.is_first() else ():
      damage.set_aside(workdir, other, reason)
    if damaged:
      hosts.together('set aside')
      checkpoints.reload()
    return step, arrays, meta
  if damaged:
    raise damage.none_whole(workdir, damaged)
  return None


def read_meta(checkpoints: CheckpointManager, step: int) -> dict[str, Any]:
  """The meta of `step`, without its arrays."""
  meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
  return checkpoints.restore(step, args=meta)['meta']


def meta_of(workdir: str, step: int) -> dict[str, Any]:
  """`read_meta` of a whole checkpoint; makes and clears nothing."""
  path = os.path.join(damage.home(workdir), str(step), 'meta', 'metadata')
  with open(path, encoding='utf-8') as file:
    return json.load(file)


def choose(workdir: str, which: str = 'newest') -> int | None:
  """The step of a checkpoint, or None without any; makes and clears nothing.

  Args:
    which: 'newest'; 'best' by accuracy on the held-out problems, the newest of equals;
      or a step.

  Raises:
    ValueError: there are checkpoints, but not this one.
  """
  steps = _steps(workdir)
  scored = {step: accuracy for step, accuracy in steps.items() if accuracy is not None}
  if not steps or which == 'newest':
    return max(steps, default=None)
  if which == 'best' and scored:
    return max(scored, key=lambda step: (scored[step], step))
  if which.isdecimal() and int(which) in steps:
    return int(which)
  raise ValueError(
    f'--checkpoint={which}: {workdir} has the checkpoints {sorted(steps)}, '
    f'{sorted(scored) or "none"} of them evaluated; give newest, best or a step'
  )


def _steps(workdir: str) -> dict[int, float | None]:
  """step -> accuracy, None without one that can be read, of every checkpoint."""
  found: dict[int, float | None] = {}
  for step in checkpoint_steps(workdir):
    path = os.path.join(damage.home(workdir), str(step), 'metrics', 'metrics')
    try:
      with open(path, encoding='utf-8') as file:
        found[step] = float(json.load(file)['accuracy'])
    except (OSError, ValueError, TypeError, KeyError):
      found[step] = None
  return found


def _solid(tree: Tree) -> dict[str, Any]:
  """path -> leaf, without arrays of no elements: orbax refuses to save those."""
  leaves = jax.tree.leaves_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves if leaf.size}
