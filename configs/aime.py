r"""Off-policy RL with verifiable rewards on problems with integer answers.

python -m bapo_jax.main --config=configs/aime.py          the embedded default, `tiny`
python -m bapo_jax.main --config=configs/aime.py:7b       the papers' models; they need
python -m bapo_jax.main --config=configs/aime.py:32b      weights and data files
"""

from configs import base


def get_config(arg: str = 'tiny'):
  return base.get_config()
