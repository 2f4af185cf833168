"""The embedded default: all knobs at their defaults.

Every knob with its default, range and meaning: docs/reference/config.md. They are
described once, beside the code that uses them, in bapo_jax/*/knobs.py.
"""

from bapo_jax.training import config

get_config = config.defaults
