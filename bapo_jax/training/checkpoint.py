"""Saves and restores one run, atomically; an incomplete checkpoint is never used.

1. a checkpoint is a directory `checkpoints/<step>`: the arrays of the run, and a meta
   of plain values, such as the seconds by phase, from which the report continues;
2. it is written in the background, with digests of its files, and gets its name when it
   is complete; an error of the system is an OSError at the next save or at the end;
3. a damaged checkpoint is renamed and logged, and the run resumes from the one before;
4. the newest checkpoints stay, for resuming, and the best by evaluation;
5. restored arrays are laid out for the new mesh, whatever mesh saved them;
6. arrays that a run does not ask for, as an older version stored them, are not read.
"""

import contextlib
import glob
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from bapo_jax.runtime import digests, hosts
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.sharding import path_name
from bapo_jax.types import Tree

CheckpointManager = ocp.CheckpointManager
INCOMPLETE = ocp.utils.TMP_DIR_SUFFIX  # ends the name of what is being written
FINITE = ('params', 'opt', 'actor')  # parts of a state without a NaN or an infinity


def home(workdir: str) -> str:
  """Returns the directory of the checkpoints."""
  return os.path.join(os.path.abspath(workdir), 'checkpoints')


def recording(directory: str) -> ocp.AsyncOptions:
  """Has orbax record digests of everything that it saves in the directory.

  orbax calls back in process 0, when all files are written and before the rename that
  makes them visible: what is visible has digests, and a kill leaves neither.
  """

  def record() -> None:
    for path in glob.glob(f'{glob.escape(directory)}/*{INCOMPLETE}'):
      digests.write(path, os.path.basename(path).removesuffix(INCOMPLETE))

  return ocp.AsyncOptions(post_finalization_callback=record)


def manager(workdir: str, keep: int, best: int = 0) -> CheckpointManager:
  """Makes the directory, removes what a kill left incomplete, sets damage aside.

  Args:
    workdir: the directory of the run.
    keep: how many of the newest checkpoints stay.
    best: how many stay besides: those with the highest accuracy, among equals the
      newest; checkpoints without an accuracy do not count.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  with hosts.together():
    if hosts.is_first():
      set_damaged_aside(workdir)
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
    async_options=recording(home(workdir)),
  )
  return CheckpointManager(home(workdir), options=options)


def save(
  checkpoints: CheckpointManager,
  step: int,
  arrays: Tree,
  meta: dict[str, Any],
  accuracy: float | None = None,
) -> None:
  """Begins to write the checkpoint of `step`; `wait` returns when it is complete.

  The checkpoint has the values of now: as soon as this returns, the arrays may be
  donated and `meta` may change. An unfinished write is waited for first.

  Args:
    checkpoints: the manager.
    step: learner steps done.
    arrays: the arrays of the run.
    meta: plain values.
    accuracy: on the held-out problems; None if this step was not evaluated.

  Raises:
    OSError: the system refused to write this checkpoint, or the one before.
  """
  wait(checkpoints)
  # JAX keeps the arrays that the background reads: a donated buffer is then copied. The
  # meta would become text in the background, so it is copied here.
  meta = json.loads(json.dumps(meta))
  with _refusing(checkpoints, step):
    checkpoints.save(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardSave(solid(arrays)), meta=ocp.args.JsonSave(meta)
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
  """Waits for the last write at the end, but not after an interrupt.

  The next start removes what an interrupt leaves incomplete.

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
  """Turns the system's refusal into an OSError and frees the incomplete checkpoint."""
  directory = os.fspath(checkpoints.directory)
  try:
    with as_oserror(os.path.join(directory, str(step))):
      yield
  except OSError:
    for incomplete in glob.glob(f'{glob.escape(directory)}/*{INCOMPLETE}'):
      shutil.rmtree(incomplete, ignore_errors=True)
    raise


