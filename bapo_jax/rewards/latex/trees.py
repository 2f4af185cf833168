r"""Parses numbers and closed forms, and compares their values.

LaTeX in the normal spelling (spelling.py) becomes a tree: a tuple whose first entry is
its kind (num, mixed, const, sym, inf, base, neg, add, mul, div, pow, root, percent).
Sum signs, functions, factorials, integrals and words are outside the grammar. Python
never evaluates any of the text.
"""

import collections
import functools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from bapo_jax.rewards.latex.spelling import LETTERS, THOUSANDS

Tree = tuple[Any, ...]

DEEPEST = 40  # nested brackets and arguments
LARGEST_EXPONENT = 400  # of ten
MOST_DIGITS = 10_000  # to which two values are compared
TOKEN = re.compile(
  r'(?P<numeral>[0-9]*\.[0-9]*\\overline *(?:\{[0-9]+\}|[0-9])(?![0-9])|'
  rf'(?:[0-9]{{1,3}}(?:[,{THOUSANDS}][0-9]{{3}})+(?![0-9])|[0-9]+)'
  r'(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+(?:[eE][+-]?[0-9]{1,3})?)'
  # `spell` has turned the constants \mathrm{i} and \mathrm{e} into \text.
  r'|\\text *\{ *(?P<constant>i|e) *\}|(?P<command>\\[a-zA-Z]+)|(?P<letter>[a-zA-Z])'
  r'|(?P<symbol>[-+*/^_(){}%π∞\[\]])|(?P<blank> +)|(?P<other>.)',
  re.DOTALL,
)
GREEK = re.compile(rf'\\(?:{LETTERS}|ell)')
# Tokens that end a product; any other next token continues the product.
ENDS = ('', '+', '-', ')', '}', ']', '^', '_', '%', '∞')


def _numeral(text):
  r"""Returns the value of a numeral, or of a repeating decimal such as 0.1\overline{6}.

  Raises a ValueError for a period of nines: 0.\overline{9} is left to calculate.
  """
  decimal, _, period = text.partition(r'\overline')
  period = period.strip(' {}')
  if period:
    whole, _, decimals = decimal.partition('.')
    if len(text) > 1000 or not period.strip('9'):
      raise ValueError(f'{text[:20]} is too long, or repeats 9')
    start = int((whole + decimals) or '0')
    end = int(whole + decimals + period)
    return Fraction(end - start, 10 ** len(decimals) * (10 ** len(period) - 1))
  digits = text.replace(',', '').replace(THOUSANDS, '').lower()
  number, _, exponent = digits.partition('e')
  if abs(int(exponent or 0)) > LARGEST_EXPONENT or len(number) > 1000:
    raise ValueError(f'{text[:20]} is too large')
  return Fraction(number.rstrip('.')) * Fraction(10) ** int(exponent or 0)


@functools.lru_cache(1024)  # the responses to a problem share its right answer
def parse(text: str) -> Tree | None:
  """Parses an expression; returns None for text outside the grammar."""
  tokens = []
  for match in TOKEN.finditer(text.strip()):
    kind = match.lastgroup or 'other'
    if kind == 'other':
      return None
    if kind != 'blank':
      tokens.append(match[kind])
  try:
    parser = _Parser(tokens)
    tree = parser.sum()
    parser.expect('')
    return tree
  except ValueError:
    return None


