"""Chooses the prompts of each round: one class per rule.

A rule maps (history, key, count) to the ids of `count` different problems. `history` is
what the run knows when it submits the round, in the order of the program and never of
time, and `key` is (seed, number of the round). So the prompts are the same in all
processes, on any mesh and after a resume.

`Shuffled` serves epochs: a function of the key alone.
`ByDifficulty` prefers problems whose pass rate is in a window.
"""

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import pydantic

from bapo_jax.knobs import Auto, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.runtime import exchange, hosts
from bapo_jax.types import GIVEN, Groups, History

Key = tuple[int, int]  # (seed, number of the round), a seed of np.random.default_rng


class PromptRule(Part):
  """Chooses the prompts of a round; their number and length are knobs of all rules.

  A function is called with (history, key, count) and returns ids: `history` is
  `types.History`, read-only NumPy arrays by problem; `key` is (seed, number of the
  round), as `np.random.default_rng(key)` takes it. It is also called on two made-up
  histories before the run. With several processes, the ids of the first one count.
  """

  arguments = ('history', 'key', 'count')
  traced = False
  reads_history: ClassVar[bool] = True  # the history is counted, and saved

  count: Auto[int] = knob(64, 'Prompts per learner step.', least=1, most=65536)
  max_prompt_tokens: Auto[int] = knob(
    17, 'Longest prompt, in tokens.', least=1, most=1 << 20
  )
  overlong: Literal['drop', 'refuse'] = knob(
    'drop', 'Training prompts over the limit: drop and count, or refuse to start.'
  )

  def __call__(self, history: History, key: Key, count: int) -> np.ndarray:
    """Returns the ids of `count` different problems; there are at least as many."""
    raise NotImplementedError

  def fault(self, result, example) -> str:
    """Says why a result cannot be the ids of a round; or ''."""
    count = example['count']
    if not hasattr(result, '__len__'):
      return f'returns {type(result).__name__}; return an array of {count} ids'
    id_P = np.asarray(result)
    if id_P.shape != (count,) or id_P.dtype.kind not in 'iu':
      shape = f'{id_P.dtype}{[*id_P.shape]}'
      return f'returns {shape}; return prompts.count={count} integers'
    largest = len(example['history'].tries_N) - 1
    outside_P = id_P[(id_P < 0) | (id_P > largest)]
    if len(outside_P):
      return f'returns the id {outside_P[0]}; return ids from 0 to {largest}'
    unique_P, times_P = np.unique(id_P, return_counts=True)
    if len(unique_P) < count:
      return f'returns the id {unique_P[times_P > 1][0]} twice; return different ids'
    return ''


class Shuffled(PromptRule):
  """Epochs: every epoch has all problems once, in a new order."""

  reads_history = False

  rule: Literal['shuffled'] = 'shuffled'

  def __call__(self, history: History, key: Key, count: int) -> np.ndarray:
    """Returns the next problems of the epoch."""
    return shuffled(len(history.tries_N), key, count)[:count]


class ByDifficulty(PromptRule):
  """Problems whose pass rate is in a window, the least recently tried first.

  The pass rate is that of all responses of the run; a problem without a verdict counts
  as in the window. Ties are in the shuffled order, so a run begins with an epoch of
  `shuffled`. If the window has too few problems, others follow in the shuffled order:
  only then is a problem outside the window sampled again. Problems in flight come last.
  """

  rule: Literal['by_difficulty'] = 'by_difficulty'
  low: float = knob(0.1, 'Smallest pass rate of the window.', least=0, below=1)
  high: float = knob(0.9, 'Largest pass rate of the window.', above=0, most=1)

  @pydantic.model_validator(mode='after')
  def _ordered(self) -> Self:
    if self.low >= self.high:
      raise ValueError(
        f'low={self.low} is not below prompts.high={self.high}, so the window has no '
        'width; lower low or raise high'
      )
    return self

  def __call__(self, history: History, key: Key, count: int) -> np.ndarray:
    """Returns the first problems, sorted as the class says."""
    order_N = shuffled(len(history.tries_N), key, count)
    tries_N, right_N, last_step_N, waiting_N = (x_N[order_N] for x_N in history)
    rate_N = right_N / np.maximum(tries_N, 1)
    inside_N = (tries_N == 0) | ((self.low <= rate_N) & (rate_N <= self.high))
    # The last key counts first, and equal problems stay in the shuffled order; outside
    # the window the last step is no key.
    first_N = np.lexsort((inside_N * last_step_N, ~inside_N, waiting_N > 0))
    return order_N[first_N[:count]]


Prompting = Annotated[
  PromptRule,
  OneOf('Prompt rule: chooses the problems of a round.', Shuffled, ByDifficulty),
]


def shuffled(rows: int, key: Key, count: int) -> np.ndarray:
  """Returns all numbers below `rows`, first the `count` numbers of this round.

  Every epoch has a new order, and a round has the next numbers of its epoch. The
  remainder of an epoch is skipped, so that no number occurs twice in a round.
  """
  seed, number = key
  epoch, position = divmod(number, rows // count)
  order = np.random.default_rng((seed, epoch)).permutation(rows)
  return np.roll(order, -position * count)


def choose(rule: PromptRule, history: History, key: Key) -> np.ndarray:
  """Returns the ids id_P that a rule chooses, equal in all processes.

  Raises ValueError if a custom rule returns ids that cannot be used.
  """
  history = read_only(history)
  id_P = rule(history, key, rule.count)
  if rule.custom:
    if fault := rule.fault(id_P, {'history': history, 'count': rule.count}):
      raise ValueError(f'prompts.rule={rule.rule} {fault}')
    # A function may read the clock; processes with different prompts would not end.
    id_P = hosts.everyones(np.asarray(id_P).tolist())[0]
  return np.asarray(id_P, np.int32)


def read_only(history: History) -> History:
  """Returns views, so that a user's function cannot change the state of the run."""
  return History(*(np.broadcast_to(x_N, x_N.shape) for x_N in history))


def no_history(problems: int) -> History:
  """Returns the history of problems that were never tried."""
  none_N = np.zeros(problems, np.int32)
  return History(none_N, none_N, none_N - 1, none_N)


def submitted(history: History, id_P: np.ndarray) -> History:
  """Counts the groups of these problems as waiting; id -1 is an empty seat."""
  waiting_N = history.waiting_N + _per_problem(history, id_P)
  return history._replace(waiting_N=waiting_N)


def completed(history: History, groups: Groups, step: int) -> History:
  """Counts the verdicts on groups that were completed at this learner step."""
  id_P = exchange.whole(groups.id_P)
  last_step_N = history.last_step_N.copy()
  last_step_N[id_P[id_P >= 0]] = step
  # A given response says nothing about the policy.
  sampled_PG = exchange.whole((groups.policy_version_PGT != GIVEN).all(2))
  tries_P = (exchange.whole(groups.decided_PG) & sampled_PG).sum(1)
  right_P = (exchange.whole(groups.correct_PG) & sampled_PG).sum(1)
  return History(
    tries_N=history.tries_N + _per_problem(history, id_P, tries_P),
    right_N=history.right_N + _per_problem(history, id_P, right_P),
    last_step_N=last_step_N,
    waiting_N=history.waiting_N - _per_problem(history, id_P),
  )


def _per_problem(
  history: History, id_P: np.ndarray, value_P: np.ndarray | None = None
) -> np.ndarray:
  """Sums values by problem, or counts rows, [N] int32; id -1 is an empty row."""
  size = len(history.tries_N) + 1
  return np.bincount(id_P + 1, value_P, size)[1:].astype(np.int32)
