"""Knobs of verification; worker processes read them, so this module loads no JAX."""

import inspect
from typing import Annotated, ClassVar, Literal

import pydantic
from pydantic import SerializeAsAny

from bapo_jax import custom_code
from bapo_jax.custom_code import CustomKnobs, CustomSection, custom_knobs
from bapo_jax.knobs import PATH, Auto, FunctionPath, knob
from bapo_jax.rewards.answers import Message, Verdict


class CustomReward(CustomKnobs):
  """Base of the knobs of custom reward functions; declares how they are called."""

  arguments = ('sample',)
  batched: ClassVar[bool] = False  # is called once with a list of all samples
  # Returns rewards of steps too, whose ends count characters or tokens; '': does not.
  steps: ClassVar[Literal['', 'characters', 'tokens']] = ''


class CustomEnvironment(CustomKnobs):
  """Base of the knobs of a custom environment; declares how it is called."""

  arguments = ('turn',)
  methods = ('start', 'step')
  batched: ClassVar[bool] = False  # is called once with a list of turns
  role: ClassVar[Literal['user', 'tool']] = 'user'  # of its messages in a chat


NAME = rf'(?:aime|math|gsm8k|countdown|exact|{PATH})'
RuleList = Annotated[str, pydantic.StringConstraints(pattern=f'^{NAME}(,{NAME})*$')]


class Verification(CustomSection):
  """How responses are verified: rules, custom functions and their limits."""

  named: ClassVar[str] = 'rewards.rule'  # in messages
  result: ClassVar[type[Verdict | Message]] = Verdict

  rule: Auto[Literal['aime', 'math', 'gsm8k', 'countdown', 'exact'] | RuleList] = knob(
    'aime',
    'Verifier of problems that do not name a verifier, or a list of verifiers and '
    'custom functions: the first decides what is right, and all add to the reward.',
  )
  custom: SerializeAsAny[CustomReward] = custom_knobs(CustomReward)
  weights: tuple[pydantic.FiniteFloat, ...] = knob(
    (), 'Factor on the reward of each rule in a list; (): 1 each.'
  )
  right_from: float = knob(
    0.5,
    'A response is right if the number of a custom function is at least this.',
    needs='custom_reward',
  )
  timeout: float = knob(
    60.0,
    'Seconds of wall time for a call of a custom function.',
    above=0,
    most=86400,
    needs='custom_calls',
  )
  parallel: int = knob(
    16,
    'Calls of an async function at once, per verifier process.',
    least=1,
    most=4096,
    needs='custom_calls',
  )
  strict: bool = knob(
    True,
    'Requires a calculated answer; off: `math` evaluates and rounds, and `gsm8k` '
    'ignores the text around a number.',
  )
  workers: int = knob(
    2,
    'Verifier processes, for rules that may hang (math).',
    least=1,
    most=256,
  )
  deadline: float = knob(
    3.0,
    'Seconds of processor time per answer.',
    above=0,
    most=86400,
  )
  batch_deadline: float = knob(
    300.0,
    'Seconds of processor time per verifier process for all answers of a rollout.',
    above=0,
    most=86400,
  )

  @pydantic.model_validator(mode='after')
  def _one_weight_per_rule(self):
    count = len(self.rule.split(',')) if self.rule else 1
    if self.weights and (len(self.weights) != count or not any(self.weights)):
      raise ValueError(
        f'weights={self.weights} does not fit rule={self.rule!r}; give {count} '
        'numbers, one per rule and not all 0'
      )
    return self


EnvironmentRule = Literal['', 'feedback', 'calculator'] | FunctionPath


class Environment(Verification):
  """Says how an environment is called, with the limits of reward functions."""

  named: ClassVar[str] = 'rollout.environment'
  result: ClassVar[type[Verdict | Message]] = Message

  rule: EnvironmentRule = ''
  custom: SerializeAsAny[CustomEnvironment] = custom_knobs(  # pyrefly: ignore
    CustomEnvironment
  )
  max_turns: int = 1

  @property
  def stateful(self) -> bool:
    """Whether the environment is a class, of which each response has an object."""
    paths = custom_code.paths_in(self.rule)
    return any(inspect.isclass(custom_code.load(path).function) for path in paths)
