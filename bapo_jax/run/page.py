"""Draws runs on one HTML page: the report of one run, or the comparison of several.

1. `page` lays out results, curves and knobs. For one run it adds prompts, responses
   with their verdicts, and times; for several runs, their differences;
2. `write` writes the report of a workdir to its report.html.

The runs may be in progress: the page omits what they have not written yet.
"""

import contextlib
import datetime
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bapo_jax import knobs
from bapo_jax.run import charts, comparison, look, report, run_files, samples
from bapo_jax.run.charts import Curve
from bapo_jax.run.comparison import Group
from bapo_jax.run.run_files import RunFiles
from bapo_jax.run.series import (
  ERRORS,
  FEW,
  averaged,
  errors,
  fifths,
  mean,
  series,
  smoothed,
  spiky,
)
from bapo_jax.runtime import digests, files, html
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.html import element
from bapo_jax.runtime.markdown import shortened
from bapo_jax.runtime.metrics import Row
from bapo_jax.training import config as config_lib
from bapo_jax.training import needs
from bapo_jax.training.config import Config
from bapo_jax.types import SOURCES

MAIN = """
  rollout/reward rollout/accuracy rollout/length rollout/length_right
  rollout/length_wrong rollout/truncated rollout/tokens_per_s rollout/logp_diff
  batch/filled batch/learnable batch/age clip/share_start clip/share clip/low clip/high
  clip/moved clip/target_met clip/fraction loss/entropy loss/kl learner/grad_norm
  moe/agree moe/load time/step
"""


class Panel(NamedTuple):
  """A chart with up to three metrics."""

  title: str
  unit: str  # of the vertical axis
  labels: dict[str, str]  # metric -> its name in the legend
  compared: int = 1  # how many of the metrics the chart of several runs has


REWARDS = {'rollout/reward': 'fresh responses', 'eval/reward': 'held-out problems'}
SHARES = {'clip/share': 'bounds used', 'clip/share_start': 'start bounds'}
BOUNDS = {'clip/high': 'high', 'clip/low': 'low'}
SIGNS = {'clip/fraction_positive': 'A > 0', 'clip/fraction_negative': 'A < 0'}
LENGTHS = {'rollout/length_right': 'right', 'rollout/length_wrong': 'wrong'}
IDLE = {'overlap/sampler_idle': 'sampler', 'overlap/learner_idle': 'learner'}
FAR = {'teacher/kl': 'teacher', 'loss/reference': 'reference'}
PANELS = (
  Panel('Reward', 'mean reward', REWARDS, compared=2),
  Panel('Accuracy on held-out problems', 'accuracy ± error', {'eval/accuracy': ''}),
  Panel('Accuracy of the fresh responses', 'accuracy', {'rollout/accuracy': ''}),
  Panel('Entropy of the policy', 'nats per token', {'loss/entropy': ''}),
  Panel('KL from behaviour to current policy', 'nats per token', {'loss/kl': ''}),
  Panel('Positive share', 'share of the gradient', SHARES),
  Panel('Clip bounds', 'probability ratio', BOUNDS, compared=2),
  Panel('Tokens clipped', 'share', {'clip/fraction': 'all tokens', **SIGNS}),
  Panel('Batch by source', 'share of the seats', {f'batch/{x}': x for x in SOURCES}),
  Panel('Gradient norm', 'norm', {'learner/grad_norm': ''}),
  Panel('Response length', 'tokens', {'rollout/length': 'all', **LENGTHS}),
  Panel('Groups of both verdicts', 'share of the groups', {'batch/learnable': ''}),
  Panel('Largest ratio of a token', 'probability ratio', {'loss/ratio_max': ''}),
  Panel('Seconds of a step', 'seconds', {'time/step': ''}),
)
# With mesh.rollout, an environment, a teacher, or experts.
OPTIONAL = (
  Panel('Time without work', 'share of the step', IDLE, compared=2),
  Panel('Turns of a response', 'turns', {'rollout/turns': ''}),
  Panel('KL to the teacher or first policy', 'nats per token', FAR),
  Panel('Agreement of the routers', 'share of layers and tokens', {'moe/agree': ''}),
  Panel('Tokens of the busiest expert', 'times the mean', {'moe/load': ''}),
)


