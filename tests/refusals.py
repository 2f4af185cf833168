"""The sentence by which the config refuses a value."""

import pydantic
import pytest

from bapo_jax.training.config import parse


def nested(dotted: dict) -> dict:
  """{'clip.rule': x} as {'clip': {'rule': x}}."""
  values = {}
  for path, value in dotted.items():
    *sections, name = path.split('.')
    section = values
    for key in sections:
      section = section.setdefault(key, {})
    section[name] = value
  return values


def refusal(**dotted) -> str:
  """The sentence for these values, by dotted knob."""
  with pytest.raises(ValueError) as error:
    parse(nested(dotted))
  assert not isinstance(error.value, pydantic.ValidationError)
  assert '\n' not in str(error.value)
  return str(error.value)