class _Parser:
  """Parses tokens by recursive descent: sum, term, factor, atom.

  Its methods raise a ValueError if the tokens are outside the grammar.
  """

  def __init__(self, tokens: list[str]):
    self.tokens = [*tokens, '']  # '' marks the end
    self.at = 0
    self.depth = 0

  def peek(self) -> str:
    return self.tokens[self.at]

  def next(self) -> str:
    self.at += 1
    return self.tokens[self.at - 1]

  def accept(self, *tokens: str) -> str:
    return self.next() if self.peek() in tokens else ''

  def expect(self, token: str) -> None:
    if self.next() != token:
      raise ValueError(f'missing {token!r}')

  def sum(self) -> Tree:
    terms = []
    sign = self.accept('+', '-') or '+'
    while sign:
      term = self.term()
      terms.append(('neg', term) if sign == '-' else term)
      sign = self.accept('+', '-')
    return terms[0] if len(terms) == 1 else ('add', *terms)

  def term(self) -> Tree:
    tree = self.factor()
    while (token := self.peek()) not in ENDS:
      if self.accept('*', '/'):
        negative = token == '/' and self.accept('-')  # 1/-2
        right = ('neg', self.factor()) if negative else self.factor()
        tree = ('mul' if token == '*' else 'div', tree, right)
        continue
      # A factor without a sign: 2x, or the mixed number 2\frac{1}{3}, perhaps with %.
      if token[0] in '0123456789.{[':
        raise ValueError('two numbers without a sign between them')
      right = self.factor()
      percent = right[0] == 'percent'
      match tree, right[1] if percent else right:
        case ('num', a), ('div', ('num', b), ('num', c)) if token == r'\frac':
          whole = a.denominator == b.denominator == c.denominator == 1
          if whole and c:
            mixed = ('mixed', a + b / c)
            tree = ('percent', mixed) if percent else mixed
            continue
      tree = ('mul', tree, right)
    return tree

  def factor(self) -> Tree:
    tree = self.atom()
    if self.accept('^'):
      tree = ('pow', tree, self.argument())
    return ('percent', tree) if self.accept('%') else tree

  def atom(self) -> Tree:
    self.depth += 1
    if self.depth > DEEPEST:
      raise ValueError(f'brackets or arguments nested more than {DEEPEST} deep')
    tree = self._atom(self.next())
    self.depth -= 1
    return tree

  def _atom(self, token):
    if token and token[0] in '.0123456789':
      if not self.accept('_'):
        return ('num', _numeral(token))
      return ('base', token, self.argument())
    if token in ('π', 'e', 'i'):
      return ('const', token)
    if token == '∞':
      return ('inf',)
    if token in ('(', '{'):
      tree = self.sum()
      self.expect(')' if token == '(' else '}')
      return tree
    if token == r'\frac':
      return ('div', self.argument(), self.argument())
    if token == r'\sqrt':
      degree: Tree = ('num', Fraction(2))
      if self.accept('['):
        degree = self.sum()
        self.expect(']')
      return ('root', self.argument(), degree)
    if token.isalpha() or GREEK.fullmatch(token):
      # Not a text: quotes in quotes would double its length with every level.
      name = (token, self.argument()) if self.accept('_') else token
      if name not in ('f', 'g', 'h') or self.peek() != '(':  # no functions
        return ('sym', name)
    raise ValueError(f'unexpected {token!r}')

  def argument(self) -> Tree:
    r"""Parses an argument: braces, or one digit, letter or command (\frac12: 1, 2)."""
    token = self.peek()
    if len(token) > 1 and token.isdigit():
      self.tokens[self.at] = token[1:]
      return ('num', Fraction(int(token[0])))
    if token in ('', '(', '-', '+', '*', '/'):
      raise ValueError('missing argument')
    return self.atom()


def plain(tree: Tree | None) -> Fraction | None:
  """Returns the value of a number in its usual notation; None for any other tree.

  The usual notations, with at most one sign, are an integer, a decimal, a fraction of
  these, a mixed number, a power of ten with or without a factor, and a percentage.
  """
  match tree:
    case ('num', value) | ('mixed', value):
      return value
    case (('neg' | 'percent') as kind, inner) if inner[0] != kind:
      value = plain(inner)
      scale = -1 if kind == 'neg' else Fraction(1, 100)
      return None if value is None else scale * value
    case (
      ('div', ('neg', ('num', _) as top), ('num', _) as bottom)  # -1/2
      | ('div', ('num', _) as top, ('neg', ('num', _) as bottom))  # 1/-2
    ):
      return plain(('neg', ('div', top, bottom)))
    case ('div', ('num', top), ('num', bottom)) if bottom != 0:
      return top / bottom
    case ('mul', ('num', factor), ('pow', *_) as power):
      value = plain(power)
      return None if value is None else factor * value
    case ('pow', ('num', base), exponent) if base == 10:
      number = plain(exponent)
      if number is None or number.denominator != 1 or abs(number) > LARGEST_EXPONENT:
        return None
      return Fraction(10) ** int(number)
  return None


def _parts(tree):
  return [part for part in tree[1:] if isinstance(part, tuple)]


def _nodes(tree):
  return {tree}.union(*map(_nodes, _parts(tree)))


def symbols(tree: Tree) -> set[str | Tree]:
  """Returns the variables of a tree: a letter or command, or (letter, index)."""
  return {node[1] for node in _nodes(tree) if node[0] == 'sym'}


def _flat(tree, kind):
  if tree[0] != kind:
    return [tree]
  return [part for inner in tree[1:] for part in _flat(inner, kind)]


def _factor_kind(tree):  # two factors of one kind can be multiplied
  if plain(tree) is not None:
    return 'number'
  if tree[0] == 'root' or (tree[0] == 'pow' and plain(tree[1]) is not None):
    return 'root'
  return tree[1] if tree[0] == 'const' else ''


