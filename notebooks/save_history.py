"""Writes notebooks/3_history.npz: who was asked, seated and shelved in a real run.

  python -m notebooks.save_history

A short run of the batch rule `adapted` on 96 embedded problems, each of which comes up
again every third step. The policy is random at first and had a brief warm start.
"""

import pathlib
import tempfile

import jax
import numpy as np

from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import setup, trainer, validate
from configs import base

FILE = pathlib.Path(__file__).with_name('3_history.npz')
STEPS = 40
COUNTS = ('entered', 'promoted', 'graduated', 'progressed', 'evicted')


def get_config():
  """The embedded default, smaller, with little room on the buffer."""
  config = base.get_config()
  config.steps = STEPS
  config.problems.update(level=3, train=96, test=64)
  config.prompts.count = 32
  config.sft.update(clean=250, noisy=0, batch=64)
  config.batch.rule = 'adapted'
  config.rollout.weight_sync_interval = 2
  config.buffer.update(capacity=12, reevaluated=6, every=4)
  return config


def main() -> None:
  """Writes the file."""
  config, noted = get_config(), []
  with tempfile.TemporaryDirectory() as workdir:
    job, run = setup.start(config, validate.check(config), workdir, PhaseTimer())

    def note(fresh, reevaluated, groups, source_P, buffer, now, told):
      nobody = config.buffer.reevaluate - len(reevaluated.id_P)
      row = {'source': source_P, 'learned_born': groups.completed_step_P}
      for name, tried in (
        ('fresh', fresh),
        ('recheck', reevaluated),
        ('learned', groups),
      ):
        right_P = np.where(tried.completed_step_P < 0, -1, tried.correct_PG.sum(1))
        missing = nobody if name == 'recheck' else 0
        for kind, x in (('id', tried.id_P), ('right', right_P)):
          row[f'{name}_{kind}'] = np.pad(x, (0, missing), constant_values=-1)
      for name in ('hard', 'good'):
        shelf = getattr(buffer, name)
        row[name] = np.where(shelf.completed_step_P < 0, -1, shelf.id_P)
      noted.append(jax.device_get(row))
      return job.describe(fresh, reevaluated, groups, source_P, buffer, now, told)

    for _, told in trainer.train_loop(job._replace(describe=note), run):
      noted[-1] |= {name: told[f'buffer/{name}'] for name in COUNTS}
      print(
        len(noted), {name: noted[-1][name] for name in COUNTS}, told['batch/filled']
      )
  columns = {name: np.asarray([row[name] for row in noted]) for name in noted[0]}
  columns = {name: x.astype(np.int16) for name, x in columns.items()}
  np.savez_compressed(FILE, **columns, group=config.sampler.group_size)
  print(f'{FILE}: {FILE.stat().st_size} bytes, {len(noted)} steps')


if __name__ == '__main__':
  main()
