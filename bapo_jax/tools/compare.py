"""--mode=compare: writes one HTML page that compares runs.

1. Runs whose configs differ only in seeds and in NUISANCE form a group, which has one
   colour everywhere;
2. `paired` subtracts the final metrics of the first group from those of each other
   group, seed by seed: this removes the variation that a seed causes in both;
3. `build` lays out the knobs that differ between groups, the final metrics and these
   differences with intervals, and the curves of all groups over each other.

The page is made from config.json and metrics.jsonl of each workdir. A run may be in
progress.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from flax import traverse_util
from scipy import special

from bapo_jax.run import charts, page
from bapo_jax.run.charts import Curve, Points
from bapo_jax.run.report import fifths
from bapo_jax.run.report_page import REWARDS, shown
from bapo_jax.run.series import ERRORS, FEW, errors, mean, running_mean, series, spiky
from bapo_jax.runtime import files, html, metrics
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.html import element
from bapo_jax.runtime.metrics import Row
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import mean_and_error

# Knobs that may differ within a group, beside the seeds: they change no result.
NUISANCE = ('title', 'derived', 'cache', 'metrics', 'checkpoint')
PANELS = (  # (title, unit, metric -> label: the first solid, the second dashed)
  ('Accuracy on held-out problems', 'accuracy', {'eval/accuracy': ''}),
  ('Reward', 'mean reward', REWARDS),
  ('Accuracy of the fresh responses', 'accuracy', {'rollout/accuracy': ''}),
  ('Entropy of the policy', 'nats per token', {'loss/entropy': ''}),
  ('Positive share', 'share of the gradient', {'clip/share': ''}),
  ('Clip bounds', 'probability ratio', {'clip/high': 'high', 'clip/low': 'low'}),
  ('Tokens clipped', 'share', {'clip/fraction': ''}),
  ('Response length', 'tokens', {'rollout/length': ''}),
  ('Groups of both verdicts', 'share of the groups', {'batch/learnable': ''}),
  ('Largest ratio of a token', 'probability ratio', {'loss/ratio_max': ''}),
  ('KL from behaviour to current policy', 'nats per token', {'loss/kl': ''}),
  ('Gradient norm', 'norm', {'learner/grad_norm': ''}),
  ('Seconds of a step', 'seconds', {'time/step': ''}),
)
FINAL = """
  eval/accuracy eval/reward eval/length eval/truncated rollout/reward rollout/accuracy
  rollout/length rollout/truncated rollout/responses batch/learnable clip/share clip/low
  clip/high clip/fraction loss/entropy loss/kl loss/ratio_max learner/grad_norm
  time/step
"""
LEVEL = 0.95  # of the intervals
PAIRED = (
  f'± {100 * LEVEL:.0f} % t interval over the n seeds that both have, for each number '
  'by itself: of many such intervals some miss the true difference.'
)


class Run(NamedTuple):
  """The files of a workdir that the page shows."""

  name: str  # its path, without the part that all runs share
  path: str
  values: dict[str, Any]  # dotted name of a knob -> value
  rows: list[Row]

  @property
  def seeds(self) -> tuple[Any, ...]:
    """The values of all knobs that are a seed, such as seed and sft.seed."""
    return tuple(self.values[name] for name in sorted(self.values) if is_seed(name))


class Group(NamedTuple):
  """Runs of one config with different seeds."""

  label: str
  runs: list[Run]


class Difference(NamedTuple):
  """The mean of a metric's differences between two groups, run by run of one seed."""

  mean: float
  half: float  # half the length of the t interval of the mean
  pairs: int  # seeds whose runs both have the metric, at least 2

  def __str__(self) -> str:
    return f'{self.mean:+.4g} ± {self.half:.2g} (n={self.pairs})'


