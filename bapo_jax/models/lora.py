"""Implements low-rank adapters (Hu et al., 2021): W + alpha / rank * A B, W frozen.

`attach` joins adapters to the frozen weights, unmerged (`layers.product`), so that no
gradient of a full weight is formed. `layer` and `merge` return plain weights, for
decoding and for export.
"""

import functools
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

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # the shapes of A and B


class Adapter(struct.PyTreeNode):
  """The factors A and B of a projection in all layers; they add scale * A B to it."""

  a: Array  # [L, *in, rank]
  b: Array  # [L, rank, *out]
  scale: float = struct.field(pytree_node=False)  # alpha / rank


class Adapted(struct.PyTreeNode):
  """A frozen projection [..., *in, *out] with its adapter."""

  base: Array
  adapter: Adapter


def shapes(spec: ModelSpec, rank: int, targets: str) -> dict[str, Pair]:
  """Lists the projections that `targets` matches: path -> (shape of A, shape of B).

  Raises:
    ValueError: the rank exceeds the smaller side of a weight, or none is matched.
  """
  pairs: dict[str, Pair] = {}
  for path, (shape, _) in transformer.describe(spec).items():
    if path in PROJECTIONS and re.fullmatch(targets, path):
      # [L, *in, *out]: a product sums over the axes `in`.
      outputs_from = 1 + PROJECTIONS[path]
      inner = shape[1:outputs_from]
      outer = shape[outputs_from:]
      limit = min(math.prod(inner), math.prod(outer))
      if rank > limit:
        raise ValueError(
          f'lora.rank={rank} exceeds the rank of {path}, which has {math.prod(inner)} '
          f'inputs and {math.prod(outer)} outputs; set a rank of 1 to {limit}, or '
          'change lora.targets'
        )
      pairs[path] = ((shape[0], *inner, rank), (shape[0], rank, *outer))
  if rank and not pairs:
    raise ValueError(
      f'lora.targets={targets!r} matches no projection of this model, whose experts '
      "have no adapters; set it to 'layers/(q|k|v|o)'"
    )
  return pairs


@functools.cache
def count(spec: ModelSpec, rank: int, targets: str) -> int:
  """Counts the parameters of the adapters."""
  pairs = shapes(spec, rank, targets).values()
  return sum(math.prod(shape) for pair in pairs for shape in pair)


def init(spec: ModelSpec, key: Array, *, rank: int, alpha: float, targets: str) -> Tree:
  """Initialises adapters in float32; B is zero, so that they add nothing yet.

  A is uniform on +-1 / sqrt(inputs), as in peft (Kaiming's rule with a = sqrt 5); the
  paper uses a Gaussian of unstated variance.
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
  """Joins frozen weights (`base`, if any), trained weights and adapters to one tree."""
  if base is None:
    return trained
  flat = transformer.flatten(trained)
  frozen = {
    path: Adapted(w, flat[path]) if path in flat else w
    for path, w in transformer.flatten(base).items()
  }
  return transformer.unflatten(flat | frozen)


def layer(w: Tree, i: int) -> Tree:
  """Returns layer i of stacked weights; merges an adapted projection in float32."""
  if not isinstance(w, Adapted):
    return jax.tree.map(lambda x: x[i], w)
  a, b = (x[i].astype(jnp.float32) for x in (w.adapter.a, w.adapter.b))
  return w.base[i].astype(jnp.float32) + w.adapter.scale * jnp.tensordot(a, b, 1)


def merge(w: Adapted) -> Array:
  """Merges an adapter into its projection, in float32, layer by layer."""
  return jnp.stack([layer(w, i) for i in range(w.base.shape[0])])
