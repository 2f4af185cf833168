"""Reads the weights of a checkpoint; reads and writes those of a warm start.

1. `read_params` reads a checkpoint's weights to the host, one parameter at a time;
2. `save_params` writes weights to a directory; `restore_params`, `read_saved` read it;
3. `fingerprint` identifies weights, whatever their mesh.
"""

import hashlib
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
from bapo_jax.training import checkpoint
from bapo_jax.types import Tree

Read = Callable[[str], np.ndarray]  # from a parameter's path to its array on the host


def read_params(workdir: str, step: int, part: str = 'params') -> Read:
  """Returns a function that reads one array of a checkpoint to the host.

  Args:
    workdir: the directory of the run.
    step: learner step of the checkpoint.
    part: part of the saved state, such as 'buffer/reusable'.

  Returns:
    A function from a parameter's path to its array.

  Raises:
    ValueError: the checkpoint is damaged. The returned function raises it as well if
      an array is not finite.
  """
  path = os.path.join(checkpoint.home(workdir), str(step), 'arrays')
  way_out = f'give another one of {checkpoint_steps(workdir)} as --checkpoint=<step>'
  if why := checkpoint.damage(workdir, step):
    raise ValueError(f'the checkpoint of step {step} is damaged ({why}); {way_out}')

  def read(parameter: str) -> np.ndarray:
    name = f'{part}/{parameter}'
    restored = checkpoint.read(path, {name: None})
    if why := checkpoint.not_finite(restored):
      raise ValueError(f'the checkpoint of step {step} is damaged ({why}); {way_out}')
    return restored[name]

  return read


def save_params(path: str, params: Tree) -> None:
  """Writes weights and their digests to the directory `path`, completely or not at all.

  Raises:
    OSError: the system refused.
  """
  path = os.path.abspath(path)
  recording = checkpoint.recording(os.path.dirname(path))
  with (
    checkpoint.as_oserror(path),
    ocp.StandardCheckpointer(async_options=recording) as checkpointer,
  ):
    checkpointer.save(path, checkpoint.solid(params), force=True)


def restore_params(path: str, like: Tree) -> Tree:
  """Restores the weights at `path`, laid out as `like`.

  Raises:
    ValueError: the weights are damaged; the message says how.
  """
  if why := digests.damage(path, os.path.basename(path)):
    raise ValueError(why)
  leaves, treedef = jax.tree.flatten_with_path(like)
  restored = checkpoint.read(os.path.abspath(path), checkpoint.solid(like))
  params = treedef.unflatten(restored[path_name(key)] for key, _ in leaves)
  if why := checkpoint.not_finite({'params': params}):
    raise ValueError(why)
  return params


def read_saved(path: str) -> Read:
  """Returns a function that reads one array that `save_params` wrote to the host.

  Raises:
    ValueError: the weights are missing or damaged.
  """
  if why := digests.damage(path, os.path.basename(path)):
    raise ValueError(f'{path} is damaged ({why})')
  return lambda name: checkpoint.read(os.path.abspath(path), {name: None})[name]


def fingerprint(weights: Tree) -> str:
  """Returns hexadecimal digits that change with any number of the weights; '' for none.

  Sums an integer per number, made of its bits and its place. The sum is the same on any
  mesh and with any number of processes, and no array leaves its devices.
  """
  leaves = jax.tree.leaves_with_path(weights)
  sums = [exchange.whole(_mixed(x)) for _, x in leaves]
  names = [path_name(path) for path, _ in leaves]
  text = f'{names} {[s.tolist() for s in sums]}'
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if leaves else ''


@jax.jit
def _mixed(x: Array) -> Array:
  """Returns two sums, modulo 2^32, of the mixed bits and place of every element."""
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
