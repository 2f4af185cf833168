r"""Compares expressions with variables; the only module that imports math-verify.

math-verify receives the content of a box and never searches a response for a box.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable

import mpmath

from bapo_jax.rewards.latex.spelling import LETTERS

NUMERAL = re.compile(r'[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,3})?')


def _numeral(s, *_, **__):
  """Converts a numeral to a sympy number; evaluates nothing and rejects other text."""
  import sympy

  if s.isascii() and s.isdigit():
    return sympy.Integer(int(s))
  if not NUMERAL.fullmatch(s):
    raise ValueError(f'{s[:40]!r} is not a numeral')
  return sympy.Float(s)


@functools.cache
def _math_verify():
  """Imports math-verify, without Python's eval and with comparisons made exact."""
  import math_verify
  import sympy.physics.units  # noqa: F401 (names its units by parse_expr)
  from math_verify import grader
  from sympy.parsing import sympy_parser

  # latex2sympy passes numerals as strings to parse_expr, which evaluates any string.
  sympy_parser.parse_expr = _numeral
  for name in ('sympy_numeric_eq', 'sympy_symbolic_eq'):
    setattr(grader, name, functools.partial(_exactly, getattr(grader, name)))
  return math_verify


def _exactly(equal: Callable[..., bool], a, b, *digits):
  """Compares by a function of math-verify, and confirms numbers that it finds equal.

  math-verify alone takes 2^100 + 0.5 for 2^100, because decimals are floats, and 1/19!
  for 2/19!, because numbers below 10^-15 are 0 in its expressions. A decimal that is a
  whole answer is still rounded. `digits` are the arguments of the numeric comparison.
  """
  import sympy
  from math_verify.grader import is_atomic_or_pct_atomic as is_atomic

  a, b = (
    x if is_atomic(x, sympy.Float) else sympy.nsimplify(x, rational=True)
    for x in (a, b)
  )
  if not equal(a, b, *digits):
    return False
  # The symbolic comparison is exact, and so is that of a single number. The entries of
  # a matrix were compared by this function.
  if (
    not digits
    or a.is_Matrix
    or is_atomic(a, sympy.Number)
    or is_atomic(b, sympy.Number)
  ):
    return True
  difference = (a - b).doit()
  places = 50  # more than the digits of all parts of the difference together
  for part in sympy.preorder_traversal(difference):
    if part.is_number:
      size = abs(sympy.N(part.p * part.q if part.is_Rational else part))
      places += abs(int(mpmath.log10(size or 1)))
  value = difference.evalf(2 * places)
  floats = value.atoms(sympy.Float)
  return value.xreplace({x: 0 for x in floats if abs(x) * 10**places < 1}) == 0


def _read(latex):
  """Returns the LaTeX as a sympy object (None: not parsable) and as normalised text."""
  from latex2sympy2_extended import latex2sympy, normalize_latex
  from math_verify.grader import should_treat_as_complex

  config = _math_verify().LatexExtractionConfig().normalization_config
  text = normalize_latex(latex, dataclasses.replace(config, boxed='none'))
  try:
    real = not should_treat_as_complex(text)
    parsed = latex2sympy(
      text, is_real=real, convert_degrees=False, normalization_config=None
    )
  except MemoryError:
    raise  # the worker process must be replaced
  except Exception:  # the parser raises many types
    parsed = None
  return parsed, text


def equivalent(answer: str, response: str) -> bool:
  """Returns whether math-verify finds two LaTeX expressions equal; may never return.

  Uses only the LaTeX grammar of math-verify: its parser of plain expressions calls
  eval. Text that the grammar cannot parse is compared character by character. A timeout
  of 0 disables the alarm of math-verify, which works only in the main thread.
  """
  math_verify = _math_verify()
  (gold, gold_text), (parsed, response_text) = _read(answer), _read(response)
  if gold is None or parsed is None:
    return bool(gold_text.strip()) and gold_text.strip() == response_text.strip()
  return math_verify.verify(gold, parsed, timeout_seconds=0, raise_on_error=True)


VARIABLES = re.compile(
  rf'\\(?:{LETTERS}|phi|varphi)(?![a-zA-Z])|(?<![a-zA-Z\\])[a-zA-Z]'
)
PARTS = re.compile(r'\\[a-zA-Z]+|[a-zA-Z]{2,}|[!|<>=≤≥≠±∈\u222a?\'"&;]')
HARMLESS = {r'\frac', r'\sqrt'}
DOT = re.compile(r'\\cdot *(?=[a-zA-Z]|\\(?!frac|sqrt|cdot))')  # not before a number


def no_new_parts(answer: str, response: str) -> bool:
  """Returns whether `answer` has all functions, signs and variables of `response`.

  `response` may have a function or sign at most as often as `answer`: an integral, a
  sum sign or a determinant that `answer` lacks was left uncalculated. A dot before a
  variable or a function is no sign: it leaves nothing to calculate.
  """
  answer, response = (DOT.sub(' ', text) for text in (answer, response))
  count = collections.Counter
  extra = count(PARTS.findall(response)) - count(PARTS.findall(answer))
  new = set(VARIABLES.findall(response)) - set(VARIABLES.findall(answer))
  return not (new or set(extra) - HARMLESS)
