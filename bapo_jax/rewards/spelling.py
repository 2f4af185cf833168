r"""One spelling for the ways to write the same LaTeX: signs, blanks, sizes, wrappers.

Nothing is removed that has a meaning: a blank between two numerals stays one.
"""

import re

CHARACTERS = str.maketrans(
  {
    **dict.fromkeys('\x02\x03\x04\x1f', '?'),  # used below with a meaning
    **dict.fromkeys('\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d', '-'),
    **dict.fromkeys('\u00d7\u00b7\u22c5\u2217', '*'),
    **dict.fromkeys('\u00a0\u2009\u202f\n\r\t~', ' '),
    '\u00f7': '/',
    '\u03c0': 'π',
    '\u221e': '∞',
    '\u2264': '≤',
    '\u2265': '≥',
    '\u2260': '≠',
    '\u2208': '∈',
    '\u00b1': '±',
    '\u00ba': '°',
  }
)
UNION = '\u222a'
THOUSANDS = '\x1f'  # between groups of three digits, where it can be nothing else
SEPARATOR = re.compile(r'(?<=\d)(?:\{,\}|,\\[!,]|\\,)(?=\d{3}(?!\d))', re.ASCII)
SET_OPEN, SET_CLOSE = '\x02', '\x03'  # \{ and \}, since { and } only group
ROW = '\x04'  # \\ between the rows of a matrix
COMMANDS = {
  **dict.fromkeys(('dfrac', 'tfrac', 'cfrac'), r'\frac'),
  **dict.fromkeys(('le', 'leq', 'leqslant'), '≤'),
  **dict.fromkeys(('ge', 'geq', 'geqslant'), '≥'),
  **dict.fromkeys(('ne', 'neq'), '≠'),
  **dict.fromkeys(('times', 'cdot', 'ast'), '*'),
  **dict.fromkeys(('quad', 'qquad'), ' '),
  **dict.fromkeys(('left', 'right', 'displaystyle', 'textstyle'), ''),
  **dict.fromkeys(('big', 'Big', 'bigl', 'bigr', 'Bigl', 'Bigr'), ''),
  **dict.fromkeys(('mathrm', 'mathbf', 'mathit', 'textbf', 'textit'), r'\text'),
  **dict.fromkeys(('textrm', 'mbox', 'textnormal'), r'\text'),
  'lt': '<',
  'gt': '>',
  'in': '∈',
  'cup': UNION,
  'infty': '∞',
  'pi': 'π',
  'pm': '±',
  'div': '/',
  'degree': '°',
  'lbrace': SET_OPEN,
  'rbrace': SET_CLOSE,
}
SYMBOLS = {
  '!': '',
  ',': ' ',
  ';': ' ',
  ':': ' ',
  ' ': ' ',
  '$': '',
  '(': '',
  ')': '',
  '{': SET_OPEN,
  '}': SET_CLOSE,
  '%': '%',
}
COMMAND = re.compile(r'\\(?:([a-zA-Z]+)|([!,;:$(){}% ]))|\$')
DEGREE = re.compile(r'\^ *(?:\\circ(?![a-zA-Z])|\{ *\\circ *\})')
TEXT = re.compile(r'\\text *\{([^{}]*)\}')
PERCENT = re.compile(r'\\text *\{ *per ?cent *\}|(?<=\d) *per ?cent$')


def _command(match: re.Match[str]) -> str:
  name, symbol = match[1], match[2]
  if name is None:
    return SYMBOLS[symbol] if symbol else ''
  spelled = COMMANDS.get(name)
  return match[0] if spelled is None else spelled


def spell(text: str) -> str:
  r"""The text in one spelling: `\dfrac` is `\frac`, U+2212 is -, sizes are gone."""
  text = SEPARATOR.sub(THOUSANDS, text.translate(CHARACTERS)).replace(r'\\', ROW)
  text = COMMAND.sub(_command, DEGREE.sub('°', text))
  return unwrap(PERCENT.sub('%', text))


