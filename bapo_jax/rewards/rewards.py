"""Verifies batches of responses, and computes the rewards for the learner.

Rules that may hang run in worker processes, all others in this process. An undecided
response earns the reward of a wrong one, and is counted.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.rewards import verifiers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import RewardsConfig, ShapingConfig
from bapo_jax.rewards.verifier_pool import VerifierPool
from bapo_jax.runtime import exchange
from bapo_jax.types import Groups


class PendingVerdicts(NamedTuple):
  """The verdicts of one `submit`, some of which worker processes may still compute."""

  verdicts: list[Verdict | Future[Verdict]]
  texts: Sequence[str]
  rules: Sequence[str]

  def result(self) -> list[Verdict]:
    """Waits for all verdicts and returns them in the order of submission."""
    return [self.one(i) for i in range(len(self.verdicts))]

  def one(self, i: int) -> Verdict:
    """Waits for the verdict on texts[i] and returns it."""
    verdict = self.verdicts[i]
    if isinstance(verdict, Verdict):
      return verdict
    verdict = verdict.result()
    # A killed worker did not report the extracted answer, which votes need.
    if verdict.right is None and verdict.answer is None:
      answer = verifiers.READERS[self.rules[i]](self.texts[i])
      verdict = verdict._replace(answer=answer and ''.join(answer.split()))
    return verdict


class Verifier:
  """Verifies responses by rules: right, wrong or undecided, with a reason.

  Starts worker processes at once if k.rule needs them, otherwise when first needed.
  """

  def __init__(self, k: RewardsConfig):
    self.rule, self._knobs = k.rule, k
    self._pool = VerifierPool(k) if k.rule in verifiers.POOLED else None

  def submit(
    self, answers: Sequence[str], texts: Sequence[str], rules: Sequence[str] = ()
  ) -> PendingVerdicts:
    """Starts to verify response texts[i] against the right answer answers[i].

    rules[i] is the rule for texts[i]; '', or an empty sequence, selects k.rule.
    Raises a ValueError if sequences differ in length.
    """
    names = [rule or self.rule for rule in rules or [''] * len(texts)]
    requests = list(zip(names, answers, texts, strict=True))
    pooled = [request for request in requests if request[0] in verifiers.POOLED]
    if pooled and self._pool is None:
      self._pool = VerifierPool(self._knobs)
    futures = iter(self._pool.submit(pooled) if self._pool else [])
    verdicts = [
      next(futures)
      if request[0] in verifiers.POOLED
      else verifiers.verify(*request, strict=self._knobs.strict)
      for request in requests
    ]
    return PendingVerdicts(verdicts, texts, names)

  def slow(self, rules: Iterable[str]) -> bool:
    """Returns whether any rule is so slow that verdicts should be requested early."""
    return not verifiers.POOLED.isdisjoint(rule or self.rule for rule in rules)

  def close(self) -> None:
    """Ends the worker processes; a later `submit` starts new ones."""
    if self._pool is not None:
      self._pool.close()
      self._pool = None


def plain(groups: Groups, texts: Sequence[str]) -> Groups:
  """Returns the groups unchanged: rewards are 1 for right responses, otherwise 0."""
  del texts
  return groups


def shape(
  correct_PG: Array,
  length_PG: Array,
  truncated_PG: Array,
  formatted_PG: Array,
  *,
  longest: int,
  k: ShapingConfig,
) -> tuple[Array, Array]:
  """Computes rewards (f32) and a mask of the responses that enter the loss (bool).

  The overlong penalty is DAPO's (arXiv:2503.14476, equation 13): 0 for lengths up to
  longest - overlong_cache, then linear, and full at `longest`. DAPO adds the penalty to
  rewards of -1 and 1 (equation 7). Here rewards are 0 and 1, and half of the penalty is
  subtracted: (R + R_length + 1) / 2 gives the same standardised advantages.

  truncated='masked' is DAPO's overlong filtering: a truncated response is not in the
  loss, but its reward stays in the mean of its group.

  Args:
    length_PG: tokens of the responses, end token included.
    truncated_PG: bool, True for a response without end token.
    formatted_PG: bool, True if the response has an answer where the rule looks.
    longest: L_max, the maximum number of tokens of a response.
  """
  verdict_PG = correct_PG & ~truncated_PG if k.truncated == 'wrong' else correct_PG
  over_PG = (length_PG - (longest - k.overlong_cache)) / k.overlong_cache
  reward_PG = (
    verdict_PG.astype(jnp.float32)
    + k.format_bonus * formatted_PG
    - k.overlong_penalty / 2 * jnp.clip(over_PG, 0, 1)
  )
  teaches_PG = ~truncated_PG if k.truncated == 'masked' else jnp.ones_like(correct_PG)
  return reward_PG.astype(jnp.float32), teaches_PG


def shaped(
  groups: Groups,
  texts: Sequence[str],
  *,
  eos: tuple[int, ...],
  rule: str,
  rules: Sequence[str] = (),
  longest: int,
  k: ShapingConfig,
) -> Groups:
  """Returns verified groups with the rewards and the loss mask that `shape` computes.

  Args:
    texts: P * G responses; '' for responses that another process verifies.
    rules: the rule of each problem id, for the format bonus; '' or () selects `rule`.
  """
  if not k.format_bonus and not k.overlong_penalty and k.truncated == 'verified':
    return groups
  id_B = np.repeat(exchange.whole(groups.id_P), groups.correct_PG.shape[1])
  rule_B = [(rules[i] if rules and i >= 0 else '') or rule for i in id_B]
  answers = (verifiers.READERS[r](x) for r, x in zip(rule_B, texts, strict=True))
  # No reader finds an answer in '', so the sum counts every response once.
  formatted_B = exchange.total([answer is not None for answer in answers]) > 0
  response_mask_PGT = groups.response_mask_PGT
  reward_PG, teaches_PG = shape(
    groups.correct_PG,
    response_mask_PGT.sum(2),
    ~(response_mask_PGT & jnp.isin(groups.tokens_PGT, jnp.asarray(eos))).any(2),
    jnp.asarray(formatted_B).reshape(groups.correct_PG.shape),
    longest=longest,
    k=k,
  )
  filled_P = groups.completed_step_P >= 0  # an empty seat has no reward
  return groups._replace(
    reward_PG=jnp.where(filled_P[:, None], reward_PG, 0), teaches_PG=teaches_PG
  )
