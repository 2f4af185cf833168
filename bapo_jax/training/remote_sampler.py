"""Samples in processes that do not train.

1. `RemoteSampler`, in the processes that train, sends orders over a `Link`;
2. `serve`, in the processes that sample, carries them out. A thread samples, so that
   weights arrive and groups leave meanwhile.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.runtime import ahead
from bapo_jax.runtime.lane import Lane
from bapo_jax.runtime.link import Link
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.runtime.signals import Stop
from bapo_jax.training.sampler import Arriving, Elsewhere, LocalSampler, Sampler
from bapo_jax.training.submission import Actor, Round, Sampled
from bapo_jax.types import Tree


class Links(NamedTuple):
  """Connects the processes that train with those that sample."""

  there: Link
  back: Link


class Order(NamedTuple):
  """Tells the processes that sample what to do next."""

  kind: str  # 'submit', 'collect', 'state', 'restore' or 'end'
  value: Any = None


class Collected(NamedTuple):
  """The answer to the order 'collect': the groups of a step."""

  groups: Any  # (fresh, re-evaluated), whole on every device
  described: list[dict[str, Any]]
  span: tuple[float, float]  # begin and end, of time.time
  sampler: Elsewhere


class RemoteSampler(Sampler):
  """Makes other processes sample, which compile their programs at their start.

  Every process that trains calls all methods, in the same order. A submission sends the
  actor. No group remains: extra rounds need rollout.depth=0, other processes more.

  Args:
    learners: the devices of the learner.
    timer: has the phases 'send', 'wait' and 'receive'.
  """

  def __init__(self, links: Links, learners: Mesh, timer: PhaseTimer):
    self._links = links
    self._learners = learners
    self._timer = timer
    self._sent = -1  # version of the actor that the other side has
    self._elsewhere = Elsewhere(0.0)  # when groups were last fetched

  def _order(self, kind: str, value: Any = None) -> None:
    self._links.there.send(Order(kind, value))

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Sends a submission, and does not wait for its groups."""
    # The other side keeps the weights of the previous submission.
    weights = None if actor.version == self._sent else actor.weights
    self._sent = actor.version
    with self._timer('send'):
      self._order('submit', (prompts, actor._replace(weights=weights), step))
    receive = functools.partial(self._collect, step)
    return Arriving(receive, self._learners, self._timer)

  def _collect(self, step: int) -> Sampled:
    self._order('collect', step)
    answer: Collected = self._links.back.receive()
    self._elsewhere = answer.sampler
    offset = time.perf_counter() - time.time()
    begin, end = answer.span
    sampled = Sampled.restored(answer.groups, answer.described)
    return sampled._replace(span=(begin + offset, end + offset))

  def state(self) -> Tree:
    """Returns the partial rollouts of the other side, as `PartialRollouts.state`."""
    self._order('state')
    return self._links.back.receive()

  def restore(self, state: Tree) -> None:
    """Restores the partial rollouts of the other side."""
    self._order('restore', state)

  def elsewhere(self) -> Elsewhere:
    """Describes the other side, as it was when groups were last fetched."""
    return self._elsewhere

  def close(self, status: int | None = None) -> None:
    """Ends the other side with this exit status; None does nothing."""
    if status is not None:
      self._order('end', status)


@contextlib.contextmanager
def ending(links: Links) -> Iterator[None]:
  """Ends the processes that sample with status 2 if the body raises ValueError."""
  try:
    yield
  except ValueError:
    links.there.send(Order('end', 2))
    raise


def serve(sampler: LocalSampler, links: Links, stop: Stop) -> int:
  """Serves the processes that train until they end; returns the exit status.

  Compiles the programs while the other side loads and compiles. A signal is passed on
  to the other side, which decides when to end.
  """
  kept = ahead.compile_all(sampler.programs())  # noqa: F841 (keeps them compiled)
  lane = Lane()
  tasks: dict[int, Future[Sampled]] = {}  # step -> groups, not collected
  weights = None
  while True:
    order: Order = links.there.receive()
    match order.kind:
      case 'submit':
        prompts, actor, step = order.value
        weights = weights if actor.weights is None else actor.weights
        actor = actor._replace(weights=weights)
        sample = functools.partial(_sample, sampler, prompts, actor, step)
        tasks[step] = lane.submit(sample)
      case 'collect':
        sampled = tasks.pop(order.value).result()
        links.back.send(
          Collected(
            groups=sampled.groups,
            described=sampled.described(),
            span=sampled.span,
            sampler=Elsewhere(lane.busy(), stop.signal),
          )
        )
      case 'state':
        # In the thread that samples: all processes must run its programs in one order.
        links.back.send(lane.submit(functools.partial(_state, sampler)).result())
      case 'restore':
        restore = functools.partial(_restore, sampler, order.value)
        lane.submit(restore).result()
      case 'end':
        return order.value


def _sample(sampler: LocalSampler, prompts: Round, actor: Actor, step: int) -> Sampled:
  """Samples a submission; groups are replicated on all devices, times are dates."""
  sampled = sampler.sample(prompts, actor, step)
  behind = time.time() - time.perf_counter()
  begin, end = sampled.span
  whole = sharding.replicated(sampler.mesh)
  groups = jax.device_put(sampled.groups, whole)
  return sampled.with_groups(*groups)._replace(span=(begin + behind, end + behind))


def _state(sampler: LocalSampler) -> Tree:
  """Returns the state of partial rollouts, replicated on every device."""
  whole = sharding.replicated(sampler.mesh)
  return jax.tree.map(
    lambda x: x if isinstance(x, np.ndarray) else jax.device_put(x, whole),
    sampler.state(),
  )


def _restore(sampler: LocalSampler, state: Tree) -> None:
  """Restores partial rollouts from arrays that are replicated on every device."""
  sampler.restore(
    jax.tree.map(
      lambda x, like: (
        x if isinstance(like, np.ndarray) else jax.device_put(x, like.sharding)
      ),
      state,
      sampler.state(),
    )
  )
