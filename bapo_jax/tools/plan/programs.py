"""Selects the largest programs of a run, for devices that may be absent.

They are the run's own (experiment.programs), with abstract arguments. Reads no problems
and no tokenizer, and only config.json of a published model: each prompt of a vision
model is assumed to have TEXT tokens of text and one picture that fills the remaining
tokens.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode
from bapo_jax.run import experiment
from bapo_jax.runtime.ahead import Call
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import budget, build, inputs, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Model
from bapo_jax.training.resolve import Resolved
from bapo_jax.training.state import Trainer
from bapo_jax.types import Tree

TEXT = 256  # tokens of a prompt beside its picture
UPDATE = ('train step', 'tower')  # run without an actor, unless older weights sample
NAMES = {  # function -> name of its program in a plan
  'learn': 'train step',
  'recompute': 'log-prob pass',
  'score': 'teacher pass',
  'admit': 'prefill',
  'refresh': 'refresh',
  'resume': 'resume',
  'run': 'decode',
  'embedded': 'tower',
}


class Program(NamedTuple):
  """A program of a run, and the other memory of the run while it runs."""

  call: Call
  resident: float = 0.0  # bytes per device that are not arguments

  @property
  def cache(self) -> int:
    """The bytes per device of the arguments that are keys and values."""
    slots = (x for x in self.call.args if isinstance(x, decode.Slots))
    return sum(bytes_per_device(x.cache) for x in slots)


def device_spec(config: Config, platform: str) -> ModelSpec:
  """Returns the spec of the config's model, with the platform's kernels."""
  path = config.model.path or inputs.resolve(config)
  directory = hf_directory.find(path, 'model.path', ('config.json',))
  return resolve.with_kernels(inputs.read_spec(config, directory), platform)


def resolved(
  config: Config, spec: ModelSpec, mesh: Mesh, schedule: Schedule = Schedule()
) -> Resolved:
  """Returns a run that has shapes alone: its model has no files, and it no problems."""
  nothing: Any = None
  model = Model('', Tokenizer(nothing, eos=(0,), template=''), spec)
  of_teacher = inputs.teacher_spec(config)
  return Resolved(
    config,
    model,
    data=nothing,
    mesh=mesh,
    schedule=schedule,
    budget=budget.count(budget.sizes_of(config, spec), spec, schedule, mesh),
    teacher=model._replace(spec=of_teacher) if of_teacher else None,
  )


def trainer_of(r: Resolved) -> tuple[Trainer, Tree, Tree]:
  """Returns (trainer, params, opt) of a run that has shapes alone.

  A vision model has a problem with the largest picture, the others one without text.
  """
  none = np.zeros(1, np.int32)
  grids = ()
  if v := r.spec.vision:
    room = max(1, r.config.prompts.max_prompt_tokens - TEXT)
    merged = min(v.most_pixels // (v.merge * v.patch) ** 2, room)
    high = math.isqrt(merged)
    grids = ((high * v.merge, -(-merged // high) * v.merge),)
  problems = Problems(none, none, none, [Row('', '')], [grids])
  steps = r.config.rewards.custom.steps
  verifier: Any = SimpleNamespace(steps=steps, environment=r.config.environment)
  data = build.Material(problems, problems)
  return build.abstract_trainer(r, data, verifier, PhaseTimer())


def programs_of(r: Resolved) -> dict[str, Program]:
  """Returns the programs of a run by name, of several shapes the largest."""
  t, params, opt = trainer_of(r)
  largest = dict[str, Call]()
  for call in experiment.programs(t, params, opt):
    name = NAMES.get(getattr(call.function, '__name__', ''), '')
    before = largest.setdefault(name, call)
    # Of equal arguments the last: more of the cache, and more columns.
    if bytes_per_device(call.args) >= bytes_per_device(before.args):
      largest[name] = call
  make = functools.partial(build.empty_buffer, r.config, r.spec)
  buffer = sharding.abstract_rows(make, r.mesh)
  actor = decode.abstract_actor(r.spec, r.mesh)
  kept = actor if r.config.rollout.weight_sync_interval > 1 else None
  programs = dict[str, Program]()
  for name in filter(largest.get, NAMES.values()):
    call = largest[name]
    state = params, opt, t.base, t.teacher, buffer, kept if name in UPDATE else actor
    others = {id(x): x for x in jax.tree.leaves(state)}
    for x in jax.tree.leaves((call.args, call.kwargs)):
      others.pop(id(x), None)
    programs[name] = Program(call, bytes_per_device(list(others.values())))
  return programs


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes per device of a tree; arrays without a sharding are whole."""
  total = 0
  for x in jax.tree.leaves(tree):
    if hasattr(x, 'dtype'):
      layout = getattr(x, 'sharding', None)
      shape = layout.shard_shape(x.shape) if layout else x.shape
      total += math.prod(shape) * x.dtype.itemsize
  return total
