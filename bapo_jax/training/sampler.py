"""Samples the groups of learner steps; only a `Sampler` knows on which devices.

1. `LocalSampler` samples on the learner's devices, as soon as prompts are submitted;
2. `ThreadSampler` runs a `LocalSampler` of other devices in a thread;
3. `RemoteSampler` (remote_sampler.py) makes other processes run one;
4. `RecordedSampler` (recorded_sampler.py) returns recorded groups, and samples none.

The first three return the same groups for the same prompts, actor and step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import jax
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped

from bapo_jax import sharding
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.learner.pictured import Embedder
from bapo_jax.rollout import decode
from bapo_jax.rollout import given as given_lib
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.given import Given
from bapo_jax.rollout.knobs import RolloutConfig
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, collect_due, empty, rollout
from bapo_jax.runtime.ahead import Call
from bapo_jax.runtime.lane import Lane, at_once
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training.submission import Actor, Round, Sampled, step_keys
from bapo_jax.types import Prompts, Tree, empty_groups


class Elsewhere(NamedTuple):
  """Reports on devices that sample and do not train."""

  busy: float  # seconds for which they have sampled
  signal: int = 0  # received by the process that samples; 0: none


class Sampler(Protocol):
  """Samples responses to submitted prompts, on some devices.

  A subclass must submit. It inherits what suits a sampler without devices, threads,
  programs and partial rollouts.
  """

  def place(self, actor: Tree) -> Tree:
    """Copies an actor to the devices of this process that only sample, if any."""
    return actor

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Submits prompts; returns the groups on which learner step `step` trains.

    The trainer frees the actor's arrays when it makes the next actor: copy what must
    live longer.
    """
    ...

  def remaining(self, actor: Actor, step: int) -> Rollout | None:
    """Returns groups that would be too old at the next step, or None.

    Only extra rounds leave such groups, and they need rollouts of the current step.
    """
    return None

  def state(self) -> Tree:
    """Returns the partial rollouts for a checkpoint; None if there are none."""
    return None

  def restore(self, state: Tree) -> None:
    """Continues with the partial rollouts of a checkpoint."""
    return

  def programs(self, weights: Tree = None) -> Iterator[Call]:
    """Yields the programs that sample in this process.

    `weights` are the learner's, if they score responses; they may be abstract.
    """
    return iter(())

  def elsewhere(self) -> Elsewhere | None:
    """Describes the devices that sample beside the learner; None if there are none."""
    return None

  def close(self, status: int | None = None) -> None:
    """Ends threads, and with a status other processes too; does not wait."""
    return


