"""--mode=show: responses on the terminal, group by group.

1. `page` draws one group: its prompt, where its pictures lie, and responses in the
   colour of their advantage;
2. `show` prints one page, or turns pages by keys where the output is a terminal.
"""

import functools
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
from bapo_jax.training.config import Config

LONG = 2000  # characters of a response that are shown unless the view is 'a'
LIKELY = 0.9  # tokens below this probability carry it in the view of probabilities
VIEWS = {'p': 'token probabilities', 'c': 'clip status', 'a': 'all of long responses'}
# The sign of the advantage is also written out: not everybody sees colours.
COLOURS = {1: 'green', -1: 'red', 0: 'default'}
STEPS = {'n': 1, 'b': -1}  # groups that a key moves on

Ratios = Callable[[RecordedGroup], list[np.ndarray]]
Notes = list[list[str]]  # by response, token: what stands beside it, or ''


def page(
  groups: list[RecordedGroup],
  at: int,
  views: set[str],
  bounds: dict[str, float],
  ratios: Ratios,
) -> RenderableType:
  """Draws one group.

  Args:
    at: its index.
    views: keys of VIEWS that are on.
    bounds: the newest row of metrics.jsonl with clip/low and clip/high; {} for none.
    ratios: from a group to pi / mu of every token, [T] per response.
  """
  group = groups[at]
  prompt = Text(_visible(group.prompt).rstrip('\n'))
  parts: list[RenderableType] = [
    Rule(f'group {at + 1} of {len(groups)}: {group.source}'),
    Panel(prompt, title='prompt', title_align='left'),
  ]
  parts.extend(Text(f'picture: {_visible(path)}') for path in group.pictures)
  if group.answer:
    parts.append(Text(f'right answer: {_visible(group.answer)}'))
  explanations, notes = _views(group, views, bounds, ratios)
  parts.extend(explanations)
  for g, response in enumerate(group.responses):
    parts.append(_heading(g, len(group.responses), response))
    parts.append(_body(response, notes[g] if notes else None, 'a' in views))
  return Group(*parts)


def _views(
  group: RecordedGroup, views: set[str], bounds: dict[str, float], ratios: Ratios
) -> tuple[list[Text], Notes]:
  """(explanations of the views that are on, notes beside tokens; [] without any)."""
  texts: list[Text] = []
  if not views & {'p', 'c'}:
    return texts, []
  if all(response.logp_T is None for response in group.responses):
    text = 'An evaluation records text only; what a step trained on has tokens too.'
    return [Text(text, style='yellow')], []
  by_view: list[Notes] = []
  if 'p' in views:
    texts.append(Text(f'⟨⟩ probability of a token, below {LIKELY}', style='dim'))
    by_view.append([_unlikely(response) for response in group.responses])
  if 'c' in views and group.arrays is None:
    texts.append(_of_update(group))
    by_view.append([_cut(response) for response in group.responses])
  elif 'c' in views and not bounds:
    texts.append(Text('No step has reported clip bounds yet.', style='yellow'))
  elif 'c' in views:
    low, high = bounds['clip/low'], bounds['clip/high']
    text = '[] ratio of a token that would be clipped now, by the mean bounds of step '
    texts.append(Text(f'{text}{bounds["step"]:.0f}, {low:.2f} and {high:.2f}', 'dim'))
    pairs = zip(group.responses, ratios(group), strict=True)
    by_view.append([_clipped(r, ratio_T, low, high) for r, ratio_T in pairs])
  notes = [
    [''.join(beside) for beside in zip(*tokens, strict=True)]
    for tokens in zip(*by_view, strict=True)
  ]
  return texts, notes


def _of_update(group: RecordedGroup) -> Text:
  """Explains the clip status of a group that a step trained on."""
  if group.update is None:
    return Text('No update of the step had this group.', style='yellow')
  number, low, high = group.update
  text = (
    f'[] ratio of a token cut by the bounds of update {number} of step {group.step}'
  )
  return Text(f'{text}, {low:.2f} and {high:.2f}', 'dim')


def _cut(response: Response) -> list[str]:
  """The ratio of every token that its update cut."""
  if response.ratio_T is None or response.cut_T is None:
    return [''] * len(response.pieces or ())
  pairs = zip(response.ratio_T, response.cut_T, strict=True)
  return [f'[{ratio:.2f}]' if cut else '' for ratio, cut in pairs]


def _unlikely(response: Response) -> list[str]:
  """The probability of every token that is not likely."""
  if response.logp_T is None:
    return []
  p_T = np.exp(response.logp_T)
  return [f'⟨{p:.2f}⟩'.replace('0.', '.') if p < LIKELY else '' for p in p_T]


