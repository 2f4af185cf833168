"""Combines host values of processes, and moves values between host and devices.

All processes that compute together (`hosts.side`) call `total`, `agree`, `merged`,
`whole` and `taken` in the same order. In a single process these calls are free.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from bapo_jax.runtime.hosts import everyones, process, side


def total(values: np.ndarray | Sequence) -> np.ndarray:
  """Returns the elementwise int32 sum of `values` over all processes."""
  own = np.asarray(values, np.int32)
  return np.asarray(everyones(own.tolist()), np.int32).sum(0, dtype=np.int32)


def agree(values: Sequence[int]) -> list[int]:
  """Returns the maximum over processes of each value, so that all processes agree."""
  return np.max(everyones([int(value) for value in values]), axis=0).tolist()


def merged(values: dict[str, Any]) -> dict[str, Any]:
  """Returns the union of the dicts of all processes; their values are JSON."""
  return {name: value for part in everyones(values) for name, value in part.items()}


def summed(values: Mapping[str, float]) -> dict[str, float]:
  """Returns the sum over all processes of the values of each name."""
  totals = collections.Counter()
  for part in everyones(values):
    totals.update(part)
  return dict(totals)


def whole(array: Any) -> np.ndarray:
  """Copies a small global array to the host of every process."""
  if len(side()) > 1 and not (array.is_fully_addressable or array.is_fully_replicated):
    return process_allgather(array, tiled=True)
  return np.asarray(array)


def fetched(dicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Copies dicts of scalars to the host: one transfer per dict, not one per scalar.

  Every copy is requested before the first is awaited. A scalar is a device's bool,
  int32 or float32 and keeps all its bits.
  """
  bits_N = jax.device_get([_bits(scalars) for scalars in dicts])
  return [
    {
      name: bits.astype(bool) if x.dtype == bool else bits.view(x.dtype)
      for (name, x), bits in zip(sorted(scalars.items()), bits_M, strict=True)
    }
    for scalars, bits_M in zip(dicts, bits_N, strict=True)
  ]


@jax.jit
def _bits(scalars: Mapping[str, jax.Array]):
  words = [
    x.astype('int32') if x.dtype == bool else x for x in jax.tree.leaves(scalars)
  ]
  return jnp.array([jax.lax.bitcast_convert_type(x, 'int32') for x in words], 'int32')


def placed(tree: Any, layout: Any) -> Any:
  """Puts host values that are equal in all processes on the devices.

  `layout` is a sharding, or a prefix tree of shardings. Each process puts its own
  shards; `jax.device_put` would also compare all values between processes.
  """
  if len(side()) == 1:
    return jax.device_put(tree, layout)
  leaves, treedef = jax.tree.flatten(tree)
  layouts = jax.tree.leaves(jax.tree.broadcast(layout, tree))
  return treedef.unflatten(
    jax.make_array_from_callback(np.shape(x), place, np.asarray(x).__getitem__)
    for x, place in zip(leaves, layouts, strict=True)
  )


def taken(tree: Any, rows: np.ndarray) -> Any:
  """Copies a few rows of global arrays to the host of every process."""
  return jax.tree.map(whole, _take(tree, rows))


def owned(array: Any) -> np.ndarray:
  """Returns a bool per row: whether this process owns the row.

  Each row has one owner among the processes whose devices hold it. Processes that hold
  the same rows share them evenly.
  """
  if len(side()) == 1:
    return np.ones(len(array), bool)
  holders: dict[tuple[int, int], set[int]] = {}
  for device, cuts in array.sharding.devices_indices_map(array.shape).items():
    span = cuts[0].indices(array.shape[0])[:2]
    holders.setdefault(span, set()).add(device.process_index)
  mine = np.zeros(array.shape[0], bool)
  for span, members in holders.items():
    rows = np.array_split(np.arange(*span), len(members))
    if process() in members:
      mine[rows[sorted(members).index(process())]] = True
  return mine


def rows_of(array: Any, rows: np.ndarray | Sequence[int]) -> np.ndarray:
  """Returns rows of a global array; they must all be on devices of this process."""
  index = np.asarray(rows, int)
  if isinstance(array, np.ndarray):
    return array[index]
  values = np.empty((len(index), *array.shape[1:]), array.dtype)
  missing = np.ones(len(index), bool)
  for shard in array.addressable_shards:
    start, stop, _ = shard.index[0].indices(array.shape[0])
    here = np.flatnonzero(missing & (index >= start) & (index < stop))
    if len(here):
      # The number of rows is rounded up to a power of two: fewer programs to compile.
      padding = (1 << (len(here) - 1).bit_length()) - len(here)
      local = np.pad(index[here] - start, (0, padding))
      values[here] = np.asarray(_take(shard.data, local))[: len(here)]
      missing[here] = False
  assert not missing.any()
  return values


@jax.jit
def _take(tree: Any, index: jax.Array):
  return jax.tree.map(lambda x: x[index], tree)