def unwrap(text: str) -> str:
  r"""Without blanks, a full stop, braces or a \text{} around the whole."""
  while True:
    text = text.strip()
    bare = text[:-1] if text.endswith('.') else text
    if wrapped := TEXT.fullmatch(bare):
      bare = wrapped[1]
    elif bare.startswith('{') and closing(bare, 0) == len(bare) - 1:
      bare = bare[1:-1]
    if bare == text:
      return text
    text = bare


OPEN, CLOSE = '([{' + SET_OPEN, ')]}' + SET_CLOSE


def closing(text: str, start: int) -> int:
  """Where the bracket that opens at `start` closes; -1 where it does not.

  A round and a square bracket may close each other, as those of an interval do.
  """
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] in OPEN) - (text[i] in CLOSE)
    if depth == 0:
      return i
  return -1


def split(text: str, marks: str) -> tuple[list[str], str]:
  """(the parts, the marks between them), of the marks that no bracket encloses.

  Raises:
    ValueError: a bracket does not close.
  """
  parts, found, depth, begin = [], '', 0, 0
  for i, character in enumerate(text):
    depth += (character in OPEN) - (character in CLOSE)
    if depth < 0:
      break
    if depth == 0 and character in marks:
      parts.append(text[begin:i].strip())
      found, begin = found + character, i + 1
  if depth:
    raise ValueError('a bracket does not close')
  return [*parts, text[begin:].strip()], found


# Labels such as `x =`, `f(2) =`, `m+n =`: letters, their indices and arguments.
GREEK = (
  r'\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|'
  r'phi|varphi|omega|angle|triangle|overline|ell)(?![a-zA-Z])'
)
LABEL = re.compile(rf"(?:[A-Za-z(]|{GREEK})(?:[A-Za-z0-9 ()_{{}},^+*/'-]|{GREEK})*")


def is_label(text: str) -> bool:
  """Whether a left-hand side only names what the right-hand side is."""
  return bool(LABEL.fullmatch(text) and re.search('[A-Za-z]', text))


UNITS = {
  alias: names.split()[0]
  for names in (
    'degree degrees deg °',
    'radian radians rad',
    'mm millimeter millimeters',
    'cm centimeter centimeters centimetre centimetres',
    'm meter meters metre metres',
    'km kilometer kilometers kilometre kilometres',
    'in inch inches',
    'ft foot feet',
    'yd yard yards',
    'mile miles mi',
    'unit units',
    's sec second seconds',
    'min mins minute minutes',
    'h hr hrs hour hours',
    'day days',
    'week weeks',
    'month months',
    'year years',
    'mg milligram milligrams',
    'g gram grams',
    'kg kilogram kilograms',
    'lb lbs pound pounds',
    'oz ounce ounces',
    'ml milliliter milliliters',
    'l liter liters litre litres',
    'gallon gallons gal',
    'mph',
    'dollar dollars',
    'cent cents',
    'point points',
  )
  for alias in names.split()
}
UNIT = re.compile(
  r'(?:°|\\text *\{(?P<text>[^{}]*)\}|(?<=[0-9} )])(?P<bare>[a-z]{2,}))'
  r'(?: *\^ *\{? *(?P<power>[23]) *\}?)?$'
)
POWERS = {'square': '2', 'sq': '2', 'cubic': '3'}


def split_unit(text: str) -> tuple[str, str | None]:
  """(value, unit) of a text that ends in a known unit; else (text, None)."""
  found = UNIT.search(text)
  if not found or not text[: found.start()].strip():
    return text, None
  words = (found['text'] or found['bare'] or '°').strip(' .').lower().split()
  power = found['power'] or '1'
  if words and words[0] in POWERS:
    power, words = POWERS[words[0]], words[1:]
  if len(words) != 1 or words[0] not in UNITS:
    return text, None
  return text[: found.start()].strip(), UNITS[words[0]] + power
