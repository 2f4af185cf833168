"""Shows what the model was asked and what it answered, as elements of a page.

1. `asked`: groups of the newest recorded step, with the tokens that the update cut;
2. `changed`: held-out problems, before and after the training.

tools/viewer.py prints a `group`, or a `problem` and each `sample`, on the terminal.
`views` choose what is shown of a response, see VIEWS.
"""

import base64
import collections
import contextlib
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from bapo_jax.data import conversation
from bapo_jax.rewards import verifiers
from bapo_jax.run import step_record
from bapo_jax.run.run_files import RunFiles
from bapo_jax.runtime import files, html
from bapo_jax.runtime.html import element
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


def asked(run: RunFiles) -> Iterator[Element]:
  """Yields groups that the newest recorded step trained on, the mixed ones first."""

  def order(group: dict[str, Any]):
    verdicts = [r['correct'] is True for r in group['responses']]
    return not step_record.taught(group), abs(sum(verdicts) / len(verdicts) - 0.5)

  groups = sorted(run.groups, key=order)
  mixed = sum(map(step_record.taught, groups))
  yield element('h2', f'What the model was asked in step {groups[0]["step"]}')
  yield element(
    'p',
    f'{mixed} of the {len(groups)} recorded groups have right and wrong responses: '
    f'only such groups teach. {_verifier(run.values)}',
  )
  for i, row in enumerate(groups[:GROUPS]):
    right = sum(r['correct'] is True for r in row['responses'])
    head = f'Problem {row["id"]}: {right} of {len(row["responses"])} right'
    parts = group(run.workdir, row, 'c', RESPONSES)
    folded = element('details', element('summary', head), *parts)
    if i == 0:
      folded.set('open', 'open')
    yield folded


def _verifier(values: dict[str, Any]):
  """Describes the rule that decides which response is right."""
  name = str(values.get('rewards', {}).get('rule', ''))
  rule = verifiers.RULES.get(name)
  lines = (rule.__doc__ or '').strip().splitlines() if rule else []
  return f'The verifier is {name}{": " if lines else "."}{lines[0] if lines else ""}'


def _text(text, views):
  return text if 'a' in views else shortened(text, TEXT)


def problem(
  workdir: str, row: dict[str, Any], text: str, views: str = ''
) -> Iterator[Element]:
  """Yields the text of a recorded problem, its pictures and its right answer."""
  yield element('pre', _text(text, views))
  yield from _pictures(workdir, row)
  if row['answer']:
    yield element('p', 'Right answer: ', element('code', str(row['answer'])))


def group(
  workdir: str, row: dict[str, Any], views: str, most: int
) -> Iterator[Element]:
  """Yields a recorded group, with at most `most` right and `most` wrong responses."""
  note = f'{row["source"]}, completed in step {row["completed_step"]}'
  if row['update'] is not None and row['high'] is not None:
    bounds = f'{row["low"]:g} to {row["high"]:g}'
    note += f'; bounds {bounds} in update {row["update"]}'
  yield element('p', note, class_='soft')
  yield element('h3', 'The prompt, as the model read it')
  yield from problem(workdir, row, row['prompt'], views)
  responses = row['responses']
  shown = [r for r in responses if r['correct']][:most]
  shown += [r for r in responses if not r['correct']][:most]
  yield element('div', *(_response(r, views) for r in shown), class_='pair')
  if more := len(responses) - len(shown):
    text = f'{more} more responses in {step_record.FOLDER}/{row["step"]}.jsonl.'
    yield element('p', text, class_='soft')


def _response(r: dict[str, Any], views):
  """Shows a recorded response; the views mark some of its tokens."""
  kind = WORDS[r['correct']]
  facts = [
    f'reward {_number(r["reward"], ".2f")}',
    f'{"mean " * bool(r.get("advantages"))}advantage {_number(r["advantage"], "+.2f")}',
    f'{r["tokens"]} tokens',
  ]
  if r['truncated']:
    facts.append('cut at the length limit')
  if not r['taught']:
    facts.append('left out of the loss')
  if not all(r.get('sampled', ())):
    facts.append('faint: not sampled, the words of the environment')
  cut = collections.Counter(CUTS[code] for code in r['cut'] or () if code)
  marked = ' (marked)' if 'c' in views else ''
  facts += [f'{why} tokens{marked}: {count}' for why, count in sorted(cut.items())]
  head = element('p', element('span', kind, class_=kind), ' · ' + ' · '.join(facts))
  body: list[html.Content] = [_text(r['response'], views)]
  if r['pieces'] and (cut or 'p' in views or 'sampled' in r or r.get('advantages')):
    body = _marked(r, views)
  return element('div', head, element('pre', *body, class_=f'of-{kind}'))


