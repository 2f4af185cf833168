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
  CURRENCY,
  GROUP_MARK,
  TEXT,
  THOUSANDS,
  UNITS,
  is_label,
  spell,
  split,
  split_choice,
  split_unit,
  unwrap,
)

LONGEST = 200  # characters of a number with the words around it

# Words that change a number beside them, deny or doubt it, or are another number. All
# other words are labels before the number, and units after it.
CHANGING = r"""\b(?:
  [a-z]*illi(?:on|ard)(?:s|ths?)?|(?:hundred|thousand)(?:s|ths?)?|myriads?|lakhs?|lacs?|
  crores?|grand(?!\stotal)|bn|mn|mil|mio|mln|tn|dozens?|gross|pairs?|couples?|thrice|
  (?:doubl|tripl|trebl|quadrupl|quintupl|halv)(?:es?|ed|ing)|multipl[a-z]+|divided|twice|
  times(?=\W+(?!(?:a|per|each|every)\b)\w)|plus|minus|negative|squared|cubed|factorial|
  roots?|sqrt|log|mod|modulo|pi|hex[a-z]*|octal|binary|percent|per\scent|mille|
  half|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|twelf|[a-z]+teen|[a-z]+tie)ths?|
  (?:zero|one|two|three|four|five|six|seven|eight|nine|ten)(?:e?s)?|eleven|twelve|
  (?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|
  no|not|never|none|nor|neither|cannot|[a-z]+n['\u2019]t|wrong|false|incorrect[a-z]*|
  invalid|or|but|except|unless|without|instead|if|otherwise|versus|vs|than|least|most|minimum|
  maximum|maybe|perhaps|probably|possibly|approx[a-z]*|roughly|nearly|almost|circa|ish|
  rounded|estimat[a-z]+|guess[a-z]*|something)\b"""
CHANGED_BEFORE = re.compile(
  rf"""(?ix)(?:
  # Such a word, or a bound, directly before the number.
  (?:{CHANGING}|(?<!\S)~|\b(?:about|around|over|under|below|above|between|within|beyond|square|
  cube|(?<!adds[ ])(?<!add[ ])up[ ]to))(?:[ ]+(?:of|the|an?|as|many|much|and|to)\b)*\s*|
  # A denial or an alternative close to it, unless a verb follows.
  (?:\b(?:not|never|or)|n['\u2019]t)
  (?:[ ]+(?!(?:is|are|was|were|equals)\b)[a-z()]+){{0,2}}[\s:=]*|
  \b(?:wrong|false|incorrect|guess|estimate)\b[^.!?]*|
  # Another number.
  [0-9](?::|%?[ ]*(?:\\?[,;&|]|to|by|in|over|times|(?:out[ ])?of|
  (?:[a-z]+[ ]+){{0,2}}(?:and|or))?[ ]*)
  )[*_"($\\{CURRENCY}-]*\Z"""
)
WORDED = re.compile(  # a number with a label and a unit
  rf"""(?isx)
  (?:[a-z ,()'\u2019:=→⇒]|[-=]+>|(?<=[a-z])[-/](?=[a-z])|\*\*(?![ ])|(?<=[a-z:])\*\*)*
  (?:(?<![a-z(])|US|Rs\.?[ ]*)
  ((?:[-+][ ]*)?(?:\\frac|\.?[0-9])(?:.*[0-9}}])?(?:[ ]*[%°])?)
  (?:(?:{'|'.join(name for name in UNITS if len(name) > 1)})\b|[CF]\b)?
  # No word that changes the number, operator beside it, or letter such as k or x, which
  # is neither an article nor a unit after a blank.
  (?!.*(?:{CHANGING}|(?<!['\u2019/])\b(?!T-|m/s|(?-i:[aghlsLI])\b)[a-z]\b))
  (?:(?<=%)|(?![\s*_(]*(?:of|to|over|by|and|about|around|above|below|under|scores?|is|was)\b))
  (?![a-z])(?:[a-z\s()}}\]"\u201d]|\\[)\]]|(?<=[a-z])['\u2019]|
  (?<=\w)-(?=[a-z])|/(?=[a-z])|(?<!\s)[*_`](?=[\W_]|$))*"""
)


def _without_words(text):
  r"""Removes label and unit of a number; returns the text if a word changes the number.

  So `5 \text{ apples}` becomes 5, and `5 dozen` stays `5 dozen`.
  """
  plain = TEXT.sub(r' \1 ', spell(text)).replace(THOUSANDS, ',')
  match = WORDED.fullmatch(plain)
  if match is None or CHANGED_BEFORE.search(plain[: match.start(1)]):
    return text
  return match[1]


