"""Writes the data of runs into one HTML page: the report of a run, or a comparison.

1. `report_data` has the numbers, curves and tables of a run, its prompts and responses;
   `comparison_data` those of several runs, and their differences;
2. `write` writes the report of a workdir to its report.html.

pages/page.js draws whatever the data has. The runs may be in progress: the data lack
what the runs have not written yet.
"""

import contextlib
import datetime
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo_jax import knobs
from bapo_jax.run import comparison, document, report, run_files, samples
from bapo_jax.run.comparison import Group
from bapo_jax.run.panels import MAIN, METRICS, PANELS
from bapo_jax.run.run_files import RunFiles
from bapo_jax.run.series import ERRORS, fifths, mean, of_sets, series
from bapo_jax.runtime import digests, files
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.markdown import shortened
from bapo_jax.runtime.metrics import Row
from bapo_jax.training import config as config_lib
from bapo_jax.training import needs
from bapo_jax.training.config import Config

MOST_ROWS = 12_000  # rows of metrics in a page; of longer runs every n-th


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
    data = report_data(runs[0])
  else:
    data = comparison_data(comparison.grouped(runs))
  style, script = map(document.read, ('page.css', 'page.js'))
  return document.document(data['title'], data, '<main></main>', style, script)


def report_data(run: RunFiles) -> files.Object:
  """Returns the data of the report of a run."""
  values = run.values
  rows = run.rows
  title = values.get('title', 'A run')
  state = f'step {run.last} of {values.get("steps")}'
  # Two pages with one digest are of runs that may be pooled.
  digest = digests.fingerprint(values)
  before, after = ((e or {}).get('result') for e in (run.before, run.after))
  target = values.get('clip', {}).get('target')
  both = before and after
  sentences = (
    report.change_sentence(before, after) if both else '',
    report.settings_sentence(rows),
    report.target_sentence(rows, target),
    report.idle_sentence(rows),
  )
  # One table for a report (value, default) and a comparison (a column per config).
  values_and_defaults = dict(zip(('value', 'default'), _known(run), strict=True))
  return {
    'title': title,
    'facts': f'{run.name} · {state} · fingerprint of the config {digest}',
    'tiles': [*_tiles(run)],
    'sentences': [*filter(None, sentences)],
    **_curves([Group('', [run])]),
    'target': target,
    'asked': samples.asked(run) if run.groups else None,
    'changed': samples.changed(run) if run.after else None,
    'tables': {
      'rewards': [*report.rewards(before, after)] if both else [],
      'times': [*_times(run)],
      'progress': [*_progress(rows)],
      'knobs': [*_knobs(values_and_defaults, 'title'.__eq__)],
    },
    'config': json.dumps(values, indent=2, ensure_ascii=False),
  }


def comparison_data(groups: Sequence[Group]) -> files.Object:
  """Returns the data of the comparison of several runs."""
  runs = [run for group in groups for run in group.runs]
  columns = {group.label: _known(group.runs[0])[0] for group in groups}
  # Paired where seeds agree: a seed moves all arms together, so the difference has a
  # smaller error than the two means.
  unit, differences = comparison.differences(groups)
  cells = {
    name: [*(comparison.cell(group, name) for group in groups), *differences[name]]
    for name in differences
  }
  finals = [(name, *row) for name, row in cells.items() if any(row)]
  others = METRICS[MAIN:]
  return {
    'title': 'Runs compared',
    'heading': f'{len(runs)} runs of {len(groups)} configs',
    'sentences': [*comparison.results(groups)],
    **_curves(groups),
    'unit': unit,
    'level': f'{100 * comparison.LEVEL:.0f} %',
    'nuisance': comparison.NUISANCE,
    'tables': {
      'differs': [*_knobs(columns, comparison.nuisance)],
      'finals': [row for row in finals if row[0] not in others],
      'others': [row for row in finals if row[0] in others],
      'runs': [
        (
          run.workdir,
          str(run.values.get('title', '')),
          str(run.values.get('seed', '')),
          f'{run.last} of {run.values.get("steps", "?")}',
          comparison.cell(Group('', [run]), 'eval/accuracy'),
        )
        for run in runs
      ],
    },
  }


def _tiles(run: RunFiles):
  """Yields the main numbers, each with its meaning."""
  for when, evaluation in (('before', run.before), ('after', run.after)):
    if evaluation is not None:
      result = evaluation['result']
      text = f'{result["accuracy"]:.3f} ± {result["stderr"]:.3f}'
      yield text, f'held-out accuracy {when} (± standard error)'
  steps, seconds = series(run.rows, 'time/step')
  if len(steps):
    took = run.facts.get('wall_s', seconds.sum())
    text = 'wall time of the run' if run.facts else f'time of {len(steps)} steps so far'
    yield str(datetime.timedelta(seconds=round(took))), f'{text}, h:mm:ss'
  if run.facts:
    yield f'{run.facts["peak_rss_bytes"] / 2**30:.2f} GiB', 'memory at its peak'
  _, responses = series(run.rows, 'rollout/responses')
  if len(responses):
    yield f'{responses[-1]:,.0f}', 'training responses'


