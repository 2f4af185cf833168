"""Responses on the terminal: what a run's policy wrote, group by group.

1. `page` draws one group: its prompt, and responses in the colour of their advantage;
2. `show` prints a page, or turns pages by keys where there is a terminal.
"""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from bapo_jax.runtime import metrics
from bapo_jax.tools import recorded_groups
from bapo_jax.tools.recorded_groups import RecordedGroup, Response

LONG = 2000  # characters of a response that are shown unless all are asked for
LIKELY = 0.9  # tokens below this probability carry it in the view of probabilities
VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long responses'}
# The sign of the advantage is also written out: not everybody sees colours.
COLOURS = {1: 'green', -1: 'red', 0: 'default'}


def page(
  groups: list[RecordedGroup], at: int, views: set[str], bounds: dict, ratios: Callable
) -> RenderableType:
  """One group, drawn.

  Args:
    at: which, from 0.
    views: of VIEWS, those that are on.
    bounds: the newest row of metrics.jsonl with clip/low and clip/high; {} for none.
    ratios: from a group to the ratio of each of its tokens, an array a response.
  """
  group = groups[at]
  prompt = Text(_visible(group.prompt).rstrip('\n'))
  parts: list[RenderableType] = [
    Rule(f'group {at + 1} of {len(groups)}: {group.where}'),
    Panel(prompt, title='prompt', title_align='left'),
  ]
  if group.answer:
    parts.append(Text(f'right answer: {_visible(group.answer)}'))
  notes: list[list[list[str]]] = []  # by view, response, token
  if views & {'p', 'c'} and group.arrays is None:
    told = 'An evaluation keeps text only; the good shelf of a run with '
    parts.append(Text(f'{told}batch.rule=adapted keeps tokens too.', style='yellow'))
  else:
    if 'p' in views:
      parts.append(Text(f'⟨⟩ probability of a token, below {LIKELY}', style='dim'))
      notes.append([_unlikely(response) for response in group.responses])
    if 'c' in views and not bounds:
      parts.append(Text('No step has reported clip bounds yet.', style='yellow'))
    elif 'c' in views:
      low, high = bounds['clip/low'], bounds['clip/high']
      told = 'ratio of a token that would be clipped today, with the mean bounds of'
      told = f'[] {told} step {bounds["step"]:.0f}, {low:.2f} and {high:.2f}'
      parts.append(Text(told, style='dim'))
      pairs = zip(group.responses, ratios(group), strict=True)
      notes.append([_clipped(r, ratio_T, low, high) for r, ratio_T in pairs])
  for g, response in enumerate(group.responses):
    beside = [''.join(each) for each in zip(*(view[g] for view in notes), strict=True)]
    parts.append(_heading(g, len(group.responses), response))
    parts.append(_body(response, beside if notes else None, 'a' in views))
  return Group(*parts)


def _unlikely(response: Response) -> list[str]:
  p_T = np.exp(response.logp)
  return [f'⟨{p:.2f}⟩'.replace('0.', '.') if p < LIKELY else '' for p in p_T]


def _clipped(response: Response, ratio_T, low: float, high: float) -> list[str]:
  """The ratio of tokens whose advantage would push them on, out of the bounds."""
  up = response.advantage > 0
  cut_T = (ratio_T >= high) if up else (ratio_T <= low) & (response.advantage < 0)
  pairs = zip(ratio_T, cut_T, strict=True)
  return [f'[{ratio:.2f}]' if cut else '' for ratio, cut in pairs]


def _heading(g: int, of: int, response: Response) -> Text:
  sign = int(np.sign(response.advantage))
  head = Text(f'\n{g + 1}/{of} ')
  verdict = '✓ right' if response.correct else '✗ wrong'
  head.append(verdict, style=COLOURS[1 if response.correct else -1])
  head.append(f'  reward {response.reward:.2f}  advantage ')
  head.append(f'{response.advantage:+.2f}', style=f'bold {COLOURS[sign]}')
  if response.logp is not None and len(response.logp):
    mean = np.exp(response.logp).mean()
    head.append(f'  {len(response.logp)} tokens, mean probability {mean:.2f}')
  return head


