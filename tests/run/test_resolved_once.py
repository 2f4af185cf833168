"""A start reads config.json, finds the model, lays out the mesh and schedules once."""

import collections

import pytest

from bapo_jax import sharding
from bapo_jax.autosetup import check
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.run import experiment
from bapo_jax.tools import eval_checkpoint
from bapo_jax.training import budget

COUNTED = {
  'config.json': [(hf_config, 'read_spec')],
  'directory': [(hf_directory, 'resolve'), (hf_directory, 'find')],
  'mesh': [(sharding, 'make')],
  'schedule': [(budget, 'choose_schedule')],
}
MODES = {
  'train': lambda config, workdir: experiment.train(config, workdir) == 0,
  'check': lambda config, workdir: check.check(config, workdir) in (0, 1),
  'eval': lambda config, workdir: (
    eval_checkpoint.eval_checkpoint(config, workdir, '') == 0
  ),
}


@pytest.fixture
def calls(monkeypatch):
  """Counts calls of the functions in COUNTED by what they resolve."""
  counts = collections.Counter()

  def counted(name, function):
    def call(*args, **kwargs):
      counts[name] += 1
      return function(*args, **kwargs)

    return call

  for name, functions in COUNTED.items():
    for module, function in functions:
      monkeypatch.setattr(module, function, counted(name, getattr(module, function)))
  return counts


@pytest.mark.parametrize('mode', MODES)
def test_a_start_resolves_once(mode, adapter_run, calls, tmp_path, one_device):
  config = adapter_run.config.model_copy(update={'steps': 1})
  assert MODES[mode](config, str(tmp_path / 'run'))
  assert calls == dict.fromkeys(COUNTED, 1)
