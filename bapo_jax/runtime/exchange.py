"""Values that all processes make together, and the doors between host and devices.

1. `total` and `agree` are small collectives of host values, `merged` one of texts;
2. `whole`, `taken` and `rows_of` read global arrays: all of a small one, a few rows, or
   a process's own rows (`owned`); `placed` puts equal host arrays on the devices.

Every call of `total`, `agree`, `merged`, `whole` and `taken` is made by all processes,
in the same order; for a single one they are free.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime.hosts import process, processes

Array = Any  # jax.Array; JAX is imported where it is used


class Collectives(NamedTuple):
  """What is computed over processes; compiled once per shape."""

  layout: Any  # the sharding by process
  total: Callable[[Array], Array]
  gather: Callable[[Array], Array]


@functools.cache
def _collectives() -> Collectives:
  import jax
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
  mesh = Mesh(np.reshape(devices, (processes(), -1)), ('process', 'device'))
  everywhere = NamedSharding(mesh, P())
  return Collectives(
    NamedSharding(mesh, P('process')),
    jax.jit(lambda x: x.sum(0), out_shardings=everywhere),
    jax.jit(lambda x: x, out_shardings=everywhere),
  )


def _together(own: np.ndarray, compute: Callable[[Array], Array]) -> np.ndarray:
  """`compute` of the arrays of all processes, stacked; waits for it."""
  import jax

  shape = (processes(), *own.shape)
  layout = _collectives().layout
  stacked = jax.make_array_from_process_local_data(layout, own[None], shape)
  return np.asarray(compute(stacked))


def total(values: np.ndarray | Sequence) -> np.ndarray:
  """The sum over processes of equally shaped integers: one small collective."""
  own = np.asarray(values, np.int32)
  return _together(own, _collectives().total) if processes() > 1 else own


def agree(values: Sequence[int]) -> list[int]:
  """The largest over processes of each value: what one decides, all decide."""
  if processes() == 1:
    return list(values)
  own = np.asarray(values, np.int32)
  return _together(own, _collectives().gather).max(0).tolist()


def everyones(text: str, block: int = 1 << 20) -> list[str]:
  """The text of each process, on all of them, sent in blocks of so many bytes."""
  if processes() == 1:
    return [text]
  own = np.frombuffer(text.encode(), np.uint8)
  lengths = total(np.eye(processes(), dtype=np.int32)[process()] * len(own))
  own = np.pad(own, (0, -len(own) % block + lengths.max()))
  gather = _collectives().gather
  blocks = [
    _together(own[first : first + block], gather)
    for first in range(0, lengths.max(), block)
  ]
  rows = np.concatenate(blocks, 1) if blocks else np.zeros((processes(), 0), np.uint8)
  return [row[:n].tobytes().decode() for row, n in zip(rows, lengths, strict=True)]


def merged(own: dict[str, Any]) -> dict[str, Any]:
  """What the processes have by name, JSON values, on all of them."""
  if processes() == 1:
    return own
  found: dict[str, Any] = {}
  for text in everyones(json.dumps(own)):
    found |= json.loads(text)
  return found


def whole(array: Any) -> np.ndarray:
  """A small global array on the host of every process."""
  if processes() > 1 and not (array.is_fully_addressable or array.is_fully_replicated):
    array = _replicate(array.sharding.mesh)(array)
  return np.asarray(array)


def placed(tree: Any, layout: Any) -> Any:
  """`jax.device_put` of host values that are the same in every process.

  A process puts its own part of them; device_put would send them all to compare.
  """
  import jax

  if processes() == 1:
    return jax.device_put(tree, layout)
  leaves, treedef = jax.tree.flatten(tree)
  layouts = jax.tree.leaves(jax.tree.broadcast(layout, tree))
  return treedef.unflatten(
    jax.make_array_from_callback(np.shape(x), place, np.asarray(x).__getitem__)
    for x, place in zip(leaves, layouts, strict=True)
  )


def taken(tree: Any, rows: np.ndarray) -> Any:
  """These rows of global arrays, few enough for the host of every process.

  A collective, like `whole`: all processes call it, in the same order.
  """
  import jax

  return jax.tree.map(whole, _take()(tree, rows))


def owned(array: Any) -> np.ndarray:
  """bool, row by row: whether this process answers for it.

  A row has one owner, of the processes whose devices hold it; where several hold the
  same rows they share them evenly.
  """
  if processes() == 1:
    return np.ones(len(array), bool)
  holders: dict[tuple[int, int], set[int]] = {}
  for device, cuts in array.sharding.devices_indices_map(array.shape).items():
    span = cuts[0].indices(array.shape[0])[:2]
    holders.setdefault(span, set()).add(device.process_index)
  own = np.zeros(array.shape[0], bool)
  for span, members in holders.items():
    rows = np.array_split(np.arange(*span), len(members))
    if process() in members:
      own[rows[sorted(members).index(process())]] = True
  return own


def rows_of(array: Any, rows: np.ndarray | Sequence[int]) -> np.ndarray:
  """These rows of a global array, all of them on devices of this process."""
  index = np.asarray(rows, int)
  if isinstance(array, np.ndarray):
    return array[index]
  found = np.empty((len(index), *array.shape[1:]), array.dtype)
  left = np.ones(len(index), bool)
  for shard in array.addressable_shards:
    start, stop, _ = shard.index[0].indices(array.shape[0])
    here = np.flatnonzero(left & (index >= start) & (index < stop))
    if len(here):
      few = 1 << (len(here) - 1).bit_length()  # few shapes to compile
      local = np.pad(index[here] - start, (0, few - len(here)))
      found[here] = np.asarray(_take()(shard.data, local))[: len(here)]
      left[here] = False
  assert not left.any()
  return found


@functools.cache
def _take() -> Callable[[Any, np.ndarray], Any]:
  import jax

  return jax.jit(lambda tree, index: jax.tree.map(lambda x: x[index], tree))


@functools.cache
def _replicate(mesh: Any) -> Callable[[Array], Array]:
  import jax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
