"""Reads what a run needs before its weights: model, tokenizer and problems, once.

Only this module reads the model's config.json and the tokenizer.
"""

import dataclasses
from typing import NamedTuple

from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import lora
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training import sft
from bapo_jax.training.schema import Config


class Model(NamedTuple):
  """A policy before its weights are read."""

  directory: str  # a Hugging Face directory
  tokenizer: Tokenizer
  spec: ModelSpec


class Inputs(NamedTuple):
  """Holds the files that a run reads before its weights."""

  model: Model
  data: Data


def read(config: Config) -> Inputs:
  """Reads the model's config, the tokenizer and all problems, once; no weights.

  Raises ValueError with a list of everything that is missing, before anything is
  downloaded or compiled.
  """
  path = config.model.path
  directory = resolve(config)
  needs = list(hf_directory.MODEL_FILES)
  if config.tokenizer.path not in ('', path):  # the tokenizer is somewhere else
    needs.remove('tokenizer.json')
  lacks = hf_directory.missing(directory, needs) if path else []
  absent = [x for knob in sources.SPLITS for x in sources.absent(config.problems, knob)]
  if lacks and (absent or not hf_directory.parse_hub_name(path)):
    hint = hf_directory.hint(path)
    absent.insert(0, f'--config.model.path={path} (no {", ".join(lacks)}){hint}')
  if absent:
    raise ValueError(
      f'not found: {"; ".join(absent)}. Download the model (`hf download <name> '
      '--local-dir <directory>`) and the data (parquet, jsonl, csv), or set '
      'these knobs to the paths of existing files'
    )
  # A damaged model is found before data are downloaded, and the other way round.
  model = None if lacks else open_model(config, directory)
  # A custom function may read every field of a row.
  data = sources.read(config.problems, whole=bool(config.called))
  if model is None:
    model = open_model(config, hf_directory.find(path, 'model.path', needs))
  return Inputs(model, data)


def resolve(config: Config) -> str:
  """Returns the policy's directory without using the network.

  The weights of the embedded policy, the default, may be missing.
  """
  path = config.model.path
  return hf_directory.resolve(path) if path else sft.directory(config)


def open_model(config: Config, directory: str | None = None) -> Model:
  """Opens the tokenizer and reads the sizes of the model, but no weights.

  Without `directory`, opens the model of the config. Raises ValueError if a file is
  missing or damaged, or adapters do not fit the model.
  """
  directory = directory or resolve(config)
  template = config.tokenizer.template or '{problem}'  # None: not decided yet
  tokenizer = tokenizer_lib.load(tokenizer_directory(config, directory), template)
  return Model(directory, tokenizer, read_spec(config, directory))


def teacher_spec(config: Config) -> ModelSpec | None:
  """Returns the sizes of the model at teacher.path, in bfloat16; None without one."""
  path = config.teacher.path
  if not path:
    return None
  directory = hf_directory.find(path, 'teacher.path', ('config.json',))
  types = config.model.types
  spec = hf_config.read_spec(directory, types['compute'])
  types |= {'dtype': 'bfloat16', 'replay_routes': 'off'}  # the routes are the policy's
  return dataclasses.replace(spec, **types)


def open_teacher(config: Config, policy: Model) -> Model | None:
  """Opens the model at teacher.path, but no weights; None without one.

  Raises ValueError if a file is missing, or the model does not fit the policy.
  """
  spec = teacher_spec(config)
  if spec is None:
    return None
  path = config.teacher.path
  directory = hf_directory.find(path, 'teacher.path')
  name = f'teacher.path={path}'
  tokenizer = tokenizer_lib.load(directory, '{problem}')
  if tokenizer.backend.get_vocab() != policy.tokenizer.backend.get_vocab():
    raise ValueError(
      f'{name} has another tokenizer than the policy ({len(tokenizer.backend)} tokens, '
      f"not {len(policy.tokenizer.backend)}), so it cannot score the policy's tokens; "
      'give a model of the same family'
    )
  if spec.vocab < policy.spec.vocab:
    raise ValueError(
      f'{name} has {spec.vocab} tokens (vocab_size in its config.json), fewer than the '
      f'policy, which can sample {policy.spec.vocab}; give a teacher with as many'
    )
  if spec.vision or policy.spec.vision:
    raise ValueError(f'{name}: policy and teacher must be text models')
  if config.row_length > spec.positions:
    raise ValueError(
      f'{name} has {spec.positions} positions, fewer than prompt and response, '
      f'{config.row_length}; lower sampler.max_new_tokens'
    )
  hf_weights.check(directory, spec)
  return Model(directory, tokenizer, spec)


def tokenizer_directory(config: Config, model_directory: str) -> str:
  """Returns the tokenizer's directory, by default the model's."""
  path = config.tokenizer.path
  if path in ('', config.model.path):
    return model_directory
  return tokenizer_lib.directory(path)


def read_spec(config: Config, directory: str) -> ModelSpec:
  """Returns the sizes of the policy at `directory`, with the types of the config.

  Raises ValueError if adapters or model.train_tower do not fit the model.
  """
  knobs = config.model
  spec = hf_config.read_spec(directory, knobs.types['compute'])
  actor_dtype = config.sampler.actor_dtype
  spec = dataclasses.replace(spec, actor_dtype=actor_dtype, **knobs.types)
  if knobs.train_tower and spec.vision is None:
    raise ValueError(
      'model.train_tower=True needs a vision tower, which this model lacks; set it to '
      'False'
    )
  if knobs.train_tower and config.lora.rank:
    raise ValueError(
      f'model.train_tower=True conflicts with lora.rank={config.lora.rank}: adapters '
      'freeze all weights of the model; set train_tower=False or lora.rank=0'
    )
  if config.lora.rank:
    lora.shapes(spec, config.lora.rank, config.lora.targets)
  return spec
