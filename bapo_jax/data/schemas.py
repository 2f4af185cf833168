r"""In which fields published data sets hold a problem and its answer.

1. `detect` picks the schema by the fields of a file's first row;
2. `parse` reads a row by it: problem, answer, and the verifier that the row names.

A field's name may be spelled in any case, with or without underscores: `final_answer`,
`Final Answer`; two spellings of one name in a row are refused. A list of messages is a
problem where it is one user turn: its content, to which tokenizer.template is applied
later, once.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from bapo_jax.data import countdown
from bapo_jax.data.row import Row

# Characters: no tokenizer fits more into prompts.max_prompt_tokens; no answer of a
# published data set comes near.
LONGEST_PROBLEM, LONGEST_ANSWER = 1_000_000, 10_000
EXACT = 2**53  # above it a float stands for several integers


class Schema(NamedTuple):
  """Fields as the first row spells them; `a.b` is field b of the object in field a."""

  name: str
  problem: str
  answer: str
  source: str  # the field that names the data set a row is from; '' for none
  answer_format: str  # of the answer's field: plain, hashes, boxed, countdown

  @property
  def fields(self) -> list[str]:
    """The columns that a row is parsed from."""
    paths = (*self.problem.split(' and '), self.answer, self.source)
    return list(dict.fromkeys(path.split('.')[0] for path in paths if path))


# Name, and the spellings of the fields of problem, answer and source, the first that is
# there counts. Read from the top: a verl row may have an answer of its own as well.
SCHEMAS = (
  ('verl', ('prompt',), ('reward_model.ground_truth',), ('data_source',)),
  ('open-instruct', ('messages',), ('ground_truth',), ('dataset',)),
  ('slime', ('prompt',), ('label',), ()),
  (
    'problem and answer',
    ('problem', 'question'),
    ('final_answer', 'answer', 'expected_answer', 'ground_truth', 'solution'),
    ('data_source',),
  ),
)
# Names of fields that mean something here, in plain form.
MEANT = {'nums', 'numbers', 'target'} | {
  name.partition('.')[0].replace('_', '')
  for _, *spellings in SCHEMAS
  for names in spellings
  for name in names
}
# Pattern in the name of a data set -> the verifier of its answers.
VERIFIERS = (
  ('gsm8k', 'gsm8k'),
  ('countdown', 'countdown'),
  ('aime', 'aime'),
  ('math|numina|olympiad|amc', 'math'),
)


def detect(row: dict[str, Any]) -> Schema:
  """The schema of a file whose first row this is.

  Raises:
    ValueError: no schema has these fields.
  """
  spelled = _spellings(row)
  if 'target' in spelled and ('nums' in spelled or 'numbers' in spelled):
    numbers = spelled.get('nums') or spelled['numbers']
    both = f'{numbers} and {spelled["target"]}'
    return Schema('countdown', both, spelled['target'], '', 'countdown')
  for name, *spellings in SCHEMAS:
    problem, answer, source = (_first(spelled, row, each) for each in spellings)
    if problem and answer:
      return Schema(name, problem, answer, source, _answer_format(row, answer))
  raise ValueError(
    f'its fields {_names(row)} are of no schema known here; name them problem and '
    'answer (or as verl, open-instruct, slime or GSM8K do)'
  )


def _spellings(row: dict[str, Any]) -> dict[str, str]:
  """From the plain form of each field's name to the name as the row spells it."""
  spelled: dict[str, str] = {}
  for name in row:
    first = spelled.setdefault(_plain(name), name)
    if first != name and _plain(name) in MEANT:
      both = ' and '.join(map(repr, sorted((first, name))))
      raise ValueError(f'fields {both} are one name in two spellings; take one out')
  return spelled


def _plain(name: str) -> str:
  return re.sub(r'[\s_-]', '', str(name)).lower()


def _first(spelled: dict[str, str], row: dict[str, Any], names: Iterable[str]) -> str:
  """The first of these names that the row has, as the row spells it; '' for none."""
  for name in names:
    outer, _, inner = name.partition('.')
    found = spelled.get(_plain(outer), '')
    if found and (not inner or isinstance(row[found], dict)):
      return f'{found}.{inner}' if inner else found
  return ''


def _answer_format(row: dict[str, Any], answer: str) -> str:
  if _plain(answer) == 'solution':
    return 'boxed'
  found = row.get(answer)
  return 'hashes' if isinstance(found, str) and '####' in found else 'plain'


def parse(row: dict[str, Any], schema: Schema) -> Row:
  """Problem, answer and verifier of a row.

  Raises:
    ValueError: the row lacks a field, or something else stands in it; names both.
  """
  if schema.answer_format == 'countdown':
    numbers, target = (_get(row, name) for name in schema.problem.split(' and '))
    return countdown.row(numbers, target, 'sentence')
  problem = _problem(_get(row, schema.problem), schema.problem)
  found = _get(row, schema.answer)
  if schema.answer_format == 'hashes':
    answer = _after_hashes(found, schema.answer)
  elif schema.answer_format == 'boxed':
    answer = _in_box(found, schema.answer)
  else:
    answer = _answer(found, schema.answer)
  verifier = 'gsm8k' if schema.answer_format == 'hashes' else ''
  if schema.source:
    verifier = _verifier(_get(row, schema.source), schema.source) or verifier
  return Row(problem, answer, verifier)


