"""Writes notebooks/4_runs: what 4_your_run.ipynb shows of two short runs.

  python -m notebooks.save_runs

GRPO, and both methods of this project, from one warm start: the embedded default, but
smaller. Stored are the config, the metrics that are drawn, and a few groups of the last
step; a workdir has the same files, and more in them.
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
STEPS, GROUPS = 30, 6


def get_config(clip: str, batch: str) -> ConfigDict:
  """The embedded default, smaller, with stale weights."""
  config = base.get_config()
  config.steps = STEPS
  config.clip.rule, config.batch.rule = clip, batch
  config.model.update(width=32, layers=2, heads=2, kv_heads=2, head_width=16, ffn=64)
  config.problems.update(family='chain', level=1, train=96, test=96)
  config.prompts.count = 16
  config.learner.minibatches = 4
  config.sampler.max_new_tokens = 24
  config.sft.update(clean=250, noisy=50, batch=32)
  config.rollout.weight_sync_interval = 2
  config.optimizer.lr = 1e-3
  config.evaluate.every = 10
  config.metrics.tensorboard = False
  return config


def keep(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies what the notebook shows."""
  drawn = {name for _, _, names in run_plots.PANELS for name in names}
  drawn |= {'step', 'eval/stderr'}
  (folder / 'groups').mkdir(parents=True, exist_ok=True)
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
      for made in ('data', 'warmstart') if name != 'grpo' else ():
        shutil.copytree(pathlib.Path(scratch, 'grpo', made), workdir / made)
      config = config_lib.parse(get_config(*rules).to_dict())
      experiment.train(config, str(workdir))
      keep(workdir, FOLDER / name)


if __name__ == '__main__':
  main()
