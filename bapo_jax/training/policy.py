"""The policy of a run: its tokenizer, what it is, and its weights.

1. `load_tokenizer` opens the tokenizer, `check_vocabulary` compares it with the model;
2. `spec_of` reads a config.json, or the config's own sizes for the embedded policy;
3. `load` reads published weights, or gives random ones their warm start.
"""

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import EMBEDDED
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import hf_directory, hf_weights, lora, transformer, vision_spec
from bapo_jax.models.knobs import MERGE
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision_spec import VisionSpec
from bapo_jax.runtime import exchange, hosts, hub_names
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import budget, damage, frozen, sft, weights
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.types import Tree

# Knobs of `model` that are no field of a ModelSpec, or are resolved.
OWN = {'remat', 'sequence_sharding', 'tower', 'train_tower'}


def load_tokenizer(config: Config) -> Tokenizer:
  """The tokenizer with its template.

  Raises:
    ValueError: it is not to be had, damaged, or without an end token.
  """
  return tokenizer_lib.load(tokenizer_directory(config), config.tokenizer.template)


def tokenizer_directory(config: Config) -> str:
  """The tokenizer's directory, downloaded if it is a hub's name; or 'characters'.

  Raises:
    ValueError: it cannot be downloaded.
  """
  path = config.tokenizer.path or config.model.path or EMBEDDED
  if hub_names.parse(path):
    return hf_directory.find(path, 'tokenizer.path', ('tokenizer.json',))
  return path


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
  """Checks that the model has a row for every token that the tokenizer can produce.

  A token id beyond the embedding would be read as its last row, without an error.

  Raises:
    ValueError: an end token, an added token or any other is beyond the vocabulary.
  """
  vocab = spec_of(config, tokenizer).vocab
  ids = tokenizer.backend.get_vocab()
  last = max(ids, key=ids.__getitem__, default='')
  worst = max([*tokenizer.eos, ids.get(last, 0)])
  if worst >= vocab:
    what = f'token {last[:40]!r}' if worst == ids.get(last) else 'an end token'
    raise ValueError(
      f'tokenizer.path={config.tokenizer.path}: {what} has the id {worst}, and the '
      f'model has {vocab} tokens, 0 to {vocab - 1}; give the tokenizer of '
      f'model.path={config.model.path}, or take that token out of its files'
    )


def spec_of(config: Config, tokenizer: Tokenizer | None) -> ModelSpec:
  """What the policy is: by its config.json, or by the config's own knobs.

  Args:
    tokenizer: gives the vocabulary of the embedded policy; not read for another.

  Raises:
    ValueError: adapters do not fit the model, or it has no tower to be trained.
  """
  spec = _spec_of(config, tokenizer)
  frozen.check(config, spec)
  if config.lora.rank:
    lora.shapes(spec, config.lora.rank, config.lora.targets)
  return spec


def sees(config: Config) -> bool:
  """Whether the policy reads pictures; of a model that is yet to be fetched: it may.

  Raises:
    ValueError: its config.json cannot be read.
  """
  path = config.model.path
  if not path:
    return config.model.tower.layers > 0
  if hf_directory.missing(path):
    return hub_names.parse(path) is not None
  found = hf_weights.spec(hf_directory.here(path), compute=config.model.compute)
  return found.vision is not None


