"""Loads or warm-starts the weights of a run, and separates frozen from trained ones."""

import dataclasses
import functools
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.data import sources
from bapo_jax.models import lora, transformer
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.runtime import cache, exchange, hosts, jax_options, machine
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.runtime.workdir import read_config
from bapo_jax.sharding import path_name
from bapo_jax.training import budget, checkpoint, sft
from bapo_jax.training import config as config_lib
from bapo_jax.training.checkpoint import Read
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Model
from bapo_jax.training.resolve import Resolved
from bapo_jax.types import Tree

TOWER = 'vision'  # the subtree of a vision tower, its merger included
RECIPE = ('model', 'tokenizer', 'sft')  # sections that the warm start depends on
# Raise it with every change of the weights that a warm start gives: other versions are
# not used. test_a_warm_start_gives_the_weights_of_its_version notices.
WARM_START = 1


def load(r: Resolved, workdir: str, timer: PhaseTimer) -> Tree:
  """Loads published weights, or warm-starts random weights, laid out on the mesh."""
  if r.model.directory:
    with timer('load'):
      return hf_weights.load(r.model.directory, r.spec, r.mesh)
  # The warm start is float32 in any case: it has no master copy.
  params = _warm_started(r, workdir, timer)
  return jax.jit(functools.partial(transformer.cast, dtype=r.spec.dtype))(params)


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
  frozen = _frozen_reader(model, workdir)
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


def _frozen_reader(model: Model, workdir: str) -> Read:
  """Returns a reader of the initial weights: published, or after the warm start."""
  if model.directory:
    return hf_weights.reader(model.directory, model.spec)
  # The recipe of the warm start is in the run's config.json.
  ran = config_lib.from_json(read_config(workdir))
  saved = checkpoint.read_saved(warm_start_path(ran, workdir))
  dtypes = transformer.flatten(transformer.abstract(model.spec))
  return lambda parameter: saved(parameter).astype(dtypes[parameter].dtype)


def warm_start_path(config: Config, workdir: str) -> str:
  """Returns the warm-started weights' directory, named by a hash of their recipe."""
  problems = config.problems
  recipe = {name: getattr(config, name).model_dump() for name in RECIPE}
  recipe |= {'seed': recipe['sft'].pop('seed'), 'length': config.row_length}
  recipe['problems'] = problems.model_dump(include={'source', 'custom'})
  recipe['problems']['files'] = sources.file_digests(problems)
  # The warm start trains all weights, and replays nothing. What a policy does not have
  # is not in its recipe: names of directories outlive knobs that are new.
  unused = {'train_tower', 'replay_routes'}
  unused |= set() if config.model.tower.layers else {'tower'}
  unused |= set() if config.model.experts else {'experts', 'active', 'experts_kernel'}
  recipe['model'] = config.model.model_dump(exclude=unused)
  return os.path.join(workdir, 'warmstart', config_lib.fingerprint(recipe))


def _shared_path(r: Resolved) -> str:
  """Returns the directory of the run's warm start in the cache; '' without a cache.

  The name depends on the recipe and on everything else that may affect a bit of the
  weights, so that a run gives the same results with and without the cache.
  """
  if not (folder := cache.home(r.config.cache)):
    return ''
  device = r.mesh.devices.flat[0]
  made_by = {
    'versions': machine.versions() | {'code': WARM_START},
    'machine': [machine.processor(), os.environ.get('XLA_FLAGS'), device.device_kind],
    'mesh': [dict(r.mesh.shape), len(hosts.side())],
    'spec': dataclasses.asdict(r.spec) | {'actor_dtype': None},  # not sampled from
    'schedule': r.schedule._replace(bounds_pass=''),
  }
  made_by |= dict(jax_options.generator().items() - jax_options.GENERATOR.items())
  recipe = os.path.basename(warm_start_path(r.config, ''))
  return os.path.join(folder, 'warmstart', config_lib.fingerprint(made_by), recipe)


def has_warm_start(r: Resolved, workdir: str) -> bool | None:
  """Returns whether the warm start was made before; None for published weights."""
  paths = warm_start_path(r.config, workdir), _shared_path(r)
  return None if r.model.directory else any(map(os.path.lexists, paths))


def _copied(source: str, to: str) -> None:
  """Copies a warm start between run and cache, if there is a cache; logs a failure."""
  if hosts.is_first() and source and to and os.path.lexists(source):
    try:
      cache.copy(source, to)
    except OSError as error:
      log(f'The warm start {source} cannot be copied to {to} ({error}).')


def _warm_started(r: Resolved, workdir: str, timer: PhaseTimer) -> Tree:
  """Returns float32 weights after the warm start, read from or saved to the workdir.

  A workdir without a warm start gets a copy from the cache, so that it stays complete
  if the cache is emptied.
  """
  config = r.config
  mesh = r.mesh
  spec = dataclasses.replace(r.spec, dtype='float32')
  path = warm_start_path(config, workdir)
  shared = _shared_path(r)
  if not os.path.lexists(path):
    _copied(shared, path)
  if any(exchange.agree([hosts.is_first() and os.path.lexists(path)])):
    like = transformer.abstract(spec)
    like = sharding.abstract(like, sharding.shardings(like, mesh))
    try:
      return checkpoint.restore_params(path, like)
    except ValueError as error:  # the recipe is known, so repeat it
      log(f'The warm start {path} is damaged ({error}); repeating it.')
  with timer('warm start'):
    imitated = sources.imitated(config.problems, r.data)
    T = config.row_length
    params = sharding.under(mesh, sft.fit)(
      r.tokenizer, spec, mesh, T, imitated, config.sft, config.sft.seed, r.schedule
    )
  if not _finite(params):
    raise ValueError(f'the warm start diverged with sft.lr={config.sft.lr}; lower it')
  checkpoint.save_params(path, params)
  _copied(path, shared)
  return params


@jax.jit  # one program, not two per shape
def _finite(tree: Tree) -> Array:
  return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


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
