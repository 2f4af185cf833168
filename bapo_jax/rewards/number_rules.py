r"""The rules `aime` and `gsm8k`: one number, and nothing that changes it.

Both take time linear in the text; only what is short is read closely.
"""

import functools
import re
from decimal import Decimal
from fractions import Fraction

from bapo_jax.rewards import closed_forms, latex_trees
from bapo_jax.rewards.answer_extraction import box_or_line, hashes_or_box
from bapo_jax.rewards.spelling import CHARACTERS, TEXT, is_label, spell, split, unwrap
from bapo_jax.rewards.verdict import EQUAL, OTHER, Verdict, unusable

DIGITS = 28  # that decimal holds exactly
LONGEST = 200  # characters of a number with its label and unit


def without_label(text: str) -> str | None:
  r"""What follows `x =`; None where an equals sign has anything else before it."""
  try:
    sides, marks = split(text, '=')
  except ValueError:
    return None
  if not marks:
    return text
  return sides[1] if len(sides) == 2 and is_label(sides[0]) else None


INTEGER = re.compile(r'([0-9]{1,9})(?:\.0*)?')


def integer(text: str | None) -> int | None:
  """The integer 0..999 that the text spells in ASCII digits, leading zeros allowed."""
  if text is None or len(text) > LONGEST:
    return None
  if text.isascii() and text.isdigit() and len(text) <= 9:  # most answers
    return int(text) if int(text) <= 999 else None
  bare = without_label(spell(text))
  if bare is None:
    return None
  digits = INTEGER.fullmatch(unwrap(unwrap(bare).removesuffix('°')))
  return int(digits[1]) if digits and int(digits[1]) <= 999 else None


def aime(answer: str, text: str, *, strict: bool = True) -> Verdict:
  r"""The last \boxed{} (else the last `Answer:` line) is the right integer 0..999.

  A label, degrees, text or braces around it and decimals of 0 are harmless. A lenient
  verdict is the same.
  """
  del strict
  right = integer(answer)
  if right is None:
    return unusable(answer, 'an integer 0..999')
  found = box_or_line(text)
  if found is None:
    return Verdict(False, 'no box and no answer line', None)
  given = integer(found)
  if given is None:
    return Verdict(False, 'not an integer 0..999', None)
  return Verdict(given == right, EQUAL if given == right else OTHER, str(given))


NUMBER = re.compile(
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+'
)
SIGNED = re.compile(r'(?:(?<![\w)}.])-)?' + NUMBER.pattern)
WORD = re.compile(r'[A-Za-z]+')
# Words that make another number of a number, or deny it.
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


def without_nouns(text: str) -> str:
  """A number without the thing that it counts: at most five words, none CHANGING."""
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


@functools.lru_cache(maxsize=1024)  # the right answer of a group is read once
def number(text: str) -> Fraction | None:
  """The number that a box or a line holds: 1,000 or 5/2, with its label and unit."""
  if len(text) > LONGEST:
    return None
  if found := BARE.fullmatch(text):  # most answers; no parser needed
    return Fraction(found[1].replace(',', ''))
  bare = without_label(spell(text))
  if bare is None:
    return None
  try:
    tree = latex_trees.parse(without_nouns(unwrap(bare)).removesuffix('%').strip())
  except ValueError:
    return None
  return closed_forms.plain(tree)


NEAR = 40  # characters before and after a number that say what it is
PART = re.compile(  # of an expression, or denied: what stands before a number
  r'[A-Za-z0-9_^.]$|[\^_<>≤≥≠±√] *$|[0-9A-Za-z)\]}] *[+/] *$|[0-9)\]}] *[-*] *$|'
  r'[A-Za-z]-$|\\[a-zA-Z]+ *$|(?<!\\boxed)\{ *$|'
  r"\b(?:not|never|isn't|wasn't|than|least|most) *$"
)
CONTINUED = re.compile(  # what stands after a number
  r'[_^({A-Za-z]|\\[a-zA-Z]|\*(?!\*) *[0-9A-Za-z(\\]|[/√]| *[π^]|'
  r' *\\(?:pi|cdot|times|sqrt|frac)(?![a-zA-Z])|'
  r' (?:hundred|thousand|million|billion|trillion|dozen)s?\b|'
  r" (?:is|was) (?:not|wrong|incorrect|false)\b| (?:isn't|wasn't)\b"
)


def last_number(text: str) -> Fraction | None:
  """The last number of a text; None of a part of an expression, or of one denied."""
  found = None
  for found in NUMBER.finditer(text):  # noqa: B007 (the last one counts)
    pass
  if found is None or len(found[0]) > DIGITS:
    return None
  before = _quiet(text[max(0, found.start() - NEAR) : found.start()])
  after = _quiet(text[found.end() : found.end() + NEAR])
  if PART.search(before) or CONTINUED.match(after):
    return None
  sign = -1 if before.endswith('-') else 1
  if sign < 0 and PART.search(before[:-1].rstrip() + ' '):
    return None
  return sign * Fraction(found[0].replace(',', ''))


def _quiet(text: str) -> str:
  """Characters in one spelling, without dollars."""
  return text.translate(CHARACTERS).replace('\\$', '').replace('$', '')


def lenient_number(text: str) -> Fraction | None:
  """The only number in a text, whatever stands around it."""
  plain = _quiet(text).replace('{,}', ',').replace('\\!', '').replace(',\\,', ',')
  found = SIGNED.findall(plain)
  if len(found) != 1 or len(found[0]) > DIGITS:
    return None
  return Fraction(found[0].replace(',', ''))


def gsm8k(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """The number in the last box, else after ####, else the last number of all.

  A box or a #### that holds no number, or two, is wrong: nothing else is read.
  The right answer may be a whole solution that ends in ####.

  Args:
    strict: nothing stands beside the number but a label, a unit or what it counts;
      else anything but another number may.
  """
  right = number(answer.rpartition('####')[2])
  if right is None:
    return unusable(answer, 'one number')
  found = hashes_or_box(text)
  if found is None:
    given = last_number(text)
  else:
    given = number(found)
    if given is None and not strict:
      given = lenient_number(found)
  if given is None:
    return Verdict(False, 'no number, or several', None)
  return Verdict(given == right, EQUAL if given == right else OTHER, spelled(given))


def spelled(value: Fraction) -> str:
  """A number as votes are counted: a decimal where it ends, else a fraction."""
  rest = value.denominator
  for prime in (2, 5):
    while rest % prime == 0:
      rest //= prime
  digits = len(str(value.numerator)) + len(str(value.denominator))
  if rest > 1 or digits > DIGITS:
    return str(value)
  return f'{(Decimal(value.numerator) / Decimal(value.denominator)).normalize():f}'
