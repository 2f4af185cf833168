"""Prints recorded groups on the terminal: `bapo show RUN --group=3`.

A group is described as for the page of the run (run/samples.py), with all its
responses.
"""

import itertools
import math
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from bapo_jax.run import samples, step_record
from bapo_jax.run.samples import VIEWS, Span
from bapo_jax.runtime import files
from bapo_jax.runtime.markdown import visible
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import checkpoint, evaluate

LISTED = 20  # groups of a list: a recorded step has up to 16
STYLES = {'right': 'green', 'wrong': 'red', 'mark': 'bold', 'faint': 'dim'}


def read(workdir: str, which: str = 'newest', views: str = '') -> list[files.Object]:
  """Describes all groups of the newest recorded step and the newest evaluation.

  `head` says where a group was recorded; the rest is as for the page, with all
  responses. Ignores everything recorded after the checkpoint `which`; see
  checkpoint.choose.

  Raises:
    ValueError: the workdir has no run, or no recorded group.
  """
  read_config(workdir)
  until = math.inf
  if which != 'newest':
    until = checkpoint.choose(workdir, which) or math.inf
  groups = []
  step = step_record.newest(workdir, until)
  for row in [] if step is None else step_record.read(workdir, step):
    where = f'problem {row["id"]}, trained on in step {step}, {row["source"]}'
    group = samples.group(workdir, row, views, len(row['responses']))
    groups.append(group | {'head': where})
  step = step_record.newest(workdir, until, 'eval/*.json')
  recorded = [] if step is None else evaluate.read_recorded(workdir, step)['samples']
  # Also by id: problems with the same text may have different verifiers.
  for _, same in itertools.groupby(recorded, lambda x: (x['id'], x['problem'])):
    rows = [*same]
    numbered = [
      samples.sample(f'{i} of {len(rows)}', row, views) for i, row in enumerate(rows, 1)
    ]
    parts = samples.problem(workdir, rows[0], rows[0]['problem'], views)
    where = {'head': f'evaluation at step {step}', 'note': ''}
    groups.append(where | parts | {'responses': numbered})
  if not groups:
    raise ValueError(
      f'--workdir={workdir} has no recorded group yet; wait for an evaluation'
    )
  return groups


def text_of(spans: Iterable[Span], style: str = '') -> Text:
  """Returns pieces as text; the title of a mark follows it in brackets."""
  text = Text(style=style)
  for span in spans:
    text.append(visible(span.text), STYLES.get(span.kind, ''))
    if span.kind == 'mark':
      text.append(f'[{visible(span.title)}]', 'cyan')
  return text


def lines(problem: files.Object) -> Iterable[Text]:
  """Yields a problem and its responses for the terminal."""
  if problem['note']:
    yield Text(problem['note'], 'dim')
    yield Text('The prompt, as the model read it', 'bold')
  yield Text(visible(problem['text']))
  for name, _ in problem['pictures']:
    yield Text(visible(f'Picture: {name}'))
  if problem['answer']:
    yield Text(visible(f'Right answer: {problem["answer"]}'))
  for response in problem['responses']:
    yield Text()
    yield text_of(response['head'])
    yield text_of(response['text'], STYLES.get(response['kind'], ''))


def show(
  workdir: str = 'runs/default',
  group: int | None = None,
  views: str = '',
  checkpoint: str = 'newest',
  console: Console | None = None,
) -> None:
  """Prints a recorded group, or a list of the first groups.

  Args:
    workdir: directory of all results
    checkpoint: newest, best or a step; later records are ignored
    group: prints this group, from 1; not given: lists the groups
    views: p: token probabilities, c: clip status, a: texts in full

  Raises:
    ValueError: nothing is recorded, or the group or the view does not exist.
  """
  if unknown := set(views) - set(VIEWS):
    raise ValueError(f'--views={views}: unknown views {sorted(unknown)}; use {VIEWS}')
  groups = read(workdir, checkpoint, views)
  console = console or Console()
  if group is None:
    for i, listed in enumerate(groups[:LISTED], 1):
      kinds = [response['kind'] for response in listed['responses']]
      verdicts = f'{kinds.count("right")} of {len(kinds)} right'
      console.print(f'{i:>4}  {verdicts:<16}{listed["head"]}', highlight=False)
    text = f'--group=1 to --group={len(groups)} prints a group'
    console.print(f'{text}; those with right and wrong responses teach', style='dim')
  elif not 1 <= group <= len(groups):
    raise ValueError(f'--group={group} does not exist; give 1 to {len(groups)}')
  else:
    chosen = groups[group - 1]
    console.rule(f'group {group} of {len(groups)}: {chosen["head"]}')
    console.print(*lines(chosen), sep='\n')
