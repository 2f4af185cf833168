"""Low-rank adapters (Hu et al., 2021): W + alpha / rank * A B, of which W is frozen.

1. `sides` and `shapes` choose projections and give the sizes of their A and B;
2. `init` makes the adapters: what is trained, a tree of `Adapter`;
3. `attach` joins them to the frozen weights: a tree that `layers` computes with,
   unmerged (`layers.product`), so that no gradient of a whole weight is formed;
4. `layer` and `merge` give plain weights, for decoding and for export.

Where nothing is frozen, `attach` and `layer` return what they are given.
"""

import math
import re

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from bapo_jax.models import transformer
from bapo_jax.models.knobs import PROJECTIONS
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Tree

Shape = tuple[int, ...]


class Adapter(struct.PyTreeNode):
  """A and B of a projection of all layers: what is added is scale * A B."""

  a: Array  # [L, *in, rank]
  b: Array  # [L, rank, *out]
  scale: float = struct.field(pytree_node=False)  # alpha / rank


class Adapted(struct.PyTreeNode):
  """A frozen projection [..., *in, *out] with its adapter."""

  base: Array
  adapter: Adapter


def sides(path: str, shape: Shape) -> tuple[Shape, Shape]:
  """(in, out): the axes that a product sums over, and those that it makes."""
  inner = 1 + PROJECTIONS[path]
  return shape[1:inner], shape[inner:]


def shapes(spec: ModelSpec, rank: int, targets: str) -> dict[str, tuple[Shape, Shape]]:
  """path -> (shape of A, shape of B) of every adapted projection.

  Args:
    targets: a regular expression that matches the whole path.

  Raises:
    ValueError: the rank is above the smaller side of a weight.
  """
  found: dict[str, tuple[Shape, Shape]] = {}
  for path, (shape, _) in transformer.describe(spec).items():
    if path in PROJECTIONS and re.fullmatch(targets, path):
      inner, outer = sides(path, shape)
      least = min(math.prod(inner), math.prod(outer))
      if rank > least:
        raise ValueError(
          f'lora.rank={rank}: {path} has {math.prod(inner)} inputs and '
          f'{math.prod(outer)} outputs, whose products have rank {least} at most; give '
          f'1 to {least}, or other lora.targets'
        )
      found[path] = ((shape[0], *inner, rank), (shape[0], rank, *outer))
  return found


def count(spec: ModelSpec, rank: int, targets: str) -> int:
  """Number of parameters of the adapters."""
  pairs = shapes(spec, rank, targets).values()
  return sum(math.prod(shape) for pair in pairs for shape in pair)


def init(spec: ModelSpec, key: Array, *, rank: int, alpha: float, targets: str) -> Tree:
  """Adapters that add nothing yet, float32: B is zero, A uniform.

  A is drawn from +-1 / sqrt(inputs), as peft does (Kaiming's rule with a = sqrt 5); the
  paper says a Gaussian, and gives no variance.
  """
  flat = {}
  for i, (path, (a, b)) in enumerate(sorted(shapes(spec, rank, targets).items())):
    bound = math.prod(a[1:-1]) ** -0.5
    drawn = jax.random.uniform(
      jax.random.fold_in(key, i), a, minval=-bound, maxval=bound
    )
    flat[path] = Adapter(drawn, jnp.zeros(b, jnp.float32), alpha / rank)
  return transformer.unflatten(flat)


def attach(base: Tree | None, trained: Tree) -> Tree:
  """The weights that the model computes with.

  Args:
    base: frozen weights; None where `trained` are all of them.
    trained: adapters of frozen weights, and weights that are not among these.
  """
  if base is None:
    return trained
  flat = transformer.flatten(trained)
  frozen = {
    path: Adapted(w, flat[path]) if path in flat else w
    for path, w in transformer.flatten(base).items()
  }
  return transformer.unflatten(flat | frozen)


def layer(w: Array | Adapted, i: int) -> Array:
  """Layer i of stacked weights; of an adapted projection the sum, in float32."""
  if not isinstance(w, Adapted):
    return w[i]
  a, b = (x[i].astype(jnp.float32) for x in (w.adapter.a, w.adapter.b))
  return w.base[i].astype(jnp.float32) + w.adapter.scale * jnp.tensordot(a, b, 1)


def merge(weights: Tree) -> Tree:
  """The weights of `attach` as plain arrays, adapted projections in float32.

  Layer by layer: what the host or a device holds besides is one of them.
  """

  def whole(w: Array | Adapted) -> Array:
    if not isinstance(w, Adapted):
      return w
    return jnp.stack([layer(w, i) for i in range(w.base.shape[0])])

  return jax.tree.map(whole, weights, is_leaf=lambda x: isinstance(x, Adapted))
