"""Writes the metrics of every step, reads them back, and prints one line per step.

Rows go to metrics.jsonl, to TensorBoard and to W&B; the glossary defines every name.
updates.jsonl has the clip bounds of every optimiser update, a row each.
"""

import importlib
import json
import math
import os
import pathlib
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from bapo_jax.runtime import files, hosts
from bapo_jax.runtime.files import Path
from bapo_jax.runtime.glossary import GLOSSARY, OF_SET

PARTS = 'reward/'  # the named parts of rewards; in evaluations, eval/reward/
Row = dict[str, float]  # metric -> value; a row from a file also has step -> int
Write = Callable[[int, Row], None]  # step, metrics
SETTINGS = 'eval/settings'
STEPS = 'metrics.jsonl'
UPDATES = 'updates.jsonl'
OF_UPDATE = (  # what updates.jsonl has of each optimiser update
  'clip/low',
  'clip/high',
  'clip/search_steps',
  'clip/target_met',
  'clip/no_evidence',
  'clip/share_start',
  'clip/share',
  'learner/skipped',
)


def to_json(row: Mapping[str, float]) -> str:
  """Formats a row as JSON; undefined and infinite values are null."""
  values = {name: float(value) for name, value in row.items() if name != 'step'}
  finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
  return json.dumps({'step': int(row['step']), **finite}, allow_nan=False)


def read(workdir: Path, name: str = STEPS) -> list[Row]:
  """Reads the rows of a file of a workdir, oldest first; [] if the file is missing.

  null is nan. Skips a last line that is incomplete, as a killed run leaves it. Leaves
  out the results of evaluations with other settings than the last: only SETTINGS is
  left of them. Results of old versions, without settings, are kept.

  Raises:
    ValueError: a line before the last is not a row of metrics.
  """
  path = pathlib.Path(workdir, name)
  lines = path.read_bytes().splitlines() if path.exists() else []
  rows: list[Row] = []
  for i, line in enumerate(lines, 1):
    try:
      values = json.loads(line.decode())  # a byte that is not UTF-8 would change a name
      row = {k: math.nan if x is None else float(x) for k, x in values.items()}
      rows.append({'step': int(row.pop('step'))} | row)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      if i < len(lines):
        raise ValueError(
          f'{path}, line {i} of {len(lines)} is not a row of metrics: {line[:60]!r}; '
          'delete the line, or give another --workdir'
        ) from error
  last = [row[SETTINGS] for row in rows if SETTINGS in row][-1:]
  for row in rows:
    if SETTINGS in row and [row[SETTINGS]] != last:
      for result in [x for x in row if x.startswith('eval/') and x != SETTINGS]:
        del row[result]
  return rows


def _need(package, knob):
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f'{knob}=True needs the package {package}, which cannot be imported ({error}); '
      f'pip install {package.partition(".")[0]}, or set {knob}=False'
    ) from error


def _jsonl(workdir: Path, name: str, step, stack: ExitStack):
  path = os.path.join(workdir, name)
  lines = (to_json(row) for row in read(workdir, name) if row['step'] <= step)
  files.write(path, ''.join(f'{line}\n' for line in lines))
  with files.naming(path):
    # Unbuffered: closing the file does not retry a write that failed on a full disk.
    file = stack.enter_context(open(path, 'ab', buffering=0))  # noqa: SIM115

  def write(step, row: Row):
    left = (to_json({'step': step, **row}) + '\n').encode()
    with files.naming(path):
      while left:  # an almost full disk writes a part; the next write raises
        left = left[file.write(left) :]

  return write


def _tensorboard(workdir: Path, step, stack: ExitStack):
  # Not tensorboardX's SummaryWriter: a full disk ends its writer thread, and the next
  # row would wait for the thread forever.
  summary = _need('tensorboardX.summary', 'metrics.tensorboard')
  proto = importlib.import_module('tensorboardX.proto.event_pb2')
  lib = importlib.import_module('tensorboardX.event_file_writer')
  path = os.path.join(workdir, 'tensorboard')
  with files.naming(path):
    os.makedirs(path, exist_ok=True)
    board = lib.EventsWriter(os.path.join(path, 'events'))
  stack.callback(board.close)

  def emit(step, **event: Any):
    board.write_event(proto.Event(step=step, wall_time=time.time(), **event))

  def write(step, row: Row):
    with files.naming(path):
      for name, value in row.items():
        # Not summary.scalar, which warns about every nan on the console.
        scalar = summary.Summary.Value(tag=name, simple_value=value)
        emit(step, summary=summary.Summary(value=[scalar]))
      board.flush()

  # Makes TensorBoard hide the events after `step` that an earlier start wrote.
  emit(step + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))
  return write


