"""Places arrays: PATHS maps parameters to logical axes, LAYOUTS these to mesh axes.

In training the weights are split over fsdp and tensor, in decoding over tensor alone,
so that a token step gathers no weights. Code that needs the mesh while it is traced (a
kernel, a constraint) reads the `ambient` mesh, which `current` and `under` set.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bapo_jax.types import AnyTree, Tree

Args = ParamSpec('Args')
Result = TypeVar('Result')

AXES = ('data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')  # every batch-like axis is split over both

PATHS = (  # the logical axes of each parameter; the first match wins
  (r'(^|/)(embed|head)$', ('vocab', 'width')),
  (r'vision/patch$', (None, None, None, None, 'width')),
  (r'vision/layers/qkv$', ('layer', 'width', None, 'heads', None)),
  (r'vision/layers/qkv_bias$', ('layer', None, 'heads', None)),
  (r'vision/layers/(gate|up)_bias$', ('layer', 'ffn')),
  (r'vision/merger_in$', ('width', 'ffn')),
  (r'vision/merger_in_bias$', ('ffn',)),
  (r'vision/merger_out$', ('ffn', 'width')),
  # Of projections, or of their quantised values.
  (r'layers/q(/values)?$', ('layer', 'width', 'heads', None)),
  (r'layers/[kv](/values)?$', ('layer', 'width', 'kv_heads', None)),
  (r'layers/q(_bias|/scale)$', ('layer', 'heads', None)),
  (r'layers/[kv](_bias|/scale)$', ('layer', 'kv_heads', None)),
  (r'layers/o(/values)?$', ('layer', 'heads', None, 'width')),
  (r'layers/(gate|up)(/values)?$', ('layer', 'width', 'ffn')),
  (r'layers/(gate|up)/scale$', ('layer', 'ffn')),
  (r'layers/(o|down)/scale$', ('layer', 'width')),
  (r'layers/down(/values)?$', ('layer', 'ffn', 'width')),
  (r'layers/router$', ('layer', 'width', None)),
  (r'layers/expert_(gate|up)(/values)?$', ('layer', 'experts', 'width', None)),
  (r'layers/expert_down(/values)?$', ('layer', 'experts', None, 'width')),
  (r'layers/expert_(gate|up|down)/scale$', ('layer', 'experts', None)),
  # Of an actor, where tensor=1.
  (r'layers/(qkv|gate_up)(/values)?$', ('layer', 'width', None)),
  (r'layers/out(/values)?$', ('layer', None, 'width')),
  (r'layers/(qkv|gate_up)/scale$', ('layer', None)),
  (r'layers/out/scale$', ('layer', 'width')),
  (r'layers/(q|k|v|gate|up)/a$', ('layer', 'width', None)),  # of adapters
  (r'layers/o/a$', ('layer', 'heads', None, None)),
  (r'layers/down/a$', ('layer', 'ffn', None)),
  (r'layers/q/b$', ('layer', None, 'heads', None)),
  (r'layers/[kv]/b$', ('layer', None, 'kv_heads', None)),
  (r'layers/(gate|up)/b$', ('layer', None, 'ffn')),
  (r'layers/(o|down)/b$', ('layer', None, 'width')),
  # Replicated, whatever their rank.
  (r'(layers/(o|down)|merger_out)_bias$|_norm$', None),
)

# Maps a logical axis to the mesh axis that it is split over.
SPLIT = ('vocab', 'heads', 'kv_heads', 'ffn', 'experts')
LAYOUTS = {'decode': dict.fromkeys(SPLIT, 'tensor')}
LAYOUTS['train'] = LAYOUTS['decode'] | {'width': 'fsdp'}


def make(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[Any] | None = None,
  rollout: int = 0,
) -> Mesh:
  """Makes a (data, fsdp, tensor) mesh of `devices`, by default of all processes.

  At most one size is -1: that axis gets all remaining devices. The last `rollout`
  devices are left out, for sampling. Raises ValueError if the product of the sizes is
  not the number of devices.
  """
  shape = (data, fsdp, tensor)
  learners, _ = divide(rollout, devices)
  grid = np.asarray(learners)
  try:
    if min(shape) < -1:
      raise ValueError
    return Mesh(grid.reshape(shape), AXES)
  except ValueError:
    raise ValueError(
      f'mesh data={data} fsdp={fsdp} tensor={tensor} does not fill {grid.size} '
      f'devices; give sizes with product {grid.size}, or set one size to -1'
    ) from None


def divide(
  rollout: int, devices: Sequence[Any] | None = None
) -> tuple[list[Any], list[Any]]:
  """Divides devices, by default all, into learners and the last `rollout`, samplers.

  Raises ValueError if no device is left to train.
  """
  devices = list(devices or jax.devices())
  if rollout >= len(devices):
    way_out = f'give {len(devices) - 1} or fewer'
    if len(devices) == 1:
      way_out = (
        'set mesh.rollout=0, or use more devices (on a CPU, '
        'XLA_FLAGS=--xla_force_host_platform_device_count=2)'
      )
    raise ValueError(
      f'mesh.rollout={rollout} of {len(devices)} devices leaves none to train; '
      f'{way_out}'
    )
  return devices[: len(devices) - rollout], devices[len(devices) - rollout :]


def path_name(path: tuple[Any, ...]) -> str:
  """Joins the key path of a leaf into a string such as 'layers/q'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def spec_of(
  name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, layout: str = 'train'
) -> P:
  """Returns the PartitionSpec of the parameter at path `name`.

  Key/value heads that do not divide over their mesh axis are replicated, as in every
  implementation of grouped-query attention. `layout` is a key of LAYOUTS. Raises
  ValueError if no line of PATHS matches, or another axis does not divide over the mesh.
  """
  stacked = re.sub(r'(^|/)layers/\d+/', r'\1layers/', name)
  matches = [axes for pattern, axes in PATHS if re.search(pattern, stacked)]
  if not matches:
    raise ValueError(f'no line of sharding.PATHS matches parameter {name!r}; add one')
  if (logical := matches[0]) and stacked != name:  # one layer of an actor
    logical = logical[1:]
  entries = []
  for axis, n in zip(logical or (), shape, strict=logical is not None):
    target = LAYOUTS[layout].get(axis) if axis else None
    if target and n % mesh.shape[target]:
      if axis != 'kv_heads':
        raise ValueError(
          f'{name}: {axis}={n} does not divide over mesh.{target}={mesh.shape[target]}'
          f'; set mesh.{target} to a divisor of {n}'
        )
      target = None
    entries.append(target)
  return P(*entries)


