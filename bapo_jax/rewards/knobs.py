"""Knobs of verifiers and rewards."""

from typing import Annotated, ClassVar, Literal, Self

import pydantic
from pydantic import SerializeAsAny

from bapo_jax.knobs import PLACE, Place, knob
from bapo_jax.own_code import OwnKnobs, Slot, own


class OwnShaping(OwnKnobs):
  """Base of the knobs of own shaping rules."""

  arguments = ('earned_PG', 'length_PG', 'truncated_PG', 'formatted_PG')


class ShapingConfig(Slot):
  """Changes to the reward: by default 1 for a right answer, 0 for a wrong one."""

  rule: Literal['standard'] | Place = knob(
    'standard', 'Shaping rule: standard reads the knobs below, an own rule `own`.'
  )
  own: SerializeAsAny[OwnShaping] = own(OwnShaping)
  format_bonus: float = knob(
    0.0,
    'Added if the response has an answer where the verifier looks for it, right or '
    'wrong.',
    least=0,
  )
  overlong_penalty: float = knob(
    0.0,
    "Factor of DAPO's soft overlong penalty; 1.0: as published, at most half of the "
    'reward of a right answer.',
    least=0,
  )
  overlong_cache: int = knob(
    1, 'Tokens before sampler.max_new_tokens over which the penalty grows.', least=1
  )
  truncated: Literal['verified', 'wrong', 'masked'] = knob(
    'verified',
    'Truncated responses: verified as usual, counted as wrong, or not trained on.',
  )


class OwnReward(OwnKnobs):
  """Base of the knobs of own reward functions: declares how they are called."""

  arguments = ('sample',)
  batched: ClassVar[bool] = False  # is called once with a list of all samples


NAME = rf'(?:aime|math|gsm8k|countdown|exact|{PLACE})'
RuleList = Annotated[str, pydantic.StringConstraints(pattern=f'^{NAME}(,{NAME})*$')]


class RewardsConfig(Slot):
  """Knobs of verification."""

  rule: Literal['aime', 'math', 'gsm8k', 'countdown', 'exact'] | RuleList = knob(
    'aime',
    'Verifier of problems that do not name a verifier, or a list of verifiers and own '
    'functions: the first decides what is right, and all add to the reward.',
  )
  own: SerializeAsAny[OwnReward] = own(OwnReward)
  weights: tuple[float, ...] = knob(
    (), 'Factor on the reward of each rule in a list; (): 1 each.'
  )
  right_from: float = knob(
    0.5, 'A response is right if the number of an own function is at least this.'
  )
  timeout: float = knob(
    60.0, 'Seconds of wall time for a call of an own function.', above=0, most=86400
  )
  parallel: int = knob(
    16, 'Calls of an async function at once, per verifier process.', least=1, most=4096
  )
  strict: bool = knob(
    True,
    'Requires a calculated answer; off: `math` evaluates and rounds, and `gsm8k` '
    'ignores the text around a number.',
  )
  workers: int = knob(
    2, 'Verifier processes, for rules that may hang (math).', least=1, most=256
  )
  deadline: float = knob(
    3.0, 'Seconds of processor time per answer.', above=0, most=86400
  )
  batch_deadline: float = knob(
    300.0,
    'Seconds of processor time per verifier process for all answers of a rollout.',
    above=0,
    most=86400,
  )
  shaping: ShapingConfig = knob(ShapingConfig, 'Shaped rewards.')

  @pydantic.model_validator(mode='after')
  def _one_weight_per_rule(self) -> Self:
    count = len(self.rule.split(','))
    if self.weights and (len(self.weights) != count or not any(self.weights)):
      raise ValueError(
        f'weights={self.weights} does not fit rule={self.rule!r}; give {count} '
        'numbers, one per rule and not all 0'
      )
    return self
