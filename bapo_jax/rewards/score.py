"""Scores responses by built-in verifiers and by a user's reward functions.

1. `Sample` is one response with its problem, as a reward function receives it;
2. a `Scorer` calls every rule of `rewards.rule` and combines what they return: the
   first rule decides the verdict, and the reward is the weighted sum over all rules;
3. a custom function may return a number, a `Verdict`, a dict of named numbers (their
   sum is the reward), or None (undecided). It may be `async def`, or declare
   `batched=True` to receive a list of samples, or `steps='characters'` or 'tokens' to
   return (end, reward) of each step as well: 'steps' of the dict or the `Verdict`. If
   a rule is undecided, so is the response: no number of another rule counts;
4. an `EnvironmentCaller` calls an environment in the same way.

All async functions of a process share one event loop, which runs in a thread. Clients
and locks of a user's module may therefore be used in every call, and a program that
has a running event loop, such as a notebook, may score.

This module loads neither JAX nor NumPy; a user's file may.
"""

import asyncio
import bisect
import dataclasses
import functools
import json
import math
import operator
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bapo_jax import custom_code
from bapo_jax.custom_code import UserFunction
from bapo_jax.rewards import environments, verifiers
from bapo_jax.rewards.answers import Message, Verdict
from bapo_jax.rewards.knobs import Environment, Verification

Failure = (Exception, SystemExit, asyncio.CancelledError)


class Sample(NamedTuple):
  """A response to verify, or a turn to answer, with its problem."""

  response: str  # of a conversation: its last turn
  answer: str = ''  # the right answer; '' if the data set has none
  rule: str = ''  # the built-in rule that the row names; '': rewards.rule
  prompt: str = ''  # the problem as the data set states it, without the template
  tokens: tuple[int, ...] = ()  # of the response, end token included
  row: Any = ''  # all fields of the data set's row: JSON; a dict for a custom function
  # The problem and all turns and answers so far, each {'role': ..., 'content': ...}.
  messages: Sequence[Mapping[str, str]] = ()
  ends: tuple[int, ...] = ()  # character of `response` at the end of each token
  # For an environment:
  number: int = 1  # turns so far
  tokens_left: int = 0  # tokens for its answer and all later turns together


class Calls:
  """Calls a user's function on samples, within the limits of `k`."""

  def __init__(self, function: UserFunction, k: Verification):
    self._function = function
    self._k = k
    self.batched = bool(function.declared.get('batched'))
    self.unit = function.declared.get('steps', '')  # of the ends of steps
    # Whether one call, or calls that overlap, serve all samples.
    self.together = self.batched or function.is_async

  def __call__(self, samples: Sequence[Sample]) -> Sequence[Any]:
    """Returns a result per sample, or the exception raised; raises only MemoryError."""
    if not samples:
      return []
    # A generated problem has two fields.
    rows = [
      json.loads(x.row) if x.row else {'problem': x.prompt, 'answer': x.answer}
      for x in samples
    ]
    samples = [x._replace(row=row) for x, row in zip(samples, rows, strict=True)]
    arguments = [samples] if self.batched else samples
    if self._function.is_async:
      calls = self._await(arguments)
      values = asyncio.run_coroutine_threadsafe(calls, _event_loop()).result()
    else:
      values = [_call(self._function, x) for x in arguments]
    if not self.batched:
      return values
    (values,) = values
    if isinstance(values, Failure):
      return [values] * len(samples)
    values = list(values) if isinstance(values, Iterable) else [values]
    if len(values) != len(samples):
      reason = f'it returned {len(values)} values for {len(samples)} samples'
      return [ValueError(reason)] * len(samples)
    return values

  async def _await(self, arguments: Sequence[Any]):
    """Awaits the function on all values, k.parallel at once, k.timeout seconds each."""
    free = asyncio.Semaphore(self._k.parallel)

    async def one(argument):
      async with free:
        limit = asyncio.timeout(self._k.timeout)
        try:
          async with limit:
            return await self._function(argument)
        except MemoryError:
          raise  # as in `_call`
        except Failure as error:
          if not limit.expired():
            return error
          return TimeoutError(f'took over rewards.timeout={self._k.timeout:g} s')

    return await asyncio.gather(*map(one, arguments))