def _spec_of(config: Config, tokenizer: Tokenizer | None) -> ModelSpec:
  knobs = config.model.model_dump(exclude=OWN)
  if path := knobs.pop('path'):
    spec = hf_weights.spec(hf_directory.here(path), compute=knobs['compute'])
    own = {name: knobs[name] for name in ('attention', 'dtype')}
    return dataclasses.replace(spec, **own)
  assert tokenizer is not None
  # Rounded up, as published models do, so that the vocabulary divides over devices.
  spec = ModelSpec(vocab=-(-len(tokenizer.backend) // 8) * 8, **knobs)
  return _seeing(config, spec, tokenizer) if config.model.tower.layers else spec


def _seeing(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
  """The embedded policy with a vision tower.

  Pairs of a head are divided as Qwen2.5-VL divides them: a quarter turns by time, the
  rest by row and column.
  """
  knobs = config.model.tower.model_dump()
  tower = VisionSpec(
    **knobs,
    out=spec.width,
    full_layers=(knobs['layers'] - 1,),
    image_token=tokenizer.backend.convert_tokens_to_ids(tokenizer_lib.IMAGE),
    merge=MERGE,
    # A picture smaller than a window is enlarged to one.
    least_pixels=knobs['window'] ** 2,
  )
  vision_spec.check(tower)
  side = 3 * spec.head_width // 16
  sections = spec.head_width // 2 - 2 * side, side, side
  return dataclasses.replace(spec, vision=tower, mrope=sections)


def load(
  config: Config, workdir: str, tokenizer: Tokenizer, mesh: Mesh, timer: PhaseTimer
) -> tuple[ModelSpec, Tree]:
  """(spec, params): a published model's, or random weights after their warm start."""
  spec = spec_of(config, tokenizer)
  if path := config.model.path:
    with timer('load'):
      return spec, hf_weights.load(hf_directory.here(path), spec, mesh)
  # The warm start is float32 in any case: it has no master copy.
  schedule = budget.choose_schedule(config, spec, mesh)
  exact = dataclasses.replace(spec, dtype='float32')
  params = _warm_started(config, workdir, tokenizer, exact, schedule, mesh, timer)
  cast = jax.jit(functools.partial(transformer.cast, dtype=spec.dtype))
  return spec, cast(params)


def reader(
  config: Config, workdir: str, step: int, exact: bool = False
) -> weights.Read:
  """The weights of a checkpoint, a parameter at a time; adapters are merged into them.

  Args:
    exact: in float32, where bfloat16 weights are the optimiser's, rounded.

  Raises:
    ValueError: the checkpoint, or what its adapters belong to, is damaged or not there.
  """
  master = exact and config.model.dtype != 'float32' and not config.lora.rank
  trained = weights.read_params(workdir, step, 'opt/master' if master else 'params')
  if not config.lora.rank and not sees(config):
    return trained
  spec = spec_of(config, load_tokenizer(config))
  if not config.lora.rank and config.model.train_tower:
    return trained
  if path := config.model.path:
    base = hf_weights.reader(hf_directory.here(path), spec)
  else:
    own = config_lib.from_json(read_config(os.path.join(workdir, 'config.json')))
    saved = weights.read_saved(warm_start_path(own, workdir))
    dtypes = transformer.flatten(transformer.abstract(spec))

    def base(parameter: str) -> np.ndarray:
      return saved(parameter).astype(dtypes[parameter].dtype)

  return frozen.whole(config, spec, base, trained)


def warm_start_path(config: Config, workdir: str) -> str:
  """Where the workdir holds the embedded policy after its warm start."""
  problems = config.problems
  made = problems.source in ('countdown', 'drawn')
  kind = {problems.source} if made else {'family', 'level'}
  if 'family' in kind and problems.family == 'pair':
    kind |= {'pair'}
  recipe: dict[str, Any] = {
    'seed': config.seed,
    'length': config.row_length,
    'problems': problems.model_dump(include=kind | {'train', 'test', 'seed'}),
    **{
      name: getattr(config, name).model_dump() for name in ('model', 'tokenizer', 'sft')
    },
  }
  del recipe['model']['train_tower']  # the warm start trains all weights
  if not config.model.tower.layers:  # the recipe of a policy that reads texts alone
    del recipe['model']['tower']
  return os.path.join(workdir, 'warmstart', config_lib.fingerprint(recipe))


def _warm_started(config, workdir, tokenizer, spec, schedule, mesh, timer) -> Tree:
  """The embedded policy after its warm start; the workdir holds it for the next run."""
  path = warm_start_path(config, workdir)
  if any(exchange.agree([hosts.is_first() and os.path.lexists(path)])):
    like = transformer.abstract(spec)
    layout = sharding.shardings(like, mesh)
    like = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, layout
    )
    try:
      return weights.restore_params(path, like)
    except ValueError as error:  # nothing is lost: the recipe is at hand
      log(f'The warm start {path} is damaged ({error}): it is made again.')
  with timer('warm start'):
    params = sharding.under(mesh, sft.fit)(
      tokenizer,
      spec,
      mesh,
      config.row_length,
      *sources.sft_problems(config.problems),
      schedule=schedule,
      seed=config.seed,
      **config.sft.model_dump(),
    )
  if bad := damage.not_finite({'params': params}):
    raise ValueError(f'the warm start diverged: {bad}; lower sft.lr={config.sft.lr}')
  weights.save_params(path, params)
  return params
