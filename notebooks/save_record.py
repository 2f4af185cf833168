"""Writes notebooks/5_run: the recorded batch of 5_counterfactual.ipynb.

  python -m notebooks.save_record [--workdir=runs/record]

Ten steps of GRPO, sixteen updates each, on the problems of papers/2510.18927 with
a limit of 130 tokens, from a tuning seed. Stored are the config and the groups of the
last step; a workdir has the same files, and more. A run in a given workdir goes on
where it stopped.

The files at hand were made with the problems of commit 9ff1574, in which a hard problem
may have the modulus 10.
"""

import argparse
import pathlib
import shutil
import tempfile

from bapo_jax.tools import claims, sweep_grid
from bapo_jax.training import config as config_lib
from bapo_jax.training import experiment, step_record
from bapo_jax.training.config import Config

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = pathlib.Path(__file__).with_name('5_run')
STEPS, LIMIT = 10, 130


def get_config() -> Config:
  """GRPO in the first paper's shared setting, with a longer limit, for ten steps."""
  paper = claims.load(str(ROOT / 'papers' / '2510.18927'))
  knobs = paper.ARMS['grpo'] | {
    'title': 'pair, GRPO, sixteen updates',
    'steps': STEPS,
    'seed': paper.TUNING[0],
    'sampler.max_new_tokens': LIMIT,
    'evaluate.every': STEPS,
  }
  return config_lib.parse(sweep_grid.with_knobs(paper.shared(), knobs))


def main() -> None:
  """Trains, and copies config.json and the groups of the last step."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', default='')
  given = parser.parse_args().workdir
  with tempfile.TemporaryDirectory() as scratch:
    workdir = pathlib.Path(given or scratch)
    status = experiment.train(get_config(), str(workdir))
    assert status == 0, f'the run ended with status {status}'
    (FOLDER / step_record.FOLDER).mkdir(parents=True, exist_ok=True)
    for path in ('config.json', f'{step_record.FOLDER}/{STEPS}.jsonl'):
      shutil.copy(workdir / path, FOLDER / path)


if __name__ == '__main__':
  main()