def _body(response: Response, beside: list[str] | None, whole: bool) -> Text:
  """The response, token by token where there is something to note beside each.

  The middle of a long one is left out.
  """
  colour = COLOURS[int(np.sign(response.advantage))]
  body = Text()
  if beside is None:
    body.append(_visible(response.text), style=colour)
  else:
    for piece, note in zip(response.pieces, beside, strict=True):
      body.append(_visible(piece), style=f'bold {colour}' if note else colour)
      body.append(note, style='cyan')
  if len(body) > LONG and not whole:
    left = len(body) - LONG
    note = Text(f'\n... {left} characters left out, a shows them ...\n', style='dim')
    body = Text.assemble(body[: LONG // 2], note, body[-(LONG // 2) :])
  return body


def _visible(text: str) -> str:
  """Control characters spelled out: a response must not steer the terminal."""
  return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda m: f'\\x{ord(m[0]):02x}', text)


def show(
  config,
  workdir: str,
  number: int | None,
  views: str,
  console: Console | None = None,
  keys: Iterable[str] | None = None,
  which: str = 'newest',
) -> int:
  """Shows recorded groups; returns the exit status, 0.

  Args:
    config: the run's; read where the policy is asked for its ratios.
    number: the one group to print, from 1; None for all, by keys where there is a
      terminal, else the first.
    views: letters of VIEWS that are on at the start.
    console, keys: what to draw on and what is pressed; the terminal's by default.
    which: of the checkpoints; see checkpoint.choose.

  Raises:
    ValueError: nothing is recorded, or there is no such group or view.
  """
  if wrong := set(views) - set(VIEWS):
    raise ValueError(f'--show_with={views}: no {sorted(wrong)}; letters of {VIEWS}')
  groups = recorded_groups.read(workdir, which)
  if number is not None and not 1 <= number <= len(groups):
    raise ValueError(f'--show_group={number}: give 1 to {len(groups)}')
  last = recorded_groups.last(workdir, which)
  rows = [r for r in metrics.read(workdir) if 'clip/low' in r and r['step'] <= last]
  bounds = rows[-1] if rows else {}
  policy: list[Callable] = []  # its weights are read when it is first asked

  def ratios(group: RecordedGroup):
    if not policy:
      policy.append(recorded_groups.ratios(config, workdir, which))
    return policy[0](group)

  console = console or Console()
  on, at = set(views), (number or 1) - 1
  interactive = number is None and console.is_terminal
  if keys is None and interactive and sys.stdin.isatty():
    keys = pressed()
  if not interactive or keys is None:
    console.print(page(groups, at, on, bounds, ratios))
    if number is None:
      console.print(f'--show_group=1..{len(groups)} prints another group', style='dim')
    return 0
  names = ', '.join(f'{key}: {name}' for key, name in VIEWS.items())
  for key in itertools.chain([''], keys):
    if key == 'q':
      break
    at = min(max(at + {'n': 1, 'b': -1}.get(key, 0), 0), len(groups) - 1)
    on ^= {key} & set(VIEWS)
    console.clear()
    console.print(page(groups, at, on, bounds, ratios))
    console.print(f'\nn: next, b: back, {names}, q: quit', style='dim')
  return 0


def pressed() -> Iterator[str]:
  """Keys as they are pressed, without return; the terminal is put back at the end."""
  import termios
  import tty

  terminal = sys.stdin.fileno()
  before = termios.tcgetattr(terminal)
  try:
    tty.setcbreak(terminal)
    while key := os.read(terminal, 1):
      yield key.decode(errors='replace')
  finally:
    termios.tcsetattr(terminal, termios.TCSADRAIN, before)
