"""Decides, before anything else, all that a run can decide without its weights.

1. `read_files` reads the model's config.json, the tokenizer and all problems;
2. `resolve` judges them (refusals.py), makes the mesh and chooses the schedule.

Later stages receive a `Resolved`, and look up neither files nor devices again.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import EMBEDDED
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import attention, lora
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.knobs import (
  MERGE,
  PRECISION,
  TOWER_HEADS,
  TOWER_PATCH,
  TOWER_WINDOW,
)
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime import hosts
from bapo_jax.training import budget, refusals
from bapo_jax.training.budget import Budget
from bapo_jax.training.config import Config

# Knobs of the section `model` that are not fields of ModelSpec.
NOT_IN_SPEC = {'path', 'remat', 'sequence_sharding', 'tower', 'train_tower'}


class Model(NamedTuple):
  """A policy before its weights are read."""

  directory: str  # with config.json and weights; '' for the embedded policy
  tokenizer: Tokenizer
  spec: ModelSpec


class Files(NamedTuple):
  """What a run reads before its weights, each file once."""

  model: Model
  data: Data


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A run with everything decided that can be decided without its weights."""

  config: Config  # with every knob decided
  model: Model
  data: Data
  mesh: Mesh
  schedule: Schedule  # of the learner
  budget: Budget  # bytes per device, and of the checkpoints
  rollout_mesh: Mesh | None = None  # devices that only sample; None: those of `mesh`

  @property
  def files(self) -> Files:
    """What was read."""
    return Files(self.model, self.data)

  @property
  def remote(self) -> bool:
    """Whether other processes sample than those that train."""
    mesh = self.rollout_mesh
    return mesh is not None and processes_of(mesh) != processes_of(self.mesh)

  @property
  def rollout_only(self) -> bool:
    """Whether this process only samples."""
    return self.remote and hosts.process() not in processes_of(self.mesh)

  @property
  def own_mesh(self) -> Mesh:
    """The mesh of the processes that compute together with this one."""
    mesh = self.rollout_mesh if self.rollout_only else None
    return mesh or self.mesh

  @property
  def spec(self) -> ModelSpec:
    """The sizes of the policy."""
    return self.model.spec

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer with the template of the config."""
    return self.model.tokenizer


def processes_of(mesh: Mesh) -> list[int]:
  """Returns the numbers of the processes that have devices of the mesh."""
  return sorted({device.process_index for device in mesh.devices.flat})


def read_files(config: Config) -> Files:
  """Reads the model but its weights, the tokenizer and all problems, once.

  Raises ValueError with a list of everything that is missing, before anything is
  downloaded or compiled.
  """
  path = config.model.path
  directory = hf_directory.resolve(path)
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
  data = sources.read(config.problems)
  if model is None:
    model = open_model(config, hf_directory.find(path, 'model.path', needs))
  return Files(model, data)


def open_model(config: Config, directory: str | None = None) -> Model:
  """Opens the tokenizer and reads the sizes of the model, but no weights.

  Without `directory`, opens the model that model.path names; '' is the embedded policy.
  Raises ValueError if a file is missing or damaged, or adapters do not fit the model.
  """
  if directory is None:
    directory = hf_directory.resolve(config.model.path)
  derived = 'tokenizer.template' in config.derived
  template = '{problem}' if derived else config.tokenizer.template
  tokenizer = tokenizer_lib.load(tokenizer_directory(config, directory), template)
  return Model(directory, tokenizer, read_spec(config, directory, tokenizer))


def tokenizer_directory(config: Config, model_directory: str) -> str:
  """Returns the tokenizer's directory (downloaded for a hub name), or 'characters'."""
  path = config.tokenizer.path
  if path in ('', config.model.path):
    return model_directory or EMBEDDED
  if hf_directory.parse_hub_name(path):
    return hf_directory.find(path, 'tokenizer.path', ('tokenizer.json',))
  return path


