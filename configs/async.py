r"""Rollouts beside training: the embedded default, sampled one step ahead.

  .venv/bin/python -m bapo_jax.main --config=configs/async.py --workdir=runs/ahead
  XLA_FLAGS=--xla_force_host_platform_device_count=2 \
    .venv/bin/python -m bapo_jax.main --config=configs/async.py:beside \
      --workdir=runs/beside

With `rollout.depth=1`, step s trains on groups that the weights of step s - 1 sampled.
The first command samples and trains in turn, on all devices: it is the reference. The
second splits a CPU into two devices, of which one samples while the other trains. Both
end with the same weights, metrics and responses, to the last bit; docs/system/async.md
has the schedule. On an accelerator `:beside` needs two devices;
`--config.mesh.rollout=4` gives four of eight to sampling. The sizes are those of
configs/aime.py, which takes about two minutes on two CPU cores without a depth.
"""

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults


def get_config(arg: str = 'ahead') -> ConfigDict:
  """Returns the config of a variant."""
  return VARIANTS[arg]()


def ahead() -> ConfigDict:
  """Samples one step ahead, on the devices that train."""
  config = defaults()
  config.title = 'trial, tiny, sampled one step ahead'
  config.rollout.depth = 1
  config.mesh.data = 1
  return config


def beside() -> ConfigDict:
  """Samples one step ahead, on a device of its own."""
  config = ahead()
  config.title += ' on another device'
  config.mesh.rollout = 1
  return config


VARIANTS = {'ahead': ahead, 'beside': beside}
