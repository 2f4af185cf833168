"""Embeds each picture once for the learner; all responses to its prompt share it.

1. `galleries` collects the pictures of a run. An `Embedder` returns the pictures of a
   step's problems: embedded if the vision tower is frozen, as pixels if it is trained;
2. `pack` packs rows together with the positions of their tokens;
3. `variables` returns the inputs of a loss that get gradients: with a trained
   tower they include the embedded patches, so that the tower runs once per minibatch
   instead of once per micro-batch.

Without pictures these functions do not change the compiled programs.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data.gallery import Gallery, capacity
from bapo_jax.data.prompts import Problems
from bapo_jax.models import packing
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Packed, Unit
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence, tower
from bapo_jax.runtime import exchange
from bapo_jax.runtime.ahead import Call
from bapo_jax.types import EmbeddedPictures, Pictures, Tree, concat, take

Seen = EmbeddedPictures | Pictures | None

BLOCK = 8  # prompts per device whose pictures are embedded at once

# One function for the trainers that compile and that run it.
_embedded = jax.jit(sequence.embedded, static_argnames=('spec', 'schedule'))


def galleries(
  training: Problems, held_out: Problems, spec: ModelSpec
) -> tuple[Gallery | None, Gallery | None]:
  """Returns (training, held-out) galleries of equal capacity; None without pictures."""
  grids = [*training.grids, *held_out.grids]
  if spec.vision is None or not any(grids):
    return None, None
  room = capacity(grids, spec.vision)

  def of(problems: Problems) -> Gallery:
    return Gallery(problems.rows, tower.vision_of(spec), room)

  return of(training), of(held_out)


class Embedder:
  """Maps ids of problems to their pictures on the mesh.

  Args:
    gallery: the pictures of the problems.
    base: frozen weights; if they include the tower, pictures are embedded here.
  """

  def __init__(
    self,
    gallery: Gallery,
    spec: ModelSpec,
    mesh: Mesh,
    base: Tree,
    schedule: Schedule = Schedule(),
  ):
    self._gallery = gallery
    self._mesh = mesh
    self._tower = {'vision': base['vision']} if base and 'vision' in base else None
    self._knobs = dict(spec=spec, schedule=schedule)
    self._block = BLOCK * sharding.row_shards(mesh)

  def __call__(self, id_P: Array | np.ndarray) -> Seen:
    """Returns the pictures of problems; id -1 has none."""
    whole_P = exchange.whole(id_P)
    if self._tower is None:
      return self._pixels(whole_P)
    P = len(whole_P)
    # Blocks of one size share one program, whatever the number of problems.
    padded_P = np.pad(whole_P, (0, -P % self._block), constant_values=-1)
    starts = range(self._block, len(padded_P), self._block)
    blocks = [
      self._embed(self._pixels(block))() for block in np.split(padded_P, starts)
    ]
    embedded = take(concat(*blocks), slice(P))
    return jax.device_put(embedded, sharding.layout_of_rows(embedded, self._mesh))

  def _pixels(self, id_P) -> Pictures:
    return placed(self._gallery.of(id_P), self._mesh)

  def _embed(self, pixels: Pictures) -> Call:
    return Call(self._mesh, _embedded, self._tower, pixels, **self._knobs)

  def abstract(self, prompts: int) -> Seen:
    """Returns the shapes of the pictures of `prompts` problems, placed on the mesh."""

    def seen() -> Seen:
      pixels = self._gallery.empty(prompts)
      if self._tower is None:
        return pixels
      return _embedded(self._tower, pixels, **self._knobs)

    return sharding.abstract_rows(seen, self._mesh)

  def programs(self) -> Iterator[Call]:
    """Yields the program that embeds pictures, if they are embedded here."""
    if self._tower is not None:
      empty = functools.partial(self._gallery.empty, self._block)
      yield self._embed(sharding.abstract_rows(empty, self._mesh))


def placed(pictures: Pictures, mesh: Mesh) -> Pictures:
  """Puts pictures onto the mesh, split by rows if the rows divide evenly."""
  return exchange.placed(pictures, sharding.layout_of_rows(pictures, mesh))


def pack(
  tokens_BT: Array,
  wanted_BT: Array,
  micro_batches: int,
  spec: ModelSpec,
  pictures: EmbeddedPictures | None = None,
  *,
  packed: bool = True,
  unit: Unit = Unit(),
  routes_BTX: Array | None = None,
) -> Packed:
  """Packs rows with `packing.pack`; with pictures, adds the `Places` of all tokens.

  Args:
    wanted_BT, micro_batches, packed, unit: see `packing.pack`.
    pictures: pictures of P prompts with B / P consecutive rows each; None for text
      only.
    routes_BTX: recorded routes, see `types.Batch`.
  """
  routed_B = None
  if routes_BTX is not None and unit.rows > 1:
    # A given response has no routes, so the prompt of a sampled one is computed.
    routed_B = (routes_BTX[:, 0] < jnp.iinfo(routes_BTX.dtype).max).all(-1)
  rows = packing.pack(
    tokens_BT,
    wanted_BT,
    micro_batches,
    width=packing.widest(spec),
    packed=packed,
    unit=unit,
    prefer_B=routed_B,
  ).replace(routes_BTX=routes_BTX)
  if pictures is None:
    return rows
  places = sequence.place_responses(tokens_BT, pictures, tower.vision_of(spec))
  return rows.replace(places=places)


class Variables(NamedTuple):
  """The inputs with respect to which a loss is differentiated."""

  params: Tree
  merged_PMD: Array | None = None  # embedded patches, if the tower is trained

  def patches(self, pictures: EmbeddedPictures | None) -> Array | None:
    """Returns the embedded patches as [P * M, D]; None for text only.

    These are merged_PMD, or by default the patches that `pictures` contain.
    """
    if pictures is None:
      return None
    merged_PMD = pictures.merged_PMD if self.merged_PMD is None else self.merged_PMD
    return merged_PMD.reshape(-1, merged_PMD.shape[-1])


def constrain(v: Variables) -> Variables:
  """Shards variables or their gradients over the ambient mesh, if there is one."""
  return Variables(
    sharding.constrain_params(v.params),
    None if v.merged_PMD is None else sharding.constrain_rows(v.merged_PMD),
  )


def variables(
  params: Tree, pictures: Seen, spec: ModelSpec, schedule: Schedule = Schedule()
) -> tuple[Variables, EmbeddedPictures | None, Callable[[Variables], Tree]]:
  """Returns the variables of a loss and a function that converts their gradients.

  If `pictures` are pixels, `params` must include the tower.

  Returns:
    (variables, embedded pictures, gradients of the variables -> gradients of params).
  """
  if not isinstance(pictures, Pictures):
    return Variables(params), pictures, lambda grads: grads.params

  def embed(vision):
    return sequence.embedded({'vision': vision}, pictures, spec, schedule).merged_PMD

  merged_PMD, pull = jax.vjp(embed, params['vision'])

  def gradients(grads):
    assert grads.merged_PMD is not None
    (vision,) = pull(grads.merged_PMD.astype(merged_PMD.dtype))
    return grads.params | {'vision': optax.tree.cast(vision, jnp.float32)}

  embedded = EmbeddedPictures(merged_PMD, pictures.grid_PI2)
  return Variables(params, merged_PMD), embedded, gradients
