"""Defines what is submitted to be sampled, and what comes back."""

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import EMPTY_SEAT, Rollout
from bapo_jax.types import Groups, LogpDiff, Prompts, Tree


class Actor(NamedTuple):
  """Weights that sample."""

  weights: Tree  # laid out for decoding, on the devices that sample
  version: int  # learner step that made them
  learners: Tree = None  # the same weights in the learner's layout; None: not kept


class Submission(NamedTuple):
  """Holds the prompts of one learner step and the weights that sample them."""

  step: int  # learner step that trains on the groups
  prompt_round: int
  actor: Actor  # of the fresh groups
  partial: PartialRollouts | None = None  # mutated; None: responses end in their step
  hard: Prompts | None = None  # problems to re-evaluate; id -1 is an empty seat
  newest: Actor | None = None  # of the hard problems; None: `actor`

  @property
  def hard_P(self) -> np.ndarray:
    """Returns the ids of the hard problems, -1 for empty seats."""
    return np.empty(0, int) if self.hard is None else self.hard.id_P


class Sampled(NamedTuple):
  """The groups of one submission."""

  fresh: Rollout
  reevaluated: Rollout
  span: tuple[float, float] = (0.0, 0.0)  # begin and end, of time.perf_counter

  def described(self) -> list[dict[str, Any]]:
    """Returns, as plain values, what metrics need of both rollouts beside groups."""
    return [
      {
        'undecided': x.undecided,
        'parts': dict(x.parts),
        'logp_diff': x.logp_diff and [float(value) for value in x.logp_diff],
      }
      for x in (self.fresh, self.reevaluated)
    ]

  @classmethod
  def restored(
    cls, groups: tuple[Groups, Groups], described: list[dict[str, Any]]
  ) -> 'Sampled':
    """Returns the rollouts with these groups and this description.

    Their texts and verdicts, of which only the number is still needed, are empty.
    """
    rollouts = []
    for of_kind, known in zip(groups, described, strict=True):
      n = of_kind.correct_PG.size
      diff = known['logp_diff'] and LogpDiff(*map(jnp.asarray, known['logp_diff']))
      rollout = Rollout(of_kind, [''] * n, [EMPTY_SEAT] * n, parts=known['parts'])
      rollouts.append(rollout._replace(undecided=known['undecided'], logp_diff=diff))
    fresh, reevaluated = rollouts
    return cls(fresh, reevaluated)


class InFlight(NamedTuple):
  """A submission whose groups no step has trained on."""

  hard_P: np.ndarray  # ids of its hard problems, -1 for empty seats
  ready: Future[Sampled]
