r"""Detects the layout of a data set: which fields hold the problem and the answer.

The first row of a file decides the layout by which all its rows are read. Field names
match regardless of case, spaces, underscores and hyphens: `final_answer` and
`Final Answer` are the same field. A problem is a string or a list of chat messages: one
user message, preceded by at most one system message. The content of a message is a
string or a list of parts, {"type": "text", "text": ...}.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bapo_jax.data.made import countdown
from bapo_jax.data.pictures import PLACEHOLDER
from bapo_jax.data.row import Row
from bapo_jax.knobs import shown


class Layout(NamedTuple):
  """Field names as spelled in the first row; `a.b` is field b of the object a."""

  name: str
  problem: str
  answer: str
  source: str  # field with the name of the row's data set; '': none
  answer_format: str  # a key of READERS, or countdown

  @property
  def columns(self) -> list[str]:
    """Returns the top-level fields that `parse` reads."""
    fields = (self.problem, self.answer, self.source)
    return list(dict.fromkeys(field.split('.')[0] for field in fields if field))


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
NUMBERS, TARGET = ('nums', 'numbers'), 'target'  # of a countdown problem
PICTURES = ('images', 'image')  # the first non-empty field is used
# Patterns in the name of a data set, and the verifier of its answers.
VERIFIERS = (
  ('gsm8k', 'gsm8k'),
  ('countdown', 'countdown'),
  ('aime', 'aime'),
  ('math|numina|olympiad|amc', 'math'),
)
LONGEST_BARE = 100  # characters of a solution that is only an answer
EXACT = 2**53  # a larger float may stand for several integers
OPENER = r'\boxed{'


def _plain(name: str) -> str:
  return re.sub(r'[\s_-]', '', str(name)).lower()


KNOWN = {_plain(name) for name in (*NUMBERS, TARGET, *PICTURES)} | {
  _plain(name.partition('.')[0])
  for _, *columns in LAYOUTS
  for names in columns
  for name in names
}


def known(name: str) -> bool:
  """Returns whether a field of this name has a meaning in any layout."""
  return _plain(name) in KNOWN


def is_picture(name: str) -> bool:
  """Returns whether a field of this name has pictures."""
  return _plain(name) in PICTURES


def detect(row: dict[str, Any], *, whole: bool = False) -> Layout:
  """Returns the layout of a file with this first row; `whole`: answers are optional.

  Raises:
    ValueError: no layout has these fields.
  """
  spelled = _spellings(row)
  numbers = next((spelled[name] for name in NUMBERS if name in spelled), '')
  if numbers and TARGET in spelled:
    return Layout('countdown', numbers, spelled[TARGET], '', 'countdown')
  for name, *columns in LAYOUTS:
    problem, answer, source = (_find(row, spelled, names) for names in columns)
    # A chat in `prompt` derives from the problem and may add a system message.
    derived = isinstance(row.get(spelled.get('prompt', '')), list)
    if problem and answer and not (derived and name == 'problem and answer'):
      answer_format = _answer_format(name, answer, row.get(answer))
      return Layout(name, problem, answer, source, answer_format)
  if messages := spelled.get('messages', ''):
    *_, solution = _chat(row[messages], messages, solved=True)
    if solution:
      answer_format = 'hashes' if '####' in solution else 'boxed'
      return Layout('messages', messages, messages, '', answer_format)
  for name, problems, _, sources in LAYOUTS if whole else ():
    if problem := _find(row, spelled, problems):
      return Layout(name, problem, '', _find(row, spelled, sources), 'none')
  raise ValueError(
    f"fields {_names(row)} match no layout; rename them, for example to 'problem' and "
    "'answer' (docs/guide/data_and_rewards.md lists all layouts)"
  )


def parse(row: dict[str, Any], layout: Layout, *, whole: bool = False) -> Row:
  """Returns the problem, answer, verifier and system message of a row, no pictures.

  `whole` keeps all other fields too.

  Raises:
    ValueError: a field is missing or wrong; the message names the field and its value.
  """
  fields = ''
  if whole:
    values = {name: x for name, x in row.items() if not is_picture(name)}
    fields = json.dumps(values, sort_keys=True, default=str)
  if layout.answer_format == 'countdown':
    numbers, target = (_get(row, field) for field in (layout.problem, layout.answer))
    return countdown.row(numbers, target, 'sentence')._replace(fields=fields)
  field, solved = layout.problem, layout.name in ('open-instruct', 'messages')
  problem, system, solution = _chat(_get(row, field), field, solved=solved)
  value = solution if layout.answer == field else _get(row, layout.answer or field)
  reader = layout.answer_format
  # A worked solution below bare answers: without this, all of it would be the answer.
  if reader == 'plain' and isinstance(value, str) and '####' in value:
    reader = 'hashes'
  answer = READERS[reader](value, layout.answer)
  verifier = 'gsm8k' if reader == 'hashes' else ''
  if layout.source:
    verifier = _verifier(_get(row, layout.source), layout.source) or verifier
  return Row(problem, answer, verifier, system, fields=fields)


def pictures(row: dict[str, Any]) -> tuple[str, list[Any]]:
  """Returns (field with pictures, list of its pictures); ('', []) if there is none."""
  for name in PICTURES:
    for field, value in row.items():
      empty = isinstance(value, (str, list, dict)) and not value
      if _plain(field) == name and value is not None and not empty:
        return field, value if isinstance(value, list) else [value]
  return '', []


def _names(row: dict[str, Any]) -> str:
  names = sorted(map(str, row))
  more = f' and {len(names) - 10} more' if len(names) > 10 else ''
  return str([name[:40] for name in names[:10]]) + more


def _spellings(row: dict[str, Any]) -> dict[str, str]:
  """Maps field names, in lower case without spaces, _ and -, to their spelling."""
  spelled: dict[str, str] = {}
  for name in row:
    other = spelled.setdefault(_plain(name), name)
    if other != name and known(name):
      both = ' and '.join(map(repr, sorted((other, name))))
      raise ValueError(f'fields {both} have the same meaning; remove one of them')
  return spelled


def _find(row: dict[str, Any], spelled: dict[str, str], names: Iterable[str]) -> str:
  """Returns the first of `names` that is in the row, in the row's spelling, else ''."""
  for name in names:
    outer, _, inner = name.partition('.')
    field = spelled.get(_plain(outer), '')
    if field and (not inner or isinstance(row[field], dict)):
      return f'{field}.{inner}' if inner else field
  return ''


