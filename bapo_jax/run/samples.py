"""Shows prompts and responses on the page of a run.

1. `asked`: groups of the newest recorded step, with the tokens that the update cut;
2. `changed`: held-out problems, before and after the training.
"""

import base64
import collections
import contextlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from bapo_jax.rewards import verifiers
from bapo_jax.run import step_record
from bapo_jax.run.run_files import RunFiles
from bapo_jax.runtime import files, html
from bapo_jax.runtime.html import element
from bapo_jax.runtime.markdown import shortened
from bapo_jax.types import CUTS

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


def asked(run: RunFiles) -> Iterator[Element]:
  """Yields groups that the newest recorded step trained on, the mixed ones first."""

  def order(group: dict[str, Any]) -> tuple[bool, float]:
    verdicts = [r['correct'] for r in group['responses']]
    return not step_record.taught(group), abs(sum(verdicts) / len(verdicts) - 0.5)

  groups = sorted(run.groups, key=order)
  mixed = sum(map(step_record.taught, groups))
  yield element('h2', f'What the model was asked in step {groups[0]["step"]}')
  yield element(
    'p',
    f'{mixed} of the {len(groups)} recorded groups have right and wrong responses: '
    f'only such groups teach. {_verifier(run.values)}',
  )
  for i, group in enumerate(groups[:GROUPS]):
    right = sum(r['correct'] for r in group['responses'])
    head = f'Problem {group["id"]}: {right} of {len(group["responses"])} right'
    folded = element('details', element('summary', head), *_group(run, group))
    if i == 0:
      folded.set('open', 'open')
    yield folded


def _verifier(values: dict[str, Any]) -> str:
  """Describes the rule that decides which response is right."""
  name = str(values.get('rewards', {}).get('rule', ''))
  rule = verifiers.RULES.get(name)
  lines = (rule.__doc__ or '').strip().splitlines() if rule else []
  return f'The verifier is {name}{": " if lines else "."}{lines[0] if lines else ""}'


def _group(run: RunFiles, group: dict[str, Any]) -> Iterator[Element]:
  note = f'{group["source"]}, completed in step {group["completed_step"]}'
  if group['update'] is not None and group['high'] is not None:
    bounds = f'{group["low"]:g} to {group["high"]:g}'
    note += f'; bounds {bounds} in update {group["update"]}'
  yield element('p', note, class_='soft')
  yield element('h3', 'The prompt, as the model read it')
  yield element('pre', shortened(group['prompt'], TEXT))
  yield from _pictures(run, group)
  if group['answer']:
    yield element('p', 'Right answer: ', element('code', str(group['answer'])))
  responses = group['responses']
  shown = [r for r in responses if r['correct']][:RESPONSES]
  shown += [r for r in responses if not r['correct']][:RESPONSES]
  yield element('div', *map(_response, shown), class_='pair')
  if more := len(responses) - len(shown):
    text = f'{more} more responses in {step_record.FOLDER}/{group["step"]}.jsonl.'
    yield element('p', text, class_='soft')


def _response(r: dict[str, Any]) -> Element:
  """Shows a recorded response; clipped and masked tokens are marked."""
  kind = 'right' if r['correct'] else 'wrong'
  facts = [
    f'reward {_number(r["reward"], ".2f")}',
    f'advantage {_number(r["advantage"], "+.2f")}',
    f'{r["tokens"]} tokens',
  ]
  if r['truncated']:
    facts.append('cut at the length limit')
  if not r['taught']:
    facts.append('left out of the loss')
  cut = collections.Counter(CUTS[code] for code in r['cut'] or () if code)
  facts += [f'{why} tokens (marked): {count}' for why, count in sorted(cut.items())]
  head = element('p', element('span', kind, class_=kind), ' · ' + ' · '.join(facts))
  body = _marked(r) if cut else [shortened(r['response'], TEXT)]
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
    path = pathlib.Path(run.workdir, name)
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
    text = f'Of {len(pairs)} responses: {"; ".join(counts)}. Some of each:'
    yield element('p', text)
  for verdicts, (text, limit) in CHANGES.items():
    first: dict[str, tuple] = {}  # problem -> its first response
    for pair in changes[verdicts]:
      first.setdefault(pair[1]['problem'], pair)
    for old, new in itertools.islice(first.values(), limit):
      responses = [_sample('After', new)]
      if comparable:
        responses.insert(0, _sample('Before', old))
      else:
        text = 'right' if new['correct'] else 'wrong'
      yield element(
        'details',
        element('summary', f'{text}: {shortened(new["problem"], 80)}'),
        element('pre', shortened(new['problem'], TEXT)),
        element('p', 'Right answer: ', element('code', str(new['answer']))),
        *_pictures(run, new),
        element('div', *responses, class_='pair'),
      )


def _sample(when: str, sample: dict[str, Any]) -> Element:
  """Shows an evaluated response and how the verifier read it."""
  kind = 'right' if sample['correct'] else 'wrong'
  verdict = element('span', sample.get('verdict', kind), class_=kind)
  parts: list[html.Content] = [f'{when}: ', verdict]
  if 'extracted' in sample:  # old records lack it
    answer = sample['extracted']
    if answer is None:
      parts.append('; the verifier found no answer')
    else:
      parts.append('; the verifier read ')
      parts.append(element('code', shortened(str(answer), 200)))
  if sample.get('reason'):
    parts.append(f' ({sample["reason"]})')
  if sample.get('parts'):
    parts.append(f', reward {sample["reward"]:.3g}')
  text = shortened(sample['response'], TEXT)
  body = element('pre', text, class_=f'of-{kind}')
  return element('div', element('p', *parts), body)
