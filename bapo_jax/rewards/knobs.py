"""Knobs of verifiers and rewards."""

from typing import Literal

from bapo_jax.knobs import Section, knob


class ShapingConfig(Section):
  """Rewards beside 1 for right and 0 for wrong; the defaults change nothing."""

  format_bonus: float = knob(
    0.0, 'Added where an answer stands in its place, right or wrong.', least=0
  )
  overlong_penalty: float = knob(
    0.0,
    "DAPO's soft overlong punishment times this factor; 1.0: as published, which is "
    'up to half the distance of right and wrong.',
    least=0,
  )
  overlong_cache: int = knob(
    1, 'Tokens before sampler.max_new_tokens over which the penalty grows.', least=1
  )
  truncated: Literal['verified', 'wrong', 'masked'] = knob(
    'verified',
    'A truncated response: verified as any other, wrong, or not trained on.',
  )


class RewardsConfig(Section):
  """How responses are verified."""

  rule: Literal['aime', 'math', 'gsm8k', 'countdown', 'exact'] = knob(
    'aime', 'Verifier of problems that name none.'
  )
  strict: bool = knob(
    True,
    'The answer must be calculated; else `math` calculates and rounds, and `gsm8k` '
    'overlooks what stands around a number.',
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
  memory_mb: int = knob(
    2048, 'Address space of a verifier process, 2^20 bytes.', least=512, most=1 << 20
  )
  recycle: int = knob(1000, 'Answers after which a process is replaced.', least=1)
  shaping: ShapingConfig = knob(ShapingConfig, 'Shaped rewards.')
