"""Prints recorded groups on the terminal: `bapo show RUN --group=3`."""

import itertools
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
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
LIKELY = 0.9  # the view 'p' marks tokens below this probability
VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long responses'}
# The sign of the advantage is also written out, for readers who do not see colours.
COLOURS = {1: 'green', -1: 'red', 0: 'default'}


class Response(NamedTuple):
  """One response to the prompt of a group; None marks values that were not recorded."""

  text: str
  correct: bool
  reward: float
  advantage: float  # nan in an evaluation
  pieces: list[str] | None = None  # its tokens as strings
  logp_T: Float32[np.ndarray, ' T'] | None = None  # log mu of each token, nats
  ratio_T: Float32[np.ndarray, ' T'] | None = None  # clipped by the update
  cut_T: UInt8[np.ndarray, ' T'] | None = None  # index into CUTS
  length: int | None = None  # tokens


class RecordedGroup(NamedTuple):
  """The responses to one prompt."""

  source: str  # where it was recorded, in words
  prompt: str
  answer: str
  responses: list[Response]
  pictures: tuple[str, ...] = ()  # paths
  step: int | None = None  # number of the learner step, from 1; None: an evaluation
  # The update that used the group: number in its step, from 1, and both bounds.
  update: tuple[int, float, float] | None = None


def read(workdir: str, which: str = 'newest') -> list[RecordedGroup]:
  """Reads all groups of the newest recorded step and the newest evaluation.

  Ignores everything recorded after the checkpoint `which`; see checkpoint.choose.

  Raises:
    ValueError: the workdir has no run, or no recorded group.
  """
  read_config(workdir)
  until = checkpoint.choose(workdir, which) if which != 'newest' else None
  until = until or math.inf
  groups = trained(workdir, step_record.newest(workdir, until))
  groups += evaluated(workdir, until)
  if not groups:
    raise ValueError(
      f'--workdir={workdir} has no recorded group yet; an evaluation records some'
    )
  return groups


def trained(workdir: str, step: int | None) -> list[RecordedGroup]:
  """Reads the groups of a step, or raises ValueError; returns [] if `step` is None."""
  rows = [] if step is None else step_record.read(workdir, step)
  return [_of_record(workdir, row) for row in rows]


def _of_record(workdir: str, row: dict[str, Any]) -> RecordedGroup:
  """Parses a line of groups/<step>.jsonl, where null stands for nan."""

  def array(values: list | None, dtype: type = np.float32) -> Any:
    return None if values is None else np.asarray(values, dtype)

  def number(value: float | None) -> float:
    return math.nan if value is None else value

  responses = [
    Response(
      r['response'],
      r['correct'],
      number(r['reward']),
      number(r['advantage']),
      r['pieces'],
      array(r['sampler_logp']),
      array(r['ratio']),
      array(r['cut'], np.uint8),
      r['tokens'],
    )
    for r in row['responses']
  ]
  update = None
  if row['update'] is not None:
    update = row['update'], number(row['low']), number(row['high'])
  source = f'problem {row["id"]}, trained on in step {row["step"]}, {row["source"]}'
  return RecordedGroup(
    source,
    row['prompt'],
    row['answer'],
    responses,
    _pictures(workdir, row),
    row['step'],
    update,
  )


def _pictures(workdir: str, row: dict[str, Any]) -> tuple[str, ...]:
  return tuple(os.path.join(workdir, name) for name in row.get('pictures', ()))


def evaluated(workdir: str, until: float) -> list[RecordedGroup]:
  """Reads the responses of the newest evaluation up to a step, grouped by problem."""
  names = (path.stem for path in pathlib.Path(workdir, 'eval').glob('*.json'))
  steps = (int(name) for name in names if name.isdecimal())
  step = max((step for step in steps if step <= until), default=None)
  if step is None:
    return []
  groups = []
  # Also by id: problems with the same text may have different verifiers.
  for (_, problem), rows in itertools.groupby(
    evaluate.read_recorded(workdir, step)['samples'],
    lambda sample: (sample.get('id'), sample['problem']),
  ):
    samples = list(rows)
    responses = [  # old records have no reward
      Response(s['response'], s['correct'], s.get('reward', s['correct']), math.nan)
      for s in samples
    ]
    source = f'evaluation at step {step}'
    pictures = _pictures(workdir, samples[0])
    answer = samples[0]['answer']
    groups.append(RecordedGroup(source, problem, answer, responses, pictures))
  return groups


def page(groups: list[RecordedGroup], at: int, views: set[str]) -> RenderableType:
  """Draws the group of index `at`; `views` are the keys of VIEWS to switch on."""
  group = groups[at]
  prompt = Text(visible(group.prompt).rstrip('\n'))
  parts: list[RenderableType] = [
    Rule(f'group {at + 1} of {len(groups)}: {group.source}'),
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
    text, style = 'No update of the step had this group.', 'yellow'
    if group.update:
      number, low, high = group.update
      text = f'[] ratio of a token cut by the bounds of update {number} of step '
      text, style = f'{text}{group.step}, {low:.2f} and {high:.2f}', 'dim'
      text += '; masked: left out by the mask'
    parts.append(Text(text, style))
  for g, response in enumerate(group.responses, 1):
    parts.append(Text(f'\n{g}/{len(group.responses)} ').append(_drawn(response, views)))
  return Group(*parts)


def _drawn(response: Response, views: set[str]) -> Text:
  """Draws verdict, reward, advantage and text; `views` add notes to the tokens."""
  colour = 'default'
  advantage = ''
  if not math.isnan(response.advantage):
    colour = COLOURS[int(np.sign(response.advantage))]
    advantage = f'{response.advantage:+.2f}'
  verdict = ('✓ right', 'green') if response.correct else ('✗ wrong', 'red')
  head = Text.assemble(verdict, f'  reward {response.reward:.2f}')
  if advantage:
    head.append('  advantage ').append(advantage, f'bold {colour}')
  p_T = np.exp(() if response.logp_T is None else response.logp_T)
  if len(p_T):
    head.append(f'  {len(p_T)} tokens, mean probability {p_T.mean():.2f}')
  body = Text()
  ratio_T, cut_T = response.ratio_T, response.cut_T
  if response.pieces is None or not views & {'p', 'c'}:
    body.append(visible(response.text), style=colour)
  else:
    for t, piece in enumerate(response.pieces):
      note = ''
      if 'p' in views and p_T[t] < LIKELY:
        note = f'⟨{p_T[t]:.2f}⟩'.replace('0.', '.')
      if 'c' in views and ratio_T is not None and cut_T is not None and cut_T[t]:
        why = 'masked ' if CUTS[cut_T[t]] == 'masked' else ''
        note += f'[{why}{ratio_T[t]:.2f}]'
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
  """Prints a recorded group, or a list of all groups.

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
    for i, group in enumerate(groups, 1):
      right = sum(response.correct for response in group.responses)
      verdicts = f'{right} of {len(group.responses)} right'
      console.print(f'{i:>4}  {verdicts:<16}{group.source}', highlight=False)
    text = f'bapo show {workdir} --group=N prints a group'
    console.print(f'{text}; groups with right and wrong responses teach', style='dim')
  elif not 1 <= number <= len(groups):
    raise ValueError(f'--group={number} does not exist; give 1 to {len(groups)}')
  else:
    console.print(page(groups, number - 1, set(views)))