def _answer_format(layout: str, field: str, value: Any) -> str:
  text = value if isinstance(value, str) else ''
  boxed, hashes = OPENER in text, '####' in text
  if _plain(field) != 'solution':
    return 'hashes' if hashes else 'plain'
  if hashes and not boxed:
    return 'hashes'
  # Next to a problem, a solution is worked out. Next to a prompt, as in TRL, a solution
  # is the reference for reward functions and may be the bare answer.
  return 'boxed' if boxed or layout == 'problem and answer' else 'bare'


def _get(row: Any, path: str) -> Any:
  for name in path.split('.'):
    if not isinstance(row, dict):
      raise ValueError(f'field {path!r}: {shown(row)} has no field {name!r}; add it')
    if name not in row:
      raise ValueError(f'no field {name!r}, only {_names(row)}; correct the row')
    row = row[name]
  return row


def _chat(value: Any, field: str, *, solved: bool) -> tuple[str, str, str]:
  """Returns (problem, system message, solution) from a string or chat messages.

  The solution is the assistant's last message, allowed if `solved`, or else ''.
  """
  if not isinstance(value, list):
    return _statement(value, field, 'problem'), '', ''
  for turn in value:
    if not isinstance(turn, dict) or not {'role', 'content'} <= turn.keys():
      raise ValueError(
        f'field {field!r}: {shown(turn)} is not a chat message; give role and content'
      )
  roles = [turn['role'] for turn in value]
  texts = [_content(turn['content'], field) for turn in value]
  solution = texts.pop() if solved and roles[-1:] == ['assistant'] else ''
  if roles[: len(texts)] not in (['user'], ['system', 'user']):
    raise ValueError(
      f'field {field!r} has messages with the roles {shown(roles)}; give one user '
      'message, preceded by at most one system message'
    )
  if not isinstance(solution, str):
    raise ValueError(
      f'field {field!r}: {shown(solution)} is not a solution; give a string with '
      r'"#### ANSWER" or \boxed{ANSWER}, or remove the row'
    )
  # Rejects an empty system message, which chat templates treat unlike a missing one.
  system = '' if len(texts) < 2 else _statement(texts[0], field, 'system message')
  return _statement(texts[-1], field, 'problem'), system, solution


def _content(value: Any, field: str) -> Any:
  """Joins the text of content parts; returns other content unchanged.

  A part {"type": "image"} becomes <image>: its picture is in the row's `images`.
  """
  if not isinstance(value, list):
    return value
  texts = []
  for part in value:
    # A table fills the fields that a part lacks with None.
    given = part if isinstance(part, dict) else {}
    given = {k: v for k, v in given.items() if v is not None}
    match given:
      case {'type': 'text', 'text': str(text)}:
        texts.append(text)
      case {'type': 'image'} if len(given) == 1:
        texts.append(PLACEHOLDER)
      case _:
        raise ValueError(
          f'field {field!r}: {shown(part)} is not a text part; give {{"type": "text", '
          '"text": ...}, or for a picture {"type": "image"} and its path in `images`'
        )
  return ''.join(texts)


