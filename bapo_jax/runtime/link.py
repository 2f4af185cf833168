"""Sends values from the processes of one mesh to the processes of another.

`jax.device_put` copies an array to devices of other processes, under two conditions:
all processes call it in the same order, and both sides have as many devices and the
same PartitionSpec. A `Link` makes this work for meshes of different sizes: the
devices of a mesh that differ only in `tensor` share one copy of the weights, and every
such group of the target receives its copy from a group of the source.
"""

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bapo_jax.runtime.lane import Lane


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Describes an array that is sent; not a pytree, so it can stand for the array."""

  shape: tuple[int, ...]
  dtype: Any
  spec: P

  @property
  def empty(self) -> bool:
    """Whether there are no numbers: JAX never completes the copy of an empty array."""
    return 0 in self.shape


LENGTH = Leaf((1,), np.dtype(np.int32), P())  # of the bytes that follow


def _bytes(n):
  return Leaf((n,), np.dtype(np.uint8), P())


class Link:
  """Sends values from all processes of `source` to all processes of `target`.

  A process belongs to one of the two meshes. In the source it calls `send`, in the
  target `receive`. All processes must use their links in the same order.

  Args:
    source, target: meshes of equal size in `tensor`, without a common process.
  """

  def __init__(self, source: Mesh, target: Mesh):
    self._target = target
    self._groups = _groups(source), _groups(target)
    self._lane = Lane()

  def send(self, value: Any) -> None:
    """Sends a tree of JAX arrays and of values that can be pickled.

    The value must be equal in all processes of the source. JAX arrays must be on the
    source mesh, and split at most over `tensor`. Does not wait for the copies.
    """
    leaves, structure = jax.tree.flatten(value)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and x.size]
    marked = [_described(x) if isinstance(x, jax.Array) else x for x in leaves]
    text = np.frombuffer(pickle.dumps(structure.unflatten(marked)), np.uint8)
    self._copy([LENGTH], [[np.asarray([len(text)], LENGTH.dtype)]])
    self._copy([_bytes(len(text))], [[text]])
    shards = [[shard.data for shard in x.addressable_shards] for x in arrays]
    self._copy([_described(x) for x in arrays], shards)

  def receive(self) -> Any:
    """Waits for a value. Its JAX arrays are on the target mesh, split as they were.

    Receives in a thread: a signal interrupts a wait for a thread, but not a wait for an
    array.
    """
    return self._lane.submit(self._receive).result()

  def _receive(self):
    (length,) = self._copy([LENGTH])
    (text,) = self._copy([_bytes(int(length.addressable_data(0)[0]))])
    value = pickle.loads(np.asarray(text.addressable_data(0)).tobytes())
    leaves, structure = jax.tree.flatten(value)
    sent = [x for x in leaves if isinstance(x, Leaf) and not x.empty]
    arrays = iter(self._copy(sent))
    filled = list[Any]()
    for leaf in leaves:
      if not isinstance(leaf, Leaf):
        filled.append(leaf)
      elif leaf.empty:
        nothing = np.zeros(leaf.shape, leaf.dtype)
        filled.append(_array(leaf, self._target, [nothing]))
      else:
        filled.append(next(arrays))
    return structure.unflatten(filled)

  def _copy(self, leaves: Sequence[Leaf], shards: Sequence[Sequence[Any]] = ()):
    """Copies arrays to the target mesh; `shards` are those of the source, per array.

    In the target, which passes none, the arrays that it returns have the copies. All
    arrays for a group of devices are copied by one call, so that JAX transfers them
    together.
    """
    sources, targets = self._groups
    shards = shards or [()] * len(leaves)
    copies: list[list[Any]] = [[] for _ in leaves]
    for i, target in enumerate(targets):
      source = sources[i % len(sources)]
      on_source = [
        _array(leaf, source, here) for leaf, here in zip(leaves, shards, strict=True)
      ]
      layouts = [NamedSharding(target, leaf.spec) for leaf in leaves]
      for copy, array in zip(copies, jax.device_put(on_source, layouts), strict=True):
        copy += [shard.data for shard in array.addressable_shards]
    return [
      _array(leaf, self._target, copy)
      for leaf, copy in zip(leaves, copies, strict=True)
    ]


def _described(array: jax.Array):
  assert isinstance(array.sharding, NamedSharding)
  return Leaf(array.shape, array.dtype, array.sharding.spec)


def _groups(mesh: Mesh):
  """Returns the meshes of the devices that differ only in `tensor`."""
  names = mesh.axis_names
  tensor = mesh.shape['tensor']
  rows = mesh.devices.reshape(-1, tensor)
  return [Mesh(row.reshape(*[1] * (len(names) - 1), tensor), names) for row in rows]


def _array(leaf: Leaf, mesh: Mesh, shards: Sequence[Any]):
  """Makes an array of the shards on devices of the mesh, or of one on the host."""
  layout = NamedSharding(mesh, leaf.spec)
  here = layout.addressable_devices
  if shards and isinstance(shards[0], np.ndarray):
    held = [jax.device_put(shards[0], device) for device in here]
  else:
    held = [x for x in shards if x.device in here]
  return jax.make_array_from_single_device_arrays(
    leaf.shape, layout, held, dtype=leaf.dtype
  )
