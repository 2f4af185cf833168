r"""Implements the rule `math`: compares LaTeX answers by meaning.

1. both answers are rewritten in the normal spelling (latex/spelling.py);
2. `read` splits them at the marks outside all brackets into lists, tuples, intervals,
   matrices and the like, whose parts are expressions;
3. numbers and closed forms are compared by value (latex/trees.py);
4. expressions with variables are compared by math-verify (latex/symbolic.py).

docs/guide/data_and_rewards.md lists what the rule accepts.
"""

import re
from typing import Any, NamedTuple

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex import spelling, symbolic, trees

LONGEST_LATEX = 1000  # characters of an answer that is parsed


def math(
  answer: str, content: str | None, text: str, *, strict: bool = True
) -> Verdict:
  r"""Verifies the LaTeX in the last \boxed{}, or else in the last answer line.

  Call this only in a process that can be killed: math-verify may hang. An error inside
  math-verify leaves the response undecided. A majority vote compares spellings.

  If `strict`, the answer must be calculated as far as the right answer. Otherwise
  math-verify alone decides: it evaluates, rounds and reads only the last side of a
  chain of equations.
  """
  del text
  if content is None:
    return Verdict(False, 'no box and no answer line', None)
  response = ' '.join(content.split())
  if not response:
    return Verdict(False, 'an empty box', None)
  if response == ' '.join(answer.split()):
    return Verdict(True, 'equal character by character', response)
  if len(content) > max(LONGEST_LATEX, 2 * len(answer)):
    return Verdict(False, f'more than {LONGEST_LATEX} characters', response)
  try:
    equal = (_equal if strict else symbolic.equivalent)(answer, content)
  except MemoryError:
    raise  # the worker process must be replaced
  except Exception as error:  # sympy raises many types
    return Verdict(None, f'math-verify failed: {type(error).__name__}', response)
  if equal is None:
    return answers.unusable(answer, 'an expression')._replace(answer=response)
  return answers.compared(equal, response)


def _equal(answer, response):
  """Compares LaTeX answers strictly; returns None if `answer` is unreadable."""
  gold_text = spelling.spell(answer)
  response_text = spelling.spell(response)
  (letter, gold_value), (response_letter, value) = map(
    spelling.split_choice, (gold_text, response_text)
  )
  if response_letter == gold_text:  # a bare letter is a choice beside another choice
    letter = gold_text
    gold_value = ''
  if letter and response_letter and letter != response_letter:
    return False
  if gold_value and value:
    gold_text = gold_value
    response_text = value
  elif letter and response_letter and (tree := trees.parse(gold_value or value)):
    return not trees.symbols(tree)  # one has the letter alone, the other a number too
  # 1,000 is either a number or a list.
  for commas_group in (True, False) if ',' in gold_text + response_text else (True,):
    try:
      gold = read(gold_text, commas_group)
    except ValueError:
      return None
    try:
      parsed = read(response_text, commas_group)
    except ValueError:
      return False
    if _same(gold, parsed):
      return True
  return False


WORDS = re.compile(
  r',? *\\text *\{ *(?:,|,? *(?:and|or)) *\}|,? *(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])'
)
COMMA = re.compile(r'(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])')
OR = re.compile(r',? *\\text *\{ *or *\}| or ')
MATRIX = re.compile(
  r'\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}|'
  r'[(\[] *\\begin\{(?:array\} *\{[clr| ]*|matrix)\}(.*)'
  r'\\end\{(?:array|matrix)\} *[)\]]',
  re.S,
)
ROW_END = re.compile(rf'{spelling.ROW} *\[ *[0-9.]+ *(?:pt|em|ex|mm|cm)\]')
REVERSED = re.compile(  # an interval, perhaps with reversed brackets
  r'(^|∈ *)([\[\]])([^\[\](){}]+[,;][^\[\](){}]+)([\[\]])$'
)
FLIPPED = str.maketrans('<>≤≥', '><≥≤')


class Answer(NamedTuple):
  kind: str  # expression, list or set, tuple or interval, union, matrix, row, equation
  parts: tuple[Any, ...]  # answers, or the text of an expression
  brackets: str = ''  # of a tuple or interval, such as '[)'
  name: str = ''  # the variable before = or between two bounds, no spaces; '': none


def _expression(text):
  return Answer('expression', (spelling.unwrap(text),))


