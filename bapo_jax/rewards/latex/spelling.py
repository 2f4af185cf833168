r"""Normalises LaTeX: one spelling for signs, spaces, sizes, wrappers and units.

Text with a meaning is kept: a space between two numerals stays a space, unless it
groups the digits of one number by three.
"""

import re
import unicodedata

CHARACTERS = str.maketrans(
  {
    **dict.fromkeys('\x02\x03\x04\x1f', '?'),  # markers, see below
    **dict.fromkeys('\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d', '-'),
    **dict.fromkeys('\u00d7\u00b7\u22c5\u2217\u2219\u2715\u2716\uff0a', '*'),
    **dict.fromkeys(
      ['\u00a0', '\u202f', *map(chr, range(0x2002, 0x200B)), *'\n\r\t~'], ' '
    ),
    **dict.fromkeys('\u00f7\u2044\u2215\uff0f', '/'),
    **{'\uff0b': '+', '\uff1d': '=', '\uff08': '(', '\uff09': ')', '\u00ba': '°'},
    **{
      fraction: r'\frac{{{}}}{{{}}}'.format(
        *unicodedata.normalize('NFKC', fraction).split('\u2044')
      )
      for fraction in '¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞'
    },
  }
)
UNION = '\u222a'
THOUSANDS = '\x1f'  # marker of an unambiguous thousands separator
GROUP_MARK = r'\{\\?,\}|,\\[!,]|\\[,;: ]|[~\u00a0\u2009\u202f]'  # not a plain space
SEPARATOR = re.compile(rf'(?<=\d)(?:{GROUP_MARK}| )(?=\d{{3}}(?!\d))', re.ASCII)
# Markers of \{ and \}; { and } only group.
SET_OPEN = '\x02'
SET_CLOSE = '\x03'
ROW = '\x04'  # marker of \\ between the rows of a matrix
COMMANDS = {  # command after a backslash -> its replacement
  None: '',  # a dollar sign without a backslash
  ' ': ' ',
  **{
    name: target
    for target, names in {
      '': 'left right displaystyle textstyle big Big bigl bigr Bigl Bigr ! $ ( ) [ ] '
      'normalsize large Large LARGE huge Huge boldsymbol bm pmb bf rm underline '
      'ensuremath',
      ' ': 'quad qquad , ; :',
      r'\frac': 'dfrac tfrac cfrac nicefrac sfrac',
      r'\text': 'mathrm mathbf mathit mathsf mathtt textbf textit textrm textsf texttt '
      'emph mbox textnormal',
      r'\text{ or }': 'lor vee',
      '√': 'surd',
      '(': 'lparen',
      ')': 'rparen',
      '[': 'lbrack',
      ']': 'rbrack',
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
      UNION: 'cup bigcup',
      SET_OPEN: 'lbrace {',
      SET_CLOSE: 'rbrace }',
    }.items()
    for name in names.split()
  },
}
CURRENCY = '€£¥₹₩'
COMMAND = re.compile(
  rf'\\([a-zA-Z]+|[!,;:$(){{}}%\[\] ])|\$|(?<![{CURRENCY}])[{CURRENCY}](?![{CURRENCY}])'
)
DEGREE = re.compile(
  r'\^ *(?:\\circ(?![a-zA-Z])|\{ *\\circ *\}|'
  r'\\(?:text|mathrm) *\{ *o *\}|\{ *\\(?:text|mathrm) *\{ *o *\} *\})'
)
RAISED = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻', '0123456789+-')
LOWERED = str.maketrans('₀₁₂₃₄₅₆₇₈₉', '0123456789')
SCRIPT = re.compile('([⁰¹²³⁴-⁹⁺⁻]+)|[₀-₉]+')
ROOT = re.compile(r'√ *(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?))')
DOTS = re.compile(r'(\.\d*)\\dot *\{?(\d)\}?(?:(\d*)\\dot *\{?(\d)\}?)?', re.ASCII)
BAR = re.compile(r'(?<=[.0-9])\\bar(?![a-zA-Z])')
MIXED = re.compile(r'(?<![\d.,/^_}\x1f])(\d+) +(\d+) */ *(\d+)(?![\d.])', re.ASCII)
OVER = re.compile(r'\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}')
TEXT = re.compile(r'\\text *\{([^{}]*)\}')
WRAPPER = re.compile(r'(?:\\text *)?\{')
PERCENT = re.compile(r'\\text *\{ *per ?cent *\}|(?<=\d) *per ?cent$')


