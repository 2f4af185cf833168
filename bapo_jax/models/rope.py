"""Rotary frequencies: theta and a scaling rule become one table, made on the host.

1. every rule starts from f_i = theta^(-2i/C), in radians a token, for pair i of C/2;
2. it slows some of them down, so that angles at far positions stay in the range the
   model was trained on, and may ask for a factor on all of them (yarn);
3. `table` computes in float64 and rounds once: the same table for every program.

Rules and their knobs are named as in a Hugging Face config (`rope_type`).
"""

import functools
import inspect
import math

import numpy as np


def default(frequency, theta):
  """Frequencies as they are (Su et al., 2021)."""
  del theta
  return frequency, 1.0


def linear(frequency, theta, *, factor):
  """All of them `factor` times slower (position interpolation, Chen et al., 2023)."""
  del theta
  return frequency / factor, 1.0


def llama3(
  frequency,
  theta,
  *,
  factor,
  low_freq_factor,
  high_freq_factor,
  original_max_position_embeddings,
):
  """Slow ones slower, fast ones as they are, by turns within the original context."""
  del theta
  turns = original_max_position_embeddings * frequency / (2 * math.pi)
  kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
  return _mix(frequency, factor, np.clip(kept, 0, 1)), 1.0


def yarn(
  frequency,
  theta,
  *,
  factor,
  original_max_position_embeddings,
  attention_factor=None,
  beta_fast=32,
  beta_slow=1,
  mscale=None,
  mscale_all_dim=None,
  truncate=True,
):
  """As llama3, but linear in the index, and hotter attention (Peng et al., 2023).

  Pairs that turn more than `beta_fast` times within the original context are kept,
  those that turn less than `beta_slow` times are slowed down.
  """

  def pair(turns):
    ratio = original_max_position_embeddings / (2 * math.pi * turns)
    return len(frequency) * math.log(ratio) / math.log(theta)

  first, last = pair(beta_fast or 32), pair(beta_slow or 1)
  if truncate:
    first, last = math.floor(first), math.ceil(last)
  # The upper limit is one of channels, not of pairs: so it is in the published models.
  first, last = max(first, 0), min(last, 2 * len(frequency) - 1)
  # One pair may be both limits: a jump instead of a ramp.
  slowed = (np.arange(len(frequency)) - first) / ((last - first) or 1e-3)
  if attention_factor is None:
    attention_factor = _heat(factor, 1)
    if mscale and mscale_all_dim:
      attention_factor = _heat(factor, mscale) / _heat(factor, mscale_all_dim)
  return _mix(frequency, factor, 1 - np.clip(slowed, 0, 1)), attention_factor


RULES = {'default': default, 'linear': linear, 'llama3': llama3, 'yarn': yarn}


def _mix(frequency, factor, kept):
  return frequency * kept + frequency / factor * (1 - kept)


def _heat(factor, scale):
  """Section 3.4 of YaRN, by the square root: it multiplies queries and keys."""
  return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def check(rule: str, knobs: dict) -> None:
  """Raises ValueError, by name, for a rule or a knob that there is not, or lacks."""
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
def table(head_width: int, theta: float, rule: str, knobs: tuple):
  """(radians a token of each pair, float32 [C/2]; factor on sine and cosine).

  Args:
    knobs: (name, value) pairs of the rule.
  """
  half = head_width // 2
  frequency, factor = RULES[rule](
    float(theta) ** (-np.arange(half) / half), theta, **dict(knobs)
  )
  return frequency.astype(np.float32), float(factor)
