r"""Implements the rules `aime` and `gsm8k`, for answers that are one number.

Both rules take time linear in the length of the text; they parse only short answers.
"""

import functools
import re
import string
from decimal import Decimal
from fractions import Fraction

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex import trees
from bapo_jax.rewards.latex.spelling import (
  CHARACTERS,
  CURRENCY,
  GROUP_MARK,
  TEXT,
  UNITS,
  is_label,
  spell,
  split,
  split_choice,
  unwrap,
)

DIGITS = 28  # digits that Decimal represents exactly
LONGEST = 200  # characters of a number with label and unit


def _without_label(text: str) -> str | None:
  r"""Removes `(B)` and `x =`; returns None if another text precedes an equals sign."""
  text = split_choice(text)[1] or text
  try:
    sides, marks = split(text, '=')
  except ValueError:
    return None
  if not marks:
    return text
  return sides[1] if len(sides) == 2 and is_label(sides[0] or 'x') else None


def integer(text: str) -> int | None:
  """Returns the integer 0..999 that the text spells in ASCII digits, or None.

  Leading zeros, zeros as decimals, a plus sign, a label, a choice such as (B), degrees,
  parentheses, \\text and braces are allowed.
  """
  if len(text) > LONGEST:
    return None
  if text.isascii() and text.isdigit() and len(text) <= 9:  # fast path
    return int(text) if int(text) <= 999 else None
  bare = _without_label(spell(text))
  if bare is None or re.search('[eE]', bare):  # 1e2
    return None
  match trees.parse(unwrap(unwrap(bare).removesuffix('°'))):
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
  given = integer(content)
  if given is None:
    return Verdict(False, 'not an integer 0..999', None)
  return answers.compared(given == right, str(given))


NUMBER = re.compile(
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+'
)
SIGNED = re.compile(r'(?:(?<![\w)}.])-)?' + NUMBER.pattern)
WORD = re.compile(r'[A-Za-z]+')
# Words that multiply or divide the number before them. A noun does not: pairs, weeks
# and dollars are counted like apples.
SCALING = set(
  WORD.findall("""
  hundred thousand million billion trillion quadrillion quintillion zillion myriad
  hundreds thousands millions billions trillions quadrillions myriads
  lakh lakhs lac lacs crore crores milliard milliards grand k kk mn mil mio mln bn b tn
  dozen dozens gross fourths fifths sixths sevenths eighths ninths tenth tenths
  twelfths twentieths hundredth hundredths thousandth thousandths millionth millionths
  mille permille permil ppm bps twice thrice doubled tripled trebled quadrupled
  quintupled halved multiplied divided squared cubed factorial pi
  """)
)
# Words that change the value otherwise, doubt it or deny it, or are a second number.
CHANGING = SCALING | set(
  WORD.findall("""
  half halves third thirds quarter quarters score scores percent
  not no never wrong false incorrect isn wasn aren invalid neither nor without
  and or to than least most but plus minus times over below under negative
  maybe perhaps probably possibly about approximately approx nearly almost roughly
  around circa ish rounded estimated guess guessed except unless instead if
  base hex hexadecimal octal binary root sqrt log modulo mod power exponent
  something zero two three four five six seven eight nine ten tens eleven twelve
  thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty
  fifty sixty seventy eighty ninety
  """)
)
NOUNS = re.compile(
  r'(?<=[0-9.}%)]) *(?:[(/] *)?'
  r'(?:\\text|[A-Za-z]{2}|(?<= )(?:[ghsLl]$|a [a-z]|[A-Z]-[a-z]))'
)
NOUN_CHARACTERS = set(string.ascii_letters + " ()/-.'")


def _without_nouns(text: str) -> str:
  """Removes up to five words after a number, unless one changes it (CHANGING).

  The words may be in parentheses and contain a slash, as in `miles/hour`. `times` alone
  changes nothing.
  """
  start = NOUNS.search(text)
  if not start:
    return text
  tail = TEXT.sub(r' \1 ', text[start.start() :])
  words = WORD.findall(tail.lower())
  changes = words != ['times'] and not CHANGING.isdisjoint(words)
  if set(tail) - NOUN_CHARACTERS or len(words) > 5 or changes:
    return text
  return text[: start.start()]


