"""What a run trains, and what it leaves as it is: under adapters, and the tower.

1. `trained` parts the weights of a policy into what is frozen and what is trained;
2. `whole` reads the weights of a checkpoint, which holds no frozen ones.
"""

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import lora
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training import weights as weights_lib
from bapo_jax.training.config import Config
from bapo_jax.training.weights import Read
from bapo_jax.types import Tree

TOWER = 'vision'


def has_tower(config: Config, spec: ModelSpec) -> bool:
  """Whether the run leaves a vision tower as it is, its merger included."""
  return spec.vision is not None and not config.model.train_tower


def check(config: Config, spec: ModelSpec) -> None:
  """Raises ValueError where model.train_tower asks for what is not there."""
  if config.model.train_tower and spec.vision is None:
    raise ValueError(
      'model.train_tower=True: this model has no vision tower; give False'
    )
  if config.model.train_tower and config.lora.rank:
    raise ValueError(
      f'model.train_tower=True beside lora.rank={config.lora.rank}: adapters leave all '
      'weights as they are; give one of the two'
    )


def trained(
  config: Config, spec: ModelSpec, weights: Tree, mesh: Mesh
) -> tuple[Tree, Tree]:
  """(base, params): what is frozen, None for nothing, and what is trained.

  New adapters of all weights; or the weights, a frozen tower excepted. The warm start
  of the embedded policy trains all weights, whatever is frozen afterwards.
  """
  if not config.lora.rank and has_tower(config, spec):
    rest = {name: w for name, w in weights.items() if name != TOWER}
    return {TOWER: weights[TOWER]}, rest
  if not config.lora.rank:
    return None, weights

  def make() -> Tree:
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 3)
    return lora.init(spec, key, **config.lora.model_dump())

  layout = sharding.shardings(jax.eval_shape(make), mesh)
  return weights, jax.jit(make, out_shardings=layout)()


def whole(config: Config, spec: ModelSpec, base: Read, params: Read) -> Read:
  """The weights of a checkpoint, on the host: adapters merged, frozen ones beside.

  Args:
    base, params: of the weights that the run began with, and of what it trained.
  """
  if config.lora.rank:
    return weights_lib.merged(config, spec, base, params)
  return lambda path: (base if path.startswith(f'{TOWER}/') else params)(path)
