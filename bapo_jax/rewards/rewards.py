"""Verdicts on a batch of responses, and the rewards that the learner sees.

1. `Verifier` verifies: rules that may hang in worker processes, the others here;
2. `shape` makes rewards of verdicts: format, length and truncation.

An undecided response earns what a wrong one earns, and is counted.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.rewards import knobs, verifiers
from bapo_jax.rewards.verdict import Verdict
from bapo_jax.rewards.verifier_pool import VerifierPool
from bapo_jax.runtime import exchange
from bapo_jax.types import Groups

_R = knobs.RewardsConfig()
_D = knobs.ShapingConfig()


class PendingVerdicts(NamedTuple):
  """The verdicts of one submission; worker processes may still be at some of them."""

  found: list[Verdict | Future[Verdict]]
  texts: Sequence[str]
  rules: Sequence[str]

  def result(self) -> list[Verdict]:
    """The verdicts in the order of submission; waits for them."""
    return [self.one(i) for i in range(len(self.found))]

  def one(self, i: int) -> Verdict:
    """The verdict on texts[i]; waits for it."""
    verdict = self.found[i]
    if isinstance(verdict, Verdict):
      return verdict
    verdict = verdict.result()
    if verdict.right is None and verdict.answer is None:  # its worker is gone
      answer = verifiers.READERS[self.rules[i]](self.texts[i])
      verdict = verdict._replace(answer=answer and ''.join(answer.split()))
    return verdict


class Verifier:
  """Verdicts by a rule's name: right, wrong or undecided, and why.

  Args:
    rule: a key of verifiers.RULES, for problems that name none.
    strict: of verifiers.verify.
    workers, deadline, batch_deadline, memory_mb, recycle: of the VerifierPool. It is
      started at once where `rule` needs it, so that it is warm when the first responses
      come; else by the first response that needs it.
  """

  def __init__(
    self,
    rule: str = _R.rule,
    *,
    strict: bool = _R.strict,
    workers: int = _R.workers,
    deadline: float = _R.deadline,
    batch_deadline: float = _R.batch_deadline,
    memory_mb: int = _R.memory_mb,
    recycle: int = _R.recycle,
  ):
    self.rule, self._workers, self._strict = rule, workers, strict
    self._limits: dict[str, Any] = {
      'strict': strict,
      'deadline': deadline,
      'batch_deadline': batch_deadline,
      'memory_mb': memory_mb,
      'recycle': recycle,
    }
    self._pool: VerifierPool | None = None
    if rule in verifiers.POOLED:
      self._start_pool()

  def _start_pool(self) -> VerifierPool:
    if self._pool is None:
      self._pool = VerifierPool(self._workers, **self._limits)
    return self._pool

  def submit(
    self, answers: Sequence[str], texts: Sequence[str], rules: Sequence[str] = ()
  ) -> PendingVerdicts:
    """Starts verifying texts[i] against answers[i]; `result()` waits for the verdicts.

    Args:
      rules: a rule's name per text; '', or none at all, for the verifier's own.

    Raises:
      ValueError: answers, texts and rules are not equally many.
    """
    names = [rule or self.rule for rule in rules or [''] * len(texts)]
    rows = list(zip(names, answers, texts, strict=True))
    pooled = [row for row in rows if row[0] in verifiers.POOLED]
    futures = iter(self._start_pool().submit(pooled) if pooled else [])
    found = [
      next(futures)
      if rule in verifiers.POOLED
      else verifiers.verify(rule, answer, text, strict=self._strict)
      for rule, answer, text in rows
    ]
    return PendingVerdicts(found, texts, names)

  def slow(self, rules: Iterable[str]) -> bool:
    """Whether any of these rules takes so long that it is best submitted early."""
    return not verifiers.POOLED.isdisjoint(rule or self.rule for rule in rules)

  def close(self) -> None:
    """Ends the worker processes; the verifier may be used again."""
    if self._pool is not None:
      self._pool.close()
      self._pool = None


def plain(groups: Groups, texts: Sequence[str]) -> Groups:
  """The groups as they are: a reward is a verdict."""
  del texts
  return groups


def shape(
  correct_PG: Array,
  length_PG: Array,
  truncated_PG: Array,
  formatted_PG: Array,
  *,
  longest: int,
  format_bonus: float = _D.format_bonus,
  overlong_penalty: float = _D.overlong_penalty,
  overlong_cache: int = _D.overlong_cache,
  truncated: str = _D.truncated,
) -> tuple[Array, Array]:
  """(reward_PG f32, teaches_PG bool) from verdicts; the defaults change nothing.

  Args:
    correct_PG: bool. truncated_PG: bool, no end token. formatted_PG: bool, an answer
      stands in its place. length_PG: tokens, the end token included.
    longest: L_max, the most tokens a response may have.
    format_bonus: added where an answer is found, right or wrong.
    overlong_penalty: DAPO's soft overlong punishment times this factor; half of it is
      subtracted in full at `longest`, not at all up to longest - overlong_cache,
      linearly between. Half, since DAPO's rewards are -1 and 1 (arXiv:2503.14476,
      equations 7 and 13) and a verdict is 0 or 1: (R + R_length + 1) / 2 is one and
      the same reward, and has the same standardised advantages.
    truncated: the worth of the verdict on a truncated response. 'verified': that of any
      other; 'wrong': nothing; 'masked': its tokens do not teach (DAPO's overlong
      filtering), while its reward stays in the mean of its group.
  """
  verdict_PG = correct_PG & ~truncated_PG if truncated == 'wrong' else correct_PG
  over_PG = (length_PG - (longest - overlong_cache)) / overlong_cache
  reward_PG = (
    verdict_PG.astype(jnp.float32)
    + format_bonus * formatted_PG
    - overlong_penalty / 2 * jnp.clip(over_PG, 0, 1)
  )
  teaches_PG = ~truncated_PG if truncated == 'masked' else jnp.ones_like(correct_PG)
  return reward_PG.astype(jnp.float32), teaches_PG


def shaped(
  groups: Groups,
  texts: Sequence[str],
  *,
  eos: tuple[int, ...],
  rule: str,
  rules: Sequence[str] = (),
  longest: int,
  format_bonus: float = _D.format_bonus,
  overlong_penalty: float = _D.overlong_penalty,
  overlong_cache: int = _D.overlong_cache,
  truncated: str = _D.truncated,
) -> Groups:
  """Groups with the rewards of `shape`, and which of their responses teach.

  Args:
    texts: the responses, P * G of them.
    eos: tokens that end a response.
    rule: the rule whose format earns the bonus, a key of verifiers.READERS; it is that
      of the problems that name none.
    rules: of each problem, by its id; '' or (): `rule`.
    longest, format_bonus, overlong_penalty, overlong_cache, truncated: of `shape`.
  """
  if not format_bonus and not overlong_penalty and truncated == 'verified':
    return plain(groups, texts)
  id_B = np.repeat(exchange.whole(groups.id_P), groups.correct_PG.shape[1])
  own = [(rules[i] if rules and i >= 0 else '') or rule for i in id_B]
  formatted = (verifiers.READERS[r](x) for r, x in zip(own, texts, strict=True))
  # A response of another process is '' here, in which no format finds an answer.
  formatted_B = exchange.total([found is not None for found in formatted]) > 0
  response_mask_PGT = groups.response_mask_PGT
  reward_PG, teaches_PG = shape(
    groups.correct_PG,
    response_mask_PGT.sum(2),
    ~(response_mask_PGT & jnp.isin(groups.tokens_PGT, jnp.asarray(eos))).any(2),
    jnp.asarray(formatted_B).reshape(groups.correct_PG.shape),
    longest=longest,
    format_bonus=format_bonus,
    overlong_penalty=overlong_penalty,
    overlong_cache=overlong_cache,
    truncated=truncated,
  )
  filled_P = groups.completed_step_P >= 0  # an empty seat earns nothing
  return groups._replace(
    reward_PG=jnp.where(filled_P[:, None], reward_PG, 0), teaches_PG=teaches_PG
  )
