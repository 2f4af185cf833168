"""Describes what the model was asked and what it answered, for a page and a terminal.

1. `asked`: groups of the newest recorded step, with the tokens that the update cut;
2. `changed`: held-out problems, before and after the training.

Both consist of `problem`s with responses, as JSON: pages/page.js draws them, and
tools/viewer.py prints them. `views` choose what is shown of a response, see VIEWS.
"""

import base64
import collections
import contextlib
import math
import pathlib
from typing import Any, NamedTuple

from bapo_jax.data import conversation
from bapo_jax.rewards import verifiers
from bapo_jax.run import step_record
from bapo_jax.run.run_files import RunFiles
from bapo_jax.runtime import files
from bapo_jax.runtime.markdown import shortened
from bapo_jax.training.evaluate import WORDS
from bapo_jax.types import CUTS

VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long texts'}
LIKELY = 0.9  # the view 'p' marks tokens below this probability
TEXT = 1500  # characters of a text without the view 'a'
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


class Span(NamedTuple):
  """A piece of a text."""

  text: str
  kind: str = ''  # a verdict, 'code', 'faint', or 'mark'
  title: str = ''  # what a pointer over the piece shows


def asked(run: RunFiles) -> files.Object:
  """Describes groups that the newest recorded step trained on, the mixed ones first."""

  def order(group: dict[str, Any]):
    verdicts = [r['correct'] is True for r in group['responses']]
    return not step_record.taught(group), abs(sum(verdicts) / len(verdicts) - 0.5)

  # Groups near half right first: their advantages are the most balanced to look at.
  groups = sorted(run.groups, key=order)
  mixed = sum(map(step_record.taught, groups))
  return {
    'step': groups[0]['step'],
    'text': f'{mixed} of the {len(groups)} recorded groups have right and wrong '
    f'responses: only such groups teach. {_verifier(run.values)}',
    'problems': [group(run.workdir, x, 'c', RESPONSES) for x in groups[:GROUPS]],
  }


def _verifier(values: dict[str, Any]):
  """Describes the rule that decides which response is right."""
  name = str(values.get('rewards', {}).get('rule', ''))
  rule = verifiers.RULES.get(name)
  lines = (rule.__doc__ or '').strip().splitlines() if rule else []
  return f'The verifier is {name}{": " if lines else "."}{lines[0] if lines else ""}'


def group(workdir: str, row: dict[str, Any], views: str, most: int) -> files.Object:
  """Describes a recorded group, with up to `most` right and wrong responses, each."""
  responses = row['responses']
  # Both kinds, whatever their order, since a reader compares them.
  right = [r for r in responses if r['correct']]
  shown = right[:most] + [r for r in responses if not r['correct']][:most]
  note = f'{row["source"]}, completed in step {row["completed_step"]}'
  if row['update'] is not None and row['high'] is not None:
    bounds = f'{row["low"]:g} to {row["high"]:g}'
    note += f'; bounds {bounds} in update {row["update"]}'
  more = ''
  if count := len(responses) - len(shown):
    more = f'{count} more responses in {step_record.FOLDER}/{row["step"]}.jsonl.'
  return {
    'head': f'Problem {row["id"]}: {len(right)} of {len(responses)} right',
    'note': note,
    **problem(workdir, row, row['prompt'], views),
    'responses': [_response(r, views) for r in shown],
    'more': more,
  }


def problem(workdir: str, row: dict[str, Any], text: str, views: str) -> files.Object:
  """Describes the text of a recorded problem, its pictures and its right answer."""
  return {
    'text': _text(text, views),
    'pictures': [[name, _picture(workdir, name)] for name in row.get('pictures', ())],
    'answer': str(row['answer'] or ''),
  }


def _text(text, views):
  return text if 'a' in views else shortened(text, TEXT)


def _picture(workdir, name):
  """Returns a picture as an address that contains it; '' if it is large or missing."""
  path = pathlib.Path(workdir, name)
  suffix = path.suffix[1:]
  with contextlib.suppress(OSError):
    if suffix in files.PICTURES and path.stat().st_size < PICTURES // (2 * GROUPS):
      data = base64.b64encode(path.read_bytes()).decode()
      return f'data:image/{suffix.replace("jpg", "jpeg")};base64,{data}'
  return ''