def write_report(workdir: str = 'runs/default') -> None:
  """Writes report.html to the workdir and prints its path: `bapo report`.

  Args:
    workdir: directory of all results
  """
  print(f'Report: {write(workdir)}')


def write(workdir: str | os.PathLike[str]) -> str:
  """Writes report.html to the workdir; returns its path.

  Raises:
    ValueError: the workdir has no run, or a file of the run is damaged.
    OSError: the file cannot be written.
  """
  path = os.path.join(workdir, 'report.html')
  files.write(path, page([run_files.read(os.fspath(workdir))]))
  return path


def page(runs: Sequence[RunFiles]) -> str:
  """Returns the HTML page of the runs."""
  if len(runs) == 1:
    title = runs[0].values.get('title', 'A run')
    return look.document(title, _report(runs[0]))
  return look.document('Runs compared', _comparison(comparison.grouped(runs)))


def _report(run: RunFiles):
  values = run.values
  rows = run.rows
  yield element('h1', values.get('title', 'A run'))
  state = f'step {run.last} of {values.get("steps")}'
  digest = digests.fingerprint(values)
  facts = f'{run.name} · {state} · fingerprint of the config {digest}'
  yield element('p', facts, class_='soft')
  yield element('div', *_tiles(run), class_='tiles')
  before, after = ((e or {}).get('result') for e in (run.before, run.after))
  target = values.get('clip', {}).get('target')
  sentences = [report.settings_sentence(rows)]
  sentences += [report.target_sentence(rows, target), report.idle_sentence(rows)]
  if before and after:
    sentences.insert(0, report.change_sentence(before, after))
  yield from (element('p', text) for text in sentences if text)
  if before and after and (cells := list(report.rewards(before, after))):
    yield html.table(cells, report.REWARDS, 'lrrr')
  yield from _curves([Group('', [run])], target)
  if run.groups:
    yield from samples.asked(run)
  if run.after is not None:
    yield from samples.changed(run)
  yield from _times(run)
  yield from _progress(rows)
  yield from _settings(run)


def _comparison(groups: Sequence[Group]):
  runs = [run for group in groups for run in group.runs]
  names = [group.label for group in groups]
  yield element('h1', f'{len(runs)} runs of {len(groups)} configs')
  keys = []
  for i, group in enumerate(groups):
    seeds = f' ({len(group.runs)} seeds)' if len(group.runs) > 1 else ''
    swatch = element('i', class_=f'swatch c{i}')
    attributes = {'type': 'button', 'aria_pressed': 'true', 'data_group': f'c{i}'}
    keys.append(element('button', swatch, f'{group.label}{seeds}', **attributes))
  yield element('div', *keys, class_='legend')
  yield from (element('p', text) for text in comparison.results(groups))
  yield element('h2', 'What differs')
  columns = {group.label: _known(group.runs[0])[0] for group in groups}
  yield _knobs(columns, comparison.nuisance)
  text = f'Seeds, {", ".join(comparison.NUISANCE)} may differ, too.'
  yield element('p', text, class_='soft')
  yield element('h2', 'At the end')
  unit, differences = comparison.differences(groups)
  yield element(
    'p',
    f'eval/ metrics are from the last evaluation, rollout/responses is the last count, '
    'the others are means over the last fifth of the steps. Groups of several seeds: '
    f'mean ± {100 * comparison.LEVEL:.0f} % t interval over the seeds. A single run: '
    'its evaluation ± one standard error over the problems, without the variation '
    f'between seeds. Differences: mean ± t interval over the n {unit}s that both have, '
    'for each number by itself; of many such intervals some miss the true difference.',
    class_='soft',
  )
  header = ['metric', *names, *(f'{name} - {names[0]}' for name in names[1:])]
  parts = {True: [], False: []}
  for name in comparison.FINAL:
    cells = [comparison.cell(group, name) for group in groups]
    cells += differences[name]
    if any(cells):
      parts[name in comparison.MAIN].append((element('code', name), *cells))
  main, others = (
    html.table(rows, header, 'l' + 'r' * len(header[1:])) for rows in parts.values()
  )
  yield main
  yield element('details', element('summary', 'Other metrics'), others)
  yield from _curves(groups, None)
  yield element('h2', 'Runs')
  yield _runs(groups)