def _get(row: Any, path: str) -> Any:
  """The value of a field, or of a field of the object in it."""
  for name in path.split('.'):
    if not isinstance(row, dict):
      raise ValueError(f'field {path!r}: {_shown(row)} is no object')
    if name not in row:
      raise ValueError(f'no field {name!r}, only {_names(row)}')
    row = row[name]
  return row


def _problem(found: Any, field: str) -> str:
  if isinstance(found, list):
    for turn in found:
      if not isinstance(turn, dict) or not {'role', 'content'} <= turn.keys():
        raise ValueError(f'field {field!r}: {_shown(turn)} is no message of a chat')
    roles = [turn['role'] for turn in found]
    # A system message would be lost, or written twice: the template is its place.
    if roles != ['user']:
      raise ValueError(
        f'field {field!r} holds messages by {_shown(roles)}, not one by the user; put '
        'a system message into tokenizer.template, and an exchange into one message'
      )
    found = found[0]['content']
  if not isinstance(found, str) or not found.strip():
    raise ValueError(f'field {field!r} holds {_shown(found)}, which is no problem')
  return _text(found, field, LONGEST_PROBLEM, '\0')


def _answer(found: Any, field: str) -> str:
  if isinstance(found, str) and found.lstrip().startswith('["'):  # Skywork-OR1
    found = _listed(found)
  if isinstance(found, list):
    if len(found) != 1:
      raise ValueError(f'field {field!r} holds {len(found)} answers, not one')
    found = found[0]
  if isinstance(found, dict) and found.keys() >= {'numbers', 'target'}:
    return countdown.row(found['numbers'], found['target'], 'sentence').answer
  if isinstance(found, float) and abs(found) > EXACT and math.isfinite(found):
    raise ValueError(
      f'field {field!r} holds the float {found}, which is not exact; write it as text'
    )
  if isinstance(found, float) and math.isfinite(found):
    found = int(found) if found.is_integer() else found  # 204.0 of a table is 204
  elif not isinstance(found, str | int) or isinstance(found, bool):
    raise ValueError(f'field {field!r} holds {_shown(found)}, which is no answer')
  # Before it is stripped: a form feed is white space.
  if not (answer := _text(str(found), field, LONGEST_ANSWER, CONTROLS).strip()):
    raise ValueError(f'field {field!r} is empty')
  return answer


def _listed(found: str) -> Any:
  """The JSON list in a text, else the text."""
  try:
    return json.loads(found)
  except (ValueError, RecursionError):
    return found


# In an answer they are no text: '\f' is the rest of a \frac whose backslash is lost.
CONTROLS = ''.join(map(chr, (*range(9), *range(11, 13), *range(14, 32), 127)))


def _text(found: str, field: str, longest: int, refused: str) -> str:
  """The text of a field, unless it is too long or no tokenizer or verifier reads it."""
  if len(found) > longest:
    raise ValueError(
      f'field {field!r} has {len(found):,} characters, more than {longest:,}; take the '
      'row out'
    )
  if bad := re.search(f'[{re.escape(refused)}]', found):
    raise ValueError(
      f'field {field!r} holds {_shown(found)}, with the control character {bad[0]!r}; '
      'take it out, or double a backslash that is lost'
    )
  if bad := re.search(r'[\ud800-\udfff]', found):
    raise ValueError(
      f'field {field!r} holds {_shown(found)}, with half of a surrogate pair, '
      f'{bad[0]!r}; write the whole character'
    )
  return found


def _after_hashes(found: Any, field: str) -> str:
  if not isinstance(found, str) or '####' not in found:
    raise ValueError(f'field {field!r}: {_shown(found)} has no #### before an answer')
  return _answer(found.rpartition('####')[2], field)


def _in_box(found: Any, field: str) -> str:
  opener = r'\boxed{'
  if not isinstance(found, str) or opener not in found:
    raise ValueError(
      rf'field {field!r}: {_shown(found)} has no \boxed{{}}, and there is no field '
      'answer'
    )
  start = found.rindex(opener) + len(opener)
  depth = 1
  for i in range(start, len(found)):
    # \{ and \} are signs of the answer, and need not come in pairs.
    if found[i] in '{}' and found[i - 1] != '\\':
      depth += 1 if found[i] == '{' else -1
    if not depth:
      return _answer(found[start:i], field)
  raise ValueError(rf'field {field!r}: its last \boxed{{ is never closed')


def _verifier(found: Any, field: str) -> str:
  """The verifier of answers from a data set of this name; '' for a name unknown."""
  names = found if isinstance(found, list) else [found]
  if not names or not all(isinstance(name, str) for name in names):
    raise ValueError(f'field {field!r} holds {_shown(found)}, which is no name')
  name = names[0].lower()
  if 'code' in name:
    raise ValueError(
      f'field {field!r} names {names[0]!r}: answers to code problems cannot be '
      'verified here; take these rows out'
    )
  return next((v for pattern, v in VERIFIERS if re.search(pattern, name)), '')


_REPR = reprlib.Repr()  # bounded in depth and length, whatever it is given
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _shown(found: Any) -> str:
  """A value in a sentence: short, and on one line."""
  shown = ' '.join(_REPR.repr(found).split())
  return shown if len(shown) <= 60 else shown[:57] + '...'


def _names(row: dict[str, Any]) -> str:
  """The names of a row's fields in a sentence, not more than ten."""
  names = sorted(map(str, row))
  more = f' and {len(names) - 10} more' if len(names) > 10 else ''
  return str([name[:40] for name in names[:10]]) + more
