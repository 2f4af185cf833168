"""What is wrong with a checkpoint, and where a damaged one goes.

1. `Digested` records digests of a checkpoint's files before the checkpoint appears;
2. `of_checkpoint` compares the files with them, `not_finite` looks at arrays;
3. `set_damaged_aside` renames what a run must not go on from, and says so;
4. `none_whole` is the sentence where nothing is left.
"""

import asyncio
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint._src.metadata import checkpoint as step_metadata
from orbax.checkpoint._src.path import atomicity

from bapo_jax.runtime import digests
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.sharding import path_name
from bapo_jax.types import Tree

FINITE = ('params', 'opt', 'actor')  # parts of a state without a NaN or an infinity


class Digested(atomicity.AtomicRenameTemporaryPath):
  """Records digests when all is written, before the rename that makes it visible."""

  async def finalize(self) -> None:
    """Digests of what is on the disk, in the thread that writes in the background."""
    if store := self._checkpoint_metadata_store:
      # As the parent does, which would change the file after its digest is taken.
      path = step_metadata.step_metadata_file_path(self.get())
      await asyncio.to_thread(store.wait_until_finished)
      await asyncio.to_thread(
        store.update, file_path=path, commit_timestamp_nsecs=time.time_ns()
      )
      await asyncio.to_thread(store.wait_until_finished)
      self._checkpoint_metadata_store = None
    label = self.get_final().name
    await asyncio.to_thread(digests.write, str(self.get()), label)
    await super().finalize()


def home(workdir: str) -> str:
  """The directory of the checkpoints."""
  return os.path.join(os.path.abspath(workdir), 'checkpoints')


def set_damaged_aside(workdir: str) -> None:
  """Renames damaged checkpoints, the newest of them and its elders' small files read.

  The arrays of an older one are read when the run goes back to it.
  """
  damaged: dict[int, str] = {}
  newest = None
  for step in reversed(checkpoint_steps(workdir)):
    skip = '' if newest is None else 'arrays'
    if why := of_checkpoint(workdir, step, skip):
      damaged[step] = why
    elif newest is None:
      newest = step
  if damaged and newest is None:
    raise none_whole(workdir, damaged)
  for step, why in damaged.items():
    set_aside(workdir, step, why)


def of_checkpoint(workdir: str, step: int, skip: str = '') -> str:
  """What is wrong with a checkpoint's files, in words; '' for nothing.

  Args:
    skip: a part that is not read, such as 'arrays'.
  """
  return digests.damage(os.path.join(home(workdir), str(step)), str(step), skip)


def set_aside(workdir: str, step: int, why: str) -> None:
  """Renames a damaged checkpoint, so that it neither counts nor is deleted."""
  path = os.path.join(home(workdir), str(step))
  to, number = f'{path}.damaged', 1
  while os.path.lexists(to):
    number += 1
    to = f'{path}.damaged-{number}'
  os.rename(path, to)
  log(f'The checkpoint {path} is damaged ({why}): set aside as {to}, and not used.')


def none_whole(workdir: str, damaged: dict[int, str]) -> ValueError:
  """The sentence where nothing is left to go on from."""
  found = '; '.join(f'{step}: {why}' for step, why in sorted(damaged.items()))
  return ValueError(
    f'{home(workdir)} has no whole checkpoint ({found}); put a copy back, or remove '
    'that folder, and the same command starts from step 0. Checkpoints of a version '
    'that recorded no digests are for that version'
  )


def not_finite(tree: Tree) -> str:
  """The first array of FINITE with a NaN or an infinity, in words; '' for none.

  Args:
    tree: the arrays of a state, part -> tree; parts beside FINITE are not looked at.
  """
  for path, leaf in jax.tree.leaves_with_path(tree):
    name = path_name(path)
    if name.split('/')[0] not in FINITE or not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    library = np if isinstance(leaf, np.ndarray) else jnp  # what is on the host stays
    if not library.isfinite(leaf).all():
      return f'{name} is not finite'
  return ''
