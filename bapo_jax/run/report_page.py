"""Writes report.html: a run on one page, from the files of its workdir.

1. `read` collects config.json, metrics.jsonl, the first and the last evaluation and the
   newest recorded step;
2. `build` lays out what was reached, the curves, what the model was asked and how the
   verifier read its answers, where the time went, and the knobs that were set.

The run may be in progress: what is missing is left out.
"""

import base64
import collections
import contextlib
import datetime
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from bapo_jax import knobs
from bapo_jax.rewards import verifiers
from bapo_jax.run import charts, page, report, step_record
from bapo_jax.run.charts import Curve
from bapo_jax.run.series import ERRORS, FEW, errors, running_mean, series, spiky
from bapo_jax.runtime import files, html, metrics
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.hosts import differences
from bapo_jax.runtime.html import element
from bapo_jax.runtime.markdown import shortened
from bapo_jax.runtime.metrics import Row
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config, fingerprint
from bapo_jax.types import CUTS, SOURCES

TEXT = 1500  # characters of a text on the page
GROUPS = 6  # recorded groups on the page
RESPONSES = 4  # right and wrong responses of a group on the page, each
# How many problems of each change of the first response are on the page.
CHANGES = {
  (False, True): ('wrong before, right after', 3),
  (True, False): ('right before, wrong after', 2),
  (False, False): ('wrong before and after', 2),
  (True, True): ('right before and after', 1),
}
PICTURES = 600_000  # bytes of all pictures on the page


class Panel(NamedTuple):
  """A subplot with up to three metrics."""

  title: str
  unit: str  # of the vertical axis
  labels: dict[str, str]  # metric -> its name in the legend


SHARES = {'clip/share': 'bounds used', 'clip/share_start': 'start bounds'}
BOUNDS = {'clip/high': 'high', 'clip/low': 'low'}
CLIPPED = {'clip/fraction_positive': 'A > 0', 'clip/fraction_negative': 'A < 0'}
LENGTHS = {'rollout/length_right': 'right', 'rollout/length_wrong': 'wrong'}
REWARDS = {'rollout/reward': 'fresh responses', 'eval/reward': 'held-out problems'}
PANELS = (
  Panel('Reward', 'mean reward', REWARDS),
  Panel('Accuracy on held-out problems', 'accuracy ± error', {'eval/accuracy': ''}),
  Panel('Entropy of the policy', 'nats per token', {'loss/entropy': ''}),
  Panel('KL from behaviour to current policy', 'nats per token', {'loss/kl': ''}),
  Panel('Positive share', 'share of the gradient', SHARES),
  Panel('Clip bounds', 'probability ratio', BOUNDS),
  Panel('Tokens clipped', 'share', CLIPPED | {'clip/fraction': 'all tokens'}),
  Panel('Batch by source', 'share of the seats', {f'batch/{x}': x for x in SOURCES}),
  Panel('Gradient norm', 'norm', {'learner/grad_norm': ''}),
  Panel('Response length', 'tokens', LENGTHS | {'rollout/length': 'all'}),
  Panel('Groups of both verdicts', 'share of the groups', {'batch/learnable': ''}),
  Panel('Largest ratio of a token', 'probability ratio', {'loss/ratio_max': ''}),
)


class RunFiles(NamedTuple):
  """The files of a workdir that the page shows."""

  workdir: str
  values: dict[str, Any]  # of config.json, section -> knob -> value
  rows: list[Row]  # of metrics.jsonl
  before: dict[str, Any] | None  # the evaluation of step 0
  after: dict[str, Any] | None  # the last evaluation
  groups: list[dict[str, Any]]  # of the newest recorded step
  facts: Mapping[str, Any]  # of report.json, which a finished run has


def write(workdir: str | os.PathLike[str]) -> str:
  """Writes report.html to the workdir; returns its path.

  Raises:
    ValueError: the workdir has no run, or a file of the run is damaged.
    OSError: the file cannot be written.
  """
  path = os.path.join(workdir, 'report.html')
  run = read(os.fspath(workdir))
  files.write(path, page.document(run.values.get('title', 'A run'), build(run)))
  return path


