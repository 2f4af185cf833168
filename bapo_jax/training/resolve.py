"""Resolves everything about a run that does not depend on its weights.

1. `inputs.read` reads the model's config.json, the tokenizer and all problems;
2. `resolve` judges them (refusals.py), makes the mesh and chooses the schedule.

Later stages receive a `Resolved`, and look up neither files nor devices again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import attention, experts, transformer
from bapo_jax.models.knobs import PRECISION
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import hosts
from bapo_jax.training import budget, refusals
from bapo_jax.training import inputs as inputs_lib
from bapo_jax.training.budget import Budget
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Inputs, Model


class Derived(NamedTuple):
  """One derived knob with the reason for its value."""

  knob: str
  value: Any
  reason: str


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A run with everything that can be resolved without its weights."""

  config: Config  # with every knob decided
  model: Model
  data: Data
  mesh: Mesh
  schedule: Schedule  # of the learner
  budget: Budget  # bytes per device, and of the checkpoints
  rollout_mesh: Mesh | None = None  # devices that only sample; None: those of `mesh`
  teacher: Model | None = None  # of teacher.path
  given: Config | None = None  # as the user wrote it; None: as `config`
  derived: Sequence[Derived] = ()  # the knobs that the program decided at this start

  @property
  def user(self) -> Config:
    """The config that the user wrote, with None for what the program decided."""
    return self.given or self.config

  @property
  def inputs(self) -> Inputs:
    """The files that were read."""
    return Inputs(self.model, self.data)

  @property
  def remote(self) -> bool:
    """Whether processes sample that do not train."""
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


def resolve(
  config: Config,
  inputs: Inputs | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> Resolved:
  """Judges the run, makes the mesh and chooses the schedule.

  The config must leave no knob to be derived. Reads the files unless they are given. By
  default the mesh has all attached devices. Raises ValueError with the first refusal:
  files, mesh and knobs do not fit together.
  """
  (directory, tokenizer, spec), data = inputs or inputs_lib.read(config)
  # Template and types may have been derived after the model was opened.
  tokenizer = tokenizer._replace(template=config.tokenizer.template)
  spec = dataclasses.replace(spec, **config.model.types)
  opened = Model(directory, tokenizer, spec)
  refusals.judge(refusals.of_inputs(config, Inputs(opened, data)))
  mesh, rollout_mesh = make_mesh(config, devices), make_rollout_mesh(config, devices)
  platform = mesh.devices.flat[0].platform
  spec = with_kernels(spec, platform)
  opened = opened._replace(spec=spec)
  sharding.shardings(transformer.abstract(spec), mesh)  # refuses what does not divide
  use_precision(config.model.compute, platform)
  sizes = budget.sizes_of(config, spec)
  schedule = budget.choose_schedule(sizes, spec, mesh)
  counted = budget.count(sizes, spec, schedule, mesh, rollout_mesh)
  teacher = inputs_lib.open_teacher(config, opened)
  return Resolved(config, opened, data, mesh, schedule, counted, rollout_mesh, teacher)


def with_kernels(spec: ModelSpec, platform: str) -> ModelSpec:
  """Returns the spec with a kernel of the platform in place of each None.

  Raises a ValueError if the platform lacks a kernel that the spec names.
  """
  kind = attention.resolve(spec.attention, platform, spec.compute, spec.head_width)
  kernel = experts.resolve(spec.experts_kernel, platform)
  return dataclasses.replace(spec, attention=kind, experts_kernel=kernel)


def use_precision(compute: str, platform: str) -> None:
  """Sets the precision of all float32 products of this process, in every thread.

  Sampler, learner, SFT and evaluation then compute with the same precision, whatever
  JAX_DEFAULT_MATMUL_PRECISION is. A CPU always multiplies in float32, which is JAX's
  default there: tf32 raises a ValueError.
  """
  on_cpu = platform == 'cpu'
  precision = None if on_cpu else PRECISION[compute]
  jax.config.update('jax_default_matmul_precision', precision)
  if on_cpu and compute == 'tf32':
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
