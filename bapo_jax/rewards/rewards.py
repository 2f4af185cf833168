"""Verdicts on a batch of responses, and what the learner is paid for them.

1. `Judge` asks a verifier: those that may hang in worker processes, the others here;
2. `shape` turns verdicts into rewards: format, length and truncation, apart from them.

An undecided response earns what a wrong one earns, and is counted.
"""

from collections.abc import Sequence
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

  found: list[Verdict | None]  # None: a worker process is at it
  waiting: list[int]  # which those are
  texts: Sequence[str]
  rules: Sequence[str]
  ticket: verifier_pool.Ticket

  def result(self) -> list[Verdict]:
    """All of them, in the order asked for; waits."""
    for i, verdict in zip(self.waiting, self.ticket.result(), strict=True):
      if verdict.right is None and verdict.said is None:  # its worker is gone
        said = verifiers.READERS[self.rules[i]](self.texts[i])
        verdict = verdict._replace(said=said and ''.join(said.split()))
      self.found[i] = verdict
    return self.found


class Verifier:
  """verify(answers, texts) by a rule's name; counts what it could not decide.

  Args:
    rule: a key of verifiers.RULES.
    pool: keywords of pool.Pool. It is started at once where the rule needs it, so that
      it is warm when the first responses come.
  """

  def __init__(self, rule: str, **pool):
    self._rule, self._knobs, self._pools = rule, pool, []
    self._judged = self._undecided = 0
    if rule in verifiers.POOLED:
      self._pool()

  def _pool(self) -> verifier_pool.VerifierPool:
    if not self._pools:
      self._pools.append(verifier_pool.VerifierPool(**self._knobs))
    return self._pools[0]

  def submit(
    self, answers: Sequence[str], texts: Sequence[str], rules=None
  ) -> PendingVerdicts:
    """Starts judging texts[i] against answers[i]; `result()` gives the verdicts.

    Args:
      rules: a rule's name for each text; '' or none at all stand for the judge's own.
    """
    rules = [rule or self._rule for rule in rules or [''] * len(texts)]
    found, waiting = [], []
    for i, (rule, answer, text) in enumerate(zip(rules, answers, texts, strict=True)):
      slow = rule in verifiers.POOLED
      found.append(None if slow else verifiers.RULES[rule](answer, text))
      if slow:
        waiting.append(i)
    ticket = verifier_pool.Ticket([])
    if waiting:
      asked = ([x[i] for i in waiting] for x in (rules, answers, texts))
      ticket = self._pool().submit(*asked)
    return PendingVerdicts(found, waiting, texts, rules, ticket)

  def __call__(
    self, answers: Sequence[str], texts: Sequence[str], rules=None
  ) -> np.ndarray:
    """bool: texts[i] is right. Waits, and counts."""
    return self.settle(self.submit(answers, texts, rules).result())

  def settle(self, verdicts: Sequence[Verdict]) -> np.ndarray:
    """bool: they are right. Counts."""
    self._judged += len(verdicts)
    self._undecided += sum(verdict.right is None for verdict in verdicts)
    return right(verdicts)

  def slow(self, rules: Sequence[str]) -> bool:
    """Does any of these rules take long enough to be asked early?"""
    return not verifiers.POOLED.isdisjoint(rule or self._rule for rule in rules)

  def undecided(self) -> float:
    """Share of the responses called for since it was last asked; 0 without any."""
    share = self._undecided / max(self._judged, 1)
    self._judged = self._undecided = 0
    return share

  def close(self) -> None:
    """Ends the worker processes; the judge may be asked again."""
    while self._pools:
      self._pools.pop().close()


def right(verdicts: Sequence[Verdict]) -> np.ndarray:
  """bool; undecided is not right."""
  return np.asarray([verdict.right is True for verdict in verdicts], bool)


def verify(answers: Sequence[str], texts: Sequence[str], rule='aime') -> np.ndarray:
  """One verdict (bool) a text, found here and now; for rules that cannot hang."""
  judge = verifiers.RULES[rule]
  pairs = zip(answers, texts, strict=True)
  return right([judge(answer, text) for answer, text in pairs])


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
  chosen_PGT = groups.chosen_PGT
  reward_PG, teaches_PG = shape(
    groups.correct_PG,
    chosen_PGT.sum(2),
    ~(chosen_PGT & jnp.isin(groups.tokens_PGT, jnp.asarray(eos))).any(2),
    jnp.asarray(formatted_B).reshape(groups.correct_PG.shape),
    **knobs,
  )
  here_P = groups.born_P >= 0  # an empty seat earns nothing
  groups = groups._replace(reward_PG=jnp.where(here_P[:, None], reward_PG, 0))
  if knobs['truncated'] != 'masked':
    return groups
  chosen_PGT &= teaches_PG[..., None]
  return groups._replace(
    chosen_PGT=chosen_PGT,
    born_PGT=jnp.where(chosen_PGT, groups.born_PGT, -1),
    logp_PGT=jnp.where(chosen_PGT, groups.logp_PGT, 0),
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
      f'rewards.shaping.overlong_cache={cache} tokens: give 1 to sampler.new={longest}'
    )
