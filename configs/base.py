"""The embedded default, from which the other configs start.

Every knob with its default, range and meaning: docs/config.md. They are described once,
beside the code that uses them, in bapo_jax/*/knobs.py.
"""

from ml_collections import ConfigDict

from bapo_jax.training.config import Config


def get_config() -> ConfigDict:
  """All knobs at their defaults."""
  return ConfigDict(Config().model_dump())