def read(workdir: str) -> RunFiles:
  """Reads what the page shows; needs neither the model nor its weights.

  Raises:
    ValueError: the workdir has no run, or a file of the run is damaged.
  """
  values, rows = workdirs.read_config(workdir), metrics.read(workdir)
  last = max((row['step'] for row in rows if 'eval/accuracy' in row), default=0)
  before = _evaluation(workdir, 0)
  after = _evaluation(workdir, int(last)) if last else None
  recorded = step_record.newest(workdir)
  groups = [] if recorded is None else step_record.read(workdir, recorded)
  path = os.path.join(workdir, 'report.json')
  facts = files.read_object(path, 'remove it') if os.path.exists(path) else {}
  return RunFiles(workdir, values, rows, before, after, groups, facts)


def _evaluation(workdir: str, step: int) -> dict[str, Any] | None:
  """Reads an evaluation; None if there is no file of it."""
  if not os.path.exists(os.path.join(workdir, 'eval', f'{step}.json')):
    return None
  return evaluate.read_recorded(workdir, step)


def build(run: RunFiles) -> Iterator[Element]:
  """Yields the parts of the page."""
  values, rows = run.values, run.rows
  last = max((row['step'] for row in rows), default=0)
  name = os.path.basename(os.path.abspath(run.workdir))
  state = f'step {last} of {values.get("steps")}'
  yield element('h1', values.get('title', 'A run'))
  facts = f'{name} · {state} · fingerprint of the config {fingerprint(values)}'
  yield element('p', facts, class_='soft')
  yield element('div', *_tiles(run), class_='tiles')
  before, after = ((e or {}).get('result') for e in (run.before, run.after))
  target = report.share_target(values)
  sentences = [
    report.change_sentence(before, after) if before and after and last else '',
    report.target_sentence(rows, target),
    report.idle_sentence(rows),
  ]
  yield from (element('p', text) for text in sentences if text)
  if before and after and last and (cells := list(report.rewards(before, after))):
    yield html.table(cells, report.REWARDS, 'lrrr')
  yield element('h2', 'Curves')
  yield from curves(rows, target)
  if drawn := spans(rows):
    yield element('h2', 'Sampling beside training')
    yield element('p', report.overlap_sentence(rows))
    yield timeline(drawn)
  if run.groups:
    yield from _groups(run)
  if run.after is not None:
    yield from _changes(run)
  yield from _tables(rows)
  yield from _settings(values)


LANES = ('sampling', 'training')
SHOWN = 6  # steps in a timeline


class Span(NamedTuple):
  """A time in which sampling or training was busy with the groups of a step."""

  lane: int  # index into LANES
  step: int  # that trains on the groups
  begin: float  # seconds since the first span
  end: float


def spans(rows: Sequence[Row]) -> list[Span]:
  """Returns when the last steps were sampled and trained; [] without mesh.rollout.

  A step trains from the end of the step before, without its waiting, to its own end.
  """
  known = [row for row in rows if 'overlap/ended' in row][-SHOWN - 1 :]
  found = []
  for before, row in itertools.pairwise(known):
    if before['overlap/ended'] > row['overlap/ended']:
      found = []  # the process was resumed between the steps
      continue
    waited = row.get('time/send', 0.0) + row.get('time/wait', 0.0)
    times = (row['overlap/sampling'], row['overlap/sampled'])
    found += [
      Span(0, int(row['step']), *times),
      Span(1, int(row['step']), before['overlap/ended'] + waited, row['overlap/ended']),
    ]
  first = min((span.begin for span in found), default=0.0)
  return [x._replace(begin=x.begin - first, end=x.end - first) for x in found]


def timeline(drawn: Sequence[Span]) -> Element:
  """Returns two lanes of bars: when the last steps were sampled and trained."""
  total = max(span.end for span in drawn)
  bars = [element('text', x, x=0, y=24 + 40 * i) for i, x in enumerate(LANES)]
  for span in drawn:
    x, width = (120 + 660 * s / total for s in (span.begin, span.end - span.begin))
    box = {'x': x, 'y': 8 + 40 * span.lane, 'width': width - 120, 'height': 26}
    seconds = f'step {span.step}: {span.begin:.2f} to {span.end:.2f} s'
    tip = element('title', f'{LANES[span.lane]}, {seconds}')
    bars.append(element('rect', tip, **box, fill=f'var(--c{span.step % 2})'))
    # A style, because the page's own style of texts replaces the attribute `fill`.
    label = {'x': x + 4, 'y': box['y'] + 18, 'style': 'fill: white'}
    bars.append(element('text', str(span.step), **label))
  bars.append(element('text', f'{total:.2f} s', x=780, y=100, text_anchor='end'))
  return element('svg', *bars, viewBox='0 0 800 104', font_size=14, fill='currentColor')


