"""The first screen of a run."""

import os

import jax

from bapo_jax.models import transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import hosts
from bapo_jax.runtime.progress import log
from bapo_jax.training import budget
from bapo_jax.training.budget import Budget
from bapo_jax.training.build import Material
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved


def welcome(r: Resolved, workdir: str, material: Material) -> None:
  """Logs the first screen: what will run."""
  count = hosts.processes()
  several = f', {count} processes' if count > 1 else ''
  c, spec, mesh, devices = r.config, r.spec, r.mesh, jax.devices()
  memory = budget.sentence(c, r.schedule, r.budget.update, budget.limit(mesh))
  model = c.model.path or 'embedded policy'
  log(
    f'{c.title}: {c.steps} steps x {c.prompts.count} prompts x {c.sampler.group_size} '
    f'responses, {c.updates_per_step} updates per step\n'
    f'  model      {model}, {transformer.count(spec):,} parameters ({c.model.dtype})'
    f'{_frozen(c, spec)}\n'
    f'  tokenizer  {c.tokenizer.path}, {len(r.tokenizer.backend)} tokens, '
    f'template {c.tokenizer.template!r:.60}\n'
    f'  training   {c.problems.source}, {len(material.problems.id_N)} problems\n'
    f'  held out   {c.problems.test_source}, {len(material.held_out.id_N)} problems\n'
    f'  verifier   {c.rewards.rule}\n'
    f'  rules      batch {c.batch.rule}, advantage {c.advantage.rule}, clip '
    f'{c.clip.rule}, loss {c.loss.rule}\n'
    f'  devices    {len(devices)} {devices[0].platform}, {os.cpu_count()} CPU cores'
    f'{several}\n'
    f'  memory     {memory}\n'
    f'  disk       {disk(c, r.budget)}\n'
    f'  results    {workdir}; Ctrl-C saves, the same command continues'
  )


def _frozen(config: Config, spec: ModelSpec) -> str:
  """Which of them are not trained, and what is in their place, if anything is."""
  if few := budget.adapters(config, spec):
    return f', frozen; adapters of rank {config.lora.rank} train {few:,}'
  tower = budget.frozen_tower(config, spec)
  return f', {tower:,} of them, the vision tower, frozen' if tower else ''


def disk(config: Config, counted: Budget) -> str:
  """Describes the size of a checkpoint and of all that remain."""
  sizes = counted.checkpoint
  parts = ', '.join(f'{name} {size / 2**20:.3g}' for name, size in sizes.items())
  most = config.checkpoint.keep + config.checkpoint.best
  total = sum(sizes.values())
  return (
    f'{total / 2**20:.3g} MiB per checkpoint ({parts}), {most} at most: '
    f'{most * total / 2**30:.3g} GiB'
  )
