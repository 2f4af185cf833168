r"""The values of a row's fields: a problem, its answer, the name of a verifier.

A problem is a text, or the messages of a chat: one by the user, which
tokenizer.template is applied to later, once, and before it at most one by the system,
which the chat template renders.
"""

import json
import math
import re
import reprlib
from typing import Any, NamedTuple

from bapo_jax.data import countdown

# Characters: no tokenizer fits more into prompts.max_prompt_tokens; no answer of a
# published data set comes near.
LONGEST_PROBLEM, LONGEST_ANSWER = 1_000_000, 10_000
# Pattern in the name of a data set -> the verifier of its answers.
VERIFIERS = (
  ('gsm8k', 'gsm8k'),
  ('countdown', 'countdown'),
  ('aime', 'aime'),
  ('math|numina|olympiad|amc', 'math'),
)
LONGEST_BARE = 100  # characters of a solution that is nothing but an answer
OPENER = r'\boxed{'
EXACT = 2**53  # above it a float stands for several integers


class Asked(NamedTuple):
  """What the field of a problem holds."""

  problem: str
  system: str = ''  # the system message before it
  reference: str = ''  # the assistant's message after it


def asked(found: Any, field: str, *, referenced: bool = False) -> Asked:
  """The problem in a field, as a text or as the messages of a chat.

  Args:
    referenced: the last message may be the assistant's, as where a conversation ends
      with its solution.

  Raises:
    ValueError: something else stands there.
  """
  if not isinstance(found, list):
    return Asked(_stated(found, field))
  for turn in found:
    if not isinstance(turn, dict) or not {'role', 'content'} <= turn.keys():
      raise ValueError(f'field {field!r}: {shown(turn)} is no message of a chat')
  roles = [turn['role'] for turn in found]
  texts = [turn['content'] for turn in found]
  reference = texts.pop() if referenced and roles[-1:] == ['assistant'] else ''
  if roles[: len(texts)] not in (['user'], ['system', 'user']):
    raise ValueError(
      f'field {field!r} holds messages by {shown(roles)}, not one by the user after at '
      'most one by the system; write an exchange into one message by the user'
    )
  # A chat template may put one of its own in the place of none, and not of a blank one.
  system = '' if len(texts) < 2 else _stated(texts[0], field, 'system message')
  if not isinstance(reference, str):
    raise ValueError(f'field {field!r} holds {shown(reference)}, which is no solution')
  return Asked(_stated(texts[-1], field), system, reference)


def _stated(found: Any, field: str, what: str = 'problem') -> str:
  if not isinstance(found, str) or not found.strip():
    raise ValueError(f'field {field!r} holds {shown(found)}, which is no {what}')
  return _text(found, field, LONGEST_PROBLEM, '\0')


def answer(found: Any, field: str) -> str:
  """The one answer in a field: a text, a number, a list of one, a countdown problem."""
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
    raise ValueError(f'field {field!r} holds {shown(found)}, which is no answer')
  # Before it is stripped: a form feed is white space.
  if not (text := _text(str(found), field, LONGEST_ANSWER, CONTROLS).strip()):
    raise ValueError(f'field {field!r} is empty')
  return text


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
      f'field {field!r} holds {shown(found)}, with the control character {bad[0]!r}; '
      'take it out, or double a backslash that is lost'
    )
  if bad := re.search(r'[\ud800-\udfff]', found):
    raise ValueError(
      f'field {field!r} holds {shown(found)}, with half of a surrogate pair, '
      f'{bad[0]!r}; write the whole character'
    )
  return found


def after_hashes(found: Any, field: str) -> str:
  """The answer after the last #### of a worked solution, as in GSM8K."""
  if not isinstance(found, str) or '####' not in found:
    raise ValueError(f'field {field!r}: {shown(found)} has no #### before an answer')
  return answer(found.rpartition('####')[2], field)


def in_box(found: Any, field: str) -> str:
  """The answer in the last box of a worked solution."""
  if not isinstance(found, str) or OPENER not in found:
    raise ValueError(
      rf'field {field!r}: {shown(found)} has no \boxed{{}}, and there is no field '
      'answer'
    )
  start = found.rindex(OPENER) + len(OPENER)
  depth = 1
  for i in range(start, len(found)):
    # \{ and \} are signs of the answer, and need not come in pairs.
    if found[i] in '{}' and found[i - 1] != '\\':
      depth += 1 if found[i] == '{' else -1
    if not depth:
      return answer(found[start:i], field)
  raise ValueError(rf'field {field!r}: its last \boxed{{ is never closed')


def bare(found: Any, field: str) -> str:
  """The answer that a solution is, or that stands in its box; $ signs are taken off."""
  if not isinstance(found, str) or OPENER in found:
    return in_box(found, field) if isinstance(found, str) else answer(found, field)
  text = answer(found, field)
  if len(text) > LONGEST_BARE or '\n' in text or '####' in text:
    raise ValueError(
      rf'field {field!r}: {shown(found)} is more than an answer and has no \boxed{{}}; '
      'add a field answer'
    )
  within = re.fullmatch(r'\$([^$]+)\$', text)
  return answer(within[1], field) if within else text


def verifier(found: Any, field: str) -> str:
  """The verifier of answers from a data set of this name; '' for a name unknown."""
  listed = found if isinstance(found, list) else [found]
  if not listed or not all(isinstance(name, str) for name in listed):
    raise ValueError(f'field {field!r} holds {shown(found)}, which is no name')
  name = listed[0].lower()
  if 'code' in name:
    raise ValueError(
      f'field {field!r} names {listed[0]!r}: answers to code problems cannot be '
      'verified here; take these rows out'
    )
  return next((v for pattern, v in VERIFIERS if re.search(pattern, name)), '')


# Bounded in depth and length, whatever it is given.
_VALUE, _ROW = reprlib.Repr(), reprlib.Repr()
_VALUE.maxstring = _VALUE.maxother = _VALUE.maxlong = 60
_ROW.maxdict, _ROW.maxlevel = 8, 3


def shown(found: Any) -> str:
  """A value in a sentence: short, and on one line."""
  return _cut(_VALUE.repr(found), 60)


def shown_row(row: dict[str, Any]) -> str:
  """A row in a sentence: eight fields, on one line."""
  return _cut(_ROW.repr(row), 300)


def _cut(text: str, length: int) -> str:
  text = ' '.join(text.split())
  return text if len(text) <= length else text[: length - 3] + '...'


def names(row: dict[str, Any]) -> str:
  """The names of a row's fields in a sentence, not more than ten."""
  found = sorted(map(str, row))
  more = f' and {len(found) - 10} more' if len(found) > 10 else ''
  return str([name[:40] for name in found[:10]]) + more
