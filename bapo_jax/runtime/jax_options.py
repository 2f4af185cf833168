"""Checks the options of JAX, which the user's environment sets too.

1. `check` refuses the options that a run cannot work with, and a missing platform;
2. `generator` returns the options that decide which random numbers JAX draws. They
   are part of a checkpoint's meta and of the name of a warm start in the cache.
"""

from typing import Any

import jax

# Option -> why a run cannot work with it. The variables have these names in capitals.
REFUSED = {
  'jax_debug_nans': (
    "nan stands for 'no data' in the metrics of a run, and updates that are not finite "
    'are skipped already (learner.max_consecutive_skips)'
  ),
  'jax_enable_x64': 'a run computes in float32 and bfloat16 (model.dtype)',
  'jax_disable_jit': 'the programs of a run are compiled before its first step',
  'jax_numpy_dtype_promotion': 'a run relies on the standard promotion of types',
  'jax_transfer_guard': 'a run copies prompts and metrics between host and devices',
}
VALUES = ('true', 'strict', 'disallow')
# Options that decide which random numbers are drawn -> their defaults.
GENERATOR = {
  'jax_default_prng_impl': 'threefry2x32',
  'jax_threefry_partitionable': True,
  'jax_random_seed_offset': 0,
}


def check() -> None:
  """Raises ValueError for an option in REFUSED, or if JAX finds no device."""
  for name, reason in REFUSED.items():
    value = str(jax.config.values[name])
    if any(word in value.lower() for word in VALUES):
      raise ValueError(f'{name.upper()}={value}: {reason}; unset it')
  try:
    jax.devices()
  except RuntimeError as error:
    platforms = jax.config.values['jax_platforms']
    raise ValueError(
      f'JAX cannot start its devices with JAX_PLATFORMS={platforms} ({error})'
    ) from error


def generator() -> dict[str, Any]:
  """Returns the values of the options in GENERATOR."""
  return {name: jax.config.values[name] for name in GENERATOR}