def read_spec(config: Config, directory: str, tokenizer: Tokenizer | None) -> ModelSpec:
  """Returns the sizes of the policy, from config.json or from the config's knobs.

  Directory '' stands for the embedded policy, which takes its sizes from the knobs.
  Raises ValueError if adapters or model.train_tower do not fit the model.
  """
  knobs = config.model
  if directory:
    spec = hf_config.read_spec(directory, knobs.types['compute'])
  else:
    assert tokenizer is not None
    # Rounded up as in published models, so that the vocabulary divides over devices.
    vocab = -(-len(tokenizer.backend) // 8) * 8
    spec = ModelSpec(vocab=vocab, **knobs.model_dump(exclude=NOT_IN_SPEC))
    if knobs.tower.layers:
      spec = _with_tower(config, spec, tokenizer)
  actor_dtype = config.sampler.actor_dtype
  spec = dataclasses.replace(spec, actor_dtype=actor_dtype, **knobs.types)
  if knobs.train_tower and spec.vision is None:
    raise ValueError('model.train_tower=True needs a vision tower; set it to False')
  if knobs.train_tower and config.lora.rank:
    raise ValueError(
      f'model.train_tower=True excludes lora.rank={config.lora.rank}: adapters freeze '
      'all weights of the model; set train_tower=False or lora.rank=0'
    )
  if config.lora.rank:
    lora.shapes(spec, config.lora.rank, config.lora.targets)
  return spec


def _with_tower(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
  """Adds a vision tower to the embedded policy.

  The rotary pairs of a head are split as in Qwen2.5-VL: a quarter rotate by time, the
  rest by row and column.
  """
  knobs = config.model.tower
  tower = VisionSpec(
    **knobs.model_dump(),
    heads=TOWER_HEADS,
    patch=TOWER_PATCH,
    window=TOWER_WINDOW,
    out=spec.width,
    full_layers=(knobs.layers - 1,),
    image_token=tokenizer.backend.convert_tokens_to_ids(tokenizer_lib.IMAGE),
    merge=MERGE,
    least_pixels=TOWER_WINDOW**2,  # a picture smaller than a window is enlarged
  )
  vision_spec.check(tower)
  side = 3 * spec.head_width // 16
  sections = spec.head_width // 2 - 2 * side, side, side
  return dataclasses.replace(spec, vision=tower, mrope=sections)


def resolve(
  config: Config,
  files: Files | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> Resolved:
  """Judges the run, makes the mesh and chooses the schedule.

  The config must leave no knob to be derived. Reads the files unless they are given. By
  default the mesh has all attached devices. Raises ValueError with the first refusal:
  files, mesh and knobs do not fit together.
  """
  (directory, tokenizer, spec), data = files or read_files(config)
  # Template and types may have been derived after the model was opened.
  tokenizer = tokenizer._replace(template=config.tokenizer.template)
  spec = dataclasses.replace(spec, **config.model.types)
  opened = Model(directory, tokenizer, spec)
  refusals.judge(refusals.of_files(config, Files(opened, data)))
  mesh, rollout_mesh = make_mesh(config, devices), make_rollout_mesh(config, devices)
  platform = mesh.devices.flat[0].platform
  attention.resolve(spec.attention, platform, spec.compute, spec.head_width)
  use_precision(config.model.compute, platform)
  schedule = budget.choose_schedule(config, spec, mesh)
  counted = budget.count(config, spec, schedule, mesh, rollout_mesh)
  return Resolved(config, opened, data, mesh, schedule, counted, rollout_mesh)


def use_precision(compute: str, platform: str) -> None:
  """Sets the precision of all float32 products of this process, in every thread.

  Sampler, learner, SFT and evaluation then compute with the same precision. A CPU
  always multiplies in float32: nothing is set, and tf32 raises a ValueError.
  """
  if platform != 'cpu':
    jax.config.update('jax_default_matmul_precision', PRECISION[compute])
  elif compute == 'tf32':
    raise ValueError(
      'model.compute=tf32 needs a GPU or a TPU, but this is a CPU, which multiplies in '
      'float32; set model.compute=float32'
    )


def make_rollout_mesh(
  config: Config, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
  """Makes the mesh of the mesh.rollout devices that only sample; None without any.

  Rows are split over all of them that mesh.tensor does not take. Raises ValueError if
  the devices or the decode slots do not divide.
  """
  if not config.mesh.rollout:
    return None
  _, samplers = sharding.divide(config.mesh.rollout, devices)
  learners = make_mesh(config, devices)
  tensor = learners.shape['tensor']
  if len(samplers) % tensor:
    raise ValueError(
      f'mesh.rollout={len(samplers)} devices do not divide over mesh.tensor={tensor}; '
      f'give a multiple of {tensor}'
    )
  mesh = sharding.make(tensor=tensor, devices=samplers)
  trains, samples = processes_of(learners), processes_of(mesh)
  if set(trains) & set(samples) and len({*trains, *samples}) > 1:
    raise ValueError(
      f'mesh.rollout={len(samplers)}: process {samples[0]} would train and sample; '
      'with several processes, give a multiple of the devices per process, '
      f'{len(learners.local_devices) or len(mesh.local_devices)}'
    )
  _check_slots(config, mesh, 'mesh.rollout / mesh.tensor')
  return mesh


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes the mesh; raises ValueError if devices or rows do not fit it."""
  mesh = sharding.make(**config.mesh.model_dump(), devices=devices)
  shards = sharding.row_shards(mesh)
  over = f'do not divide over {shards} device shards (mesh.data x mesh.fsdp)'
  if config.minibatch_rows % shards:
    raise ValueError(
      f'a minibatch has {config.minibatch_rows} responses, which {over}; change '
      'prompts.count or learner.minibatches'
    )
  _check_slots(config, mesh, 'mesh.data x mesh.fsdp')
  return mesh


def _check_slots(config: Config, mesh: Mesh, axes: str) -> None:
  """Raises ValueError if the decode slots do not divide over the mesh."""
  shards = sharding.row_shards(mesh)
  for name in ('max_num_seqs', 'prefill_batch_size'):
    if (n := getattr(config.sampler, name)) % shards:
      raise ValueError(
        f'sampler.{name}={n}: rows do not divide over {shards} device shards ({axes}); '
        f'give a multiple of {shards}'
      )
