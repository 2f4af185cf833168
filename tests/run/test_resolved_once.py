"""A start reads config.json, finds the model, lays out the mesh and schedules once."""

import collections

import foreign
import pytest

from bapo_jax import main, sharding
from bapo_jax.autosetup import check, derive
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


def test_a_derivation_shares_one_mesh(calls, tmp_path, one_device):
  """Lays out three meshes at most: for the memory, for the rules, and for the run."""
  knobs = {
    'model.path': foreign.model(tmp_path / 'model', 'qwen2'),
    'problems.source': foreign.rows(tmp_path / 'a.jsonl', foreign.problems(24)),
    'problems.test_source': foreign.rows(tmp_path / 'b.jsonl', foreign.problems(4, 24)),
  }
  flags = [f'--config.{name}={value}' for name, value in knobs.items()]
  config = main.read_config('configs/finetune.py', flags)
  assert config.derived
  calls.clear()
  derive.prepare(config, str(tmp_path / 'run'))
  assert (calls['config.json'], calls['directory']) == (1, 1)
  assert calls['mesh'] <= 3
