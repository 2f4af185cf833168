r"""Reads rows of named fields, whatever layout the data set has.

1. `read_rows` reads all rows of a source by the layout of its first row;
2. `detect` returns the layout of a row, and `parse` reads a row by it. Columns that the
   user names come before any layout; a doubtful layout is refused.

Field names match regardless of case, spaces, underscores and hyphens: `final_answer`
and `Final Answer` are the same field. A problem is a string or a list of chat messages,
the last by the user, after at most one system message and earlier turns. The content
of a message is a string or a list of parts, {"type": "text", "text": ...}.
"""

import contextlib
import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bapo_jax.data import pictures
from bapo_jax.data.knobs import Columns
from bapo_jax.data.row import Row
from bapo_jax.knobs import shorten, shown

Fields = dict[str, Any]  # of a row


class Layout(NamedTuple):
  """Field names as spelled in the first row; `a.b` is field b of the object a."""

  name: str
  problem: str
  answer: str
  source: str  # field with the name of the row's data set; '': none
  answer_format: str  # plain, hashes, boxed, bare, countdown or none


PROBLEMS = ('problem', 'question', 'prompt', 'messages')
ANSWERS = ('final_answer', 'answer', 'expected_answer', 'ground_truth', 'solution')
# Name, then the field names of problem, answer and data set. Earlier names and earlier
# layouts take precedence: a verl row may also have a field `answer`.
LAYOUTS = (
  ('verl', ('prompt',), ('reward_model.ground_truth',), ('data_source',)),
  ('open-instruct', ('messages',), ('ground_truth',), ('dataset',)),
  ('slime', ('prompt',), ('label',), ()),
  ('problem and answer', ('problem', 'question'), ANSWERS, ('data_source',)),
  ('TRL', ('prompt',), ANSWERS, ('data_source',)),
  ('messages', ('messages',), ANSWERS, ('data_source',)),
)
NUMBERS = ('nums', 'numbers')
TARGET = 'target'  # of a countdown problem
PICTURES = ('images', 'image')  # the first non-empty field is used
SOLUTIONS = 'solutions'
COUNTDOWN = (
  'Combine the numbers {} with +, -, * and / into an expression that equals {}. Each '
  'number is used exactly once; parentheses are allowed. Give the expression in '
  r'\boxed{{}}.'
)
# What a column that the user names takes the place of.
MEANINGS = {
  'problem': (*PROBLEMS, *NUMBERS),
  'answer': (*ANSWERS, 'reward_model', 'label', TARGET),
}
# Patterns in the name of a data set, and the verifier of its answers.
VERIFIERS = (
  ('gsm8k', 'gsm8k'),
  ('countdown', 'countdown'),
  ('aime', 'aime'),
  ('math|numina|olympiad|amc', 'math'),
)
ANSWER = re.compile('ans|target|gold|truth|label|solution|result', re.I)  # a guess
LONGEST_BARE = 100  # characters of a solution that is only an answer
EXACT = 2**53  # from here on, a float may stand for several integers
OPENER = r'\boxed{'


def _plain(name):
  return re.sub(r'[\s_-]', '', str(name)).lower()


KNOWN = {_plain(name) for name in (*NUMBERS, TARGET, *PICTURES, SOLUTIONS)} | {
  _plain(name.partition('.')[0])
  for _, *columns in LAYOUTS
  for names in columns
  for name in names
}


def known(name: str, columns: Columns = Columns()) -> bool:
  """Returns whether a field has a meaning in any layout, or is named by `columns`."""
  paths = [x for _, path in columns for x in (path, path.partition('.')[0])]
  return _plain(name) in {*KNOWN, *map(_plain, paths)}


def detect(row: Fields, columns: Columns = Columns(), *, whole: bool = False) -> Layout:
  """Returns the layout of a file with this first row; `whole`: answers are optional.

  Raises:
    ValueError: the row lacks a column of `columns`, no layout has these fields, or two
      of them may be the problem or the answer.
  """
  spelled = {_plain(name): name for name in reversed(row)}
  find = functools.partial(_find, row, spelled)
  named = {
    knob: name if name in row else find([name]) for knob, name in columns if name
  }
  for knob, path in named.items():
    if not path:
      raise ValueError(
        f'problems.columns.{knob}={shown(getattr(columns, knob))} is no column; give '
        f'one of {sorted(map(str, row))!s:.400}'
      )
    # The column takes the place of all fields with its meaning.
    for name in MEANINGS.get(knob, ()):
      spelled.pop(_plain(name), '')
    spelled[knob] = path
  numbers = find(NUMBERS)
  if numbers and TARGET in spelled:
    return Layout('countdown', numbers, spelled[TARGET], '', 'countdown')
  # A chat in `prompt` derives from the problem and may add a system message.
  derived = isinstance(row.get(spelled.get('prompt', '')), list)
  unanswered = []
  for name, problems, answers, sources in LAYOUTS:
    problem = find(problems)
    answer = find(answers)
    source = named.get('verifier') or find(sources)
    if problem and answer and not (derived and name == 'problem and answer'):
      for names in (problems, answers):
        _refuse_rivals(row, find, names, problem, answer)
      answer_format = _format(name, answer, row, named='answer' in named)
      return Layout(name, problem, answer, source, answer_format)
    if problem:
      unanswered.append(Layout(name, problem, '', source, 'none'))
  if messages := spelled.get('messages', ''):
    *_, solution = _read(row, messages, _chat, True)
    if solution:
      answer_format = 'hashes' if '####' in str(solution) else 'boxed'
      return Layout('messages', messages, messages, '', answer_format)
  if whole and unanswered:
    return unanswered[0]
  raise ValueError(
    f'fields {sorted(map(str, row))!s:.400} match no layout; '
    f'{_question(row, find(PROBLEMS))}'
  )


