r"""Parses numbers and closed forms, and compares their values.

LaTeX in the normal spelling (spelling.py) becomes a tree: a tuple whose first entry is
its kind (num, mixed, const, sym, inf, base, neg, add, mul, div, pow, root, percent).
Sum signs, functions, factorials, integrals and words are outside the grammar. Python
never evaluates any of the text.
"""

import collections
import re
from fractions import Fraction
from typing import Any

import mpmath

from bapo_jax.rewards.latex.spelling import LETTERS, THOUSANDS

Tree = tuple[Any, ...]

DEEPEST = 40  # nested brackets
LARGEST_EXPONENT = 400  # of ten
TOKEN = re.compile(
  rf'(?P<numeral>(?:[0-9]{{1,3}}(?:[,{THOUSANDS}][0-9]{{3}})+(?![0-9])|[0-9]+)'
  r'(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+(?:[eE][+-]?[0-9]{1,3})?)'
  # `spell` has turned the constants \mathrm{i} and \mathrm{e} into \text.
  r'|\\text *\{ *(?P<constant>i|e) *\}|(?P<command>\\[a-zA-Z]+)|(?P<letter>[a-zA-Z])'
  r'|(?P<symbol>[-+*/^_(){}%π∞\[\]])|(?P<blank> +)|(?P<other>.)',
  re.DOTALL,
)
GREEK = re.compile(rf'\\(?:{LETTERS}|ell)')
# Tokens that end a product; any other next token continues the product.
ENDS = ('', '+', '-', ')', '}', ']', '^', '_', '%', '∞')


def _numeral(text: str) -> Fraction:
  digits = text.replace(',', '').replace(THOUSANDS, '').lower()
  number, _, exponent = digits.partition('e')
  if abs(int(exponent or 0)) > LARGEST_EXPONENT or len(number) > 1000:
    raise ValueError(f'{text[:20]} is too large')
  return Fraction(number.rstrip('.')) * Fraction(10) ** int(exponent or 0)


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
    self.tokens, self.at, self.depth = [*tokens, ''], 0, 0  # '' marks the end

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
    self.depth += 1
    if self.depth > DEEPEST:
      raise ValueError(f'brackets nested more than {DEEPEST} deep')
    terms, sign = [], self.accept('+', '-') or '+'
    while sign:
      term = self.term()
      terms.append(('neg', term) if sign == '-' else term)
      sign = self.accept('+', '-')
    self.depth -= 1
    return terms[0] if len(terms) == 1 else ('add', *terms)

  def term(self) -> Tree:
    tree = self.factor()
    while (token := self.peek()) not in ENDS:
      if self.accept('*', '/'):
        tree = ('mul' if token == '*' else 'div', tree, self.factor())
        continue
      # A factor without a sign: 2x, or the mixed number 2\frac{1}{3}.
      if token[0] in '0123456789.{[':
        raise ValueError('two numbers without a sign between them')
      right, mixed = self.factor(), None
      match tree, right:
        case ('num', a), ('div', ('num', b), ('num', c)) if token == r'\frac':
          whole = a.denominator == b.denominator == c.denominator == 1
          mixed = ('mixed', a + b / c) if whole and c else None
      tree = mixed or ('mul', tree, right)
    return tree

  def factor(self) -> Tree:
    tree = self.atom()
    if self.accept('^'):
      tree = ('pow', tree, self.argument())
    return ('percent', tree) if self.accept('%') else tree

  def atom(self) -> Tree:
    token = self.next()
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
      name = f'{token}_{self.argument()}' if self.accept('_') else token
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


