"""Prints recorded groups on the terminal: `bapo show RUN --group=3`."""

import itertools
import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from bapo_jax.run import step_record
from bapo_jax.runtime.markdown import visible  # a response must not steer the terminal
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import checkpoint, evaluate
from bapo_jax.types import CUTS

LONG = 2000  # longest response shown in full without the view 'a', characters
LISTED = 20  # groups of a list: a recorded step has up to 16
LIKELY = 0.9  # the view 'p' marks tokens below this probability
VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long responses'}
# The sign of the advantage is also written out, for readers who do not see colours.
TEXT_ONLY = dict.fromkeys(('reward', 'advantage', 'pieces', 'sampler_logp', 'cut'))
COLOURS = {1: 'green', -1: 'red', 0: 'default'}


# A group as in groups/<step>.jsonl, with `where` it was recorded, in words, and the
# paths of its `pictures`. The groups of an evaluation have texts only.
Recorded = Any


def read(workdir: str, which: str = 'newest') -> list[Recorded]:
  """Reads all groups of the newest recorded step and the newest evaluation.

  Ignores everything recorded after the checkpoint `which`; see checkpoint.choose.

  Raises:
    ValueError: the workdir has no run, or no recorded group.
  """
  read_config(workdir)
  until = math.inf
  if which != 'newest':
    until = checkpoint.choose(workdir, which) or math.inf
  groups = trained(workdir, step_record.newest(workdir, until))
  groups += evaluated(workdir, until)
  if not groups:
    raise ValueError(
      f'--workdir={workdir} has no recorded group yet; wait for an evaluation'
    )
  return groups


def trained(workdir: str, step: int | None) -> list[Recorded]:
  """Reads the groups of a step, or raises ValueError; returns [] if `step` is None."""
  rows = [] if step is None else step_record.read(workdir, step)
  where = 'problem {id}, trained on in step {step}, {source}'
  return [_group(workdir, row, where.format(**row)) for row in rows]


def _group(workdir: str, row: dict[str, Any], where: str) -> Recorded:
  pictures = [os.path.join(workdir, name) for name in row.get('pictures', ())]
  responses = [SimpleNamespace(**response) for response in row['responses']]
  more = {'where': where, 'pictures': pictures, 'responses': responses}
  return SimpleNamespace(**row | more)


def evaluated(workdir: str, until: float) -> list[Recorded]:
  """Reads the responses of the newest evaluation up to a step, grouped by problem."""
  step = step_record.newest(workdir, until, 'eval/*.json')
  if step is None:
    return []
  groups = []
  # Also by id: problems with the same text may have different verifiers.
  for (_, problem), samples in itertools.groupby(
    evaluate.read_recorded(workdir, step)['samples'],
    lambda sample: (sample.get('id'), sample['problem']),
  ):
    responses = [TEXT_ONLY | sample for sample in samples]
    row = responses[0] | {'step': None, 'prompt': problem, 'responses': responses}
    groups.append(_group(workdir, row, f'evaluation at step {step}'))
  return groups


def page(groups: list[Recorded], at: int, views: set[str]) -> RenderableType:
  """Draws the group of index `at`; `views` are the keys of VIEWS to switch on."""
  group = groups[at]
  prompt = Text(visible(group.prompt).rstrip('\n'))
  parts: list[RenderableType] = [
    Rule(f'group {at + 1} of {len(groups)}: {group.where}'),
    Panel(prompt, title='prompt', title_align='left'),
  ]
  parts.extend(Text(f'picture: {visible(path)}') for path in group.pictures)
  if group.answer:
    parts.append(Text(f'right answer: {visible(group.answer)}'))
  if views & {'p', 'c'} and group.step is None:
    text = 'An evaluation records only text; the groups of a step have tokens too.'
    parts.append(Text(text, style='yellow'))
  elif 'p' in views:
    parts.append(Text(f'⟨⟩ probability of a token, below {LIKELY}', style='dim'))
  if 'c' in views and group.step is not None:
    text = 'No update of the step had this group.'
    if group.update is not None:
      text = (
        f'[] ratio of a token cut by the bounds of update {group.update} of step '
        f'{group.step}, {_number(group.low)} and {_number(group.high)}; masked: left '
        'out by the mask'
      )
    parts.append(Text(text, style='yellow' if group.update is None else 'dim'))
  for g, response in enumerate(group.responses, 1):
    parts.append(Text(f'\n{g}/{len(group.responses)} ').append(_drawn(response, views)))
  return Group(*parts)


def _number(value: float | None, form: str = '.2f') -> str:
  return 'nan' if value is None else format(value, form)


def _drawn(response: Recorded, views: set[str]) -> Text:
  """Draws verdict, reward, advantage and text; `views` add notes to the tokens."""
  verdict = ('✓ right', 'green') if response.correct else ('✗ wrong', 'red')
  head = Text.assemble(verdict)
  if response.reward is not None:
    head.append(f'  reward {response.reward:.2f}')
  colour = 'default'
  if response.advantage is not None:
    colour = COLOURS[int(np.sign(response.advantage))]
    head.append('  advantage ').append(f'{response.advantage:+.2f}', f'bold {colour}')
  p_T = np.exp(response.sampler_logp or ())
  if len(p_T):
    head.append(f'  {len(p_T)} tokens, mean probability {p_T.mean():.2f}')
  body = Text()
  if response.pieces is None or not views & {'p', 'c'}:
    body.append(visible(response.response), style=colour)
  else:
    for t, piece in enumerate(response.pieces):
      note = ''
      if 'p' in views and p_T[t] < LIKELY:
        note = f'⟨{p_T[t]:.2f}⟩'.replace('0.', '.')
      if 'c' in views and response.cut and response.cut[t]:
        why = 'masked ' if CUTS[response.cut[t]] == 'masked' else ''
        note += f'[{why}{_number(response.ratio[t])}]'
      body.append(visible(piece), style=f'bold {colour}' if note else colour)
      body.append(note, style='cyan')
  if len(body) > LONG and 'a' not in views:
    gap = f'\n... {len(body) - LONG} characters left out; --views=a shows them ...\n'
    middle = Text(gap, style='dim')
    body = Text.assemble(body[: LONG // 2], middle, body[-(LONG // 2) :])
  return Text.assemble(head, '\n', body)


def show(
  workdir: str,
  number: int | None = None,
  views: str = '',
  which: str = 'newest',
  console: Console | None = None,
) -> None:
  """Prints a recorded group, or a list of the first groups.

  Args:
    number: the group to print, from 1; None prints the list.
    views: keys of VIEWS.
    which: ignores what was recorded after this checkpoint; see checkpoint.choose.

  Raises:
    ValueError: nothing is recorded, or the group or the view does not exist.
  """
  if unknown := set(views) - set(VIEWS):
    raise ValueError(f'--views={views}: unknown views {sorted(unknown)}; use {VIEWS}')
  groups = read(workdir, which)
  console = console or Console()
  if number is None:
    for i, group in enumerate(groups[:LISTED], 1):
      right = sum(response.correct for response in group.responses)
      verdicts = f'{right} of {len(group.responses)} right'
      console.print(f'{i:>4}  {verdicts:<16}{group.where}', highlight=False)
    text = f'--group=1 to --group={len(groups)} prints a group'
    console.print(f'{text}; those with right and wrong responses teach', style='dim')
  elif not 1 <= number <= len(groups):
    raise ValueError(f'--group={number} does not exist; give 1 to {len(groups)}')
  else:
    console.print(page(groups, number - 1, set(views)))
