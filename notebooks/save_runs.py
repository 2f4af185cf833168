"""Writes notebooks/4_runs: what 4_your_run.ipynb shows of two short runs.

  python -m notebooks.save_runs

GRPO, and both methods of this project, from one warm start: the embedded default with
weights that are up to one step stale, about three minutes of one core. Stored are the
config, the metrics that are drawn, and a few groups of the last step; a workdir has the
same files, and more in them.
"""

import json
import pathlib
import shutil
import tempfile

from ml_collections import ConfigDict

from bapo_jax.run import experiment, step_record
from bapo_jax.runtime import metrics
from bapo_jax.training import config as config_lib
from configs import base
from lab import run_plots

FOLDER = pathlib.Path(__file__).with_name('4_runs')
RUNS = {'grpo': ('fixed', 'fresh_only'), 'both': ('balanced', 'adapted')}
STEPS, GROUPS = 80, 6


def get_config(clip: str, batch: str) -> ConfigDict:
  """The embedded default, with stale weights."""
  config = base.get_config()
  config.steps = STEPS
  config.clip.rule, config.batch.rule = clip, batch
  config.rollout.weight_sync_interval = 2
  config.evaluate.every = 10
  config.metrics.tensorboard = False
  return config


def keep(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies what the notebook shows."""
  drawn = {name for _, _, names in run_plots.PANELS for name in names}
  drawn |= {'step', 'eval/stderr'}
  shutil.rmtree(folder / 'groups', ignore_errors=True)
  (folder / 'groups').mkdir(parents=True)
  rows = [{k: v for k, v in r.items() if k in drawn} for r in metrics.read(workdir)]
  lines = [metrics.to_json({k: round(v, 5) for k, v in row.items()}) for row in rows]
  (folder / 'metrics.jsonl').write_text('\n'.join([*lines, '']))
  shutil.copy(workdir / 'config.json', folder)
  step = step_record.newest(str(workdir))
  assert step is not None, 'every run records its last step'
  groups = [json.dumps(g) for g in step_record.read(str(workdir), step)]
  (folder / 'groups' / f'{step}.jsonl').write_text('\n'.join([*groups[:GROUPS], '']))


def main() -> None:
  """Trains both runs, the second from the warm start of the first."""
  with tempfile.TemporaryDirectory() as scratch:
    for name, rules in RUNS.items():
      workdir = pathlib.Path(scratch, name)
      if name != 'grpo':
        shutil.copytree(
          pathlib.Path(scratch, 'grpo', 'warmstart'), workdir / 'warmstart'
        )
      config = config_lib.parse(get_config(*rules).to_dict())
      experiment.train(config, str(workdir))
      keep(workdir, FOLDER / name)


if __name__ == '__main__':
  main()