def _runs(groups: Sequence[Group]):
  """Returns a table of the runs: where they are, seed, progress, accuracy."""
  rows = []
  for i, group in enumerate(groups):
    for run in group.runs:
      swatch = element('i', class_=f'swatch c{i}')
      rows.append(
        (
          element('span', swatch, run.workdir),
          str(run.values.get('title', '')),
          str(run.values.get('seed', '')),
          f'{run.last} of {run.values.get("steps", "?")}',
          comparison.cell(Group('', [run]), 'eval/accuracy'),
        )
      )
  return html.table(rows, ('workdir', 'title', 'seed', 'steps', 'accuracy'), 'llrrr')


def _tiles(run: RunFiles):
  """Yields the main numbers."""

  def tile(number, text):
    return element('div', element('b', number), element('small', text), class_='tile')

  for when, evaluation in (('before', run.before), ('after', run.after)):
    if evaluation is not None:
      result = evaluation['result']
      text = f'{result["accuracy"]:.3f} ± {result["stderr"]:.3f}'
      yield tile(text, f'held-out accuracy {when} (± standard error)')
  steps, seconds = series(run.rows, 'time/step')
  if len(steps):
    took = run.facts.get('wall_s', seconds.sum())
    text = 'wall time of the run' if run.facts else f'time of {len(steps)} steps so far'
    yield tile(str(datetime.timedelta(seconds=round(took))), f'{text}, h:mm:ss')
  if run.facts:
    yield tile(f'{run.facts["peak_rss_bytes"] / 2**30:.2f} GiB', 'memory at its peak')
  _, responses = series(run.rows, 'rollout/responses')
  if len(responses):
    yield tile(f'{responses[-1]:,.0f}', 'responses sampled for training')


def _curves(groups: Sequence[Group], target: float | None):
  """Yields a sentence on the smoothing, and a chart of each panel."""
  runs = [run for group in groups for run in group.runs]
  steps = {row['step'] for run in runs for row in run.rows} or {0}
  width = len(steps - {0}) // FEW | 1
  text = f'Bold lines are running means over {width} steps'
  if len(runs) == 1:
    pale = ', pale lines every value'
    text = f'{text}{pale}' if width > 1 else 'Lines have the values of every step'
  elif len(runs) > len(groups):
    text += ' and over the runs of a group, pale lines its runs'
  yield element('h2', 'Curves')
  yield element(
    'p',
    f'{text}; evaluations are not smoothed and have bars of one standard error. Point '
    'at a chart, or touch it, to read the values of a step.',
    class_='soft',
  )
  limits = min(steps), max(steps)
  recorded = {name for run in runs for row in run.rows for name in row}
  panels = *PANELS, *(panel for panel in OPTIONAL if recorded & panel.labels.keys())
  drawn = [_chart(panel, groups, width, limits, target) for panel in panels]
  yield element('div', *drawn, class_='charts')


def _chart(
  panel: Panel,
  groups: Sequence[Group],
  width,
  limits: tuple[float, float],
  target: float | None,
):
  """Draws a metric per colour for one run, a group per colour for several.

  Bold lines are means over the runs of a group, smoothed over `width` steps; pale lines
  are its runs, or every value of a single run.
  """
  alone = [len(group.runs) for group in groups] == [1]
  names = [*panel.labels][: None if alone else panel.compared]
  unit = panel.unit
  if len(names) > 1 and not alone:
    unit += f' ({", dashed: ".join(panel.labels[name] for name in names)})'
  lines = []
  log = False
  for (i, group), (j, name) in itertools.product(enumerate(groups), enumerate(names)):
    text = panel.labels[name] if alone or len(names) > 1 else ''
    values = [series(run.rows, name) for run in group.runs]
    values = [points for points in values if len(points[0])]
    exact = averaged(values)
    evaluated = name in ERRORS
    bold = exact if evaluated else smoothed(exact, width)
    pale = [] if bold is exact or not alone else [exact]
    if len(values) > 1:
      pale = values if evaluated else [smoothed(points, width) for points in values]
    lines.append(
      Curve(
        f'{group.label} {text}'.strip(),
        colour=j if alone else i,
        exact=exact,
        bold=bold,
        pale=pale,
        error_N=errors(group.runs[0].rows, name)
        if evaluated and len(group.runs) == 1
        else None,
        dashed=j > 0 and not alone,
      )
    )
    log = log or spiky(name, exact[1])
  level = None
  if panel.title == 'Positive share' and target is not None:
    level = target, 'target'
  return charts.chart(panel.title, unit, lines, limits, level, log, legend=alone)


