"""Off-policy reinforcement learning of language models in JAX.

Read types.py (the records), training/trainer.py (the loop), then the folders in the
order of the flow: runtime, models, data, rewards, rollout, algorithms, training, tools.
"""

from bapo_jax.own_code import declare

__all__ = ['declare']
