r"""Implements the rules `aime` and `gsm8k`, for answers that are one number.

Both rules take time linear in the length of the text; they parse only short answers.
"""

import re
from decimal import Decimal
from fractions import Fraction

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex import trees
from bapo_jax.rewards.latex.spelling import (
  CHARACTERS,
  CURRENCY,
  GROUP_MARK,
  UNITS,
  is_label,
  spell,
  split,
  split_choice,
  split_unit,
  unwrap,
)

DIGITS = 28  # digits that Decimal represents exactly
LONGEST = 200  # characters of a number with label and unit


def _bare(text):
  r"""Spells a text, without `(B)` and `x =`; None if another text precedes `=`."""
  text = spell(text)
  text = split_choice(text)[1] or text
  try:
    sides, marks = split(text, '=')
  except ValueError:
    return None
  if marks and (len(sides) > 2 or not is_label(sides[0] or 'x')):
    return None
  return unwrap(sides[-1])


def integer(text: str) -> int | None:
  """Returns the integer 0..999 that the text spells in ASCII digits, or None.

  Leading zeros, zeros as decimals, a plus sign, a label, a choice such as (B), degrees,
  parentheses, \\text and braces are allowed.
  """
  if len(text) > LONGEST:
    return None
  bare = _bare(text)
  if bare is None or re.search('[eE]', bare):  # 1e2
    return None
  match trees.parse(unwrap(bare.removesuffix('°'))):
    case ('num', value) if value.denominator == 1 and 0 <= value <= 999:
      return int(value)
  return None


def aime(answer: str, text: str) -> Verdict:
  r"""Verifies an integer 0..999 in the last \boxed{} or else the last answer line."""
  right = integer(answer)
  if right is None:
    return answers.unusable(answer, 'an integer 0..999')
  content = answers.box_or_line(text)
  if content is None:
    return Verdict(False, 'no box and no answer line', None)
  response_number = integer(content)
  if response_number is None:
    return Verdict(False, 'not an integer 0..999', None)
  return answers.compared(response_number == right, str(response_number))


PERCENT = re.compile(r' *(?:%|° *[CF]?)$')  # a unit, for this rule


def number(text: str) -> Fraction | None:
  """Parses a number such as 1,000 or 5/2; returns None if the text is no number.

  Ignores a label before it (`x =`), a known unit after it, currency signs and Markdown.
  """
  if len(text) > LONGEST:
    return None
  bare = _bare(answers.without_markdown(text))
  if bare is None:
    return None
  tree = trees.parse(PERCENT.sub('', split_unit(bare)[0]))
  return None if tree is None else trees.plain(tree)


NUMBER = r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+'
SIGNED = re.compile(rf'(?:(?<![\w)}}.])-)?(?:{NUMBER})')
JOINED = re.compile(rf'(?<=\d)(?:{GROUP_MARK})(?=\d{{3}}(?!\d))', re.ASCII)
NEAR = 40  # characters of context before and after a number
PART = re.compile(  # text before a number that is denied or part of an expression
  r'[A-Za-z0-9^.]_*$|(?:^|[^_])_ *$|[\^<≤≥≠±√] *$|[<>!]= *$|'
  r'[0-9A-Za-z)\]}] *[+/] *$|[0-9)\]}] *[-*] *$|'
  # A comparison, or an arrow from one number to another, but no other arrow.
  r'[^-=]> *$|(?:^|[^-+*/0-9., ]) *[0-9.,]+[)\]% ]*(?:[-=]+>|[→⇒]) *$|'
  r'[A-Za-z]-$|\\[a-zA-Z]+ *$|(?<!\\boxed)\{ *$|'
  r"\b(?:not|never|isn't|wasn't|than|least|most|or) *$"
)
MARKS = r'(?:[ *_`"\')\]}]|\\[)\]])*'
SENTENCE_END = re.compile(  # text after a number: at most a unit up to the full stop
  rf'{MARKS}(?:%|° *[CF]?|{"|".join(name for name in UNITS if len(name) > 1)})?'
  rf'{MARKS}(?:[.!](?=\W|$)|$)'
)


def _last_number(text):
  """Returns the last number of a text if its sentence ends with it, else None.

  A known unit may follow the number. A number that is denied (`not 5`) or part of an
  expression returns None.
  """
  text = JOINED.sub(',', text)
  match = None
  for match in re.finditer(NUMBER, text):  # noqa: B007 (the last match counts)
    pass
  if match is None or len(match[0]) > DIGITS:
    return None
  before = _unify(text[max(0, match.start() - NEAR) : match.start()])
  # A line that begins in lower case continues the sentence.
  after = re.split(r'\n(?!\s*[a-z])', text[match.end() :][:NEAR])[0]
  if PART.search(before) or not SENTENCE_END.match(_unify(after)):
    return None
  sign = -1 if before.endswith('-') else 1
  # The minus sign may itself continue an expression.
  if sign < 0 and PART.search(before[:-1].rstrip() + ' '):
    return None
  return sign * Fraction(match[0].replace(',', ''))


def _unify(text):
  return re.sub(rf'\\?\$|[{CURRENCY}]', '', text.translate(CHARACTERS))


def gsm8k(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """Verifies the number in the last box, or else after ####, or else the last number.

  If there is a box or ####, it must have exactly one number, and numbers elsewhere do
  not count, unless the box is blank (`answers.is_blank`). The right answer may be a
  whole solution, with its number after ####. If `strict`, a number next to anything but
  a label, a currency sign or a known unit leaves the response undecided. Otherwise any
  text without a second number may surround the number.
  """
  right = number(answer.rpartition('####')[2])
  if right is None:
    return answers.unusable(answer, 'one number')
  text = answers.MARKUP.sub(' ', text)
  content = answers.hashes_or_box(text)
  if content is None or answers.is_blank(content):
    content = text
    value = _last_number(text)
  else:
    value = number(content)
    if value is None and not strict:
      numbers = SIGNED.findall(_unify(JOINED.sub(',', content)))
      if len(numbers) == 1 and len(numbers[0]) <= DIGITS:
        value = Fraction(numbers[0].replace(',', ''))
  if value is None:
    if not re.search(NUMBER, content):
      return Verdict(False, 'no number', None)
    return Verdict(None, 'not one number with a known unit', None)
  # Spelled for counting votes: a finite decimal if exact, else a fraction.
  decimal = Decimal(value.numerator) / value.denominator
  spelled = f'{decimal.normalize():f}' if Fraction(decimal) == value else str(value)
  return answers.compared(value == right, spelled)