def _times(run: RunFiles):
  """Yields a table of the time by phase: of a finished run, else of its steps."""
  spent = run.facts.get('phases', {})
  total = run.facts.get('wall_s', 0.0)
  if not spent:
    names = {name for row in run.rows for name in row if name.startswith('time/')}
    spent = {x[5:]: series(run.rows, x)[1].sum() for x in names - {'time/step'}}
    total = series(run.rows, 'time/step')[1].sum()
  if not total:
    return
  spent = {name: s for name, s in spent.items() if name != 'other'}
  longest_first = dict(sorted(spent.items(), key=lambda item: -item[1]))
  longest_first['other'] = max(0.0, total - sum(spent.values()))
  cells = (
    (name, f'{s:.1f}', f'{100 * s / total:.1f}') for name, s in longest_first.items()
  )
  yield element('h2', 'Where the time went')
  yield html.table(cells, ('phase', 'seconds', 'percent'), 'lrr')


def _progress(rows: Sequence[Row]):
  """Yields a table that compares the first steps with the last."""
  cells = []
  for name in MAIN.split():
    if len(series(rows, name)[0]):
      was, now = (f'{mean(part, name):.4g}' for part in fifths(rows))
      cells.append((element('code', name), was, now, GLOSSARY[name]))
  if cells:
    yield element('h2', 'First fifth against last fifth of the steps')
    header = 'metric', 'first fifth', 'last fifth', 'meaning'
    yield html.table(cells, header, 'lrrl', 'meanings')


def _settings(run: RunFiles):
  """Yields the knobs that are not at their defaults, and the whole config."""
  columns = dict(zip(('value', 'default'), _known(run), strict=True))
  yield element('h2', 'Knobs with an effect that are not at their defaults')
  yield _knobs(columns, 'title'.__eq__)
  config = element('pre', json.dumps(run.values, indent=2, ensure_ascii=False))
  yield element('details', element('summary', 'The whole config'), config)


def _known(run: RunFiles):
  """Returns two dicts, knob -> (value, meaning) and knob -> (default, meaning).

  Only knobs that have an effect, as the rules of the run describe them. A knob of
  another version of the program has no meaning and no default.
  """
  values = {name: (shown(value), '') for name, value in run.knobs.items()}
  defaults = {}
  config = Config()
  with contextlib.suppress(ValueError):  # of another version, or a file is missing
    config = config_lib.from_json(run.values)
    values = {}
  for name, field, _ in knobs.fields(config):
    meaning = f'{"Derived. " * (name in run.decided)}{field.description or ""}'
    values[name] = shown(run.knobs.get(name)), meaning
    defaults[name] = shown(field.get_default(call_default_factory=True)), meaning
  for name in needs.inert(config):
    del values[name], defaults[name]
  return values, defaults


def _knobs(columns: Mapping[str, dict], hidden):
  """Returns a table of the knobs that differ between columns."""
  rows = []
  for name in dict.fromkeys(itertools.chain(*columns.values())):
    cells = [column.get(name, ('-', '')) for column in columns.values()]
    values, meanings = zip(*cells, strict=True)
    if len(set(values)) > 1 and not hidden(name):
      meaning = ' / '.join(filter(None, dict.fromkeys(meanings)))
      rows.append((element('code', name), *values, meaning))
  header = 'knob', *columns, 'meaning'
  if not rows:
    return element('p', 'No knob.')
  return html.table(rows, header, 'l' * len(header), 'meanings')


def shown(value: Any) -> str:
  """Formats the value of a knob; '' for a knob that does not exist."""
  if value is None:
    return ''
  if isinstance(value, float) and math.isinf(value):
    return 'inf'
  return shortened(value if isinstance(value, str) else json.dumps(value), 200)
