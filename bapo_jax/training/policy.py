"""Loads the weights of a run, and separates frozen from trained ones."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.models import lora
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.runtime import exchange, hosts
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.runtime.workdir import read_config
from bapo_jax.sharding import path_name
from bapo_jax.training import budget, checkpoint, inputs, sft
from bapo_jax.training import config as config_lib
from bapo_jax.training.checkpoint import Read
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Model
from bapo_jax.training.resolve import Resolved
from bapo_jax.types import Tree

TOWER = 'vision'  # the subtree of a vision tower, its merger included


def load(r: Resolved, timer: PhaseTimer) -> Tree:
  """Loads the weights, laid out on the mesh; adds those that the embedded policy lacks.

  Raises ValueError if the processes of a run have made different weights.
  """
  path = r.model.directory
  if not r.config.model.path:
    with hosts.first_ahead():
      if not sft.has_weights(path):
        with timer('warm start'):
          sft.complete(r.config, r.tokenizer, r.data, path)
    hosts.same_everywhere({'embedded policy': hf_directory.identity(path)})
  with timer('load'):
    return hf_weights.load(path, r.spec, r.mesh)


def divide(r: Resolved, params: Tree) -> tuple[Tree, Tree]:
  """Returns (frozen, trained) weights; frozen is None if all weights are trained.

  With lora.rank, all weights are frozen and new adapters are trained. Without, only a
  vision tower may be frozen.
  """
  knobs = r.config.lora
  if not knobs.rank and not budget.frozen_tower(r.config, r.spec):
    return None, params
  if not knobs.rank:
    trained = {name: w for name, w in params.items() if name != TOWER}
    return {TOWER: params[TOWER]}, trained

  def make() -> Tree:
    key = jax.random.fold_in(jax.random.key(r.config.seed), 2**31 - 3)
    return lora.init(r.spec, key, **knobs.model_dump())

  layout = sharding.shardings(jax.eval_shape(make), r.mesh)
  return params, jax.jit(make, out_shardings=layout)()


def reader(
  config: Config, model: Model, workdir: str, step: int, exact: bool = False
) -> Read:
  """Returns a function that reads a parameter of a checkpoint by its path.

  Adapters are merged into the adapted weights. With `exact`, the optimiser's float32
  master weights are read if the weights are bfloat16. Raises ValueError if the
  checkpoint or the frozen weights are damaged or missing.
  """
  spec = model.spec
  master = exact and config.model.dtype != 'float32' and not config.lora.rank
  trained = checkpoint.read_params(workdir, step, 'opt/master' if master else 'params')
  if not config.lora.rank and not budget.frozen_tower(config, spec):
    return trained
  # The embedded policy depends on the problems of the run, not on those of `config`.
  ran = config_lib.from_json(read_config(workdir))
  frozen = hf_weights.reader(inputs.resolve(ran), spec)
  if not config.lora.rank:
    return lambda path: (frozen if path.startswith(f'{TOWER}/') else trained)(path)
  adapted = lora.shapes(spec, config.lora.rank, config.lora.targets)

  def merged(parameter: str) -> np.ndarray:
    w = frozen(parameter)
    if parameter not in adapted:
      return w
    a, b = (jnp.asarray(trained(f'{parameter}/{side}')) for side in 'ab')
    adapter = lora.Adapter(a, b, config.lora.alpha / config.lora.rank)
    return np.asarray(lora.merge(lora.Adapted(jnp.asarray(w), adapter)))

  return merged


def fingerprint(weights: Tree) -> str:
  """Returns hexadecimal digits that change with any weight; '' without weights.

  Sums an integer hash of the bits and the position of every number. The sum is the same
  on any mesh and with any number of processes, and no array leaves its devices.
  """
  leaves = jax.tree.leaves_with_path(weights)
  sums = [exchange.whole(_mixed(x)) for _, x in leaves]
  names = [path_name(path) for path, _ in leaves]
  text = f'{names} {[s.tolist() for s in sums]}'
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if leaves else ''


@jax.jit
def _mixed(x: Array) -> Array:
  """Returns two sums, modulo 2^32, of hashes of every element's bits and position."""
  kind = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
  position = jnp.zeros(x.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(x.ndim)):
    iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    position = position + iota * jnp.uint32(stride % 2**32)
    stride = stride * x.shape[axis]
  sums = []
  for odd in (0x9E3779B1, 0x85EBCA77):  # constants of the golden ratio and of xxHash
    mixed = (bits ^ (position * jnp.uint32(odd))) * jnp.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(odd)
    sums.append((mixed ^ (mixed >> 13)).sum(dtype=jnp.uint32))
  return jnp.stack(sums)
