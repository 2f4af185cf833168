"""Rotary frequencies: theta and a scaling rule become one table, made on the host.

1. every rule starts from f_i = theta^(-2i/C), in radians per token, for pair i of C/2;
2. it divides some of them by a factor, so that angles at far positions stay in the
   range the model was trained on; yarn also multiplies sine and cosine by a factor;
3. `table` computes in float64 and rounds once: the same table for every program.

Rules and their knobs are named as in a Hugging Face config (`rope_type`).
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Scaled = tuple[np.ndarray, float]  # (frequencies, factor on sine and cosine)


def default(frequency: np.ndarray, theta: float) -> Scaled:
  """Unchanged frequencies (Su et al., 2021)."""
  del theta
  return frequency, 1.0


def linear(frequency: np.ndarray, theta: float, *, factor: float) -> Scaled:
  """All frequencies divided by `factor` (position interpolation, Chen et al., 2023)."""
  del theta
  return frequency / factor, 1.0


def llama3(
  frequency: np.ndarray,
  theta: float,
  *,
  factor: float,
  low_freq_factor: float,
  high_freq_factor: float,
  original_max_position_embeddings: float,
) -> Scaled:
  """Low frequencies divided by `factor`, high ones unchanged, a ramp between (Llama 3).

  Low and high are measured in turns within the original context.
  """
  del theta
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
  """As llama3, but linear in the index, and sharper attention (Peng et al., 2023).

  Pairs that turn more than `beta_fast` times within the original context are unchanged,
  those that turn less than `beta_slow` times are divided by `factor`.
  """

  def pair(turns: float) -> float:
    ratio = original_max_position_embeddings / (2 * math.pi * turns)
    return len(frequency) * math.log(ratio) / math.log(theta)

  first, last = pair(beta_fast or 32), pair(beta_slow or 1)
  if truncate:
    first, last = math.floor(first), math.ceil(last)
  # The upper limit counts channels, not pairs, as in the published models.
  first, last = max(first, 0), min(last, 2 * len(frequency) - 1)
  # One pair may be both limits: a jump instead of a ramp.
  scaled = (np.arange(len(frequency)) - first) / ((last - first) or 1e-3)
  if attention_factor is None:
    attention_factor = _temperature(factor, 1)
    if mscale and mscale_all_dim:
      attention_factor = _temperature(factor, mscale)
      attention_factor /= _temperature(factor, mscale_all_dim)
  return _mix(frequency, factor, 1 - np.clip(scaled, 0, 1)), attention_factor


RULES: dict[str, Callable[..., Scaled]] = {
  'default': default,
  'linear': linear,
  'llama3': llama3,
  'yarn': yarn,
}


def _mix(frequency: np.ndarray, factor: float, unscaled: np.ndarray) -> np.ndarray:
  """Frequencies of which a part `unscaled`, 0 to 1, stays and the rest is divided."""
  return frequency * unscaled + frequency / factor * (1 - unscaled)


def _temperature(factor: float, scale: float) -> float:
  """sqrt(1/t) of YaRN, section 3.4: the factor of queries and of keys."""
  return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def check(rule: str, knobs: dict[str, Any]) -> None:
  """Checks a rule and its knobs.

  Raises:
    ValueError: the rule or a knob is unknown, or a knob is missing; by name.
  """
  if rule not in RULES:
    raise ValueError(f'rope_type {rule!r} is none of {sorted(RULES)}')
  known = {
    name: p.default is p.empty
    for name, p in inspect.signature(RULES[rule]).parameters.items()
    if p.kind is p.KEYWORD_ONLY
  }
  for name in sorted(set(knobs) - set(known)):
    raise ValueError(
      f'{name}={knobs[name]!r} is no option of rope_type {rule!r}, which knows '
      f'{sorted(known)}'
    )
  for name in (n for n, needed in known.items() if needed and knobs.get(n) is None):
    raise ValueError(f'rope_type {rule!r} needs {name}')


@functools.lru_cache
def table(
  head_width: int, theta: float, rule: str, knobs: tuple[tuple[str, float], ...]
) -> Scaled:
  """(radians per token of each pair, float32 [C/2]; factor on sine and cosine).

  Args:
    knobs: (name, value) pairs of the rule.
  """
  half = head_width // 2
  frequency, factor = RULES[rule](
    float(theta) ** (-np.arange(half) / half), theta, **dict(knobs)
  )
  return frequency.astype(np.float32), float(factor)