def _tiles(run: RunFiles) -> Iterator[Element]:
  """Yields the main numbers."""
  for when, evaluation in (('before', run.before), ('after', run.after)):
    if evaluation is not None:
      result = evaluation['result']
      text = f'{result["accuracy"]:.3f} ± {result["stderr"]:.3f}'
      yield _tile(text, f'held-out accuracy {when} (± standard error)')
  steps, seconds = series(run.rows, 'time/step')
  if len(steps):
    took, what = seconds.sum(), f'time of {len(steps)} steps so far'
    if run.facts.get('steps') == steps[-1]:
      took, what = run.facts['wall_s'], 'wall time of the run'
    yield _tile(str(datetime.timedelta(seconds=round(took))), f'{what}, h:mm:ss')
  _, responses = series(run.rows, 'rollout/responses')
  if len(responses):
    yield _tile(f'{responses[-1]:,.0f}', 'responses sampled for training')


def _tile(number: str, text: str) -> Element:
  return element('div', element('b', number), element('small', text), class_='tile')


def curves(rows: Sequence[Row], target: float | None) -> Iterator[Element]:
  """Yields a sentence on the smoothing, and a chart of each panel."""
  trained = [row for row in rows if row['step'] > 0]
  width = len(trained) // FEW | 1
  bold = f'running means over {width} steps, pale lines every value'
  text = f'Bold lines are {bold if width > 1 else "the values of every step"}; '
  text += 'evaluations are not smoothed and have bars of one standard error. '
  text += 'Point at a chart, or touch it, to read the values of a step.'
  yield element('p', text, class_='soft')
  steps = [row['step'] for row in rows] or [0]
  limits = min(steps), max(steps)
  made = [_chart(panel, rows, width, limits, target) for panel in PANELS]
  yield element('div', *made, class_='charts')


def _chart(
  panel: Panel,
  rows: Sequence[Row],
  width: int,
  limits: tuple[float, float],
  target: float | None,
) -> Element:
  drawn = []
  for colour, (name, label) in enumerate(panel.labels.items()):
    drawn.append(curve(rows, name, label, colour, width))
  share = panel.title == 'Positive share' and target is not None
  log = any(
    spiky(name, line.exact[1]) for name, line in zip(panel.labels, drawn, strict=True)
  )
  level = (target, 'target') if share and target is not None else None
  return charts.chart(panel.title, panel.unit, drawn, limits, level, log)


def curve(rows: Sequence[Row], name: str, label: str, colour: int, width: int) -> Curve:
  """Returns the lines of a metric: every value, and its running mean over `width`."""
  exact = series(rows, name)
  if name in ERRORS:
    return Curve(label, colour, exact, exact, error_N=errors(rows, name))
  if width == 1 or len(exact[0]) < 2 * width:
    return Curve(label, colour, exact, exact)
  return Curve(label, colour, exact, running_mean(*exact, width), (exact,))


def _groups(run: RunFiles) -> Iterator[Element]:
  """Yields groups that the newest recorded step trained on, the mixed ones first."""

  def order(row: dict[str, Any]) -> tuple[bool, float]:
    verdicts = [r['correct'] for r in row['responses']]
    return not step_record.taught(row), abs(sum(verdicts) / len(verdicts) - 0.5)

  found = sorted(run.groups, key=order)
  step, mixed = found[0]['step'], sum(map(step_record.taught, found))
  yield element('h2', f'What the model was asked in step {step}')
  yield element(
    'p',
    f'{mixed} of the {len(found)} recorded groups have right and wrong responses: only '
    f'such groups teach. {_verifier(run.values)}',
  )
  for i, row in enumerate(found[:GROUPS]):
    right = sum(r['correct'] for r in row['responses'])
    head = f'Problem {row["id"]}: {right} of {len(row["responses"])} right'
    note = f'{row["source"]}, completed in step {row["completed_step"]}'
    if row['update'] is not None and row['high'] is not None:
      note += f'; bounds {row["low"]:g} to {row["high"]:g} in update {row["update"]}'
    folded = element('details', element('summary', head), *_group(run, row, note))
    if i == 0:
      folded.set('open', 'open')
    yield folded