def read(text: str, commas_group: bool) -> Answer:
  """Parses the structure of an answer in the normal spelling.

  `commas_group` reads 1,000 outside all brackets as a thousand, otherwise as a list.
  Raises a ValueError for unbalanced brackets and empty expressions.
  """
  parts = OR.split(text)
  if len(parts) > 1 and all(re.search('[<>≤≥∈]', part) for part in parts):
    text = spelling.UNION.join(parts)  # x < 0 or x > 1
  text = spelling.unwrap(WORDS.sub(',', text))
  text = spelling.UNION.join(map(_upright, text.split(spelling.UNION)))
  if matrix := MATRIX.fullmatch(text):
    inner = ROW_END.sub(spelling.ROW, matrix[2] or matrix[3] or '').strip(
      ' ' + spelling.ROW
    )
    if not inner:
      raise ValueError('an empty expression')
    rows = [row.split('&') for row in inner.split(spelling.ROW)]
    cells = tuple(Answer('row', tuple(map(_expression, row))) for row in rows)
    return Answer('matrix', cells)
  if commas_group and not re.search(r'[(\[\x02]', text):
    text = COMMA.sub(lambda match: match[0].replace(',', spelling.THOUSANDS), text)
  parts, marks = spelling.split(text, ',;')
  return Answer('list', tuple(map(_signs, parts))) if marks else _signs(text)


def _upright(interval):
  """Turns reversed brackets around: ]0, 1[ becomes (0, 1)."""
  return REVERSED.sub(
    lambda m: m[1] + '[('[m[2] == ']'] + m[3] + '])'[m[4] == '['], interval.strip()
  )


def _signs(text):
  r"""Parses an answer; an answer with \pm becomes a list of two answers."""
  if text.count('±') == 1:
    return Answer('list', tuple(_relation(text.replace('±', sign)) for sign in '+-'))
  return _relation(text)


def _relation(text):
  parts, marks = spelling.split(text, spelling.UNION)
  if marks and all(re.search('[<>≤≥∈]', part) for part in parts):
    answers_ = tuple(map(_relation, parts))
    names = {answer.name for answer in answers_}
    return Answer('union', answers_) if len(names) == 1 else _expression(text)
  sides, marks = spelling.split(text, '=<>≤≥∈≠')
  if not marks:
    return _single(text)
  if marks in ('=', '∈') and spelling.is_label(sides[0]):
    return _single(sides[1])._replace(name=sides[0].replace(' ', ''))
  if set(marks) == {'='}:
    return Answer('equation', tuple(map(_single, sides)))
  if set(marks) <= set('<>≤≥') and len(sides) <= 3:
    return _bounds(sides, marks)
  return _expression(text)


def _bounds(sides: list[str], marks):
  """Converts x < 2 or 0 < x < 1 to an interval; other inequalities stay expressions."""
  if marks[0] in '>≥':
    sides = sides[::-1]
    marks = marks[::-1].translate(FLIPPED)
  pairs = zip(marks, sides[1:], strict=True)
  inequality = ' '.join([sides[0], *(f'{m} {s}' for m, s in pairs)])
  if set(marks) - set('<≤'):  # both directions in one chain
    return _expression(inequality)
  if len(sides) == 2:
    left = _is_variable(sides[0])
    if left == _is_variable(sides[1]):
      return _expression(inequality)
    sides = ['-∞', *sides] if left else [*sides, '∞']
    marks = '<' + marks if left else marks + '<'
  if not _is_variable(sides[1]):
    return _expression(inequality)
  brackets = ('(' if marks[0] == '<' else '[') + (')' if marks[1] == '<' else ']')
  ends = tuple(map(_expression, (sides[0], sides[2])))
  return Answer('tuple', ends, brackets, sides[1].replace(' ', ''))


def _is_variable(text):  # such as x, f(x), \theta
  return spelling.is_label(text) and not re.search(r'[+*/^-]', text)


def _single(text):
  """Parses a set, tuple, interval or union; any other text is an expression."""
  text = spelling.unwrap(text)
  if not text:
    raise ValueError('an empty expression')
  parts, marks = spelling.split(text, spelling.UNION)
  if marks:
    return Answer('union', tuple(map(_single, parts)))
  if text[0] in '([' + spelling.SET_OPEN and spelling.closing(text, 0) == len(text) - 1:
    inner, marks = spelling.split(text[1:-1], ',;')
    brackets = text[0] + text[-1]
    if brackets == spelling.SET_OPEN + spelling.SET_CLOSE:
      return Answer('list', tuple(map(_relation, inner)))
    if len(set(marks)) == 1 and set(brackets) <= set('()[]'):
      return Answer('tuple', tuple(map(_single, inner)), brackets)
  return _expression(text)


def _same(gold, response):
  if response.kind == 'equation':
    return _same_equation(gold, response)
  if gold.name and response.name and gold.name != response.name:
    return False
  forms = [(x.kind, x.brackets, len(x.parts)) for x in (gold, response)]
  if forms[0] != forms[1]:
    return False
  if gold.kind == 'expression':
    return _same_expression(gold.parts[0], response.parts[0])
  if gold.kind not in ('list', 'union'):
    return all(_same(a, b) for a, b in zip(gold.parts, response.parts, strict=True))
  unpaired = list(response.parts)  # the order does not matter
  for part in gold.parts:
    partner = next((other for other in unpaired if _same(part, other)), None)
    if partner is None:
      return False
    unpaired.remove(partner)
  return True


