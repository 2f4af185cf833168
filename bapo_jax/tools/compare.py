"""Compares the runs of several workdirs on one HTML page: `bapo compare`."""

import os
from collections.abc import Sequence

from bapo_jax.run import comparison, document, page, run_files
from bapo_jax.run.run_files import RunFiles
from bapo_jax.runtime import files, metrics

COLOURS = 8  # of pages/page.css


def write(workdirs: Sequence[str], to: str = 'runs/compare.html') -> None:
  """Writes a page on the runs; prints their results and its path.

  Args:
    workdirs: directories of runs.
    to: the page to write

  Raises:
    ValueError: fewer than two runs, one of them twice, a path that does not exist, more
      configs than the page has colours, or another file is at `to`.
    OSError: the page cannot be written.
  """
  files.check_ours(to, document.MARK)
  runs = read([*map(files.local, workdirs)])
  groups = comparison.grouped(runs)
  if len(groups) > COLOURS:
    raise ValueError(
      f'the runs have {len(groups)} different configs, and a page has {COLOURS} '
      'colours; give fewer workdirs'
    )
  files.write(to, page.page(runs))
  for line in comparison.results(groups):
    print(line)
  print(f'{len(runs)} runs of {len(groups)} configs are compared in {to}')


def read(workdirs: Sequence[str]) -> list[RunFiles]:
  """Reads the runs; a name is the path without the part that all runs share.

  Skips files and directories without metrics: `runs/lab/cells/*` also matches the logs
  of an experiment.

  Raises:
    ValueError: see `write`.
  """
  absolute = [os.path.realpath(path) for path in workdirs]
  if len(absolute) < 2 or len(set(absolute)) < len(absolute):
    raise ValueError(
      'compare needs two or more different workdirs, not '
      f'{", ".join(workdirs) or "none"}; for example: bapo compare runs/a runs/b'
    )
  for path in workdirs:
    if not os.path.exists(path):
      raise ValueError(f'{path} does not exist; give directories of runs')
  common = os.path.commonpath(absolute)
  runs = []
  skipped = []
  for path, target in zip(workdirs, absolute, strict=True):
    if metrics.read(path):
      name = os.path.relpath(target, common)
      runs.append(run_files.read(path, path if name == '.' else name))
    else:
      skipped.append(path)
  if len(runs) < 2:
    raise ValueError(
      f'{", ".join(skipped)}: no run with metrics; give directories of two or more runs'
    )
  if skipped:
    print(f'Skipped, without metrics of a run: {", ".join(skipped)}')
  return runs