def _wandb(workdir: Path, stack: ExitStack, config: dict | None):
  lib = _need('wandb', 'metrics.wandb')
  path = pathlib.Path(workdir, 'wandb_id.txt')  # a resumed run continues the same curve
  if not path.exists():
    path.write_text(uuid.uuid4().hex)
  name = path.resolve().parent.name
  old = {'id': path.read_text(), 'resume': 'allow'}
  run = lib.init(project='bapo_jax', name=name, dir=str(workdir), config=config, **old)
  stack.callback(run.finish)
  # W&B ignores steps that it already has; after a resume, trust metrics.jsonl.
  return lambda step, row: run.log(row, step=step)


@contextmanager
def writing(
  workdir: Path,
  step: int,
  name: str = STEPS,
  *,
  tensorboard: bool = False,
  wandb: bool = False,
  config: dict | None = None,
) -> Iterator[Write]:
  """Yields a function that writes a row to a file; only process 0 writes.

  Removes rows after `step`, the step resumed from; -1 removes all rows.
  W&B shows the config next to the curves.

  Raises:
    ValueError: a package is missing (no row is removed), or the function received a
      name that is not in the glossary (nothing is written).
    OSError: the write failed; the exception's `filename` is set.
  """
  sinks: list[Write] = []

  def write(step, metrics: Row):
    for name in metrics:
      whole = OF_SET.sub('eval/', name)
      if whole not in GLOSSARY and not whole.removeprefix('eval/').startswith(PARTS):
        raise ValueError(f'no metric named {name!r}; define it in runtime/glossary.py')
    row = {name: float(value) for name, value in metrics.items()}
    for sink in sinks:
      sink(step, row)

  with ExitStack() as stack:
    if hosts.is_first():
      if wandb:  # a missing package must raise before rows are removed
        sinks.append(_wandb(workdir, stack, config))
      if tensorboard:
        sinks.append(_tensorboard(workdir, step, stack))
      sinks.insert(0, _jsonl(workdir, name, step, stack))
    yield write


COLUMNS = (  # label, metric, format
  ('acc', 'rollout/accuracy', '5.3f'),
  ('len', 'rollout/length', '6.0f'),
  ('kl', 'loss/kl', '7.4f'),
  ('entropy', 'loss/entropy', '6.3f'),
  ('share', 'clip/share', '5.3f'),
  ('bounds', 'clip/low', '5.3f'),
  ('..', 'clip/high', '5.3f'),
  ('clipped', 'clip/fraction', '6.4f'),
  ('grad', 'learner/grad_norm', '8.3g'),
  ('tok/s', 'rollout/tokens_per_s', '6.0f'),
  ('sec', 'time/step', '6.1f'),
)
WIDTH = 100  # characters per console line


def legend() -> str:
  """Returns a text that names the metric in each column that `line` prints."""
  named = ', '.join(f'{label}={name}' for label, name, _ in COLUMNS)
  named = named.replace(', ..=', '..')
  text = f'Columns: {named}. bapo_jax/runtime/glossary.py defines every metric.'
  return textwrap.fill(text, WIDTH, subsequent_indent='  ', break_on_hyphens=False)


def line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
  """Formats the metrics of a step for the console; '-' is a missing value.

  `steps` is the number of learner steps of the run; its width aligns the lines.
  """
  cells = [f'{step:>{len(str(steps))}}/{steps}']
  for label, name, form in COLUMNS:
    width = int(form.split('.')[0])
    text = format(float(metrics[name]), form) if name in metrics else '-'
    cells.append(f'{label} {text:>{width}}')
  return '  '.join(cells).replace('  .. ', ' .. ')