def shardings(tree: Tree, mesh: Mesh | AbstractMesh, layout: str = 'train') -> Tree:
  """Returns the NamedShardings of a tree of parameters or of optimiser moments."""

  def place(path: tuple[Any, ...], x: jax.Array):
    spec = spec_of(path_name(path), x.shape, mesh, layout) if x.ndim else P()
    return named(mesh, *spec)

  return jax.tree.map_with_path(place, tree)


def like(params: Tree, opt: Tree, mesh: Mesh | AbstractMesh) -> Tree:
  """Returns the NamedShardings of an optimiser's state.

  An array with the path, in its end, and the shape of a parameter is placed like the
  parameter; others, such as counts or factored moments, are whole on every device.
  """
  placed = {
    path_name(path): (x.shape, spec)
    for (path, x), spec in zip(
      jax.tree.leaves_with_path(params),
      jax.tree.leaves(shardings(params, mesh)),
      strict=True,
    )
  }

  def place(path: tuple[Any, ...], x: jax.Array):
    ends = (path_name(path[i:]) for i in range(len(path)))
    shape, spec = next((placed[end] for end in ends if end in placed), (None, None))
    return spec if shape == x.shape else named(mesh)

  return jax.tree.map_with_path(place, opt)


def named(mesh: Mesh | AbstractMesh, *entries: Any) -> NamedSharding:
  """Returns a sharding without mesh axes of size 1, spelled as programs spell outputs.

  A jitted function compiles once per spelling of a sharding.
  """
  spec = list[Any]()
  for entry in entries:
    axes = entry if isinstance(entry, tuple) else (entry,)
    wide = [axis for axis in axes if axis and mesh.shape[axis] > 1]
    spec.append(tuple(wide) if len(wide) > 1 else next(iter(wide), None))
  while spec and spec[-1] is None:
    spec.pop()
  return NamedSharding(mesh, P(*spec))


def over_rows(mesh: Mesh | AbstractMesh, rows: int = 0) -> NamedSharding:
  """Returns the sharding of arrays whose leading axis is a batch of `rows`.

  If `rows` do not divide over the mesh, the arrays are replicated, because JAX splits
  the inputs of a program only into equal parts.
  """
  return named(mesh, *(() if rows % row_shards(mesh) else (ROWS,)))