def _clipped(
  response: Response, ratio_T: np.ndarray, low: float, high: float
) -> list[str]:
  """The ratio of every token that has reached the bound it is pushed towards."""
  up = response.advantage > 0
  cut_T = (ratio_T >= high) if up else (ratio_T <= low) & (response.advantage < 0)
  pairs = zip(ratio_T, cut_T, strict=True)
  return [f'[{ratio:.2f}]' if cut else '' for ratio, cut in pairs]


def _heading(g: int, of: int, response: Response) -> Text:
  """Number, verdict, reward and advantage of a response."""
  sign = int(np.sign(response.advantage))
  head = Text(f'\n{g + 1}/{of} ')
  verdict = '✓ right' if response.correct else '✗ wrong'
  head.append(verdict, style=COLOURS[1 if response.correct else -1])
  head.append(f'  reward {response.reward:.2f}  advantage ')
  head.append(f'{response.advantage:+.2f}', style=f'bold {COLOURS[sign]}')
  if response.logp_T is not None and len(response.logp_T):
    mean = np.exp(response.logp_T).mean()
    head.append(f'  {len(response.logp_T)} tokens, mean probability {mean:.2f}')
  return head


def _body(response: Response, notes: list[str] | None, whole: bool) -> Text:
  """The response, token by token where it has notes.

  Args:
    notes: one per token. whole: also the middle of a long response.
  """
  colour = COLOURS[int(np.sign(response.advantage))]
  body = Text()
  if notes is None or response.pieces is None:
    body.append(_visible(response.text), style=colour)
  else:
    for piece, note in zip(response.pieces, notes, strict=True):
      body.append(_visible(piece), style=f'bold {colour}' if note else colour)
      body.append(note, style='cyan')
  if len(body) > LONG and not whole:
    left = len(body) - LONG
    gap = Text(f'\n... {left} characters left out, a shows them ...\n', style='dim')
    body = Text.assemble(body[: LONG // 2], gap, body[-(LONG // 2) :])
  return body


def _visible(text: str) -> str:
  """Control characters spelled out: a response must not steer the terminal."""
  return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda m: f'\\x{ord(m[0]):02x}', text)


def show(
  config: Config,
  workdir: str,
  number: int | None,
  views: str,
  console: Console | None = None,
  keys: Iterable[str] | None = None,
  which: str = 'newest',
) -> int:
  """Shows recorded groups; returns the exit status, 0.

  Args:
    config: the run's; read only where the ratios are shown.
    number: the one group to print, from 1; None for all, by keys on a terminal, else
      the first.
    views: keys of VIEWS that are on at the start.
    console, keys: where to draw and which keys are pressed; the terminal's by default.
    which: newest, best or a step; see checkpoint.choose.

  Raises:
    ValueError: nothing is recorded, or no such group or view.
  """
  if wrong := set(views) - set(VIEWS):
    raise ValueError(f'--show_with={views}: no {sorted(wrong)}; letters of {VIEWS}')
  groups = recorded_groups.read(workdir, which)
  if number is not None and not 1 <= number <= len(groups):
    raise ValueError(f'--show_group={number}: give 1 to {len(groups)}')
  bounds = _newest_bounds(workdir, recorded_groups.last_step(workdir, which))

  @functools.cache
  def policy() -> Ratios:  # the weights are read when they are first needed
    return recorded_groups.ratios(config, workdir, which)

  def draw(at: int, on: set[str]) -> RenderableType:
    return page(groups, at, on, bounds, lambda group: policy()(group))

  console = console or Console()
  interactive = number is None and console.is_terminal
  if keys is None and interactive and sys.stdin.isatty():
    keys = pressed()
  if interactive and keys is not None:
    turn_pages(draw, len(groups), set(views), console, keys)
    return 0
  console.print(draw((number or 1) - 1, set(views)))
  if number is None:
    console.print(f'--show_group=1..{len(groups)} prints another group', style='dim')
  return 0


def _newest_bounds(workdir: str, last: float) -> dict[str, float]:
  """The newest row of metrics up to a step that has clip bounds; {} without one."""
  rows = [r for r in metrics.read(workdir) if 'clip/low' in r and r['step'] <= last]
  return rows[-1] if rows else {}


def turn_pages(
  draw: Callable[[int, set[str]], RenderableType],
  count: int,
  on: set[str],
  console: Console,
  keys: Iterable[str],
) -> None:
  """Draws a page per key, until q.

  Args:
    draw: from the index of a group, and the views that are on, to its page.
    count: groups.
    on: views that are on at first.
  """
  at, names = 0, ', '.join(f'{key}: {name}' for key, name in VIEWS.items())
  for key in itertools.chain([''], keys):
    if key == 'q':
      break
    at = min(max(at + STEPS.get(key, 0), 0), count - 1)
    on = on ^ ({key} & set(VIEWS))
    console.clear()
    console.print(draw(at, on))
    console.print(f'\nn: next, b: back, {names}, q: quit', style='dim')


def pressed() -> Iterator[str]:
  """Keys as they are pressed, without return; restores the terminal at the end."""
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