def _marked(r: dict[str, Any], views):
  """Returns the text of a response, with marks on unlikely and on cut tokens."""
  body: list[html.Content] = []
  size = 0
  for i, piece in enumerate(r['pieces']):
    size += len(piece)
    if size > TEXT and 'a' not in views:
      return [*body, ' [... the rest is left out ...]']
    notes = []
    if 'sampled' in r and not r['sampled'][i]:
      body.append(element('i', piece))  # of the environment
      continue
    if 'p' in views and (p := math.exp(r['sampler_logp'][i])) < LIKELY:
      notes.append(f'probability {p:.2f}')
    if 'c' in views and r['cut'] and (cut := r['cut'][i]):
      notes.append(f'ratio {_number(r["ratio"][i], ".3g")}, {CUTS[cut]}')
    tag = 'mark' if notes else 'span'
    if advantages := r.get('advantages'):
      notes.append(f'advantage {advantages[i]:+.2f}')
    body.append(element(tag, piece, title=', '.join(notes)) if notes else piece)
  return body


def _number(value: float | None, form):
  return 'undefined' if value is None else format(value, form)


def _pictures(workdir, row: dict[str, Any]):
  """Yields the pictures of a problem, inside the page."""
  for name in row.get('pictures', ()):
    path = pathlib.Path(workdir, name)
    suffix = name.rsplit('.')[-1]
    with contextlib.suppress(OSError):
      if suffix in files.PICTURES and path.stat().st_size < PICTURES // (2 * GROUPS):
        data = base64.b64encode(path.read_bytes()).decode()
        kind = suffix.replace('jpg', 'jpeg')
        yield element('img', src=f'data:image/{kind};base64,{data}', alt=name)
        continue
    yield element('p', f'Picture: {name}', class_='soft')


def changed(run: RunFiles) -> Iterator[Element]:
  """Yields held-out problems whose verdict changed, and some whose did not."""
  assert run.after is not None
  after = run.after['samples']
  before = run.before['samples'] if run.before is not None else []
  comparable = len(before) == len(after)  # else the evaluations differ in problems
  pairs = list(zip(before if comparable else after, after, strict=True))
  yield element('h2', 'Held-out problems before and after')
  changes = {
    verdicts: [p for p in pairs if (p[0]['correct'], p[1]['correct']) == verdicts]
    for verdicts in CHANGES
  }
  if comparable:
    counts = [f'{len(changes[v])} {text}' for v, (text, _) in CHANGES.items()]
    if undecided := len(pairs) - sum(map(len, changes.values())):
      counts.append(f'{undecided} undecided before or after')
    text = f'Of {len(pairs)} responses: {"; ".join(counts)}. Some of each:'
    yield element('p', text)
  for verdicts, (text, limit) in CHANGES.items():
    first: dict[str, tuple] = {}  # problem -> its first response
    for pair in changes[verdicts]:
      first.setdefault(pair[1]['problem'], pair)
    for old, new in itertools.islice(first.values(), limit):
      responses = [sample('After', new)]
      if comparable:
        responses.insert(0, sample('Before', old))
      else:
        text = WORDS[new['correct']]
      yield element(
        'details',
        element('summary', f'{text}: {shortened(new["problem"], 80)}'),
        *problem(run.workdir, new, new['problem']),
        element('div', *responses, class_='pair'),
      )


def sample(when: str, row: dict[str, Any], views: str = '') -> Element:
  """Shows an evaluated response and how the verifier read it."""
  kind = WORDS[row['correct']]
  verdict = element('span', row.get('verdict', kind), class_=kind)
  parts: list[html.Content] = [f'{when}: ', verdict]
  if 'extracted' in row:  # old records lack it
    answer = row['extracted']
    if answer is None:
      parts.append('; the verifier found no answer')
    else:
      parts.append('; the verifier read ')
      parts.append(element('code', shortened(str(answer), 200)))
  if row.get('reason'):
    parts.append(f' ({row["reason"]})')
  if row.get('parts'):
    parts.append(f', reward {row["reward"]:.3g}')
  text = conversation.script(row.get('messages', [])[1:]) or row['response']
  body = element('pre', _text(text, views), class_=f'of-{kind}')
  return element('div', element('p', *parts), body)