def operations(tree: Tree) -> collections.Counter[str]:
  """Counts the operations left to carry out, by kind.

  The kinds are sum, product, power, root, fraction, sign and percent. An operation that
  cannot be carried out does not count: 2x + 3 has no sum, 2 + 3 has one; 2 sqrt(3) has
  no product, 2 * 3 has one.
  """
  counts: collections.Counter[str] = collections.Counter()
  if plain(tree) is not None or tree[0] in ('sym', 'const', 'inf', 'base'):
    return counts
  parts = _parts(tree)
  match tree:
    case ('add', *_):
      parts = _flat(tree, 'add')
      counts['sum'] += max(0, sum(not symbols(part) for part in parts) - 1)
      counts['sum'] += any(plain(part) == 0 for part in parts)
    case ('mul', *_):
      parts = _flat(tree, 'mul')
      kinds = collections.Counter(map(_factor_kind, parts))
      counts['product'] += sum(n - 1 for kind, n in kinds.items() if kind)
    case ('div', top, bottom):
      counts['fraction'] += 'div' in (top[0], bottom[0])
    case ('neg', inner):
      counts['sign'] += inner[0] == 'neg'
    case ('root', inner, _):
      counts['root'] += 1
      counts['root in root'] += operations(inner)['root']
    case ('pow', base, exponent) if not symbols(base):
      number = plain(exponent)
      integer = number is not None and number.denominator == 1
      counts['power' if integer or symbols(exponent) else 'root'] += 1
    case ('percent', *_):
      counts['percent'] += 1
  return sum((operations(part) for part in parts), counts)


def equal(gold: Tree, response: Tree) -> bool:
  """Returns whether two trees without variables have the same value.

  Values are compared to as many digits as different values need: two algebraic numbers
  that differ, differ by at least 10^-(degree * height) (Burnikel et al. 2001, "A
  separation bound for real algebraic expressions"). Trees of infinite values, of other
  bases, or of values that need more than MOST_DIGITS digits equal only themselves.
  A tree that divides by 0 equals nothing.
  """
  difference = ('add', gold, ('neg', response))
  try:
    degree = math.prod(map(_degree, _nodes(difference)))
    digits = 50 + int(degree * _height(difference))
    if digits < MOST_DIGITS:
      with mpmath.workdps(2 * digits):  # rounding errors stay far below the bound
        return bool(abs(_value(difference)) < mpmath.mpf(10) ** -digits)
  except ZeroDivisionError:  # no value equals nothing, not even itself
    return False
  except (ValueError, ArithmeticError):
    pass
  return gold == response


def _degree(node):
  """Returns the factor by which a node raises the degree of an algebraic number.

  No bound is known for π, e and irrational exponents. They count as degree 4, twice
  what coincidences require.
  """
  match node:
    case ('const', name):
      return 2 if name == 'i' else 4
    case ('root', _, ('num', degree)):
      return degree.numerator
    case ('pow', _, exponent):
      number = plain(exponent)
      return 4 if number is None else number.denominator
  return 1


def _height(tree):
  """Returns a bound on the decimal digits of a value's coefficients.

  Raises a ValueError for a power of more than MOST_DIGITS, without evaluating it.
  """
  match tree:
    case ('num', number) | ('mixed', number):
      return math.log10(max(abs(number.numerator), number.denominator))
    case ('pow', base, exponent):
      height = _height(exponent)  # raises for a tower of powers
      height += float(1 + abs(_value(exponent))) * _height(base)
      if not height < MOST_DIGITS:
        raise ValueError('a power is too large')
      return height
  return 1 + sum(1 + _height(part) for part in _parts(tree))


ARITHMETIC: dict[str, Callable[..., Any]] = {
  'neg': operator.neg,
  'add': lambda *values: sum(values, mpmath.mpf(0)),
  'mul': operator.mul,
  'div': operator.truediv,
  'pow': mpmath.power,
}


def _value(tree):
  match tree:
    case ('num', number) | ('mixed', number):
      return mpmath.mpf(number.numerator) / number.denominator
    case ('const', name):
      return {'π': mpmath.pi(), 'e': mpmath.e(), 'i': mpmath.mpc(0, 1)}[name]
    case (kind, *parts) if kind in ARITHMETIC:
      return ARITHMETIC[kind](*map(_value, parts))
    case ('root', inner, ('num', degree)) if degree.denominator == 1:
      value = _value(inner)
      if isinstance(value, mpmath.mpf) and value < 0 and degree % 2 == 1:
        return -mpmath.root(-value, degree)  # the real root, not a complex root
      return mpmath.root(value, degree)
  raise ValueError(f'{tree[0]} has no value')
