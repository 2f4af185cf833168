r"""Normalises LaTeX: one spelling for signs, spaces, sizes, wrappers and units.

Text with a meaning is kept: a space between two numerals stays a space.
"""

import re

CHARACTERS = str.maketrans(
  {
    **dict.fromkeys('\x02\x03\x04\x1f', '?'),  # markers, see below
    **dict.fromkeys('\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d', '-'),
    **dict.fromkeys('\u00d7\u00b7\u22c5\u2217', '*'),
    **dict.fromkeys('\u00a0\u2009\u202f\n\r\t~', ' '),
    **{'\u00f7': '/', '\u00ba': '°'},
  }
)
UNION = '\u222a'
THOUSANDS = '\x1f'  # marker of an unambiguous thousands separator
SEPARATOR = re.compile(r'(?<=\d)(?:\{,\}|,\\[!,]|\\,)(?=\d{3}(?!\d))', re.ASCII)
SET_OPEN, SET_CLOSE = '\x02', '\x03'  # markers of \{ and \}; { and } only group
ROW = '\x04'  # marker of \\ between the rows of a matrix
COMMANDS = {  # command after a backslash -> its replacement
  None: '',  # a dollar sign without a backslash
  ' ': ' ',
  **{
    name: target
    for target, names in {
      '': 'left right displaystyle textstyle big Big bigl bigr Bigl Bigr ! $ ( )',
      ' ': 'quad qquad , ; :',
      r'\frac': 'dfrac tfrac cfrac',
      r'\text': 'mathrm mathbf mathit textbf textit textrm mbox textnormal',
      '*': 'times cdot ast',
      '/': 'div',
      '<': 'lt',
      '>': 'gt',
      '≤': 'le leq leqslant',
      '≥': 'ge geq geqslant',
      '≠': 'ne neq',
      '±': 'pm',
      '∈': 'in',
      '∞': 'infty',
      'π': 'pi',
      '°': 'degree',
      '%': '%',
      UNION: 'cup',
      SET_OPEN: 'lbrace {',
      SET_CLOSE: 'rbrace }',
    }.items()
    for name in names.split()
  },
}
COMMAND = re.compile(r'\\([a-zA-Z]+|[!,;:$(){}% ])|\$')
DEGREE = re.compile(r'\^ *(?:\\circ(?![a-zA-Z])|\{ *\\circ *\})')
TEXT = re.compile(r'\\text *\{([^{}]*)\}')
PERCENT = re.compile(r'\\text *\{ *per ?cent *\}|(?<=\d) *per ?cent$')


def spell(text: str) -> str:
  r"""Returns the text in the normal spelling.

  For example, `\dfrac` becomes `\frac`, U+2212 becomes -, and `\left` disappears.
  """
  text = SEPARATOR.sub(THOUSANDS, text.translate(CHARACTERS)).replace(r'\\', ROW)
  text = COMMAND.sub(lambda m: COMMANDS.get(m[1], m[0]), DEGREE.sub('°', text))
  return unwrap(PERCENT.sub('%', text))


def unwrap(text: str) -> str:
  r"""Removes spaces, a final full stop, and braces or \text{} around the whole text."""
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
  """Returns the index of the bracket that closes the bracket at `start`, or -1.

  A round and a square bracket may close each other, as in the interval [0, 1).
  """
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] in OPEN) - (text[i] in CLOSE)
    if depth == 0:
      return i
  return -1


def split(text: str, marks: str) -> tuple[list[str], str]:
  """Splits a text at marks outside all brackets; returns the parts and these marks.

  Raises a ValueError if brackets are unbalanced.
  """
  parts, separators, depth, begin = [], '', 0, 0
  for i, character in enumerate(text):
    depth += (character in OPEN) - (character in CLOSE)
    if depth < 0:
      break
    if depth == 0 and character in marks:
      parts.append(text[begin:i].strip())
      separators, begin = separators + character, i + 1
  if depth:
    raise ValueError('unbalanced brackets')
  return [*parts, text[begin:].strip()], separators


# Commands of Greek letters that all modules accept as variables.
LETTERS = (
  'alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|omega'
)
# Labels such as `x =`, `f(2) =`, `m+n =`: letters with indices and arguments.
GREEK = rf'\\(?:{LETTERS}|phi|varphi|angle|triangle|overline|ell)(?![a-zA-Z])'
LABEL = re.compile(rf"(?:[A-Za-z(]|{GREEK})(?:[A-Za-z0-9 ()_{{}},^+*/'-]|{GREEK})*")


def is_label(text: str) -> bool:
  """Returns whether the left side of an equation is a label, such as x, f(2) or m+n."""
  return bool(LABEL.fullmatch(text) and re.search('[A-Za-z]', text))


UNIT_NAMES = """
  degree degrees deg °; radian radians rad; unit units; mph; point points;
  mm millimeter millimeters; cm centimeter centimeters centimetre centimetres;
  m meter meters metre metres; km kilometer kilometers kilometre kilometres;
  in inch inches; ft foot feet; yd yard yards; mile miles mi;
  s sec second seconds; min mins minute minutes; h hr hrs hour hours;
  day days; week weeks; month months; year years;
  mg milligram milligrams; g gram grams; kg kilogram kilograms;
  lb lbs pound pounds; oz ounce ounces;
  ml milliliter milliliters; l liter liters litre litres; gallon gallons gal;
  dollar dollars; cent cents
"""
# Any name -> the first name of its group.
UNITS = {
  name: group.split()[0] for group in UNIT_NAMES.split(';') for name in group.split()
}
UNIT = re.compile(
  r'(?:°|\\text *\{(?P<text>[^{}]*)\}|(?<=[0-9} )])(?P<bare>[a-z]{2,}))'
  r'(?: *\^ *\{? *(?P<power>[23]) *\}?)?$'
)
POWERS = {'square': '2', 'sq': '2', 'cubic': '3'}


def split_unit(text: str) -> tuple[str, str | None]:
  """Returns (value, unit) for a text that ends in a known unit, else (text, None)."""
  match = UNIT.search(text)
  if not match or not text[: match.start()].strip():
    return text, None
  words = (match['text'] or match['bare'] or '°').strip(' .').lower().split()
  power = match['power'] or '1'
  if words and words[0] in POWERS:
    power, words = POWERS[words[0]], words[1:]
  if len(words) != 1 or words[0] not in UNITS:
    return text, None
  return text[: match.start()].strip(), UNITS[words[0]] + power