@functools.lru_cache(1024)  # the responses of a group share answers
def _read(reader, text, words=True):
  """Reads a number, if `words` with any label and unit."""
  value = reader(text)
  if words and value is None and len(text) <= LONGEST:
    value = reader(_without_words(text))
  return value


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


def aime(answer: str, content: str | None, text: str) -> Verdict:
  r"""Verifies an integer 0..999 in the last \boxed{} or else the last answer line."""
  del text
  right = _read(integer, answer, False)
  if right is None:
    return answers.unusable(answer, 'an integer 0..999')
  if content is None:
    return Verdict(False, 'no box and no answer line', None)
  response_number = _read(integer, content)
  if response_number is None:
    return Verdict(False, 'not an integer 0..999', None)
  return answers.compared(response_number == right, str(response_number))


def number(text: str) -> Fraction | None:
  """Parses a number such as 1,000 or 5/2; returns None if the text is no number.

  Ignores a label before it (`x =`), a known unit after it, currency signs and Markdown.
  """
  if len(text) > LONGEST:
    return None
  bare = _bare(answers.without_markdown(text))
  if bare is None:
    return None
  # A percent sign is a unit, for this rule.
  bare = re.sub(r' *(?:%|° *[CF]?)$', '', split_unit(bare)[0])
  return trees.plain(trees.parse(bare))


NUMBER = r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+'
NEAR = 40  # characters of context before and after a number
PART = re.compile(  # text before a number that is denied or part of an expression
  r'[A-Za-z0-9^.]_*$|(?:^|[^_])_ *$|[\^<≤≥≠±√≈] *$|[<>!]= *$|'
  r'[0-9A-Za-z)\]}] *[+/] *$|[0-9)\]}] *[-*] *$|'
  # A comparison, or an arrow from one number to another, but no other arrow.
  r'[^-=]> *$|(?:^|[^-+*/0-9., ]) *[0-9.,]+[)\]% ]*(?:[-=]+>|[→⇒]) *$|'
  r'[A-Za-z]-$|\\[a-zA-Z]+ *$|(?<!\\boxed)\{ *$'
)


def _last_number(text):
  """Returns the last number of a text, with a unit up to the end of its sentence.

  Returns None if words around the number change it, or if it is part of an expression.
  """
  text = re.sub(rf'(?a)(?<=\d)(?:{GROUP_MARK})(?=\d{{3}}(?!\d))', ',', text)
  match = None
  for match in re.finditer(NUMBER, text):  # noqa: B007 (the last match counts)
    pass
  if match is None:
    return None
  near = text[: match.start()][-NEAR:]
  # Without currency signs, nor the letters of US$.
  before = re.sub(
    rf'(?:\b(?:US|CA|AU|HK|NZ|[ACS]))?\\?\$|[{CURRENCY}]',
    '',
    near.translate(CHARACTERS),
  )
  negative = before.endswith('-')
  # A minus sign may itself continue an expression.
  if (
    PART.search(before)
    or CHANGED_BEFORE.search(near)
    or (negative and PART.search(before[:-1].rstrip() + ' '))
  ):
    return None
  # A line that begins in lower case continues the sentence.
  sentence = text[match.start() :][: LONGEST + 1]
  value = _read(number, re.split(r'[.!](?=\W|$)|\n(?!\s*[a-z])', sentence)[0])
  return -value if negative and value else value


def gsm8k(
  answer: str, content: str | None, text: str, *, strict: bool = True
) -> Verdict:
  """Verifies the number in the last box, or else after ####, or else the last number.

  If there is a box or ####, it must have exactly one number, and numbers elsewhere do
  not count, unless the box is blank (`answers.is_blank`). The right answer may be a
  whole solution, with its number after ####. Words around the number are a label or a
  unit. If `strict`, a word that changes the number (CHANGING) leaves the response
  undecided. Otherwise any text without a second number may surround the number.
  """
  right = _read(number, answer.rpartition('####')[2], False)
  if right is None:
    return answers.unusable(answer, 'one number')
  if content is None or answers.is_blank(content):
    content = answers.MARKUP.sub(' ', text)
    value = _last_number(content)
  else:
    value = _read(number, content)
    if value is None and not strict:
      value = number(re.sub(r'[.,/-](?![0-9])|[^0-9.,/-]+', '|', content).strip('|'))
  if value is None:
    if not re.search(NUMBER, content):
      return Verdict(False, 'no number', None)
    return Verdict(None, 'not one number, or words that change it', None)
  # Spelled for counting votes: a finite decimal if exact, else a fraction.
  decimal = Decimal(value.numerator) / value.denominator
  spelled = f'{decimal.normalize():f}' if Fraction(decimal) == value else str(value)
  return answers.compared(value == right, spelled)
