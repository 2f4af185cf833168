"""The command line: python -m bapo_jax.main --config=configs/aime.py [--workdir=...]

Errors of the user are one sentence and exit status 2, before anything compiles.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'A file of configs/, with `:variant` where it has some.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/default', 'Everything a run writes; give it again to resume.'
)
MODE = flags.DEFINE_enum('mode', 'train', ['train'], 'What to do.')


def parse(argv):
  """absl's parser, its errors cut down to the sentence that helps."""
  try:
    left = flags.FLAGS(argv)
  except (
    flags.Error,
    ValueError,
    AttributeError,
    KeyError,
    TypeError,
    OSError,
  ) as error:
    fail(error)
  if CONFIG.value is None:
    fail('give a --config, for instance --config=configs/aime.py')
  if len(left) > 1:
    fail(f'what is {left[1]!r}? Overrides look like --config.steps=10')
  return left


def fail(error) -> None:
  """One sentence on stderr, exit status 2."""
  print(f'bapo_jax: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)


def main(argv) -> None:
  del argv
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
  # Imported late: a misspelt flag should not wait for JAX to load.
  from bapo_jax import experiment

  try:
    status = experiment.train(CONFIG.value, WORKDIR.value)
  except ValueError as error:
    fail(error)
  sys.exit(status)


if __name__ == '__main__':
  app.run(main, flags_parser=parse)
