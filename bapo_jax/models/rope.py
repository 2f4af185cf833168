"""Computes rotary frequencies from theta and a scaling rule, on the host.

Every rule starts from f_i = theta^(-2i/C), in radians per token, for pair i of C/2. It
divides some frequencies by a factor, so that angles at distant positions stay in the
range of training; yarn also multiplies sine and cosine by a factor. Rules and knobs are
named as in Hugging Face configs (`rope_type`).
"""

import math
from collections.abc import Callable

import numpy as np

Scaled = tuple[np.ndarray, float]  # (frequencies, factor on sine and cosine)


def default(frequency: np.ndarray, _: float) -> Scaled:
  """Leaves frequencies unchanged (Su et al., 2021)."""
  return frequency, 1.0


def linear(frequency: np.ndarray, _: float, *, factor: float) -> Scaled:
  """Divides all frequencies by `factor` (position interpolation, Chen et al., 2023)."""
  return frequency / factor, 1.0


def llama3(
  frequency: np.ndarray,
  _: float,
  *,
  factor: float,
  low_freq_factor: float,
  high_freq_factor: float,
  original_max_position_embeddings: float,
) -> Scaled:
  """Divides low frequencies by `factor`, blending to unchanged high frequencies.

  A frequency is divided if it makes at most low_freq_factor turns within the original
  context, unchanged from high_freq_factor turns on, and blended in between.
  """
  turns = original_max_position_embeddings * frequency / (2 * math.pi)
  unscaled = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
  return _mix(frequency, factor, np.clip(unscaled, 0, 1)), 1.0


def yarn(
  frequency: np.ndarray,
  theta: float,
  *,
  factor: float,
  original_max_position_embeddings: float,
  attention_factor: float | None = None,
  beta_fast: float = 32,
  beta_slow: float = 1,
  mscale: float | None = None,
  mscale_all_dim: float | None = None,
  truncate: bool = True,
) -> Scaled:
  """Divides low frequencies, blending by pair index, and sharpens attention (YaRN).

  Pairs with more than `beta_fast` turns within the original context stay unchanged;
  pairs with fewer than `beta_slow` turns are divided by `factor` (Peng et al., 2023).
  """

  def pair(turns):
    ratio = original_max_position_embeddings / (2 * math.pi * turns)
    return len(frequency) * math.log(ratio) / math.log(theta)

  first = pair(beta_fast or 32)
  last = pair(beta_slow or 1)
  if truncate:
    first = math.floor(first)
    last = math.ceil(last)
  # As in the published models, the upper limit counts channels, not pairs.
  first = max(first, 0)
  last = min(last, 2 * len(frequency) - 1)
  # If both limits are the same pair, the ramp becomes a jump.
  scaled = (np.arange(len(frequency)) - first) / ((last - first) or 1e-3)
  if attention_factor is None:
    attention_factor = _temperature(factor, 1)
    if mscale and mscale_all_dim:
      attention_factor = _temperature(factor, mscale)
      attention_factor /= _temperature(factor, mscale_all_dim)
  return _mix(frequency, factor, 1 - np.clip(scaled, 0, 1)), attention_factor


RULES: dict[str, Callable[..., Scaled]] = {
  rule.__name__: rule for rule in (default, linear, llama3, yarn)
}


def _mix(frequency: np.ndarray, factor, unscaled: np.ndarray):
  """Blends frequencies divided by `factor` (`unscaled` = 0) with unchanged ones (1)."""
  return frequency * unscaled + frequency / factor * (1 - unscaled)


def _temperature(factor, scale):
  """Returns sqrt(1/t) of YaRN, section 3.4: the factor of queries and of keys."""
  return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def table(
  head_width: int, theta: float, rule: str, knobs: tuple[tuple[str, float], ...]
) -> Scaled:
  """Returns (radians per token of each pair, float32 [C/2]; factor on sine and cosine).

  Computes in float64 and rounds once, so that every program has the same table.

  Raises:
    ValueError: the rule or a knob is unknown, missing or of the wrong type.
  """
  if rule not in list(RULES):
    raise ValueError(
      f'rope_type={rule!r:.60} is not supported; choose a model with one of '
      f'{list(RULES)}'
    )
  half = head_width // 2
  frequency = float(theta) ** (-np.arange(half) / half)
  try:
    frequency, factor = RULES[rule](frequency, theta, **dict(knobs))
  except (ArithmeticError, TypeError, ValueError) as error:  # may name the keyword
    raise ValueError(
      f'rope_type={rule!r} with rope_theta={theta} and {dict(knobs)!r:.200}: {error}; '
      'correct config.json'
    ) from error
  return frequency.astype(np.float32), float(factor)