def _same_equation(gold, response):
  """Returns whether an equation states the right answer.

  If the right answer is an equation, math-verify compares the two. Otherwise every side
  must equal the right answer; a label may come first (`x = 4/2 = 2`). So neither
  3 = 2 nor 1 + 1 = 2 states 2.
  """
  sides = response.parts
  if gold.kind == 'equation':
    if len(gold.parts) != 2 or len(sides) != 2:
      return False
    if any(x.kind != 'expression' for x in (*gold.parts, *sides)):
      return all(map(_same, gold.parts, sides))
    texts = [[str(x.parts[0]) for x in y.parts] for y in (gold, response)]
    gold_tree, response_tree = (
      ('equation', *map(trees.parse, sides)) for sides in texts
    )
    gold_text, response_text = map(' = '.join, texts)
    if None in gold_tree + response_tree:
      return _same_symbols(gold_text, response_text)
    return _same_trees(gold_text, response_text, gold_tree, response_tree)
  label = str(sides[0].parts[0])
  if spelling.is_label(label) and len(sides) > 2:
    if gold.name and gold.name != label.replace(' ', ''):
      return False
    sides = sides[1:]
  return all(_same(gold, side) for side in sides)


def _same_expression(gold, response):
  gold_words = _words(gold)
  response_words = _words(response)
  if gold_words is not None and gold_words == response_words:
    return True
  gold, gold_unit = spelling.split_unit(gold)
  response, response_unit = spelling.split_unit(response)
  if gold_unit and response_unit and gold_unit != response_unit:
    return False
  if (gold_words and '\\text' in gold) or (response_words and '\\text' in response):
    return False
  gold_tree = trees.parse(gold)
  response_tree = trees.parse(response)
  # Functions and words are outside the grammar. A response outside never states a
  # right answer inside the grammar. A response inside may state a right answer outside
  # the grammar, unless the response has arithmetic left to do.
  if gold_tree is None:
    if response_tree and {'sum', 'product', 'power'} & set(
      trees.operations(response_tree)
    ):
      return False
    return _same_symbols(gold, response)
  return response_tree is not None and _same_trees(
    gold, response, gold_tree, response_tree
  )


def _same_trees(gold, response, gold_tree, response_tree):
  """Compares two parsed expressions; the limit on products applies to their trees."""
  gold_value = trees.plain(gold_tree)
  value = trees.plain(response_tree)
  if gold_value is not None and value is not None:
    return gold_value == value
  # The response leaves no more operations to carry out than the right answer.
  if value is None:
    allowed = trees.operations(gold_tree)
    remaining = trees.operations(response_tree)
    if allowed['root']:
      remaining['root'] = 0
    if gold_value is not None or not remaining <= allowed:
      return False
  variables = trees.symbols(gold_tree)
  if variables != trees.symbols(response_tree):
    return False
  if variables:
    return _same_symbols(gold, response, response.replace('*', ' '))
  return trees.equal(gold_tree, response_tree)


WORD = re.compile(r"[A-Za-z][A-Za-z' -]+")


def _words(text):
  r"""Returns an answer in words, bare or in \text{}, in lower case; None for formulas.

  The name of a choice, a single capital letter as in (B), stays a capital.
  """
  bare = ' '.join(spelling.TEXT.sub(r' \1 ', text).split())
  if choice := re.fullmatch(r'\(?([A-Z])\)?', bare):
    return choice[1] if spelling.TEXT.search(text) or len(bare) == 3 else None
  return bare.lower() if WORD.fullmatch(bare) else None


# Not the start of a repeating decimal.
DECIMAL = re.compile(r'([0-9]*)\.([0-9]+)(?![0-9]| *\\overline)')


def _same_symbols(gold, response, parts: str | None = None):
  """Compares by math-verify if `parts`, by default `response`, has no new parts."""
  # Back to LaTeX: math-verify does not know the normal spelling, and rounds decimals.
  gold, response, parts = (
    DECIMAL.sub(
      lambda m: rf'\frac{{{m[1]}{m[2]}}}{{1{"0" * len(m[2])}}}',
      text.translate(LATEX_OF),
    )
    for text in (gold, response, parts or response)
  )
  return symbolic.no_new_parts(gold, parts) and symbolic.equivalent(gold, response)


LATEX_OF = str.maketrans(
  {
    '∞': r'\infty ',
    'π': r'\pi ',
    '≤': r'\le ',
    '≥': r'\ge ',
    '≠': r'\ne ',
    '*': r'\cdot ',
    '∈': r'\in ',
    spelling.UNION: r'\cup ',
    '±': r'\pm ',
    '°': r'^\circ ',
    '%': r'\%',
    spelling.THOUSANDS: '',
    spelling.SET_OPEN: r'\{',
    spelling.SET_CLOSE: r'\}',
    spelling.ROW: r'\\',
  }
)