class Scorer:
  """Scores samples by the rules of a run, in order.

  Raises a ValueError if a function cannot be loaded.
  """

  def __init__(self, k: Verification):
    self._k = k
    self._rules = k.rule.split(',')
    self._calls = {
      rule: Calls(custom_code.load(rule).bound(k.custom), k)
      for rule in custom_code.paths_in(k.rule)
    }
    self.batched = any(call.batched for call in self._calls.values())
    self.together = any(call.together for call in self._calls.values())

  def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
    """Returns a verdict per sample; calls nothing without samples.

    Raises only MemoryError.
    """
    if len(self._rules) == 1 and not self._calls:
      return [self._verify(self._rules[0], sample) for sample in samples]
    columns = [
      self._calls[rule](samples)
      if rule in self._calls
      else [self._verify(rule, sample) for sample in samples]
      for rule in self._rules
    ]
    rows = zip(samples, zip(*columns, strict=True), strict=True)
    return [self._combined(*row) for row in rows]

  def _verify(self, rule, sample):
    """Verifies by the rule that the row names, or else by `rule`."""
    name = sample.rule or rule
    return verifiers.verify(name, sample.answer, sample.response, strict=self._k.strict)

  def _combined(self, sample, values: Sequence[Any]):
    """Combines what the rules return for one sample."""
    pairs = zip(self._rules, values, strict=True)
    verdicts = [self._verdict(rule, value, sample) for rule, value in pairs]
    for verdict in verdicts:
      if verdict.right is None:
        return verdict._replace(reward=None, parts=None, steps=None)
    reward = 0.0
    parts = {}
    steps = []
    weights = self._k.weights or (1.0,) * len(values)
    for rule, weight, verdict in zip(self._rules, weights, verdicts, strict=True):
      reward += weight * verdict.earned
      if len(values) > 1 or not verdict.parts:  # else the reward itself
        parts[rule.rpartition(':')[2]] = verdict.earned
      parts |= verdict.parts or {}
      steps += [(end, weight * x) for end, x in verdict.steps or ()]
    verdict = verdicts[0]._replace(reward=reward, parts=parts, steps=steps or None)
    if sample.rule and self._rules[0] in self._calls:
      # A custom function decides, and the verifier of the row says where to look.
      content = verifiers.READERS[sample.rule](sample.response)
      verdict = verdict._replace(formatted=content is not None)
    return verdict

  def _verdict(self, rule, value, sample):
    """Converts the result of a rule to a verdict; an invalid result is undecided."""
    if isinstance(value, Failure):
      return Verdict.failed(_described(rule, value))
    try:
      verdict = self._normal(rule, value)
      if verdict.right not in (None, 0, 1):
        raise ValueError
      right = None if verdict.right is None else bool(verdict.right)
      verdict = verdict._replace(right=right, reason=str(verdict.reason))
      reward = _finite(verdict.earned)
      parts = {str(name): _finite(x) for name, x in (verdict.parts or {}).items()}
    except (TypeError, ValueError, OverflowError, AttributeError):
      return Verdict.failed(f'{rule} returned {value!r:.80}, not a finite number')
    unit = self._calls[rule].unit if rule in self._calls else ''
    steps = verdict.steps
    try:
      if bool(unit) != (steps is not None) and right is not None:
        raise ValueError(f'it declares steps={unit!r}')
      steps = steps and _by_token(steps, unit, sample)
    except (TypeError, ValueError, OverflowError) as error:
      reason = f'{rule} returned steps={steps!r:.80}, which cannot be used: {error}'
      return Verdict.failed(reason[:200])
    abstains = right is None
    return verdict._replace(
      reward=reward, parts=parts or None, steps=steps, abstains=abstains
    )

  def _normal(self, rule, value) -> Verdict:
    """Returns the verdict of a number, of named numbers, of None, or the value."""
    if isinstance(value, Verdict):
      return value
    if value is None:
      return Verdict(None, f'{rule} returned None', None)
    named = dict(value) if isinstance(value, Mapping) else {'': value}
    steps = named.pop('steps', None)
    reward = math.fsum(map(_finite, named.values()))
    parts = named if isinstance(value, Mapping) else None
    right = reward >= self._k.right_from
    return Verdict(right, f'{reward:.4g}', None, reward, parts, steps)


class EnvironmentCaller:
  """Calls an environment on turns; an invalid result is a failure.

  Raises a ValueError if a function cannot be loaded.
  """

  def __init__(self, k: Environment):
    self._rule = k.rule
    if k.rule in environments.BUILT_IN:
      function = UserFunction(k.rule, function=environments.BUILT_IN[k.rule])
    else:
      function = custom_code.load(k.rule).bound(k.custom)
    if k.stateful:
      games = environments.Games(function.function)
      function = dataclasses.replace(function, function=games)
    self._calls = Calls(function, k)
    self.batched = self._calls.batched
    self.together = self._calls.together

  def __call__(self, samples: Sequence[Sample]) -> list[Message]:
    """Returns a message per turn; raises only MemoryError."""
    return [self._message(value) for value in self._calls(samples)]

  def _message(self, value):
    if isinstance(value, Failure):
      return Message.failed(_described(self._rule, value))
    if value is None or (isinstance(value, str) and value):
      return Message(value)
    reason = f'{self._rule} returned {value!r:.80}, neither a message nor None'
    return Message.failed(reason)


def home(sample: Sample) -> int:
  """Returns a number that all turns of a response share."""
  said = sample.messages
  # Up to the first turn of the response.
  first = said[: len(said) - 2 * sample.number + 2]
  return zlib.crc32(repr((sample.row, first)).encode())


def make(k: Verification) -> Scorer | EnvironmentCaller:
  """Returns what calls the functions of these knobs."""
  return EnvironmentCaller(k) if isinstance(k, Environment) else Scorer(k)


@functools.cache
def _event_loop():
  """Returns the event loop of this process, which runs until the process ends."""
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, daemon=True).start()
  return loop


def _described(rule, error):
  """Describes the error that a function raised."""
  reason = f'{rule}: {error}'
  if not isinstance(error, TimeoutError):
    reason = f'{rule} raises {custom_code.described(error, rule)}'
  return reason[:200]


def _call(function: Callable, argument):
  """Calls a user's function; returns the exception that it raises."""
  try:
    return function(argument)
  except MemoryError:
    raise  # the worker process must be replaced
  except Failure as error:
    return error


def _by_token(steps, unit: str, sample: Sample):
  """Returns the steps with ends in tokens; raises an error if they do not fit."""
  lengths = sample.ends if unit == 'characters' else range(1, len(sample.tokens) + 1)
  longest = max(lengths, default=0)
  counted = []
  for end, reward in steps:
    if not 0 < operator.index(end) <= longest:
      raise ValueError(f'a step ends at {end} of {longest} {unit}')
    token = bisect.bisect_left(lengths, end) + 1
    counted.append((token, _finite(reward)))
  return counted


def _finite(number):
  """Converts a Python or NumPy number; raises an error if not finite in float32."""
  if not math.isfinite(number) or abs(number) >= 3.4e38:
    raise ValueError('not a finite number')
  return float(number)
