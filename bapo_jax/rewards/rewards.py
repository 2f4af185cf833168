"""Verifies batches of responses, and computes the rewards for the learner.

Rules that may hang run in worker processes, all others in this process. An undecided
response has no reward: it is in no mean and not in the loss, and is counted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import custom_code
from bapo_jax.rewards import score, verifiers
from bapo_jax.rewards.knobs import Environment, Verification
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.shaping import ShapingRule
from bapo_jax.rewards.verifier_pool import VerifierPool
from bapo_jax.types import Groups, ended, response_length


class PendingVerdicts(NamedTuple):
  """The verdicts of one submission; worker processes may still compute some of them.

  Of turns that an environment answers, these are messages.
  """

  verdicts: Sequence[Any]  # Verdict or Message; None if it is late
  samples: Sequence[Sample]
  # Index of a sample -> the future of the verdicts of several samples, and an index
  # into them.
  late: Mapping[int, tuple[Future[list[Any]], int]] = MappingProxyType({})

  def result(self) -> list[Any]:
    """Waits for all verdicts and returns them in the order of submission."""
    return [self.one(i) for i in range(len(self.verdicts))]

  def one(self, i: int) -> Any:
    """Waits for the verdict on samples[i] and returns it."""
    if i not in self.late:
      return self.verdicts[i]
    future, index = self.late[i]
    return future.result()[index]

  def future(self, i: int) -> Future[list[Any]] | None:
    """Returns the future of the verdict on samples[i]; None if the verdict is known."""
    return self.late[i][0] if i in self.late else None


class Verifier:
  """Verifies responses by rules: right, wrong or undecided, with a reason and a reward.

  Given an Environment as `k`, it answers turns instead of verifying responses.

  Custom functions and rules that may hang run in worker processes. These start at once
  if k.rule needs them, else when a response does. Functions of the running Python
  program (`custom_code.register`) cannot be sent to a process; they run in a thread.
  """

  def __init__(self, k: Verification, environment: Environment | None = None):
    """Uses the rules of `k`; `environment`, if any, answers turns of responses."""
    self.k: Any = k
    self.environment = Verifier(environment) if environment else None
    self.failed = False  # whether a failure of the environment has been reported
    # Whether verdicts have rewards of steps.
    self.steps = bool(getattr(k.custom, 'steps', ''))
    self._scorer = score.make(k)
    paths = custom_code.paths_in(k.rule)
    self.custom = bool(paths)  # reads more than response and answer
    self._here = any(map(custom_code.is_registered, paths))
    self._thread: ThreadPoolExecutor | None = None
    self._pool = VerifierPool(k) if self._slow('') and not self._here else None

  def submit(self, samples: Sequence[Sample]) -> PendingVerdicts:
    """Starts to verify samples; samples without a rule are verified by k.rule."""
    if self._here or self._scorer.together:
      groups = [list(range(len(samples)))] if samples else []
    else:
      groups = [[i] for i, sample in enumerate(samples) if self._slow(sample.rule)]
    requests = [[samples[i] for i in group] for group in groups]
    if self._here:
      self._thread = self._thread or ThreadPoolExecutor(1)
      futures = [self._thread.submit(self._scorer, request) for request in requests]
    else:
      if requests and self._pool is None:
        self._pool = VerifierPool(self.k)
      futures = self._pool.submit(requests) if self._pool else []
    late = {
      i: (future, index)
      for group, future in zip(groups, futures, strict=True)
      for index, i in enumerate(group)
    }
    known = iter(self._scorer([x for i, x in enumerate(samples) if i not in late]))
    verdicts = [None if i in late else next(known) for i in range(len(samples))]
    return PendingVerdicts(verdicts, samples, late)

  def _slow(self, rule):
    """Returns whether another process or thread verifies this rule; '' is k.rule."""
    names = (rule or self.k.rule).split(',')
    return self.custom or not verifiers.POOLED.isdisjoint(names)

  def starts_early(self, rules: Iterable[str]) -> bool:
    """Returns whether samples of these rules should be submitted while others decode.

    Slow rules should, except for batched functions: these wait for all responses.
    """
    return any(map(self._slow, rules)) and not self._scorer.batched

  def close(self) -> None:
    """Ends the worker processes and the thread; a later `submit` starts new ones."""
    if self.environment is not None:
      self.environment.close()
    if self._pool is not None:
      self._pool.close()
      self._pool = None
    if self._thread is not None:
      self._thread.shutdown(wait=False, cancel_futures=True)
      self._thread = None


def shaped(
  groups: Groups,
  formatted_B: np.ndarray,
  *,
  eos: tuple[int, ...],
  longest: int,
  shaping: ShapingRule,
  cut_length: int | None = None,
) -> Groups:
  """Returns verified groups with shaped rewards and the mask of trained responses.

  Args:
    formatted_B: bool, `Verdict.formatted` of P * G responses.
    cut_length: see `types.ended`.
  """
  if shaping.identity:
    return groups
  response_mask_PGT = groups.response_mask_PGT
  limit = {} if shaping.custom else {'longest': longest}
  shape: Callable[..., tuple[Array, Array]] = cast(Any, shaping)
  reward_PG, teaches_PG = shape(
    groups.reward_PG,
    response_length(response_mask_PGT),
    ~ended(
      response_mask_PGT, jnp.isin(groups.tokens_PGT, jnp.asarray(eos)), cut_length
    ),
    jnp.asarray(formatted_B).reshape(groups.correct_PG.shape),
    **limit,
  )
  # Empty seats and undecided responses have no reward.
  rewarded_PG = groups.decided_PG & (groups.completed_step_P >= 0)[:, None]
  return groups._replace(
    reward_PG=jnp.where(rewarded_PG, reward_PG, 0),
    teaches_PG=teaches_PG & groups.decided_PG,
  )