@dataclasses.dataclass
class LocalSampler(Sampler):
  """Samples in the calling thread, at once.

  Args:
    seed: the seed of the run.
    count: number of prompts per round.
    places: maximum number of groups in partial rollouts.
    score: `scoring.recompute` of the responses; None keeps their log-probabilities.
    pictures: the pictures of the problems, for `score`; None for text only.
  """

  engine: RolloutEngine
  verification: Verification
  seed: int
  count: int
  places: int
  knobs: RolloutConfig
  score: Wrapped | None = None
  pictures: Embedder | None = None

  @property
  def mesh(self) -> Mesh:
    """The devices that sample."""
    assert self.engine.mesh is not None
    return self.engine.mesh

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Samples at once."""
    return at_once(lambda: self.sample(prompts, actor, step))

  def sample(self, prompts: Round, actor: Actor, step: int) -> Sampled:
    """Samples the groups of a submission, hard problems first."""
    began = time.perf_counter()
    keys = step_keys(self.seed, step)
    problems = self.verification.problems
    sample = functools.partial(self._rollout, number=prompts.number, step=step)
    if seats := len(prompts.hard_P):
      hard = prompts_lib.prompts_by_id(problems, prompts.hard_P)
      rollouts = PartialRollouts(self.engine, seats)
      reevaluated = sample(rollouts, actor.newest or actor, hard, keys.reevaluate)
    else:
      reevaluated = empty(self.engine, self.verification.verifier.steps)
    rollouts = self.partial or PartialRollouts(self.engine, self.count)
    now = prompts_lib.prompts_by_id(problems, prompts.id_P)
    given = self._given(now, prompts.number)
    fresh = sample(rollouts, actor, now, keys.fresh, knobs=self.knobs, given=given)
    return Sampled(fresh, reevaluated, (began, time.perf_counter()))

  def _given(self, prompts: Prompts, number: int) -> list[Given | None]:
    """Returns the given responses of a round, none without rollout.given."""
    v = self.verification
    if not self.knobs.given:
      return []
    return given_lib.responses(
      v.problems,
      prompts,
      v.tokenizer,
      v.between,
      seats=self.knobs.given,
      longest=self.engine.max_new_tokens,
      purpose=(self.seed, number),
    )

  def _rollout(
    self,
    rollouts: PartialRollouts,
    actor: Actor,
    prompts: Prompts,
    key: Array,
    *,
    number: int,
    step: int,
    knobs: RolloutConfig = RolloutConfig(),
    given: Sequence[Given | None] = (),
  ) -> Rollout:
    sampled = rollout(
      rollouts,
      actor.weights,
      prompts,
      key,
      verification=self.verification,
      step=step,
      policy_version=actor.version,
      first_uid=number * len(prompts.id_P) * self.engine.group_size,
      k=knobs,
      given=given,
    )
    return self._scored(sampled, actor)

  def _scored(self, sampled: Rollout, actor: Actor) -> Rollout:
    """Replaces the sampler's log-probabilities by the learner's, if configured.

    Must run right after sampling: one step later, the learner's weights of step
    `actor.version` may no longer exist.
    """
    if self.score is None:
      return sampled
    weights = actor.learners
    if weights is None:
      weights = decode.params_of(actor.weights, self.engine.spec)
    groups = sampled.groups
    pictures = None if self.pictures is None else self.pictures(groups.id_P)
    with self.verification.timer('score'), sharding.current(self.engine.mesh):
      groups, diff = jax.block_until_ready(
        self.score(weights, groups, actor.version, pictures)
      )
    return sampled._replace(groups=groups, logp_diff=diff)

  def remaining(self, actor: Actor, step: int) -> Rollout | None:
    """Returns groups that would be too old at the next step, or None."""
    oldest = self.knobs.max_off_policy_steps
    if self.partial is None or not self.partial.due(step - oldest).any():
      return None
    due = collect_due(
      self.partial,
      self.count,
      max_off_policy_steps=oldest,
      verification=self.verification,
      step=step,
    )
    return self._scored(due, actor)

  @functools.cached_property
  def partial(self) -> PartialRollouts | None:
    """The responses that continue in the next step; None if all end in their step."""
    if not self.knobs.max_off_policy_steps:
      return None
    return PartialRollouts(self.engine, self.places)

  def state(self) -> Tree:
    """Returns the partial rollouts for a checkpoint; None if there are none."""
    return self.partial and self.partial.state()

  def restore(self, state: Tree) -> None:
    """Continues with the partial rollouts of a checkpoint."""
    if self.partial is not None:
      self.partial.restore(state)

  def programs(self, weights: Tree = None) -> Iterator[Call]:
    """Yields the programs of `sample`."""
    engine = self.engine
    if self.score is not None and weights is not None:
      groups = jax.eval_shape(
        lambda: empty_groups(
          self.count,
          engine.group_size,
          engine.length,
          self.verification.verifier.steps,
          engine.spec.routes,
        )
      )
      rows = sharding.over_rows(self.mesh, self.count)
      whole = sharding.replicated(self.mesh)
      # Tokens come from the sampler, verdicts from the host.
      layout = jax.tree.map(lambda x: rows if x.ndim > 2 else whole, groups)
      groups = sharding.abstract(groups, layout)
      pictures = self.pictures.abstract(self.count) if self.pictures else None
      yield Call(self.mesh, self.score, weights, groups, 0, pictures)
    partial = self.knobs.max_off_policy_steps > 0
    yield from engine.programs(
      decode.abstract_actor(engine.spec, self.mesh),
      places=self.places if partial else self.count,
      refreshed=partial,
      resumed=self.verification.verifier.environment is not None,
      given=self.count * self.knobs.given,
    )


class Arriving(Future[Sampled]):
  """The groups of a submission to other devices; `result` fetches them once.

  Args:
    receive: waits for the groups.
    learners: the devices of the learner, to which the groups are copied.
    timer: has the phases 'wait' and 'receive'.
  """

  def __init__(self, receive: Callable[[], Sampled], learners: Mesh, timer: PhaseTimer):
    super().__init__()
    self._receive = receive
    self._learners = learners
    self._timer = timer

  def result(self, timeout: float | None = None) -> Sampled:
    """Fetches the groups and returns them."""
    if not self.done():
      with self._timer('wait'):
        sampled = self._receive()
      with self._timer('receive'):
        layout = sharding.layout_of_rows(sampled.groups, self._learners)
        groups = jax.block_until_ready(jax.device_put(sampled.groups, layout))
      self.set_result(sampled.with_groups(*groups))
    return super().result(timeout)


class ThreadSampler:
  """Samples on devices of this process that do not train, in a thread.

  Args:
    local: samples on these devices.
    learners: the devices of the learner.
    timer: has the phases 'send', 'wait' and 'receive'.
  """

  def __init__(self, local: LocalSampler, learners: Mesh, timer: PhaseTimer):
    self._local = local
    self._learners = learners
    self._timer = timer
    self._lane = Lane()
    self.state = local.state
    self.restore = local.restore
    self.programs = local.programs
    self.remaining = local.remaining

  def place(self, actor: Tree) -> Tree:
    """Copies an actor to the devices that sample."""
    with self._timer('send'):
      layout = sharding.shardings(actor, self._local.mesh, 'decode')
      return jax.block_until_ready(jax.device_put(actor, layout))

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Queues a submission, and does not wait for its groups."""
    sample = functools.partial(self._local.sample, prompts, actor, step)
    return Arriving(self._lane.submit(sample).result, self._learners, self._timer)

  def elsewhere(self) -> Elsewhere:
    """Describes the thread."""
    return Elsewhere(self._lane.busy())

  def close(self, status: int | None = None) -> None:
    """Ends the thread once it has finished its submissions; does not wait for it."""
    self._lane.close()
