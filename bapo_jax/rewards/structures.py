r"""An answer as lists, sets, tuples, intervals and matrices of expressions.

`read` splits an answer in the one spelling (spelling.py) at the marks that no bracket
encloses. A part that is none of these is an expression, which the caller compares.
"""

import re
from typing import NamedTuple

from bapo_jax.rewards.spelling import (
  ROW,
  SET_CLOSE,
  SET_OPEN,
  TEXT,
  THOUSANDS,
  UNION,
  closing,
  is_label,
  split,
  unwrap,
)

WORDS = re.compile(
  r',? *\\text *\{ *(?:,|,? *(?:and|or)) *\}|,? *(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])'
)
COMMA = re.compile(r'(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])')
MATRIX = re.compile(r'\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}', re.S)
FLIPPED = str.maketrans('<>≤≥', '><≥≤')


class Answer(NamedTuple):
  """One answer and its parts."""

  kind: str  # expression, list, set, tuple, union, matrix, bounds or equation
  parts: tuple['Answer | str', ...]  # the text of an expression
  brackets: str = ''  # of a tuple or interval, '[)'
  name: str = ''  # of the variable: what stands before = or between < and <


def expression(text: str) -> Answer:
  """An answer without parts."""
  return Answer('expression', (unwrap(text),))


def read(text: str, commas_group: bool) -> Answer:
  """The structure of an answer.

  Args:
    commas_group: 1,000 is a thousand, where no bracket encloses it; else a list.

  Raises:
    ValueError: a bracket does not close, or a part is missing.
  """
  text = unwrap(WORDS.sub(',', text))
  if found := MATRIX.fullmatch(text):
    rows = [row.split('&') for row in found[2].split(ROW)]
    cells = tuple(Answer('list', tuple(map(expression, row))) for row in rows)
    return Answer('matrix', cells)
  if commas_group:
    text = COMMA.sub(_hard, text) if not re.search(r'[(\[\x02]', text) else text
  if not text:
    raise ValueError('a part is missing')
  parts, _ = split(text, ',;')
  if len(parts) > 1:
    return Answer('list', tuple(_both(part) for part in parts))
  return _both(text)


def _hard(found: re.Match[str]) -> str:
  return found[0].replace(',', THOUSANDS)


def _both(text: str) -> Answer:
  r"""One answer, or the two that \pm stands for."""
  if text.count('±') == 1:
    plus, minus = (_relation(text.replace('±', sign)) for sign in '+-')
    return Answer('list', (plus, minus))
  return _relation(text)


def _relation(text: str) -> Answer:
  sides, marks = split(text, '=<>≤≥∈≠')
  if not marks:
    return _single(text)
  if marks in ('∈',) and is_label(sides[0]):
    return _single(sides[1])._replace(name=sides[0])
  if set(marks) == {'='}:
    if is_label(sides[0]) and len(sides) == 2:
      return _single(sides[1])._replace(name=sides[0])
    return Answer('equation', tuple(_single(side) for side in sides))
  if set(marks) <= set('<>≤≥') and len(sides) <= 3:
    return _bounds(sides, marks)
  return expression(text)


def _bounds(sides: list[str], marks: str) -> Answer:
  """An interval from x < 2 or 0 < x < 1; other inequalities stay expressions."""
  if marks[0] in '>≥':
    sides, marks = sides[::-1], marks[::-1].translate(FLIPPED)
  whole = ' '.join(
    [sides[0], *(f'{m} {s}' for m, s in zip(marks, sides[1:], strict=True))]
  )
  if set(marks) - set('<≤'):
    return expression(whole)
  if len(sides) == 2:
    left = is_variable(sides[0])
    if left == is_variable(sides[1]):
      return expression(whole)
    sides = ['-∞', *sides] if left else [*sides, '∞']
    marks = '<' + marks if left else marks + '<'
  if not is_variable(sides[1]):
    return expression(whole)
  brackets = ('(' if marks[0] == '<' else '[') + (')' if marks[1] == '<' else ']')
  ends = tuple(map(expression, (sides[0], sides[2])))
  return Answer('bounds', ends, brackets, sides[1])


def is_variable(text: str) -> bool:
  """Whether a side of an inequality is what it bounds: x, f(x), \\theta."""
  return is_label(text) and not re.search(r'[+*/^-]', text)


def _single(text: str) -> Answer:
  """A set, tuple, interval or union, or else an expression."""
  text = unwrap(text)
  if not text:
    raise ValueError('a part is missing')
  parts, marks = split(text, UNION)
  if marks:
    return Answer('union', tuple(map(_single, parts)))
  if text[0] in '([' + SET_OPEN and closing(text, 0) == len(text) - 1:
    inner, _ = split(text[1:-1], ',')
    brackets = text[0] + text[-1]
    if brackets == SET_OPEN + SET_CLOSE:
      return Answer('set', tuple(map(_relation, inner)))
    if len(inner) > 1 and set(brackets) <= set('()[]'):
      return Answer('tuple', tuple(map(_single, inner)), brackets)
  return expression(text)


WORD = re.compile(r"[A-Za-z][A-Za-z' -]+")


def words(text: str) -> str | None:
  r"""The text of a \text{} or of bare words, in small letters; None of mathematics."""
  bare = ' '.join(TEXT.sub(r' \1 ', text).split())
  if choice := re.fullmatch(r'\(?([A-Z])\)?', bare):
    return choice[1] if TEXT.search(text) or len(bare) == 3 else None
  return bare.lower() if WORD.fullmatch(bare) else None
