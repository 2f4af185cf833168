r"""Parses an answer into lists, sets, tuples, intervals and matrices of expressions.

`read` splits an answer in the normal spelling (spelling.py) at the marks outside all
brackets. A part without such a structure is an expression; the caller compares it.
"""

import re
from typing import NamedTuple

from bapo_jax.rewards.latex import spelling

WORDS = re.compile(
  r',? *\\text *\{ *(?:,|,? *(?:and|or)) *\}|,? *(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])'
)
COMMA = re.compile(r'(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])')
MATRIX = re.compile(r'\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}', re.S)
FLIPPED = str.maketrans('<>≤≥', '><≥≤')


class Answer(NamedTuple):
  """An answer and its parts."""

  kind: str  # expression, list, set, tuple, union, matrix, bounds or equation
  parts: tuple['Answer | str', ...]  # of an expression: its text
  brackets: str = ''  # of a tuple or interval, such as '[)'
  name: str = ''  # the variable before = or between two bounds; '': none


def _expression(text: str) -> Answer:
  return Answer('expression', (spelling.unwrap(text),))


def read(text: str, commas_group: bool) -> Answer:
  """Parses the structure of an answer.

  Args:
    text: the answer in the normal spelling.
    commas_group: read 1,000 as a thousand if it is outside all brackets; else as a
      list.

  Raises:
    ValueError: the brackets are unbalanced, or a part is empty.
  """
  text = spelling.unwrap(WORDS.sub(',', text))
  if matrix := MATRIX.fullmatch(text):
    rows = [row.split('&') for row in matrix[2].split(spelling.ROW)]
    cells = tuple(Answer('list', tuple(map(_expression, row))) for row in rows)
    return Answer('matrix', cells)
  if commas_group and not re.search(r'[(\[\x02]', text):
    text = COMMA.sub(lambda match: match[0].replace(',', spelling.THOUSANDS), text)
  if not text:
    raise ValueError('an empty part')
  parts, _ = spelling.split(text, ',;')
  if len(parts) > 1:
    return Answer('list', tuple(map(_signs, parts)))
  return _signs(text)


def _signs(text: str) -> Answer:
  r"""Parses an answer; one with \pm becomes a list of two."""
  if text.count('±') == 1:
    plus, minus = (_relation(text.replace('±', sign)) for sign in '+-')
    return Answer('list', (plus, minus))
  return _relation(text)


def _relation(text: str) -> Answer:
  sides, marks = spelling.split(text, '=<>≤≥∈≠')
  if not marks:
    return _single(text)
  if marks == '∈' and spelling.is_label(sides[0]):
    return _single(sides[1])._replace(name=sides[0])
  if set(marks) == {'='}:
    if spelling.is_label(sides[0]) and len(sides) == 2:
      return _single(sides[1])._replace(name=sides[0])
    return Answer('equation', tuple(map(_single, sides)))
  if set(marks) <= set('<>≤≥') and len(sides) <= 3:
    return _bounds(sides, marks)
  return _expression(text)


def _bounds(sides: list[str], marks: str) -> Answer:
  """Makes an interval of x < 2 or 0 < x < 1; other inequalities stay expressions."""
  if marks[0] in '>≥':
    sides, marks = sides[::-1], marks[::-1].translate(FLIPPED)
  inequality = ' '.join(
    [sides[0], *(f'{m} {s}' for m, s in zip(marks, sides[1:], strict=True))]
  )
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
  return Answer('bounds', ends, brackets, sides[1])


def _is_variable(text: str) -> bool:
  r"""Returns whether a side of an inequality is the bounded one: x, f(x), \theta."""
  return spelling.is_label(text) and not re.search(r'[+*/^-]', text)


def _single(text: str) -> Answer:
  """Parses a set, tuple, interval or union; any other text is an expression."""
  text = spelling.unwrap(text)
  if not text:
    raise ValueError('an empty part')
  parts, marks = spelling.split(text, spelling.UNION)
  if marks:
    return Answer('union', tuple(map(_single, parts)))
  if text[0] in '([' + spelling.SET_OPEN and spelling.closing(text, 0) == len(text) - 1:
    inner, _ = spelling.split(text[1:-1], ',')
    brackets = text[0] + text[-1]
    if brackets == spelling.SET_OPEN + spelling.SET_CLOSE:
      return Answer('set', tuple(map(_relation, inner)))
    if len(inner) > 1 and set(brackets) <= set('()[]'):
      return Answer('tuple', tuple(map(_single, inner)), brackets)
  return _expression(text)


WORD = re.compile(r"[A-Za-z][A-Za-z' -]+")


def words(text: str) -> str | None:
  r"""Returns bare words or the words in \text{} in lower case; None for mathematics.

  A single capital letter, the name of a choice, stays a capital.
  """
  bare = ' '.join(spelling.TEXT.sub(r' \1 ', text).split())
  if choice := re.fullmatch(r'\(?([A-Z])\)?', bare):
    return choice[1] if spelling.TEXT.search(text) or len(bare) == 3 else None
  return bare.lower() if WORD.fullmatch(bare) else None
