"""Defines the submissions of the learner to a sampler, and their results."""

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.rollout.rollout import EMPTY_SEAT, Rollout
from bapo_jax.types import Groups, LogpDiff, Tree

NO_IDS = np.zeros(0, np.int32)


class Actor(NamedTuple):
  """Weights that sample."""

  weights: Tree  # laid out for decoding, on the devices that sample
  version: int  # learner step that made them
  learners: Tree = None  # the same weights in the learner's layout; None: not kept
  newest: 'Actor | None' = None  # samples hard problems; None: this actor


class Round(NamedTuple):
  """The prompts of a submission."""

  number: int  # earlier rounds of the run; numbers the fresh responses
  id_P: np.ndarray = NO_IDS  # ids of the fresh prompts; none: those of a record
  hard_P: np.ndarray = NO_IDS  # ids to re-evaluate; -1: an empty seat


class Sampled(NamedTuple):
  """The groups of one submission."""

  fresh: Rollout
  reevaluated: Rollout
  span: tuple[float, float] = (0.0, 0.0)  # begin and end, of time.perf_counter

  @property
  def groups(self) -> tuple[Groups, Groups]:
    """The fresh and the re-evaluated groups."""
    return self.fresh.groups, self.reevaluated.groups

  def with_groups(self, fresh: Groups, reevaluated: Groups) -> 'Sampled':
    """Replaces the groups, for instance by copies on other devices."""
    return self._replace(
      fresh=self.fresh._replace(groups=fresh),
      reevaluated=self.reevaluated._replace(groups=reevaluated),
    )

  def described(self) -> list[dict[str, Any]]:
    """Returns both rollouts, without their groups, as plain values for metrics."""
    return [
      {
        'undecided': x.undecided,
        'failed': x.failed,
        'parts': dict(x.parts),
        'logp_diff': x.logp_diff and [float(value) for value in x.logp_diff],
      }
      for x in (self.fresh, self.reevaluated)
    ]

  @classmethod
  def restored(
    cls, groups: Sequence[Groups], described: list[dict[str, Any]]
  ) -> 'Sampled':
    """Rebuilds the rollouts from their groups and the result of `described`.

    Texts and verdicts are empty, because only their number is still needed.
    """
    rollouts = []
    for of_kind, known in zip(groups, described, strict=True):
      n = of_kind.correct_PG.size
      diff = known['logp_diff'] and LogpDiff(*map(jnp.asarray, known['logp_diff']))
      fields = known | {'logp_diff': diff}
      rollouts.append(Rollout(of_kind, [''] * n, [EMPTY_SEAT] * n, **fields))
    fresh, reevaluated = rollouts
    return cls(fresh, reevaluated)


class InFlight(NamedTuple):
  """A submission whose groups no step has trained on."""

  hard_P: np.ndarray  # ids of its hard problems, -1 for empty seats
  ready: Future[Sampled]


class StepKeys(NamedTuple):
  """A random key per purpose, computed from seed and step and never stored."""

  fresh: Array
  reevaluate: Array
  batch: Array
  update: Array


@functools.partial(jax.jit, static_argnames='seed')
def step_keys(seed: int, step: int) -> StepKeys:
  """Returns the random keys of a learner step, a function of seed and step."""
  root = jax.random.key(seed)
  # Fresh responses are numbered across the run, so all steps share their key.
  fresh = jax.random.fold_in(root, 2**31 - 2)
  return StepKeys(fresh, *jax.random.split(jax.random.fold_in(root, step), 3))


@functools.partial(jax.jit, static_argnames='seed')
def evaluation_key(seed: int) -> Array:
  """Returns the random key of all evaluations of a run; no step has it."""
  return jax.random.fold_in(jax.random.key(seed), 2**31 - 1)
