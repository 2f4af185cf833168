"""Verdicts on a batch of responses, and what the learner is paid for them.

1. `Judge` asks a verifier: those that may hang in worker processes, the others here;
2. `shape` turns verdicts into rewards: format, length and truncation, apart from them.

An undecided response earns what a wrong one earns, and is counted.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bapo_jax.rewards import verifier_pool, verifiers
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.types import Groups

NEUTRAL = {'format_bonus': 0, 'overlong_penalty': 0, 'truncated': 'judged'}
TRUNCATED = ('judged', 'wrong', 'masked')


class PendingVerdicts(NamedTuple):
  """Verdicts that are being made."""

  found: list[Verdict | None]  # None: a worker process has it
  waiting: list[int]  # which those are
  texts: Sequence[str]
  rules: Sequence[str]
  ticket: verifier_pool.Ticket

  def result(self) -> list[Verdict]:
    """All of them, in the order of submission; waits."""
    for i, verdict in zip(self.waiting, self.ticket.result(), strict=True):
      if verdict.right is None and verdict.answer is None:  # its worker is gone
        answer = verifiers.READERS[self.rules[i]](self.texts[i])
        verdict = verdict._replace(answer=answer and ''.join(answer.split()))
      self.found[i] = verdict
    return [verdict for verdict in self.found if verdict is not None]


class Verifier:
  """Verdicts by a rule's name: right, wrong or undecided, and why.

  Args:
    rule: a key of verifiers.RULES.
    pool: keywords of VerifierPool. It is started at once where the rule needs it, so
      that it is warm when the first responses come.
  """

  def __init__(self, rule: str, **pool):
    self._rule, self._knobs = rule, pool
    self._pool: verifier_pool.VerifierPool | None = None
    if rule in verifiers.POOLED:
      self._start_pool()

  def _start_pool(self) -> verifier_pool.VerifierPool:
    if self._pool is None:
      self._pool = verifier_pool.VerifierPool(**self._knobs)
    return self._pool

  def submit(
    self, answers: Sequence[str], texts: Sequence[str], rules: Sequence[str] = ()
  ) -> PendingVerdicts:
    """Starts judging texts[i] against answers[i]; `result()` waits for the verdicts.

    Args:
      rules: a rule's name per text; '', or none at all, for the verifier's own.
    """
    names = [rule or self._rule for rule in rules or [''] * len(texts)]
    found, waiting = [], []
    for i, (rule, answer, text) in enumerate(zip(names, answers, texts, strict=True)):
      slow = rule in verifiers.POOLED
      found.append(None if slow else verifiers.RULES[rule](answer, text))
      if slow:
        waiting.append(i)
    ticket = verifier_pool.Ticket([])
    if waiting:
      columns = ([x[i] for i in waiting] for x in (names, answers, texts))
      ticket = self._start_pool().submit(*columns)
    return PendingVerdicts(found, waiting, texts, names, ticket)

  def slow(self, rules: Iterable[str]) -> bool:
    """Whether any of these rules takes so long that it is submitted early."""
    return not verifiers.POOLED.isdisjoint(rule or self._rule for rule in rules)

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
  correct_PG,
  length_PG,
  truncated_PG,
  formatted_PG,
  *,
  longest: int,
  format_bonus: float = 0.0,
  overlong_penalty: float = 0.0,
  overlong_cache: int = 1,
  truncated: str = 'judged',
):
  """(reward_PG f32, teaches_PG bool) from verdicts; the defaults change nothing.

  Args:
    correct_PG: bool. truncated_PG: bool, no end token. formatted_PG: bool, there is an
      answer where it is wanted. length_PG: tokens, the end token included.
    longest: L_max, the most tokens a response may have.
    format_bonus: added where an answer is found, right or wrong.
    overlong_penalty: subtracted in full at `longest`, not at all up to
      longest - overlong_cache, linearly between: DAPO's soft overlong punishment
      (arXiv:2503.14476, equation 13) times this factor.
    truncated: what the verdict on a truncated response is worth. 'judged': as on any
      other; 'wrong': nothing; 'masked': its tokens do not teach (DAPO's overlong
      filtering), while its reward stays in the mean of its group.
  """
  verdict_PG = correct_PG & ~truncated_PG if truncated == 'wrong' else correct_PG
  over_PG = (length_PG - (longest - overlong_cache)) / overlong_cache
  reward_PG = (
    verdict_PG.astype(jnp.float32)
    + format_bonus * formatted_PG
    - overlong_penalty * jnp.clip(over_PG, 0, 1)
  )
  teaches_PG = ~truncated_PG if truncated == 'masked' else jnp.ones_like(correct_PG)
  return reward_PG.astype(jnp.float32), teaches_PG


def shaped(groups: Groups, texts: Sequence[str], *, eos, rule: str, **knobs) -> Groups:
  """Groups with the rewards of `shape`; a masked response has no chosen tokens left.

  Args:
    texts: the responses, P * G of them. rule: whose format it is. knobs: of `shape`.
  """
  if all(knobs[name] == value for name, value in NEUTRAL.items()):
    return plain(groups, texts)
  reader = verifiers.READERS[rule]
  formatted_B = np.asarray([reader(text) is not None for text in texts], bool)
  response_mask_PGT = groups.response_mask_PGT
  reward_PG, teaches_PG = shape(
    groups.correct_PG,
    response_mask_PGT.sum(2),
    ~(response_mask_PGT & jnp.isin(groups.tokens_PGT, jnp.asarray(eos))).any(2),
    jnp.asarray(formatted_B).reshape(groups.correct_PG.shape),
    **knobs,
  )
  here_P = groups.completed_step_P >= 0  # an empty seat earns nothing
  groups = groups._replace(reward_PG=jnp.where(here_P[:, None], reward_PG, 0))
  if knobs['truncated'] != 'masked':
    return groups
  response_mask_PGT &= teaches_PG[..., None]
  return groups._replace(
    response_mask_PGT=response_mask_PGT,
    policy_version_PGT=jnp.where(response_mask_PGT, groups.policy_version_PGT, -1),
    behavior_logp_PGT=jnp.where(response_mask_PGT, groups.behavior_logp_PGT, 0),
  )


def check(rule: str, shaping: dict, longest: int) -> None:
  """Raises ValueError where rule or shaping make no sense."""
  if rule not in verifiers.RULES:
    raise ValueError(
      f'rewards.rule: no rule named {rule!r}; choose one of {sorted(verifiers.RULES)}'
    )
  if shaping['truncated'] not in TRUNCATED:
    raise ValueError(
      f'rewards.shaping.truncated={shaping["truncated"]!r}: choose one of {TRUNCATED}'
    )
  for knob in ('format_bonus', 'overlong_penalty'):
    if shaping[knob] < 0:
      raise ValueError(f'rewards.shaping.{knob}={shaping[knob]}: give 0 or more')
  cache = shaping['overlong_cache']
  if not 1 <= cache <= longest:
    raise ValueError(
      f'rewards.shaping.overlong_cache={cache} tokens: give 1 to sampler.max_new_tokens={longest}'
    )