@contextlib.contextmanager
def as_oserror(path: str) -> Iterator[None]:
  """Makes an OSError of tensorstore's ValueError, whose text has the errno."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), path) from error
  except ValueError as error:
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
      raise OSError(int(number[1]), os.strerror(int(number[1])), path) from error
    raise


def read(path: str, like: Mapping[str, Any], optional: str = '') -> dict[str, Any]:
  """Restores named arrays of a directory that orbax wrote; reads no others.

  Args:
    path: the directory.
    like: name -> an array or a jax.ShapeDtypeStruct, whose sharding the restored array
      gets; None restores a NumPy array on the host.
    optional: names that begin so may be missing, and are then left out; '' for none.

  Raises:
    ValueError: an array is not stored.
  """
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    stored = set(checkpointer.metadata(path).item_metadata.tree)
    lacks = sorted(set(like) - stored)
    if optional:
      like = {name: x for name, x in like.items() if name in stored}
      lacks = [name for name in lacks if not name.startswith(optional)]
    if lacks:
      raise ValueError(
        f'{path} has no {", ".join(lacks[:3])}: another version of this program, or '
        'another config, wrote it'
      )
    target = {
      name: np.zeros(()) if x is None else ocp.utils.to_shape_dtype_struct(x)
      for name, x in like.items()
    }
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    on_host = ocp.RestoreArgs(restore_type=np.ndarray)
    arguments |= {name: on_host for name, x in like.items() if x is None}
    return checkpointer.restore(
      path,
      args=ocp.args.PyTreeRestore(
        item=target, restore_args=arguments, partial_restore=True
      ),
    )


def restore(
  checkpoints: CheckpointManager, step: int, like: Tree
) -> tuple[Tree, dict[str, Any]]:
  """Returns (arrays, meta) of `step`, laid out as the arrays of `like`.

  If the checkpoint has weights only, the optimiser's arrays are those of `like`.

  Raises:
    ValueError: an array is not in the checkpoint.
  """
  path = os.path.join(checkpoints.directory, str(step), 'arrays')
  meta = read_meta(os.fspath(checkpoints.directory), step)
  restored = read(path, solid(like), 'opt/' if meta.get('weights_only') else '')
  leaves, treedef = jax.tree.flatten_with_path(like)
  return treedef.unflatten(
    restored.get(path_name(key), leaf) for key, leaf in leaves
  ), meta


def restore_newest(
  checkpoints: CheckpointManager, like: Callable[[int], Tree]
) -> tuple[int, Tree, dict[str, Any]] | None:
  """Returns (step, arrays, meta) of the newest whole checkpoint; None without any.

  A checkpoint with a weight, or a number of the optimiser, that is not finite counts as
  damaged. So does one whose files differ from their digests.

  Args:
    checkpoints: the manager, which has read all files of the newest checkpoint.
    like: from a step to the arrays of a run after it.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  workdir = os.path.dirname(checkpoints.directory)
  damaged: dict[int, str] = {}
  for step in sorted(checkpoints.all_steps(), reverse=True):
    if damaged and (why := damage(workdir, step)):
      damaged[step] = why
      continue
    arrays, meta = restore(checkpoints, step, like(step))
    if why := not_finite(arrays):
      damaged[step] = why
      continue
    if damaged:
      with hosts.together():
        for other, reason in damaged.items() if hosts.is_first() else ():
          _set_aside(workdir, other, reason)
      checkpoints.reload()
    return step, arrays, meta
  if damaged:
    raise _none_whole(workdir, damaged)
  return None


def read_meta(directory: str, step: int) -> dict[str, Any]:
  """Reads the meta of a whole checkpoint in the directory of checkpoints."""
  path = os.path.join(directory, str(step), 'meta', 'metadata')
  with open(path, encoding='utf-8') as file:
    return json.load(file)


def choose(workdir: str, which: str = 'newest') -> int | None:
  """Returns the step of a checkpoint, or None without any; changes nothing.

  Args:
    workdir: the directory of the run.
    which: 'newest'; 'best' by accuracy on the held-out problems, among equals the
      newest; or a step.

  Raises:
    ValueError: there are checkpoints, but not this one.
  """
  steps = {step: _accuracy(workdir, step) for step in checkpoint_steps(workdir)}
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


def _accuracy(workdir: str, step: int) -> float | None:
  path = os.path.join(home(workdir), str(step), 'metrics', 'metrics')
  try:
    with open(path, encoding='utf-8') as file:
      return float(json.load(file)['accuracy'])
  except (OSError, ValueError, TypeError, KeyError):
    return None


def solid(tree: Tree) -> dict[str, Any]:
  """Returns path -> leaf without empty arrays, which orbax refuses to save."""
  leaves = jax.tree.leaves_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves if leaf.size}


def set_damaged_aside(workdir: str) -> None:
  """Renames damaged checkpoints: reads the newest whole one and small files of others.

  The arrays of an older checkpoint are read when the run falls back to it.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  damaged: dict[int, str] = {}
  newest = None
  for step in reversed(checkpoint_steps(workdir)):
    if why := damage(workdir, step, skip='' if newest is None else 'arrays'):
      damaged[step] = why
    elif newest is None:
      newest = step
  if damaged and newest is None:
    raise _none_whole(workdir, damaged)
  for step, why in damaged.items():
    _set_aside(workdir, step, why)


def damage(workdir: str, step: int, skip: str = '') -> str:
  """Describes how the files of a checkpoint differ from their digests; '' for none.

  Args:
    workdir: the directory of the run.
    step: of the checkpoint.
    skip: a part that is not read, such as 'arrays'.
  """
  return digests.damage(os.path.join(home(workdir), str(step)), str(step), skip)


def _set_aside(workdir: str, step: int, why: str) -> None:
  """Renames a damaged checkpoint, so that nothing uses or deletes it."""
  path = os.path.join(home(workdir), str(step))
  to, number = f'{path}.damaged', 1
  while os.path.lexists(to):
    number += 1
    to = f'{path}.damaged-{number}'
  os.rename(path, to)
  log(f'The checkpoint {path} is damaged ({why}): set aside as {to}, and not used.')


def _none_whole(workdir: str, damaged: dict[int, str]) -> ValueError:
  reasons = '; '.join(f'{step}: {why}' for step, why in sorted(damaged.items()))
  return ValueError(
    f'{home(workdir)} has no whole checkpoint ({reasons}); put a copy back, or remove '
    'that folder, and the same command starts from step 0'
  )


def not_finite(tree: Tree) -> str:
  """Names the first array with a NaN or an infinity, in words; '' for none.

  Args:
    tree: the arrays of a state, part -> tree; only the parts of FINITE are checked.
  """
  for path, leaf in jax.tree.leaves_with_path(tree):
    name = path_name(path)
    if name.split('/')[0] not in FINITE or not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    library = np if isinstance(leaf, np.ndarray) else jnp  # host arrays stay there
    if not library.isfinite(leaf).all():
      return f'{name} is not finite'
  return ''
