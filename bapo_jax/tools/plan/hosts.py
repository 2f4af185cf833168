"""Counts the traffic between the hosts of a mesh.

The count is a lower bound for any implementation of the collectives: a host receives
only once what its devices lack.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from bapo_jax.tools.plan.roofline import MeshShape, Traffic


def into_device(
  traffic: Sequence[Traffic], shape: MeshShape, process_of: Sequence[int]
) -> float:
  """Counts the bytes that traffic brings from other hosts, per device of its host.

  If n devices gather an array and k of them are on one host, the host receives
  (n - k) / n of the array. A scatter counts as one gather, a sum as two. Returns the
  count of the host that receives most; `process_of` is the host of each device in mesh
  order.
  """
  total: dict[int, float] = defaultdict(float)
  ids = np.arange(len(process_of)).reshape(tuple(shape.values()))
  for kind, axis, size in traffic:
    along = np.moveaxis(ids, list(shape).index(axis), -1).reshape(-1, shape[axis])
    for group in along.tolist():
      for host, k in Counter(process_of[device] for device in group).items():
        share = 1 - k / len(group)
        total[host] += (2 if kind == 'all-reduce' else 1) * share * size
  return max(total.values(), default=0.0) / max(Counter(process_of).values())