def _refuse_rivals(row, find, names: Sequence[str], problem, answer):
  """Raises a ValueError if two columns of one meaning have different values."""
  # A worked solution beside an answer is no rival.
  paths = [find([name]) for name in names if name != 'solution']
  values = {path: row.get(path) for path in paths if path}
  values = {path: x for path, x in values.items() if x not in (None, '')}
  if len({str(x) for x in values.values()}) > 1:
    raise ValueError(
      f'{" and ".join(map(repr, values))} differ, and each may be the '
      f'{"problem" if problem in values else "answer"}; '
      f'{_question(row, problem, answer)}'
    )


def _question(row, problem='', answer=''):
  """Returns the knobs that say what two columns are, with names of the row."""
  sizes = {str(name): len(str(value)) for name, value in row.items()}
  problem = problem or max(sizes, key=lambda name: sizes[name])
  others = [name for name in sizes if name != problem] or [problem]
  answer = answer or max(others, key=lambda name: bool(ANSWER.search(name)))
  problem, answer = (shlex.quote(shorten(name)) for name in (problem, answer))
  return (
    f'say which column is which, such as --config.problems.columns.problem={problem} '
    f'--config.problems.columns.answer={answer} (docs/guide/data_and_rewards.md lists '
    'all layouts)'
  )


def _format(name, answer, row, *, named):
  """Returns the format of the answers; the first row decides."""
  value = row.get(answer)
  text = value if isinstance(value, str) else ''
  if '####' in text and not (_plain(answer) == 'solution' and OPENER in text):
    return 'hashes'
  if _plain(answer) != 'solution':
    return 'boxed' if named and OPENER in text else 'plain'
  # Next to a problem, a solution is worked out. Next to a prompt, as in TRL, it is the
  # reference for reward functions and may be the bare answer.
  return 'boxed' if OPENER in text or name == 'problem and answer' else 'bare'


def parse(row: Fields, layout: Layout, *, whole: bool = False) -> Row:
  """Returns the problem, answer, verifier and system message of a row, no pictures.

  `whole` keeps all other fields too.

  Raises:
    ValueError: a field is missing or wrong; the message names the field and its value.
  """
  fields = ''
  if whole:
    values = {
      name: x
      for name, x in row.items()
      if _plain(name) not in PICTURES and not callable(x)
    }
    fields = json.dumps(values, sort_keys=True, default=str)
  if layout.answer_format == 'countdown':
    numbers = _get(row, layout.problem)
    target = _get(row, layout.answer)
    answer = _countdown(numbers, target)
    problem = COUNTDOWN.format(', '.join(map(str, numbers)), target)
    return Row(problem, answer, 'countdown', fields=fields)
  solved = layout.name in ('open-instruct', 'messages')
  problem, system, history, solution = _read(row, layout.problem, _chat, solved)
  answer = verifier = ''
  if layout.answer == layout.problem:
    row = {layout.answer: solution}
  if layout.answer:
    answer, verifier = _read(row, layout.answer, _extract, layout.answer_format)
  if layout.source:
    verifier = _read(row, layout.source, _verifier) or verifier
  return Row(problem, answer, verifier, system, fields=fields, history=history)


