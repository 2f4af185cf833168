"""Samples in processes that do not train, by the orders of remote_sampler.py.

Groups are sampled in a thread, so that weights arrive and groups leave meanwhile.
"""

import collections
import functools
import time
from concurrent.futures import Future

import jax
import numpy as np

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime import ahead
from bapo_jax.runtime.lane import Lane
from bapo_jax.runtime.link import Link
from bapo_jax.runtime.signals import Stop
from bapo_jax.training import trainer
from bapo_jax.training.remote_sampler import Collected, Due, Order, RemoteSampler
from bapo_jax.training.state import Trainer
from bapo_jax.training.submission import Actor, Sampled, Submission
from bapo_jax.types import Tree


def serve(t: Trainer, there: Link, back: Link, stop: Stop) -> int:
  """Samples what the processes that train submit, until they end; returns the status.

  `t` is the trainer of the devices that sample. A signal is passed on to the other
  side, which decides when to end.
  """
  lane, queue, weights = Lane(), collections.deque[Future[Sampled]](), None
  partial = t.partial_rollouts()
  assert not isinstance(partial, RemoteSampler)  # `t` samples itself
  while True:
    order: Order = there.receive()
    weights = weights if order.weights is None else order.weights
    match order.kind:
      case 'compile':
        programs = trainer.sampler_programs(t, weights)
        kept = ahead.compile_all(programs)  # noqa: F841 (keeps them compiled)
        weights = None
        back.send('compiled')
      case 'submit':
        given = _submission(t, order.value, weights, partial)
        queue.append(lane.submit(functools.partial(_sample, t, given)))
      case 'collect':
        sampled = queue.popleft().result()
        groups = sampled.fresh.groups, sampled.reevaluated.groups
        done, busy = sum(each.done() for each in queue), lane.busy()
        answer = groups, sampled.described(), sampled.span, busy, done, stop.signal
        back.send(Collected(*answer))
      case 'state':
        assert partial is not None
        # In the thread that samples: all processes must run its programs in one order.
        back.send(lane.submit(functools.partial(_whole, t, partial)).result())
      case 'restore':
        assert partial is not None
        lane.submit(functools.partial(_restore, partial, order.value)).result()
      case 'end':
        return order.value


def _submission(
  t: Trainer, due: Due, weights: Tree, partial: PartialRollouts | None
) -> Submission:
  hard = prompts.prompts_by_id(t.problems, due.hard_P)
  given = Submission(
    due.step, due.prompt_round, Actor(weights, due.version), partial, hard
  )
  if due.newest is None:
    return given
  return given._replace(newest=Actor(due.newest, due.newest_version))


def _sample(t: Trainer, given: Submission) -> Sampled:
  """Samples a submission; its groups are whole on every device, and times are dates."""
  sampled = trainer.run_submission(t, given)
  behind = time.time() - time.perf_counter()
  begin, end = sampled.span
  parts = sampled.fresh, sampled.reevaluated
  fresh, reevaluated = (
    x._replace(groups=jax.device_put(x.groups, sharding.replicated(t.mesh)))
    for x in parts
  )
  return Sampled(fresh, reevaluated, (begin + behind, end + behind))


def _whole(t: Trainer, partial: PartialRollouts) -> Tree:
  """Returns the state of partial rollouts, whole on every device."""
  return jax.tree.map(
    lambda x: (
      x if isinstance(x, np.ndarray) else jax.device_put(x, sharding.replicated(t.mesh))
    ),
    partial.state(),
  )


def _restore(partial: PartialRollouts, state: Tree) -> None:
  """Restores partial rollouts from arrays that are whole on every device."""
  partial.restore(
    jax.tree.map(
      lambda x, like: (
        x if isinstance(like, np.ndarray) else jax.device_put(x, like.sharding)
      ),
      state,
      partial.state(),
    )
  )
