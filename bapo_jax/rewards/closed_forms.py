"""What a tree (latex_trees.py) is worth, and what it leaves to be calculated.

1. `plain` is the exact value of a number as one writes it down;
2. `operations` counts what is left to be calculated;
3. `equal` compares trees without variables, to more digits than they could agree in.
"""

import collections
from fractions import Fraction
from typing import Any

from bapo_jax.rewards.latex_trees import LARGEST_EXPONENT, Tree


def plain(tree: Tree) -> Fraction | None:
  """The value of a number as one writes it down; None of anything else.

  An integer, decimal, fraction of two of these, mixed number, power of ten with or
  without a factor, or percentage, with at most one sign.
  """
  match tree:
    case ('neg', ('neg', *_)):
      return None
    case ('neg', inner):
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
  """Names of the variables."""
  if tree[0] == 'sym':
    return {tree[1]}
  return set().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


def _flat(tree: Tree, kind: str) -> list[Tree]:
  """The terms of a sum, or the factors of a product, in brackets or not."""
  if tree[0] != kind:
    return [tree]
  return [part for inner in tree[1:] for part in _flat(inner, kind)]


def _sort_of_factor(tree: Tree) -> str:
  if plain(tree) is not None:
    return 'number'
  if tree[0] == 'root' or (tree[0] == 'pow' and plain(tree[1]) is not None):
    return 'root'
  return tree[1] if tree[0] == 'const' else ''


def operations(tree: Tree) -> collections.Counter[str]:
  """What is left to be calculated: sums, products, powers, roots, fractions, signs.

  Only what could be carried out counts: 2x + 3 has no sum, 2 + 3 has one; 2 sqrt(3) has
  no product, 2 * 3 has one.
  """
  found: collections.Counter[str] = collections.Counter()
  if plain(tree) is not None or tree[0] in ('sym', 'const', 'inf', 'base'):
    return found
  parts = [part for part in tree[1:] if isinstance(part, tuple)]
  match tree:
    case ('add', *_):
      parts = _flat(tree, 'add')
      found['sum'] += max(0, sum(not symbols(part) for part in parts) - 1)
    case ('mul', *_):
      parts = _flat(tree, 'mul')
      sorts = collections.Counter(map(_sort_of_factor, parts))
      found['product'] += sum(n - 1 for sort, n in sorts.items() if sort)
    case ('div', top, bottom):
      found['fraction'] += 'div' in (top[0], bottom[0])
    case ('neg', inner):
      found['sign'] += inner[0] == 'neg'
    case ('root', inner, _):
      found['root'] += 1
      found['root in root'] += operations(inner)['root']
    case ('pow', base, exponent) if not symbols(base):
      number = plain(exponent)
      whole = number is not None and number.denominator == 1
      found['power' if whole or symbols(exponent) else 'root'] += 1
    case ('percent', *_):
      found['percent'] += 1
  return sum((operations(part) for part in parts), found)


def no_more_to_do(gold: Tree, given: Tree) -> bool:
  """Whether `given` is calculated as far as the right answer is."""
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
  """Whether two trees without variables are one number.

  Args:
    digits: to compare, where they are not both plain; more than three times the
      characters of both keep a fraction near an irrational number apart from it.

  Raises:
    ValueError: an exponent is too large, or a divisor 0.
  """
  if 'base' in (gold[0], given[0]):
    return gold == given
  if {gold, given} & INFINITE:
    return gold == given
  exact = plain(gold), plain(given)
  if None not in exact:
    return exact[0] == exact[1]
  import mpmath

  with mpmath.workdps(digits):
    a, b = _value(gold), _value(given)
    # A third of the digits is left to rounding, which takes a few.
    close = mpmath.mpf(10) ** (-digits + digits // 5)
    return bool(abs(a - b) <= close * max(1, abs(a)))


def _value(tree: Tree) -> Any:
  """The value as an mpmath number in the precision that is set."""
  import mpmath

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
      divisor = _value(bottom)
      if divisor == 0:
        raise ValueError('a divisor is 0')
      return _value(top) / divisor
    case ('pow', base, exponent):
      return _power(_value(base), _value(exponent))
    case ('root', inner, degree):
      value, inverse = _value(inner), _value(degree)
      if inverse == 0:
        raise ValueError('a divisor is 0')
      if isinstance(value, mpmath.mpf) and value < 0 and inverse % 2 == 1:
        return -_power(-value, 1 / inverse)  # the real root
      return _power(value, 1 / inverse)
  raise ValueError(f'{tree[0]} has no value')


def _power(base: Any, exponent: Any) -> Any:
  import mpmath

  if abs(exponent) > 1e6 or abs(base) > mpmath.mpf(10) ** 1000:
    raise ValueError('an exponent is too large')
  if base == 0 and mpmath.re(exponent) <= 0:
    raise ValueError('a divisor is 0')
  return mpmath.power(base, exponent)