def spell(text: str) -> str:
  r"""Returns the text in the normal spelling.

  For example, `\dfrac` becomes `\frac`, U+2212 becomes -, and `\left` disappears.
  """
  text = SCRIPT.sub(_script, text.translate(CHARACTERS))
  text = SEPARATOR.sub(THOUSANDS, text).replace(r'\\', ROW)
  text = COMMAND.sub(_command, DEGREE.sub('°', text))
  # Repeating decimals, roots, mixed numbers and fractions have several spellings.
  text = BAR.sub(r'\\overline', DOTS.sub(r'\1\\overline{\2\3\4}', text))
  text = ROOT.sub(r'\\sqrt{\1\2}', text).replace('√', r'\sqrt')
  text = MIXED.sub(r'\1\\frac{\2}{\3}', text)
  if r'\over' in text:
    text = OVER.sub(r'\\frac{\1}{\2}', f'{{{text}}}')
  return unwrap(PERCENT.sub('%', text))


def _script(match: re.Match[str]):
  digits = match[0].translate(RAISED).translate(LOWERED)
  return ('^' if match[1] else '_') + (f'{{{digits}}}' if len(digits) > 1 else digits)


def _command(match: re.Match[str]):
  replacement = COMMANDS.get(match[1], match[0])
  begin, end = match.span()
  around = match.string[begin - 1 : begin], match.string[end : end + 1]
  # 5\$6 is not 56; the negative space \! does join digits.
  joins = not replacement and match[1] != '!' and all(c.isdigit() for c in around)
  return ' ' if joins else replacement


def unwrap(text: str) -> str:
  r"""Removes spaces, a final full stop or \\, and braces or \text{} around the text."""
  while True:
    text = text.strip().strip(' ' + ROW)
    bare = text.removesuffix('.')
    opening = WRAPPER.match(bare)
    if wrapped := TEXT.fullmatch(bare):
      bare = wrapped[1]
    elif opening and closing(bare, opening.end() - 1) == len(bare) - 1:
      bare = bare[opening.end() : -1]
    if bare == text:
      return text
    text = bare


OPEN = '([{' + SET_OPEN
CLOSE = ')]}' + SET_CLOSE


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
  parts = []
  separators = ''
  depth = 0
  begin = 0
  for i, character in enumerate(text):
    depth += (character in OPEN) - (character in CLOSE)
    if depth < 0:
      break
    if depth == 0 and character in marks:
      parts.append(text[begin:i].strip())
      separators += character
      begin = i + 1
  if depth:
    raise ValueError('unbalanced brackets')
  return [*parts, text[begin:].strip()], separators


# Commands of Greek letters that all modules accept as variables.
LETTERS = (
  'alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|omega'
)
# Labels such as `x =`, `f(2) =`, `m+n =`: letters with indices and arguments.
GREEK = rf'\\(?:{LETTERS}|phi|varphi|angle|triangle|overline|ell)(?![a-zA-Z])'
LABEL = re.compile(
  r'\\text *\{[A-Za-z ]+\}|'
  rf"(?:[A-Za-z(]|{GREEK})(?:[A-Za-z0-9 ()_{{}},^+*/'-]|{GREEK})*"
)
DENIAL = re.compile(r'\b(?:not|never|no|wrong|false|incorrect)\b', re.I)


def is_label(text: str) -> bool:
  """Returns whether the left side of an equation is a label, such as x, f(2) or m+n."""
  return bool(
    LABEL.fullmatch(text) and re.search('[A-Za-z]', text) and not DENIAL.search(text)
  )


CHOICE = re.compile(
  r'(?:\\text *\{ *\(?([A-J])(?:[).:]+ *\}|\} *[).:]+)|'
  r'\(([A-J])\) +(?=[0-9]|\\(?:frac|sqrt))|\(([A-J])\)$|'
  r'(?i:(?:\\text *\{ *)?(?:the +)?(?:final +)?answer(?: +is *:?|:) *\}?)) *'
)


def split_choice(text: str) -> tuple[str, str]:
  r"""Splits the letter of a choice from an answer: `\text{(B) } 42` is ('B', '42').

  The letter or the answer may be ''. A letter without parentheses is not a choice. Also
  removes the words `Answer:`.
  """
  match = CHOICE.match(text)
  if not match:
    return '', text
  return match[1] or match[2] or match[3] or '', text[match.end() :]


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
  dollar dollars usd; cent cents; euro euros eur
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
  name = match['text'] or match['bare'] or '°'
  words = name.lower().replace('.', ' ').split()
  power = match['power'] or '1'
  if words and words[0] in POWERS:
    power = POWERS[words[0]]
    words = words[1:]
  if len(words) != 1 or words[0] not in UNITS:
    return text, None
  return text[: match.start()].strip(), UNITS[words[0]] + power
