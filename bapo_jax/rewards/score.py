"""Scores responses by built-in verifiers and by a user's own reward functions.

1. `Sample` is one response with its problem, as a reward function receives it;
2. a `Scorer` calls every rule of `rewards.rule` and combines what they return: the
   first rule decides the verdict, and the reward is the weighted sum over all rules;
3. an own function may return a number, a `Verdict`, a dict of named numbers (their sum
   is the reward), or None (undecided). It may be `async def`, or declare
   `batched=True` to receive a list of samples.

This module loads neither JAX nor NumPy; a user's file may.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bapo_jax import own_code
from bapo_jax.rewards import verifiers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.knobs import Verification

Values = list[Any]  # what a rule returns, per sample; a Failure where it raises
Failure = (Exception, SystemExit)


class Sample(NamedTuple):
  """A response to verify, with its problem."""

  response: str
  answer: str = ''  # the right answer; '' if the data set has none
  rule: str = ''  # the built-in rule that the row names; '': rewards.rule
  prompt: str = ''  # the problem as the data set states it, without the template
  tokens: tuple[int, ...] = ()  # of the response, end token included
  row: Any = ''  # all fields of the data set's row: JSON; a dict for an own function


class Scorer:
  """Scores samples by the rules of a run, in order.

  Raises a ValueError if a function cannot be loaded.
  """

  def __init__(self, k: Verification):
    self._k, self.rules = k, k.rule.split(',')
    self._own = {
      rule: own_code.bind(rule, k.custom) for rule in own_code.placed(k.rule)
    }

    self.batched = any(map(_batched, self._own.values()))
    # Whether samples are scored together: in one call, or in calls that overlap.
    self.together = self.batched or any(map(own_code.is_async, self._own.values()))

  def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
    """Returns a verdict per sample. Raises only MemoryError."""
    if len(self.rules) == 1 and not self._own:
      return [self._verify(self.rules[0], sample) for sample in samples]
    columns = [self._values(rule, samples) for rule in self.rules]
    return [self._combined(values) for values in zip(*columns, strict=True)]

  def _verify(self, rule: str, sample: Sample) -> Verdict:
    """Verifies by the rule that the row names, or else by `rule`."""
    name = sample.rule or rule
    return verifiers.verify(name, sample.answer, sample.response, strict=self._k.strict)

  def _values(self, rule: str, samples: Sequence[Sample]) -> Values:
    """Returns what one rule returns for every sample, or the exceptions it raises."""
    if rule not in self._own:
      return [self._verify(rule, sample) for sample in samples]
    samples = [x._replace(row=_row(x)) for x in samples]
    function = self._own[rule]
    batched = _batched(function)
    given = [list(samples)] if batched else samples
    if own_code.is_async(function):
      values = asyncio.run(self._all(function, given))
    else:
      values = [_tried(function, x) for x in given]
    if not batched:
      return values
    (values,) = values
    if isinstance(values, Failure):
      return [values] * len(samples)
    try:
      values = list(values)
    except TypeError:
      values = [values]
    if len(values) != len(samples):
      reason = f'{rule} returned {len(values)} values for {len(samples)} samples'
      return [Verdict(None, reason, None)] * len(samples)
    return values

  async def _all(self, function: Callable, given: Sequence[Any]) -> Values:
    """Awaits a function on all values, k.parallel at once, k.timeout seconds each."""
    free = asyncio.Semaphore(self._k.parallel)

    async def one(argument: Any) -> Any:
      async with free:
        try:
          return await asyncio.wait_for(function(argument), self._k.timeout)
        except TimeoutError:
          return TimeoutError(f'took over rewards.timeout={self._k.timeout:g} s')
        except Exception as error:
          return error

    return await asyncio.gather(*map(one, given))

  def _combined(self, values: Sequence[Any]) -> Verdict:
    """Combines what the rules return for one sample."""
    reward, parts, first = 0.0, {}, None
    weights = self._k.weights or (1.0,) * len(values)
    for rule, weight, value in zip(self.rules, weights, values, strict=True):
      verdict = self._verdict(rule, value)
      if verdict.right is None:
        return verdict
      first = first or verdict
      reward += weight * verdict.earned
      parts[rule.rpartition(':')[2]] = verdict.earned
      parts |= verdict.parts or {}
    assert first is not None
    return first._replace(reward=reward, parts=parts)

  def _verdict(self, rule: str, value: Any) -> Verdict:
    """Converts what a rule returns; what it should not return is undecided."""
    if isinstance(value, Failure):
      if isinstance(value, TimeoutError):
        return Verdict(None, f'{rule}: {value}'[:200], None)
      reason = own_code.described(value, own_code.file_of(rule))
      return Verdict(None, f'{rule} raises {reason}'[:200], None)
    if value is None:
      return Verdict(None, f'{rule} returned None', None)
    right, reason, answer, reward, parts = None, '', None, value, None
    if isinstance(value, Verdict):
      right, reason, answer, reward, parts = value
    elif isinstance(value, Mapping):
      reward, parts = 0, value
    numbers = [x for x in (right, reward) if x is not None]
    numbers += parts.values() if isinstance(parts, Mapping) else [parts or 0]
    if not all(map(_is_number, numbers)) or right not in (None, 0, 1):
      return Verdict(None, f'{rule} returned {value!r:.80}, not a finite number', None)
    parts = parts and {str(name): float(x) for name, x in parts.items()}
    if isinstance(value, Verdict):
      right = None if right is None else bool(right)
      reward = None if reward is None else float(reward)
      return Verdict(right, str(reason), answer, reward, parts)
    reward = math.fsum(parts.values()) if parts else float(reward)
    return Verdict(reward >= self._k.right_from, f'{reward:.4g}', None, reward, parts)


def _row(sample: Sample) -> dict[str, Any]:
  """Returns the fields of a sample's row; generated problems have two."""
  generated = {'problem': sample.prompt, 'answer': sample.answer}
  return json.loads(sample.row) if sample.row else generated


def _batched(function: Callable) -> bool:
  return bool(own_code.declares(function).get('batched'))


def _tried(function: Callable, given: Any) -> Any:
  """Calls a user's function; returns the exception that it raises."""
  try:
    return function(given)
  except MemoryError:
    raise  # the worker process must be replaced
  except (Exception, SystemExit) as error:
    return error


def _is_number(value: Any) -> bool:
  """Returns whether a value is a finite number in float32, also one of NumPy."""
  try:
    return math.isfinite(value) and abs(value) < 3.4e38
  except (TypeError, ValueError, OverflowError):
    return False