# What may precede a number: `Total:`, `The answer is`, or the name of a currency.
LABEL = re.compile(r'\**((?:[A-Za-z][A-Za-z ]{0,40})?)(?::\**| is | *[-=]+> *)')
MONEY = re.compile(
  r'(?<![A-Za-z])(?:(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?) *(?=[0-9])|'
  r'(?:US|CA|AU|HK|NZ|[ACS])(?=\\?\$))'
)
SIGN = re.compile(r' *(?:%|° *[CF]?)$')  # a unit, for this rule
BARE = re.compile(
  r'[ \t\n]*\\?\$?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\.?[ \t\n]*'
)


@functools.lru_cache(maxsize=1024)  # the responses of a group share a right answer
def number(text: str) -> Fraction | None:
  """Parses a number such as 1,000 or 5/2, with label and unit; None for other text.

  Markdown around the number and the sign or name of a currency are ignored, too.
  """
  if len(text) > LONGEST:
    return None
  if match := BARE.fullmatch(text):  # fast path
    return Fraction(match[1].replace(',', ''))
  text = answers.without_markdown(text)
  label = LABEL.match(text)
  if label and CHANGING.isdisjoint(WORD.findall(label[1].lower())):
    text = answers.without_markdown(text[label.end() :])
  bare = _without_label(spell(MONEY.sub('', text)))
  if bare is None:
    return None
  bare = SIGN.sub('', _without_nouns(unwrap(bare)))
  tree = trees.parse(bare)
  return None if tree is None else trees.plain(tree)


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
CONTINUED = re.compile(  # text after a number that changes or denies it
  rf'(?!(?:{"|".join(name for name in UNITS if len(name) > 1)})(?![A-Za-z]))[A-Za-z]|'
  r'[\^({]|_(?!_(?!\w))|(?:</?[A-Za-z]+>)+\w|\\[a-zA-Z]|\*(?!\*) *[0-9A-Za-z(\\]|'
  r'√| *[π^]|'
  r'/(?!(?:day|week|month|year|hour|minute|person|kg|lb)\b)|'
  r' *\\(?:pi|cdot|times|sqrt|frac)(?![a-zA-Z])|'
  r'[*_ ]*[ -]\(?(?:(?:is|was|and|then) ){0,2}'
  rf'(?:{"|".join(sorted(SCALING))})(?![A-Za-z])|'
  r" +(?:(?:is|was) +(?:not|wrong|incorrect|false)|isn't|wasn't)\b"
)


def _last_number(text: str) -> Fraction | None:
  """Returns a text's last number; None if denied (`not 5`) or in an expression."""
  text, match = JOINED.sub(',', text), None
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
  return re.sub(rf'\\?\$|[{CURRENCY}]', '', text.translate(CHARACTERS))


def gsm8k(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """Verifies the number in the last box, or else after ####, or else the last number.

  If there is a box or ####, it must have exactly one number; no other place counts,
  unless the box only marks the place of an answer (`answers.is_blank`). The right
  answer may be a whole solution, with its number after ####. If `strict`, only a label,
  a unit, a currency or the counted noun may stand beside the number; otherwise any text
  without a second number.
  """
  right = number(answer.rpartition('####')[2])
  if right is None:
    return answers.unusable(answer, 'one number')
  text = answers.MARKUP.sub(' ', text)
  content = answers.hashes_or_box(text)
  if content is None or answers.is_blank(content):
    given = _last_number(text)
  else:
    given = number(content)
    if given is None and not strict:
      numbers = SIGNED.findall(_unify(JOINED.sub(',', content)))
      if len(numbers) == 1 and len(numbers[0]) <= DIGITS:
        given = Fraction(numbers[0].replace(',', ''))
  if given is None:
    return Verdict(False, 'no number, or several', None)
  return answers.compared(given == right, _spelled(given))


def _spelled(value: Fraction) -> str:
  """Spells a number for counting votes: a finite decimal if exact, else a fraction."""
  decimal = Decimal(value.numerator) / value.denominator
  return f'{decimal.normalize():f}' if Fraction(decimal) == value else str(value)
