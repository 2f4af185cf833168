"""Writes notebooks/5_run: the recorded batch of 5_counterfactual.ipynb.

  python -m notebooks.save_record [--workdir=runs/record]

Twenty steps of GRPO in the setting of the main comparison of papers/2510.18927, from a
tuning seed. Stored are the config, the groups of the last step and its checkpoint; a
workdir has the same files, and more. A run in a given workdir goes on where it stopped.
"""

import argparse
import pathlib
import shutil
import tempfile

from bapo_jax.run import experiment, step_record
from bapo_jax.runtime import digests
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from lab import claims

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = pathlib.Path(__file__).with_name('5_run')
STEPS = 20


def get_config() -> Config:
  """GRPO in the first paper's main comparison, for twenty steps."""
  paper = claims.load(str(ROOT / 'papers' / '2510.18927'))
  level, updates = paper.MAIN
  knobs = paper.ARMS['grpo'] | paper.IMBALANCE[level] | paper.UPDATES[updates]
  knobs |= {
    'title': 'pair, GRPO, sixteen updates',
    'steps': STEPS,
    'seed': paper.TUNING[0],
    'sft.seed': paper.TUNING[0],
    'evaluate.every': STEPS,
  }
  return config_lib.parse(config_lib.merged(paper.shared(), knobs))


def main() -> None:
  """Trains, and copies config.json, the groups of the last step and its checkpoint."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', default='')
  given = parser.parse_args().workdir
  with tempfile.TemporaryDirectory() as scratch:
    workdir = pathlib.Path(given or scratch)
    status = experiment.train(get_config(), str(workdir))
    assert status == 0, f'the run ended with status {status}'
    shutil.rmtree(FOLDER / step_record.FOLDER, ignore_errors=True)
    (FOLDER / step_record.FOLDER).mkdir(parents=True)
    for path in ('config.json', f'{step_record.FOLDER}/{STEPS}.jsonl'):
      shutil.copy(workdir / path, FOLDER / path)
    newest = f'checkpoints/{STEPS}'
    shutil.rmtree(FOLDER / 'checkpoints', ignore_errors=True)
    shutil.copytree(workdir / newest, FOLDER / newest)
    for path in (FOLDER / newest).rglob('commit_success.txt'):
      path.write_text('')  # it names the workdir; that it is there is what counts
    digests.write(str(FOLDER / newest), str(STEPS))


if __name__ == '__main__':
  main()
