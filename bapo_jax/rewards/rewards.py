"""Verifies batches of responses, and computes the rewards for the learner.

Rules that may hang run in worker processes, all others in this process. An undecided
response has no reward: it is in no mean and not in the loss, and is counted.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import custom_code
from bapo_jax.rewards import score, verifiers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import Environment, Verification
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.shaping import ShapingRule
from bapo_jax.rewards.verifier_pool import VerifierPool
from bapo_jax.runtime import exchange
from bapo_jax.types import Groups, ended, response_length


class PendingVerdicts(NamedTuple):
  """The verdicts of one submission; worker processes may still compute some of them."""

  # A verdict, or the future of the verdicts of several samples and an index into them.
  verdicts: list[Verdict | tuple[Future[list[Verdict]], int]]
  samples: Sequence[Sample]

  def result(self) -> list[Verdict]:
    """Waits for all verdicts and returns them in the order of submission."""
    return [self.one(i) for i in range(len(self.verdicts))]

  def one(self, i: int) -> Verdict:
    """Waits for the verdict on samples[i] and returns it."""
    verdict = self.verdicts[i]
    if isinstance(verdict, Verdict):
      return verdict
    future, index = verdict
    return future.result()[index]

  def future(self, i: int) -> Future[list[Verdict]] | None:
    """Returns the future of the verdict on samples[i]; None if the verdict is known."""
    verdict = self.verdicts[i]
    return None if isinstance(verdict, Verdict) else verdict[0]


class Verifier:
  """Verifies responses by rules: right, wrong or undecided, with a reason and a reward.

  Custom functions and rules that may hang run in worker processes. These start at once
  if k.rule needs them, else when a response does. Functions of the running Python
  program (`custom_code.register`) cannot be sent to a process; they run in a thread.
  """

  knob = 'rewards.rule'

  def __init__(self, k: Verification, environment: Environment | None = None):
    """Uses the rules of `k`; `environment`, if any, answers turns of responses."""
    self.rule = k.rule
    self.environment: EnvironmentProcesses | None = None
    if environment is not None:
      self.environment = EnvironmentProcesses(environment)
    # Whether verdicts have rewards of steps.
    self.steps = bool(getattr(k.custom, 'steps', ''))
    self._knobs = k
    self._scorer = score.make(k)
    self.custom = bool(
      custom_code.paths_in(k.rule)
    )  # reads more than response and answer
    self._here = any(map(custom_code.is_registered, self._scorer.rules))
    self._thread: ThreadPoolExecutor | None = None
    self._pool = VerifierPool(k) if self._slow('') and not self._here else None

  def submit(self, samples: Sequence[Sample]) -> PendingVerdicts:
    """Starts to verify samples; samples without a rule are verified by k.rule."""
    verdicts: list[Any] = [None] * len(samples)
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
        self._pool = VerifierPool(self._knobs)
      futures = self._pool.submit(requests) if self._pool else []
    for group, future in zip(groups, futures, strict=True):
      for index, i in enumerate(group):
        verdicts[i] = future, index
    rest = [i for i, verdict in enumerate(verdicts) if verdict is None]
    for i, verdict in zip(rest, self._scorer([samples[i] for i in rest]), strict=True):
      verdicts[i] = verdict
    return PendingVerdicts(verdicts, samples)

  def _slow(self, rule):
    """Returns whether another process or thread verifies this rule; '' is k.rule."""
    names = (rule or self.rule).split(',')
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


class EnvironmentProcesses(Verifier):
  """Calls an environment as reward functions are called; its verdicts have messages."""

  knob = 'rollout.environment'

  def __init__(self, k: Environment):
    super().__init__(k)
    self.max_turns = k.max_turns
    self.role: str = k.custom.role
    self.failed = False  # whether a failure has been reported


def shaped(
  groups: Groups,
  texts: Sequence[str],
  *,
  eos: tuple[int, ...],
  rule: str,
  rules: Sequence[str] = (),
  longest: int,
  shaping: ShapingRule,
  cut_length: int | None = None,
) -> Groups:
  """Returns verified groups with shaped rewards and the mask of trained responses.

  Args:
    texts: P * G responses; '' for responses that another process verifies.
    rules: the rule of each problem id, for the format bonus; '' or () selects `rule`.
    cut_length: see `types.ended`.
  """
  if shaping.identity:
    return groups
  id_B = np.repeat(exchange.whole(groups.id_P), groups.correct_PG.shape[1])
  rule_B = [(rules[i] if rules and i >= 0 else '') or rule for i in id_B]
  first_B = [rule.partition(',')[0] for rule in rule_B]
  readers = (verifiers.READERS.get(rule, lambda _: None) for rule in first_B)
  answers = (read(text) for read, text in zip(readers, texts, strict=True))
  # No reader finds an answer in '', so the sum counts every response once.
  formatted_B = exchange.total([answer is not None for answer in answers]) > 0
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
