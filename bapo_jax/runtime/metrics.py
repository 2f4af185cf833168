"""Writes the metrics of every step, reads them back, and prints one line per step.

1. `open_writers` appends rows to metrics.jsonl, to TensorBoard and to W&B, and removes
   the rows that a resumed run writes again; a name must be in the glossary;
2. `read` returns the rows;
3. `line` formats a row for the console, and `legend` explains its columns.
"""

import difflib
import importlib
import json
import math
import os
import pathlib
import shutil
import textwrap
import time
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bapo_jax.runtime import files, hosts, markdown
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.progress import log

Row = dict[str, float]  # metric -> value; read from a file also step -> int
Path = str | os.PathLike[str]


class Sink(NamedTuple):
  """Writes rows to one destination."""

  write: Callable[[int, Row], None]  # step, metrics
  close: Callable[[], None]


def _check(names: Iterable[str]) -> None:
  """Raises ValueError for a name that the glossary does not define."""
  for name in names:
    if name not in GLOSSARY:
      near = difflib.get_close_matches(name, GLOSSARY, n=3, cutoff=0.0)
      raise ValueError(
        f'no metric named {name!r}; the nearest are {near}; '
        'define a new metric in runtime/glossary.py'
      )


def to_json(row: Mapping[str, float]) -> str:
  """Formats a row as a line; nan and inf become strings that float() reads."""
  values = {name: float(value) for name, value in row.items() if name != 'step'}
  finite = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
  return json.dumps({'step': int(row['step']), **finite}, allow_nan=False)


def from_json(text: str) -> Row:
  """Reads the row that `to_json` wrote; raises for any other text."""
  row = json.loads(text)
  if 'step' not in row:
    raise ValueError('no step')
  return {k: int(v) if k == 'step' else float(v) for k, v in row.items()}


def read(workdir: Path) -> list[Row]:
  """Reads workdir/metrics.jsonl in the order written; [] without the file.

  A last line that a kill left incomplete is skipped.

  Raises:
    ValueError: a line before the last is not a row, or the file cannot be read.
  """
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  try:
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
  except FileNotFoundError:
    return []
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); put it back, or move it away: the '
      'run then continues without the rows so far'
    ) from error
  lines = lines[: max((i + 1 for i, text in enumerate(lines) if text), default=0)]
  rows = []
  for i, text in enumerate(lines):
    try:
      rows.append(from_json(text))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
      if i + 1 < len(lines):
        raise ValueError(
          f'{path}, line {i + 1} of {len(lines)} is not a row of metrics: '
          f'{text[:60]!r}; delete the line, or start in another workdir'
        ) from error
  return rows


def report_lost(workdir: Path, step: int) -> None:
  """Logs which rows of the steps 0 to `step` are missing, and keeps a copy of the file.

  Raises:
    ValueError: a line before the last is not a row, or the file cannot be read.
  """
  steps = {row['step'] for row in read(workdir)}
  lost = [n for n in range(step + 1) if n not in steps]
  if not lost:
    return
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  message = f'{path} lacks {len(lost)} rows of the steps 0 to {step}'
  if path.exists():
    copy = path.with_name('metrics-damaged.jsonl')
    shutil.copyfile(path, copy)
    message += f' (a copy of the file as it is: {copy})'
  log(f'{message}; first {lost[0]}, last {lost[-1]}. The report omits these steps.')


def _need(package: str, knob: str) -> types.ModuleType:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f'{knob}=True needs the package {package}, which cannot be imported ({error}); '
      f'pip install {package}, or set {knob}=False'
    ) from error


def _jsonl(workdir: pathlib.Path, step: int) -> Sink:
  path = workdir / 'metrics.jsonl'
  rows = [row for row in read(workdir) if row['step'] <= step]
  new = workdir / 'metrics.jsonl.tmp'
  with files.naming(path):
    with open(new, 'w', encoding='utf-8') as file:
      file.writelines(to_json(row) + '\n' for row in rows)
      file.flush()
      os.fsync(file.fileno())
    os.replace(new, path)  # a kill leaves the old rows or the new rows
    # Unbuffered: after a full disk refused a row, closing the file does not try again.
    file = open(path, 'ab', buffering=0)  # noqa: SIM115 (open as long as the run)

  def write(step: int, row: Row) -> None:
    left = (to_json({'step': step, **row}) + '\n').encode()
    with files.naming(path):
      while left:  # an almost full disk takes a part; the next write raises
        left = left[file.write(left) :]

  return Sink(write, file.close)


