"""Off-policy reinforcement learning of language models in JAX.

Python programs call `train`, and custom functions use `declare`; see
docs/guide/library.md. To read the code, start with types.py (the records) and
training/trainer.py (the loop), then the folders in the order of the flow: runtime,
models, data, rewards, rollout, algorithms, training, run, tools.
"""

from typing import Any

from bapo_jax.custom_code import declare

__all__ = ['declare', 'train']


def __getattr__(name: str) -> Any:
  """Imports `train` when it is used, because it imports JAX."""
  if name == 'train':
    from bapo_jax.run.library import train

    return train
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
