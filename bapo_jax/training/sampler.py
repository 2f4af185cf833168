"""Samples the groups of learner steps; only a `Sampler` knows on which devices.

1. `Sampler` samples on the learner's devices, as soon as prompts are submitted;
2. `ThreadSampler` samples in a thread, on devices that only sample;
3. remote_sampler.py makes other processes sample.

All three return the same groups for the same prompts, actor and step.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from bapo_jax import sharding
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.learner.pictured import OfProblems
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.knobs import RolloutConfig
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, collect_due, empty, rollout
from bapo_jax.runtime import machine
from bapo_jax.runtime.lane import Lane, at_once
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training.submission import Actor, Round, Sampled, step_keys
from bapo_jax.types import Prompts, Tree, empty_groups


@dataclasses.dataclass
class Sampler:
  """Samples responses to submitted prompts, on the learner's devices.

  Args:
    seed: the seed of the run.
    count: number of prompts per round.
    places: maximum number of groups in partial rollouts.
    score: `scoring.recompute` of the responses; None keeps their log-probabilities.
    pictures: the pictures of the problems, for `score`; None for text only.
  """

  engine: RolloutEngine
  mesh: Mesh  # of the engine
  verification: Verification
  seed: int
  count: int
  places: int
  knobs: RolloutConfig
  score: Wrapped | None = None
  pictures: OfProblems | None = None

  elsewhere = False  # whether the learner's devices do not sample
  signal = 0  # received by another process that samples; 0: none

  def place(self, actor: Tree) -> Tree:
    """Copies an actor to the devices of this process that only sample, if any."""
    return actor

  def free(self, actor: Tree) -> None:
    """Deletes the arrays of an actor, even if another variable refers to them.

    Does nothing on other devices: a queued submission may still need the actor.
    """
    for x in jax.tree.leaves(actor):
      if isinstance(x, Array):
        x.delete()
    machine.trim()  # returns a CPU's freed memory from the C library to the system

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Samples the groups on which learner step `step` trains."""
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
    now = prompts_lib.next_prompts(problems, prompts.number, self.seed, self.count)
    fresh = sample(rollouts, actor, now, keys.fresh, knobs=self.knobs)
    return Sampled(fresh, reevaluated, (began, time.perf_counter()))

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
    with self.verification.timer('score'), sharding.current(self.mesh):
      groups, diff = jax.block_until_ready(
        self.score(weights, groups, actor.version, pictures)
      )
    return sampled._replace(groups=groups, logp_diff=diff)

  def remaining(self, actor: Actor, step: int) -> Rollout | None:
    """Returns groups that would be too old at the next step, or None.

    Only extra rounds leave such groups, and they need rollouts of the current step.
    """
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

  def programs(self, weights: Tree = None) -> Iterator[Lowered]:
    """Lowers the programs that sample in this process.

    `weights` are the learner's, if they score responses; they may be abstract.
    """
    engine = self.engine
    # With pictures the shapes of a batch are not known before.
    if self.score is not None and self.pictures is None and weights is not None:
      steps = self.verification.verifier.steps
      sizes = self.count, engine.group_size, engine.length, steps, engine.spec.routes
      groups = jax.eval_shape(lambda: empty_groups(*sizes))
      rows = sharding.over_rows(self.mesh, self.count)
      whole = sharding.replicated(self.mesh)
      # Tokens come from the sampler, verdicts from the host.
      layout = jax.tree.map(lambda x: rows if x.ndim > 2 else whole, groups)
      groups = sharding.abstract(groups, layout)
      with sharding.current(self.mesh):
        yield self.score.lower(weights, groups, 0, None)
    partial = self.knobs.max_off_policy_steps > 0
    yield from engine.programs(
      decode.abstract_actor(engine.spec, self.mesh),
      places=self.places if partial else self.count,
      refreshed=partial,
      resumed=self.verification.verifier.environment is not None,
    )

  def compile(self) -> Future[object]:
    """Makes other processes compile their programs; returns when they are done."""
    return at_once(lambda: None)

  def ready(self) -> int:
    """Returns the number of submissions that are sampled but not fetched."""
    return 0

  def busy(self) -> float:
    """Returns for how many seconds other devices have sampled."""
    return 0.0

  def close(self, status: int | None = None) -> None:
    """Ends threads, and with a status other processes too; does not wait."""


class Arriving(Future[Any]):
  """A result of other devices; `result` fetches it."""

  def __init__(self, fetch: Callable[['Arriving'], None]):
    super().__init__()
    self._fetch = fetch

  def result(self, timeout: float | None = None) -> Any:
    """Fetches the result and returns it."""
    if not self.done():
      self._fetch(self)
    return super().result(timeout)


@dataclasses.dataclass(kw_only=True)
class SamplerElsewhere(Sampler):
  """Samples on devices that do not train; groups arrive on those that do.

  Args:
    learners: the devices of the learner.
    timer: has the phases 'send', 'wait' and 'receive'.
  """

  learners: Mesh
  timer: PhaseTimer
  waiting: collections.deque[Arriving] = dataclasses.field(
    default_factory=collections.deque
  )

  elsewhere = True

  def free(self, actor: Tree) -> None:
    """Leaves the actor to the submissions that need it."""

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Sends a submission, and does not wait for its groups."""
    self._send(prompts, actor, step)
    self.waiting.append(Arriving(self._fetch))
    return self.waiting[-1]

  def _send(self, prompts: Round, actor: Actor, step: int) -> None:
    raise NotImplementedError

  def _next(self) -> Sampled:
    """Waits for the groups of the oldest submission that is not fetched."""
    raise NotImplementedError

  def _fetch(self, wanted: Arriving) -> None:
    """Fetches the groups of this submission and of all earlier submissions."""
    while not wanted.done():
      with self.timer('wait'):
        sampled = self._next()
      with self.timer('receive'):
        layout = sharding.layout_of_rows(sampled.groups, self.learners)
        groups = jax.block_until_ready(jax.device_put(sampled.groups, layout))
      self.waiting.popleft().set_result(sampled.with_groups(*groups))


@dataclasses.dataclass(kw_only=True)
class ThreadSampler(SamplerElsewhere):
  """Samples on devices of this process that do not train, in a thread."""

  def __post_init__(self):
    self._lane = Lane()
    self._tasks = collections.deque[Future[Sampled]]()

  def place(self, actor: Tree) -> Tree:
    """Copies an actor to the devices that sample."""
    with self.timer('send'):
      layout = sharding.shardings(actor, self.mesh, 'decode')
      return jax.block_until_ready(jax.device_put(actor, layout))

  def _send(self, prompts: Round, actor: Actor, step: int) -> None:
    sample = functools.partial(self.sample, prompts, actor, step)
    self._tasks.append(self._lane.submit(sample))

  def _next(self) -> Sampled:
    return self._tasks.popleft().result()

  def ready(self) -> int:
    """Returns the number of submissions that are sampled but not fetched."""
    return sum(task.done() for task in self._tasks)

  def busy(self) -> float:
    """Returns for how many seconds the thread has sampled."""
    return self._lane.busy()

  def close(self, status: int | None = None) -> None:
    """Ends the thread once it has finished its submissions; does not wait for it."""
    self._lane.close()