def _tensorboard(workdir: pathlib.Path, step: int, config: dict | None) -> Sink:
  # Its SummaryWriter writes in a thread. A full disk ends the thread, and the next row
  # would wait for it for ever.
  summary = _need('tensorboardX.summary', 'metrics.tensorboard')
  proto = importlib.import_module('tensorboardX.proto.event_pb2')
  lib = importlib.import_module('tensorboardX.event_file_writer')
  path = workdir / 'tensorboard'
  with files.naming(path):
    path.mkdir(exist_ok=True)
    board = lib.EventsWriter(str(path / 'events'))

  def emit(step: int, **event: Any) -> None:
    board.write_event(proto.Event(step=step, wall_time=time.time(), **event))

  def write(step: int, row: Row) -> None:
    with files.naming(path):
      for name, value in row.items():
        # Not summary.scalar, which warns of every nan on the console.
        scalar = summary.Summary.Value(tag=name, simple_value=value)
        emit(step, summary=summary.Summary(value=[scalar]))
      board.flush()

  # TensorBoard then hides earlier events of this step and later ones.
  start = proto.SessionLog(status=proto.SessionLog.START)
  emit(step + 1, session_log=start)
  if config is not None:
    text = markdown.fence(str(config))
    emit(max(step, 0), summary=summary.text('config', text))
  return Sink(write, board.close)


def _wandb(workdir: pathlib.Path, config: dict | None) -> Sink:
  lib = _need('wandb', 'metrics.wandb')
  path = workdir / 'wandb_id.txt'  # a resumed run continues the same curve
  if not path.exists():
    path.write_text(uuid.uuid4().hex)
  run = lib.init(
    project='bapo_jax',
    name=workdir.resolve().name,
    id=path.read_text(),
    dir=str(workdir),
    config=config,
    resume='allow',
  )
  # W&B ignores steps that it already has: after a resume metrics.jsonl is right.
  return Sink(lambda step, row: run.log(row, step=step), run.finish)


class Writers:
  """Writes to every sink: `write(step, metrics)`, `close()`; a context manager too."""

  def __init__(self, sinks: Iterable[Sink]):
    self._sinks = tuple(sinks)

  def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes the metrics of a step.

    Raises:
      ValueError: a name is not in the glossary; then nothing is written.
      OSError: the system refused; its filename is set.
    """
    _check(metrics)
    row = {name: float(value) for name, value in metrics.items()}
    for sink in self._sinks:
      sink.write(int(step), row)

  def close(self) -> None:
    """Closes every sink."""
    for sink in self._sinks:
      sink.close()

  def __enter__(self) -> 'Writers':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def open_writers(
  workdir: Path,
  step: int,
  *,
  tensorboard: bool,
  wandb: bool,
  config: dict | None = None,
) -> Writers:
  """Opens writers into `workdir`; only process 0 writes.

  Args:
    workdir: made if it does not exist.
    step: the step resumed from; later rows are removed. -1 starts afresh, without rows.
    tensorboard: writes event files in workdir/tensorboard.
    wandb: writes to Weights & Biases.
    config: shown beside the curves.

  Raises:
    ValueError: a package is missing; then no row is removed.
  """
  if not hosts.is_first():
    return Writers([])
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  sinks = []
  if wandb:  # first: a missing package is an error before rows are removed
    sinks.append(_wandb(workdir, config))
  if tensorboard:
    sinks.append(_tensorboard(workdir, step, config))
  return Writers([_jsonl(workdir, step), *sinks])


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
WIDTH = 100  # characters of a line of the console


def legend() -> str:
  """Returns an explanation of the columns of `line`, wrapped at WIDTH characters."""
  named = ', '.join(f'{label} = {name}' for label, name, _ in COLUMNS)
  text = (
    f'Columns: {named.replace(", .. =", " ..")}. '
    'bapo_jax/runtime/glossary.py defines every metric.'
  )
  # textwrap does not break at \0: a label and its metric stay on one line.
  text = text.replace(' = ', '\0=\0').replace(' .. ', '\0..\0')
  filled = textwrap.fill(text, WIDTH, subsequent_indent='  ', break_on_hyphens=False)
  return filled.replace('\0', ' ')


def line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
  """Formats the metrics of a step for the console; '-' is a missing value.

  Args:
    step: learner steps done.
    steps: learner steps of the run; its width aligns the lines.
    metrics: name -> value.
  """
  cells = [f'{step:>{len(str(steps))}}/{steps}']
  for label, name, form in COLUMNS:
    width = int(form.split('.')[0])
    text = format(float(metrics[name]), form) if name in metrics else '-'
    cells.append(f'{label} {text:>{width}}')
  return '  '.join(cells).replace('  .. ', ' .. ')
