"""Values cross between processes unchanged, whatever the sizes of both meshes."""

import processes
import pytest

SOURCE = """
import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from bapo_jax import sharding
from bapo_jax.runtime.link import Link

samplers, tensor = {samplers}, {tensor}
_, others = sharding.divide(samplers)
source = sharding.make(tensor=tensor, rollout=samplers)
target = sharding.make(tensor=tensor, devices=others)
there, back = Link(source, target), Link(target, source)


def value(mesh):
  rng = np.random.default_rng(0)
  kinds = "int32 uint32 bool int8 uint8 float32".split() + [ml_dtypes.bfloat16]
  arrays = [rng.integers(0, 2, (4, 6)).astype(kind) for kind in kinds]
  arrays += [np.zeros((0, 3), np.float32), np.float32(rng.normal(size=(1024, 2048)))]
  whole, split = (NamedSharding(mesh, P(*spec)) for spec in ((), (None, 'tensor')))
  return {{
    'text': 'Ωmega', 'none': None, 'host': np.asarray([2**40, -1]), 'empty': {{}},
    'arrays': [jax.device_put(x, whole) for x in arrays],
    'split': [jax.device_put(x, split) for x in arrays if x.size],
  }}


def shards(x):
  if not isinstance(x, jax.Array):
    return repr(x)
  return str(x.dtype), x.sharding.spec, [
    (str(s.index), np.asarray(s.data).tobytes()) for s in x.addressable_shards]


trains = any(d.process_index == hosts.process() for d in source.devices.flat)
for step in range(2):
  if trains:
    there.send(value(source))
    time.sleep(step)  # the other side waits
    found, expected = back.receive(), value(source)
  else:
    found, expected = there.receive(), value(target)
    back.send(found)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  assert all(shards(x) == shards(y) for x, y in leaves)
print('equal')
hosts.finish(0)
"""


@pytest.mark.parametrize(
  ('count', 'samplers', 'tensor'),
  [
    (2, 2, 2),
    pytest.param(4, 1, 1, marks=pytest.mark.nightly),
    pytest.param(4, 3, 1, marks=pytest.mark.nightly),
    pytest.param(4, 2, 2, marks=pytest.mark.nightly),
  ],
)
def test_values_cross_both_ways(tmp_path, count, samplers, tensor):
  source = SOURCE.format(samplers=samplers, tensor=tensor)
  started = processes.scripts(source, count, tmp_path)
  statuses, outputs = processes.ended(started, tmp_path)
  assert statuses == [0] * count and all('equal' in x for x in outputs), outputs
