"""--mode=show: draws recorded responses on the terminal, group by group."""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from bapo_jax.runtime.markdown import visible  # a response must not steer the terminal
from bapo_jax.tools import recorded_groups
from bapo_jax.tools.recorded_groups import RecordedGroup, Response

LONG = 2000  # longest response shown in full without the view 'a', characters
LIKELY = 0.9  # the view 'p' marks tokens below this probability
VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long responses'}
# The sign of the advantage is also written out, for readers who do not see colours.
COLOURS = {1: 'green', -1: 'red', 0: 'default'}
STEPS = {'n': 1, 'b': -1}  # groups that a key moves forward


def page(groups: list[RecordedGroup], at: int, views: set[str]) -> RenderableType:
  """Draws the group of index `at`, with the keys of VIEWS in `views` on."""
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
    parts.append(Text(text, style))
  for g, response in enumerate(group.responses, 1):
    parts.append(Text(f'\n{g}/{len(group.responses)} ').append(_drawn(response, views)))
  return Group(*parts)


def _drawn(response: Response, views: set[str]) -> Text:
  """Draws verdict, reward, advantage and text of a response, with notes on tokens."""
  colour = COLOURS[int(np.sign(response.advantage))]
  verdict = ('✓ right', 'green') if response.correct else ('✗ wrong', 'red')
  reward = f'  reward {response.reward:.2f}  advantage '
  advantage = f'{response.advantage:+.2f}', f'bold {colour}'
  head, body = Text.assemble(verdict, reward, advantage), Text()
  ratio_T, cut_T = response.ratio_T, response.cut_T
  p_T = np.exp(() if response.logp_T is None else response.logp_T)
  if len(p_T):
    head.append(f'  {len(p_T)} tokens, mean probability {p_T.mean():.2f}')
  if response.pieces is None or not views & {'p', 'c'}:
    body.append(visible(response.text), style=colour)
  else:
    for t, piece in enumerate(response.pieces):
      note = ''
      if 'p' in views and p_T[t] < LIKELY:
        note = f'⟨{p_T[t]:.2f}⟩'.replace('0.', '.')
      if 'c' in views and ratio_T is not None and cut_T is not None and cut_T[t]:
        note += f'[{ratio_T[t]:.2f}]'
      body.append(visible(piece), style=f'bold {colour}' if note else colour)
      body.append(note, style='cyan')
  if len(body) > LONG and 'a' not in views:
    left = len(body) - LONG
    gap = Text(f'\n... {left} characters left out, a shows them ...\n', style='dim')
    body = Text.assemble(body[: LONG // 2], gap, body[-(LONG // 2) :])
  return Text.assemble(head, '\n', body)


def show(
  workdir: str,
  number: int | None,
  views: str,
  console: Console | None = None,
  keys: Iterable[str] | None = None,
  which: str = 'newest',
) -> int:
  """Prints a page, or turns pages by keys on a terminal; returns 0.

  `number` is the group to print, from 1; None browses all groups on a terminal, else
  prints the first group. `views` are the initial keys of VIEWS, `keys` the input.

  Raises:
    ValueError: nothing is recorded, or the group or the view does not exist.
  """
  if wrong := set(views) - set(VIEWS):
    raise ValueError(f'--show_with={views}: no {sorted(wrong)}; use letters of {VIEWS}')
  groups = recorded_groups.read(workdir, which)
  if number is not None and not 1 <= number <= len(groups):
    raise ValueError(f'--show_group={number}: give 1 to {len(groups)}')
  console = console or Console()
  if keys is None and sys.stdin.isatty():
    keys = pressed()
  at, on = (number or 1) - 1, set(views)
  if number is not None or not console.is_terminal or keys is None:
    console.print(page(groups, at, on))
    if number is None:
      console.print(f'--show_group=1..{len(groups)} prints another group', style='dim')
    return 0
  names = ', '.join(f'{key}: {name}' for key, name in VIEWS.items())
  for key in itertools.chain([''], keys):
    if key == 'q':
      break
    at = min(max(at + STEPS.get(key, 0), 0), len(groups) - 1)
    on ^= {key} & set(VIEWS)
    console.clear()
    console.print(page(groups, at, on))
    console.print(f'\nn: next, b: back, {names}, q: quit', style='dim')
  return 0


def pressed() -> Iterator[str]:
  """Yields keys as they are pressed; restores the terminal at the end."""
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