def write(runs: Sequence[str], path: str) -> int:
  """Writes a page on the runs, given by their workdirs; returns 0, prints its path.

  Skips files and directories without metrics: `runs/lab/cells/*` also matches the logs
  of an experiment.

  Raises:
    ValueError: fewer than two runs, one of them twice, a path that does not exist, or
      more configs than the page has colours.
    OSError: the page cannot be written.
  """
  groups = grouped(read(runs))
  files.write(path, page.document('Runs compared', build(groups)))
  for text in console(groups):
    print(text)
  count = sum(len(group.runs) for group in groups)
  print(f'{count} runs of {len(groups)} configs are compared in {path}')
  return 0


def read(paths: Sequence[str]) -> list[Run]:
  """Reads the configs and the metrics of runs.

  Knobs that the version of a run did not have yet are at their defaults.

  Raises:
    ValueError: see `write`.
  """
  real = [os.path.realpath(path) for path in paths]
  if len(real) < 2 or len(set(real)) < len(real):
    raise ValueError(
      f'--mode=compare needs two or more different workdirs, not '
      f'{", ".join(paths) or "none"}; give them after the flags: --mode=compare runs/a '
      'runs/b'
    )
  for path in paths:
    if not os.path.exists(path):
      raise ValueError(f'{path} does not exist; give directories of runs')
  plain = Config().model_dump(mode='json')
  default = traverse_util.flatten_dict(plain, sep='.')
  common, runs, skipped = os.path.commonpath(real), [], []
  for path, whole in zip(paths, real, strict=True):
    rows = metrics.read(path) if os.path.isdir(path) else []
    if not rows:
      skipped.append(path)
      continue
    values = default | traverse_util.flatten_dict(workdirs.read_config(path), sep='.')
    name = os.path.relpath(whole, common)
    runs.append(Run(path if name == '.' else name, path, values, rows))
  if len(runs) < 2:
    raise ValueError(
      f'{", ".join(skipped)}: no run with metrics; give directories of two or more runs'
    )
  if skipped:
    print(f'Skipped, without metrics of a run: {", ".join(skipped)}')
  return runs


def grouped(runs: Sequence[Run]) -> list[Group]:
  """Groups the runs of one config, in the order given.

  A run with the seeds of an earlier run of its config is a group of its own: the two
  are not independent.

  Raises:
    ValueError: there are more groups than colours.
  """
  found: dict[tuple[str, int], list[Run]] = {}
  for run in runs:
    plain = {name: value for name, value in run.values.items() if not nuisance(name)}
    key, repeat = repr(sorted(plain.items())), 0
    while any(x.seeds == run.seeds for x in found.get((key, repeat), ())):
      repeat += 1
    found.setdefault((key, repeat), []).append(run)
  if len(found) > charts.COLOURS:
    raise ValueError(
      f'the runs have {len(found)} different configs, and a page has '
      f'{charts.COLOURS} colours; give fewer workdirs'
    )
  labels = [label([run.name for run in runs]) for runs in found.values()]
  if len(set(labels)) < len(labels):
    labels = [', '.join(run.name for run in runs) for runs in found.values()]
  return [Group(*each) for each in zip(labels, found.values(), strict=True)]


def nuisance(name: str) -> bool:
  """Returns whether runs of a group may differ in a knob."""
  return is_seed(name) or name.split('.')[0] in NUISANCE


def is_seed(name: str) -> bool:
  """Returns whether a knob is a seed."""
  return name.split('.')[-1] == 'seed'