def layout_of_rows(tree: Tree, mesh: Mesh | AbstractMesh) -> Tree:
  """Returns a tree of shardings: `over_rows` for arrays, replicated for scalars.

  Routes, whose names end in X, are split over tensor too: of a step they may be large.
  """

  def layout(path, x):
    if not x.ndim:
      return replicated(mesh)
    if path_name(path[-1:]).endswith('TX'):
      return over_routes(mesh, x.shape)
    return over_rows(mesh, x.shape[0])

  return jax.tree.map_with_path(layout, tree)


def over_routes(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> NamedSharding:
  """Returns the sharding of routes [rows, ..., X]: X is split over tensor."""
  rows = None if shape[0] % row_shards(mesh) else ROWS
  split = None if shape[-1] % mesh.shape['tensor'] else 'tensor'
  return named(mesh, rows, *[None] * (len(shape) - 2), split)


def abstract(tree: Tree, layout: Tree) -> Tree:
  """Returns an abstract tree with a sharding on every leaf."""
  return jax.tree.map(lambda x, s: x.update(sharding=s), tree, layout)


def abstract_rows(make: Callable[[], AnyTree], mesh: Mesh | AbstractMesh) -> AnyTree:
  """Returns the shapes of what `make` returns, placed by `layout_of_rows`."""
  tree = jax.eval_shape(make)
  return abstract(tree, layout_of_rows(tree, mesh))


def split_rows(tree: AnyTree, mesh: Mesh | None) -> AnyTree:
  """Reshards the rows of a tree over the mesh; a no-op on one device."""
  if mesh is None or mesh.size == 1:
    return tree
  return jax.device_put(tree, layout_of_rows(tree, mesh))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Returns the sharding of small arrays replicated on every device."""
  return NamedSharding(mesh, P())


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """Returns the number of pieces into which the mesh cuts a batch axis."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def over_cache(mesh: Mesh | AbstractMesh, kv_heads: int) -> NamedSharding:
  """Returns the sharding of keys and values [S, K, ...]: S split, K if it divides."""
  return named(mesh, ROWS, None if kv_heads % mesh.shape['tensor'] else 'tensor')


def current(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
  """Makes the mesh ambient in a `with` block; a no-op on one device."""
  alone = mesh is None or mesh.size == 1
  return contextlib.nullcontext() if alone else jax.set_mesh(mesh)


def under(
  mesh: Mesh | None, function: Callable[Args, Result]
) -> Callable[Args, Result]:
  """Wraps a function so that it always runs with this ambient mesh."""

  @functools.wraps(function)
  def call(*args: Args.args, **kwargs: Args.kwargs):
    with current(mesh):
      return function(*args, **kwargs)

  return call


def ambient() -> AbstractMesh | None:
  """Returns the ambient mesh; None without one, or on one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if mesh.axis_names == AXES and mesh.size > 1 else None


def ambient_row_shards() -> int:
  """Returns `row_shards` of the ambient mesh; 1 without a mesh."""
  mesh = ambient()
  return row_shards(mesh) if mesh else 1


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
  """Shards the leading axes of x by these axes of the ambient mesh, if all divide."""
  mesh = ambient()
  if mesh is None:
    return x
  for n, axis in zip(x.shape, axes, strict=False):
    names = (axis,) if isinstance(axis, str) else axis or ()
    if n % math.prod(mesh.shape[name] for name in names):
      return x
  return jax.lax.with_sharding_constraint(x, P(*axes))


def constrain_params(tree: AnyTree) -> AnyTree:
  """Shards parameters or moments by their paths; a no-op without an ambient mesh.

  A program that returns parameters must call this: XLA's GPU compiler otherwise returns
  the result of a `cond` in full on every device, and then reuses no donated argument.
  """
  mesh = ambient()
  if mesh is None:
    return tree
  return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def constrain_state(params: AnyTree, opt: AnyTree) -> tuple[AnyTree, AnyTree]:
  """Shards parameters and the optimiser's state; a no-op without an ambient mesh."""
  mesh = ambient()
  if mesh is None:
    return params, opt
  layout = shardings(params, mesh), like(params, opt, mesh)
  return jax.lax.with_sharding_constraint((params, opt), layout)


def constrain_rows(tree: AnyTree) -> AnyTree:
  """Shards the rows of all arrays by `layout_of_rows`; a no-op without a mesh."""
  mesh = ambient()
  if mesh is None:
    return tree
  return jax.lax.with_sharding_constraint(tree, layout_of_rows(tree, mesh))
