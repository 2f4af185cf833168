"""Writes notebooks/3_history.npz: a short run of the rule `adapted`, step by step.

  python -m notebooks.save_history

The run has 96 embedded problems, each of which comes up every third step, and little
room in the replay buffer. Its policy starts at random and has a brief warm start.
Stored for each step: which problems were sampled, with how many right responses; which
groups got a seat, and from which source; which problems the buffer holds afterwards.
"""

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from bapo_jax.rollout.rollout import Rollout
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, trainer
from bapo_jax.training.config import parse
from bapo_jax.training.state import Metrics, TrainState
from bapo_jax.types import Groups, concat
from configs import base

FILE = pathlib.Path(__file__).with_name('3_history.npz')
STEPS = 40
MOVES = ('entered', 'promoted', 'graduated', 'progressed', 'evicted')


def get_config() -> ConfigDict:
  """The embedded default, smaller, with little room in the buffer."""
  config = base.get_config()
  config.steps = STEPS
  config.problems.update(level=3, train=96, test=64)
  config.prompts.count = 32
  config.sft.update(clean=250, noisy=0, batch=64)
  config.batch.rule = 'adapted'
  config.rollout.weight_sync_interval = 2
  config.buffer.update(capacity=12, reevaluate=6, reeval_interval=4)
  return config


def record(
  s: TrainState,
  fresh: list[Rollout],
  reevaluated: Rollout,
  batch: Groups,
  source_P: Array,
  moves: Metrics,
  rows: int,
) -> dict[str, np.ndarray]:
  """What one step did; -1 marks an empty row. `rows`: re-evaluations at most."""
  sampled = concat(*(each.groups for each in fresh))
  hard = reevaluated.groups
  missing = (0, rows - len(hard.id_P))
  found = {
    'source_SP': source_P,
    'batch_id_SP': batch.id_P,
    'fresh_id_SP': sampled.id_P,
    'fresh_correct_SP': num_correct(sampled),
    'reevaluated_id_SR': np.pad(hard.id_P, missing, constant_values=-1),
    'reevaluated_correct_SR': np.pad(num_correct(hard), missing, constant_values=-1),
  }
  for part in ('hard', 'reusable'):
    groups = getattr(s.buffer, part)
    found[f'{part}_id_SN'] = np.where(groups.completed_step_P < 0, -1, groups.id_P)
  found |= {f'{name}_S': np.int32(moves[f'buffer/{name}']) for name in MOVES}
  return jax.device_get(found)


def num_correct(groups: Groups) -> np.ndarray:
  """Right responses of each group, -1 of an empty row."""
  return np.where(groups.completed_step_P < 0, -1, groups.correct_PG.sum(1))


def main() -> None:
  """Trains, with the lines of `trainer.train_loop`, and writes the file."""
  config, steps = parse(get_config().to_dict()), []
  with tempfile.TemporaryDirectory() as workdir:
    t, s = build.start(config, workdir, PhaseTimer())
    while not trainer.finished(config, s):
      keys = trainer.step_keys(config.seed, s.step)
      s = trainer.sync_actor_if_due(t, s)
      hard = trainer.hard_prompts(t, s)
      reevaluated = trainer.reevaluate(t, s, hard, keys.reevaluate)
      s, fresh, batch, source_P = trainer.fill_batch(t, s, reevaluated.groups, keys)
      s = trainer.free_actor_if_due(t, s)
      s, _ = trainer.update(t, s, batch, source_P, keys.update)
      s, moves = trainer.insert(t, s, fresh, reevaluated, batch, source_P)
      s = dataclasses.replace(s, step=s.step + 1)
      rows = config.buffer.reevaluate
      steps.append(record(s, fresh, reevaluated, batch, source_P, moves, rows))
      print(s.step, {name: int(moves[f'buffer/{name}']) for name in MOVES})
  columns = {name: np.asarray([step[name] for step in steps]) for name in steps[0]}
  columns = {name: x.astype(np.int16) for name, x in columns.items()}
  np.savez_compressed(
    FILE, allow_pickle=False, **columns, group_size=config.sampler.group_size
  )
  print(f'{FILE}: {FILE.stat().st_size} bytes, {len(steps)} steps')


if __name__ == '__main__':
  main()