def label(names: Sequence[str]) -> str:
  """Returns the beginning that the names share, else all names."""
  if len(names) == 1:
    return names[0]
  columns = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*names, strict=False))
  shared = ''.join(letters[0] for letters in columns).rstrip('0123456789-_./')
  return shared or ', '.join(names)


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns (mean, half the length of the t interval of the mean); nan for one value.

  The interval covers the mean of a normal distribution in LEVEL of all cases.
  """
  middle, error = mean_and_error(values)
  return middle, float(special.stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * error


def final(run: Run, name: str) -> float:
  """Returns the last evaluation or count, or the mean over the last fifth of steps."""
  if name.startswith('eval/') or name == 'rollout/responses':
    _, values = series(run.rows, name)
    return float(values[-1]) if len(values) else math.nan
  return mean(fifths(run.rows)[1], name)


def paired(base: Group, other: Group, name: str) -> Difference | None:
  """Returns the difference of a final metric, other minus base, over common seeds.

  Returns None if fewer than two seeds have a value in both groups.
  """
  of_base, of_other = (
    {run.seeds: final(run, name) for run in group.runs} for group in (base, other)
  )
  both = [of_other[seeds] - of_base[seeds] for seeds in of_base if seeds in of_other]
  both = [difference for difference in both if math.isfinite(difference)]
  return Difference(*interval(both), len(both)) if len(both) > 1 else None


def differences(groups: Sequence[Group]) -> dict[str, list[Difference | None]]:
  """Returns metric -> difference of each group but the first from the first.

  Leaves out metrics without any difference.
  """
  base, *others = groups
  found = {
    name: [paired(base, other, name) for other in others] for name in FINAL.split()
  }
  return {name: row for name, row in found.items() if any(row)}


def console(groups: Sequence[Group]) -> Iterator[str]:
  """Yields a line per metric and group that `differences` finds."""
  found = differences(groups)
  if found:
    yield f'Mean difference from {groups[0].label}, paired by seed. {PAIRED}'
  for i, group in enumerate(groups[1:]):
    for name, row in found.items():
      if row[i]:
        yield f'  {group.label}  {name:<18} {row[i]}'


def build(groups: Sequence[Group]) -> Iterator[Element]:
  """Yields the parts of the page."""
  runs = [run for group in groups for run in group.runs]
  yield element('h1', f'{len(runs)} runs of {len(groups)} configs')
  keys = []
  for i, group in enumerate(groups):
    seeds = f' ({len(group.runs)} seeds)' if len(group.runs) > 1 else ''
    swatch = element('i', class_=f'swatch c{i}')
    attributes = {'type': 'button', 'aria_pressed': 'true', 'data_group': f'c{i}'}
    keys.append(element('button', swatch, f'{group.label}{seeds}', **attributes))
  yield element('div', *keys, class_='legend')
  yield element('h2', 'What differs')
  yield from _differences(groups)
  yield element('h2', 'At the end')
  yield from _final(groups)
  yield from _paired(groups)
  yield element('h2', 'Curves')
  yield from _curves(groups)
  yield element('h2', 'Runs')
  yield _runs(groups)


def _named(groups: Sequence[Group]) -> list[str]:
  return [group.label for group in groups]


def _differences(groups: Sequence[Group]) -> Iterator[Element]:
  """Yields a table of the knobs that differ between groups."""
  names = sorted({name for group in groups for name in group.runs[0].values})
  rows = []
  for name in names:
    values = [group.runs[0].values.get(name) for group in groups]
    if not nuisance(name) and any(value != values[0] for value in values):
      rows.append((element('code', name), *map(shown, values)))
  if not rows:
    yield element('p', f'No knob differs, except for seeds, {", ".join(NUISANCE)}.')
    return
  yield html.table(rows, ('knob', *_named(groups)), 'l' * (1 + len(groups)))


def _final(groups: Sequence[Group]) -> Iterator[Element]:
  """Yields a table of the final metrics, with intervals."""
  yield element(
    'p',
    'eval/ metrics are from the last evaluation, rollout/responses is the last count, '
    'the others are means over the last fifth of the steps. Groups of several seeds: '
    f'mean ± {100 * LEVEL:.0f} % t interval over the seeds. A single run: its '
    'evaluation ± one standard error over the problems, without the variation between '
    'seeds.',
    class_='soft',
  )
  rows = []
  for name in FINAL.split():
    cells = [cell(group, name) for group in groups]
    if any(cells):
      rows.append((element('code', name), *cells))
  yield html.table(rows, ('metric', *_named(groups)), 'l' + 'r' * len(groups))


def _paired(groups: Sequence[Group]) -> Iterator[Element]:
  """Yields a table of the paired differences, if runs share seeds."""
  found = differences(groups)
  if not found:
    return
  yield element('h2', f'Differences from {groups[0].label}, paired by seed')
  yield element('p', PAIRED, class_='soft')
  rows = [
    (element('code', name), *(str(each) if each else '' for each in row))
    for name, row in found.items()
  ]
  yield html.table(rows, ('metric', *_named(groups[1:])), 'l' + 'r' * len(groups[1:]))


def cell(group: Group, name: str) -> str:
  """Formats the final value of a metric with its interval or error; '' without one."""
  values = [value for run in group.runs if math.isfinite(value := final(run, name))]
  if not values:
    return ''
  middle, half = interval(values)
  if len(group.runs) == 1 and name in ERRORS:
    half = final(group.runs[0], ERRORS[name])
  few = f' (n={len(values)})' if len(values) < len(group.runs) else ''
  return f'{middle:.4g}' + (f' ± {half:.2g}' if math.isfinite(half) else '') + few


def _curves(groups: Sequence[Group]) -> Iterator[Element]:
  """Yields a sentence on the smoothing, and a chart of each panel."""
  runs = [run for group in groups for run in group.runs]
  last = max(row['step'] for run in runs for row in run.rows)
  width = int(last) // FEW | 1
  several = len(runs) > len(groups)
  text = f'All lines but evaluations are running means over {width} steps. '
  text += 'Bold: the mean of a group; pale: its runs. ' if several else ''
  text += 'Point at a chart, or touch it, to read the unsmoothed values of a step.'
  yield element('p', text, class_='soft')
  yield element('div', *_charts(groups, width, last), class_='charts')


def _charts(groups: Sequence[Group], width: int, last: float) -> Iterator[Element]:
  for title, unit, names in PANELS:
    drawn, log = [], False
    for colour, group in enumerate(groups):
      for name, text in names.items():
        marked = f'{group.label} {text}'.strip()
        line = curve(group, name, marked, colour, width)
        drawn.append(line._replace(dashed=name != next(iter(names))))
        log = log or spiky(name, line.exact[1])
    if len(names) > 1:
      unit += f' ({", dashed: ".join(names.values())})'
    yield charts.chart(title, unit, drawn, (0, last), log=log, legend=False)


def curve(group: Group, name: str, text: str, colour: int, width: int) -> Curve:
  """Returns the mean over the runs of a group, and each run if there are several."""
  each = [series(run.rows, name) for run in group.runs]
  each = [points for points in each if len(points[0])]
  exact = averaged(each)
  smooth = 1 if name.startswith('eval/') else width
  pale = tuple(_smoothed(points, smooth) for points in each) if len(each) > 1 else ()
  error_N = None
  if name in ERRORS and len(group.runs) == 1:
    error_N = errors(group.runs[0].rows, name)
  return Curve(text, colour, exact, _smoothed(exact, smooth), pale, error_N)


def averaged(each: Sequence[Points]) -> Points:
  """Returns the mean of the curves at the steps that all of them have."""
  if not each:
    return np.zeros(0), np.zeros(0)
  of = [dict(zip(*(array.tolist() for array in p), strict=True)) for p in each]
  steps = [step for step in of[0] if all(step in values for values in of)]
  means = [sum(values[step] for values in of) / len(of) for step in steps]
  return np.asarray(steps, float), np.asarray(means, float)


def _smoothed(points: Points, width: int) -> Points:
  return running_mean(*points, width) if len(points[0]) >= 2 * width else points


def _runs(groups: Sequence[Group]) -> Element:
  """Returns a table of the runs: where they are, seed, progress, accuracy."""
  rows = []
  for i, group in enumerate(groups):
    for run in group.runs:
      swatch = element('i', class_=f'swatch c{i}')
      last = max(row['step'] for row in run.rows)
      accuracy, error = (final(run, f'eval/{x}') for x in ('accuracy', 'stderr'))
      rows.append(
        (
          element('span', swatch, run.path),
          str(run.values.get('title', '')),
          str(run.values.get('seed', '')),
          f'{last} of {run.values.get("steps", "?")}',
          f'{accuracy:.4g} ± {error:.2g}' if math.isfinite(accuracy) else '',
        )
      )
  header = ('workdir', 'title', 'seed', 'steps', 'eval/accuracy')
  return html.table(rows, header, 'llrrr')
