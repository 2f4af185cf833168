"""Weights alone: of a checkpoint, or as the warm start leaves them.

1. `read_params` reads a checkpoint's weights a parameter at a time, on the host;
2. `save_params` and `restore_params` hold a directory of weights, whole or not at all;
3. `fingerprint` says whether weights are the same, whatever mesh they lie on.
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from bapo_jax.runtime import digests, exchange
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.sharding import path_name
from bapo_jax.training import checkpoint, damage
from bapo_jax.types import Tree

Read = Callable[[str], np.ndarray]  # from a parameter's path to its array on the host


def read_params(workdir: str, step: int, part: str = 'params') -> Read:
  """A function from a parameter's path to its array on the host; it reads no other.

  Args:
    part: of the run's arrays, such as 'buffer/reusable'.

  Raises:
    ValueError: the checkpoint is damaged, or (from the function) the array not finite.
  """
  path = os.path.join(damage.home(workdir), str(step), 'arrays')
  way_out = f'--checkpoint=<step> takes another: {checkpoint_steps(workdir)} are there'
  if why := damage.of_checkpoint(workdir, step):
    raise ValueError(f'the checkpoint of step {step} is damaged ({why}); {way_out}')

  def read(parameter: str) -> np.ndarray:
    name = f'{part}/{parameter}'
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      found = checkpointer.restore(path, args=_only(name))
    if why := damage.not_finite(found):
      raise ValueError(f'the checkpoint of step {step} is damaged ({why}); {way_out}')
    return found[name]

  return read


def _only(name: str) -> ocp.args.PyTreeRestore:
  """Of the arrays of a checkpoint this one, on the host."""
  return ocp.args.PyTreeRestore(
    item={name: np.zeros(())},
    restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
    partial_restore=True,
  )


def save_params(path: str, params: Tree) -> None:
  """Writes weights to the directory `path`, whole or not at all.

  Raises:
    OSError: the system refused.
  """
  with (
    checkpoint.as_oserror(path),
    ocp.StandardCheckpointer(temporary_path_class=damage.Digested) as checkpointer,
  ):
    checkpointer.save(os.path.abspath(path), params, force=True)


def restore_params(path: str, like: Tree) -> Tree:
  """The weights at `path`, laid out as `like` is.

  Raises:
    ValueError: they are damaged, in words.
  """
  if why := digests.damage(path, os.path.basename(path)):
    raise ValueError(why)
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(os.path.abspath(path), target)
  if why := damage.not_finite({'params': params}):
    raise ValueError(why)
  return params


def read_saved(path: str) -> Read:
  """As `read_params`, of the weights that `save_params` left.

  Raises:
    ValueError: they are not there, or damaged.
  """
  if why := digests.damage(path, os.path.basename(path)):
    raise ValueError(f'{path}: {why}')

  def read(parameter: str) -> np.ndarray:
    keys = parameter.split('/')
    item, restore_args = np.zeros(()), ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(keys):
      item, restore_args = {key: item}, {key: restore_args}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      found = checkpointer.restore(
        os.path.abspath(path),
        args=ocp.args.PyTreeRestore(
          item=item, restore_args=restore_args, partial_restore=True
        ),
      )
    for key in keys:
      found = found[key]
    return found

  return read


def fingerprint(weights: Tree) -> str:
  """Hexadecimal digits that change with any number of the weights, or ''.

  A sum of integers, one per number, by its bits and its place: the same on any mesh and
  with any number of processes, and no array leaves its devices.
  """
  leaves = jax.tree.leaves_with_path(weights)
  sums = [exchange.whole(_mixed(x)) for _, x in leaves]
  names = [path_name(path) for path, _ in leaves]
  return digests.of_text(f'{names} {[s.tolist() for s in sums]}') if leaves else ''


@jax.jit
def _mixed(x: Array) -> Array:
  """Two sums, modulo 2^32, of well-mixed numbers: of each element and its place."""
  kind = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
  place, stride = jnp.zeros(x.shape, jnp.uint32), 1
  for axis in reversed(range(x.ndim)):
    iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    place, stride = place + iota * jnp.uint32(stride % 2**32), stride * x.shape[axis]
  sums = []
  for odd in (0x9E3779B1, 0x85EBCA77):  # of the golden ratio; of xxHash
    mixed = (bits ^ (place * jnp.uint32(odd))) * jnp.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(odd)
    sums.append((mixed ^ (mixed >> 13)).sum(dtype=jnp.uint32))
  return jnp.stack(sums)
