"""Reads the files of a run that pages show; needs neither model nor weights.

The run may be in progress: a file that it has not written yet is neutral.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from bapo_jax.run import step_record
from bapo_jax.runtime import files, metrics
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.metrics import Row
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config


class RunFiles(NamedTuple):
  """The files of a workdir that the pages show."""

  name: str
  workdir: str
  values: files.Object  # of config.json, section -> knob -> value
  # Dotted name -> value; knobs that the version of the run lacked have their defaults.
  knobs: files.Object
  rows: list[Row]  # of metrics.jsonl
  before: files.Object | None  # that of step 0, if its settings are those of the last
  after: files.Object | None  # the last evaluation
  groups: list[files.Object]  # of the newest recorded step
  facts: Mapping[str, Any]  # of report.json; {} while the run trains
  decided: Mapping[str, Any]  # dotted name -> value of knobs that the program decided
  last: int  # the number of steps done


def read(workdir: str, name: str = '') -> RunFiles:
  """Reads a workdir; an empty `name` stands for the name of the directory.

  Raises:
    ValueError: the workdir has no run, or a file of the run is damaged.
  """
  values = workdirs.read_config(workdir)
  rows = metrics.read(workdir)
  evaluated = [int(row['step']) for row in rows if 'eval/accuracy' in row]
  newest = max(evaluated, default=0)
  last = int(max((row['step'] for row in rows), default=0))
  recorded = step_record.newest(workdir)
  path = os.path.join(workdir, 'report.json')
  facts = files.read_object(path, 'remove it') if os.path.exists(path) else {}
  before = _evaluation(workdir, 0)
  after = _evaluation(workdir, newest) if newest else None
  if before and after and not evaluate.comparable(before['result'], after['result']):
    before = None
  return RunFiles(
    name or os.path.basename(os.path.abspath(workdir)),
    workdir,
    values,
    flat(Config().model_dump(mode='json')) | flat(values),
    rows,
    before=before,
    after=after,
    groups=[] if recorded is None else step_record.read(workdir, recorded),
    # A report of fewer steps is an old one: the run trains on.
    facts=facts if facts.get('steps') == last else {},
    decided=workdirs.read_resolved(workdir).get('decided', {}),
    last=last,
  )


def flat(values: files.Object) -> files.Object:
  """Returns dotted name -> value of nested knobs."""
  return traverse_util.flatten_dict(values, sep='.')


def _evaluation(workdir, step):
  if not os.path.exists(os.path.join(workdir, 'eval', f'{step}.json')):
    return None
  return evaluate.read_recorded(workdir, step)
