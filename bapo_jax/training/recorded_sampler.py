"""Replaces sampling by recorded rollouts: a `Sampler` that reads its groups.

The groups of a step depend on the record, the seed and the step alone. So the arms of
a comparison train on the same data, which no policy of the run has sampled: the version
of all tokens is -1, and mu is the recorded one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data.records import Group, Record
from bapo_jax.rollout.rollout import EMPTY_SEAT, Rollout
from bapo_jax.runtime import exchange
from bapo_jax.runtime.lane import at_once
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training.sampler import Sampler
from bapo_jax.training.submission import Actor, Round, Sampled
from bapo_jax.types import Groups


@dataclasses.dataclass(frozen=True)
class RecordedSampler(Sampler):
  """Returns recorded groups.

  Args:
    seed: the seed of the run.
    count: P, number of groups per round.
    empty: number of groups -> empty `Groups` of the run.
    timer: has the phase 'sample'.
  """

  record: Record
  seed: int
  count: int
  empty: Callable[[int], Groups]
  mesh: Mesh
  timer: PhaseTimer

  def submit(self, prompts: Round, actor: Actor, step: int) -> Future[Sampled]:
    """Reads the groups of a round at once."""
    with self.timer('sample'):
      groups = self.record.round(prompts.number, self.seed, self.count)
      seats = self.count * len(groups[0].responses)
      fresh = Rollout(
        self._padded(groups, step),
        [''] * seats,
        [EMPTY_SEAT] * seats,
        undecided=sum(r.correct is None for x in groups for r in x.responses),
      )
    sampled = Sampled(fresh, Rollout(self.empty(0), [], []))
    return at_once(lambda: sampled)

  def _padded(self, chosen: Sequence[Group], step: int) -> Groups:
    """Returns P groups on the mesh, the last of them empty if fewer are chosen."""
    groups = jax.tree.map(np.array, self.empty(self.count))
    for p, group in enumerate(chosen):
      groups.id_P[p] = group.problem
      groups.completed_step_P[p] = step
      begin = len(group.prompt)
      groups.tokens_PGT[p, :, :begin] = group.prompt
      for g, response in enumerate(group.responses):
        columns = p, g, slice(begin, begin + len(response.tokens))
        groups.tokens_PGT[columns] = response.tokens
        groups.response_mask_PGT[columns] = response.sampled
        groups.behavior_logp_PGT[columns] = response.logp
        groups.correct_PG[p, g] = bool(response.correct)
        groups.decided_PG[p, g] = response.correct is not None
        groups.reward_PG[p, g] = response.reward
        groups.teaches_PG[p, g] = response.teaches
    return exchange.placed(groups, sharding.layout_of_rows(groups, self.mesh))

  def scored(self, score: Callable[[Groups], Array]) -> 'RecordedSampler':
    """Returns a sampler of the same record with log-probabilities of `score`.

    A start scores the record with the first weights, also when it resumes, so that mu
    is the same policy in all steps.
    """
    groups = []
    for begin in range(0, len(self.record.groups), self.count):
      chosen = self.record.groups[begin : begin + self.count]
      logp_PGT = exchange.whole(score(self._padded(chosen, 0)))
      for group, logp_GT in zip(chosen, logp_PGT, strict=False):
        columns = logp_GT[:, len(group.prompt) :]
        responses = [
          response._replace(logp=logp_T[: len(response.tokens)])
          for response, logp_T in zip(group.responses, columns, strict=True)
        ]
        groups.append(group._replace(responses=responses))
    return dataclasses.replace(self, record=self.record._replace(groups=groups))