def _curves(groups: Sequence[Group]) -> files.Object:
  """Returns the panels to draw, and the columns of the runs that they need."""
  runs = [run for group in groups for run in group.runs]
  recorded = dict.fromkeys(name for run in runs for row in run.rows for name in row)
  sets = of_sets([recorded])
  errors = ERRORS | sets
  panels = []
  for panel in PANELS:
    if not panel.optional or recorded.keys() & panel.labels:
      labels = [*panel.labels.items()][: panel.compared if len(runs) > 1 else None]
      panels.append(panel._replace(labels=dict(labels))._asdict())
    if 'eval/accuracy' in panel.labels:
      panels += [
        panel._replace(title=f'Accuracy on {x.split("/")[1]}', labels={x: ''})._asdict()
        for x in sets
      ]
  names = {name for panel in panels for name in panel['labels']}
  names |= {errors[name] for name in names & errors.keys()}
  # A page of many long runs must not become too large for a browser.
  # Every n-th row; evaluations always stay, because they are what a page is opened for.
  every = -(-sum(len(run.rows) for run in runs) // MOST_ROWS) or 1

  def columns(rows: Sequence[Row]):
    """Returns metric -> value of each row, with six digits; None if it is missing."""
    kept = [x for i, x in enumerate(rows) if i % every == 0 or 'eval/accuracy' in x]
    by_name = {}
    for name in ('step', *sorted(names)):
      values = [row.get(name, math.nan) for row in kept]
      if any(map(math.isfinite, values)):
        by_name[name] = [
          float(f'{x:.6g}') if math.isfinite(x) else None for x in values
        ]
    return by_name

  return {
    'panels': panels,
    'errors': errors,
    'every': every,
    'groups': [
      {'label': group.label, 'runs': [columns(run.rows) for run in group.runs]}
      for group in groups
    ],
  }


def _times(run: RunFiles):
  """Yields the time by phase: of a finished run, else of its steps."""
  # A Counter is typed for integers, but counts floats as well.
  spent: Any = Counter(run.facts.get('phases'))
  total = run.facts.get('wall_s', 0.0)
  if not spent:
    for row in run.rows:
      spent.update({x[5:]: s for x, s in row.items() if x.startswith('time/')})
    total = spent.pop('step', 0.0)
  if not total:
    return
  # What no phase has measured; the parts then add up to the wall time.
  del spent['other']
  other = max(0.0, total - spent.total())
  for name, s in (*spent.most_common(), ('other', other)):
    yield name, f'{s:.1f}', f'{100 * s / total:.1f}'


def _progress(rows: Sequence[Row]):
  """Yields the means of metrics over the first and the last steps."""
  for name in METRICS:
    if len(series(rows, name)[0]) and not comparison.is_state(name):
      was, now = (f'{mean(part, name):.4g}' for part in fifths(rows))
      yield name, was, now, GLOSSARY[name]


def _known(run: RunFiles):
  """Returns two dicts, knob -> (value, meaning) and knob -> (default, meaning).

  Only knobs that have an effect, as the rules of the run describe them. A knob of
  another version of the program has no meaning and no default.
  """
  values = {name: (shown(value), '') for name, value in run.knobs.items()}
  defaults = {}
  config = Config()
  # A page must open for any run, also if this version could not train it.
  with contextlib.suppress(ValueError):  # of another version, or a file is missing
    config = config_lib.from_json(run.values)
    values = {}
  for name, field, _ in knobs.fields(config):
    meaning = f'{"Derived. " * (name in run.decided)}{field.description or ""}'
    values[name] = shown(run.knobs.get(name)), meaning
    defaults[name] = shown(field.get_default(call_default_factory=True)), meaning
  # A knob without an effect would look like a difference between runs.
  for name in needs.inert(config):
    del values[name], defaults[name]
  return values, defaults


def _knobs(columns: Mapping[str, dict], hidden: Callable[[str], bool]):
  """Yields the knobs that differ between columns: name, values, meaning."""
  for name in dict.fromkeys(itertools.chain(*columns.values())):
    cells = [column.get(name, ('-', '')) for column in columns.values()]
    values, meanings = zip(*cells, strict=True)
    if len(set(values)) > 1 and not hidden(name):
      yield name, *values, ' / '.join(filter(None, dict.fromkeys(meanings)))


def shown(value: Any) -> str:
  """Formats the value of a knob; '' for a knob that does not exist."""
  if value is None:
    return ''
  if isinstance(value, float) and math.isinf(value):
    return 'inf'
  return shortened(value if isinstance(value, str) else json.dumps(value), 200)