def _verifier(values: dict[str, Any]) -> str:
  """Describes the rule that decides which response is right."""
  name = str(values.get('rewards', {}).get('rule', ''))
  rule = verifiers.RULES.get(name)
  lines = (rule.__doc__ or '').strip().splitlines() if rule else []
  return f'The verifier is {name}{": " if lines else "."}{lines[0] if lines else ""}'


def _group(run: RunFiles, row: dict[str, Any], note: str) -> Iterator[Element]:
  yield element('p', note, class_='soft')
  yield element('h3', 'The prompt, as the model read it')
  yield element('pre', shortened(row['prompt'], TEXT))
  yield from _pictures(run, row)
  if row['answer']:
    yield element('p', 'Right answer: ', element('code', str(row['answer'])))
  shown = []
  for correct in (True, False):
    kind = [r for r in row['responses'] if r['correct'] == correct]
    shown += kind[:RESPONSES]
  yield element('div', *(_response(r) for r in shown), class_='pair')
  if left := len(row['responses']) - len(shown):
    text = f'{left} more responses in {step_record.FOLDER}/{row["step"]}.jsonl.'
    yield element('p', text, class_='soft')


def _response(r: dict[str, Any]) -> Element:
  """Shows a recorded response; clipped and masked tokens are marked."""
  kind = 'right' if r['correct'] else 'wrong'
  facts = [f'reward {_number(r["reward"], ".2f")}']
  facts.append(f'advantage {_number(r["advantage"], "+.2f")}')
  facts.append(f'{r["tokens"]} tokens')
  facts += ['cut at the length limit'] if r['truncated'] else []
  facts += [] if r['taught'] else ['left out of the loss']
  tokens = [] if r['cut'] is None else _marked(r)
  cut = collections.Counter(CUTS[code] for code in r['cut'] or () if code)
  facts += [f'{why} tokens (marked): {count}' for why, count in sorted(cut.items())]
  head = element('p', element('span', kind, class_=kind), ' · ' + ' · '.join(facts))
  body = tokens if cut else [shortened(r['response'], TEXT)]
  return element('div', head, element('pre', *body, class_=f'of-{kind}'))


def _marked(r: dict[str, Any]) -> list[html.Content]:
  """Returns the text of a response, with marks that say why tokens were cut."""
  body: list[html.Content] = []
  size = 0
  for piece, ratio, cut in zip(r['pieces'], r['ratio'], r['cut'], strict=True):
    size += len(piece)
    if size > TEXT:
      return [*body, ' [... the rest is left out ...]']
    title = f'ratio {_number(ratio, ".3g")}, {CUTS[cut]}'
    body.append(element('mark', piece, title=title) if cut else piece)
  return body


def _number(value: float | None, form: str) -> str:
  return 'undefined' if value is None else format(value, form)


def _pictures(run: RunFiles, row: dict[str, Any]) -> Iterator[Element]:
  """Yields the pictures of a problem, inside the page."""
  for name in row.get('pictures', ()):
    path, suffix = pathlib.Path(run.workdir, name), name.rsplit('.')[-1]
    with contextlib.suppress(OSError):
      if suffix in files.PICTURES and path.stat().st_size < PICTURES // (2 * GROUPS):
        data = base64.b64encode(path.read_bytes()).decode()
        kind = suffix.replace('jpg', 'jpeg')
        yield element('img', src=f'data:image/{kind};base64,{data}', alt=name)
        continue
    yield element('p', f'Picture: {name}', class_='soft')


