"""Samples in processes that do not train.

1. `RemoteSampler`, in the processes that train, sends orders over a `Link`;
2. `serve`, in the processes that sample, carries them out. A thread samples, so that
   weights arrive and groups leave meanwhile.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Lowered

from bapo_jax import sharding
from bapo_jax.runtime import ahead
from bapo_jax.runtime.lane import Lane
from bapo_jax.runtime.link import Link
from bapo_jax.runtime.signals import Stop
from bapo_jax.training.sampler import Arriving, Sampler, SamplerElsewhere
from bapo_jax.training.submission import Actor, Round, Sampled
from bapo_jax.types import Tree


class Links(NamedTuple):
  """Connects the processes that train with those that sample."""

  there: Link
  back: Link


class Order(NamedTuple):
  """Tells the processes that sample what to do next."""

  kind: str  # 'compile', 'submit', 'collect', 'state', 'restore' or 'end'
  value: Any = None


class Collected(NamedTuple):
  """The answer to the order 'collect': the groups of the oldest submission."""

  groups: Any  # (fresh, re-evaluated), whole on every device
  described: list[dict[str, Any]]
  span: tuple[float, float]  # begin and end, of time.time
  busy: float  # seconds for which this side has sampled
  ready: int  # later submissions that are sampled
  signal: int  # that this side has received, or 0


@dataclasses.dataclass(kw_only=True)
class RemoteSampler(SamplerElsewhere):
  """Makes other processes sample.

  Every process that trains calls all methods, in the same order.
  """

  links: Links

  def __post_init__(self):
    self._sent = -1  # version of the actor that the other side has
    self._busy = 0.0
    self._ready = 0

  def _order(self, kind: str, value: Any = None) -> None:
    self.links.there.send(Order(kind, value))

  def programs(self, weights: Tree = None) -> Iterator[Lowered]:
    """Returns nothing: this process compiles no program that samples."""
    return iter(())

  def compile(self) -> Future[object]:
    """Makes the other side compile its programs; returns when it is done."""
    self._order('compile')
    return Arriving(lambda compiled: compiled.set_result(self.links.back.receive()))

  def _send(self, prompts: Round, actor: Actor, step: int) -> None:
    # The other side keeps the weights of the previous submission.
    weights = None if actor.version == self._sent else actor.weights
    self._sent = actor.version
    with self.timer('send'):
      self._order('submit', (prompts, actor._replace(weights=weights), step))

  def _next(self) -> Sampled:
    self._order('collect')
    answer: Collected = self.links.back.receive()
    self._busy = answer.busy
    self._ready = answer.ready
    self.signal = answer.signal
    offset = time.perf_counter() - time.time()
    span = answer.span[0] + offset, answer.span[1] + offset
    return Sampled.restored(answer.groups, answer.described)._replace(span=span)

  def state(self) -> Tree:
    """Returns the partial rollouts of the other side, as `PartialRollouts.state`."""
    self._order('state')
    return self.links.back.receive()

  def restore(self, state: Tree) -> None:
    """Restores the partial rollouts of the other side."""
    self._order('restore', state)

  def ready(self) -> int:
    """Returns how many submissions were sampled when results were last fetched."""
    return self._ready

  def busy(self) -> float:
    """Returns for how many seconds the other side had sampled at the last fetch."""
    return self._busy

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


def serve(sampler: Sampler, links: Links, stop: Stop) -> int:
  """Serves the processes that train until they end; returns the exit status.

  A signal is passed on to the other side, which decides when to end.
  """
  lane = Lane()
  tasks = collections.deque[Future[Sampled]]()
  weights = None
  while True:
    order: Order = links.there.receive()
    match order.kind:
      case 'compile':
        kept = ahead.compile_all(sampler.programs())  # noqa: F841 (keeps them compiled)
        links.back.send('compiled')
      case 'submit':
        prompts, actor, step = order.value
        weights = weights if actor.weights is None else actor.weights
        actor = actor._replace(weights=weights)
        sample = functools.partial(_sample, sampler, prompts, actor, step)
        tasks.append(lane.submit(sample))
      case 'collect':
        sampled = tasks.popleft().result()
        done = sum(task.done() for task in tasks)
        answer = sampled.groups, sampled.described(), sampled.span
        links.back.send(Collected(*answer, lane.busy(), done, stop.signal))
      case 'state':
        # In the thread that samples: all processes must run its programs in one order.
        links.back.send(lane.submit(functools.partial(_state, sampler)).result())
      case 'restore':
        restore = functools.partial(_restore, sampler, order.value)
        lane.submit(restore).result()
      case 'end':
        return order.value


def _sample(sampler: Sampler, prompts: Round, actor: Actor, step: int) -> Sampled:
  """Samples a submission; groups are replicated on all devices, times are dates."""
  sampled = sampler.sample(prompts, actor, step)
  behind = time.time() - time.perf_counter()
  begin, end = sampled.span
  whole = sharding.replicated(sampler.mesh)
  groups = jax.device_put(sampled.groups, whole)
  return sampled.with_groups(*groups)._replace(span=(begin + behind, end + behind))


def _state(sampler: Sampler) -> Tree:
  """Returns the state of partial rollouts, replicated on every device."""
  whole = sharding.replicated(sampler.mesh)
  return jax.tree.map(
    lambda x: x if isinstance(x, np.ndarray) else jax.device_put(x, whole),
    sampler.state(),
  )


def _restore(sampler: Sampler, state: Tree) -> None:
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