def _response(r: dict[str, Any], views):
  """Describes a recorded response; the views mark some of its tokens."""
  kind = WORDS[r['correct']]
  facts = [
    '',
    f'reward {_number(r["reward"], ".2f")}',
    f'{"mean " * bool(r.get("advantages"))}advantage {_number(r["advantage"], "+.2f")}',
    f'{r["tokens"]} tokens',
  ]
  if r['truncated']:
    facts.append('cut at the length limit')
  if not r['taught']:
    facts.append('left out of the loss')
  if r.get('given'):
    facts.append('given, not sampled')
  if not all(r.get('sampled', ())):
    facts.append('faint: not sampled, the words of the environment')
  # Codes, not names, are recorded: one byte per token in a run's files.
  cut = collections.Counter(CUTS[code] for code in r['cut'] or () if code)
  marked = ' (marked)' if 'c' in views else ''
  facts += [f'{why} tokens{marked}: {count}' for why, count in sorted(cut.items())]
  text = [Span(_text(r['response'], views))]
  if r['pieces'] and (cut or 'p' in views or 'sampled' in r or r.get('advantages')):
    text = _marked(r, views)
  head = [Span(kind, kind), Span(' · '.join(facts))]
  return {'kind': kind, 'head': head, 'text': text}


def _marked(r: dict[str, Any], views):
  """Returns the text of a response, with marks on unlikely and on cut tokens."""
  spans = []
  size = 0
  for i, piece in enumerate(r['pieces']):
    size += len(piece)
    if size > TEXT and 'a' not in views:
      return [*spans, Span(' [... the rest is left out ...]')]
    if 'sampled' in r and not r['sampled'][i]:
      spans.append(Span(piece, 'faint'))  # of the environment
      continue
    notes = []
    if 'p' in views and (p := math.exp(r['sampler_logp'][i])) < LIKELY:
      notes.append(f'probability {p:.2f}')
    if 'c' in views and r['cut'] and (cut := r['cut'][i]):
      notes.append(f'ratio {_number(r["ratio"][i], ".3g")}, {CUTS[cut]}')
    kind = 'mark' if notes else ''
    if advantages := r.get('advantages'):
      notes.append(f'advantage {advantages[i]:+.2f}')
    spans.append(Span(piece, kind, ', '.join(notes)))
  return spans


def _number(value: float | None, form):
  return 'undefined' if value is None else format(value, form)


def changed(run: RunFiles) -> files.Object:
  """Describes held-out problems whose verdict changed, and some whose did not."""
  assert run.after is not None
  after = run.after['samples']
  before = run.before['samples'] if run.before is not None else []
  comparable = len(before) == len(after)  # else the evaluations differ in problems
  changes = collections.defaultdict(list)
  for old, new in zip(before if comparable else after, after, strict=True):
    changes[old['correct'], new['correct']].append((old, new))
  counts = [f'{len(changes[v])} {text}' for v, (text, _) in CHANGES.items()]
  undecided = len(after) - sum(len(changes[v]) for v in CHANGES)
  if undecided:
    counts.append(f'{undecided} undecided before or after')
  problems = []
  for verdicts, (text, limit) in CHANGES.items():
    first: dict[str, tuple] = {}  # problem -> its first response
    for old, new in changes[verdicts]:
      first.setdefault(new['problem'], (old, new))
    for old, new in [*first.values()][:limit]:
      head = text if comparable else WORDS[new['correct']]
      responses = [sample('Before', old)] * comparable + [sample('After', new)]
      problems.append({
        'head': f'{head}: {shortened(new["problem"], 80)}',
        **problem(run.workdir, new, new['problem'], ''),
        'responses': responses,
      })  # fmt: skip
  text = f'Of {len(after)} responses: {"; ".join(counts)}. Some of each:'
  return {'text': text * comparable, 'problems': problems}


def sample(when: str, row: dict[str, Any], views: str = '') -> files.Object:
  """Describes an evaluated response and how the verifier read it."""
  kind = WORDS[row['correct']]
  head = [Span(f'{when}: '), Span(kind, kind)]
  if row['extracted'] is None:
    head.append(Span('; the verifier found no answer'))
  else:
    head.append(Span('; the verifier read '))
    head.append(Span(shortened(str(row['extracted']), 200), 'code'))
  if row['reason']:
    head.append(Span(f' ({row["reason"]})'))
  if row['parts']:
    head.append(Span(f', reward {row["reward"]:.3g}'))
  text = conversation.script(row.get('messages', [])[1:]) or row['response']
  return {'kind': kind, 'head': head, 'text': [Span(_text(text, views))]}
