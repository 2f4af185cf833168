r"""Trees of numbers and expressions, read from LaTeX in the one spelling (spelling.py).

Trees are tuples whose first entry is the kind: num, mixed, const, sym, inf, base, neg,
add, mul, div, pow, root, percent. What the grammar lacks (sum signs, functions,
factorials, integrals, text) is no tree. Nothing of the text is evaluated by Python.
"""

import re
from fractions import Fraction
from typing import Any

from bapo_jax.rewards.spelling import THOUSANDS

Tree = tuple[Any, ...]

DEEPEST = 40  # brackets in brackets
LARGEST_EXPONENT = 400  # of a power of ten
TOKEN = re.compile(
  rf'(?P<numeral>(?:[0-9]{{1,3}}(?:[,{THOUSANDS}][0-9]{{3}})+(?![0-9])|[0-9]+)'
  r'(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+(?:[eE][+-]?[0-9]{1,3})?)'
  r'|(?P<command>\\[a-zA-Z]+)|(?P<letter>[a-zA-Z])|(?P<symbol>[-+*/^_(){}%π∞\[\]])'
  r'|(?P<blank> +)'
)
GREEK = re.compile(
  r'\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|'
  r'omega|ell)'
)


def numeral(text: str) -> Fraction:
  """The exact value of a numeral: 1,000.5, .5, 1e2."""
  digits = text.replace(',', '').replace(THOUSANDS, '').lower()
  number, _, exponent = digits.partition('e')
  if abs(int(exponent or 0)) > LARGEST_EXPONENT or len(number) > 1000:
    raise ValueError(f'{text[:20]} is too large a number')
  return Fraction(number.rstrip('.')) * Fraction(10) ** int(exponent or 0)


def parse(text: str) -> Tree:
  """The tree of an expression.

  Raises:
    ValueError: the text is none of this grammar.
  """
  tokens: list[str] = []
  end = 0
  text = text.strip()
  while end < len(text):
    found = TOKEN.match(text, end)
    if not found:
      raise ValueError(f'{text[end : end + 10]!r} stands in no number')
    end = found.end()
    if found.lastgroup != 'blank':
      word = found[0]
      named = re.fullmatch(r'\\text', word) and re.match(r' *\{ *(i|e) *\}', text[end:])
      if named:  # \mathrm{i}
        word, end = named[1], end + named.end()
      tokens.append(word)
  return _Parser(tokens).whole()


class _Parser:
  """Recursive descent over tokens."""

  def __init__(self, tokens: list[str]):
    self.tokens, self.at, self.depth = tokens, 0, 0

  def peek(self) -> str:
    return self.tokens[self.at] if self.at < len(self.tokens) else ''

  def next(self) -> str:
    self.at += 1
    return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ''

  def expect(self, token: str) -> None:
    if self.next() != token:
      raise ValueError(f'{token!r} is missing')

  def whole(self) -> Tree:
    tree = self.sum()
    if self.peek():
      raise ValueError(f'{self.peek()!r} is out of place')
    return tree

  def sum(self) -> Tree:
    self.depth += 1
    if self.depth > DEEPEST:
      raise ValueError(f'more than {DEEPEST} brackets in brackets')
    terms = [self.signed()]
    while self.peek() in ('+', '-'):
      negative = self.next() == '-'
      term = self.term()
      terms.append(('neg', term) if negative else term)
    self.depth -= 1
    return terms[0] if len(terms) == 1 else ('add', *terms)

  def signed(self) -> Tree:
    sign = self.next() if self.peek() in ('+', '-') else ''
    term = self.term()
    return ('neg', term) if sign == '-' else term

  def term(self) -> Tree:
    tree = self.factor()
    while True:
      token = self.peek()
      if token in ('*', '/'):
        self.next()
        right = self.factor()
        tree = ('mul', tree, right) if token == '*' else ('div', tree, right)
      elif token and token not in ('+', '-', ')', '}', ']', '^', '_', '%', '∞'):
        tree = self.beside(tree, token)
      else:
        return tree

  def beside(self, left: Tree, token: str) -> Tree:
    """Two factors without a sign between them; a numeral stands first, or alone."""
    if token[0] in '0123456789.{[':
      raise ValueError('two numbers side by side')
    right = self.factor()
    if token == r'\frac' and _integer(left) and _fraction(right):
      return ('mixed', left[1] + right[1][1] / right[2][1])
    return ('mul', left, right)

  def factor(self) -> Tree:
    tree = self.atom()
    if self.peek() == '^':
      self.next()
      tree = ('pow', tree, self.argument())
    if self.peek() == '%':
      self.next()
      tree = ('percent', tree)
    return tree

  def atom(self) -> Tree:
    token = self.next()
    if token and (token[0].isdigit() or token[0] == '.'):
      if self.peek() != '_':
        return ('num', numeral(token))
      self.next()
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
      top, bottom = self.argument(), self.argument()
      return ('div', top, bottom)
    if token == r'\sqrt':
      return self.root()
    if token.isalpha() or GREEK.fullmatch(token):
      return self.variable(token)
    raise ValueError(f'{token!r} stands in no number')

  def root(self) -> Tree:
    degree: Tree = ('num', Fraction(2))
    if self.peek() == '[':
      self.next()
      degree = self.sum()
      self.expect(']')
    return ('root', self.argument(), degree)

  def variable(self, name: str) -> Tree:
    if self.peek() == '_':
      self.next()
      name = f'{name}_{self.argument()}'
    if self.peek() == '(' and name in ('f', 'g', 'h'):
      raise ValueError('a function stands in no number')
    return ('sym', name)

  def argument(self) -> Tree:
    r"""What stands in braces, or one digit, letter or command: \frac12."""
    token = self.peek()
    if token == '{':
      return self.atom()
    if len(token) > 1 and token.isdigit():
      self.tokens[self.at] = token[1:]
      return ('num', Fraction(int(token[0])))
    if token in ('', '(', '-', '+', '*', '/'):
      raise ValueError('an argument is missing')
    return self.atom()


def _integer(tree: Tree) -> bool:
  return tree[0] == 'num' and tree[1].denominator == 1


def _fraction(tree: Tree) -> bool:
  return tree[0] == 'div' and all(map(_integer, tree[1:])) and tree[2][1] != 0