def plain(tree: Tree) -> Fraction | None:
  """Returns the value of a number in its usual notation, or None.

  The usual notations, with at most one sign, are an integer, a decimal, a fraction of
  these, a mixed number, a power of ten with or without a factor, and a percentage.
  """
  match tree:
    case ('neg', inner) if inner[0] != 'neg':
      value = plain(inner)
      return None if value is None else -value
    case ('percent', inner) if inner[0] != 'percent':
      value = plain(inner)
      return None if value is None else value / 100
    case ('num', value) | ('mixed', value):
      return value
    case ('div', top, ('num', bottom)) if bottom != 0:
      sign, top = (-1, top[1]) if top[0] == 'neg' else (1, top)
      return sign * top[1] / bottom if top[0] == 'num' else None
    case ('mul', ('num', factor), ('pow', *_) as power):
      value = plain(power)
      return None if value is None else factor * value
    case ('pow', ('num', base), exponent) if base == 10:
      number = plain(exponent)
      if number is None or number.denominator != 1 or abs(number) > LARGEST_EXPONENT:
        return None
      return Fraction(10) ** int(number)
  return None


def symbols(tree: Tree) -> set[str]:
  """Returns the names of the variables in a tree."""
  if tree[0] == 'sym':
    return {tree[1]}
  return set().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


def _flat(tree: Tree, kind: str) -> list[Tree]:
  if tree[0] != kind:
    return [tree]
  return [part for inner in tree[1:] for part in _flat(inner, kind)]


def _factor_kind(tree: Tree) -> str:  # two factors of one kind can be multiplied
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
  parts = [part for part in tree[1:] if isinstance(part, tuple)]
  match tree:
    case ('add', *_):
      parts = _flat(tree, 'add')
      counts['sum'] += max(0, sum(not symbols(part) for part in parts) - 1)
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


def as_calculated(gold: Tree, given: Tree) -> bool:
  """Returns whether `given` leaves no more operations to carry out than `gold`."""
  if plain(given) is not None:
    return True
  if plain(gold) is not None:
    return False
  allowed, left = operations(gold), operations(given)
  if allowed['root']:
    left['root'] = 0
  return all(n <= allowed[name] for name, n in left.items())


INFINITE = {('inf',), ('neg', ('inf',))}


def equal(gold: Tree, given: Tree, digits: int) -> bool:
  """Returns whether two trees without variables have the same finite value.

  Compares plain numbers exactly, others to `digits` decimal digits. More than 3 digits
  per character of both texts are enough to tell an irrational number from each fraction
  that can be written in so few characters.
  """
  if 'base' in (gold[0], given[0]) or {gold, given} & INFINITE:
    return gold == given
  exact = plain(gold), plain(given)
  if None not in exact:
    return exact[0] == exact[1]
  with mpmath.workdps(digits):
    try:
      a, b = _value(gold), _value(given)
    except (ValueError, OverflowError, ZeroDivisionError):
      return False
    # One fifth of the digits is a margin for rounding errors, which are smaller.
    close = mpmath.mpf(10) ** (-digits + digits // 5)
    return bool(abs(a - b) <= close * max(1, abs(a)))


def _value(tree: Tree) -> Any:
  match tree:
    case ('num', number) | ('mixed', number):
      return mpmath.mpf(number.numerator) / number.denominator
    case ('const', name):
      return {'π': mpmath.pi(), 'e': mpmath.e(), 'i': mpmath.mpc(0, 1)}[name]
    case ('neg', inner):
      return -_value(inner)
    case ('percent', inner):
      return _value(inner) / 100
    case ('add', *terms):
      return sum(map(_value, terms), mpmath.mpf(0))
    case ('mul', left, right):
      return _value(left) * _value(right)
    case ('div', top, bottom):
      return _value(top) / _value(bottom)
    case ('pow', base, exponent):
      return _power(_value(base), _value(exponent))
    case ('root', inner, degree):
      value, n = _value(inner), _value(degree)
      if isinstance(value, mpmath.mpf) and value < 0 and n % 2 == 1:
        return -_power(-value, 1 / n)  # the real root, not a complex root
      return _power(value, 1 / n)
  raise ValueError(f'{tree[0]} has no value')


def _power(base: Any, exponent: Any) -> Any:
  if abs(exponent) > 1e6 or abs(base) > mpmath.mpf(10) ** 1000:
    raise ValueError('an exponent is too large')
  if base == 0 and mpmath.re(exponent) <= 0:
    raise ZeroDivisionError
  return mpmath.power(base, exponent)
