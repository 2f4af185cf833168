"""Makes other processes sample, for the processes that train.

The schedule is that of one process, in `trainer.sample`. A `RemoteSampler` sends orders
to the other side, which serve.py carries out.
"""

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime.link import Link
from bapo_jax.training.submission import Sampled, Submission
from bapo_jax.types import Tree


class Order(NamedTuple):
  """Tells the processes that sample what to do next."""

  kind: str  # 'compile', 'submit', 'collect', 'state', 'restore' or 'end'
  weights: Tree = None  # of the actor; None: those of the previous order
  value: Any = None


class Due(NamedTuple):
  """The value of the order 'submit': a `Submission` without its weights."""

  step: int
  prompt_round: int
  version: int  # of the actor
  hard_P: np.ndarray  # ids of the problems to re-evaluate, -1 for empty seats
  newest: Tree = None  # weights for the hard problems, if they are not the actor's
  newest_version: int = 0


class Collected(NamedTuple):
  """The answer to the order 'collect': the groups of the oldest submission."""

  groups: Any  # (fresh, re-evaluated), whole on every device
  described: list[dict[str, Any]]
  span: tuple[float, float]  # begin and end, of time.time
  busy: float  # seconds for which this side has sampled
  ready: int  # later submissions that are sampled
  signal: int  # that this side has received, or 0


class Arriving(Future[Sampled]):
  """Groups that other processes sample; `result` fetches them."""

  def __init__(self, fetch: Callable[['Arriving'], None]):
    super().__init__()
    self._fetch = fetch

  def result(self, timeout: float | None = None) -> Sampled:
    """Returns the groups, after those of all earlier submissions are fetched."""
    if not self.done():
      self._fetch(self)
    return super().result(timeout)


class RemoteSampler:
  """The processes that sample, as those that train see them.

  Every process that trains calls all methods, in the same order.

  Args:
    there: sends to the processes that sample.
    back: receives from them.
  """

  def __init__(self, there: Link, back: Link):
    self._there, self._back = there, back
    self._waiting: collections.deque[Arriving] = collections.deque()
    self._sent = -1  # version of the actor that they have
    self._busy = 0.0
    self.signal = 0  # that one of them has received
    self.ready = 0  # submissions that are sampled but not fetched

  def compile(self, weights: Tree) -> None:
    """Makes the other side compile its programs, and does not wait."""
    self._there.send(Order('compile', weights))

  def wait_until_compiled(self) -> None:
    """Waits until the other side has compiled its programs."""
    self._back.receive()

  def submit(self, given: Submission) -> Future[Sampled]:
    """Makes the other side sample a submission; its partial rollouts are there."""
    due = Due(given.step, given.prompt_round, given.actor.version, given.hard_P)
    if given.newest is not None:
      newest, version = given.newest.weights, given.newest.version
      due = due._replace(newest=newest, newest_version=version)
    known = given.actor.version == self._sent
    self._there.send(Order('submit', None if known else given.actor.weights, due))
    self._sent = given.actor.version
    self._waiting.append(Arriving(self._fetch))
    return self._waiting[-1]

  def _fetch(self, wanted: Arriving) -> None:
    while not wanted.done():
      self._there.send(Order('collect'))
      found: Collected = self._back.receive()
      self._busy, self.ready, self.signal = found.busy, found.ready, found.signal
      ahead = time.perf_counter() - time.time()
      begin, end = found.span
      sampled = Sampled.restored(found.groups, found.described)
      self._waiting.popleft().set_result(
        sampled._replace(span=(begin + ahead, end + ahead))
      )

  def busy(self) -> float:
    """Returns for how many seconds the other side had sampled at the last fetch."""
    return self._busy

  def state(self) -> Tree:
    """Returns the partial rollouts of the other side, as `PartialRollouts.state`."""
    self._there.send(Order('state'))
    return self._back.receive()

  def restore(self, state: Tree) -> None:
    """Restores the partial rollouts of the other side."""
    self._there.send(Order('restore', value=state))

  def close(self, status: int) -> None:
    """Ends the other side, with this exit status."""
    self._there.send(Order('end', value=status))