def read_rows(
  items: Iterable[tuple[str, Any]],
  columns: Columns = Columns(),
  *,
  whole: bool = False,
  folder: str = '',
) -> list[Row]:
  """Parses the rows of (location, fields) pairs; the first pair decides the layout.

  Paths of pictures are relative to `folder`.

  Raises:
    ValueError: a row cannot be read; the message names its location.
  """
  layout = None
  # Some mirrors repeat 17k problems a hundred times, so equal rows share memory.
  unique: dict[Row, Row] = {}
  rows = []
  for place, fields in items:
    try:
      if not isinstance(fields, dict):
        raise ValueError(f'{shown(fields)} has no named fields; give a JSON object')
      layout = layout or detect(fields, columns, whole=whole)
      row = parse(fields, layout, whole=whole)
      solutions = fields.get(SOLUTIONS) or ()
      row = row._replace(
        pictures=_pictures(fields, columns.pictures, folder),
        solutions=_as_tuple(solutions),
        rank=fields.get('rank', 0) if callable(solutions) else 0,
      )
    except ValueError as error:
      raise ValueError(f'{place}: {error}') from error
    rows.append(unique.setdefault(row, row))
  return rows


def _as_tuple(value: Any) -> Any:
  """Turns lists into tuples, so that rows can be compared."""
  return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _countdown(numbers, target):
  """Returns the answer of a countdown problem, JSON for the verifier.

  Raises:
    ValueError: `numbers` are not two or more integers, or `target` is not an integer.
  """
  listed = isinstance(numbers, list | tuple) and len(numbers) > 1
  if not listed or any(type(n) is not int for n in (*numbers, target)):
    raise ValueError(
      f'numbers={str(numbers)[:40]} with target={str(target)[:40]} is not a countdown '
      'problem; give two or more integers and an integer target'
    )
  return json.dumps({'numbers': list(numbers), 'target': target})


def _pictures(row: Fields, column, folder):
  """Returns the picture files of a row, in order; `column` is their field, or ''."""
  for name in [column] if column else PICTURES:
    for field, values in row.items():
      if _plain(field) != _plain(name) or values is None or values in ('', [], {}):
        continue
      files = []
      for i, value in enumerate(values if isinstance(values, list) else [values], 1):
        try:
          files.append(pictures.checked(_picture(value, folder)).data)
        except ValueError as error:
          raise ValueError(f'field {field!r}, picture {i}: {error}') from error
      return tuple(files)
  return ()


def _picture(value, folder):
  """Returns an image file that is given as bytes, a path or a dict of `datasets`."""
  if isinstance(value, dict):
    value = value.get('path') if value.get('bytes') is None else value['bytes']
  if isinstance(value, bytes):
    return value
  if not isinstance(value, str):
    raise ValueError(f'{shown(value)} is not a picture; give bytes or a path')
  path = os.path.join(folder, value)
  try:
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    raise ValueError(f'{path[:200]!r}: {error.strerror}; correct the path') from error


def _find(row: Fields, spelled: dict[str, str], names: Iterable[str]):
  """Returns the first of `names` that is in the row, in the row's spelling, else ''."""
  for name in names:
    outer, _, inner = name.partition('.')
    field = spelled.get(_plain(outer), '')
    if field and (not inner or isinstance(row[field], dict)):
      return f'{field}.{inner}' if inner else field
  return ''


def _get(row, path):
  for name in [path] if path in row else path.split('.'):
    if not isinstance(row, dict):
      raise ValueError(f'field {path!r}: {shown(row)} has no field {name!r}; add it')
    if name not in row:
      raise ValueError(f'no field {name!r}, only {shown(sorted(row))}; correct the row')
    row = row[name]
  return row


def _read(row: Fields, path, read: Callable[..., Any], *options):
  """Reads the value of a field; an error names the field."""
  value = _get(row, path)
  try:
    return read(value, *options)
  except ValueError as error:
    raise ValueError(f'field {path!r}: {error}') from error


def _chat(value, solved):
  """Returns (problem, system message, history, solution) of a text or chat messages.

  The solution is the assistant's last message, allowed if `solved`, or else ''.
  """
  if not isinstance(value, list):
    return _statement(value, 'problem'), '', (), ''
  roles = []
  texts = []
  for turn in value:
    if not isinstance(turn, dict) or not {'role', 'content'} <= turn.keys():
      raise ValueError(f'{shown(turn)} is not a chat message; give role and content')
    roles.append(turn['role'])
    texts.append(_content(turn['content']))
  solution = texts.pop() if solved and roles[-1:] == ['assistant'] else ''
  begins = int(roles[:1] == ['system'])
  *history, last = roles[begins : len(texts)] or ['']
  if last == 'assistant':
    raise ValueError(
      f'messages with the roles {shown(roles)}; remove the last message, because the '
      "policy writes the assistant's turn: a prompt ends with a user message"
    )
  if last != 'user' or any(x not in ('user', 'assistant', 'tool') for x in history):
    raise ValueError(
      f'messages with the roles {shown(roles)}; end them with a user message, after at '
      'most one system message and then turns of user, assistant and tool'
    )
  if any(turn.get('tool_calls') for turn in value[: len(texts)]):
    raise ValueError('a message has `tool_calls`; write the calls into its content')
  # Rejects an empty system message, which chat templates treat unlike a missing one.
  system = _statement(texts[0], 'system message') if begins else ''
  said = [_statement(text, 'message') for text in texts[begins:-1]]
  turns = tuple(zip(history, said, strict=True))
  return _statement(texts[-1], 'problem'), system, turns, solution


