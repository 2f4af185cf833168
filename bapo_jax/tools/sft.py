"""Makes an embedded policy and writes its model directory: `bapo sft`."""

import os

from bapo_jax.autosetup import derive
from bapo_jax.runtime.progress import log
from bapo_jax.training import sft as policy
from bapo_jax.training.config import Config


def sft(config: Config, to: str = 'policy') -> int:
  """Writes the policy that a run of this config starts from; returns 0.

  Args:
    config: the config of the run.
    to: the directory to write

  Raises ValueError if the config names a model, or `to` exists.
  """
  if config.model.path:
    raise ValueError(
      f'model.path={config.model.path}: a run of this config starts from that model; '
      'remove model.path to make a policy by the section sft'
    )
  if os.path.lexists(to):
    raise ValueError(f'--to={to} exists; give a new directory')
  r = derive.prepare(config, '')
  policy.describe(r.config, to)
  policy.complete(r.config, r.tokenizer, r.data, to)
  log(f'Policy {policy.fingerprint(r.config)}: {to}')
  return 0
