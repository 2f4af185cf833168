r"""Implements the rules `aime` and `gsm8k`, for answers that are one number.

Both rules take time linear in the length of the text; they parse only short answers.
"""

import functools
import re
from decimal import Decimal
from fractions import Fraction

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex import trees
from bapo_jax.rewards.latex.spelling import (
  CHARACTERS,
  TEXT,
  is_label,
  spell,
  split,
  unwrap,
)

DIGITS = 28  # digits that Decimal represents exactly
LONGEST = 200  # characters of a number with label and unit


def _without_label(text: str) -> str | None:
  r"""Removes `x =`; returns None if anything but a label precedes an equals sign."""
  try:
    sides, marks = split(text, '=')
  except ValueError:
    return None
  if not marks:
    return text
  return sides[1] if len(sides) == 2 and is_label(sides[0]) else None


INTEGER = re.compile(r'([0-9]{1,9})(?:\.0*)?')


def integer(text: str) -> int | None:
  """Returns the integer 0..999 that the text spells in ASCII digits, or None.

  Leading zeros, zeros as decimals, a label, degrees, \\text and braces are allowed.
  """
  if len(text) > LONGEST:
    return None
  if text.isascii() and text.isdigit() and len(text) <= 9:  # fast path
    return int(text) if int(text) <= 999 else None
  bare = _without_label(spell(text))
  if bare is None:
    return None
  digits = INTEGER.fullmatch(unwrap(unwrap(bare).removesuffix('°')))
  return int(digits[1]) if digits and int(digits[1]) <= 999 else None


def aime(answer: str, text: str) -> Verdict:
  r"""Verifies an integer 0..999 in the last \boxed{} or the last line `Answer: ...`."""
  right = integer(answer)
  if right is None:
    return answers.unusable(answer, 'an integer 0..999')
  content = answers.box_or_line(text)
  if content is None:
    return Verdict(False, 'no box and no answer line', None)
  given = integer(content)
  if given is None:
    return Verdict(False, 'not an integer 0..999', None)
  return answers.compared(given == right, str(given))


NUMBER = re.compile(
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+'
)
SIGNED = re.compile(r'(?:(?<![\w)}.])-)?' + NUMBER.pattern)
WORD = re.compile(r'[A-Za-z]+')
# Words that change the value of a number, or deny it.
CHANGING = set(
  WORD.findall("""
  hundred thousand million billion trillion dozen dozens score half third quarter
  percent tenth hundredth hundreds thousands millions billions halves thirds
  quarters not no never wrong false incorrect isn or and to than more less least
  most nor but plus minus times divided squared cubed factorial point pi over
  maybe perhaps about approximately nearly almost except unless instead if
  """)
)
NOUNS = re.compile(r'(?: *(?:\\text *\{([^{}]*)\}|([A-Za-z]{2,})))+')


def _without_nouns(text: str) -> str:
  """Removes up to five words after a number, unless one changes it (CHANGING)."""
  start = re.search(r'(?<=[0-9.}%)]) *(?:\\text|[A-Za-z]{2,})', text)
  if not start:
    return text
  tail = text[start.start() :]
  words = WORD.findall(TEXT.sub(r' \1 ', tail))
  plain = NOUNS.fullmatch(tail) and not re.search('[^A-Za-z ]', TEXT.sub(r'\1', tail))
  if not plain or len(words) > 5 or {word.lower() for word in words} & CHANGING:
    return text
  return text[: start.start()]


BARE = re.compile(
  r'[ \t\n]*\\?\$?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\.?[ \t\n]*'
)


@functools.lru_cache(maxsize=1024)  # the responses of a group share a right answer
def number(text: str) -> Fraction | None:
  """Parses a number such as 1,000 or 5/2, with label and unit; None for other text."""
  if len(text) > LONGEST:
    return None
  if match := BARE.fullmatch(text):  # fast path
    return Fraction(match[1].replace(',', ''))
  bare = _without_label(spell(text))
  if bare is None:
    return None
  tree = trees.parse(_without_nouns(unwrap(bare)).removesuffix('%').strip())
  return None if tree is None else trees.plain(tree)


NEAR = 40  # characters of context before and after a number
PART = re.compile(  # text before a number that is denied or part of an expression
  r'[A-Za-z0-9_^.]$|[\^_<>≤≥≠±√] *$|[0-9A-Za-z)\]}] *[+/] *$|[0-9)\]}] *[-*] *$|'
  r'[A-Za-z]-$|\\[a-zA-Z]+ *$|(?<!\\boxed)\{ *$|'
  r"\b(?:not|never|isn't|wasn't|than|least|most) *$"
)
CONTINUED = re.compile(  # text after a number that changes or denies it
  r'[_^({A-Za-z]|\\[a-zA-Z]|\*(?!\*) *[0-9A-Za-z(\\]|[/√]| *[π^]|'
  r' *\\(?:pi|cdot|times|sqrt|frac)(?![a-zA-Z])|'
  r' (?:hundred|thousand|million|billion|trillion|dozen)s?\b|'
  r" (?:is|was) (?:not|wrong|incorrect|false)\b| (?:isn't|wasn't)\b"
)


def _last_number(text: str) -> Fraction | None:
  """Returns a text's last number; None if denied (`not 5`) or in an expression."""
  match = None
  for match in NUMBER.finditer(text):  # noqa: B007 (the last match counts)
    pass
  if match is None or len(match[0]) > DIGITS:
    return None
  before = _unify(text[max(0, match.start() - NEAR) : match.start()])
  after = _unify(text[match.end() : match.end() + NEAR])
  if PART.search(before) or CONTINUED.match(after):
    return None
  sign = -1 if before.endswith('-') else 1
  # The minus sign may itself continue an expression.
  if sign < 0 and PART.search(before[:-1].rstrip() + ' '):
    return None
  return sign * Fraction(match[0].replace(',', ''))


def _unify(text: str) -> str:
  return text.translate(CHARACTERS).replace('\\$', '').replace('$', '')


def gsm8k(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """Verifies the number in the last box, or else after ####, or else the last number.

  If there is a box or ####, it must have exactly one number; no other place counts. The
  right answer may be a whole solution, with its number after ####. If `strict`, only a
  label, a unit or the counted noun may stand beside the number; otherwise any text
  without a second number.
  """
  right = number(answer.rpartition('####')[2])
  if right is None:
    return answers.unusable(answer, 'one number')
  content = answers.hashes_or_box(text)
  if content is None:
    given = _last_number(text)
  else:
    given = number(content)
    if given is None and not strict:
      spelled = _unify(content).replace('{,}', ',').replace('\\!', '')
      numbers = SIGNED.findall(spelled.replace(',\\,', ','))
      if len(numbers) == 1 and len(numbers[0]) <= DIGITS:
        given = Fraction(numbers[0].replace(',', ''))
  if given is None:
    return Verdict(False, 'no number, or several', None)
  return answers.compared(given == right, _spelled(given))


def _spelled(value: Fraction) -> str:
  """Spells a number for counting votes: a finite decimal if exact, else a fraction."""
  denominator = value.denominator
  for prime in (2, 5):
    while denominator % prime == 0:
      denominator //= prime
  digits = len(str(value.numerator)) + len(str(value.denominator))
  if denominator > 1 or digits > DIGITS:
    return str(value)
  return f'{(Decimal(value.numerator) / Decimal(value.denominator)).normalize():f}'