def _changes(run: RunFiles) -> Iterator[Element]:
  """Yields held-out problems whose verdict changed, and some whose did not."""
  assert run.after is not None
  after = run.after['samples']
  before = run.before['samples'] if run.before is not None else []
  same = len(before) == len(after)
  pairs = list(zip(before if same else after, after, strict=True))
  yield element('h2', 'Held-out problems before and after')
  changes = {
    verdicts: [p for p in pairs if (p[0]['correct'], p[1]['correct']) == verdicts]
    for verdicts in CHANGES
  }
  counts = [f'{len(changes[v])} {text}' for v, (text, _) in CHANGES.items()]
  if same:
    text = f'Of {len(pairs)} responses: {"; ".join(counts)}. Some of each:'
    yield element('p', text)
  for verdicts, (text, most) in CHANGES.items():
    if not same:  # the evaluations are of different problems
      text = 'right' if verdicts[1] else 'wrong'
    seen: dict[str, tuple] = {}
    for pair in changes[verdicts]:  # several responses to a problem: its first
      seen.setdefault(pair[1]['problem'], pair)
    for old, new in list(seen.values())[:most]:
      head = element('summary', f'{text}: {shortened(new["problem"], 80)}')
      answer = element('p', 'Right answer: ', element('code', str(new['answer'])))
      parts = [element('pre', shortened(new['problem'], TEXT)), answer]
      both = (('Before', old), ('After', new)) if same else (('After', new),)
      shown = element('div', *(_sample(*each) for each in both), class_='pair')
      yield element('details', head, *parts, *_pictures(run, new), shown)


def _sample(when: str, sample: dict[str, Any]) -> Element:
  """Shows an evaluated response and how the verifier read it."""
  kind = 'right' if sample['correct'] else 'wrong'
  verdict = sample.get('verdict', kind)
  read = sample.get('extracted')
  how = 'the verifier found no answer' if read is None else 'the verifier read '
  if 'extracted' not in sample:
    how = ''
  reason = f' ({sample["reason"]})' if sample.get('reason') else ''
  head = element(
    'p',
    f'{when}: ',
    element('span', verdict, class_=kind),
    f'; {how}' if how else '',
    element('code', shortened(str(read), 200)) if read is not None else None,
    reason,
    f', reward {sample["reward"]:.3g}' if sample.get('parts') else '',
  )
  text = shortened(sample['response'], TEXT)
  return element('div', head, element('pre', text, class_=f'of-{kind}'))


def _tables(rows: Sequence[Row]) -> Iterator[Element]:
  """Yields where the time went, and the first against the last fifth of the steps."""
  total = series(rows, 'time/step')[1].sum()
  names = {name for row in rows for name in row if name.startswith('time/')}
  names -= {'time/step'}
  spent = {name: series(rows, name)[1].sum() for name in names}
  if total > 0:
    yield element('h2', 'Where the time of the steps went')
    cells = (
      (name.removeprefix('time/'), f'{s:.1f}', f'{100 * s / total:.1f}')
      for name, s in sorted(spent.items(), key=lambda item: -item[1])
    )
    yield html.table(cells, ('phase', 'seconds', 'percent'), 'lrr')
  if found := list(report.progress(rows)):
    yield element('h2', 'First fifth against last fifth of the steps')
    cells = ((element('code', name), *others) for name, *others in found)
    yield html.table(cells, report.PROGRESS, 'lrrl', 'meanings')


def _settings(values: dict[str, Any]) -> Iterator[Element]:
  """Yields the knobs that are not at their defaults."""
  default, filled = Config(), config_lib.by_program(values)
  texts = {name: text for name, _, _, text in knobs.describe(default)}
  plain = default.model_dump(mode='json')
  for name in values.get('derived', ()):
    texts[name] = f'Derived. {texts.get(name, "")}'
  cells = [
    (element('code', name), shown(now), shown(was), texts.get(name, ''))
    for name, was, now in differences(plain, values)
    if name not in ('title', *filled)
  ]
  yield element('h2', 'Knobs that are not at their defaults')
  yield html.table(cells, ('knob', 'value', 'default', 'meaning'), 'llll', 'meanings')


def shown(value: Any) -> str:
  """Formats the value of a knob; '' for a knob that does not exist."""
  if value is None:
    return ''
  if isinstance(value, float) and math.isinf(value):
    return 'inf'
  return shortened(value if isinstance(value, str) else json.dumps(value), 200)
