"""Defines the two parts of a run: `Trainer` is fixed, `TrainState` changes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from bapo_jax import sharding
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner.learner import TrainStep, Updated
from bapo_jax.learner.pictured import Embedder, Seen
from bapo_jax.models import lora
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training.config import Config
from bapo_jax.training.sampler import Sampler
from bapo_jax.training.submission import InFlight
from bapo_jax.types import Groups, History, ReplayBuffer, Tree

Metrics = dict[str, float]
Score = Callable[[Tree, Groups, Seen], Array]  # log-probabilities [P, G, T]


class StepRecord(NamedTuple):
  """Holds the batch and the updates of one learner step, to be written to groups/."""

  step: int  # learner steps done before this step
  groups: Groups  # the batch
  source_P: Array  # index into types.SOURCES; -1 marks an empty seat
  updates: list[Updated]  # the optimiser updates, in order
  reference_PGT: Array | None = None  # log p(teacher), nats; None: not computed


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Everything that is fixed for a run."""

  config: Config
  spec: ModelSpec
  schedule: Schedule
  mesh: Mesh
  tokenizer: Tokenizer
  problems: Problems
  held_out: Problems
  engine: RolloutEngine
  verifier: Verifier
  train_step: TrainStep  # jitted once
  proximal: Score | None  # scores with the weights at the step's start; None if unused
  sampler: Sampler
  timer: PhaseTimer
  base: Tree = None  # frozen weights; None if all weights are trained
  pictures: Embedder | None = None  # of training problems; None without
  held_out_gallery: Gallery | None = None  # of the held-out problems
  compiled: Sequence[Lowered] = ()  # keeps the programs of later calls compiled
  # Frozen weights that the loss refers to, and a program that scores with them.
  teacher: Tree = None
  reference: Wrapped | None = None

  def referred(self, groups: Groups) -> Array | None:
    """Returns log p(teacher) [P, G, T] of the responses; None without a teacher."""
    if self.reference is None:
      return None
    with self.timer('teacher'), sharding.current(self.mesh):
      logp_PGT = self.reference(self.teacher, groups, self.seen(groups))
      return jax.block_until_ready(logp_PGT)

  def seen(self, groups: Groups) -> Seen:
    """Returns the pictures of the groups' problems; None if all problems are text."""
    return None if self.pictures is None else self.pictures(groups.id_P)

  def weights(self, params: Tree) -> Tree:
    """Returns the weights that the model computes with, given the trained ones."""
    return lora.attach(self.base, params)

  def actor(self, params: Tree) -> Tree:
    """Returns a copy of the weights, laid out for decoding."""
    return decode.sync_actor(self.weights(params), self.spec, self.mesh)

  def adapters(self, params: Tree) -> Tree:
    """Copies the adapters that are merged into an actor; None without adapters."""
    return jax.tree.map(jnp.copy, params) if self.config.lora.rank else None


def _number() -> Any:
  """Makes a field for a number on the host, which is no leaf of the tree."""
  return struct.field(pytree_node=False, default=0)


class TrainState(struct.PyTreeNode):
  """Everything that changes in a run, except for partial rollouts in the sampler."""

  params: Tree  # the trained weights or adapters
  opt: Tree
  actor: Tree | None  # decoding weights, up to weight_sync_interval steps old; or freed
  buffer: ReplayBuffer
  # Host arrays; counted only if the prompt rule reads them.
  history: History = struct.field(pytree_node=False)
  actor_adapters: Tree = None  # the adapters that are merged into the actor
  step: int = _number()  # learner steps done
  actor_version: int = _number()  # learner step
  prompt_round: int = _number()  # rounds sampled
  responses: int = _number()  # sampled in training
  updates: int = _number()  # applied
  consecutive_skips: int = _number()  # not finite
  idle_steps: int = _number()  # without an advantage
  # Submissions of the next rollout.depth steps, the next step first.
  queue: tuple[InFlight, ...] = struct.field(pytree_node=False, default=())