def _statement(value: Any, field: str, what: str) -> str:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'field {field!r}: {shown(value)} is not a {what}; give text')
  return _readable(value, field, r'\0')


def _readable(text: str, field: str, refused: str) -> str:
  if bad := re.search(rf'[{refused}\ud800-\udfff]', text):
    raise ValueError(
      f'field {field!r}: {shown(text)} contains {bad[0]!r}; remove this character, '
      r'or write \\ for each backslash in JSON'
    )
  return text


def _answer(value: Any, field: str) -> str:
  """Extracts the answer from a string, number, one-item list or countdown problem."""
  if isinstance(value, str) and value.lstrip().startswith('["'):  # Skywork-OR1
    with contextlib.suppress(ValueError):  # a string that only looks like a list
      value = json.loads(value)
  if isinstance(value, list):
    if len(value) != 1:
      raise ValueError(f'field {field!r} has {len(value)} answers; give one answer')
    value = value[0]
  if isinstance(value, dict) and value.keys() >= {'numbers', 'target'}:
    return countdown.row(value['numbers'], value['target'], 'sentence').answer
  if isinstance(value, float) and math.isfinite(value):
    if abs(value) > EXACT:
      raise ValueError(f'field {field!r}: the float {value} is inexact; give a string')
    value = int(value) if value.is_integer() else value  # 204.0 in a table means 204
  elif not isinstance(value, str | int) or isinstance(value, bool):
    raise ValueError(
      f'field {field!r}: {shown(value)} is not an answer; give a string, a finite '
      'number or a list of one answer'
    )
  # Checks before stripping spaces: a form feed is a \frac that lost its backslash.
  text = _readable(str(value), field, r'\0-\x08\x0b\x0c\x0e-\x1f\x7f').strip()
  if not text:
    raise ValueError(f'field {field!r} is empty; give an answer')
  if '####' in text:
    raise ValueError(
      f'field {field!r}: {shown(value)} is not a bare answer; give only the text '
      'after ####'
    )
  return text


def _after_hashes(value: Any, field: str) -> str:  # as in GSM8K
  if not isinstance(value, str) or '####' not in value:
    raise ValueError(f'field {field!r}: {shown(value)} has no ####; add #### ANSWER')
  return _answer(value.rpartition('####')[2], field)


def _in_box(value: Any, field: str) -> str:
  if not isinstance(value, str) or OPENER not in value:
    raise ValueError(
      rf'field {field!r}: {shown(value)} has no \boxed{{}}; add an `answer` field'
    )
  start = value.rindex(OPENER) + len(OPENER)
  depth = 1
  for i in range(start, len(value)):
    # \{ and \} are part of the answer and need not be balanced.
    if value[i] in '{}' and value[i - 1] != '\\':
      depth += 1 if value[i] == '{' else -1
    if not depth:
      return _answer(value[start:i], field)
  raise ValueError(rf'field {field!r}: its last \boxed{{ is not closed; add a }}')


def _bare(value: Any, field: str) -> str:
  """Returns the boxed answer, or without a box the whole text, without $ around it."""
  if isinstance(value, str) and OPENER in value:
    return _in_box(value, field)
  text = _answer(value, field)
  if not isinstance(value, str):
    return text
  if len(text) > LONGEST_BARE or '\n' in text:
    raise ValueError(
      rf'field {field!r}: {shown(value)} is not a bare answer and has no \boxed{{}}; '
      'add an `answer` field'
    )
  within = re.fullmatch(r'\$([^$]+)\$', text)
  return _answer(within[1], field) if within else text


def _none(value: Any, field: str) -> str:
  return ''


READERS = {
  'plain': _answer,
  'hashes': _after_hashes,
  'boxed': _in_box,
  'bare': _bare,
  'none': _none,
}


def _verifier(value: Any, field: str) -> str:
  """Returns the verifier for the data set that a field names; '' if it is unknown."""
  names = value if isinstance(value, list) else [value]
  if not names or not all(isinstance(name, str) for name in names):
    raise ValueError(f'field {field!r}: {shown(value)} is no data set name; use text')
  name = names[0].lower()
  if 'code' in name:
    raise ValueError(
      f'field {field!r}: no verifier for the code problems of {names[0]!r}; remove '
      'these rows'
    )
  return next((v for pattern, v in VERIFIERS if re.search(pattern, name)), '')
