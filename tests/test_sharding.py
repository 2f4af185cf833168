"""Every array has a place, and an error names an array that does not divide."""

import dataclasses

import jax
import jax.numpy as jnp
import making
import pytest
from jax.sharding import PartitionSpec as P
from making import GEMMA3, OLMO3, QWEN2, QWEN3

from bapo_jax import sharding
from bapo_jax.models import transformer

LLAMA = dataclasses.replace(QWEN2, qkv_bias=False)
UNTIED = dataclasses.replace(QWEN2, tied=False)
SEEING = dataclasses.replace(QWEN2, vision=making.TOWER)


def test_make_fills_the_devices():
  for given, filled in (((), (8, 1, 1)), ((2, -1, 2), (2, 2, 2))):
    assert tuple(sharding.make(*given).shape.values()) == filled
  assert sharding.row_shards(sharding.make(data=2, fsdp=2, tensor=2)) == 4


@pytest.mark.parametrize('layout', ['train', 'decode'])
@pytest.mark.parametrize(
  'spec',
  [QWEN2, QWEN3, LLAMA, UNTIED, SEEING, GEMMA3, OLMO3],
  ids=lambda spec: str(spec.vision)[:6],
)
def test_every_parameter_has_a_place(spec, layout):
  # In training a matrix is split over both axes, each piece a quarter of the whole; in
  # decoding over tensor alone: a token step gathers nothing.
  tree = sharding.shardings(transformer.abstract(spec), sharding.make(2, 2, 2), layout)
  both = {'fsdp', 'tensor'} if layout == 'train' else {'tensor'}
  for path, placed in jax.tree.leaves_with_path(tree):
    name = sharding.path_name(path)
    shape = transformer.describe(spec)[name][0]
    placed.shard_shape(shape)  # raises where an axis does not divide
    axes = set(placed.spec) - {None}
    if name.endswith(('norm', '/o_bias', 'down_bias', 'out_bias')):
      assert not placed.spec, name
    elif name.endswith('bias'):
      assert axes == {'tensor'}, name
    elif name == 'vision/patch':  # no axis of it is of heads
      assert axes == both - {'tensor'}, name
    else:
      assert axes == both, name


def test_a_place_worked_by_hand():
  devices = sharding.make(2, 2, 2)
  four = sharding.make(2, 1, 4)
  for mesh, name, shape, place in (
    (devices, 'layers/q', (2, 16, 4, 4), P(None, 'fsdp', 'tensor', None)),
    (devices, 'layers/o', (2, 4, 4, 16), P(None, 'tensor', None, 'fsdp')),
    (devices, '0/mu/embed', (20, 16), P('tensor', 'fsdp')),
    # The factors of an adapter, as the sides of their weight.
    (devices, 'layers/q/b', (2, 3, 4, 4), P(None, None, 'tensor', None)),
    (devices, 'layers/o/a', (2, 4, 4, 3), P(None, 'tensor', None, None)),
    # Two key heads do not divide over four devices, which have both.
    (four, 'layers/k', (2, 16, 2, 4), P(None, 'fsdp', None, None)),
  ):
    assert sharding.spec_of(name, shape, mesh) == place, name
  decode = sharding.spec_of('layers/q', (2, 16, 4, 4), devices, 'decode')
  assert decode == P(None, None, 'tensor', None)
  # Keys and values, as their projections.
  assert sharding.over_cache(devices, 2).spec == P(sharding.ROWS, 'tensor')
  assert sharding.over_cache(devices, 3).spec == P(sharding.ROWS)


@pytest.mark.parametrize(
  ('name', 'shape', 'named'),
  [
    ('layers/q', (2, 16, 6, 4), r'layers/q: heads=6 .*mesh\.tensor=4'),
    ('layers/up', (2, 15, 32), r'layers/up: width=15 .*mesh\.fsdp=2'),
    ('layers/qq', (2, 16), 'layers/qq'),
    ('my_embed', (2, 16), 'my_embed'),
  ],
)
def test_a_path_or_an_axis_without_a_place_is_named(name, shape, named):
  with pytest.raises(ValueError, match=named):
    sharding.spec_of(name, shape, sharding.make(1, 2, 4))


def test_a_mesh_is_ambient_within_current_and_under():
  devices = sharding.make(2, 2, 2)
  x = jnp.ones((8, 4))
  alone = sharding.make(1, 1, 1, jax.devices()[:1])
  with sharding.current(None), sharding.current(alone):
    assert sharding.ambient() is None
  assert sharding.under(devices, sharding.ambient)().shape == dict(devices.shape)
  constrain = jax.jit(lambda x: sharding.constrain(x, sharding.ROWS))
  spread = sharding.under(devices, constrain)(x)
  assert spread.sharding.shard_shape(x.shape) == (2, 4)
  # An array that does not divide, and one without a mesh, is returned unchanged.
  x = jnp.ones((6, 4))
  assert sharding.under(devices, sharding.constrain)(x, sharding.ROWS) is x
  assert sharding.constrain(x, sharding.ROWS) is x


def test_the_last_devices_sample_and_the_others_train():
  devices = jax.devices()
  assert sharding.divide(3, devices) == (devices[:5], devices[5:])
  assert sharding.divide(0, devices) == (devices, [])
  mesh = sharding.make(fsdp=-1, data=1, rollout=6)
  assert mesh.devices.ravel().tolist() == devices[:2]
  with pytest.raises(ValueError, match=r'mesh\.rollout=8 of 8 devices leaves none'):
    sharding.divide(8, devices)
