"""Knobs of verifiers and rewards."""

from typing import Literal

from bapo_jax.knobs import Section, knob


class ShapingConfig(Section):
  """Changes to the reward: by default 1 for a right answer, 0 for a wrong one."""

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


class RewardsConfig(Section):
  """Knobs of verification."""

  rule: Literal['aime', 'math', 'gsm8k', 'countdown', 'exact'] = knob(
    'aime', 'Verifier of problems that do not name a verifier.'
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