def _content(value):
  """Joins the text of content parts; returns other content unchanged.

  A part {"type": "image"} becomes <image>: its picture is in the row's `images`.
  """
  if not isinstance(value, list):
    return value
  texts = []
  for part in value:
    # A table fills the fields that a part lacks with None.
    fields = part.items() if isinstance(part, dict) else ()
    match {name: x for name, x in fields if x is not None}:
      case {'type': 'text', 'text': str(text)}:
        texts.append(text)
      case {'type': 'image', **others} if not others:
        texts.append(pictures.PLACEHOLDER)
      case _:
        raise ValueError(
          f'{shown(part)} is not a text part; give {{"type": "text", "text": ...}}, or '
          'for a picture {"type": "image"} and its path in `images`'
        )
  return ''.join(texts)


def _statement(value, what):
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'{shown(value)} is not a {what}; give text')
  return _readable(value, r'\0')


def _readable(text, refused):
  if bad := re.search(rf'[{refused}\ud800-\udfff]', text):
    raise ValueError(
      f'{shown(text)} contains {bad[0]!r}; remove this character, or write '
      r'\\ for each backslash in JSON'
    )
  return text


def _answer(value):
  """Extracts the answer from a string, number, one-item list or countdown problem."""
  if isinstance(value, str) and value.lstrip().startswith('["'):  # Skywork-OR1
    with contextlib.suppress(ValueError):  # a string that only looks like a list
      value = json.loads(value)
  if isinstance(value, list):
    if len(value) != 1:
      raise ValueError(f'{len(value)} answers; give one answer')
    value = value[0]
  if isinstance(value, dict) and value.keys() >= {'numbers', 'target'}:
    return _countdown(value['numbers'], value['target'])
  if isinstance(value, float) and abs(value) < EXACT:  # false if it is not a number
    value = int(value) if value.is_integer() else str(value)  # 204.0 means 204
  if isinstance(value, bool) or not isinstance(value, str | int):
    raise ValueError(
      f'{shown(value)} is not an answer; give a string, an exact number or a list of '
      'one answer'
    )
  # Checks before stripping spaces: a form feed is a \frac that lost its backslash.
  text = _readable(str(value), r'\0-\x08\x0b\x0c\x0e-\x1f\x7f').strip()
  if not text:
    raise ValueError(f'{shown(value)} is not a bare answer but empty; give the answer')
  if '####' in text:
    raise ValueError(f'{shown(value)} is not a bare answer; give the text after ####')
  return text


def _extract(value, answer_format):
  """Returns (answer, verifier or '') from the value of a field."""
  text = value if isinstance(value, str) else ''
  # A worked solution below bare answers: without this, all of it would be the answer.
  if answer_format == 'hashes' or (answer_format == 'plain' and '####' in text):
    _, hashes, answer = text.rpartition('####')
    if not hashes:
      raise ValueError(f'{shown(value)} has no ####; add #### ANSWER')
    return _answer(answer), 'gsm8k'
  if answer_format == 'boxed' or (answer_format == 'bare' and OPENER in text):
    value = _in_box(value)
  elif answer_format == 'bare':
    bare = text.strip()
    if len(bare) > LONGEST_BARE or '\n' in bare:
      raise ValueError(
        rf'{shown(value)} is not a bare answer and has no \boxed{{}}; add an `answer` '
        'field'
      )
    if dollars := re.fullmatch(r'\$([^$]+)\$', bare):
      value = dollars[1]
  return _answer(value), ''


def _in_box(value):
  _, opener, text = str(value).rpartition(OPENER)
  depth = 1
  # \{ and \} are part of the answer and need not be balanced.
  for brace in re.finditer(r'(?<!\\)[{}]', text if opener else ''):
    depth += 1 if brace[0] == '{' else -1
    if not depth:
      return text[: brace.start()]
  raise ValueError(rf'{shown(value)} has no \boxed{{}} that is closed; add it')


def _verifier(value):
  """Returns the verifier for a data set of this name; '' if it is unknown."""
  name = value[0] if isinstance(value, list) and value else value
  if not isinstance(name, str):
    raise ValueError(f'{shown(value)} is not a data set name; give a string')
  name = name.lower()
  if 'code' in name:
    raise ValueError(
      f'no verifier for the code problems of {name!r}; remove these rows'
    )
  return next((v for pattern, v in VERIFIERS if re.search(pattern, name)), '')
