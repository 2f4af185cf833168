"""Runs the first command of the README: from nothing to a trained policy of 0.1 M."""

import os
import tempfile
from collections.abc import Iterator

from benchmarks.first_contact.figures import Context, Figure
from benchmarks.training import main_job

SHORT = ['--config.steps=3', '--config.sft.clean=20', '--config.sft.noisy=5']
TINY = ['--config.steps=1', '--config.sft.clean=2', '--config.sft.noisy=1']
TINY += ['--config.problems.custom.train=128', '--config.problems.custom.test=32']
FULL_S = 240  # with less time left, or on a CPU, the run is shortened


def overrides(context: Context) -> list[str]:
  """Returns the flags that shorten the run; none where the full run fits."""
  if context.small:
    return TINY
  full = context.platform != 'cpu' and context.seconds >= FULL_S
  return [] if full else SHORT


def run(context: Context) -> Iterator[Figure]:
  """Yields seconds and held-out accuracy of the run, by its own report."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = os.path.join(folder, 'run')
    report = main_job.run(0, workdir, overrides(context))
    row = main_job.row(0, report, workdir)
  yield Figure('steps', report['steps'], 'steps')
  yield Figure('wall time', row['wall_s'], 's')
  yield Figure('accuracy before', row['before'], 'share')
  yield Figure('accuracy after', row['after'], 'share')
  yield Figure('time outside sampler and learner', row['host_share'], 'share')
