r"""In which fields published data sets hold a problem and its answer.

1. `detect` picks the schema by the fields of a file's first row;
2. `parse` reads a row by it: problem, answer, and the verifier that the row names.

A field's name may be spelled in any case, with or without underscores: `final_answer`,
`Final Answer`; two spellings of one name in a row are refused.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bapo_jax.data import countdown, field_values
from bapo_jax.data.row import Row


class Schema(NamedTuple):
  """Fields as the first row spells them; `a.b` is field b of the object in field a."""

  name: str
  problem: str
  answer: str
  source: str  # the field that names the data set a row is from; '' for none
  answer_format: str  # of the answer's field: a key of READERS, or countdown

  @property
  def fields(self) -> list[str]:
    """The columns that a row is parsed from."""
    paths = (*self.problem.split(' and '), self.answer, self.source)
    return list(dict.fromkeys(path.split('.')[0] for path in paths if path))


READERS = {
  'plain': field_values.answer,
  'hashes': field_values.after_hashes,
  'boxed': field_values.in_box,
  'bare': field_values.bare,
}
ANSWERS = ('final_answer', 'answer', 'expected_answer', 'ground_truth', 'solution')
# Name, and the spellings of the fields of problem, answer and source, the first that is
# there counts. Read from the top: a verl row may have an answer of its own as well.
SCHEMAS = (
  ('verl', ('prompt',), ('reward_model.ground_truth',), ('data_source',)),
  ('open-instruct', ('messages',), ('ground_truth',), ('dataset',)),
  ('slime', ('prompt',), ('label',), ()),
  ('problem and answer', ('problem', 'question'), ANSWERS, ('data_source',)),
  ('TRL', ('prompt',), ANSWERS, ('data_source',)),
  ('messages', ('messages',), ANSWERS, ('data_source',)),
)
# Names of fields that mean something here, in plain form.
MEANT = {'nums', 'numbers', 'target'} | {
  name.partition('.')[0].replace('_', '')
  for _, *spellings in SCHEMAS
  for names in spellings
  for name in names
}
PICTURES = ('images', 'image')  # fields of pictures; the first with any counts
ALIKE = 0.7  # of difflib's ratio: less is chance
MOST_NAMES = 50  # that an unknown row is compared by; a file may have 100,000 columns


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
    # A conversation was made for a trainer, with its system message, from the problem.
    if name == 'problem and answer' and _is_conversation(row, spelled):
      continue
    if problem and answer:
      answer_format = _answer_format(name, answer, row.get(answer))
      return Schema(name, problem, answer, source, answer_format)
  if messages := spelled.get('messages', ''):
    found = row[messages]
    reference = field_values.asked(found, messages, referenced=True).reference
    if reference:
      answer_format = 'hashes' if _has_hashes(reference) else 'boxed'
      return Schema('messages', messages, messages, '', answer_format)
  raise ValueError(
    f'its row {field_values.shown_row(row)} is of no schema known here; the nearest '
    f'are {", ".join(_nearest(row))}: name its fields as one of them does'
  )


def _nearest(row: dict[str, Any]) -> list[str]:
  """The three schemas whose fields are spelled most like the row's; what it lacks."""
  own = [_plain(name[:40]) for name in list(map(str, row))[:MOST_NAMES]]

  def near(spelling: str) -> float:
    matcher = difflib.SequenceMatcher(b=_plain(spelling.partition('.')[0]))
    ratios = [0.0]
    for name in own:
      matcher.set_seq1(name)
      ratios.append(matcher.ratio())
    return max(ratios) if max(ratios) > ALIKE else 0.0

  def described(schema: tuple[Any, ...]) -> tuple[float, str]:
    name, problems, answers, _ = schema
    pairs = [max((near(s), -len(s), s) for s in each) for each in (problems, answers)]
    lacks = [field for ratio, _, field in pairs if ratio < 1]
    reason = f'lacks {" and ".join(lacks)}' if lacks else 'of another type'
    fields = ' with '.join(field for *_, field in pairs)
    return sum(ratio for ratio, *_ in pairs), f'{name} ({fields}; {reason})'

  # Where nothing is alike, those to begin with: the last ones of the table.
  found = map(described, (*SCHEMAS[3:], *SCHEMAS[:3]))
  return [text for _, text in sorted(found, key=lambda pair: -pair[0])[:3]]


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


def _is_conversation(row: dict[str, Any], spelled: dict[str, str]) -> bool:
  return 'prompt' in spelled and isinstance(row[spelled['prompt']], list)


def _answer_format(schema: str, answer: str, found: Any) -> str:
  """How the answer stands in its field, judged by the value in the first row."""
  boxed = isinstance(found, str) and field_values.OPENER in found
  if _has_hashes(found) and not boxed:
    return 'hashes'
  if _plain(answer) != 'solution':
    return 'hashes' if _has_hashes(found) else 'plain'
  # Beside a problem a solution is the work; beside a prompt of TRL's, what its reward
  # functions compare with, which may be the bare answer.
  return 'boxed' if boxed or schema == 'problem and answer' else 'bare'


def _has_hashes(found: Any) -> bool:
  return isinstance(found, str) and '####' in found


def picture_fields(row: dict[str, Any]) -> list[str]:
  """The fields of pictures, as the row spells them, the first in order first."""
  return [field for name in PICTURES for field in row if _plain(field) == name]


def pictured_field(row: dict[str, Any]) -> str:
  """The field that holds the row's pictures; '' where none does."""
  for field in picture_fields(row):
    value = row[field]
    empty = isinstance(value, (str, list, dict)) and not value
    if value is not None and not empty:
      return field
  return ''


def parse(row: dict[str, Any], schema: Schema) -> Row:
  """Problem, answer, verifier and system message of a row.

  Raises:
    ValueError: the row lacks a field, or something else stands in it; names both.
  """
  if schema.answer_format == 'countdown':
    numbers, target = (_get(row, name) for name in schema.problem.split(' and '))
    return countdown.row(numbers, target, 'sentence')
  asked = field_values.asked(
    _get(row, schema.problem),
    schema.problem,
    referenced=schema.name in ('open-instruct', 'messages'),
  )
  inside = schema.answer == schema.problem
  found = asked.reference if inside else _get(row, schema.answer)
  answer = READERS[schema.answer_format](found, schema.answer)
  verifier = 'gsm8k' if schema.answer_format == 'hashes' else ''
  if schema.source:
    name = _get(row, schema.source)
    verifier = field_values.verifier(name, schema.source) or verifier
  return Row(asked.problem, answer, verifier, asked.system)


def _get(row: Any, path: str) -> Any:
  """The value of a field, or of a field of the object in it."""
  for name in path.split('.'):
    if not isinstance(row, dict):
      raise ValueError(f'field {path!r}: {field_values.shown(row)} is no object')
    if name not in row:
      raise ValueError(f'no field {name!r}, only {field_values.names(row)}')
    row = row[name]
  return row
